"""Networks of action values, with and without a memory."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from seedbed.nets.heads import DuelingHead
from seedbed.nets.policy import ActivationName
from seedbed.nets.recurrent import LSTM, LSTMState, memory_inputs
from seedbed.nets.torsos import Torso, TorsoName

Tree = Any


class QNetwork(nn.Module):
    """Action values of observations; with `head_size` from two streams, value and advantages."""

    num_actions: int
    image: TorsoName = "nature"
    sizes: tuple[int, ...] = (64, 64)
    activation: ActivationName = "relu"
    head_size: int = 0  # units of each stream of a dueling head; 0: no such head
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, observation: Tree, scaling: Tree = None) -> Array:
        """Returns values `[B, A]` of observations `[B, ...]`, scaled by the tree `scaling` if any."""
        torso = Torso(self.image, self.sizes, getattr(nn, self.activation), dtype=self.dtype)
        features = torso(observation, scaling)
        if self.head_size:
            return DuelingHead(self.num_actions, self.head_size)(features)
        return nn.Dense(self.num_actions, kernel_init=nn.initializers.orthogonal(1.0))(features)


class RecurrentQNetwork(nn.Module):
    """Action values of sequences, from a memory.

    The memory is fed the features, the previous action and the reward that it brought, which is not clipped.
    Source: Kapturowski et al. (2019), section 2.3, with inputs as in SEED RL.
    """

    num_actions: int
    image: TorsoName = "nature"
    sizes: tuple[int, ...] = (64, 64)
    activation: ActivationName = "relu"
    head_size: int = 512  # units of each stream of the dueling head
    lstm_size: int = 512
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        observation: Tree,
        previous_action: Array,
        reward: Array,
        first: Array,
        core: LSTMState,
        scaling: Tree = None,
    ) -> tuple[Array, LSTMState]:
        """Consumes `[T, B, ...]`, `[T, B, A]`, `[T, B]`, `[T, B]` and the state before row 0.

        `previous_action` is one-hot; it and the reward are zeroed where `first`. Returns values `[T, B, A]`
        and the state after the last row.
        """
        rows, batch = first.shape
        folded = jax.tree.map(lambda x: x.reshape(rows * batch, *x.shape[2:]), observation)
        torso = Torso(self.image, self.sizes, getattr(nn, self.activation), dtype=self.dtype)
        features = torso(folded, scaling).reshape(rows, batch, -1)
        inputs = memory_inputs(features, previous_action, reward, first)
        outputs, core = LSTM(self.lstm_size)(inputs, first, core)
        return DuelingHead(self.num_actions, self.head_size)(outputs), core
