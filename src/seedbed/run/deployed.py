"""A trained agent as a policy outside of Seedbed: its evaluating `act`, with its frames and memory as values.

Nothing is drawn: every random number is the median of its distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from seedbed import trees
from seedbed.run.stacking import act_on_frames
from seedbed.types import ActorState, Agent, Array, ArraySpec, EnvSpec, Timestep, Tree


class PolicyMemory(NamedTuple):
    """The state that a deployed policy carries from step to step; leaves are `[B, ...]`."""

    frames: Tree  # [B, S - 1, ...] the single frames before this one, the newest last; () for S = 1
    core: Tree  # as in `ActorState`
    per_env: Tree


class PolicyInput(NamedTuple):
    """The input of a deployed policy at each step; leaves are `[B, ...]`."""

    observation: Tree  # single frames
    reward: Array  # float32, of the last action
    first: Array  # bool: the observation opens an episode


class Policy(NamedTuple):
    """A trained agent, to be exported or played."""

    agent: Agent  # bound
    params: Tree
    spec: EnvSpec  # of single frames
    frame_stack: int


# With every random number at its median, a draw of a normal is its mean, and one of logits their maximum.
_MEDIAN = define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.zeros(1, jnp.uint32),
    split=lambda key, shape: jnp.zeros((*shape, 1), jnp.uint32),
    random_bits=lambda key, width, shape: jnp.full(shape, 1 << (width - 1), f"uint{width}"),
    fold_in=lambda key, data: key,
    name="median",
    tag="median",
)


def step_of(policy: Policy) -> Callable[..., tuple[Tree, PolicyMemory]]:
    """Returns the policy's step: (params, memory, input) -> (action `[B, ...]`, the next memory)."""
    agent, past = policy.agent, policy.frame_stack - 1

    def step(params: Tree, memory: PolicyMemory, given: PolicyInput) -> tuple[Tree, PolicyMemory]:
        batch = given.first.shape[0]
        keys = jax.random.wrap_key_data(jnp.zeros((batch, 1), jnp.uint32), impl=_MEDIAN)

        def frames(older: Array, newest: Array) -> Array:
            return jnp.concatenate([jnp.moveaxis(older, 1, 0), newest[None]])

        def rows(newest: Array) -> Array:
            older = jnp.zeros((past, batch), newest.dtype)
            return jnp.concatenate([older, newest[None]]) if past else newest[None]

        observation = jax.tree.map(lambda x: x[None], given.observation)
        if past:
            observation = jax.tree.map(frames, memory.frames, given.observation)
        no = jnp.zeros(batch, bool)
        timesteps = Timestep(observation, rows(given.reward), rows(no), rows(no), rows(given.first))
        before = ActorState(memory.core, memory.per_env)
        action, _, after = act_on_frames(agent, params, before, timesteps, keys, evaluate=True)

        def later(older: Array, newest: Array) -> Array:
            opening = given.first.reshape(batch, *(1,) * (older.ndim - 1))
            older = jnp.where(opening, jnp.zeros((), older.dtype), older)
            return jnp.concatenate([older, newest[:, None]], axis=1)[:, 1:]

        kept = jax.tree.map(later, memory.frames, given.observation) if past else ()
        return action, PolicyMemory(kept, after.core, after.per_env)

    return step


def initial_memory(policy: Policy, batch: int) -> PolicyMemory:
    """Returns the memory of `batch` environments before their first step."""
    state = policy.agent.actor_state(jnp.arange(batch, dtype=jnp.uint32), batch)

    def blank(leaf: ArraySpec) -> np.ndarray:
        return np.zeros((batch, policy.frame_stack - 1, *leaf.shape), leaf.dtype)

    frames = trees.map(blank, policy.spec.observation) if policy.frame_stack > 1 else ()
    return PolicyMemory(frames, state.core, state.per_env)


def input_specs(policy: Policy) -> PolicyInput:
    """Returns the shapes of one environment's input, without a batch axis."""
    return PolicyInput(policy.spec.observation, ArraySpec((), "float32"), ArraySpec((), "bool"))
