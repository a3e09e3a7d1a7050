"""The time between two lines of metrics."""

from __future__ import annotations

import time
from typing import Any

from seedbed.run.runtime import Runtime


class Interval:
    """The time since the last line of metrics of one kind."""

    def __init__(self, runtime: Runtime) -> None:
        """Starts the first interval."""
        self._runtime, self._meter = runtime, runtime.meter()
        self._at, self._transitions = time.monotonic(), runtime.progress().transitions

    def read(self) -> tuple[float, dict[str, Any]]:
        """Returns the transitions per second, and the runtime's metrics; starts the next interval."""
        now, transitions = time.monotonic(), self._runtime.progress().transitions
        passed_s = max(now - self._at, 1e-9)
        rate = (transitions - self._transitions) / passed_s
        self._at, self._transitions = now, transitions
        return rate, self._meter.read(passed_s)

    def leave_out(self, seconds: float) -> None:
        """Makes the interval begin this much later."""
        self._at += seconds
