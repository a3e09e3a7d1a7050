"""Frame stacking on the device: actors send single frames, and agents see them stacked on the last axis."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from seedbed import trees
from seedbed.types import Array, ArraySpec, EnvSpec, Timestep, Tree


def stacked_spec(spec: EnvSpec, frame_stack: int) -> EnvSpec:
    """Returns the spec that the agent sees: the last axis of every array is `frame_stack` times as long.

    Bytes `[H, W]`, which are images without channels, become `[H, W, S]`, also if S is 1. Scalars become
    `[S]`, but stay scalars if S is 1.
    """

    def stacked(leaf: ArraySpec) -> ArraySpec:
        shape = _with_last_axis(leaf.shape, leaf.dtype, frame_stack)
        return ArraySpec((*shape[:-1], shape[-1] * frame_stack) if shape else (), leaf.dtype)

    return dataclasses.replace(spec, observation=trees.map(stacked, spec.observation))


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
        return jnp.concatenate(frames, axis=-1)

    return Timestep(
        observation=jax.tree.map(stack, timesteps.observation),
        reward=window(timesteps.reward, 0),
        terminated=window(timesteps.terminated, 0),
        truncated=window(timesteps.truncated, 0),
        first=window(timesteps.first, 0),
    )


def _with_last_axis(shape: tuple[int, ...], dtype: object, frame_stack: int) -> tuple[int, ...]:
    """Returns the shape of one observation, with a last axis of 1 added if it has none to stack along."""
    image = len(shape) == 2 and str(dtype) == "uint8"
    if image or (not shape and frame_stack > 1):
        return (*shape, 1)
    return shape


def zero_timesteps(spec: EnvSpec, leading: tuple[int, ...]) -> Timestep:
    """Makes timesteps of zeros, with `first` set and leaves `[*leading, ...]`."""

    def zeros(leaf: ArraySpec) -> Array:
        return jnp.zeros((*leading, *leaf.shape), leaf.dtype)

    observation: Tree = trees.map(zeros, spec.observation)
    flag = jnp.zeros(leading, bool)
    return Timestep(
        observation, jnp.zeros(leading, jnp.float32), flag, flag, jnp.ones(leading, bool)
    )
