"""Where the roles of a run are: each writes its address into the run's folder, where the others find it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

from seedbed.files import load_json, write_json
from seedbed.printable import printable
from seedbed.run.folder import ROLES
from seedbed.types import SeedbedError

JOB, SAVE = "job.json", "shard.save"
"""The files that roles begin with: what the run is, and in a parameter shard's folder what it has learned."""
_ADDRESS, _STARTS = "address.json", "starts"


class Address(NamedTuple):
    """How a process is reached."""

    number: int  # of its start
    pid: int
    machine: str  # where its Unix socket can be reached
    socket: str  # name of that socket, in the abstract namespace
    hosts: tuple[tuple[str, int], ...]  # addresses for all other machines, the likeliest first

    @classmethod
    def from_json(cls, data: Any) -> Address:
        """Returns what `_asdict` has become in JSON; raises ValueError, TypeError or KeyError."""
        hosts = tuple((str(host), int(port)) for host, port in data["hosts"])
        number, pid = int(data["number"]), int(data["pid"])
        return cls(number, pid, str(data["machine"]), str(data["socket"]), hosts)


@functools.cache
def this_machine() -> str:
    """Returns a name for all processes that can reach one another's Unix sockets, until the next boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


class Directory:
    """The folder `roles` of a run. Any thread may use it."""

    def __init__(self, run: Path) -> None:
        self.path = run / ROLES

    def take_number(self, role: str) -> int:
        """Returns a number, from 1 on, that no other start of this role has had; raises OSError."""
        folder = self.path / role / _STARTS
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            number = max(_numbers(folder), default=0) + 1
            try:
                (folder / str(number)).open("x").close()
            except FileExistsError:
                continue
            # Whoever took a later number meanwhile may have removed this one before it was made.
            taken = _numbers(folder)
            if max(taken, default=0) != number:
                continue
            for former in taken:
                if former != number:
                    (folder / str(former)).unlink(missing_ok=True)
            return number

    def announce(self, role: str, address: Address) -> None:
        """Writes an address, unless a later start has told its own.

        Raises SeedbedError if the disk refuses.
        """
        path, told = self.address_path(role), self.find(role)
        if told is not None and told.number > address.number:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, address._asdict())
        except OSError as error:
            raise SeedbedError(
                f"{printable(path)} cannot be written ({error.strerror}): mend it, or name another "
                "folder with --run"
            ) from error

    def address_path(self, role: str) -> Path:
        """Returns the path of the file with the address of a role, which may be missing."""
        return self.path / role / _ADDRESS

    def names(self) -> list[str]:
        """Returns the names of all roles that have told an address."""
        return [path.parent.name for path in self.path.glob(f"*/{_ADDRESS}")]

    def find(self, role: str) -> Address | None:
        """Returns the address of a role; None if it has never told one, or the folder cannot be read."""
        try:
            return Address.from_json(load_json(self.address_path(role)))
        except (OSError, ValueError, TypeError, KeyError):
            return None


def _numbers(folder: Path) -> list[int]:
    return [int(each.name) for each in folder.iterdir() if each.name.isdecimal()]
