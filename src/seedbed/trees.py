"""Pytrees of numpy arrays without JAX: tuples, NamedTuples, lists and dicts (by sorted keys, as in JAX)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seedbed.types import Tree


def leaves(tree: Tree) -> list[Any]:
    """Returns the leaves in the order in which JAX lists them; None is an empty tree."""
    if tree is None:
        return []
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, tuple | list):
        return [leaf for child in tree for leaf in leaves(child)]
    return [tree]


def map(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:  # noqa: A001
    """Applies a function to the leaves of trees of the same structure, and returns a tree of the results.

    Raises ValueError if a dict in `tree` does not meet dicts with the same keys in `rest`, or a sequence
    does not meet sequences of the same length.
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        if any(not isinstance(other, dict) or other.keys() != tree.keys() for other in rest):
            raise ValueError(f"trees differ: a dict with keys {sorted(tree)} against {rest}")
        return {
            key: map(function, tree[key], *(other[key] for other in rest)) for key in sorted(tree)
        }
    if isinstance(tree, tuple | list):
        if any(not isinstance(other, tuple | list) or len(other) != len(tree) for other in rest):
            raise ValueError(f"trees differ: a sequence of {len(tree)} against {rest}")
        children = [map(function, *parts) for parts in zip(tree, *rest, strict=True)]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return function(tree, *rest)


def unflatten(structure: Tree, flat: list[Any]) -> Tree:
    """Builds a tree of the structure of `structure` from `flat`, its leaves in the order of `leaves`.

    Raises ValueError if there are more or fewer than it has.
    """
    if len(flat) != (count := len(leaves(structure))):
        raise ValueError(f"{len(flat)} leaves do not fit {structure}, which has {count}")
    remaining = iter(flat)
    return map(lambda _: next(remaining), structure)
