"""The actor-critic network: one torso, an optional memory, a policy and a value."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from seedbed.nets.heads import PolicyHead, ValueHead
from seedbed.nets.recurrent import LSTM, initial_lstm_state
from seedbed.nets.torsos import Torso, TorsoName

Tree = Any
ActivationName = Literal["relu", "tanh", "swish"]
_ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "swish": nn.swish}


class ActorCritic(nn.Module):
    """Policy and value of sequences of observations, from one torso or, with `value_sizes`, from two.

    The memory is fed the features and the clipped reward: these arrive with each timestep. The
    previous action, which some papers add, would have to be carried as a further actor state.
    """

    parameter_size: int
    image: TorsoName = "nature"
    sizes: tuple[int, ...] = (64, 64)
    value_sizes: tuple[
        int, ...
    ] = ()  # layers of the value's own mlp; empty: it has no torso of its own
    activation: ActivationName = "relu"
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
        features, policy_core = self._features(
            self.sizes, observation, reward, first, core[0] if self._two else core, scaling
        )
        parameters = PolicyHead(self.parameter_size)(features)
        if not self._two:
            return parameters, ValueHead()(features), policy_core
        features, value_core = self._features(
            self.value_sizes, observation, reward, first, core[1], scaling
        )
        return parameters, ValueHead()(features), (policy_core, value_core)

    def _features(
        self,
        sizes: tuple[int, ...],
        observation: Tree,
        reward: Array,
        first: Array,
        core: Tree,
        scaling: Tree,
    ) -> tuple[Array, Tree]:
        """Features `[T, B, D]` of a torso and memory made here, and the core after the last row."""
        rows, batch = first.shape
        folded = jax.tree.map(lambda x: x.reshape(rows * batch, *x.shape[2:]), observation)
        torso = Torso(self.image, sizes, _ACTIVATIONS[self.activation], dtype=self.dtype)
        features = torso(folded, scaling).reshape(rows, batch, -1)
        if self.lstm_size:
            clipped = jnp.clip(reward, -1.0, 1.0)[..., None]
            inputs = jnp.concatenate([features, clipped], axis=-1)
            features, core = LSTM(self.lstm_size)(inputs, first, core)
        return features, core

    @nn.nowrap
    def initial_core(self, batch: int) -> Tree:
        """Recurrent state of `batch` environments before their first row; () without memory."""
        core = initial_lstm_state(batch, self.lstm_size) if self.lstm_size else ()
        return (core, core) if self._two else core

    @property
    def _two(self) -> bool:
        return bool(self.value_sizes)
