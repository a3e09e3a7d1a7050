"""What environments show and take: shapes, dtypes and ranges, without a batch axis."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

from seedbed.errors import SeedbedError

Array: TypeAlias = Any
"""A numpy or JAX array. The contract is the same for both."""
Tree: TypeAlias = Any
"""A pytree: nested tuples, NamedTuples, lists and dicts of arrays."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The shape and dtype of one environment's array."""

    shape: tuple[int, ...]  # without a batch axis
    dtype: str  # numpy's name, such as float32


@dataclasses.dataclass(frozen=True)
class Discrete:
    """A choice of one of `n` actions: an int32 scalar from 0 to n - 1."""

    n: int  # choices


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """A choice from each of several sets, of `nvec[i]` elements: int32 `[len(nvec)]`."""

    nvec: tuple[int, ...]  # choices of each set


@dataclasses.dataclass(frozen=True)
class Box:
    """A real array: float32 of `shape`. Bounds are per element, flattened, and may be infinite."""

    shape: tuple[int, ...]  # without a batch axis
    low: tuple[float, ...]  # least values, or -inf
    high: tuple[float, ...]  # largest values, or inf

    def __post_init__(self) -> None:
        """Raises SeedbedError unless there is a range for each element; lists become tuples."""
        for name in ("low", "high"):
            if isinstance(bounds := getattr(self, name), list):
                object.__setattr__(self, name, tuple(bounds))
        if not isinstance(self.shape, tuple):
            raise SeedbedError(f"Box: shape is {self.shape!r}; give a tuple, such as (1,)")
        size = math.prod(self.shape)
        for name, bounds in (("low", self.low), ("high", self.high)):
            if not isinstance(bounds, tuple) or len(bounds) != size:
                raise SeedbedError(
                    f"Box of shape {self.shape}: {name} is {bounds!r}; give a tuple of {size} numbers"
                )
        for low, high in zip(self.low, self.high, strict=True):
            if isinstance(low, str) or isinstance(high, str) or not low <= high:
                raise SeedbedError(
                    f"Box of shape {self.shape}: from {low!r} to {high!r} is no range of numbers"
                )


ActionSpec = Discrete | MultiDiscrete | Box


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """The observations (a tree of `ArraySpec`) and actions of an environment, without a batch axis."""

    observation: Tree  # of ArraySpec
    action: ActionSpec  # Discrete, MultiDiscrete or Box


def action_array(action: ActionSpec) -> ArraySpec:
    """Returns the shape and dtype of one action."""
    if isinstance(action, Discrete):
        return ArraySpec((), "int32")
    if isinstance(action, MultiDiscrete):
        return ArraySpec((len(action.nvec),), "int32")
    return ArraySpec(action.shape, "float32")
