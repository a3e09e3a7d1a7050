"""Whole episodes of a batch of environments on the device, for agents that learn from returns only.

All functions are pure and are called while JAX traces the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

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

Acting: TypeAlias = tuple[Tree, Tree, ActorState]
"""What acting returns: (action, extras, actor state)."""


class _Playing(NamedTuple):
    """Whole episodes of B environments, as far as they have been played."""

    env: EnvState  # [B, ...]
    actor: ActorState  # [B, ...]
    action: Tree  # [B, ...] of the next step
    extras: Tree  # [B, ...] of the next step
    last: Timestep  # [B, ...] with the return so far, and the flags of the end
    length: Array  # [B] int32
    given: Tree  # [B, ...] extras of the last step of the episode
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

    def act(now: EnvState, actor: ActorState, count: Array, first: bool) -> Acting:
        keys = environment_keys(key, env_ids, later(carry.steps, count))
        # As a constant, it does not depend on members of a population: noise is drawn once.
        timestep = now.timestep._replace(first=jnp.full_like(now.timestep.first, first))
        return agent.act(params, actor, timestep, keys, evaluate=False)

    given = act(opened, carry.actor, jnp.uint32(0), first=True)
    played = _play(move, act, opened, given)
    last, length = played.last, played.length
    ended = EpisodeSums(
        jnp.sum(jnp.ones_like(length)), last.reward.sum(), length.sum().astype(jnp.float32)
    )
    rows = Rows(
        *jax.tree.map(lambda x: x[None], (opened.timestep, given[0], played.given)), core=()
    )
    # The same on all devices, as the next keys must be others.
    count = played.count if axis is None else jax.lax.pmax(played.count, axis)
    steps = later(carry.steps, count)
    env = played.env._replace(timestep=last)
    return carry._replace(env=env, steps=steps), rows, ended, played.busy


def _play(move: Move, act: Callable[..., Acting], opened: EnvState, given: Acting) -> _Playing:
    """Plays from the opening states to the ends; `given` is what acting on them returned."""

    def step(now: _Playing) -> _Playing:
        action, begun = stamp(now.action)
        env = move(now.env, action)
        reward, ready = stamp(env.timestep.reward)
        shown = jax.tree.leaves(env.timestep.observation)
        finite = functools.reduce(jnp.logical_and, (_all_finite(x) for x in shown))

        def until_end(new: Tree, old: Tree) -> Tree:
            return jax.tree.map(
                lambda a, b: jnp.where(now.done.reshape(-1, *[1] * (a.ndim - 1)), b, a), new, old
            )

        # What is not finite makes the return so, which ends the run.
        last = opened.timestep._replace(
            reward=now.last.reward + jnp.where(finite, reward, jnp.nan),
            terminated=env.timestep.terminated,
            truncated=env.timestep.truncated,
            first=jnp.zeros_like(now.done),
        )
        new = env, last, now.length + 1, now.extras
        # An environment whose episode is over stays as it was at its end.
        env, last, length, given = until_end(new, (now.env, now.last, now.length, now.given))
        action, extras, actor = act(env, now.actor, now.count + 1, first=False)
        busy = now.busy + passed(begun[0], ready[0])
        return _Playing(env, actor, action, extras, last, length, given, now.count + 1, busy)

    opening, (action, extras, actor) = opened.timestep, given
    begun = _Playing(
        opened,
        actor,
        action,
        extras,
        opening._replace(first=jnp.zeros_like(opening.first)),
        jnp.zeros_like(opening.reward, jnp.int32),
        extras,
        jnp.uint32(0),
        jnp.zeros_like(opening.reward[0], jnp.uint32),
    )
    return jax.lax.while_loop(lambda now: ~now.done.all(), step, begun)


def _all_finite(x: Array) -> Array:
    """Returns for each environment whether all numbers `[B, ...]` are finite, `[B]`."""
    return jnp.isfinite(x).reshape(x.shape[0], -1).all(1)
