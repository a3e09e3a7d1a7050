"""Makes a Python process look as on macOS: on PYTHONPATH, it runs at the start of each process, children too.

What CPython lacks on macOS goes away at once. `sys.platform` changes when seedbed is imported, because the
other packages here were built for Linux; two that look at it are imported before.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from typing import Any

# How the names begin that CPython has on Linux, and not on macOS, by module. Some of these modules look at
# earlier ones when they are imported.
MISSING = {
    "os": "memfd_create MFD_ eventfd EFD_ timerfd_ pidfd_open pipe2 splice SPLICE_ copy_file_range waitid "
    "sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler "
    "sched_setscheduler getresuid setresuid unshare setns CLONE_ getxattr setxattr listxattr XATTR_ "
    "posix_fallocate posix_fadvise POSIX_FADV_ fdatasync getrandom GRND_ O_TMPFILE O_PATH O_DIRECT",
    "fcntl": "F_ADD_SEALS F_GET_SEALS F_SEAL F_SETPIPE_SZ F_GETPIPE_SZ F_SETLEASE",
    "select": "epoll EPOLL",
    "signal": "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR",
    "mmap": "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_REMOVE MADV_DONTFORK MAP_POPULATE",
    "resource": "prlimit RUSAGE_THREAD",
    "socket": "SO_PEERCRED AF_VSOCK AF_ALG SOCK_CLOEXEC SOCK_NONBLOCK",
    "time": "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
}
HIDDEN = ("/proc/", "/sys/")

for where, names in MISSING.items():
    module = importlib.import_module(where)
    for name in [n for n in vars(module) if n.startswith(tuple(names.split()))]:
        delattr(module, name)

# These ask for the platform when they are imported; afterwards they are as they were built, for Linux.
import llvmlite.binding  # noqa: E402, F401
import psutil  # noqa: E402, F401


class _Darwin:
    """A finder that finds nothing, but knows when seedbed is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "seedbed" and sys.platform == "linux":
            sysconfig.get_config_vars()  # of this Python; it remembers them
            sys.platform = "darwin"


def _hide(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuses to open files that only Linux has, to seedbed: what others open depends on their build."""
    if event != "open" or sys.platform == "linux" or not str(arguments[0]).startswith(HIDDEN):
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"] in ("pathlib", "io"):
        frame = frame.f_back
    if frame.f_globals["__name__"].partition(".")[0] in ("seedbed", "__main__"):
        raise FileNotFoundError(2, "macOS has no such file", arguments[0])


sys.meta_path.insert(0, _Darwin())
sys.addaudithook(_hide)
