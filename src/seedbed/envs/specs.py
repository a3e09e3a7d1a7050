"""Checks of the spec of a task on the device. The module imports no JAX."""

from __future__ import annotations

from typing import Any

from seedbed import trees
from seedbed.types import ArraySpec, Box, Discrete, EnvSpec, MultiDiscrete, SeedbedError, Tree

_GUIDE = "docs/write-a-task.md"
_DTYPES = ("float32", "int32", "uint32", "bool")


def spec_of(env: Any) -> EnvSpec:
    """Returns a task's spec; raises SeedbedError if it fails, or if it cannot be on the device."""
    name = f"{type(env).__name__}.spec"
    try:
        spec = env.spec
    except SeedbedError:
        raise
    except Exception as error:
        raise SeedbedError(
            f"{name} failed: {type(error).__name__}: {error} (see {_GUIDE})"
        ) from error
    if not isinstance(spec, EnvSpec):
        what = (
            "a method; write @property above it" if callable(spec) else f"a {type(spec).__name__}"
        )
        raise SeedbedError(f"{name} is {what}: give an EnvSpec of seedbed.types (see {_GUIDE})")
    for leaf in trees.leaves(spec.observation):
        _require_array(name, leaf)
    _require_action(name, spec.action)
    return spec


def _require_array(name: str, leaf: Any) -> None:
    if not isinstance(leaf, ArraySpec):
        raise SeedbedError(f"{name}: {leaf!r} in the observation is no ArraySpec (see {_GUIDE})")
    if not isinstance(leaf.shape, tuple) or not all(isinstance(d, int) for d in leaf.shape):
        raise SeedbedError(
            f"{name}: {leaf!r} in the observation: give the shape as a tuple of ints, such as (3,)"
        )
    if leaf.dtype not in _DTYPES:
        raise SeedbedError(
            f"{name}: the observation has {shown(leaf)}; on the device give {', '.join(_DTYPES)} "
            f"as text (images as float32 from 0 to 1; see {_GUIDE})"
        )


def _require_action(name: str, action: Any) -> None:
    if not isinstance(action, Box | Discrete | MultiDiscrete):
        raise SeedbedError(
            f"{name}: the action is {action!r}, not a Discrete, MultiDiscrete or Box of seedbed.types (see "
            f"{_GUIDE})"
        )
    if isinstance(action, Box):
        return
    sizes = (action.n,) if isinstance(action, Discrete) else tuple(action.nvec)
    if not sizes or not all(size >= 1 for size in sizes):
        raise SeedbedError(f"{name}: the action is {action!r}; give at least 1 choice")


def shown(tree: Tree) -> str:
    """Returns a text for people: an array as `float32[2,3]`, and trees of them."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {shown(child)}" for key, child in tree.items()) + "}"
    if isinstance(tree, list):
        return f"[{', '.join(map(shown, tree))}]"
    if isinstance(tree, tuple):
        return f"({', '.join(map(shown, tree))})"
    return f"{tree.dtype}[{','.join(map(str, tree.shape))}]"
