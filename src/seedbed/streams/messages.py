"""The messages of a stream: frames, and what the bodies of most kinds hold (docs/protocol.md).

A message has a kind, fields in JSON, and for some kinds a block of arrays, whose shapes both ends know. On
one machine the block may lie in memory that both ends share; else it travels behind the fields. What actors
send at every timestep has bodies of its own (`actors/wire.py`).

Nothing here is trusted: a reader gives the largest body that it will take, and every function that decodes
raises `ProtocolError` for anything that it does not expect.
"""

from __future__ import annotations

import enum
import json
import math
import mmap
import os
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

from seedbed import strict_json

VERSION = 2
"""The version of the protocol. Ends with different versions refuse each other."""
CONTROL_BYTES = 1 << 20
"""The largest body of a message without its block, from a client that has proved itself."""
HELLO_BYTES = 4096
"""The largest body from a client that has not proved the secret."""
MOST_DEPTH = 32
"""The most objects and lists of a message that are inside one another."""
ALIGNED = 64
"""Bytes to which the block of a message is aligned; XLA takes arrays so aligned as they are."""
_MAGIC = b"Sb"
_HEADER = struct.Struct("<2sBBII")
HEADER_BYTES = _HEADER.size
_LENGTH = struct.Struct("<I")


class Handshake(enum.IntEnum):
    """The kinds of the messages that begin or refuse a stream. All other kinds have greater numbers."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    REFUSE = 4


_LAST_OF_HANDSHAKE = int(max(Handshake))


class ProtocolError(Exception):
    """Raised for what ends a stream: a message that breaks the protocol, or a client that cannot be let in.

    `code` is that of the `REFUSE` message, such as "protocol", "key", "version" or "full".
    """

    def __init__(self, text: str, code: str = "protocol") -> None:
        super().__init__(text)
        self.code = code


def frame(kind: enum.IntEnum, *parts: bytes | memoryview) -> bytes:
    """Returns the frame of a message whose body is the concatenation of `parts`."""
    checksum, length = 0, 0
    for part in parts:
        checksum, length = zlib.crc32(part, checksum), length + len(part)
    return b"".join((_HEADER.pack(_MAGIC, VERSION, kind, length, checksum), *parts))


class Header(NamedTuple):
    """The header of a frame."""

    kind: enum.IntEnum
    length: int  # bytes of the body
    checksum: int


def read_header(
    data: bytes | bytearray | memoryview, limit: int, kinds: type[enum.IntEnum]
) -> Header:
    """Reads the header at the start of `data`; raises ProtocolError if its body is longer than `limit`.

    `kinds` are the kinds of messages of the stream besides those of the handshake.
    """
    magic, version, kind, length, checksum = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("these are not Seedbed's messages")
    if version != VERSION:
        raise ProtocolError(
            f"the other end speaks version {version} of the protocol, not {VERSION}"
        )
    if length > limit:
        raise ProtocolError(f"a message has {length} bytes where at most {limit} are taken")
    try:
        return Header(
            kinds(kind) if kind > _LAST_OF_HANDSHAKE else Handshake(kind), length, checksum
        )
    except ValueError:
        raise ProtocolError(f"there is no message of kind {kind}") from None


def require_checksum(header: Header, body: memoryview) -> None:
    """Raises ProtocolError if a body is not the one that was sent."""
    if zlib.crc32(body) != header.checksum:
        raise ProtocolError("a message was damaged on its way")


class Message(NamedTuple):
    """A message with fields: its kind, and the fields that this kind has."""

    kind: enum.IntEnum
    fields: dict[str, Any]
    block: memoryview  # of the arrays, if they have travelled with it


def pack(kind: enum.IntEnum, fields: dict[str, Any], block: memoryview | None = None) -> bytes:
    """Returns the frame of a message, with its block behind the fields if it is given."""
    text = strict_json.dumps(fields).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % ALIGNED)
    return frame(kind, _LENGTH.pack(len(text)), text, block or b"")


def unpack(kind: enum.IntEnum, body: memoryview) -> Message:
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


def _refuse_constant(name: str) -> Any:
    raise ProtocolError(f"a control message has the number {name}")


# Python's own JSON knows NaN and Infinity, which nothing behind it expects.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def read_object(body: bytes | memoryview) -> dict[str, Any]:
    """Reads a JSON object that anybody may have sent.

    Its numbers are finite and have at most 64 bits, and its depth is at most `MOST_DEPTH`, so that every
    function can handle it. Raises ProtocolError for anything else.
    """
    try:
        data = _DECODER.decode(bytes(body).decode())
    except (ValueError, RecursionError):
        raise ProtocolError("a control message is not JSON") from None
    if not isinstance(data, dict):
        raise ProtocolError("a control message is not an object")
    level: list[Any] = [data]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, float) and not math.isfinite(value):
                raise ProtocolError("a number of a control message is not finite")
            elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                raise ProtocolError("a number of a control message has more than 64 bits")
        if not inner:
            return data
        level = inner
    raise ProtocolError(f"a control message is nested more than {MOST_DEPTH} times")


def require_fields(fields: dict[str, Any], **types: type) -> dict[str, Any]:
    """Returns the fields of these names; others are left out. An int is a count, and a float may be whole.

    Raises ProtocolError if a field is missing or has another type.
    """
    for name, kind in types.items():
        value: Any = fields.get(name)
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool)):
            raise ProtocolError(f"a control message lacks {name} ({kind.__name__})")
        if kind is int and not 0 <= value < 1 << 62:
            raise ProtocolError(f"{name} is {value}: it is no count")
    return {name: fields[name] for name in types}


def read_fields(kind: enum.IntEnum, body: memoryview, **types: type) -> dict[str, Any]:
    """Reads a message without a block; raises ProtocolError as `unpack` and `require_fields` do."""
    return require_fields(unpack(kind, body).fields, **types)


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
