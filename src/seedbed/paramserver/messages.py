"""The messages between the roles of a run, and the memory of their arrays (docs/gorila.md).

A message has a kind, fields in JSON, and for some kinds a block of arrays, whose shapes both ends know. On
one machine the block lies in memory that both ends share; between machines it travels behind the fields.
"""

from __future__ import annotations

import enum
import math
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from seedbed import strict_json
from seedbed.actors.wire import ProtocolError, frame, read_object
from seedbed.types import Array

CONTROL_BYTES = 1 << 20
"""The largest body of a message without its block."""
_LENGTH = struct.Struct("<I")
_ALIGNED = 64  # bytes; XLA takes arrays so aligned as they are


class Kind(enum.IntEnum):
    """The kinds of messages."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSE = 4
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


class Message(NamedTuple):
    """What roles send to each other over a stream: its kind, and the fields that this kind has."""

    kind: Kind
    fields: dict[str, Any]
    block: memoryview  # of the arrays, if they have travelled with it


def pack(kind: Kind, fields: dict[str, Any], block: memoryview | None = None) -> bytes:
    """Returns the frame of a message, with its block behind the fields if it is given."""
    text = strict_json.dumps(fields).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNED)
    return frame(kind, _LENGTH.pack(len(text)), text, block or b"")


def unpack(kind: Kind, body: memoryview) -> Message:
    """Reads a message; its block is valid as long as `body`. Raises ProtocolError if it cannot be."""
    if len(body) < _LENGTH.size:
        raise ProtocolError("a message is cut short")
    (length,) = _LENGTH.unpack_from(body)
    text, block = body[_LENGTH.size : _LENGTH.size + length], body[_LENGTH.size + length :]
    if len(text) != length:
        raise ProtocolError(f"the fields of {kind.name} are cut short")
    try:
        fields = read_object(text)
    except ProtocolError as error:
        raise ProtocolError(f"{kind.name}: {error}") from None
    return Message(kind, fields, block)


def require_counts(fields: dict[str, Any], name: str, length: int) -> list[int]:
    """Returns a field that is a list of `length` counts; raises ProtocolError if it is none."""
    values: Any = fields.get(name)
    if not isinstance(values, list) or len(values) != length:
        raise ProtocolError(f"a message lacks {name} ({length} counts)")
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ProtocolError(f"{name} is {values}: these are no counts")
    return values


class BlockLayout:
    """Where arrays lie in a block. Both ends make it of the same shapes."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        """Takes arrays, or their shapes and dtypes."""
        self._places: list[tuple[tuple[int, ...], np.dtype[Any], int]] = []
        self.size = 0  # bytes
        for array in arrays:
            shape, dtype = tuple(array.shape), np.dtype(array.dtype)
            self._places.append((shape, dtype, self.size))
            bytes_ = math.prod(shape) * dtype.itemsize
            self.size += -(-bytes_ // _ALIGNED) * _ALIGNED

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
            memory = np.empty(self._size + _ALIGNED, np.uint8)
            start = -memory.ctypes.data % _ALIGNED
            block = memory[start : start + self._size]
        lent = block[:]
        weakref.finalize(lent, self._free.append, block).atexit = False
        return lent


class Blocks:
    """A block for each direction of a stream; shared with the other end if `descriptor` is not -1."""

    def __init__(self, up_bytes: int, down_bytes: int, descriptor: int = -1) -> None:
        """Maps the memory of a descriptor, or takes memory of this process's own.

        Raises ProtocolError if what is behind the descriptor is too small, or cannot be mapped.
        """
        size = max(1, up_bytes + down_bytes)
        self.shared = descriptor >= 0
        if self.shared and os.fstat(descriptor).st_size < size:
            raise ProtocolError("the shared memory is smaller than its arrays")
        try:
            memory = mmap.mmap(descriptor, size)  # -1 is memory of this process's own
        except (OSError, ValueError) as error:
            raise ProtocolError(f"the shared memory cannot be mapped: {error}") from None
        whole = np.frombuffer(memory, np.uint8)
        # What a client sends, and what it gets.
        self.up, self.down = whole[:up_bytes], whole[up_bytes : up_bytes + down_bytes]

    def take(self, message: Message, to: np.ndarray) -> np.ndarray:
        """Returns the block of a message that is `to` if it is shared, and else is copied there.

        Raises ProtocolError if it has another size.
        """
        if self.shared and message.block:
            raise ProtocolError(f"{message.kind.name} has a block, which is shared")
        if not self.shared:
            if len(message.block) != to.nbytes:
                raise ProtocolError(
                    f"{message.kind.name} has a block of {len(message.block)} bytes, not {to.nbytes}"
                )
            np.copyto(to, np.frombuffer(message.block, np.uint8))
        return to
