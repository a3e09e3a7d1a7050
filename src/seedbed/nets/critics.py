"""Networks of agents that judge actions: a policy over real vectors, and twin critics of them.

All take observations as one vector; `vectors` makes it.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from seedbed.nets.heads import PolicyHead, ValueHead
from seedbed.nets.policy import ActivationName
from seedbed.nets.torsos import Mlp

Tree = Any


def vectors(observation: Tree, lead: int) -> Array:
    """Joins the leaves, each `[*N, ...]` with `lead` axes N, to `[*N, D]` float32.

    Bytes are taken as fractions of 255.
    """

    def flat(leaf: Array) -> Array:
        fraction = 1.0 / 255.0 if leaf.dtype == jnp.uint8 else 1.0
        return leaf.reshape(*leaf.shape[:lead], -1).astype(jnp.float32) * fraction

    return jnp.concatenate([flat(leaf) for leaf in jax.tree.leaves(observation)], axis=-1)


class VectorPolicy(nn.Module):
    """Parameters `[N, size]` of an action distribution, from vectors `[N, D]`."""

    size: int
    sizes: tuple[int, ...]
    activation: ActivationName = "relu"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns `[N, size]`; nearly 0 at the start."""
        return PolicyHead(self.size)(Mlp(self.sizes, getattr(nn, self.activation))(x))


class Critic(nn.Module):
    """The value `[N]` of an action in a state, from vectors `[N, D]` of both."""

    sizes: tuple[int, ...]
    activation: ActivationName = "relu"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns `[N]`."""
        return ValueHead()(Mlp(self.sizes, getattr(nn, self.activation))(x))


class TwinCritics(nn.Module):
    """Two critics that differ in nothing but their weights, whose leaves are `[2, ...]`."""

    sizes: tuple[int, ...]
    activation: ActivationName = "relu"

    @nn.compact
    def __call__(self, inputs: Array, action: Array) -> Array:
        """Values `[2, N]` of actions `[N, A]` where `inputs` `[N, D]` were observed."""
        twins = nn.vmap(
            Critic,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,  # type: ignore[arg-type]
            axis_size=2,
        )
        return twins(self.sizes, self.activation)(jnp.concatenate([inputs, action], axis=-1))
