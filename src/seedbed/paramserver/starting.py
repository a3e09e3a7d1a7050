"""Starting the process of a role, and counting starts that were of no use. It imports no JAX."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from seedbed.actors.child import same_modules
from seedbed.run import memory

# Early deaths in a row after which a role is not started again, and what is early.
_MAX_DEATHS, _EARLY_S = 5, 30.0


def start_role(
    run: Path, module: str, arguments: Sequence[str], output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Starts a role's module with a run's folder; it writes to `output`, or where this process does."""
    settings = {memory.NAME: memory.settings(os.cpu_count() or 1)}
    return subprocess.Popen(
        [sys.executable, "-P", "-X", "faulthandler", "-m", module, "--run", str(run), *arguments],
        env={**settings, **os.environ, **same_modules()},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # What the terminal sends is for the process that starts it.
        start_new_session=True,
    )


class EarlyDeaths:
    """The deaths of a role's processes in a row, each soon after its start. For one thread."""

    def __init__(self) -> None:
        self.count = 0
        self._begun_s = time.monotonic()

    def begin(self) -> None:
        """Notes that a process starts."""
        self._begun_s = time.monotonic()

    def add(self) -> bool:
        """Counts the death of the process; returns whether another start would be of no use."""
        early = time.monotonic() < self._begun_s + _EARLY_S
        self.count = self.count + 1 if early else 1
        return self.count >= _MAX_DEATHS
