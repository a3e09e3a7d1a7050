"""How malloc keeps the learner's memory, which the C library can only be told before the process starts."""

from __future__ import annotations

import os
import platform
import sys

NAME = "GLIBC_TUNABLES"


def settings(cores: int) -> str:
    """Returns the C library's settings for a learner on so many cores.

    XLA allocates and frees megabytes in every update, which is cheaper in huge pages. Threads come and
    go (evaluations, checkpoints), and each new arena keeps what its threads once used: a learner with an
    arena for each core and one for the rest stops growing within minutes.
    """
    return f"glibc.malloc.hugetlb=1:glibc.malloc.arena_max={cores + 1}"


def set_up_malloc() -> None:
    """Starts this process anew with our settings for malloc, where that is possible and not yet so.

    The user's own setting of the variable stays as it is. Ours goes once it has worked: actors and the
    checkpoints' helper, which are small, must not inherit it.
    """
    ours = settings(os.cpu_count() or 1)
    if os.environ.get(NAME) == ours:
        del os.environ[NAME]
        return
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or NAME in os.environ:
        return
    os.environ[NAME] = ours
    os.execv(sys.executable, sys.orig_argv)
