"""Matrix products of networks in a chosen precision: with bfloat16, only their operands are rounded.

Sums, results and gradients are float32. The gradient of a result is rounded before it is multiplied, so
that all three products of a layer are fast where bfloat16 is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from seedbed.nets import dense
from seedbed.nets.convolution_vjp import SOURCES
from seedbed.nets.native.bfloat16.instructions import UNITS, host_instructions
from seedbed.nets.native.call import batched, same_axes


def multiply(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """Returns `x @ kernel`, float32 `[..., N]`, for x `[..., K]` and a kernel `[K, N]`.

    Both are rounded to `dtype`, which is float32 or bfloat16. With bfloat16, gradients of any order are
    products of this kind, and there is no forward differentiation.
    """
    if dtype == jnp.float32:
        return x @ kernel
    x, kernel = same_axes(x, kernel)
    return _product(_rows(x), _rows(kernel)).reshape(*x.shape[:-1], kernel.shape[1])


def sum_of_products(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sum over all rows of x `[..., K]` times y `[..., N]`, float32 `[K, N]`.

    Both are rounded to `dtype`.
    """
    if dtype == jnp.float32:
        # The innermost first, as einsum has them: another order would be another sum.
        rows = tuple(reversed(range(x.ndim - 1)))
        return lax.dot_general(x, y, ((rows, rows), ((), ())))
    x, y = same_axes(x, y)
    return _sum_of_rows(_rows(x), _rows(y))


@functools.cache
def dot_general_in(dtype: Any) -> Callable[..., jax.Array] | None:
    """Returns the `dot_general` of a flax layer that makes its product `multiply`; flax's own is None."""
    if dtype == jnp.float32:
        return None

    def dot_general(x: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return multiply(x, kernel, dtype)

    return dot_general


def _rows(x: jax.Array) -> jax.Array:
    """Returns x `[..., K]` as rows [N, K], float32 or bfloat16."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.dtype in SOURCES else rows.astype(jnp.float32)


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `x @ kernel` [N, M] for x [N, K] and a kernel [K, M]."""
    return _rounding(dense.product)(x, kernel)


@jax.custom_vjp
def _product_with_transpose(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `x @ kernel.T` [N, K] for x [N, M] and a kernel [K, M]."""
    return _rounding(dense.product_with_transpose)(x, kernel)


@jax.custom_vjp
def _sum_of_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns `x.T @ y` [K, M] for x [N, K] and y [N, M]."""
    return _rounding(dense.sum_of_rows)(x, y)


# The gradients of each are the two others.
_GRADIENTS: dict[Any, Callable[..., tuple[jax.Array, jax.Array]]] = {
    _product: lambda x, kernel, dy: (_product_with_transpose(dy, kernel), _sum_of_rows(x, dy)),
    _product_with_transpose: lambda x, kernel, dy: (_product(dy, kernel), _sum_of_rows(dy, x)),
    _sum_of_rows: lambda x, y, dy: (_product_with_transpose(y, dy), _product(x, dy)),
}


def _define_gradients(function: Any) -> None:
    def forward(x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return function(x, y), (x, y)

    def backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx, dother = _GRADIENTS[function](*saved, dy)
        return dx.astype(saved[0].dtype), dother.astype(saved[1].dtype)

    function.defvjp(forward, backward)


for _function in _GRADIENTS:
    _define_gradients(_function)


@functools.cache
def _rounding(product: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Returns a product of `dense`, without its instructions, that also runs where there are no kernels."""
    axes = _CONTRACTED[product]

    def native(x: jax.Array, y: jax.Array) -> jax.Array:
        unit = host_instructions()
        if unit is None or 0 in (*x.shape, *y.shape):
            # XLA cannot run all products of bfloat16 on a CPU. They are exact in float32.
            return dot(*(_rounded(a).astype(jnp.float32) for a in (x, y)))
        return product(UNITS[unit], x, y)

    def fallback(x: jax.Array, y: jax.Array) -> jax.Array:
        return dot(_rounded(x), _rounded(y))

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)

    return batched(native, fallback, images=0 if product is dense.sum_of_rows else 1)


_CONTRACTED = {
    dense.product: ((1,), (0,)),
    dense.product_with_transpose: ((1,), (1,)),
    dense.sum_of_rows: ((0,), (0,)),
}


def _rounded(x: jax.Array) -> jax.Array:
    # XLA may leave out a conversion that is undone later, as it is on a CPU, but not this.
    kind = jnp.finfo(jnp.bfloat16)
    return lax.reduce_precision(x, kind.nexp, kind.nmant).astype(jnp.bfloat16)
