"""The shares of a machine's cores that trials have."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

from seedbed.machine import CORES, usable_cores


class Share(NamedTuple):
    """The part of the machine that a trial has."""

    cores: frozenset[int] = frozenset()  # on which it runs; none: the system chooses
    size: float = float("inf")  # how many its sizes are for


WHOLE = Share()
"""All of the machine."""


def shares(jobs: int) -> list[Share]:
    """Divides the cores of this process among so many trials, evenly; several may have the same core."""
    # A container's quota may be less than its cores.
    each = max(1.0, usable_cores() / jobs)
    if not hasattr(os, "sched_getaffinity"):
        return [Share(size=each)] * jobs
    cores = sorted(os.sched_getaffinity(0))
    if jobs >= len(cores):
        return [Share(frozenset({cores[job % len(cores)]}), each) for job in range(jobs)]
    return [Share(frozenset(cores[job::jobs]), each) for job in range(jobs)]


@contextlib.contextmanager
def within(share: Share) -> Iterator[None]:
    """Lets this thread, and the processes that it starts meanwhile, have a share of the cores only."""
    before = os.sched_getaffinity(0) if share.cores else None
    counted = os.environ.get(CORES)
    os.environ[CORES] = str(min(share.size, float(counted or "inf")))
    if before is not None:
        os.sched_setaffinity(0, share.cores)
    try:
        yield
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)
        os.environ.pop(CORES)
        if counted is not None:
            os.environ[CORES] = counted
