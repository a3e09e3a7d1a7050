"""A disk that a test can fill: a small tmpfs, or where mounting is not allowed a limit on files' sizes."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

_LIMITED = "SEEDBED_TESTS_LIMIT_FILES"


class SmallDisk:
    """A disk of a few megabytes; `path` is a folder on it that need not be there yet."""

    def __init__(self, root: Path) -> None:
        self.path = root / "run"
        self._ballast = root / "ballast"

    def fill(self) -> None:
        """Leaves no room."""
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass

    def empty(self) -> None:
        """Makes room again."""
        self._ballast.unlink(missing_ok=True)


class LimitedFiles(SmallDisk):
    """Lets no file of this process or its children grow while it is full."""

    def fill(self) -> None:
        self._limit(0)

    def empty(self) -> None:
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, size: int) -> None:
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(psutil.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextlib.contextmanager
def _mounted(root: Path) -> Iterator[bool]:
    """Mounts a tmpfs of 4 MB, and says whether that is allowed."""
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(root)]
    mounted = (
        os.geteuid() == 0 and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(root)], check=True)


def on_small_disk(test: Callable[[SmallDisk], None]) -> Callable[..., None]:
    """Runs a test, called with a `SmallDisk`; with limited files in a process of its own."""

    @functools.wraps(test)
    def run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
        if os.environ.get(_LIMITED):
            test(LimitedFiles(tmp_path))
            return
        with _mounted(tmp_path / "disk") as mounted:
            if mounted:
                test(SmallDisk(tmp_path / "disk"))
                return
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
        node = f"{request.path}::{request.node.name}"
        child = subprocess.run(
            [*command, node], env={**os.environ, _LIMITED: "1"}, capture_output=True, text=True
        )
        assert child.returncode == 0, child.stdout

    del run.__wrapped__  # pytest would take its arguments for fixtures
    return run
