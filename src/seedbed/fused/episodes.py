"""Whole episodes of a batch of environments on the device, for agents that learn from returns only.

All functions are pure and are called while JAX traces the program.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from seedbed.fused.carry import Carry, EpisodeSums, Move, Plan, Rows
from seedbed.ops.clock import passed, stamp
from seedbed.ops.keys import environment_keys, later
from seedbed.types import (
    ActorState,
    Agent,
    Array,
    EnvState,
    Timestep,
    Tree,
)


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


def whole_episodes(
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
