"""Torsos of a user: one that works, and others that cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Wide(nn.Module):
    """A dense layer over all arrays, and the size of the observation as a constant feature."""

    units: int = 8
    activation: Callable[[jax.Array], jax.Array] = nn.relu

    @nn.compact
    def __call__(self, observation: Any) -> jax.Array:
        """Returns features [B, units]."""
        leaves = jax.tree.leaves(observation)
        flat = [x.reshape(x.shape[0], -1).astype(jnp.float32) for x in leaves]
        return self.activation(nn.Dense(self.units)(jnp.concatenate(flat, axis=-1)))


wide = Wide(16)
number = 3


class Flat(nn.Module):
    """Returns one number for each observation, without an axis of features."""

    def __call__(self, observation: jax.Array) -> jax.Array:
        """Returns [B]."""
        return observation[:, 0]


class Half(nn.Module):
    """Returns float16."""

    def __call__(self, observation: jax.Array) -> jax.Array:
        """Returns [B, D] of a dtype that no head takes."""
        return observation.astype(jnp.float16)


class Averaging(nn.Module):
    """Has running averages."""

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        """Returns [B, D]."""
        return nn.BatchNorm(use_running_average=False)(observation)


class Failing(nn.Module):
    """Fails."""

    def __call__(self, observation: jax.Array) -> jax.Array:
        """Raises ValueError."""
        raise ValueError(f"no {observation.ndim} axes for me")
