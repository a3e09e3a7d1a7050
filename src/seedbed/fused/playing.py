"""Evaluations of the fused runtime: an episode in each of a batch of environments, as one computation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import simd
from seedbed.envs.device.wrappers import STATISTICS, episode_statistics, training
from seedbed.ops.keys import environment_keys
from seedbed.run.evaluation import summary_of
from seedbed.types import (
    ActorState,
    Agent,
    Array,
    Environment,
    EnvState,
    SeedbedError,
    Tree,
)

NOT_SUMMED = frozenset({"solver_error", *STATISTICS})
"""Metrics of an environment whose sum over an episode says nothing, or something that is told apart."""
MOST_STEPS = 100_000
"""The most steps of an evaluation's episode if the environment has no time limit."""
_STEPS_AT_ONCE = 100
"""Steps of an evaluation between two calls of `stop`. They usually take a second at most."""

Play: TypeAlias = Callable[[Tree, int, Callable[[], bool]], list[dict[str, Any]] | None]
"""An evaluation: (params, seed, stop) -> a summary for each member, or None if `stop` returned True."""


class Episodes(NamedTuple):
    """One episode in each of B environments, as far as it has been played."""

    env: EnvState  # [B, ...]
    actor: ActorState  # [B, ...]
    done: Array  # [B] bool: whether the episode has ended
    steps: Array  # uint32 scalar: steps of each environment so far
    returns: Array  # [B] float32, up to the end of the episode
    lengths: Array  # [B] int32, up to the end of the episode
    sums: dict[
        str, Array
    ]  # [B] float32, of the environment's metrics, up to the end of the episode


def open_episodes(agent: Agent, env: Environment, episodes: int, key: Array) -> Episodes:
    """Opens an episode in each of `episodes` environments. Consumes the key."""
    state = simd.vectorize(env.reset)(jax.random.split(key, episodes))
    actor = agent.actor_state(jnp.arange(episodes, dtype=jnp.uint32), episodes)
    return Episodes(
        env=state,
        actor=actor,
        done=jnp.zeros(episodes, bool),
        steps=jnp.uint32(0),
        returns=jnp.zeros(episodes),
        lengths=jnp.zeros(episodes, jnp.int32),
        sums={name: jnp.zeros(episodes) for name in state.metrics.keys() - NOT_SUMMED},
    )


def play(
    agent: Agent, env: Environment, params: Tree, key: Array, begun: Episodes, until: Array
) -> Episodes:
    """Plays on with the evaluation policy, until all episodes have ended or `steps` is `until`.

    `until` is a uint32 scalar. `env` may reset itself: what comes after an end does not count. The key is
    folded with the environment and the step, not consumed: pass the same key each time.
    """
    env_ids = jnp.arange(begun.done.shape[0], dtype=jnp.uint32)
    move = simd.vectorize(env.step)

    def unfinished(now: Episodes) -> Array:
        return (~now.done).any() & (now.steps < until)

    def step(now: Episodes) -> Episodes:
        state, actor, done, steps, returns, lengths, sums = now
        keys = environment_keys(key, env_ids, jnp.stack([steps, jnp.uint32(0)]))
        action, _, actor = agent.act(params, actor, state.timestep, keys, evaluate=True)
        state = move(state, action)
        returns = returns + jnp.where(done, 0.0, state.timestep.reward)
        lengths = lengths + ~done
        sums = {k: x + jnp.where(done, 0.0, state.metrics[k]) for k, x in sums.items()}
        done = done | state.timestep.terminated | state.timestep.truncated
        return Episodes(state, actor, done, steps + 1, returns, lengths, sums)

    return jax.lax.while_loop(unfinished, step, begun)


def varied(agent: Agent, options: dict[str, Array]) -> Agent:
    """Returns a copy of the agent in which traced values replace some options.

    This leaves out the agent's own checks, which need numbers: they were made before.
    """
    copied = copy.copy(agent)
    vars(copied).update(options)
    return copied


def compile_play(
    agent: Agent, env: Environment, episodes: int, members: int, options: Tree | None = None
) -> Play:
    """Returns the evaluation of a bound agent, which compiles when it is first called.

    It plays `episodes` episodes at once for each member. With several members, each leaf of its `params`
    has a leading axis `[members]`, and so have the values in `options`, which replace the agent's.
    """
    most, options = env.episode_steps or MOST_STEPS, options or {}
    opened = functools.partial(open_episodes, agent, env, episodes)

    def played(params: Tree, options: Tree, key: Array, begun: Episodes, until: Array) -> Episodes:
        return play(varied(agent, options), env, params, key, begun, until)

    if members > 1:
        opened = jax.vmap(opened, in_axes=None, axis_size=members)
        played = jax.vmap(played, in_axes=(0, 0, None, 0, None))
    opened, played = jax.jit(opened), jax.jit(played)

    def evaluation(
        params: Tree, seed: int, stop: Callable[[], bool]
    ) -> list[dict[str, Any]] | None:
        reset_key, act_key = jax.random.split(jax.random.key(seed))
        now, steps = opened(reset_key), 0
        while steps < most and not np.all(now.done):
            if stop():
                return None
            steps = min(steps + _STEPS_AT_ONCE, most)
            now = played(params, options, act_key, now, np.uint32(steps))
        results = jax.device_get((now.done, now.returns, now.lengths, now.sums))
        results = jax.tree.map(lambda x: x.reshape(members, -1), results)
        return [_summary(*jax.tree.map(lambda x: x[i], results)) for i in range(members)]  # noqa: B023

    return evaluation


def evaluate(
    *, env: Environment, agent: Agent, params: Tree, episodes: int, seed: int
) -> dict[str, Any]:
    """Plays one episode in each of `episodes` environments at once, and returns a summary of the returns.

    `agent` is bound. `env` has no auto-reset yet: this adds it. A return is the sum of the rewards that `env`
    gives. Each call compiles. Raises SeedbedError if an episode does not end.
    """
    evaluation = compile_play(agent, episode_statistics(training(env)), episodes, 1)
    results = evaluation(params, seed, lambda: False)
    assert results is not None, "nobody stopped it"
    return results[0]


def _summary(
    done: np.ndarray, returns: np.ndarray, lengths: np.ndarray, sums: dict[str, np.ndarray]
) -> dict[str, Any]:
    if not done.all():
        raise SeedbedError(
            f"{(~done).sum()} of {done.size} episodes of the evaluation did not end within "
            f"{int(lengths.max()):,} steps: give the environment a time limit (episode_steps)"
        )
    return summary_of(returns, lengths, sums)
