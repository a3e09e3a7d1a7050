"""Frame stacking on the device: actors send single frames, agents see stacks along the last axis."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from seedbed import trees
from seedbed.types import Array, ArraySpec, EnvSpec, Timestep, Tree


def _is_image(shape: tuple[int, ...], dtype: object) -> bool:
    return len(shape) >= 2 and str(dtype) == "uint8"


def stacked_spec(spec: EnvSpec, frame_stack: int) -> EnvSpec:
    """Returns the spec that the agent sees: uint8 images `[H, W]` or `[H, W, C]` become `[H, W, C * S]`."""

    def stacked(leaf: ArraySpec) -> ArraySpec:
        if not _is_image(leaf.shape, leaf.dtype):
            return leaf
        channels = leaf.shape[2] if len(leaf.shape) > 2 else 1
        return ArraySpec((*leaf.shape[:2], channels * frame_stack), leaf.dtype)

    return dataclasses.replace(spec, observation=trees.map(stacked, spec.observation))


def stack_timesteps(timesteps: Timestep, frame_stack: int) -> Timestep:
    """Stacks the frames of rows `[S - 1 + R, B, ...]` into the last R rows, oldest frame first.

    Frames from before a `first` are zeros, so a stack never shows two episodes.
    """
    rows = timesteps.first.shape[0] - (frame_stack - 1)

    def window(leaf: Array, back: int) -> Array:
        start = frame_stack - 1 - back
        return leaf[start : start + rows]

    visible = [jnp.ones_like(window(timesteps.first, 0))]
    for back in range(1, frame_stack):
        visible.append(visible[-1] & ~window(timesteps.first, back - 1))

    def stack(leaf: Array) -> Array:
        if not _is_image(leaf.shape[2:], leaf.dtype):
            return window(leaf, 0)
        if leaf.ndim == 4:
            leaf = leaf[..., None]
        frames = [
            jnp.where(visible[back][..., None, None, None], window(leaf, back), jnp.uint8(0))
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


def zero_timesteps(spec: EnvSpec, leading: tuple[int, ...]) -> Timestep:
    """Makes timesteps of zeros with leaves `[*leading, ...]`, marked `first`."""

    def zeros(leaf: ArraySpec) -> Array:
        return jnp.zeros((*leading, *leaf.shape), leaf.dtype)

    observation: Tree = trees.map(zeros, spec.observation)
    flag = jnp.zeros(leading, bool)
    return Timestep(
        observation, jnp.zeros(leading, jnp.float32), flag, flag, jnp.ones(leading, bool)
    )
