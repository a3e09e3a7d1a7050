"""The other machines of a run, as the coordinator sees them: who has joined, what is where, who is gone."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seedbed.exit_status import TemporaryError
from seedbed.machine import usable_cores
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.launching import Here, Launcher, RoleProcess, RoleSpec
from seedbed.paramserver.placement import HERE, Machine, Wish, place
from seedbed.paramserver.registration import NAME, Registrar
from seedbed.paramserver.remote_host import Host
from seedbed.printable import pasted, printable
from seedbed.run.folder import TakenOver
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.credentials import KEY
from seedbed.types import SeedbedError

# Seconds between two looks for hosts that have joined.
_LOOK_S = 0.5
# Seconds between two looks after which nothing is known of who was silent.
_AWAY_S = 5.0
# Seconds in which hosts must have ended their roles.
_END_S = 10.0
# Seconds in which all hosts that a run is started with must have joined.
_JOIN_S = 600.0
# Seconds in which the hosts of a run that goes on without a coordinator must have answered.
_FIND_S = 5.0


class Hosts:
    """All hosts of a run, and who runs what. Any thread may use it."""

    def __init__(
        self,
        run: Path,
        wanted: int,
        listen: str = "",
        term: int = 0,
        stopping: Callable[[], bool] = lambda: False,
        require_claim: Callable[[], None] = lambda: None,
    ) -> None:
        """Opens the door for hosts, if the user has said that there will be some: `wanted`.

        `term` is the number of this start of the run. `stopping`, which any thread calls, returns whether the
        whole run is being stopped: hosts that are told to leave then keep their roles, which save.
        `require_claim`, which any thread calls, raises TakenOver if another coordinator has the run. Raises
        SeedbedError if the door cannot be had.
        """
        self.require_claim = require_claim
        self._run, self._wanted, self._stopping = run, wanted, stopping
        self._directory = Directory(run)
        self._hosts: dict[str, Host] = {}
        self._placed: dict[str, tuple[Wish, str]] = {}
        self._wishes: dict[str, Wish] = {}
        self._notices: list[str] = []
        self._lock = threading.RLock()
        self._looked_s, self._told = 0.0, set[str]()
        self._full = False  # whether the user knows that addresses cannot be written
        self._door: Registrar | None = None
        if wanted:
            # Others must not be able to write what the run's roles import.
            self._directory.path.mkdir(0o755, parents=True, exist_ok=True)
            for name in self._directory.names():
                if name.startswith(NAME):
                    self._meet(name)
            self._door = Registrar(run, listen, term, self._meet)

    def look(self) -> list[Host]:
        """Returns the hosts that roles can be on, after a look at who has come and gone."""
        with self._lock:
            if not self._wanted:
                return []
            unseen_s = time.monotonic() - self._looked_s
            if unseen_s > _LOOK_S:
                self._looked_s = time.monotonic()
                self._greet()
                self._spread_addresses()
            away = unseen_s > _AWAY_S
            for host in [each for each in self._hosts.values() if each.gone(away)]:
                del self._hosts[host.name]
                host.keeper.kill()
                if not self.taken_over():
                    self._forget(host)
                if host.joined:
                    self._notices.append(f"{host.name} ({host.facts.machine}) is gone")
                elif host.keeper.failure is not None:
                    self._notices.append(f"{host.name} cannot join: {host.keeper.failure}")
            kept = self._stopping()
            return [
                host for host in self._hosts.values() if host.joined and (kept or not host.leaves())
            ]

    def _meet(self, name: str) -> None:
        """Takes up a host that has told where it is."""
        with self._lock:
            if name not in self._hosts:
                self._hosts[name] = Host(self._run, name)

    def taken_over(self) -> bool:
        """Returns whether another coordinator has the run: its hosts and roles are that one's then."""
        try:
            self.require_claim()
        except TakenOver:
            return True
        return False

    def _forget(self, host: Host) -> None:
        """Removes what a host has told; it tells it again if it comes back."""
        shutil.rmtree(self._directory.path / host.name, ignore_errors=True)

    def _spread_addresses(self) -> None:
        """Passes on where roles are, from and to the hosts that have folders of their own."""
        apart = [host for host in self._hosts.values() if host.joined and not host.shares]
        if not apart:
            return
        try:
            for host in apart:
                for name, address in host.addresses():
                    if address != self._directory.find(name):
                        self._directory.announce(name, address)
            self._full = False
        except SeedbedError as error:
            if not self._full:
                self._notices.append(f"{error}; tried again")
            self._full = True
        found = {name: self._directory.find(name) for name in self._wishes}
        known = {name: address for name, address in found.items() if address is not None}
        for host in apart:
            host.tell(known)

    def _greet(self) -> None:
        """Tells the user of hosts that have joined."""
        for host in self._hosts.values():
            if host.joined and host.name not in self._told:
                self._told.add(host.name)
                has = host.facts
                self._notices.append(
                    f"{host.name} has joined: {has.machine}, {has.cores:.3g} cores, "
                    f"{has.memory_gb:g} GB, Python {has.python}"
                    + (f", {has.accelerators} accelerators" if has.accelerators else "")
                    + ("" if has.shares else "; it has a folder of its own")
                )

    def find_former(self, stop: Callable[[], bool]) -> None:
        """Waits, for seconds, until the hosts of an earlier coordinator have answered."""
        until_s = time.monotonic() + _FIND_S
        while self.look() or self._hosts:
            if all(host.joined for host in self._hosts.values()):
                return
            if stop() or time.monotonic() > until_s:
                return
            time.sleep(0.05)

    def await_all(self, tell: Callable[[str], None], stop: Callable[[], bool]) -> bool:
        """Waits until as many hosts have joined as are wanted; returns False if `stop` returns True first.

        Raises TemporaryError if they do not come.
        """
        until_s, told = time.monotonic() + _JOIN_S, -1
        while (there := len(self.look())) < self._wanted:
            for notice in self.take_notices():
                tell(notice)
            if there != told:
                command = f"seedbed host {pasted(self._run)}"
                tell(f"{there} of {self._wanted} hosts have joined; on each: {command}")
                if told < 0 and self._door is not None:
                    key, at = self._run / CREDENTIALS / KEY, pasted(self._door.addresses[0])
                    tell(
                        f"or, without this folder, with a copy of {printable(key)}: "
                        f"seedbed host {at} --key {KEY}"
                    )
                told = there
            if stop():
                return False
            if time.monotonic() > until_s:
                raise TemporaryError(
                    f"{there} of {self._wanted} hosts have joined {printable(self._run)} within "
                    f"{_JOIN_S:.0f} s: start the others with seedbed host, or lower --hosts"
                )
            time.sleep(0.1)
        return True

    def plan(self, wishes: Iterable[Wish]) -> None:
        """Decides where roles begin; those that run on a host stay there."""
        with self._lock:
            self._wishes = {wish.name: wish for wish in wishes}
            hosts = self.look()
            self._placed = {
                wish.name: (wish, host.name)
                for wish in self._wishes.values()
                for host in hosts
                if (said := host.role(wish.name)) is not None and said["status"] is None
            }
            self._place(self._wishes, hosts)

    def _place(self, wishes: Mapping[str, Wish], hosts: Sequence[Host]) -> None:
        here = socket.gethostname()
        taken = sum(host.facts.cores for host in hosts if host.facts.machine == here)
        left = max(0.0, min(usable_cores(), (os.cpu_count() or 1) - taken))
        machines = [Machine(HERE, left), *(host.machine for host in hosts)]
        missing = [wish for name, wish in wishes.items() if name not in self._placed]
        self._placed = place(missing, machines, self._placed)

    def host_of(self, name: str) -> Host | None:
        """Returns where a role begins now, None if here: where it was, if that is still there."""
        with self._lock:
            hosts = {host.name: host for host in self.look()}
            where = self._placed[name][1]
            if where != HERE and where not in hosts:
                del self._placed[name]
                self._place(self._wishes, list(hosts.values()))
                where = self._placed[name][1]
                self._notices.append(f"{name} begins on {where or 'this machine'}")
            return hosts.get(where)

    def holder(self, name: str) -> Host | None:
        """Returns the host that runs a role at this moment, None if there is none."""
        for host in self.look():
            said = host.role(name)
            if said is not None and said["status"] is None:
                return host
        return None

    def keeps_apart(self, name: str) -> bool:
        """Returns whether a role is on a host with a folder of its own."""
        host = self.holder(name)
        return host is not None and not host.shares

    def is_there(self, host: Host) -> bool:
        """Returns whether a host is one that roles can be on."""
        return host in self.look()

    def launcher(self, role: RoleSpec) -> Launcher:
        """Returns the launcher of a role, wherever it goes."""
        return _Placed(self, self._directory, Here(self._run, role), role)

    def end_all(self) -> int:
        """Kills all roles on the hosts; returns how many there were."""
        ended, until_s = set[tuple[str, str]](), time.monotonic() + _END_S
        while time.monotonic() < until_s:
            running = [
                (host, name)
                for host in self.look()
                for name, said in host.keeper.report.get("roles", {}).items()
                if said["status"] is None
            ]
            if not running:
                break
            ended |= {(host.name, name) for host, name in running}
            # A stream may break meanwhile: then it is asked again.
            concurrent.futures.wait([host.end(name) for host, name in running], timeout=1)
        return len(ended)

    def take_notices(self) -> list[str]:
        """Returns messages for the user, each once."""
        with self._lock:
            own, self._notices = self._notices, []
            of_hosts = [
                each for host in self._hosts.values() for each in host.keeper.take_notices()
            ]
            return [*own, *of_hosts]

    def close(self) -> None:
        """Lets all hosts end: the run has ended. If another coordinator has it, they are left as they are."""
        if self._door is not None:
            self._door.close()
        hosts = list(self._hosts.values())
        if self.taken_over():
            for host in hosts:
                host.keeper.abandon()
            return
        for host in hosts:
            host.keeper.finish()
        for host in hosts:
            host.keeper.close(patience_s=2.0)
            self._forget(host)

    def kill(self) -> None:
        """Has all hosts end at once, and does not wait."""
        for host in list(self._hosts.values()):
            host.keeper.finish()


class _HostedProcess:
    """A role's process on a host. Any thread may use it."""

    ours = True
    pid: int | None = None

    def __init__(self, hosts: Hosts, host: Host, name: str, start: int) -> None:
        self._hosts, self._host, self._name, self._start = hosts, host, name, start

    def _said(self) -> dict[str, Any] | None:
        said = self._host.role(self._name)
        return said if said is not None and said["start"] == self._start else None

    def alive(self) -> bool:
        """Returns whether its host is there and says that it runs."""
        said = self._said()
        return said is not None and said["status"] is None and self._hosts.is_there(self._host)

    def status(self) -> int | None:
        """Returns the exit status, None if the host has not told it."""
        said = self._said()
        return None if said is None else said["status"]

    def idle_s(self) -> float:
        """Returns for how long its CPU time has not grown."""
        said = self._said()
        return 0.0 if said is None else float(said["idle_s"])

    def last_words(self) -> str:
        """Returns the end of what it has written, if it has ended."""
        said = self._said()
        return "" if said is None else str(said["words"])

    def kill(self) -> None:
        """Has the host kill it."""
        self._host.end(self._name)

    def end(self) -> None:
        """Has the host kill it, and waits for that if the host is there and the run is still ours."""
        if self._hosts.taken_over():
            return
        concurrent.futures.wait([self._host.end(self._name)], timeout=5)


class _Placed:
    """Starts processes of a role where it is placed, on this machine or on a host."""

    def __init__(self, hosts: Hosts, directory: Directory, here: Here, role: RoleSpec) -> None:
        self._hosts, self._directory, self._here, self._role = hosts, directory, here, role
        self._process: RoleProcess | None = None
        self._host: Host | None = None  # that has begun the role last, and may have a save of it

    def adopt(self) -> RoleProcess | None:
        """Returns the role's process if one runs on a host, or here."""
        host = self._host = self._hosts.holder(self._role.name)
        if host is None:
            self._process = self._here.adopt()
        else:
            said = host.role(self._role.name)
            assert said is not None
            self._process = _HostedProcess(self._hosts, host, self._role.name, said["start"])
        return self._process

    def start(self, anew: bool) -> RoleProcess:
        """Starts a process where the role is placed now; raises OSError, and TakenOver."""
        # Its number would be the latest, and it would take the place of the next coordinator's.
        self._hosts.require_claim()
        role = self._role
        host = self._hosts.host_of(role.name)
        # A start that fails has changed nothing where the role was; elsewhere it may have begun all the same.
        former, self._host = self._host, self._host if host is self._host else None
        if host is None:
            self._process = self._here.start(anew)
        else:
            if not host.shares:
                host.provide(role.name, has_save=host is former)
            number = role.take_number(self._directory)
            host.start(role, number, anew)
            self._process = _HostedProcess(self._hosts, host, role.name, number)
        self._host = host
        return self._process

    def last_words(self) -> str:
        """Returns the end of what the role's last process has written."""
        process = self._process
        return (
            process.last_words() if isinstance(process, _HostedProcess) else self._here.last_words()
        )
