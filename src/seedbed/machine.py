"""What this process may use of its machine."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path

from seedbed.types import SeedbedError


def require_linux(what: str, remedy: str) -> None:
    """Raises SeedbedError, which names `what` and the remedy, on another system than Linux.

    Call it before anything is made for `what`.
    """
    if sys.platform != "linux":
        raise SeedbedError(
            f"{what} needs Linux (memfd, eventfd, epoll), and this is {sys.platform}: {remedy}"
        )


CORES = "SEEDBED_CORES"
"""An environment variable of processes of ours that share a machine: how many cores each of them takes."""


def usable_cores() -> float:
    """Returns the number of CPU cores that this process may use, by affinity and its container's quota.

    A quota need not be a whole number. Only version 2 of cgroups is known. macOS has neither: there, it is
    the number of all cores. It is no more than `CORES` says.
    """
    return min(_cores(), float(os.environ.get(CORES, "inf")))


def _cores() -> float:
    if sys.platform != "linux":
        return float(os.cpu_count() or 1)
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def cpu_name() -> str:
    """Returns the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def raise_descriptor_limit() -> int:
    """Lets this process have as many descriptors as the system allows; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
