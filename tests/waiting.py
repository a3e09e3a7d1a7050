"""Waits for what another thread or process does."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable


def wait_for(
    ready: Callable[[], object],
    process: subprocess.Popen[str] | None = None,
    seconds: float = 120.0,
) -> None:
    """Waits until something is so; a process that ends before, or too long a wait, fails the test."""
    until = time.monotonic() + seconds
    while not ready():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.005)
