"""A host: it starts, watches and ends the roles on its machine that the coordinator gives it.

It imports no JAX.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from seedbed.machine import usable_cores
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.launching import LOG, end_of_log, start_role
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.role import COORDINATOR, STOP_S, Role
from seedbed.run.folder import ROLES
from seedbed.run.trust import OPTION as TRUST
from seedbed.streams.messages import Message, ProtocolError
from seedbed.streams.server import Client

NAME = "host-"
"""How the names of hosts begin."""
BEAT_S = 5.0
"""Seconds between two signs of life in the run's folder."""
_BEAT, _CLOCK = "beat", "clock"
# The modules that a host starts.
_MODULES = tuple(f"{__package__}.{name}" for name in ("shard", "replay_shard", "learner"))
_NAMES = re.compile(r"(parameters|replay|learner)-\d{1,6}")
_ARGUMENTS = re.compile(r"--number \d{1,6}( --save [\w.]+)?", re.ASCII)


class Facts(NamedTuple):
    """A machine, as its host describes it."""

    machine: str  # its name, for people
    cores: float
    memory_gb: float
    accelerators: int
    python: str
    only: tuple[str, ...]  # the kinds of roles that it takes


def facts(only: tuple[str, ...], cores: float = 0.0) -> Facts:
    """Returns what this machine has; `cores` are those that this host may use, 0 for all."""
    memory = psutil.virtual_memory().total / 1e9
    return Facts(
        socket.gethostname(),
        cores or usable_cores(),
        round(memory, 1),
        len(list(Path("/dev").glob("nvidia[0-9]*"))),
        platform.python_version(),
        only,
    )


def begin(run: Path) -> Role:
    """Takes a name for this host in a run; raises SeedbedError if its folder cannot be written."""
    return Role(run, f"{NAME}{Directory(run).take_number('host')}")


def beaten(run: Path, name: str) -> float:
    """Returns for how many seconds a host has given no sign of life in the run's folder."""
    roles = run / ROLES
    try:
        clock = roles / _CLOCK
        clock.touch()
        # The clock is that of the disk that has the folder, which need not be this machine's.
        return clock.stat().st_mtime - (roles / name / _BEAT).stat().st_mtime
    except OSError:
        return float("inf")


class _Child:
    """A role's process on this machine."""

    def __init__(self, start: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self.start, self.process, self.log = start, process, log
        self._used_s, self._worked_s = 0.0, time.monotonic()
        self._watched = psutil.Process(process.pid)

    def report(self) -> dict[str, Any]:
        """Returns how it is, as JSON types."""
        status = self.process.poll()
        if status is None:
            with contextlib.suppress(psutil.Error):
                used_s = sum(self._watched.cpu_times()[:2])
                if used_s != self._used_s:
                    self._used_s, self._worked_s = used_s, time.monotonic()
        words = "" if status is None else end_of_log(self.log)
        idle_s = time.monotonic() - self._worked_s
        return {"start": self.start, "status": status, "idle_s": idle_s, "words": words}


class Hosting:
    """The work of a host; `role.Work`. For the role's thread."""

    def __init__(self, role: Role, run: Path, has: Facts, arguments: tuple[str, ...]) -> None:
        """`arguments` are more ones of every role's process, such as those of trust."""
        self._role, self._run, self._has, self._arguments = role, run, has, arguments
        self._children: dict[str, _Child] = {}
        self._starts, self._beat_s = 0, 0.0
        self.leaving_s: float | None = None  # when this machine was told to stop
        self.lost = False  # whether the run's folder is gone

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Lets only the coordinator in."""
        if said["role"] != COORDINATOR:
            raise ProtocolError(f"{self._role.name} runs roles for the coordinator alone")
        return {}

    def take(self, client: Client, message: Message) -> None:
        """Starts a role, or ends one."""
        fields = message.fields
        name = fields.get("role")
        if not isinstance(name, str) or not _NAMES.fullmatch(name):
            raise ProtocolError(f"{name!r} is no name of a role")
        if message.kind is Kind.START:
            client.send(Kind.STARTED, role=name, **self._start(name, fields))
        elif message.kind is Kind.END:
            self._end(name)
        else:
            raise ProtocolError(f"a host takes no {message.kind.name}")

    def _start(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        module, words = fields.get("module"), fields.get("arguments")
        if module not in _MODULES:
            raise ProtocolError(f"{module!r} is no module of a role")
        if not (isinstance(words, list) and all(isinstance(each, str) for each in words)):
            raise ProtocolError(f"START of {name} has no arguments")
        # Whether the folder is trusted is for who started this host to say.
        asked = [word for word in words if word != TRUST]
        if not _ARGUMENTS.fullmatch(" ".join(asked)):
            raise ProtocolError(f"START of {name} has other arguments than a role's: {asked}")
        self._end(name)
        folder = self._run / ROLES / name
        self._starts += 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / LOG).open("ab") as log:
                arguments = (*asked, "--parent", str(os.getpid()), *self._arguments)
                process = start_role(self._run, module, arguments, log)
        except OSError as error:
            return {"start": 0, "errno": error.errno, "error": str(error)}
        self._children[name] = _Child(self._starts, process, folder / LOG)
        return {"start": self._starts}

    def _end(self, name: str) -> None:
        """Kills a role's process, if there is one."""
        child = self._children.pop(name, None)
        if child is not None:
            child.process.kill()
            child.process.wait()

    def leave(self, client: Client) -> None:
        """Does nothing: a coordinator that is gone may come back."""

    def stop(self, *_: Any) -> None:
        """Lets the host leave: its coordinator saves what there is, or has the roles started elsewhere."""
        self.leaving_s = self.leaving_s or time.monotonic()

    def tick(self, now_s: float) -> bool:
        """Gives signs of life; returns False once a host that leaves has no role, or if the run is gone."""
        if now_s > self._beat_s + BEAT_S:
            self._beat_s = now_s
            self.lost = not self._run.is_dir()
            with contextlib.suppress(OSError):
                (self._run / ROLES / self._role.name / _BEAT).touch()
        if self.leaving_s is None:
            return not self.lost
        busy = any(child.process.poll() is None for child in self._children.values())
        return busy and now_s < self.leaving_s + STOP_S

    def report(self) -> dict[str, Any]:
        """Returns what the machine has, and how its roles are."""
        return {
            "has": self._has._asdict(),
            "leaving": self.leaving_s is not None,
            "roles": {name: child.report() for name, child in self._children.items()},
        }

    def close(self) -> None:
        """Ends all roles, and takes this host out of the run's folder."""
        running = [each.process for each in self._children.values() if each.process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + STOP_S
        for process in running:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._run / ROLES / self._role.name, ignore_errors=True)
