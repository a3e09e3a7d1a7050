"""Frame stacking on the device: actors send single frames, and agents see them stacked on the last axis."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from seedbed import trees
from seedbed.spaces import ACTION_MASK, entry, without
from seedbed.types import ActorState, Agent, Array, ArraySpec, EnvSpec, Timestep, Trajectory, Tree


class FrameTrajectory(NamedTuple):
    """A trajectory in single frames: T transitions of B environments, from an unroll or from replay."""

    timesteps: Timestep  # [S - 1 + T + 1, B, ...], not stacked
    action: Tree  # [T, B, ...]
    extras: Tree  # [T, B, ...]
    actor_state: ActorState  # [B, ...] before acting on row 0
    params_version: Tree = ()  # [T, B] int32 of an unroll
    importance: Tree = ()  # [B] float32 from replay


def stack_trajectory(frames: FrameTrajectory, frame_stack: int) -> Trajectory:
    """Returns the trajectory that agents learn from, with frames stacked."""
    return Trajectory(
        timesteps=stack_timesteps(frames.timesteps, frame_stack),
        action=frames.action,
        extras=frames.extras,
        actor_state=frames.actor_state,
        params_version=frames.params_version,
        importance=frames.importance,
    )


def act_on_frames(
    agent: Agent,
    params: Tree,
    actor_state: ActorState,
    frames: Timestep,
    keys: Array,
    evaluate: bool,
) -> tuple[Tree, Tree, ActorState]:
    """Acts on the newest of single frames `[S, B, ...]`, stacked; arguments and results are `Agent.act`'s."""
    stacked = stack_timesteps(frames, frames.first.shape[0])
    newest = jax.tree.map(lambda leaf: leaf[0], stacked)
    return agent.act(params, actor_state, newest, keys, evaluate=evaluate)


def stacked_spec(spec: EnvSpec, frame_stack: int) -> EnvSpec:
    """Returns the spec that the agent sees: the last axis of every array is `frame_stack` times as long.

    A mask of actions is not stacked: only the newest counts.

    Bytes `[H, W]`, which are images without channels, become `[H, W, S]`, also if S is 1. Scalars become
    `[S]`, but stay scalars if S is 1.
    """

    def stacked(leaf: ArraySpec) -> ArraySpec:
        shape = _with_last_axis(leaf.shape, leaf.dtype, frame_stack)
        return ArraySpec((*shape[:-1], shape[-1] * frame_stack) if shape else (), leaf.dtype)

    observation = trees.map(stacked, without(spec.observation, ACTION_MASK))
    mask = entry(spec.observation, ACTION_MASK)
    if mask is not None:
        observation[ACTION_MASK] = mask
    mirror = spec.mirror if frame_stack == 1 else None
    return EnvSpec(observation, spec.action, mirror)


def stack_timesteps(timesteps: Timestep, frame_stack: int) -> Timestep:
    """Returns the last R of the rows `[S - 1 + R, B, ...]`, with frames stacked, the oldest first.

    Frames from before a `first` are replaced by zeros, so a stack never shows two episodes.
    """
    rows = timesteps.first.shape[0] - (frame_stack - 1)

    def window(leaf: Array, back: int) -> Array:
        start = frame_stack - 1 - back
        return leaf[start : start + rows]

    visible = [jnp.ones_like(window(timesteps.first, 0))]
    for back in range(1, frame_stack):
        visible.append(visible[-1] & ~window(timesteps.first, back - 1))

    def stack(leaf: Array) -> Array:
        shape = _with_last_axis(leaf.shape[2:], leaf.dtype, frame_stack)
        leaf = leaf.reshape(*leaf.shape[:2], *shape)
        if frame_stack == 1:
            return leaf
        aligned = [mask.reshape(*mask.shape, *(1,) * len(shape)) for mask in visible]
        frames = [
            jnp.where(aligned[back], window(leaf, back), jnp.zeros((), leaf.dtype))
            for back in reversed(range(frame_stack))
        ]
        return _joined(frames)

    observation = jax.tree.map(stack, without(timesteps.observation, ACTION_MASK))
    mask = entry(timesteps.observation, ACTION_MASK)
    if mask is not None:
        observation[ACTION_MASK] = jax.tree.map(lambda leaf: window(leaf, 0), mask)
    return Timestep(
        observation=observation,
        reward=window(timesteps.reward, 0),
        terminated=window(timesteps.terminated, 0),
        truncated=window(timesteps.truncated, 0),
        first=window(timesteps.first, 0),
    )


def _joined(frames: list[Array]) -> Array:
    """Joins frames along their last axis."""
    whole = _WORDS.get(len(frames))
    if whole is None or frames[0].dtype != jnp.uint8 or frames[0].shape[-1] != 1:
        return jnp.concatenate(frames, axis=-1)

    def as_words(*frames: Array) -> Array:
        # XLA's concatenation on a CPU writes one byte at a time.
        word = frames[0][..., 0].astype(whole)
        for i, frame in enumerate(frames[1:], start=1):
            word |= frame[..., 0].astype(whole) << 8 * i
        return lax.bitcast_convert_type(word, jnp.uint8)

    def concatenated(*frames: Array) -> Array:
        return jnp.concatenate(frames, axis=-1)

    return lax.platform_dependent(*frames, cpu=as_words, default=concatenated)


# Words that hold as many bytes, the first in the lowest bits.
_WORDS = {2: jnp.uint16, 4: jnp.uint32}


def _with_last_axis(shape: tuple[int, ...], dtype: object, frame_stack: int) -> tuple[int, ...]:
    """Returns the shape of one observation, with a last axis of 1 added if it has none to stack along."""
    image = len(shape) == 2 and str(dtype) == "uint8"
    if image or (not shape and frame_stack > 1):
        return (*shape, 1)
    return shape


def zero_timesteps(spec: EnvSpec, leading: tuple[int, ...]) -> Timestep:
    """Makes timesteps of zeros with `first` set; leaves are numpy arrays `[*leading, ...]` of their own."""

    def zeros(leaf: ArraySpec) -> np.ndarray:
        return np.zeros((*leading, *leaf.shape), leaf.dtype)

    return Timestep(
        observation=trees.map(zeros, spec.observation),
        reward=np.zeros(leading, np.float32),
        terminated=np.zeros(leading, bool),
        truncated=np.zeros(leading, bool),
        first=np.ones(leading, bool),
    )
