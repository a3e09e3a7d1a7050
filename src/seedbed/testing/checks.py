"""Checks of an agent or a task of one's own: what the contract asks and shapes do not show.

Each check raises SeedbedError, which names the method, what it did, and what to do about it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from seedbed import simd
from seedbed.envs.choices import random_choices
from seedbed.envs.device.wrappers import auto_reset, innermost, limited
from seedbed.ops.tracing import naming
from seedbed.run import checking
from seedbed.testing.agent_check import LARGEST, AgentCheck
from seedbed.testing.comparing import numbers, pairs
from seedbed.types import (
    Agent,
    Array,
    Box,
    Environment,
    EnvSpec,
    SeedbedError,
    Timestep,
    Tree,
    bind,
    plays_episodes,
)

_TASKS = "docs/write-a-task.md"
_ENVS = 16  # that a task is stepped in


def check_agent(agent: Agent, spec: EnvSpec | None = None, seed: int = 0) -> None:
    """Checks an agent for environments of a spec, by default its own; raises SeedbedError.

    First each method is traced, and the shapes are compared with `seedbed.types.Agent`. Then the agent acts
    on random observations in episodes of both kinds of end, makes one update, and is checked for: initial
    states that are finite and share no buffer; methods whose results depend on their arguments alone; acting,
    for training and for evaluation, that is one environment's own affair, forgets its memory at `first`, and
    keeps to the bounds of actions and to masks; a gradient that is finite, to which rows of resets add
    nothing, with the number of valid rows as its weight; priorities above 0; and updates that count
    themselves, leave `progress` alone and change a parameter.

    It costs some seconds, most of them compiling. For a large agent, give a copy with a small batch.
    """
    if spec is None and agent.spec is None:
        raise SeedbedError(f"{type(agent).__name__}.spec is None; give check_agent a spec")
    agent = bind(agent, spec or agent.spec)  # type: ignore[arg-type]
    if plays_episodes(agent):
        raise SeedbedError(
            f"{type(agent).__name__} learns from returns of whole episodes, and has no gradient of a batch: "
            "check_agent knows agents that learn from transitions"
        )
    checking.check_agent(agent)
    AgentCheck(agent, seed).run()


def check_task(task: Environment, steps: int = 1000, seed: int = 0) -> None:
    """Steps a task on the device with random actions; raises SeedbedError if it breaks the contract.

    Sixteen environments take `steps` steps, with actions also beyond the bounds of a Box, in one kernel if
    the task has one (`simd.vectorize` warns if not). Checked are what `spec`, `reset` and `step` say of
    shapes and dtypes; that both depend on their arguments alone; that rewards, observations and metrics are
    finite; that an episode opens with reward 0, is `first` there alone, and ends some time; and that the task
    can be an option: it is hashable, and all its fields have defaults (of a task in wrappers, its own).
    """
    name = type(task).__name__
    _require_option(task)
    env = auto_reset(limited(task))
    keys = jax.random.split(jax.random.key(seed), _ENVS)
    with naming(f"{name}.reset", _TASKS):
        # Inner lambdas: JAX would not trace the same function again.
        one, other = (jax.jit(simd.vectorize(lambda key: env.reset(key)))(keys) for _ in range(2))
    _require_equal(name, "reset", one, other)
    opened = one.timestep
    if (
        np.any(opened.reward)
        or np.any(opened.terminated | opened.truncated)
        or not np.all(opened.first)
    ):
        raise SeedbedError(
            f"{name}.reset opens an episode with a reward, at its end, or without `first`; return "
            f"EnvState.opening(...) (see {_TASKS})"
        )
    rng = np.random.default_rng(seed)
    step = jax.jit(simd.vectorize(env.step))
    state, ends = one, 0
    for t in range(steps):
        _require_finite(name, t, state.timestep, state.metrics)
        ended = np.asarray(state.timestep.terminated | state.timestep.truncated)
        state = step(state, _random_actions(task.spec, rng, state.timestep.observation))
        if not np.array_equal(state.timestep.first, ended):
            raise SeedbedError(
                f"{name}.step leaves `first` set, or sets it: return EnvState.after(...) (see {_TASKS})"
            )
        ends += int(np.sum(state.timestep.terminated | state.timestep.truncated))
        if t == 0:
            action = _random_actions(task.spec, rng, state.timestep.observation)
            again = jax.jit(simd.vectorize(lambda *given: env.step(*given)))
            _require_equal(name, "step", step(state, action), again(state, action))
    if not ends and not task.episode_steps:
        raise SeedbedError(
            f"{name}: no episode ended in {steps:,} steps of {_ENVS} environments, and there is no time "
            f"limit; set episode_steps (see {_TASKS})"
        )


def _require_option(task: Environment) -> None:
    """Raises SeedbedError unless `seedbed train` could make a task."""
    inner: Any = innermost(task)
    if not dataclasses.is_dataclass(inner):
        raise SeedbedError(
            f"{type(inner).__name__} is no dataclass: decorate it with @dataclasses.dataclass(frozen=True) "
            f"(see {_TASKS})"
        )
    for part in ("spec", "reset", "step", "episode_steps", "frame_skip"):
        if not hasattr(inner, part):
            raise SeedbedError(f"{type(inner).__name__} has no {part!r} (see {_TASKS})")
    for field in dataclasses.fields(inner):
        if field.default is field.default_factory is dataclasses.MISSING:
            raise SeedbedError(
                f"{type(inner).__name__}.{field.name} has no default; give one, for `seedbed train` "
                f"makes the task without arguments (see {_TASKS})"
            )
    with naming(f"{type(task).__name__}.__hash__", _TASKS):
        hash(task)


def _random_actions(spec: EnvSpec, rng: np.random.Generator, observation: Tree) -> Array:
    """Draws actions for observations `[_ENVS, ...]`: a Box beyond its bounds, and no forbidden choice."""
    action = spec.action
    if isinstance(action, Box):
        low, high = (np.array(bound, np.float64) for bound in (action.low, action.high))
        low = np.where(low > -LARGEST, low, np.where(high < LARGEST, high, 2) - 4)
        high = np.where(high < LARGEST, high, low + 4)
        middle, half = (low + high) / 2, (high - low) / 2
        drawn = middle + 1.5 * half * rng.uniform(-1, 1, (_ENVS, len(low)))
        return drawn.reshape(_ENVS, *action.shape).astype(np.float32)
    return random_choices(action, observation, _ENVS, rng)


def _require_finite(name: str, t: int, timestep: Timestep, metrics: dict[str, Array]) -> None:
    given = {"observation": timestep.observation, "reward": timestep.reward, "metrics": metrics}
    for path, leaf in jax.tree_util.tree_flatten_with_path(given)[0]:
        if not np.isfinite(np.asarray(leaf, np.float64)).all():
            place = "".join(str(getattr(part, "key", part)) + " " for part in path).strip()
            raise SeedbedError(
                f"{name}: {place} is not finite after {t} steps of random actions; bound what can grow, or "
                f"terminate the episode before (see {_TASKS})"
            )


def _require_equal(name: str, method: str, one: Tree, other: Tree) -> None:
    for path, (a, b) in pairs(one, other):
        a, b = numbers(a), numbers(b)
        if not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            raise SeedbedError(
                f"{name}.{method} is not a function of its arguments: two calls with the same gave different "
                f"{jax.tree_util.keystr(path)[1:]}; draw all random numbers from the key (see {_TASKS})"
            )
