"""The root of an equation, with the derivative of a root instead of that of the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from seedbed.types import Array


def root_of(
    slope: Callable[[jax.Array, Any], jax.Array],
    find: Callable[[Any], jax.Array],
    given: Any,
    direction: Callable[[jax.Array], jax.Array] = jnp.ones_like,
) -> jax.Array:
    """Returns the root x = find(given) of slope(x, given) = 0, scalar, with the derivative of a root.

    `x` moves along direction(x) only. Where the slope does not change along it, or is not zero, as at the end
    of an interval, the root stays.
    """
    arrays, rebuild = parted(given)

    @jax.custom_jvp
    def root(arrays: list[jax.Array]) -> jax.Array:
        return find(rebuild(arrays))

    @root.defjvp
    def tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (arrays,), (moves,) = primals, tangents
        x = root(arrays)
        way = direction(x)
        value, bend = jax.jvp(lambda x: slope(x, rebuild(arrays)), (x,), (way,))
        rise = jax.jvp(lambda arrays: slope(x, rebuild(arrays)), (arrays,), (moves,))[1]
        inner = jnp.abs(value) < 1e-3 * jnp.abs(bend)
        return x, -way * jnp.where(inner, rise / jnp.where(inner, bend, 1), 0)

    return root(arrays)


def parted(tree: Any) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], Any]]:
    """Returns the leaves of a tree that are JAX arrays, and a function from such leaves to the tree.

    Constants stay what they are, so that structure shows, and nothing traced is closed over.
    """
    leaves, structure = jax.tree.flatten(tree)
    kept: list[Array | None] = [None if isinstance(x, jax.Array) else x for x in leaves]

    def rebuild(arrays: Sequence[jax.Array]) -> Any:
        rest = iter(arrays)
        return jax.tree.unflatten(structure, [next(rest) if k is None else k for k in kept])

    return [x for x in leaves if isinstance(x, jax.Array)], rebuild
