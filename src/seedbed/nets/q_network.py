"""Networks for action values, with and without a memory."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from seedbed.nets.heads import DuelingHead
from seedbed.nets.orthogonal import orthogonal
from seedbed.nets.policy import ActivationName
from seedbed.nets.recurrent import LSTM, LSTMState, memory_inputs
from seedbed.nets.torsos import Torso
from seedbed.types import Tree


class QNetwork(nn.Module):
    """A network from observations to action values; with `head_size` it has a dueling head."""

    num_actions: int
    image: str = "nature"
    sizes: tuple[int, ...] = (64, 64)  # units of the mlp's layers
    activation: ActivationName = "relu"
    head_size: int = 0
    """Hidden units of each stream of the dueling head; 0 is a linear head instead."""
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, observation: Tree, scaling: Tree = None) -> Array:
        """Returns action values `[B, A]` for observations `[B, ...]`.

        Observations are scaled by the tree `scaling` if it is given (see `Torso`).
        """
        torso = Torso(self.image, self.sizes, getattr(nn, self.activation), dtype=self.dtype)
        features = torso(observation, scaling)
        if self.head_size:
            return DuelingHead(self.num_actions, self.head_size, self.dtype)(features)
        return nn.Dense(self.num_actions, kernel_init=orthogonal(1.0))(features)


class RecurrentQNetwork(nn.Module):
    """A network from sequences of observations to action values, with a memory.

    The inputs of the memory are the features, the previous action and the reward of that action, not
    clipped. Source: Kapturowski et al. (2019), section 2.3; the inputs are those of SEED RL.
    """

    num_actions: int
    image: str = "nature"
    sizes: tuple[int, ...] = (64, 64)  # units of the mlp's layers
    activation: ActivationName = "relu"
    head_size: int = 512  # hidden units of each stream of the dueling head
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
        """Returns action values `[T, B, A]` and the state of the memory after the last row.

        Args:
            observation: leaves [T, B, ...].
            previous_action: one-hot [T, B, A]; replaced by 0 in rows where `first` is set.
            reward: of the previous action, [T, B]; replaced by 0 in rows where `first` is set.
            first: bool [T, B]; the state is set to 0 before rows where it is set.
            core: state of the memory before row 0.
            scaling: tree that scales the observation, or None (see `Torso`).
        """
        rows, batch = first.shape
        folded = jax.tree.map(lambda x: x.reshape(rows * batch, *x.shape[2:]), observation)
        torso = Torso(self.image, self.sizes, getattr(nn, self.activation), dtype=self.dtype)
        features = torso(folded, scaling).reshape(rows, batch, -1)
        inputs = memory_inputs(features, previous_action, reward, first)
        outputs, core = LSTM(self.lstm_size, self.dtype)(inputs, first, core)
        return DuelingHead(self.num_actions, self.head_size, self.dtype)(outputs), core
