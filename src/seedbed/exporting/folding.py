"""What is known of a program at export, computed by JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from seedbed.exporting.graph import Known, compact, is_static
from seedbed.exporting.pointwise import POINTWISE
from seedbed.exporting.primitives import LOGICAL
from seedbed.run.operations import Operation

FOLDED = {
    *POINTWISE,
    *LOGICAL,
    "bitcast_convert_type",
    "erf_inv",
    "round",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
}
"""Primitives that act on elements, so that JAX can apply them to arrays in which the batch has size 1."""


_MOVES = ("expand_dims", "reshape", "rev", "slice", "split", "squeeze", "transpose")
"""Primitives that only move elements."""


def fold(operation: Operation, given: Sequence[Known]) -> list[Known] | None:
    """Returns the results of an operation on what is known, computed by JAX; None if its graph must.

    Where the batch's size enters, only elements can be computed.
    """
    name, results = operation.primitive.name, operation.results
    shapes = [result.shape for result in results]
    arrays = [x.array for x in given]
    if name == "broadcast_in_dim":
        wide, axes = [1] * len(shapes[0]), operation.params["broadcast_dimensions"]
        for axis, size in zip(axes, arrays[0].shape, strict=True):
            wide[axis] = size
        array = np.broadcast_to(arrays[0].reshape(wide), compact(shapes[0]))
        return [Known(np.array(array), shapes[0])]
    if name == "iota" and is_static((shapes[0][operation.params["dimension"]],)):
        numbers = np.arange(shapes[0][operation.params["dimension"]], dtype=results[0].dtype)
        aligned = [-1 if i == operation.params["dimension"] else 1 for i in range(len(shapes[0]))]
        array = np.broadcast_to(numbers.reshape(aligned), compact(shapes[0]))
        return [Known(np.array(array), shapes[0])]
    if name in ("dim_as_value", "iota"):
        return None
    known = all(map(is_static, [*shapes, *(x.shape for x in given)]))
    moved = name in _MOVES or (name == "gather" and "IN_BOUNDS" in str(operation.params["mode"]))
    if not known and moved and _is_splat(arrays[0]):
        value = arrays[0].reshape(-1)[0]
        return [Known(np.full(compact(shape), value), shape) for shape in shapes]
    if not known and name not in FOLDED:
        return None
    made = operation.apply(arrays)
    return [Known(np.asarray(x), shape) for x, shape in zip(made, shapes, strict=True)]


def _is_splat(array: np.ndarray) -> bool:
    return array.size > 0 and bool((array == array.reshape(-1)[0]).all())


def chosen(operation: Operation, given: Sequence[Any]) -> Any:
    """Returns the case that `select_n` takes everywhere, if that is known and has the result's shape."""
    if operation.primitive.name != "select_n":
        return None
    which = given[0]
    if not isinstance(which, Known) or not _is_splat(which.array):
        return None
    case = given[1 + int(which.array.reshape(-1)[0])]
    return case if case.shape == operation.results[0].shape else None
