"""The custom call by which XLA launches PTX, as StableHLO.

XLA passes the kernel nothing but the addresses of buffers: the operands, then the results, in turn. It loads
the PTX by CUDA's driver. The call may not be split over devices, since its grid counts the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.interpreters import mlir

from seedbed.simd.gpu.compiler import entry_name

TARGET = "__gpu$xla.gpu.ptx"
BLOCK = 32
"""Threads of a block: one warp, so that few rows, too, spread over all multiprocessors and their caches."""


def launch(ctx: Any, operands: Sequence[Any], ptx: str, shared: Sequence[bool]) -> Any:
    """Returns the results of the custom call that runs PTX on `operands`, in a lowering rule of JAX.

    `shared` flags the operands that all examples share. The number of rows must be known, and not 0.
    """
    rows = ctx.avals_out[0].shape[0]
    # Not part of the PTX, which so serves all batch sizes.
    count = mlir.ir_constant(np.array([rows], np.int32))
    last = jax.core.ShapedArray((1,), np.dtype(np.int32))
    # If no output indices are given, XLA's older versions pass equal operands only once.
    results = [mlir.i32_attr(len(operands) + 1 + i) for i in range(len(ctx.avals_out))]
    config = {
        "name": mlir.ir.StringAttr.get(entry_name(ptx)),
        "kernel_type": mlir.ir.StringAttr.get("ptx"),
        "kernel_data": mlir.ir.StringAttr.get(ptx),
        **_dimensions("grid", -(-rows // BLOCK)),
        **_dimensions("block", BLOCK),
        "shared_mem_bytes": mlir.i32_attr(0),
        "output_indices": mlir.ir.ArrayAttr.get(results),
    }
    rule = jax.ffi.ffi_lowering(
        TARGET,
        operand_layouts=[
            *(_layout(a, s) for a, s in zip(ctx.avals_in, shared, strict=True)),
            _layout(last, True),
        ],
        result_layouts=[_layout(a, False) for a in ctx.avals_out],
        backend_config=config,
    )
    return rule(ctx.replace(avals_in=[*ctx.avals_in, last]), *operands, count)


def _dimensions(kind: str, x: int) -> dict[str, Any]:
    sizes = {"x": x, "y": 1, "z": 1}
    return {f"{kind}_{axis}": mlir.i32_attr(size) for axis, size in sizes.items()}


def _layout(aval: Any, shared: bool) -> tuple[int, ...]:
    """Returns the axes of an operand or result from the fastest to the slowest; the rows are the fastest."""
    own = tuple(range(len(aval.shape)))[::-1]
    return own if shared else (0, *own[:-1])
