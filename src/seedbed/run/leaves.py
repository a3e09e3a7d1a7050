"""The leaves of a tree as named arrays, as a checkpoint holds them."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.types import Tree


def named_leaves(tree: Tree, part: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves with their paths as names, such as `params.torso.kernel`, below the name `part`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return [(".".join(filter(None, (part, keystr(path)))) or "value", leaf) for path, leaf in flat]


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def array_of(leaf: Any) -> Any:
    """Returns the array of a leaf, which for a key of random numbers is its data."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def like(array: Any, leaf: Any) -> Any:
    """Returns what `array_of` made into `array`, for a leaf of this kind."""
    if not _is_key(leaf):
        return array
    # Found by tracing, because key_impl does not accept the leaf of an abstract template.
    impl: list[Any] = []
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), leaf)
    return jax.random.wrap_key_data(jnp.asarray(array), impl=impl[0])


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Returns the shape and the dtype of what `array_of` returns, also for an abstract leaf."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return tuple(array.shape), str(array.dtype)


def not_finite(tree: Tree) -> str | None:
    """Returns the name of the first leaf with a number that is not finite; None if all are."""
    with np.errstate(all="ignore"):
        # The names take longer than the sums, and gradients are small: they are made when one is asked for.
        if all(map(_finite, jax.tree.leaves(tree))):
            return None
        return next(name for name, leaf in named_leaves(tree) if not _finite(leaf))


def _finite(leaf: Any) -> bool:
    if leaf.dtype != np.float32 and (_is_key(leaf) or not jnp.issubdtype(leaf.dtype, np.floating)):
        return True
    array = np.asarray(leaf)
    # A sum is several times as fast; that of large numbers may be infinite, though they are not.
    return math.isfinite(array.sum()) or bool(np.isfinite(array).all())
