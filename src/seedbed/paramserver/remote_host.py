"""A machine that has joined a run, as the coordinator sees it, and what it is sent that has no folder."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from seedbed.paramserver import hosting
from seedbed.paramserver.directory import JOB, SAVE, Address, Directory
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import RoleSpec
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.placement import Machine
from seedbed.streams.addresses import LOOPBACK

# Seconds without a stream to a host after which its roles begin elsewhere: a link that is cut comes back;
# and where its machine says that its process is gone.
_GONE_S, _REFUSED_S = 30.0, 3.0
# Seconds in which the coordinator may learn that not only a host is told to stop, but the whole run.
_LEAVE_S = 5.0
# Seconds in which a host must have started a process, or taken a part of a file.
_START_S = 10.0
# Bytes of a file that travel at once.
_CHUNK_BYTES = 1 << 19


def refused(why: str) -> bool:
    """Returns whether another machine has said that no process listens there; `why` is that of `reach`.

    An address that this machine has, too, such as 127.0.0.1 or that of a bridge, says nothing of another one.
    """
    own = {each.address for found in psutil.net_if_addrs().values() for each in found}
    own |= set(LOOPBACK)
    parts = [part for part in why.split("; ") if "refused" in part]
    hosts = [part.partition(": ")[0].rpartition(":")[0].strip("[]") for part in parts]
    return any(host not in own for host in hosts)


class Host:
    """A machine that has joined. Any thread may use it."""

    def __init__(self, run: Path, name: str) -> None:
        self.name, self._seen_s = name, time.monotonic()
        self._left_s: float | None = None
        self._seen: dict[str, Any] = {}  # its last report
        self._folder = Directory(run).path
        self._told: dict[str, Address] = {}  # what the host knows, if it does not see the folder
        self._telling: concurrent.futures.Future[Any] | None = None
        self._has_job = False
        self.keeper = Keeper(run, RoleSpec(name, ""), 0, self._greeted)

    def _greeted(self, keeper: Keeper, said: dict[str, Any]) -> None:
        """Has everything told again: what a stream has lost when it broke is not known."""
        del keeper, said
        self._told = {}

    @property
    def joined(self) -> bool:
        """Whether it has ever answered."""
        return bool(self.keeper.report)

    @property
    def shares(self) -> bool:
        """Whether it sees the run's folder; else it has one of its own."""
        return self.facts.shares

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
        why = "" if self.keeper.connected else self.keeper.caller.last_error
        return now_s > self._seen_s + (_REFUSED_S if refused(why) else _GONE_S)

    def role(self, name: str) -> dict[str, Any] | None:
        """Returns what it says of a role, None if it has none of this name."""
        return self.keeper.report.get("roles", {}).get(name)

    def addresses(self) -> Iterator[tuple[str, Address]]:
        """Yields where its roles are, if the host has a folder of its own, in which they have told it."""
        for name, said in self.keeper.report.get("roles", {}).items():
            if said["status"] is None and said["address"] is not None:
                yield name, Address.from_json(said["address"])

    def tell(self, addresses: Mapping[str, Address]) -> None:
        """Tells a host with a folder of its own where the roles of the run are; does not wait."""
        if self._telling is not None and not self._telling.done():
            return
        new = {name: each for name, each in addresses.items() if self._told.get(name) != each}
        if not new:
            return

        def send(keeper: Keeper) -> None:
            for name, address in new.items():
                keeper.caller.send(Kind.ADDRESS, role=name, address=address._asdict())
                self._told[name] = address

        self._telling = self.keeper.request(send)

    def provide(self, name: str, has_save: bool) -> None:
        """Puts what a role begins with into the folder of a host that has one of its own.

        `has_save` says whether the host has a newer save of the role than the coordinator. Raises OSError,
        which is a ConnectionError if the host does not answer.
        """
        if not self._has_job:
            self._send_file("", JOB)
            self._has_job = True
        if not has_save and (self._folder / name / SAVE).exists():
            self._send_file(name, SAVE)

    def _send_file(self, role: str, name: str) -> None:
        """Copies a file of the run's folder `roles` to the same place of the host's."""
        with (self._folder / role / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while True:
                at = file.tell()
                block = np.frombuffer(file.read(_CHUNK_BYTES), np.uint8)
                fields = {"role": role, "name": name, "at": at, "last": file.tell() >= size}

                def send(
                    keeper: Keeper, block: np.ndarray = block, fields: dict[str, Any] = fields
                ) -> dict[str, Any]:
                    return keeper.ask(Kind.FILE, Kind.FILED, block, **fields).fields

                self._require(self._result(self.keeper.request(send), f"taken {name}"))
                if fields["last"]:
                    return

    def _require(self, said: dict[str, Any]) -> None:
        """Raises OSError for what has failed on the host."""
        if said["errno"]:
            raise OSError(said["errno"], f"{self.facts.machine}: {said['error']}")

    def start(self, role: RoleSpec, number: int, anew: bool) -> None:
        """Starts a process of a role under a number. Raises OSError, as `provide`."""

        def ask(keeper: Keeper) -> dict[str, Any]:
            arguments = list(role.arguments_of(anew))
            fields = {"role": role.name, "module": role.module, "arguments": arguments}
            said = keeper.ask(Kind.START, Kind.STARTED, start=number, **fields).fields
            keeper.fetch_report()
            return said

        self._require(self._result(self.keeper.request(ask), f"started {role.name}"))

    def _result(
        self, asked: concurrent.futures.Future[dict[str, Any]], what: str
    ) -> dict[str, Any]:
        """Waits for what the host says; raises ConnectionError if it says nothing in time."""
        try:
            return asked.result(_START_S)
        except concurrent.futures.TimeoutError as error:
            raise ConnectionError(f"{self.name} has not {what}") from error

    def end(self, name: str) -> concurrent.futures.Future[Any]:
        """Has a role's process killed; does not wait."""

        def ask(keeper: Keeper) -> None:
            keeper.caller.send(Kind.END, role=name)
            keeper.fetch_report()

        return self.keeper.request(ask)
