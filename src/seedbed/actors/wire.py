"""The messages of a stream between a host and the learner, and the bodies of those sent at every timestep.

docs/protocol.md says what the messages mean; all others hold fields (`streams/messages.py`). Nothing here is
trusted: every function that decodes raises `ProtocolError` for anything that it does not expect.
"""

from __future__ import annotations

import enum
import math
import struct
from typing import Any, NamedTuple

import numpy as np

from seedbed import compression
from seedbed.actors.slots import SlotLayout
from seedbed.streams.messages import ProtocolError, frame

LEARNER = "the learner"
"""The role of a learner that listens, as its CHALLENGE names it."""
CONTROL_BYTES = 1 << 17
"""The largest body of a message with fields."""
BEAT_S = 1.0
"""Seconds between two heartbeats of either end."""
SILENCE_S = 5.0
"""Seconds without a byte after which either end gives up a stream."""
# life, step, whether the arrays are compressed
_STEP = struct.Struct("<qq?")
_LIFE_STEP = struct.Struct("<qq")
_BEAT = struct.Struct("<qddd")
# A timestep is compressed from this size on, if that makes it at most this share.
_LEAST_BYTES, _WORTH = 4096, 0.9
# Timesteps that go as they are after one that was not worth compressing.
_PAUSE = 64


class Kind(enum.IntEnum):
    """The kinds of messages that follow the handshake."""

    READY = 5
    BEGIN = 6
    STEP = 7
    ANSWER = 8
    ANEW = 9
    BEAT = 10
    LEAVE = 11
    FINISH = 12


class Beat(NamedTuple):
    """A host's figures about a group, sent as a sign of life."""

    steps: int = 0  # timesteps of the group that were answered since the host started
    cpu_seconds: float = 0.0  # of the group's share of the host's processes
    p50_s: float = 0.0  # latency since the last beat, from a timestep to its answer
    p99_s: float = 0.0


def begin_frame(life: int, step: int) -> bytes:
    """Returns the frame of `BEGIN`."""
    return frame(Kind.BEGIN, _LIFE_STEP.pack(life, step))


def read_begin(body: memoryview) -> tuple[int, int]:
    """Returns life and step of a `BEGIN`."""
    return _unpack(_LIFE_STEP, body)


def beat_frame(beat: Beat = Beat()) -> bytes:  # noqa: B008
    """Returns the frame of `BEAT`."""
    return frame(Kind.BEAT, _BEAT.pack(*beat))


def read_beat(body: memoryview) -> Beat:
    """Reads a `BEAT`; raises ProtocolError if its numbers cannot be."""
    beat = Beat(*_unpack(_BEAT, body))
    if not all(math.isfinite(value) and value >= 0 for value in beat):
        raise ProtocolError(f"a heartbeat tells what cannot be: {beat}")
    return beat


def _unpack(form: struct.Struct, body: memoryview) -> Any:
    if len(body) != form.size:
        raise ProtocolError(f"a message has {len(body)} bytes instead of {form.size}")
    return form.unpack(body)


class StepCodec:
    """Packs the timesteps and actions of a layout into frames, and reads them. For one thread.

    `limit` is the largest body of a message of the layout.
    """

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout
        *leaves, action = layout.arrays
        self._dtypes = [np.dtype(leaf.dtype) for leaf in layout.arrays]
        self._bytes = [_num_bytes(leaf.shape, leaf.dtype) for leaf in leaves]
        self._action_bytes = _num_bytes(action.shape, action.dtype)
        self.raw_bytes = sum(self._bytes)  # of a timestep
        self.limit = max(CONTROL_BYTES, _STEP.size + self.raw_bytes, self._action_bytes + 64)
        self._raw = np.empty(self.raw_bytes, np.uint8)
        # What does not fit is not worth compressing.
        self._packed = np.empty(int(_WORTH * self.raw_bytes), np.uint8)
        self._pause = 0

    def step(self, life: int, step: int, leaves: list[np.ndarray]) -> bytes:
        """Returns the frame of a timestep, whose leaves are those of the layout."""
        start = 0
        for leaf, size in zip(leaves, self._bytes, strict=True):
            assert leaf.nbytes == size, "the leaves are those of the layout"
            self._raw[start : start + size] = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            start += size
        if self.raw_bytes >= _LEAST_BYTES and not self._pause:
            size = compression.compress(self._raw, self._packed)
            if size:
                return frame(Kind.STEP, _STEP.pack(life, step, True), self._packed[:size].data)
            self._pause = _PAUSE
        self._pause = max(0, self._pause - 1)
        return frame(Kind.STEP, _STEP.pack(life, step, False), self._raw.data)

    def read_step(self, body: memoryview) -> tuple[int, int, memoryview]:
        """Returns (life, step, arrays) of a `STEP`; `leaves` takes the arrays apart.

        The arrays are valid until the next call. No memory is taken. Raises ProtocolError.
        """
        if len(body) < _STEP.size:
            raise ProtocolError("a timestep is cut short")
        life, step, packed = _STEP.unpack_from(body)
        arrays = body[_STEP.size :]
        if packed:
            size = compression.decompress(np.frombuffer(arrays, np.uint8), self._raw)
            if size < 0:
                raise ProtocolError("a timestep cannot be decompressed")
            arrays = self._raw[:size].data
        if len(arrays) != self.raw_bytes:
            raise ProtocolError(
                f"a timestep has {len(arrays)} bytes where its spec has {self.raw_bytes}"
            )
        if life < 1 or step < 1:
            raise ProtocolError(f"there is no timestep {step} of a life {life}")
        return life, step, arrays

    def leaves(self, arrays: memoryview) -> list[np.ndarray]:
        """Returns the leaves of a timestep as views of its arrays.

        Raises ProtocolError for a float that is not finite, or a bool that is neither 0 nor 1.
        """
        leaves, start = [], 0
        for spec, dtype, size in zip(self._layout.arrays, self._dtypes, self._bytes, strict=False):
            part = arrays[start : start + size]
            if dtype.kind == "b" and size and np.frombuffer(part, np.uint8).max() > 1:
                raise ProtocolError("a flag of a timestep is neither 0 nor 1")
            leaf = np.frombuffer(part, dtype).reshape(spec.shape)
            if dtype.kind == "f" and not np.isfinite(leaf).all():
                raise ProtocolError("a number of a timestep is not finite")
            leaves.append(leaf)
            start += size
        return leaves

    def answer(self, life: int, step: int, action: np.ndarray) -> bytes:
        """Returns the frame of the actions that answer a timestep."""
        return frame(Kind.ANSWER, _LIFE_STEP.pack(life, step), action.tobytes())

    def read_answer(self, body: memoryview) -> tuple[int, int, np.ndarray]:
        """Returns (life, step, actions) of an `ANSWER`; raises ProtocolError if it is not the layout's."""
        if len(body) != _LIFE_STEP.size + self._action_bytes:
            raise ProtocolError(f"an answer has {len(body)} bytes")
        life, step = _LIFE_STEP.unpack_from(body)
        flat = np.frombuffer(body[_LIFE_STEP.size :], self._dtypes[-1])
        return life, step, flat.reshape(self._layout.arrays[-1].shape)


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
