"""Networks for agents with critics of actions: a policy over real vectors, and twin critics.

All networks take an observation as one vector; `vectors` makes it.
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
from seedbed.spaces import ACTION_MASK, PRIVILEGED, entry, without
from seedbed.types import Tree


def vectors(observation: Tree, lead: int) -> Array:
    """Joins the leaves of an observation into float32 vectors `[*N, D]`.

    Each leaf is `[*N, ...]` with `lead` leading axes N. Bytes are divided by 255.
    """

    def flat(leaf: Array) -> Array:
        fraction = 1.0 / 255.0 if leaf.dtype == jnp.uint8 else 1.0
        return leaf.reshape(*leaf.shape[:lead], -1).astype(jnp.float32) * fraction

    return jnp.concatenate([flat(leaf) for leaf in jax.tree.leaves(observation)], axis=-1)


def critic_inputs(observation: Tree, lead: int) -> Array:
    """Returns what critics see of an observation as vectors `[*N, D]`: what a policy sees, then the rest."""
    shown = vectors(without(observation, ACTION_MASK, PRIVILEGED), lead)
    unseen = entry(observation, PRIVILEGED)
    return shown if unseen is None else jnp.concatenate([shown, vectors(unseen, lead)], axis=-1)


class VectorPolicy(nn.Module):
    """A policy: from vectors `[N, D]` to the parameters `[N, size]` of an action distribution."""

    size: int
    sizes: tuple[int, ...]  # units of the hidden layers
    activation: ActivationName = "relu"
    dtype: Any = jnp.float32  # of the hidden layers' products

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the parameters `[N, size]`, which are nearly 0 for initial weights."""
        return PolicyHead(self.size)(Mlp(self.sizes, getattr(nn, self.activation), self.dtype)(x))


class Critic(nn.Module):
    """A critic: from vectors `[N, D]` of observation and action to the values `[N]` of the actions."""

    sizes: tuple[int, ...]  # units of the hidden layers
    activation: ActivationName = "relu"
    dtype: Any = jnp.float32  # of the hidden layers' products

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the values `[N]`."""
        return ValueHead()(Mlp(self.sizes, getattr(nn, self.activation), self.dtype)(x))


class TwinCritics(nn.Module):
    """Two critics that differ only in their weights; leaves of the weights are `[2, ...]`."""

    sizes: tuple[int, ...]  # units of the hidden layers
    activation: ActivationName = "relu"
    dtype: Any = jnp.float32  # of the hidden layers' products

    @nn.compact
    def __call__(self, inputs: Array, action: Array) -> Array:
        """Returns both critics' values `[2, N]` of actions `[N, A]` at observations `inputs` `[N, D]`."""
        twins = nn.vmap(
            Critic,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,  # type: ignore[arg-type]
            axis_size=2,
        )
        return twins(self.sizes, self.activation, self.dtype)(
            jnp.concatenate([inputs, action], axis=-1)
        )
