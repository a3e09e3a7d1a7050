"""The messages between the roles of a run, and how arrays lie in their blocks (docs/gorila.md)."""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from seedbed.streams.messages import ALIGNED, ProtocolError
from seedbed.types import Array


class Kind(enum.IntEnum):
    """The kinds of messages that follow the handshake."""

    PULL = 5
    PARAMETERS = 6
    PUSH = 7
    VERDICT = 8
    CLOSE = 9
    CLOSED = 10
    STATE = 11
    REPORT = 12
    FINISH = 13
    APPEND = 14
    APPENDED = 15
    DRAW = 16
    ITEMS = 17
    PRIORITIES = 18
    SAVE = 19
    PAUSE = 20
    RESUME = 21
    HELD = 22
    START = 23
    STARTED = 24
    END = 25
    FILE = 26
    FILED = 27
    ADDRESS = 28


def require_counts(fields: dict[str, Any], name: str, length: int) -> list[int]:
    """Returns a field that is a list of `length` counts; raises ProtocolError if it is none."""
    values: Any = fields.get(name)
    if not isinstance(values, list) or len(values) != length:
        raise ProtocolError(f"a message lacks {name} ({length} counts)")
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ProtocolError(f"{name} is {values}: these are no counts")
    return values


class BlockLayout:
    """The places of arrays in a block. Both ends make it of the same shapes."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        """Takes arrays, or their shapes and dtypes."""
        self._places: list[tuple[tuple[int, ...], np.dtype[Any], int]] = []
        self.size = 0  # bytes
        for array in arrays:
            shape, dtype = tuple(array.shape), np.dtype(array.dtype)
            self._places.append((shape, dtype, self.size))
            bytes_ = math.prod(shape) * dtype.itemsize
            self.size += -(-bytes_ // ALIGNED) * ALIGNED

    def views(self, block: np.ndarray) -> list[np.ndarray]:
        """Returns the arrays as views of a block, uint8 `[size]`."""
        return [
            np.frombuffer(block.data, dtype, math.prod(shape), start).reshape(shape)
            for shape, dtype, start in self._places
        ]

    def write(self, arrays: Sequence[Array], block: np.ndarray) -> None:
        """Copies arrays into a block."""
        for view, array in zip(self.views(block), arrays, strict=True):
            np.copyto(view, array)


class BlockPool:
    """Blocks of one size, in which a layout's arrays are aligned as XLA wants them. For one thread."""

    def __init__(self, size: int) -> None:
        """Takes no memory yet; `size` is in bytes."""
        self._size = size
        self._free: list[np.ndarray] = []

    def lend(self) -> np.ndarray:
        """Returns a block that nobody uses: it is free again when it and all its views are dead.

        A block that was used lately lies in the processor's cache; a new one does not.
        """
        if self._free:
            block = self._free.pop()
        else:
            memory = np.empty(self._size + ALIGNED, np.uint8)
            start = -memory.ctypes.data % ALIGNED
            block = memory[start : start + self._size]
        lent = block[:]
        weakref.finalize(lent, self._free.append, block).atexit = False
        return lent
