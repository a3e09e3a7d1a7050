"""Hands out room in an arena's segments, and knows which segments nobody needs any more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from seedbed.replay.arena import Arena


class Segments:
    """Runs of units in the segments of an arena, each of `units` units; for one thread at a time.

    A segment is used where it has references (items that may be drawn), holds (what is being written) or
    pins (what is being copied out); when room is needed, unused ones are closed, and told `on_close`.
    """

    def __init__(
        self, arena: Arena, units: int, on_close: Callable[[int], None] = lambda _: None
    ) -> None:
        count = len(arena.files)
        self.arena, self.units, self._on_close = arena, units, on_close
        self.references, self.holds, self.pins = (np.zeros(count, np.int64) for _ in range(3))
        self.opened = np.full(count, -1, np.int64)  # in which order; -1 is closed
        self.allocated = np.zeros(count, np.int64)  # units handed out
        self.current = -1
        self.kept: frozenset[str] = frozenset()  # files that outlive their segment

    def allocate(self, count: int) -> int | None:
        """Returns the first of `count` units in one segment, or None where every segment is used."""
        current = self.current
        if current < 0 or self.allocated[current] + count > self.units:
            self.current = -1
            self.close_unused()
            closed = np.flatnonzero(self.opened < 0)
            if not len(closed):
                self.current = current
                return None
            current = self.current = int(closed[0])  # the lowest, so memory that was used is again
            self.arena.open(current)
            self.opened[current] = self.opened.max() + 1
            self.allocated[current] = 0
        first = current * self.units + int(self.allocated[current])
        self.allocated[current] += count
        return first

    def close_unused(self) -> None:
        """Closes the segments that nobody uses, but for the current one."""
        used = (self.references > 0) | (self.holds > 0) | (self.pins > 0) | (self.opened < 0)
        for segment in np.flatnonzero(~used).tolist():
            if segment != self.current:
                self._on_close(segment)
                self.detach(segment, self.kept)

    def oldest(self) -> int:
        """Returns the segment, other than the current one, that was opened first."""
        order = np.where(self.opened < 0, np.iinfo(np.int64).max, self.opened)
        if self.current >= 0:
            order[self.current] = np.iinfo(np.int64).max
        return int(order.argmin())

    def attach(self, segment: int, file: str, allocated: int) -> None:
        """Opens a segment with a file of before, to which nothing is added; raises OSError."""
        self.arena.attach(segment, file)
        self.opened[segment] = self.opened.max() + 1
        self.allocated[segment] = allocated

    def detach(self, segment: int, kept: frozenset[str]) -> None:
        """Closes a segment whatever uses it; its file goes unless it is among the `kept`."""
        self.arena.close(segment, kept)
        self.opened[segment] = -1
        self.allocated[segment] = 0

    @property
    def units_held(self) -> int:
        """Units handed out in open segments."""
        return int(self.allocated.sum())
