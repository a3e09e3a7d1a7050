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
from seedbed.paramserver.directory import JOB, SAVE, Address, Directory
from seedbed.paramserver.launching import LOG, accelerators, end_of_log, start_role
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.role import COORDINATOR, STOP_S, Role
from seedbed.run.trust import OPTION as TRUST
from seedbed.streams.messages import Message, ProtocolError, require_fields
from seedbed.streams.server import Client
from seedbed.types import SeedbedError

# Seconds between two looks whether the run's folder is there.
_LOOK_S = 5.0
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
    shares: bool = True  # whether it sees the run's folder


def facts(only: tuple[str, ...], cores: float = 0.0, shares: bool = True) -> Facts:
    """Returns what this machine has; `cores` are those that this host may use, 0 for all."""
    memory = psutil.virtual_memory().total / 1e9
    return Facts(
        socket.gethostname(),
        cores or usable_cores(),
        round(memory, 1),
        len(accelerators()),
        platform.python_version(),
        only,
        shares,
    )


class _Child:
    """A role's process on this machine."""

    def __init__(
        self, start: int, process: subprocess.Popen[bytes], log: Path, accelerator: str | None
    ) -> None:
        self.start, self.process, self.log, self.accelerator = start, process, log, accelerator
        self._used_s, self._worked_s = 0.0, time.monotonic()
        self._watched = psutil.Process(process.pid)

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

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
        self._directory = Directory(run)
        self._children: dict[str, _Child] = {}
        self._unwritten: dict[str, Address] = {}
        self._look_s = 0.0
        self.coordinated = False  # whether a coordinator is connected
        self.leaving_s: float | None = None  # when this machine was told to stop
        self.lost = False  # whether the run's folder is gone

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Lets only the coordinator in."""
        if said["role"] != COORDINATOR:
            raise ProtocolError(f"{self._role.name} runs roles for the coordinator alone")
        self.coordinated = True
        return {}

    def take(self, client: Client, message: Message) -> None:
        """Starts a role or ends one; takes a file, or an address, if this host has a folder of its own."""
        fields, kind = message.fields, message.kind
        if kind is Kind.FILE and not self._has.shares:
            client.send(Kind.FILED, **self._file(message))
            return
        name = fields.get("role")
        if not isinstance(name, str) or not _NAMES.fullmatch(name):
            raise ProtocolError(f"{name!r} is no name of a role")
        if kind is Kind.START:
            client.send(Kind.STARTED, role=name, **self._start(name, fields))
        elif kind is Kind.END:
            self._end(name)
        elif kind is Kind.ADDRESS and not self._has.shares:
            self._learn(name, fields)
        else:
            raise ProtocolError(f"a host takes no {kind.name}")

    def _learn(self, name: str, fields: dict[str, Any]) -> None:
        """Writes down where a role is, for those of this machine; what a later start has told stays."""
        try:
            address = Address.from_json(fields.get("address"))
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"ADDRESS of {name} has none ({error!r})") from error
        self._unwritten[name] = address
        self._write_addresses()

    def _write_addresses(self) -> None:
        """Writes down what the disk has had no room for, too."""
        with contextlib.suppress(SeedbedError):
            for name, address in list(self._unwritten.items()):
                self._directory.announce(name, address)
                del self._unwritten[name]

    def _file(self, message: Message) -> dict[str, Any]:
        """Writes a part of a file; after the last one the file has its name. A failure is told."""
        said = require_fields(message.fields, role=str, name=str, at=int, last=bool)
        role, name, at = said["role"], said["name"], said["at"]
        if not ((name == JOB and not role) or (name == SAVE and _NAMES.fullmatch(role))):
            raise ProtocolError(f"a host takes no file {name!r} of {role!r}")
        folder = self._directory.path / role
        part = folder / f".{name}.part"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Only its owner can write it, whatever the umask is: `run.trust` relies on that.
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if at else os.O_TRUNC)
            with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
                if os.fstat(file.fileno()).st_size != at:
                    raise ProtocolError(f"a part of {name} came out of turn")
                file.write(message.block)
            if said["last"]:
                part.replace(folder / name)
        except OSError as error:
            return {"errno": error.errno, "error": error.strerror}
        return {"errno": 0}

    def _start(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        module, words = fields.get("module"), fields.get("arguments")
        number = require_fields(fields, start=int)["start"]
        if module not in _MODULES:
            raise ProtocolError(f"{module!r} is no module of a role")
        if not (isinstance(words, list) and all(isinstance(each, str) for each in words)):
            raise ProtocolError(f"START of {name} has no arguments")
        # Whether the folder is trusted is for who started this host to say.
        asked = [word for word in words if word != TRUST]
        if not _ARGUMENTS.fullmatch(" ".join(asked)):
            raise ProtocolError(f"START of {name} has other arguments than a role's: {asked}")
        self._end(name)
        folder = self._directory.path / name
        own = ("--start", str(number), "--parent", str(os.getpid()), *self._arguments)
        accelerator = self._accelerator() if name.startswith("learner") else None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / LOG).open("ab") as log:
                process = start_role(self._run, module, (*asked, *own), log, accelerator)
        except OSError as error:
            return {"errno": error.errno, "error": error.strerror}
        self._children[name] = _Child(number, process, folder / LOG, accelerator)
        return {"errno": 0}

    def _accelerator(self) -> str | None:
        """Returns which of several accelerators the next learner gets: one that the fewest have."""
        there = accelerators()
        if len(there) < 2:
            return None
        taken = [child.accelerator for child in self._children.values() if child.running]
        return min(there, key=taken.count)

    def _end(self, name: str) -> None:
        """Kills a role's process, if there is one."""
        child = self._children.pop(name, None)
        if child is not None:
            child.process.kill()
            child.process.wait()

    def leave(self, client: Client) -> None:
        """Notes that no coordinator is connected; it may come back."""
        del client
        self.coordinated = False

    def stop(self, *_: Any) -> None:
        """Lets the host leave: its coordinator saves what there is, or has the roles started elsewhere."""
        self.leaving_s = self.leaving_s or time.monotonic()

    def tick(self, now_s: float) -> bool:
        """Returns False once a host that leaves has no role, or if the run is gone."""
        if now_s > self._look_s + _LOOK_S:
            self._look_s = now_s
            self.lost = not self._run.is_dir()
            self._write_addresses()
        if self.leaving_s is None:
            return not self.lost
        busy = any(child.running for child in self._children.values())
        return busy and now_s < self.leaving_s + STOP_S

    def report(self) -> dict[str, Any]:
        """Returns what the machine has, and how its roles are."""
        return {
            "has": self._has._asdict(),
            "leaving": self.leaving_s is not None,
            "roles": {
                name: {**child.report(), "address": self._address(name, child)}
                for name, child in self._children.items()
            },
        }

    def _address(self, name: str, child: _Child) -> dict[str, Any] | None:
        """Returns what a role of a host with its own folder has told there, None if nothing yet."""
        told = None if self._has.shares else self._directory.find(name)
        return told._asdict() if told is not None and told.number == child.start else None

    def close(self) -> None:
        """Ends all roles, and takes this host out of the run's folder."""
        running = [child.process for child in self._children.values() if child.running]
        for process in running:
            process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + STOP_S
        for process in running:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._directory.path / self._role.name, ignore_errors=True)
