"""Settings for malloc in the learner's process. The C library reads them only when a process starts."""

from __future__ import annotations

import os
import platform
import sys

NAME = "GLIBC_TUNABLES"


def settings(cores: int) -> str:
    """Returns the value of GLIBC_TUNABLES for a learner on this number of cores.

    Huge pages: XLA allocates and frees megabytes in every update, which is cheaper with them. Arenas:
    threads start and end (evaluations, checkpoints), and every new arena keeps the memory that its threads
    once used. With one arena per core and one more, the memory of a learner stops growing within minutes.
    """
    return f"glibc.malloc.hugetlb=1:glibc.malloc.arena_max={cores + 1}"


def set_up_malloc() -> None:
    """Restarts this process with our settings for malloc, if the C library is glibc and it lacks them.

    Does nothing if the user has set GLIBC_TUNABLES. In the restarted process, removes our setting from the
    environment again: actors and the helper that writes checkpoints are small and must not inherit it.
    """
    ours = settings(os.cpu_count() or 1)
    if os.environ.get(NAME) == ours:
        del os.environ[NAME]
        return
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or NAME in os.environ:
        return
    os.environ[NAME] = ours
    os.execv(sys.executable, sys.orig_argv)
