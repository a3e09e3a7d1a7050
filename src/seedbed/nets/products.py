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

from seedbed.nets.native.call import same_axes


def multiply(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """Returns `x @ kernel`, float32 `[..., N]`, for x `[..., K]` and a kernel `[K, N]`.

    Both are rounded to `dtype`, which is float32 or bfloat16.
    """
    if dtype == jnp.float32:
        return x @ kernel
    return _rounded(dtype, *same_axes(x, kernel))


def sum_of_products(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sum over all rows of x `[..., K]` times y `[..., N]`, float32 `[K, N]`.

    Both are rounded to `dtype`.
    """
    # The innermost first, as einsum has them: another order would be another sum.
    rows = tuple(reversed(range(x.ndim - 1)))
    return _dot(x.astype(dtype), y.astype(dtype), rows, rows)


@functools.cache
def dot_general_in(dtype: Any) -> Callable[..., jax.Array] | None:
    """Returns the `dot_general` of a flax layer that makes its product `multiply`; flax's own is None."""
    if dtype == jnp.float32:
        return None

    def dot_general(x: jax.Array, kernel: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return multiply(x, kernel, dtype)

    return dot_general


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rounded(dtype: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _rounded_fwd(dtype, x, kernel)[0]


def _rounded_fwd(dtype: Any, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple]:
    saved = x.astype(dtype), kernel.astype(dtype)
    return _dot(*saved, (x.ndim - 1,), (0,)), saved


def _rounded_bwd(dtype: Any, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    dy = dy.astype(dtype)
    return _dot(dy, kernel, (dy.ndim - 1,), (1,)), sum_of_products(x, dy, dtype)


_rounded.defvjp(_rounded_fwd, _rounded_bwd)


def _dot(x: jax.Array, y: jax.Array, *contracted: tuple[int, ...]) -> jax.Array:
    return lax.dot_general(x, y, (contracted, ((), ())), preferred_element_type=jnp.float32)
