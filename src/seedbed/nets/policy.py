"""The actor-critic network: one torso, an optional memory, a policy and a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from seedbed.nets.heads import PolicyHead, ValueHead
from seedbed.nets.recurrent import LSTM, initial_lstm_state
from seedbed.nets.torsos import Torso, TorsoName

Tree = Any


class ActorCritic(nn.Module):
    """Policy and value of sequences of observations.

    The memory is fed the features and the clipped reward: these arrive with each timestep. The
    previous action, which some papers add, would have to be carried as a further actor state.
    """

    parameter_size: int
    image: TorsoName = "nature"
    sizes: tuple[int, ...] = (64, 64)
    activation: Callable[[Array], Array] = nn.relu
    lstm_size: int = 0  # 0: no memory
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, observation: Tree, reward: Array, first: Array, core: Tree, scaling: Tree = None
    ) -> tuple[Array, Array, Tree]:
        """Consumes `[T, B, ...]`, `[T, B]`, `[T, B]` and a core from `initial_core`.

        Returns distribution parameters `[T, B, parameter_size]`, values `[T, B]` and the core after
        the last row. The torso sees all rows at once, scaled by the tree `scaling` if there is one.
        """
        rows, batch = first.shape
        folded = jax.tree.map(lambda x: x.reshape(rows * batch, *x.shape[2:]), observation)
        torso = Torso(self.image, self.sizes, self.activation, dtype=self.dtype)
        features = torso(folded, scaling).reshape(rows, batch, -1)
        if self.lstm_size:
            clipped = jnp.clip(reward, -1.0, 1.0)[..., None]
            inputs = jnp.concatenate([features, clipped], axis=-1)
            features, core = LSTM(self.lstm_size)(inputs, first, core)
        return PolicyHead(self.parameter_size)(features), ValueHead()(features), core

    @nn.nowrap
    def initial_core(self, batch: int) -> Tree:
        """Recurrent state of `batch` environments before their first row; () without memory."""
        return initial_lstm_state(batch, self.lstm_size) if self.lstm_size else ()
