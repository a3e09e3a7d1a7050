"""Calls compiled kernels from JAX: under vmap, inside shard_map, and with a fallback for other devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax

from seedbed.ffi import varying_axes, varying_like

_IMAGES_PER_CHUNK = 4
_MOST_CHUNKS = 32
# Calls under vmap that are made one by one and not in a loop, such as those of two critics.
_UNROLLED = 4


def call_kernel(
    target: str,
    arrays: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
    first: Any = jnp.float32,
) -> Sequence[jax.Array]:
    """Calls the registered kernel `target`; returns arrays of the given shapes.

    They are float32, but the first has the dtype `first`.
    """
    dtypes = [first] + [jnp.float32] * (len(shapes) - 1)
    plain = [jax.ShapeDtypeStruct(*kind) for kind in zip(shapes, dtypes, strict=True)]
    return jax.ffi.ffi_call(target, [varying_like(kind, *arrays) for kind in plain])(*arrays)


def count_chunks(images: jax.Array) -> int:
    """Returns the number of shares that a batch of images [N, ...] is cut into, from 1 to 32.

    It depends on N alone, so the order of summation is the same whatever the threads do. N may be a symbolic
    dimension of `jax.export`.
    """
    most = core.min_dim(_MOST_CHUNKS, images.shape[0] // _IMAGES_PER_CHUNK)
    return core.max_dim(1, most)


def sum_chunks(parts: jax.Array) -> jax.Array:
    """Sums over the leading axis by a matrix product: XLA's reduction on CPU is many times slower."""
    ones = jnp.ones((1, parts.shape[0]), parts.dtype)
    total = jnp.matmul(ones, parts.reshape(parts.shape[0], -1), precision=lax.Precision.HIGHEST)
    return total.reshape(parts.shape[1:])


def same_axes(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Marks all arrays as varying over every mesh axis over which one of them varies.

    The derivative with respect to an array then sums over the axes that were added to it.
    """
    each = [varying_axes(a) for a in arrays]
    axes = frozenset[str]().union(*each)
    missing = [tuple(sorted(axes - mine)) for mine in each]
    return tuple(
        lax.pcast(a, m, to="varying") if m else a for a, m in zip(arrays, missing, strict=True)
    )


def batched(
    native: Callable[..., Any], fallback: Callable[..., Any], images: int
) -> Callable[..., Any]:
    """Returns a function of arrays that runs `native` on CPU and `fallback` elsewhere, with a vmap rule.

    The first `images` arrays have a leading axis of independent images. If vmap maps only these, the mapped
    axis is folded into that axis; the function must then return one array, with the same leading axis. Under
    any other mapping the calls on CPU run one after another.
    """

    @jax.custom_batching.custom_vmap
    def run(*arrays: jax.Array) -> Any:
        return lax.platform_dependent(*arrays, cpu=native, default=fallback)

    @run.def_vmap
    def _rule(size: int, mapped: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        if any(mapped[images:]) or not images:
            axes = [0 if m else None for m in mapped]
            result = lax.platform_dependent(
                *arrays,
                cpu=functools.partial(_one_by_one, run, size, mapped),
                default=jax.vmap(fallback, axes),
            )
            return result, jax.tree.map(lambda _: True, result)
        n = next(a.shape[int(m)] for a, m in zip(arrays, mapped, strict=True))
        folded = [
            (a if m else jnp.broadcast_to(a, (size, *a.shape))).reshape(size * n, *a.shape[1 + m :])
            for a, m in zip(arrays[:images], mapped, strict=False)
        ]
        result = run(*folded, *arrays[images:])
        return result.reshape(size, n, *result.shape[1:]), True

    return run


def _one_by_one(
    run: Callable[..., Any], size: int, mapped: Sequence[bool], *arrays: jax.Array
) -> Any:
    """Calls `run` for each element of the leading axes of the mapped arrays, and stacks the results."""

    def one(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        return run(*(next(rest) if m else a for a, m in zip(arrays, mapped, strict=True)))

    moving = [a for a, m in zip(arrays, mapped, strict=True) if m]
    if not 0 < size <= _UNROLLED:
        return lax.map(one, moving)
    results = [one([a[i] for a in moving]) for i in range(size)]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *results)
