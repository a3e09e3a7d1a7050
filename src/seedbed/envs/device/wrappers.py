"""Wrappers for on-device environments: functions from Environment to Environment.

A wrapper's state is `inner=(child's inner, own)`. Its timestep is the child's, and the wrapper may change
it. Therefore a `step` may read from the old timestep only whether the episode ended, and from the old
metrics only those that the wrapper itself wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from seedbed import trees
from seedbed.ops.tracing import naming
from seedbed.types import (
    Array,
    ArraySpec,
    Box,
    Discrete,
    Environment,
    EnvSpec,
    EnvState,
    MultiDiscrete,
    SeedbedError,
    Tree,
)

_GUIDE = "docs/write-a-task.md"
_DTYPES = ("float32", "int32", "uint32", "bool")


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
    state, so that episodes start differently. Raises SeedbedError if the environment's spec has what
    cannot be on the device, and while it is traced, if a reset or step does not return what the spec says.
    """
    _require_spec(_task_name(env), env.spec)
    return _AutoReset(env)


def limited(env: Environment) -> Environment:
    """Adds the environment's own time limit, if it has one."""
    return time_limit(env, env.episode_steps) if env.episode_steps else env


def training(env: Environment) -> Environment:
    """Adds the environment's own time limit, if it has one, and next-step auto-reset."""
    return auto_reset(limited(env))


def resets_itself(env: Environment) -> bool:
    """Returns whether `auto_reset` is among an environment's wrappers."""
    return isinstance(env, Wrapper) and (isinstance(env, _AutoReset) or resets_itself(env.env))


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
    if isinstance(env, Wrapper):
        return dataclasses.replace(env, env=with_integrator(env.env, integrator))
    if not hasattr(env, "integrator"):
        raise SeedbedError(f"{type(env).__name__} has no option integrator: only MuJoCo tasks have")
    if getattr(env, "model", None) is not None:
        raise SeedbedError(
            f"{type(env).__name__} has a model of its own, which has its integrator: change that one"
        )
    return dataclasses.replace(env, integrator=integrator)  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """A base class for wrappers; on its own it changes nothing."""

    env: Environment

    @property
    def spec(self) -> EnvSpec:
        """Returns the child's observations and actions."""
        return self.env.spec

    @property
    def episode_steps(self) -> int:
        """Returns the child's number of steps after which an episode is truncated; 0 is never."""
        return self.env.episode_steps

    @property
    def frame_skip(self) -> int:
        """Returns the child's number of simulator frames in one step."""
        return self.env.frame_skip

    def reset(self, key: Array) -> EnvState:
        """Opens the first episode; consumes the key."""
        return self.reopen(key, None)

    def reopen(self, key: Array, last: EnvState | None) -> EnvState:
        """Opens an episode after the state `last`, or the first one if `last` is None; consumes the key.

        A wrapper may carry parts of `last` over into the new episode.
        """
        child, own = (None, None) if last is None else unwrapped(last)
        return self._opened(reopen_child(self.env, key, child), own)

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Takes an action in the child, and wraps the state after it."""
        child, own = unwrapped(state)
        return self._stepped(step_child(self.env, child, action), own, state.metrics)

    def _opened(self, child: EnvState, own: Tree) -> EnvState:
        """Wraps the opening state; `own` is the wrapper's state before it, or None if there was none."""
        return wrapped(child, ())

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        """Wraps the state after a step; `own` and `metrics` are those before the step."""
        return wrapped(child, ())


def wrapped(child: EnvState, own: Tree) -> EnvState:
    """Returns the state of a wrapper, whose own part is `own`, around its child's state."""
    return child._replace(inner=(child.inner, own))


def unwrapped(state: EnvState) -> tuple[EnvState, Tree]:
    """Returns the child's state and the wrapper's own part; timestep and metrics are the wrapper's."""
    inner, own = state.inner
    return state._replace(inner=inner), own


def reopen_child(env: Environment, key: Array, last: EnvState | None) -> EnvState:
    """Opens an episode in a wrapper, after the state `last` if there was one, or in a task; consumes the key.

    Raises SeedbedError, which names the task's method, if that fails or returns no EnvState.
    """
    if isinstance(env, Wrapper):
        return env.reopen(key, last)
    return _returned(f"{type(env).__name__}.reset", lambda: env.reset(key))


def step_child(env: Environment, state: EnvState, action: Array) -> EnvState:
    """Takes an action in a wrapper or in a task.

    Raises SeedbedError, which names the task's method, if that fails or returns no EnvState.
    """
    if isinstance(env, Wrapper):
        return env.step(state, action)
    return _returned(f"{type(env).__name__}.step", lambda: env.step(state, action))


@dataclasses.dataclass(frozen=True)
class _TimeLimit(Wrapper):
    """The wrapper of `time_limit`; its state is the number of steps in the episode, int32."""

    steps: int

    @property
    def episode_steps(self) -> int:
        return self.steps

    def _opened(self, child: EnvState, own: Tree) -> EnvState:
        return wrapped(child, jnp.int32(0))

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        arrived = child.timestep
        # `first` can be set here only if there is an auto-reset inside this wrapper.
        count = jnp.where(arrived.first, 0, own + 1)
        truncated = arrived.truncated | (count >= self.steps)
        return wrapped(child._replace(timestep=arrived._replace(truncated=truncated)), count)


@dataclasses.dataclass(frozen=True)
class _AutoReset(Wrapper):
    """The wrapper of `auto_reset`; its state is the key from which the next episode is drawn."""

    def reopen(self, key: Array, last: EnvState | None) -> EnvState:
        key, opening = jax.random.split(key)
        child = None if last is None else unwrapped(last)[0]
        opened = reopen_child(self.env, opening, child)
        _require_state(f"{_task_name(self.env)}.reset", self.spec, opened)
        return wrapped(opened, key)

    def step(self, state: EnvState, action: Array) -> EnvState:
        child, key = unwrapped(state)
        ended: Array = state.timestep.terminated | state.timestep.truncated
        after, name = step_child(self.env, child, action), _task_name(self.env)
        _require_state(f"{name}.step", self.spec, after)
        stepped, opened = wrapped(after, key), self.reopen(key, state)
        _require_same(name, opened, stepped)
        # The rare case is the first operand: simd then skips it unless a lane needs it.
        return jax.tree.map(lambda new, old: jnp.where(ended, new, old), opened, stepped)


def _task_name(env: Environment) -> str:
    while isinstance(env, Wrapper):
        env = env.env
    return type(env).__name__


@dataclasses.dataclass(frozen=True)
class _EpisodeStatistics(Wrapper):
    """The wrapper of `episode_statistics`; it keeps its sums in the metrics and has no other state."""

    def _opened(self, child: EnvState, own: Tree) -> EnvState:
        return wrapped(_with_statistics(child, jnp.float32(0), jnp.float32(0)), ())

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        arrived = child.timestep
        total = jnp.where(arrived.first, 0, metrics["episode_return"] + arrived.reward)
        length = jnp.where(arrived.first, 0, metrics["episode_length"] + 1)
        return wrapped(_with_statistics(child, total, length), ())


def _with_statistics(child: EnvState, total: Array, length: Array) -> EnvState:
    return child._replace(
        metrics={**child.metrics, "episode_return": total, "episode_length": length}
    )


def _require_spec(name: str, spec: EnvSpec) -> None:
    """Raises SeedbedError unless the task called `name` has a spec that can be on the device."""
    for leaf in trees.leaves(spec.observation):
        if not isinstance(leaf, ArraySpec):
            raise SeedbedError(
                f"{name}.spec: {leaf!r} in the observation is no ArraySpec (see {_GUIDE})"
            )
        if leaf.dtype not in _DTYPES:
            raise SeedbedError(
                f"{name}.spec: the observation has {_shown(leaf)}; on the device give {', '.join(_DTYPES)} "
                f"(images as float32 from 0 to 1; see {_GUIDE})"
            )
    if not isinstance(spec.action, Box | Discrete | MultiDiscrete):
        raise SeedbedError(
            f"{name}.spec: the action is {spec.action!r}, not a Discrete, MultiDiscrete or Box of "
            f"seedbed.types (see {_GUIDE})"
        )


def _returned(method: str, call: Callable[[], EnvState]) -> EnvState:
    """Calls a task's reset or step; raises SeedbedError if it fails or returns something else."""
    with naming(method, _GUIDE):
        state = call()
    if not isinstance(state, EnvState):
        raise SeedbedError(
            f"{method} returned a {type(state).__name__}; return EnvState.opening(...) from reset and "
            f"EnvState.after(...) from step (see {_GUIDE})"
        )
    return state


def _require_state(method: str, spec: EnvSpec, state: EnvState) -> None:
    """Raises SeedbedError unless the state that a reset or step returned is what the spec says."""

    def expect(part: str, given: Tree, expected: Tree, remedy: str) -> None:
        found = jax.tree.map(lambda leaf: ArraySpec(jnp.shape(leaf), str(leaf.dtype)), given)
        if found != expected:
            raise SeedbedError(
                f"{method}: {part} is {_shown(found)}, not {_shown(expected)}; {remedy}"
            )

    arrived = jax.tree.map(jnp.asarray, state.timestep)
    same = "let spec, reset and step agree"
    expect("the observation", arrived.observation, spec.observation, same)
    expect("the reward", arrived.reward, ArraySpec((), "float32"), "return a scalar")
    for flag in ("terminated", "truncated", "first"):
        expect(flag, getattr(arrived, flag), ArraySpec((), "bool"), "return a bool scalar")
    for metric, value in state.metrics.items():
        scalar = ArraySpec((), "float32")
        expect(f"the metric {metric!r}", jnp.asarray(value), scalar, "return a float32 scalar")


def _require_same(name: str, opened: EnvState, stepped: EnvState) -> None:
    """Raises SeedbedError unless reset and step return the same arrays as `inner` and the same metrics."""
    if sorted(stepped.metrics) != sorted(opened.metrics):
        raise SeedbedError(
            f"{name}: metrics after reset are {sorted(opened.metrics)}, after step "
            f"{sorted(stepped.metrics)}; give the same"
        )
    shapes = [
        jax.tree.map(lambda leaf: jax.typeof(leaf).str_short(), part.inner)
        for part in (opened, stepped)
    ]
    if shapes[0] != shapes[1]:
        raise SeedbedError(
            f"{name}: `inner` after reset is {shapes[0]}, after step {shapes[1]}; give the same arrays"
        )


def _shown(tree: Tree) -> str:
    """Returns a text for people: an array as `float32[2,3]`, and trees of them."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {_shown(child)}" for key, child in tree.items()) + "}"
    if isinstance(tree, tuple | list):
        return f"({', '.join(map(_shown, tree))})"
    return f"{tree.dtype}[{','.join(map(str, tree.shape))}]"
