"""Wrappers for on-device environments: functions from Environment to Environment.

A wrapper's state is `inner=(child's inner, own)`. Its timestep is the child's, and the wrapper may change
it. Therefore a `step` may read from the old timestep only whether the episode ended, and from the old
metrics only those that the wrapper itself wrote.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed.envs.specs import shown, spec_of
from seedbed.ops.tracing import naming
from seedbed.types import (
    Array,
    ArraySpec,
    Environment,
    EnvSpec,
    EnvState,
    SeedbedError,
    Tree,
)

_GUIDE = "docs/write-a-task.md"
STATISTICS = ("episode_return", "episode_length")
"""The metrics that `episode_statistics` adds."""


def time_limit(env: Environment, steps: int) -> Environment:
    """Adds a time limit: episodes are truncated after `steps` steps. The last step may also terminate.

    Raises SeedbedError if `steps` is no whole number from 1 to 2^31 - 1, or more than those after which an
    environment of another package ends its episodes itself.
    """
    whole = isinstance(steps, numbers.Integral) and not isinstance(steps, bool)
    if not whole or not 1 <= steps < 2**31:
        raise SeedbedError(
            f"time_limit: {steps!r} steps; give a whole number from 1 to 2^31 - 1, or leave the wrapper out"
        )
    task = innermost(env)
    if getattr(task, "limits_itself", False) and steps > task.episode_steps > 0:
        raise SeedbedError(
            f"time_limit: {steps} steps are more than the {task.episode_steps} after which the environment "
            f"ends its episodes itself; leave the wrapper out and give {type(task).__name__} limit={steps}"
        )
    return _TimeLimit(env, steps)


def auto_reset(env: Environment) -> Environment:
    """Adds next-step auto-reset: the step after an end ignores its action and opens a new episode.

    That step has reward 0 and `first` set. The wrapper carries a key, from which it draws each opening
    state, so that episodes start differently. Raises SeedbedError if the environment's spec has what
    cannot be on the device, and while it is traced, if a reset or step does not return what the spec says.
    """
    spec_of(innermost(env))
    return _AutoReset(env)


def limited(env: Environment) -> Environment:
    """Adds the environment's own time limit, if it has one."""
    return time_limit(env, env.episode_steps) if env.episode_steps else env


def training(env: Environment) -> Environment:
    """Adds the environment's own time limit, if it has one, and next-step auto-reset."""
    return auto_reset(limited(env))


def resets_itself(env: Environment) -> bool:
    """Returns whether `auto_reset` is among an environment's wrappers."""
    return has_wrapper(env, _AutoReset)


def has_wrapper(env: Environment, kind: type[Wrapper]) -> bool:
    """Returns whether a wrapper of this kind is among an environment's."""
    return isinstance(env, Wrapper) and (isinstance(env, kind) or has_wrapper(env.env, kind))


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
    shows_the_task: ClassVar[bool] = False
    """Whether observations and actions are surely the child's own: a policy then suits the child, too."""

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
    shows_the_task: ClassVar[bool] = True

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

    shows_the_task: ClassVar[bool] = True

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


def innermost(env: Environment) -> Environment:
    """Returns the task inside of all wrappers."""
    while isinstance(env, Wrapper):
        env = env.env
    return env


def innermost_state(env: Environment, state: EnvState) -> EnvState:
    """Returns the state of the task inside of all wrappers; timestep and metrics are the outermost's."""
    while isinstance(env, Wrapper):
        env, state = env.env, unwrapped(state)[0]
    return state


def changing(env: Environment) -> list[str]:
    """Returns the names of the wrappers that may change observations or actions, the outermost first."""
    found: list[str] = []
    while isinstance(env, Wrapper):
        if not env.shows_the_task:
            found.append(type(env).__name__.removeprefix("_"))
        env = env.env
    return found


def _task_name(env: Environment) -> str:
    return type(innermost(env)).__name__


@dataclasses.dataclass(frozen=True)
class _EpisodeStatistics(Wrapper):
    """The wrapper of `episode_statistics`; it keeps its sums in the metrics and has no other state."""

    shows_the_task: ClassVar[bool] = True

    def step(self, state: EnvState, action: Array) -> EnvState:
        child, own = unwrapped(state)
        # A task that carries its metrics over must not find these among them.
        mine = {name: x for name, x in state.metrics.items() if name not in STATISTICS}
        after = step_child(self.env, child._replace(metrics=mine), action)
        return self._stepped(after, own, state.metrics)

    def _opened(self, child: EnvState, own: Tree) -> EnvState:
        if taken := sorted(child.metrics.keys() & set(STATISTICS)):
            raise SeedbedError(
                f"{_task_name(self.env)}: its metrics have {' and '.join(taken)}, which the runtime adds: "
                "give them other names, and leave out episode_statistics"
            )
        return wrapped(_with_statistics(child, jnp.float32(0), jnp.float32(0)), ())

    def _stepped(self, child: EnvState, own: Tree, metrics: dict[str, Array]) -> EnvState:
        arrived = child.timestep
        total = jnp.where(arrived.first, 0, metrics["episode_return"] + arrived.reward)
        length = jnp.where(arrived.first, 0, metrics["episode_length"] + 1)
        return wrapped(_with_statistics(child, total, length), ())


def _with_statistics(child: EnvState, total: Array, length: Array) -> EnvState:
    sums = dict(zip(STATISTICS, (total, length), strict=True))
    return child._replace(metrics={**child.metrics, **sums})


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

    for leaf in jax.tree.leaves(state.inner):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)):
            raise SeedbedError(
                f"{method}: `inner` holds {leaf!r}, a {type(leaf).__name__}; keep arrays there, and "
                "what never changes in fields of the task"
            )
    if not isinstance(state.metrics, dict):
        raise SeedbedError(
            f"{method}: metrics are a {type(state.metrics).__name__}; give a dict of float32 scalars"
        )

    def expect(part: str, given: Tree, expected: Tree, remedy: str) -> None:
        found = jax.tree.map(lambda leaf: ArraySpec(jnp.shape(leaf), str(leaf.dtype)), given)
        if found != expected:
            raise SeedbedError(
                f"{method}: {part} is {shown(found)}, not {shown(expected)}; {remedy}"
            )

    arrived = jax.tree.map(jnp.asarray, state.timestep)
    same = "let spec, reset and step agree"
    expect("the observation", arrived.observation, spec.observation, same)
    expect("the reward", arrived.reward, ArraySpec((), "float32"), "return a scalar")
    for flag in ("terminated", "truncated", "first"):
        expect(flag, getattr(arrived, flag), ArraySpec((), "bool"), "return a bool scalar")
    for metric, value in state.metrics.items():
        if not (hasattr(value, "dtype") or isinstance(value, int | float)):
            raise SeedbedError(
                f"{method}: the metric {metric!r} is a {type(value).__name__}; return a float32 scalar"
            )
        scalar = ArraySpec((), "float32")
        expect(f"the metric {metric!r}", jnp.asarray(value), scalar, "return a float32 scalar")


def _require_same(name: str, opened: EnvState, stepped: EnvState) -> None:
    """Raises SeedbedError unless reset and step return the same arrays as `inner` and the same metrics."""
    if sorted(stepped.metrics) != sorted(opened.metrics):
        raise SeedbedError(
            f"{name}: metrics after reset are {sorted(opened.metrics)}, after step "
            f"{sorted(stepped.metrics)}; give the same"
        )
    inners = opened.inner, stepped.inner
    kinds = [[jax.typeof(leaf).str_short() for leaf in jax.tree.leaves(inner)] for inner in inners]
    if kinds[0] != kinds[1]:
        raise SeedbedError(
            f"{name}: `inner` after reset has the arrays {', '.join(kinds[0])}; after step "
            f"{', '.join(kinds[1])}; give the same"
        )
    trees = [jax.tree.structure(inner) for inner in inners]
    if trees[0] != trees[1]:
        raise SeedbedError(
            f"{name}: `inner` after reset is {trees[0]}, after step {trees[1]}; give the same"
        )
