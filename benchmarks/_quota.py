"""Gives processes a part of a core, by Linux' control groups."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from _training import CommandError

_ROOT = Path("/sys/fs/cgroup")
# Short, so that a process that has used its part does not wait for long.
_PERIOD_US = 20_000
_LOOK_S = 0.1


class Quota:
    """A control group whose processes get so many cores together; needs root. Use it in `with`."""

    def __init__(self, name: str, cores: float) -> None:
        """Raises CommandError if this machine has no control groups for CPU time, or forbids new ones."""
        unified = _ROOT / "cgroup.controllers"
        parent = _ROOT if unified.exists() else _ROOT / "cpu"
        self._path = parent / f"seedbed-{os.getpid()}-{name}"
        quota = int(cores * _PERIOD_US)
        try:
            if unified.exists():
                (parent / "cgroup.subtree_control").write_text("+cpu")
            self._path.mkdir()
            if unified.exists():
                (self._path / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            else:
                (self._path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (self._path / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            raise CommandError(
                f"a control group cannot be made ({error}): run this as root on Linux"
            ) from None

    def __enter__(self) -> Quota:
        return self

    def __exit__(self, *error: object) -> None:
        self._path.rmdir()

    def add(self, pid: int) -> None:
        """Puts a process with all its threads into the group; what it starts later is in it, too."""
        with contextlib.suppress(ProcessLookupError):
            (self._path / "cgroup.procs").write_text(str(pid))


class Warden(threading.Thread):
    """Puts the descendants of a process, and itself, into their groups as they come. Use it in `with`."""

    def __init__(self, pid: int, group_of: Callable[[psutil.Process], Quota | None]) -> None:
        """`group_of` returns the group of a process, None if it is in that of its parent."""
        super().__init__(daemon=True)
        self._root, self._group_of = psutil.Process(pid), group_of
        self._known, self._over = dict[int, Quota | None](), threading.Event()

    def __enter__(self) -> Warden:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(_LOOK_S):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._look(self._root, None)

    def _look(self, process: psutil.Process, above: Quota | None) -> None:
        if process.pid not in self._known:
            group = self._group_of(process) or above
            self._known[process.pid] = group
            if group is not None:
                group.add(process.pid)
        for child in process.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._look(child, self._known[process.pid])
