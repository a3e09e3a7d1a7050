"""Wrappers for on-device environments: functions from Environment to Environment.

A wrapper's state is `inner=(child's inner, own)`. Its timestep is the child's, and the wrapper may change
it. Therefore a `step` may read from the old timestep only whether the episode ended, and from the old
metrics only those that the wrapper itself wrote.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from seedbed.physics.model import REPLACEABLE, Model
from seedbed.types import Array, ArraySpec, Box, Environment, EnvSpec, EnvState, SeedbedError, Tree


def time_limit(env: Environment, steps: int) -> Environment:
    """Adds a time limit: episodes are truncated after `steps` steps. The last step may also terminate.

    Raises SeedbedError if `steps` is below 1.
    """
    if steps < 1:
        raise SeedbedError(f"time_limit: {steps} steps; give at least 1, or leave the wrapper out")
    return _TimeLimit(env, steps)


def auto_reset(env: Environment) -> Environment:
    """Adds next-step auto-reset: the step after an end ignores its action and opens a new episode.

    That step has reward 0 and `first` set. The wrapper carries a key, from which it draws each opening
    state, so that episodes start differently.
    """
    return _AutoReset(env)


def limited(env: Environment) -> Environment:
    """Adds the environment's own time limit, if it has one."""
    return time_limit(env, env.episode_steps) if env.episode_steps else env


def training(env: Environment) -> Environment:
    """Adds the environment's own time limit, if it has one, and next-step auto-reset."""
    return auto_reset(limited(env))


def resets_itself(env: Environment) -> bool:
    """Returns whether `auto_reset` is among an environment's wrappers."""
    return isinstance(env, _Wrapper) and (isinstance(env, _AutoReset) or resets_itself(env.env))


def scale_reward(env: Environment, factor: float) -> Environment:
    """Multiplies rewards by `factor`; raises SeedbedError unless it is finite."""
    if not math.isfinite(factor):
        raise SeedbedError(f"scale_reward: the factor is {factor}; give a finite number")
    return _ScaleReward(env, factor)


def clip_action(env: Environment) -> Environment:
    """Clips actions to the bounds of the spec before the environment sees them.

    Raises SeedbedError if the actions are not a Box.
    """
    if not isinstance(env.spec.action, Box):
        raise SeedbedError(
            f"clip_action: the actions of {type(env).__name__} are {env.spec.action}, which has no "
            "bounds; leave the wrapper out"
        )
    return _ClipAction(env)


def normalise_observation(env: Environment) -> Environment:
    """Shifts and scales observations by their running mean and variance.

    As in Gymnasium's NormalizeObservation, each environment has its own statistics, opening observations
    count, and resets keep the statistics. Raises SeedbedError if an observation is not float32.
    """
    for path, leaf in jax.tree.leaves_with_path(env.spec.observation):
        if leaf.dtype != "float32":
            raise SeedbedError(
                f"normalise_observation: observation{jax.tree_util.keystr(path)} of "
                f"{type(env).__name__} is {leaf.dtype}; only float32 can be normalised"
            )
    return _NormaliseObservation(env)


def episode_statistics(env: Environment) -> Environment:
    """Adds the metrics `episode_return` and `episode_length`, for the episode so far.

    The return is the sum of the rewards that this wrapper receives. Both are 0 in an opening state.
    """
    return _EpisodeStatistics(env)


def with_integrator(env: Environment, integrator: str) -> Environment:
    """Returns the environment with another `integrator` in the MuJoCo task inside its wrappers.

    Raises SeedbedError if the task has no such option, or if it has its own `model`, which would override
    the option.
    """
    if isinstance(env, _Wrapper):
        return dataclasses.replace(env, env=with_integrator(env.env, integrator))
    if not hasattr(env, "integrator"):
        raise SeedbedError(f"{type(env).__name__} has no option integrator: only MuJoCo tasks have")
    if getattr(env, "model", None) is not None:
        raise SeedbedError(
            f"{type(env).__name__} has a model of its own, which has its integrator: change that one"
        )
    return dataclasses.replace(env, integrator=integrator)  # type: ignore[type-var]


def randomise(env: Environment, ranges: Mapping[str, tuple[float, float]]) -> Environment:
    """Draws new physics for each episode: multiplies leaves of the model by random factors.

    Every element of a leaf, such as `body_mass` `[nbody]` or `geom_friction` `[ngeom, 3]`, has its own
    factor, uniform between the two bounds. This must be the innermost wrapper. Raises SeedbedError if `env`
    is not a MuJoCo task, if a leaf cannot be varied, or if the bounds are not positive and in order.
    """
    if not hasattr(env, "physics_model"):
        raise SeedbedError(
            f"randomise: {type(env).__name__} has no physics_model(); wrap a MuJoCo task, and wrap it "
            "in this before anything else"
        )
    for name, bounds in ranges.items():
        if name not in REPLACEABLE:
            near = difflib.get_close_matches(name, REPLACEABLE, n=1, cutoff=0.0)[0]
            raise SeedbedError(
                f"randomise: the model's {name!r} cannot be varied; did you mean {near!r}? "
                f"Known are {', '.join(REPLACEABLE)}"
            )
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] < math.inf:
            raise SeedbedError(
                f"randomise: the range of {name!r} is {bounds}; give two positive factors, the lower "
                "first"
            )
    pairs = sorted(ranges.items())
    return _Randomise(env, tuple((name, float(low), float(high)) for name, (low, high) in pairs))


@dataclasses.dataclass(frozen=True)
class _Wrapper:
    """A base class for wrappers; on its own it changes nothing."""

    env: Environment

    @property
    def spec(self) -> EnvSpec:
        return self.env.spec

    @property
    def episode_steps(self) -> int:
        return self.env.episode_steps

    @property
    def frame_skip(self) -> int:
        return self.env.frame_skip

    def reset(self, key: Array) -> EnvState:
        return self.reopen(key, None)

    def reopen(self, key: Array, last: EnvState | None) -> EnvState:
        """Opens an episode after the state `last`, or the first one if `last` is None; consumes the key.

        A wrapper may carry parts of `last` over into the new episode.
        """
        child, own = (None, None) if last is None else _unwrap(last)
        return self._opened(_reopen(self.env, key, child), own)

    def step(self, state: EnvState, action: Array) -> EnvState:
        child, own = _unwrap(state)
        return self._stepped(self.env.step(child, action), own, state.metrics)

    def _opened(self, child: EnvState, own: Tree) -> EnvState:
        """Wraps the opening state; `own` is the wrapper's state before it, or None if there was none."""
        return _wrap(child, ())

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        """Wraps the state after a step; `own` and `metrics` are those before the step."""
        return _wrap(child, ())


def _wrap(child: EnvState, own: Tree) -> EnvState:
    return child._replace(inner=(child.inner, own))


def _unwrap(state: EnvState) -> tuple[EnvState, Tree]:
    inner, own = state.inner
    return state._replace(inner=inner), own


def _reopen(env: Environment, key: Array, last: EnvState | None) -> EnvState:
    return env.reopen(key, last) if isinstance(env, _Wrapper) else env.reset(key)


@dataclasses.dataclass(frozen=True)
class _TimeLimit(_Wrapper):
    """The wrapper of `time_limit`; its state is the number of steps in the episode, int32."""

    steps: int

    @property
    def episode_steps(self) -> int:
        return self.steps

    def _opened(self, child: EnvState, own: Tree) -> EnvState:
        return _wrap(child, jnp.int32(0))

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        arrived = child.timestep
        # `first` can be set here only if there is an auto-reset inside this wrapper.
        count = jnp.where(arrived.first, 0, own + 1)
        truncated = arrived.truncated | (count >= self.steps)
        return _wrap(child._replace(timestep=arrived._replace(truncated=truncated)), count)


@dataclasses.dataclass(frozen=True)
class _AutoReset(_Wrapper):
    """The wrapper of `auto_reset`; its state is the key from which the next episode is drawn."""

    def reopen(self, key: Array, last: EnvState | None) -> EnvState:
        key, opening = jax.random.split(key)
        child = None if last is None else _unwrap(last)[0]
        return _wrap(_reopen(self.env, opening, child), key)

    def step(self, state: EnvState, action: Array) -> EnvState:
        child, key = _unwrap(state)
        ended: Array = state.timestep.terminated | state.timestep.truncated
        stepped = _wrap(self.env.step(child, action), key)
        opened = self.reopen(key, state)
        _check(self.env, "reset", opened, opened)
        _check(self.env, "step", stepped, opened)
        # The rare case is the first operand: simd then skips it unless a lane needs it.
        return jax.tree.map(lambda new, old: jnp.where(ended, new, old), opened, stepped)


def _check(env: Environment, call: str, state: EnvState, opened: EnvState) -> None:
    """Raises SeedbedError unless a state has the shapes of the spec and of the opening state."""
    innermost = env
    while isinstance(innermost, _Wrapper):
        innermost = innermost.env
    name_of_env = type(innermost).__name__

    def expect(part: str, given: Tree, expected: Tree) -> None:
        found = jax.tree.map(lambda leaf: ArraySpec(jnp.shape(leaf), str(leaf.dtype)), given)
        if found != expected:
            raise SeedbedError(f"{name_of_env}.{call}: {part} is {found}, not {expected}")

    arrived = jax.tree.map(jnp.asarray, state.timestep)
    expect("the observation", arrived.observation, env.spec.observation)
    expect("the reward", arrived.reward, ArraySpec((), "float32"))
    for name in ("terminated", "truncated", "first"):
        expect(name, getattr(arrived, name), ArraySpec((), "bool"))
    for name, value in state.metrics.items():
        expect(f"the metric {name!r}", jnp.asarray(value), ArraySpec((), "float32"))
    if sorted(state.metrics) != sorted(opened.metrics):
        raise SeedbedError(
            f"{name_of_env}: metrics after reset are {sorted(opened.metrics)}, after step "
            f"{sorted(state.metrics)}; give the same"
        )
    shapes = [
        jax.tree.map(lambda leaf: jax.typeof(leaf).str_short(), part.inner)
        for part in (opened, state)
    ]
    if shapes[0] != shapes[1]:
        raise SeedbedError(
            f"{name_of_env}: `inner` after reset is {shapes[0]}, after step {shapes[1]}; "
            "give the same arrays"
        )


@dataclasses.dataclass(frozen=True)
class _ScaleReward(_Wrapper):
    """The wrapper of `scale_reward`."""

    factor: float

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        reward = child.timestep.reward * jnp.float32(self.factor)
        return _wrap(child._replace(timestep=child.timestep._replace(reward=reward)), ())


@dataclasses.dataclass(frozen=True)
class _ClipAction(_Wrapper):
    """The wrapper of `clip_action`."""

    def step(self, state: EnvState, action: Array) -> EnvState:
        box: Any = self.env.spec.action
        low, high = (
            jnp.asarray(bound, jnp.float32).reshape(box.shape) for bound in (box.low, box.high)
        )
        return super().step(state, jnp.clip(action, low, high))


@dataclasses.dataclass(frozen=True)
class _NormaliseObservation(_Wrapper):
    """The wrapper of `normalise_observation`; its state is (count, means, variances).

    They start at 1e-4, 0 and 1, as in Gymnasium.
    """

    def _opened(self, child: EnvState, own: Tree) -> EnvState:
        if own is None:
            observation = child.timestep.observation
            zeros, ones = (jax.tree.map(f, observation) for f in (jnp.zeros_like, jnp.ones_like))
            own = (jnp.float32(1e-4), zeros, ones)
        return self._normalised(child, own)

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        return self._normalised(child, own)

    def _normalised(self, child: EnvState, own: Tree) -> EnvState:
        count, mean, variance = own
        observation, total = child.timestep.observation, count + 1
        mean_now = jax.tree.map(lambda m, x: m + (x - m) / total, mean, observation)
        variance = jax.tree.map(
            lambda v, m, x: (v + jnp.square(x - m) / total) * (count / total),
            variance,
            mean,
            observation,
        )
        scaled = jax.tree.map(
            lambda x, m, v: (x - m) * jax.lax.rsqrt(v + 1e-8), observation, mean_now, variance
        )
        timestep = child.timestep._replace(observation=scaled)
        return _wrap(child._replace(timestep=timestep), (total, mean_now, variance))


@dataclasses.dataclass(frozen=True)
class _EpisodeStatistics(_Wrapper):
    """The wrapper of `episode_statistics`; it keeps its sums in the metrics and has no other state."""

    def _opened(self, child: EnvState, own: Tree) -> EnvState:
        return _wrap(_with_statistics(child, jnp.float32(0), jnp.float32(0)), ())

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        arrived = child.timestep
        total = jnp.where(arrived.first, 0, metrics["episode_return"] + arrived.reward)
        length = jnp.where(arrived.first, 0, metrics["episode_length"] + 1)
        return _wrap(_with_statistics(child, total, length), ())


def _with_statistics(child: EnvState, total: Array, length: Array) -> EnvState:
    return child._replace(
        metrics={**child.metrics, "episode_return": total, "episode_length": length}
    )


@dataclasses.dataclass(frozen=True)
class _Randomise(_Wrapper):
    """The wrapper of `randomise`; its state is the factors of this episode, by the leaf's name."""

    ranges: tuple[tuple[str, float, float], ...]

    def reopen(self, key: Array, last: EnvState | None) -> EnvState:
        key, drawing = jax.random.split(key)
        model: Model = self.env.physics_model()  # type: ignore[attr-defined]
        keys = jax.random.split(drawing, len(self.ranges))
        factors = {
            name: jax.random.uniform(keys[i], jnp.shape(getattr(model, name)), None, low, high)
            for i, (name, low, high) in enumerate(self.ranges)
        }
        return _wrap(self._varied(factors).reset(key), factors)

    def step(self, state: EnvState, action: Array) -> EnvState:
        child, factors = _unwrap(state)
        return _wrap(self._varied(factors).step(child, action), factors)

    def _varied(self, factors: dict[str, Array]) -> Environment:
        """Returns the task with a model whose leaves are multiplied by the factors."""
        model: Model = self.env.physics_model()  # type: ignore[attr-defined]
        leaves = {
            name: jnp.asarray(getattr(model, name), jnp.float32) * factor
            for name, factor in factors.items()
        }
        return dataclasses.replace(self.env, model=model.replace(**leaves))  # type: ignore[type-var]
