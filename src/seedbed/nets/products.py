"""Matrix products of networks in a chosen precision: with bfloat16, only their operands are rounded.

Sums, results and gradients are float32. The gradient of a result is rounded before it is multiplied, so
that all three products of a layer are fast where bfloat16 is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from seedbed.nets import dense
from seedbed.nets.native.bfloat16.instructions import UNITS, host_instructions
from seedbed.nets.native.call import batched, same_axes


def multiply(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """Returns `x @ kernel`, float32 `[..., N]`, for x `[..., K]` and a kernel `[K, N]`.

    Both are rounded to `dtype`, which is float32 or bfloat16.
    """
    if dtype == jnp.float32:
        return x @ kernel
    return _multiply(dtype, *same_axes(x, kernel))


def sum_of_products(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sum over all rows of x `[..., K]` times y `[..., N]`, float32 `[K, N]`.

    Both are rounded to `dtype`.
    """
    if dtype == jnp.float32:
        # The innermost first, as einsum has them: another order would be another sum.
        rows = tuple(reversed(range(x.ndim - 1)))
        return lax.dot_general(x, y, ((rows, rows), ((), ())))
    return _narrow("sum_of_rows")(*(a.reshape(-1, a.shape[-1]) for a in same_axes(x, y)))


@functools.cache
def dot_general_in(dtype: Any) -> Callable[..., jax.Array] | None:
    """Returns the `dot_general` of a flax layer that makes its product `multiply`; flax's own is None."""
    if dtype == jnp.float32:
        return None

    def dot_general(x: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return multiply(x, kernel, dtype)

    return dot_general


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(dtype: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _multiply_fwd(dtype, x, kernel)[0]


def _multiply_fwd(dtype: Any, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple]:
    del dtype
    return _by_rows("product", x, kernel), (x, kernel)


def _multiply_bwd(dtype: Any, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    dx = _by_rows("product_with_transpose", dy, kernel)
    return dx.astype(x.dtype), sum_of_products(x, dy, dtype)


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


def _by_rows(name: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    rows = _narrow(name)(x.reshape(-1, x.shape[-1]), kernel)
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


@functools.cache
def _narrow(name: str) -> Callable[..., jax.Array]:
    """Returns a function of `dense`, by its name, that also runs where there are no kernels."""
    axes = _CONTRACTED[name]

    def native(x: jax.Array, y: jax.Array) -> jax.Array:
        unit = host_instructions()
        if unit is None or 0 in (*x.shape, *y.shape):
            # XLA cannot run all products of bfloat16 on a CPU. They are exact in float32.
            return dot(*(_rounded(a).astype(jnp.float32) for a in (x, y)))
        return getattr(dense, name)(UNITS[unit], x, y)

    def fallback(x: jax.Array, y: jax.Array) -> jax.Array:
        return dot(_rounded(x), _rounded(y))

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)

    return batched(native, fallback, images=0 if name == "sum_of_rows" else 1)


_CONTRACTED = {
    "product": ((1,), (0,)),
    "product_with_transpose": ((1,), (1,)),
    "sum_of_rows": ((0,), (0,)),
}


def _rounded(x: jax.Array) -> jax.Array:
    # XLA may leave out a conversion that is undone later, as it is on a CPU, but not this.
    kind = jnp.finfo(jnp.bfloat16)
    return lax.reduce_precision(x, kind.nexp, kind.nmant).astype(jnp.bfloat16)
