"""A disk that a test can fill: a small tmpfs, or where mounting is not allowed a limit on files' sizes."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from seedbed.run.checkpoint_helper import list_steps

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
        environment = {**os.environ, _LIMITED: "1"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # the limit is on its files too
        child = subprocess.run([*command, node], env=environment, capture_output=True, text=True)
        assert child.returncode == 0, child.stdout

    del run.__wrapped__  # pytest would take its arguments for fixtures
    return run


class Outage:
    """A view under which a run's disk is full twice: until all that fails is told, and at the end.

    In between, from step `empty_from`, there is room until all is saved again. `at_once` has the messages
    of the first outage.
    """

    report_every_s = 0.05

    def __init__(self, disk: SmallDisk, told: Sequence[str]) -> None:
        """Waits in the first outage for messages with each of the words `told`."""
        self._disk, self._told = disk, told
        self._stages = self._play()
        self.messages: list[str] = []
        self.at_once: list[str] = []
        self.empty_from = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def update(self, metrics: dict[str, Any]) -> None:
        self._steps = metrics["env_steps"]
        next(self._stages, None)

    def _play(self) -> Iterator[None]:
        while not self._saved(past=0):
            yield
        self._disk.fill()
        while not all(any(words in each for each in self.messages) for words in self._told):
            yield
        self.at_once = self.messages[:]
        self.empty_from, lines = self._steps, self._lines()
        self._disk.empty()
        while self._lines() < lines + 2 or not self._saved(self.empty_from):
            yield
        self._disk.fill()
        os.kill(os.getpid(), signal.SIGINT)

    def _saved(self, past: int) -> bool:
        return any(step > past for step in list_steps(self._disk.path / "checkpoints"))

    def _lines(self) -> int:
        return (self._disk.path / "metrics.jsonl").read_bytes().count(b"\n")
