"""simd.vectorize by the kernel for GPUs, which runs on this CPU; and equality of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from _ptx_host import HostKernel
from seedbed.simd.frontend.trace import trace
from seedbed.simd.gpu.call import BLOCK
from seedbed.simd.gpu.kernel import kernel_ir
from seedbed.simd.vectorize import Example, trace_example


def host_kernel(closed: core.ClosedJaxpr, shared: Sequence[bool]) -> HostKernel:
    program = trace(closed, shared)
    return HostKernel(program, kernel_ir(program))


def run(kernel: HostKernel, operands: list[Any], rows: int) -> list[np.ndarray]:
    """Runs as many blocks as the custom call does."""
    return kernel.run(operands, rows, blocks=-(-rows // BLOCK), threads=BLOCK)


def host_vectorize(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `simd.vectorize(fn)` by the kernel for GPUs, on this CPU; arguments are arrays, not traced."""
    kernels: dict[Any, tuple[Example, HostKernel]] = {}

    def batched(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), args)
        key = structure, *((x.shape[1:], x.dtype) for x in leaves)
        if key not in kernels:
            example = trace_example(fn, "fn", (one, {}))
            given = len(example.closed.in_avals) - len(example.shared)
            flags = [False] * given + [True] * len(example.shared)
            kernels[key] = example, host_kernel(example.closed, flags)
        example, kernel = kernels[key]
        data = [key_data(leaf) for leaf in (*leaves, *example.shared)]
        return example.rebuild(run(kernel, data, leaves[0].shape[0]))

    return batched


def key_data(leaf: Any) -> Any:
    """Returns the data of keys; returns any other leaf as it is."""
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def assert_same_bits(got: Any, want: Any) -> None:
    """Asserts that two pytrees are equal bit by bit; any NaN equals any other."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for i, (first, second) in enumerate(pairs):
        a, b = (np.ascontiguousarray(key_data(x)) for x in (first, second))
        assert (a.shape, a.dtype) == (b.shape, b.dtype), i
        if a.dtype == np.float32:
            missing = np.isnan(a) & np.isnan(b)
            a, b = (np.where(missing, 0, x.view(np.int32)) for x in (a, b))
        np.testing.assert_array_equal(a, b, err_msg=f"leaf {i}")
