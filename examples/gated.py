"""A torso of one's own: gated layers with skip connections, in place of the plain MLP.

    cd examples
    seedbed train ant --agent.torso "gated:Gated(units=128)"

A torso turns all that an environment shows into features; the agent adds its memory and its heads. Its
parameters are saved, sent to actors and exported like those of any other network.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Gated(nn.Module):
    """Blocks of x + swish(a) * b, where a and b are linear in x, after one dense layer."""

    units: int = 64
    blocks: int = 2

    @nn.compact
    def __call__(self, observation: Any) -> jax.Array:
        """Returns features [B, units] of an observation, or a tree of them, whose leaves are [B, ...]."""
        leaves = [
            x.reshape(x.shape[0], -1).astype(jnp.float32) for x in jax.tree.leaves(observation)
        ]
        x = nn.tanh(nn.Dense(self.units)(jnp.concatenate(leaves, axis=-1)))
        for _ in range(self.blocks):
            gate, value = jnp.split(nn.Dense(2 * self.units)(nn.LayerNorm()(x)), 2, axis=-1)
            x = x + nn.swish(gate) * value
        return x
