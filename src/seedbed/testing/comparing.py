"""Trees that checks compare, leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.types import Array, Tree


def equal(one: Tree, other: Tree) -> bool:
    """Returns whether two trees of one form have the same numbers."""
    return all(np.array_equal(numbers(a), numbers(b)) for _, (a, b) in pairs(one, other))


def pairs(one: Tree, other: Tree) -> list[tuple[Any, tuple[Any, Any]]]:
    """Returns (path, (leaf, leaf)) of two trees of one form."""
    flat = jax.tree_util.tree_flatten_with_path(one)[0]
    others = jax.tree.leaves(other)
    return [(path, (leaf, twin)) for (path, leaf), twin in zip(flat, others, strict=True)]


def numbers(leaf: Array) -> Array:
    """Returns an array as numpy has it; a key as the numbers that it is made of."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)
