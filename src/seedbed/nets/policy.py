"""The actor-critic network: one torso, an optional memory, a policy and a value."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from seedbed.nets.heads import PolicyHead, ValueHead
from seedbed.nets.recurrent import LSTM, initial_lstm_state, memory_inputs
from seedbed.nets.torsos import Torso, TorsoName

Tree = Any
ActivationName = Literal["relu", "tanh", "swish"]
_ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "swish": nn.swish}


class ActorCritic(nn.Module):
    """Policy and value of sequences of observations, from one torso or, with `value_sizes`, from two.

    A memory is fed the features, the previous action and the reward that it brought, clipped to [-1, 1], as
    in Espeholt et al. (2018), figure 3.
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
        self,
        observation: Tree,
        previous_action: Tree,
        reward: Array,
        first: Array,
        core: Tree,
        scaling: Tree = None,
    ) -> tuple[Array, Array, Tree]:
        """Consumes `[T, B, ...]`, `[T, B, A]`, `[T, B]`, `[T, B]` and a core from `initial_core`.

        `previous_action` is a vector; it and the reward are zeroed where `first`. Without a memory all three
        are unused, and the action may be (). Returns distribution parameters `[T, B, parameter_size]`, values
        `[T, B]` and the core after the last row. The torso sees all rows at once, scaled by the tree
        `scaling` if there is one.
        """

        def features(sizes: tuple[int, ...], core: Tree) -> tuple[Array, Tree]:
            """Features `[T, B, D]` of a torso and memory made here, and the core after the last row."""
            rows, batch = first.shape
            folded = jax.tree.map(lambda x: x.reshape(rows * batch, *x.shape[2:]), observation)
            torso = Torso(self.image, sizes, _ACTIVATIONS[self.activation], dtype=self.dtype)
            seen = torso(folded, scaling).reshape(rows, batch, -1)
            if not self.lstm_size:
                return seen, core
            inputs = memory_inputs(seen, previous_action, jnp.clip(reward, -1.0, 1.0), first)
            return LSTM(self.lstm_size)(inputs, first, core)

        policy_core, value_core = core if self._two and self.lstm_size else (core, core)
        policy_features, policy_core = features(self.sizes, policy_core)
        parameters = PolicyHead(self.parameter_size)(policy_features)
        if not self._two:
            return parameters, ValueHead()(policy_features), policy_core
        value_features, value_core = features(self.value_sizes, value_core)
        core = (policy_core, value_core) if self.lstm_size else ()
        return parameters, ValueHead()(value_features), core

    @nn.nowrap
    def initial_core(self, batch: int) -> Tree:
        """Recurrent state of `batch` environments before their first row; () without memory."""
        if not self.lstm_size:
            return ()
        core = initial_lstm_state(batch, self.lstm_size)
        return (core, core) if self._two else core

    @property
    def _two(self) -> bool:
        return bool(self.value_sizes)


def rescale_values(weights: Tree, factor: Array, offset: Array) -> Tree:
    """Returns an `ActorCritic`'s weights whose values are `factor * value + offset`, exactly.

    Only the last layer of the value changes. Source: van Hasselt et al. (2016), equation 5 ("PopArt").
    """
    layers = weights["params"]
    dense = layers["ValueHead_0"]["Dense_0"]
    dense = {"kernel": dense["kernel"] * factor, "bias": dense["bias"] * factor + offset}
    return {**weights, "params": {**layers, "ValueHead_0": {"Dense_0": dense}}}
