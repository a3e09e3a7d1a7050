"""The actor-critic network: one or two torsos, an optional memory, a policy and a value."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from seedbed.nets.equivariant import EquivariantHead, Symmetry
from seedbed.nets.heads import PolicyHead, ValueHead
from seedbed.nets.recurrent import LSTM, initial_lstm_state, memory_inputs
from seedbed.nets.torsos import Torso
from seedbed.spaces import PRIVILEGED, Reflection, without
from seedbed.types import Tree

ActivationName = Literal["relu", "tanh", "swish"]
_ACTIVATIONS = {"relu": nn.relu, "tanh": nn.tanh, "swish": nn.swish}


class ActorCritic(nn.Module):
    """A network from sequences of observations to the parameters of a policy and to values.

    It has one torso, or two with `value_sizes`; then only the value sees an entry `privileged` of the
    observation. If it has a memory, the inputs of the memory are the
    features, the previous action and the reward of that action, clipped to [-1, 1], as in Espeholt et al.
    (2018), figure 3.
    """

    parameter_size: int
    image: str = "nature"
    sizes: tuple[int, ...] = (64, 64)  # units of the mlp's layers
    value_sizes: tuple[int, ...] = ()
    """Units of the mlp's layers in the value's own torso (and memory); if empty, it shares the policy's."""
    activation: ActivationName = "relu"
    lstm_size: int = 0  # 0 is no memory
    dtype: Any = jnp.float32
    symmetry: Symmetry | None = None
    """With it, a policy of reflected observations is the reflected policy, and the value is the same."""

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
        """Returns parameters `[T, B, parameter_size]`, values `[T, B]` and the core after the last row.

        The torso gets all rows at once.

        Args:
            observation: leaves [T, B, ...].
            previous_action: vectors [T, B, A]; replaced by 0 in rows where `first` is set. () without memory.
            reward: of the previous action, [T, B]; replaced by 0 in rows where `first` is set.
            first: bool [T, B]; the core is set to 0 before rows where it is set.
            core: from `initial_core`, or from a call with the rows before.
            scaling: tree that scales the observation, or None (see `Torso`).
        """

        def features(
            sizes: tuple[int, ...], core: Tree, reflection: Reflection | None, *unseen: str
        ) -> tuple[Array, Tree]:
            """Makes a torso and memory; returns features `[T, B, D]` and the core after the last row."""
            rows, batch = first.shape
            shown = without(observation, *unseen)
            folded = jax.tree.map(lambda x: x.reshape(rows * batch, *x.shape[2:]), shown)
            activation = _ACTIVATIONS[self.activation]
            torso = Torso(self.image, sizes, activation, self.dtype, reflection)
            seen = torso(folded, without(scaling, *unseen)).reshape(rows, batch, -1)
            if not self.lstm_size:
                return seen, core
            inputs = memory_inputs(seen, previous_action, jnp.clip(reward, -1.0, 1.0), first)
            return LSTM(self.lstm_size, self.dtype)(inputs, first, core)

        policy_core, value_core = core if self._two and self.lstm_size else (core, core)
        seen, whole, turned = self.symmetry or (None, None, None)
        policy_features, policy_core = features(self.sizes, policy_core, seen, PRIVILEGED)
        head = PolicyHead(self.parameter_size) if turned is None else EquivariantHead(turned)
        parameters = head(policy_features)
        if not self._two:
            return parameters, self._value(policy_features), policy_core
        value_features, value_core = features(self.value_sizes, value_core, whole)
        core = (policy_core, value_core) if self.lstm_size else ()
        return parameters, self._value(value_features), core

    def _value(self, features: Array) -> Array:
        """Returns values `[T, B]`; with a symmetry, only even features tell them."""
        if self.symmetry is not None:
            features = features[..., : features.shape[-1] // 2]
        return ValueHead()(features)

    @nn.nowrap
    def initial_core(self, batch: int) -> Tree:
        """Returns the recurrent state of `batch` environments before row 0; () without memory."""
        if not self.lstm_size:
            return ()
        core = initial_lstm_state(batch, self.lstm_size)
        return (core, core) if self._two else core

    @property
    def _two(self) -> bool:
        return bool(self.value_sizes)


_VALUE_LAYERS = frozenset({"Torso_1", "LSTM_1", "ValueHead_0"})
"""Layers of the value's own network, if there are two; flax numbers them as they are made."""


def separate_networks(weights: Tree) -> tuple[Tree, Tree]:
    """Splits weights, or their gradients, of two networks: into the policy's and the value's."""
    layers = weights["params"]
    policy = {name: layer for name, layer in layers.items() if name not in _VALUE_LAYERS}
    value = {name: layer for name, layer in layers.items() if name in _VALUE_LAYERS}
    return policy, value


def join_networks(policy: Tree, value: Tree) -> Tree:
    """Joins the layers that `separate_networks` has split into one tree of weights, or of gradients."""
    return {"params": {**policy, **value}}


def rescale_values(weights: Tree, factor: Array, offset: Array) -> Tree:
    """Returns weights of an `ActorCritic` with which every value v becomes `factor * v + offset`, exactly.

    Only the last layer of the value changes. Source: van Hasselt et al. (2016), equation 5 ("PopArt").
    """
    layers = weights["params"]
    dense = layers["ValueHead_0"]["Dense_0"]
    dense = {"kernel": dense["kernel"] * factor, "bias": dense["bias"] * factor + offset}
    return {**weights, "params": {**layers, "ValueHead_0": {"Dense_0": dense}}}
