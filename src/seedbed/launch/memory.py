"""Huge pages for the learner's memory, which the C library can only be told before the process starts."""

from __future__ import annotations

import os
import platform
import sys

NAME, VALUE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"


def use_huge_pages() -> None:
    """Starts this process anew with huge pages for malloc, where that is possible and not yet so.

    XLA allocates and frees megabytes in every update, which is cheaper in large pages. The user's own
    setting of the variable stays as it is. Ours goes once it has worked: actors and the checkpoints'
    helper, which are small, must not inherit it.
    """
    if os.environ.get(NAME) == VALUE:
        del os.environ[NAME]
        return
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or NAME in os.environ:
        return
    os.environ[NAME] = VALUE
    os.execv(sys.executable, sys.orig_argv)
