"""Acting in the fused program: unrolls, and whole episodes, of a batch of environments on the device.

All functions are pure and are called while JAX traces the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seedbed import simd
from seedbed.fused.carry import Carry, EpisodeSums, Plan, Rows
from seedbed.ops.clock import stamp
from seedbed.ops.keys import environment_keys, later
from seedbed.types import (
    ActorState,
    Agent,
    Array,
    Environment,
    EnvState,
    Timestep,
    Tree,
    learns_from_replay,
)

Move = Callable[[EnvState, Tree], EnvState]
"""Steps a batch of environments: (states `[B, ...]`, actions `[B, ...]`) -> states."""


class _Playing(NamedTuple):
    """Whole episodes of B environments, as far as they have been played."""

    env: EnvState  # [B, ...]
    actor: ActorState  # [B, ...]
    last: Timestep  # [B, ...] with the return so far, and the flags of the end
    length: Array  # [B] int32
    extras: Tree  # [B, ...] of the last step
    count: Array  # uint32 scalar: steps of each environment
    busy: Array  # uint32 scalar: microseconds of the environments

    @property
    def done(self) -> Array:
        """Returns whether each episode has ended, `[B]`."""
        return self.last.terminated | self.last.truncated


def moves(env: Environment, euler_env: Environment | None, use_euler: Array) -> Move:
    """Returns a function that steps `euler_env` if it is given and `use_euler` is true, else `env`.

    `use_euler` is one bool scalar for all environments, so that only one of the two steps is computed.
    """
    own = simd.vectorize(env.step)
    if euler_env is None:
        return own
    return functools.partial(jax.lax.cond, use_euler, simd.vectorize(euler_env.step), own)


def unroll(
    agent: Agent, move: Move, plan: Plan, axis: str | None, key: Array, carry: Carry
) -> tuple[Carry, Rows, EpisodeSums, Array]:
    """Acts in every environment for the plan's unroll; does not learn. The key is folded, not consumed.

    Returns the new carry, the rows, sums over the episodes that ended on this device, and the microseconds
    that the environments took, a uint32 scalar.
    """
    batch = carry.env.timestep.first.shape[0]
    begin = 0 if axis is None else jax.lax.axis_index(axis) * batch
    env_ids = jnp.arange(batch, dtype=jnp.uint32) + jnp.uint32(begin)
    params = carry.learner.params
    replaying = learns_from_replay(agent)

    def step(
        now: tuple[EnvState, ActorState, EpisodeSums, Array], keys: Array
    ) -> tuple[tuple[EnvState, ActorState, EpisodeSums, Array], Rows]:
        state, actor, ended, busy = now
        core = actor.core if replaying else ()
        action, extras, actor = agent.act(params, actor, state.timestep, keys, evaluate=False)
        action, begun = stamp(action)
        moved = move(state, action)
        reward, ready = stamp(moved.timestep.reward)
        moved = moved._replace(timestep=moved.timestep._replace(reward=reward))
        now = (moved, actor, _add(ended, moved), busy + passed(begun[0], ready[0]))
        return now, Rows(state.timestep, action, extras, core)

    nothing, no_time = EpisodeSums(jnp.int32(0), jnp.float32(0), jnp.float32(0)), jnp.uint32(0)
    if axis is not None:
        nothing, no_time = jax.tree.map(
            lambda x: jax.lax.pcast(x, axis, to="varying"), (nothing, no_time)
        )
    # All keys at once: within the scan, each step would pay for a dozen small operations.
    counts = later(carry.steps, jnp.arange(plan.unroll, dtype=jnp.uint32))
    keys = jax.vmap(environment_keys, (None, None, 0))(key, env_ids, counts)
    (state, actor, ended, busy), rows = jax.lax.scan(
        step, (carry.env, carry.actor, nothing, no_time), keys
    )
    steps = later(carry.steps, plan.unroll)
    return carry._replace(env=state, actor=actor, steps=steps), rows, ended, busy


def episodes(
    agent: Agent, move: Move, plan: Plan, axis: str | None, key: Array, carry: Carry
) -> tuple[Carry, Rows, EpisodeSums, Array]:
    """Plays an episode in every environment, from its start to its end; does not learn.

    The arguments are those of `unroll`, and the results, too: an episode is one row, and in the new carry
    the reward of a timestep is the return (see `OnPolicy.episodes`).
    """
    batch = carry.env.timestep.first.shape[0]
    begin = 0 if axis is None else jax.lax.axis_index(axis) * batch
    env_ids = jnp.arange(batch, dtype=jnp.uint32) + jnp.uint32(begin)
    params = carry.learner.params
    over = carry.env.timestep._replace(terminated=jnp.ones_like(carry.env.timestep.terminated))
    idle = jax.eval_shape(
        lambda: agent.act(params, carry.actor, over, jax.random.split(key, batch), evaluate=False)
    )[0]
    # The step after an end ignores its action and opens an episode.
    opened = move(
        carry.env._replace(timestep=over), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), idle)
    )
    opening = opened.timestep

    def act(now: EnvState, actor: ActorState, count: Array) -> tuple[Tree, Tree, ActorState]:
        keys = environment_keys(key, env_ids, later(carry.steps, count))
        # An environment whose episode is over opens another one, which is not played.
        first = jnp.zeros_like(now.timestep.first) | (count == 0)
        timestep = now.timestep._replace(first=first)
        return agent.act(params, actor, timestep, keys, evaluate=False)

    first_action, extras, _ = act(opened, carry.actor, jnp.uint32(0))

    def step(now: _Playing) -> _Playing:
        action, extras, actor = act(now.env, now.actor, now.count)
        action, begun = stamp(action)
        env = move(now.env, action)
        reward, ready = stamp(env.timestep.reward)

        def until_end(new: Tree, old: Tree) -> Tree:
            return jax.tree.map(
                lambda a, b: jnp.where(now.done.reshape(-1, *[1] * (a.ndim - 1)), b, a), new, old
            )

        last = opening._replace(
            reward=now.last.reward + reward,
            terminated=env.timestep.terminated,
            truncated=env.timestep.truncated,
            first=jnp.zeros_like(now.done),
        )
        last, length, extras = until_end(
            (last, now.length + 1, extras), (now.last, now.length, now.extras)
        )
        busy = now.busy + passed(begun[0], ready[0])
        return _Playing(env, actor, last, length, extras, now.count + 1, busy)

    begun = _Playing(
        opened,
        carry.actor,
        opening._replace(first=jnp.zeros_like(opening.first)),
        jnp.zeros_like(opening.reward, jnp.int32),
        extras,
        jnp.uint32(0),
        jnp.zeros_like(opening.reward[0], jnp.uint32),
    )

    def unfinished(now: _Playing) -> Array:
        over = now.done.all()
        # All devices make as many steps: what environments draw for the next episode depends on them.
        return ~(over if axis is None else jax.lax.pmin(over.astype(jnp.int32), axis) > 0)

    played = jax.lax.while_loop(unfinished, step, begun)
    last, length = played.last, played.length
    ended = EpisodeSums(
        jnp.sum(jnp.ones_like(length)), last.reward.sum(), length.sum().astype(jnp.float32)
    )
    rows = Rows(*jax.tree.map(lambda x: x[None], (opening, first_action, played.extras)), core=())
    steps = later(carry.steps, played.count)
    env = played.env._replace(timestep=last)
    return carry._replace(env=env, steps=steps), rows, ended, played.busy


def passed(begun: Array, ended: Array) -> Array:
    """Returns the microseconds between two times; 0 if the second came before the first.

    XLA may compute what does not depend on the first value before it.
    """
    return jnp.maximum((ended - begun).astype(jnp.int32), 0).astype(jnp.uint32)


def _add(ended: EpisodeSums, moved: EnvState) -> EpisodeSums:
    over = jnp.logical_or(moved.timestep.terminated, moved.timestep.truncated)
    total, length = moved.metrics["episode_return"], moved.metrics["episode_length"]
    return EpisodeSums(
        ended.episodes + over.sum(dtype=jnp.int32),
        ended.returns + jnp.where(over, total, 0.0).sum(),
        ended.lengths + jnp.where(over, length, 0.0).sum(),
    )
