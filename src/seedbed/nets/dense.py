"""Matrix products of bfloat16 numbers by our kernels, on a CPU that is made for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from seedbed.nets.convolution_vjp import SOURCES, kernel_target
from seedbed.nets.native.bfloat16 import dense as kernels
from seedbed.nets.native.bfloat16.dense import Packed, RowProduct, Transpose, packed
from seedbed.nets.native.bfloat16.product import Instructions
from seedbed.nets.native.call import call_kernel


def product(unit: Instructions, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `x @ kernel`, float32 [N, M], for x [N, K] and a kernel [K, M]."""
    matrix = packed(*kernel.shape)
    return _multiply_rows(unit, x, _pack(kernels.pack_rows_ir, matrix, kernel), matrix)


def product_with_transpose(unit: Instructions, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `x @ kernel.T`, float32 [N, K], for x [N, M] and a kernel [K, M]."""
    columns, numbers = kernel.shape
    matrix = packed(numbers, columns)
    return _multiply_rows(unit, x, _pack(kernels.pack_columns_ir, matrix, kernel), matrix)


def sum_of_rows(unit: Instructions, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns `x.T @ y`, float32 [K, M], for x [N, K] and y [N, M]."""
    rows, columns = x.shape
    whole = Transpose(rows, columns, SOURCES[x.dtype])
    target = kernel_target("seedbed_dense_transpose", kernels.transpose_ir, (whole,), 1, 2)
    shapes = [(whole.columns, whole.rows), (whole.chunks, 1)]
    transposed, _ = call_kernel(target, [x], shapes, jnp.bfloat16)
    matrix = packed(*y.shape)
    return _multiply_rows(unit, transposed, _pack(kernels.pack_rows_ir, matrix, y), matrix)


def _multiply_rows(unit: Instructions, x: jax.Array, matrix: jax.Array, of: Packed) -> jax.Array:
    layer = RowProduct(unit, x.shape[0], of, SOURCES[x.dtype])
    target = kernel_target("seedbed_dense_product", kernels.row_product_ir, (layer,), 2, 2)
    shapes = [layer.result_shape, (layer.chunks, layer.scratch_size)]
    return call_kernel(target, [x, matrix], shapes)[0][:, : of.columns]


def _pack(emit: Callable[..., str], of: Packed, array: jax.Array) -> Any:
    target = kernel_target("seedbed_dense_pack", emit, (of, SOURCES[array.dtype]), 1, 2)
    return call_kernel(target, [array], [of.shape, (of.shares, 1)], jnp.bfloat16)[0]
