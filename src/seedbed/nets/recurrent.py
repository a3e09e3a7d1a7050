"""Recurrent cores over `[T, B, D]`; their state is reset at the start of every episode."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from seedbed.nets.native.call import same_axes
from seedbed.nets.orthogonal import orthogonal
from seedbed.nets.products import multiply, sum_of_products


class LSTMState(NamedTuple):
    """The state of an LSTM, each leaf `[B, H]` float32."""

    hidden: Array
    cell: Array


def initial_lstm_state(batch: int, size: int) -> LSTMState:
    """Returns the state before the first row: zeros, leaves `[batch, size]`."""
    return LSTMState(jnp.zeros((batch, size)), jnp.zeros((batch, size)))


def memory_inputs(features: Array, previous_action: Array, reward: Array, first: Array) -> Array:
    """Joins the inputs of a memory to `[T, B, D + A + 1]`: features, previous action and its reward.

    Features are `[T, B, D]`, the previous action is a vector `[T, B, A]` and the reward `[T, B]`. Action and
    reward are replaced by 0 in rows where `first` `[T, B]` is set.
    """
    before = jnp.concatenate([previous_action, reward[..., None]], axis=-1)
    before = jnp.where(first[..., None], 0.0, before)
    return jnp.concatenate([features, before], axis=-1)


class LSTM(nn.Module):
    """A long short-term memory; a single step is a sequence with T = 1.

    Source: Gers, Schmidhuber and Cummins (2000). The biases of the forget gate start at 1.
    """

    size: int
    dtype: Any = jnp.float32  # of the products; state and gates are float32

    @nn.compact
    def __call__(self, x: Array, first: Array, state: LSTMState) -> tuple[Array, LSTMState]:
        """Returns outputs `[T, B, H]` for x `[T, B, D]`, and the state after the last row.

        `state` is the state before row 0. It is set to 0 before each row where `first` `[T, B]` is set.
        """
        gates = 4 * self.size
        input_kernel = self.param("input", orthogonal(), (x.shape[-1], gates))
        recurrent_kernel = self.param("recurrent", _recurrent_init, (self.size, gates))
        bias = self.param("bias", _bias_init, (gates,))
        # One product serves all rows. Only the part that depends on the previous row stays in the loop.
        projected = multiply(x, input_kernel, self.dtype) + bias[None, None]
        projected, kernel, hidden, cell = same_axes(projected, recurrent_kernel, *state)
        return _recur(self.dtype, projected, kernel, first, LSTMState(hidden, cell))


def _scan(
    dtype: Any, projected: Array, kernel: Array, first: Array, state: LSTMState
) -> tuple[Array, LSTMState]:
    """Returns outputs `[T, B, H]` and the last state, from projected inputs `[T, B, 4 H]`."""

    def step(state: LSTMState, row: tuple[Array, Array]) -> tuple[LSTMState, Array]:
        projected, first = row
        hidden, cell = jax.tree.map(lambda s: jnp.where(first[:, None], 0.0, s), state)
        gates = projected + multiply(hidden, kernel, dtype)
        input_gate, forget_gate, candidate, output_gate = jnp.split(gates, 4, axis=-1)
        cell = nn.sigmoid(forget_gate) * cell + nn.sigmoid(input_gate) * jnp.tanh(candidate)
        hidden = nn.sigmoid(output_gate) * jnp.tanh(cell)
        return LSTMState(hidden, cell), hidden

    state, hidden = jax.lax.scan(step, state, (projected, first))
    return hidden, state


# JAX's own gradient of the loop would add up the kernel's gradient row by row: for each row a product, and
# a pass over the whole kernel. This gradient is one product for all rows.
_recur = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))(_scan)


def _recur_fwd(
    dtype: Any, projected: Array, kernel: Array, first: Array, state: LSTMState
) -> tuple[tuple[Array, LSTMState], tuple]:
    outputs, pull = jax.vjp(lambda p, s: _scan(dtype, p, kernel, first, s), projected, state)
    before = jnp.concatenate([state.hidden[None], outputs[0][:-1]])
    return outputs, (pull, jnp.where(first[..., None], 0.0, before))


def _recur_bwd(dtype: Any, saved: tuple, changes: tuple[Array, LSTMState]) -> tuple:
    pull, before = saved
    projected, state = pull(changes)
    return projected, sum_of_products(before, projected, dtype), None, state


_recur.defvjp(_recur_fwd, _recur_bwd)


def _recurrent_init(key: Array, shape: tuple[int, int]) -> Array:
    """Draws a kernel [H, 4 H] that is orthogonal for each gate separately; consumes the key."""
    size = shape[0]
    keys = jax.random.split(key, 4)
    gates = [orthogonal()(k, (size, size)) for k in keys]
    return jnp.concatenate(gates, axis=1)


def _bias_init(key: Array, shape: tuple[int]) -> Array:
    """Returns biases [4 H]: 1 for the forget gate, the second of four, else 0; the key is unused."""
    del key
    return jnp.zeros((4, shape[0] // 4)).at[1].set(1.0).reshape(shape)
