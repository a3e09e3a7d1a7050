"""The history of a run: when it was trained, on what machine, with which versions, and how that ended.

A run that is resumed has several stints, which may be on different machines. This module loads no JAX, except
to name the devices of a stint that begins.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import platform
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import psutil

from seedbed.exit_status import PeerLost
from seedbed.files import load_json, write_json
from seedbed.machine import cpu_name, usable_cores
from seedbed.run.checkpoint_helper import successor
from seedbed.run.folder import HISTORY, RunFolder, TakenOver

Outcome = Literal["finished", "interrupted", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
PACKAGES = (
    "seedbed",
    "jax",
    "jaxlib",
    "numpy",
    "flax",
    "optax",
    "orbax-checkpoint",
    "llvmlite",
    "mujoco",
    "gymnasium",
    "ale-py",
    "envpool",
    "vizdoom",
)
"""The packages whose versions a stint names: those that can change what a run computes."""


class RunSegment:
    """The time for which one process trains a run, as a context manager that writes the run's history.

    A stint that was killed has no outcome. The folder must be locked by this process. If the disk refuses the
    history, `warn` is called with a message and training goes on. For one thread.
    """

    def __init__(
        self,
        run: RunFolder,
        begun: float,
        env_steps: int,
        interrupted: Callable[[], bool],
        warn: Callable[[str], None],
        source: dict[str, Any] | None = None,
    ) -> None:
        """Describes the machine of a stint that began at `begun`, in seconds since the epoch.

        `interrupted` tells at the end whether a signal has stopped the run. `source` says whose weights it
        begins with.
        """
        self._run, self._interrupted, self._warn = run, interrupted, warn
        self.reason = ""  # why it ended before its steps, if it did
        self._stints = read_history(run.path)
        self._stint: dict[str, Any] = {
            "term": run.term,
            "env_steps": env_steps,
            "begun": begun,
            "machine": describe_machine(),
            "versions": describe_versions(),
            **({"from": source} if source else {}),
        }

    def __enter__(self) -> RunSegment:
        self._write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        outcome: Outcome = "interrupted" if self._interrupted() else "finished"
        if isinstance(failure, TakenOver):
            return
        if isinstance(failure, PeerLost):  # who is left begins the run again
            outcome, self.reason = "interrupted", str(failure).partition("\n")[0]
        elif isinstance(failure, Exception):
            outcome = "failed"
            lines = str(failure).splitlines() or [type(failure).__name__]
            self._stint["failure"] = lines[0]
        elif failure is not None:
            outcome = "interrupted"
        self._stint |= {"ended": time.time(), "outcome": outcome}
        if self.reason:
            self._stint["reason"] = self.reason
        self._write()

    def _write(self) -> None:
        """Writes the history, unless another learner has the run."""
        if successor(self._run.path, self._run.claim):
            return
        try:
            write_json(self._run.path / HISTORY, [*self._stints, self._stint])
        except OSError as error:
            self._warn(
                f"{self._run.path / HISTORY} cannot be written ({error.strerror or error}): it lacks this "
                "start of the run, or how it ended; training goes on"
            )


def read_history(run: Path) -> list[dict[str, Any]]:
    """Returns the stints of a run, the first one first; an empty list if they are missing or damaged."""
    try:
        stints = load_json(run / HISTORY)
    except (OSError, ValueError):
        return []
    whole = isinstance(stints, list) and all(isinstance(each, dict) for each in stints)
    return stints if whole else []


def describe_machine() -> dict[str, Any]:
    """Describes this machine: processor, usable cores, memory in bytes, system, Python, and JAX's devices."""
    import jax

    devices = collections.Counter(device.device_kind for device in jax.local_devices())
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "devices": dict(devices),
    }


def describe_versions() -> dict[str, str]:
    """Returns the versions of `PACKAGES` that are installed."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def state_of(run: RunFolder, history: list[dict[str, Any]], done: bool) -> str:
    """Returns whether a run is `running`, `finished`, `interrupted` or `failed`; takes no lock from it.

    `done` tells whether its metrics have reached its steps. It decides for runs without a history, which
    earlier versions have written.
    """
    if run.is_training():
        return "running"
    if not history:
        return "finished" if done else "interrupted"
    outcome = history[-1].get("outcome")
    return outcome if outcome in OUTCOMES else "interrupted"
