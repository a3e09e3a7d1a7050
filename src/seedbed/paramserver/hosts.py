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
from seedbed.paramserver import hosting
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import Here, Launcher, RoleProcess, RoleSpec
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.placement import HERE, Machine, Wish, place
from seedbed.printable import pasted, printable
from seedbed.run.folder import ROLES

# Seconds between two looks for hosts that have joined.
_LOOK_S = 0.5
# Seconds without a sign of life after which a host of the run's folder is not looked for any more.
_STALE_S = 30.0
# Seconds without a stream to a host after which its roles begin elsewhere: a link that is cut comes back;
# and where its machine says that its process is gone.
_GONE_S, _REFUSED_S = 30.0, 3.0
# Seconds between two looks after which nothing is known of who was silent.
_AWAY_S = 5.0
# Seconds in which the coordinator may learn that not only a host is told to stop, but the whole run.
_LEAVE_S = 5.0
# Seconds in which a host must have started a process.
_START_S = 10.0
# Seconds in which hosts must have ended their roles.
_END_S = 10.0
# Seconds in which all hosts that a run is started with must have joined.
_JOIN_S = 600.0
# Seconds in which the hosts of a run that goes on without a coordinator must have answered.
_FIND_S = 5.0


class Host:
    """A machine that has joined. Any thread may use it."""

    def __init__(self, run: Path, name: str) -> None:
        self.name, self._seen_s = name, time.monotonic()
        self._left_s: float | None = None
        self._seen: dict[str, Any] = {}  # its last report
        self.keeper = Keeper(run, RoleSpec(name, ""), 0)

    @property
    def joined(self) -> bool:
        """Whether it has ever answered."""
        return bool(self.keeper.report)

    @property
    def facts(self) -> hosting.Facts:
        """The machine, as its host describes it."""
        return hosting.Facts(**self.keeper.report["has"])

    @property
    def machine(self) -> Machine:
        """The machine, as `placement` takes it."""
        has = self.facts
        return Machine(self.name, has.cores, has.accelerators, tuple(has.only))

    def leaves(self) -> bool:
        """Returns whether it was told to stop, and has had the time to learn that the run is, too."""
        if not self.keeper.report.get("leaving", False):
            return False
        self._left_s = self._left_s or time.monotonic()
        return time.monotonic() > self._left_s + _LEAVE_S

    def gone(self, away: bool) -> bool:
        """Returns whether it cannot be reached, and not only for a moment.

        `away` says that this process itself has not looked for long.
        """
        if self.keeper.failure is not None:
            return True
        now_s, report = time.monotonic(), self.keeper.report
        if away or report is not self._seen:
            self._seen, self._seen_s = report, now_s
        refused = not self.keeper.connected and "refused" in self.keeper.caller.last_error
        return now_s > self._seen_s + (_REFUSED_S if refused else _GONE_S)

    def role(self, name: str) -> dict[str, Any] | None:
        """Returns what it says of a role, None if it has none of this name."""
        return self.keeper.report.get("roles", {}).get(name)

    def start(self, name: str, module: str, arguments: Sequence[str]) -> int:
        """Starts a process; returns the number of its start. Raises OSError if it cannot."""

        def ask(keeper: Keeper) -> dict[str, Any]:
            fields = {"role": name, "module": module, "arguments": list(arguments)}
            said = keeper.ask(Kind.START, Kind.STARTED, **fields).fields
            keeper.fetch_report()
            return said

        try:
            said = self.keeper.request(ask).result(_START_S)
        except concurrent.futures.TimeoutError as error:
            raise ConnectionError(f"{self.name} has not started {name}") from error
        if not said["start"]:
            raise OSError(said["errno"], said["error"])
        return int(said["start"])

    def end(self, name: str) -> concurrent.futures.Future[Any]:
        """Has a role's process killed; does not wait."""

        def ask(keeper: Keeper) -> None:
            keeper.caller.send(Kind.END, role=name)
            keeper.fetch_report()

        return self.keeper.request(ask)


class Hosts:
    """All hosts of a run, and who runs what. Any thread may use it."""

    def __init__(
        self, run: Path, wanted: int, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """`wanted` is how many the user has said that there will be.

        `stopping`, which any thread calls, returns whether the whole run is being stopped: hosts that are
        told to leave then keep their roles, which save.
        """
        self._run, self._wanted, self._stopping = run, wanted, stopping
        if wanted:
            # Others must not be able to write what the run's roles import.
            (run / ROLES).mkdir(0o755, parents=True, exist_ok=True)
        self._directory = Directory(run)
        self._hosts: dict[str, Host] = {}
        self._placed: dict[str, tuple[Wish, str]] = {}
        self._wishes: dict[str, Wish] = {}
        self._notices: list[str] = []
        self._lock = threading.RLock()
        self._looked_s, self._told, self._refused = 0.0, set[str](), set[str]()

    def look(self) -> list[Host]:
        """Returns the hosts that roles can be on, after a look at who has come and gone."""
        with self._lock:
            if not self._wanted:
                return []
            unseen_s = time.monotonic() - self._looked_s
            if unseen_s > _LOOK_S:
                self._looked_s = time.monotonic()
                self._meet()
            away = unseen_s > _AWAY_S
            for host in [each for each in self._hosts.values() if each.gone(away)]:
                del self._hosts[host.name]
                host.keeper.kill()
                if host.joined:
                    self._notices.append(f"{host.name} ({host.facts.machine}) is gone")
                elif host.keeper.failure is not None:
                    self._refused.add(host.name)
                    self._notices.append(f"{host.name} cannot join: {host.keeper.failure}")
            kept = self._stopping()
            return [
                host for host in self._hosts.values() if host.joined and (kept or not host.leaves())
            ]

    def _meet(self) -> None:
        """Takes up the hosts that have told where they are, and forgets those that ended long ago."""
        for name in self._directory.names():
            if not name.startswith(hosting.NAME) or name in self._hosts or name in self._refused:
                continue
            idle_s = hosting.beaten(self._run, name)
            if idle_s < _STALE_S and self._directory.find(name) is not None:
                self._hosts[name] = Host(self._run, name)
            elif _STALE_S * 4 < idle_s < float("inf"):
                shutil.rmtree(self._run / ROLES / name, ignore_errors=True)
        for host in self._hosts.values():
            if host.joined and host.name not in self._told:
                self._told.add(host.name)
                has = host.facts
                self._notices.append(
                    f"{host.name} has joined: {has.machine}, {has.cores:.3g} cores, "
                    f"{has.memory_gb:g} GB, Python {has.python}"
                    + (f", {has.accelerators} accelerators" if has.accelerators else "")
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

    def is_there(self, host: Host) -> bool:
        """Returns whether a host is one that roles can be on."""
        return host in self.look()

    def launcher(self, role: RoleSpec) -> Launcher:
        """Returns the launcher of a role, wherever it goes."""
        return _Placed(self, Here(self._run, role), role)

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
        """Lets all hosts end: the run has ended."""
        hosts = list(self._hosts.values())
        for host in hosts:
            host.keeper.finish()
        for host in hosts:
            host.keeper.close(patience_s=2.0)

    def kill(self) -> None:
        """Has all hosts end at once, and does not wait."""
        for host in self._hosts.values():
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
        """Has the host kill it, and waits for that if the host is there."""
        concurrent.futures.wait([self._host.end(self._name)], timeout=5)


class _Placed:
    """Starts processes of a role where it is placed, on this machine or on a host."""

    def __init__(self, hosts: Hosts, here: Here, role: RoleSpec) -> None:
        self._hosts, self._here, self._role = hosts, here, role
        self._process: RoleProcess | None = None

    def adopt(self) -> RoleProcess | None:
        """Returns the role's process if one runs on a host, or here."""
        host = self._hosts.holder(self._role.name)
        if host is None:
            self._process = self._here.adopt()
        else:
            said = host.role(self._role.name)
            assert said is not None
            self._process = _HostedProcess(self._hosts, host, self._role.name, said["start"])
        return self._process

    def start(self, anew: bool) -> RoleProcess:
        """Starts a process where the role is placed now; raises OSError."""
        role = self._role
        host = self._hosts.host_of(role.name)
        if host is None:
            self._process = self._here.start(anew)
        else:
            arguments = (*role.arguments, *role.first) if anew else role.arguments
            start = host.start(role.name, role.module, arguments)
            self._process = _HostedProcess(self._hosts, host, role.name, start)
        return self._process

    def last_words(self) -> str:
        """Returns the end of what the role's last process has written."""
        process = self._process
        return (
            process.last_words() if isinstance(process, _HostedProcess) else self._here.last_words()
        )
