"""Heads: last layers from features `[..., D]` to a policy or to values, which are always in float32."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from seedbed.nets.orthogonal import orthogonal
from seedbed.nets.torsos import hidden_layer


class PolicyHead(nn.Module):
    """A layer to the parameters `[..., size]` of an action distribution, at first nearly uniform."""

    size: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the parameters `[..., size]`, which are nearly 0 for initial weights."""
        return nn.Dense(self.size, kernel_init=orthogonal(0.01))(x)


class ValueHead(nn.Module):
    """A layer to the value `[...]` of a state."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the values `[...]`."""
        return nn.Dense(1, kernel_init=orthogonal(1.0))(x)[..., 0]


class DuelingHead(nn.Module):
    """Layers to action values: a state's value plus advantages of mean 0.

    Source: Wang et al. (2016), equation 9.
    """

    num_actions: int
    hidden: int = 512  # hidden units of each of the two streams
    dtype: Any = jnp.float32  # of the hidden layers' products

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns action values `[..., num_actions]`."""
        value_hidden = nn.relu(hidden_layer(self.hidden, self.dtype)(x))
        value = nn.Dense(1, kernel_init=orthogonal(1.0))(value_hidden)
        advantage_hidden = nn.relu(hidden_layer(self.hidden, self.dtype)(x))
        # Without bias: its mean over the actions would be subtracted again, and the value has a bias.
        advantage = nn.Dense(self.num_actions, use_bias=False, kernel_init=orthogonal(1.0))(
            advantage_hidden
        )
        return value + advantage - advantage.mean(-1, keepdims=True)
