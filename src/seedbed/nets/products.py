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
    return _multiply(dtype, *same_axes(x, kernel))


def sum_of_products(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Returns the sum over all rows of x `[..., K]` times y `[..., N]`, float32 `[K, N]`.

    Both are rounded to `dtype`.
    """
    # The innermost first, as einsum has them: another order would be another sum.
    rows = tuple(reversed(range(x.ndim - 1)))
    return _dot(_rounded(x, dtype), _rounded(y, dtype), (rows, rows))


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
    saved = _rounded(x, dtype), _rounded(kernel, dtype)
    return _dot(*saved, ((x.ndim - 1,), (0,))), saved


def _multiply_bwd(dtype: Any, saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    dx = _dot(_rounded(dy, dtype), kernel, ((dy.ndim - 1,), (1,)))
    return dx, sum_of_products(x, dy, dtype)


_multiply.defvjp(_multiply_fwd, _multiply_bwd)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.float32:
        return x
    # XLA may leave out a conversion that is undone later, as it is on a CPU, but not this.
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def _dot(
    x: jax.Array, y: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]
) -> jax.Array:
    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return lax.dot_general(x, y, (contracted, ((), ())), preferred_element_type=jnp.float32)

    if x.dtype == jnp.float32:
        return dot(x, y)

    def in_float32(x: jax.Array, y: jax.Array) -> jax.Array:
        return dot(x.astype(jnp.float32), y.astype(jnp.float32))

    # Products of two numbers of bfloat16 are exact in float32. On a CPU, XLA cannot run all products of
    # bfloat16 with sums in float32, such as those of two critics at once.
    return lax.platform_dependent(x, y, cpu=in_float32, default=dot)
