"""The operations of a graph in numpy, to fold operations on known numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def numpy_operation(op: str) -> Callable[..., Any]:
    """Returns the numpy function that computes the operation `op` of a graph."""
    return OPERATIONS[op]


def _divide(a: Any, b: Any) -> Any:
    """Divides; integers round towards zero, and an integer divided by 0 is -1."""
    if np.asarray(a).dtype.kind == "f":
        return np.divide(a, b)
    safe = np.where(b == 0, 1, b)
    quotient = np.trunc(np.divide(np.asarray(a, np.float64), np.asarray(safe, np.float64)))
    return np.where(b == 0, -1, quotient).astype(np.asarray(a).dtype)


def _remainder(a: Any, b: Any) -> Any:
    """Returns the remainder of a / b with the sign of `a`. For integers and b = 0 it is `a`."""
    if np.asarray(a).dtype.kind == "f":
        return np.fmod(a, b)
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b))).astype(np.asarray(a).dtype)


def _shift(function: Callable[..., Any], beyond: Callable[[Any], Any]) -> Callable[..., Any]:
    def shift(a: Any, b: Any) -> Any:
        inside = np.asarray(b).astype(np.uint32) < 32
        return np.where(inside, function(a, np.where(inside, b, 0)), beyond(a)).astype(
            np.asarray(a).dtype
        )

    return shift


def _logical_right(a: Any, b: Any) -> Any:
    unsigned = np.asarray(a).astype(np.uint32)
    return np.right_shift(unsigned, np.asarray(b).astype(np.uint32)).astype(np.asarray(a).dtype)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": _remainder,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift_left": _shift(np.left_shift, np.zeros_like),
    "shift_right_logical": _shift(_logical_right, np.zeros_like),
    "shift_right_arithmetic": _shift(np.right_shift, lambda a: np.where(a < 0, -1, 0)),
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def convert(value: Any, dtype: str) -> Any:
    """Converts numbers as XLA does.

    A float that becomes an integer rounds towards zero and saturates at the integer's limits; NaN becomes 0.
    """
    value = np.asarray(value)
    if dtype == "bool":
        return value != 0
    if value.dtype.kind == "f" and np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        clipped = np.clip(np.nan_to_num(np.trunc(value.astype(np.float64))), limits.min, limits.max)
        return clipped.astype(dtype)
    return value.astype(dtype)
