"""The processes of a run's roles on this machine, which may be of an earlier coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

from seedbed.paramserver.directory import Directory, this_machine

# How the names of all roles' modules begin.
_MODULES = f"{__package__}."


def running(run: Path, role: str) -> psutil.Process | None:
    """Returns the process of a role that has told its address, if it still runs on this machine."""
    address = Directory(run).find(role)
    if address is None or address.machine != this_machine():
        return None
    try:
        process = psutil.Process(address.pid)
        mine = str(run) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return None
    return process if mine else None


def end_all(run: Path) -> int:
    """Kills all roles of a run on this machine; returns how many there were."""
    return _end(_roles(run))


def end_starting(run: Path) -> int:
    """Kills the roles of a run on this machine that have not told where they are; returns how many."""
    directory = Directory(run)
    told = {address.pid for name in directory.names() if (address := directory.find(name))}
    return _end([process for process in _roles(run) if process.pid not in told])


def _end(processes: Sequence[psutil.Process]) -> int:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
    return len(processes)


def _roles(run: Path) -> list[psutil.Process]:
    """Returns the processes of roles of a run on this machine, by their command lines."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if _is_role(process.info["cmdline"] or (), run) and _is_here(process)
    ]


def _is_role(command: Sequence[str], run: Path) -> bool:
    return str(run) in command and any(word.startswith(_MODULES) for word in command)


def _is_here(process: psutil.Process) -> bool:
    """Returns whether a process is of this machine, and not only seen from it, as that of a container."""
    try:
        network = Path(f"/proc/{process.pid}/ns/net").stat().st_ino
    except OSError:
        return False
    return network == Path("/proc/self/ns/net").stat().st_ino
