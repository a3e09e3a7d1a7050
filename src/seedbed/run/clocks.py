"""Clocks of a run: periods that come due, and sums of stretches of time."""

from __future__ import annotations

import math
import time


class Clock:
    """A clock that is due once in a period. Use each from one thread only."""

    def __init__(self, period_s: float) -> None:
        """Starts the first period, at the end of which the clock is due."""
        self._period_s = period_s
        self._next = time.monotonic() + period_s

    def due(self) -> bool:
        """Returns whether the period has ended, and if so, starts the next one. Call from one thread only.

        If the call is late, the next period still ends at its regular time, or at once if that has passed.
        """
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = max(self._next + self._period_s, now)
        return True


class Stopwatch:
    """A sum of stretches of time. Any thread may read it.

    `start` and `stop` must not run at the same time: call them from one thread, or under one lock.
    """

    def __init__(self) -> None:
        # The seconds of past stretches, and the start of the present one (infinity if there is none). They
        # are one value, so that a reader sees both as they were at one moment.
        self._state = (0.0, math.inf)

    def start(self) -> None:
        """Starts a stretch; a stretch that has not been stopped is lost. Call from one thread at a time."""
        self._state = (self._state[0], time.perf_counter())

    def stop(self) -> None:
        """Ends the present stretch, if there is one. Call from one thread at a time."""
        self._state = (self.read(), math.inf)

    def read(self) -> float:
        """Returns the seconds of all stretches, with the present one so far. Any thread may call this."""
        total_s, since = self._state
        return total_s + max(0.0, time.perf_counter() - since)
