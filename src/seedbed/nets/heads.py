"""Heads: from features `[..., D]` to what an algorithm reads; always in float32."""

from __future__ import annotations

import flax.linen as nn
from jax import Array

from seedbed.nets.torsos import hidden_init


class PolicyHead(nn.Module):
    """Parameters of an action distribution, `[..., size]`; nearly uniform at the start."""

    size: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns `[..., size]`."""
        return nn.Dense(self.size, kernel_init=nn.initializers.orthogonal(0.01))(x)


class ValueHead(nn.Module):
    """A state's value, `[...]`."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns `[...]`."""
        return nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(x)[..., 0]


class DuelingHead(nn.Module):
    """Action values: a state's value plus advantages of mean 0; Wang et al. (2016), equation 9."""

    num_actions: int
    hidden: int = 512

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns action values `[..., num_actions]`."""
        value_hidden = nn.relu(nn.Dense(self.hidden, kernel_init=hidden_init)(x))
        value = nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(value_hidden)
        advantage_hidden = nn.relu(nn.Dense(self.hidden, kernel_init=hidden_init)(x))
        # A bias common to all actions would be subtracted again, and the value has one of its own.
        advantage = nn.Dense(
            self.num_actions, use_bias=False, kernel_init=nn.initializers.orthogonal(1.0)
        )(advantage_hidden)
        return value + advantage - advantage.mean(-1, keepdims=True)
