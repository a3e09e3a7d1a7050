"""Allocation of room in an arena's segments, and reuse of the segments that nothing uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from seedbed.replay.host.arena import Arena


class Segments:
    """An allocator of runs of units in the segments of an arena, of `units` units each.

    A unit is a chunk of rows, a byte of compressed images, or a row of core states. A segment is in use while
    it has references (from items that can be drawn, or from stored images), holds (from rows and core states
    that are being written, or rows of unfinished items) or pins (from copies in progress). When room is
    needed, `allocate` closes the segments that are not in use, and calls `on_close` with the number of each.
    Use it under the storage's lock.
    """

    def __init__(
        self, arena: Arena, units: int, on_close: Callable[[int], None] = lambda _: None
    ) -> None:
        count = len(arena.files)
        self.arena, self.units, self._on_close = arena, units, on_close
        self.references, self.holds, self.pins = (np.zeros(count, np.int64) for _ in range(3))
        # Position in the order of opening, -1 if the segment is closed.
        self.opened = np.full(count, -1, np.int64)
        # Units handed out in each segment.
        self.allocated = np.zeros(count, np.int64)
        # The segment that units are handed out from, -1 if there is none.
        self.current = -1
        # Files that are not deleted when their segment is closed: a save names them.
        self.kept: frozenset[str] = frozenset()

    def allocate(self, count: int) -> int | None:
        """Returns the first of `count` consecutive units in one segment, or None if all segments are in use.

        Call under the storage's lock.
        """
        current = self.current
        if current < 0 or self.allocated[current] + count > self.units:
            self.current = -1
            self.close_unused()
            closed = np.flatnonzero(self.opened < 0)
            if not len(closed):
                self.current = current
                return None
            # The lowest one, so that memory which was used before is used again.
            current = self.current = int(closed[0])
            self.arena.open(current)
            self.opened[current] = self.opened.max() + 1
            self.allocated[current] = 0
        first = current * self.units + int(self.allocated[current])
        self.allocated[current] += count
        return first

    def close_unused(self) -> None:
        """Closes the segments that are not in use, except the current one. Call under the storage's lock."""
        used = (self.references > 0) | (self.holds > 0) | (self.pins > 0) | (self.opened < 0)
        for segment in np.flatnonzero(~used).tolist():
            if segment != self.current:
                self._on_close(segment)
                self.detach(segment, self.kept)

    def oldest(self) -> int:
        """Returns the open segment that was opened first, except the current one.

        Call under the storage's lock.
        """
        order = np.where(self.opened < 0, np.iinfo(np.int64).max, self.opened)
        if self.current >= 0:
            order[self.current] = np.iinfo(np.int64).max
        return int(order.argmin())

    def attach(self, segment: int, file: str, allocated: int) -> None:
        """Opens a closed segment with an earlier file, to which nothing is added.

        Raises OSError if the file is missing or has another size. Call under the storage's lock, or before
        other threads use the replay.
        """
        self.arena.attach(segment, file)
        self.opened[segment] = self.opened.max() + 1
        self.allocated[segment] = allocated

    def detach(self, segment: int, kept: frozenset[str]) -> None:
        """Closes a segment even if it is in use, and deletes its file unless its name is in `kept`.

        Call under the storage's lock, or before other threads use the replay.
        """
        self.arena.close(segment, kept)
        self.opened[segment] = -1
        self.allocated[segment] = 0

    def units_of(self, segments: Sequence[int]) -> np.ndarray:
        """Returns the numbers of all units of some segments, in order. Any thread may call this."""
        firsts = np.array(segments, np.int64) * self.units
        return (firsts[:, None] + np.arange(self.units)).reshape(-1)

    @property
    def units_held(self) -> int:
        """Returns the number of units handed out in open segments. Call under the storage's lock."""
        return int(self.allocated.sum())
