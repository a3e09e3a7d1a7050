"""Recurrent cores over `[T, B, D]`, whose state starts anew with every episode."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array


class LSTMState(NamedTuple):
    """State of an LSTM, each `[B, H]` float32."""

    hidden: Array
    cell: Array


def initial_lstm_state(batch: int, size: int) -> LSTMState:
    """State before anything was seen."""
    return LSTMState(jnp.zeros((batch, size)), jnp.zeros((batch, size)))


def memory_inputs(features: Array, previous_action: Array, reward: Array, first: Array) -> Array:
    """Joins what a memory is fed: features `[T, B, D]`, and the action and reward of the step before.

    The previous action is a vector `[T, B, A]`, the reward `[T, B]`; both are zeroed where `first` `[T, B]`.
    """
    before = jnp.concatenate([previous_action, reward[..., None]], axis=-1)
    before = jnp.where(first[..., None], 0.0, before)
    return jnp.concatenate([features, before], axis=-1)


class LSTM(nn.Module):
    """A long short-term memory; one step is a sequence with T = 1.

    Source: Gers, Schmidhuber and Cummins (2000), with forget biases of 1.
    """

    size: int

    @nn.compact
    def __call__(self, x: Array, first: Array, state: LSTMState) -> tuple[Array, LSTMState]:
        """Consumes x `[T, B, D]`; the state is zeroed where `first` `[T, B]`, before that row.

        Returns outputs `[T, B, H]` and the state after the last row.
        """
        gates = 4 * self.size
        input_kernel = self.param("input", nn.initializers.orthogonal(), (x.shape[-1], gates))
        recurrent_kernel = self.param("recurrent", _recurrent_init, (self.size, gates))
        bias = self.param("bias", _bias_init, (gates,))
        # One product for all rows; only what depends on the previous row stays in the loop.
        projected = x @ input_kernel + bias[None, None]

        return _recur(projected, recurrent_kernel, first, state)


def _scan(
    projected: Array, kernel: Array, first: Array, state: LSTMState
) -> tuple[Array, LSTMState]:
    """Outputs `[T, B, H]` and the state after the last row, from projected inputs `[T, B, 4 H]`."""

    def step(state: LSTMState, row: tuple[Array, Array]) -> tuple[LSTMState, Array]:
        projected, first = row
        hidden, cell = jax.tree.map(lambda s: jnp.where(first[:, None], 0.0, s), state)
        gates = projected + hidden @ kernel
        input_gate, forget_gate, candidate, output_gate = jnp.split(gates, 4, axis=-1)
        cell = nn.sigmoid(forget_gate) * cell + nn.sigmoid(input_gate) * jnp.tanh(candidate)
        hidden = nn.sigmoid(output_gate) * jnp.tanh(cell)
        return LSTMState(hidden, cell), hidden

    state, hidden = jax.lax.scan(step, state, (projected, first))
    return hidden, state


# Differentiated as it stands, the loop would add up the kernel's gradient row by row: a product for
# each, and a pass over the whole kernel. All rows together are one product.
_recur = jax.custom_vjp(_scan)


def _recur_fwd(
    projected: Array, kernel: Array, first: Array, state: LSTMState
) -> tuple[tuple[Array, LSTMState], tuple]:
    outputs, pull = jax.vjp(lambda p, s: _scan(p, kernel, first, s), projected, state)
    before = jnp.concatenate([state.hidden[None], outputs[0][:-1]])
    return outputs, (pull, jnp.where(first[..., None], 0.0, before))


def _recur_bwd(saved: tuple, changes: tuple[Array, LSTMState]) -> tuple:
    pull, before = saved
    projected, state = pull(changes)
    return projected, jnp.einsum("tbh,tbg->hg", before, projected), None, state


_recur.defvjp(_recur_fwd, _recur_bwd)


def _recurrent_init(key: Array, shape: tuple[int, int]) -> Array:
    """Orthogonal for each gate on its own, [H, 4 H]."""
    size = shape[0]
    keys = jax.random.split(key, 4)
    gates = [nn.initializers.orthogonal()(k, (size, size)) for k in keys]
    return jnp.concatenate(gates, axis=1)


def _bias_init(key: Array, shape: tuple[int]) -> Array:
    """Ones for the forget gate, the second of four; the key is unused."""
    del key
    return jnp.zeros((4, shape[0] // 4)).at[1].set(1.0).reshape(shape)
