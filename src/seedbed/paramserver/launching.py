"""Where the processes of a run's roles are: on this machine, where this process starts them, or elsewhere."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import psutil

from seedbed.paramserver.directory import Directory, this_machine
from seedbed.run import memory
from seedbed.streams.supervisor import start_module

LOG = "log.txt"
"""The file, in a role's folder, with what its process writes."""
# How the names of all roles' modules begin.
_MODULES = f"{__package__}."
_TAIL_BYTES = 4096
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable with the GPUs that CUDA shows a process."""


class RoleSpec(NamedTuple):
    """A role, and how its process is started."""

    name: str
    module: str  # "" if somebody else starts it
    arguments: tuple[str, ...] = ()
    first: tuple[str, ...] = ()  # more arguments, until a process has reported
    starts: str = ""  # whose starts are counted together with its own; "" for its alone

    def arguments_of(self, anew: bool) -> tuple[str, ...]:
        """Returns the arguments of a start; `anew` says whether no process has reported yet."""
        return (*self.arguments, *self.first) if anew else self.arguments

    def take_number(self, directory: Directory) -> int:
        """Returns the number of another start; raises OSError."""
        return directory.take_number(self.starts or self.name)


class RoleProcess(Protocol):
    """The process of a role, wherever it is. Any thread may use it."""

    @property
    def pid(self) -> int | None:
        """The process id, if it is on this machine."""
        ...

    @property
    def ours(self) -> bool:
        """Whether it is started, and ended, from here."""
        ...

    def alive(self) -> bool:
        """Returns whether it may still answer."""
        ...

    def status(self) -> int | None:
        """Returns the exit status of a process that has ended, None if nobody can tell."""
        ...

    def idle_s(self) -> float:
        """Returns for how many seconds it has used no CPU time, as far as this was called."""
        ...

    def kill(self) -> None:
        """Kills it, if it is ours; does not wait."""
        ...

    def end(self) -> None:
        """Kills it, if it is ours, and waits for its end if it is a child."""
        ...


class Launcher(Protocol):
    """How the processes of one role are found and started. One thread at a time may use it."""

    def adopt(self) -> RoleProcess | None:
        """Returns the process that goes on without a coordinator, None if there is none."""
        ...

    def start(self, anew: bool) -> RoleProcess:
        """Starts a process; `anew` says whether none has reported yet. Raises OSError."""
        ...

    def last_words(self) -> str:
        """Returns the end of what processes of the role have written, as far as it is known here."""
        ...


def launcher_of(run: Path, role: RoleSpec) -> Launcher:
    """Returns the launcher of a role that is on this machine, or that somebody else starts."""
    return Here(run, role) if role.module else _Elsewhere()


class _HereProcess:
    """A process of this machine, which this process or an earlier coordinator has started."""

    ours = True

    def __init__(
        self, process: psutil.Process, child: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.pid: int | None = process.pid
        self._process, self._child = process, child
        self._used_s, self._worked_s = 0.0, time.monotonic()

    def alive(self) -> bool:
        """Returns whether it runs."""
        if self._child is not None:
            return self._child.poll() is None
        try:
            return self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def status(self) -> int | None:
        """Returns the exit status of a child."""
        return None if self._child is None else self._child.returncode

    def idle_s(self) -> float:
        """Returns for how long its CPU time has not grown: opening a large replay may take long."""
        try:
            used_s = sum(self._process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            used_s = 0.0
        if used_s != self._used_s:
            self._used_s, self._worked_s = used_s, time.monotonic()
        return time.monotonic() - self._worked_s

    def kill(self) -> None:
        """Sends SIGKILL to the process."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.kill()

    def end(self) -> None:
        """Sends SIGKILL to the process and reaps a child."""
        self.kill()
        if self._child is not None:
            self._child.wait()


class Here:
    """Starts processes of a role on this machine; they write into its folder's log."""

    def __init__(self, run: Path, role: RoleSpec) -> None:
        self._run, self._role = run, role
        self._folder = Directory(run).path / role.name

    def adopt(self) -> RoleProcess | None:
        """Returns the role's process if one has told its address and still runs."""
        process = running(self._run, self._role.name)
        return None if process is None else _HereProcess(process)

    def start(self, anew: bool) -> RoleProcess:
        """Starts a child; the learners of this machine use its GPUs in turn, each one of them."""
        role, directory = self._role, Directory(self._run)
        self._folder.mkdir(parents=True, exist_ok=True)
        arguments = (*role.arguments_of(anew), "--start", str(role.take_number(directory)))
        kind, _, seat = role.name.rpartition("-")
        there = accelerators() if kind == "learner" else []
        accelerator = there[int(seat) % len(there)] if len(there) > 1 else None
        with (self._folder / LOG).open("ab") as log:
            child = start_role(self._run, role.module, arguments, log, accelerator)
        return _HereProcess(psutil.Process(child.pid), child)

    def last_words(self) -> str:
        """Returns the end of the log."""
        return end_of_log(self._folder / LOG)


class _ElsewhereProcess:
    """A process that somebody else starts, now or later."""

    ours = False

    def __init__(self) -> None:
        self.pid: int | None = None

    def alive(self) -> bool:
        """Returns True: it may come at any time."""
        return True

    def status(self) -> int | None:
        """Returns None: it is not known here."""
        return None

    def idle_s(self) -> float:
        """Returns 0: nobody can tell from here."""
        return 0.0

    def kill(self) -> None:
        """Does nothing: whoever started it ends it."""

    def end(self) -> None:
        """Does nothing: whoever started it ends it."""


class _Elsewhere:
    """Waits for processes of a role that somebody else starts."""

    def adopt(self) -> RoleProcess | None:
        """Returns the process that may come."""
        return _ElsewhereProcess()

    def start(self, anew: bool) -> RoleProcess:
        """Returns the process that may come."""
        del anew
        return _ElsewhereProcess()

    def last_words(self) -> str:
        """Returns "": they are on another machine."""
        return ""


def accelerators() -> list[str]:
    """Returns the GPUs of this machine that this process may use, as CUDA names them."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return [each for each in visible.split(",") if each not in ("", "-1", "NoDevFiles")]
    return [str(each) for each in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


def end_of_log(path: Path) -> str:
    """Returns the end of a role's log, "" if it cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
    except OSError:
        return ""


def start_role(
    run: Path,
    module: str,
    arguments: Sequence[str],
    output: IO[bytes] | None,
    accelerator: str | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a role's module with a run's folder; it writes to `output`, or where this process does.

    `accelerator` is the one that the role sees, None for all that this process does.
    """
    # The user's own settings stay.
    settings = {memory.NAME: os.environ.get(memory.NAME, memory.settings(os.cpu_count() or 1))}
    if accelerator is not None:
        settings[VISIBLE] = accelerator
    return start_module(
        module,
        ("--run", str(run), *arguments),
        settings,
        stdout=output,
        stderr=output,
        # What the terminal sends is for the process that starts it.
        start_new_session=True,
    )


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
