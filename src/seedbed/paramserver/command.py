"""How a machine serves as a host of a run with parameter servers. It imports no JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from seedbed.actors.command import Published
from seedbed.actors.waiting import StopSignals, await_run, read_runtime
from seedbed.exit_status import TemporaryError
from seedbed.paramserver import hosting
from seedbed.paramserver.caller import Caller
from seedbed.paramserver.registration import Entrance, Registration
from seedbed.paramserver.role import Role
from seedbed.printable import printable, resume_command
from seedbed.run.trust import OPTION as TRUST
from seedbed.streams.addresses import listening_ports
from seedbed.streams.credentials import (
    ADDRESS,
    FOLDER,
    KEY,
    PRIVATE,
    ActorKey,
    write_private,
)
from seedbed.types import SeedbedError

_NOT_YET = "its coordinator has not told yet where it is"


class Wishes(NamedTuple):
    """The choices of the person who starts a host."""

    has: hosting.Facts  # that the machine offers
    trusted: (
        bool  # whether the code that the run names may be imported, whoever can write its folder
    )
    limit_s: float  # how long the host waits for a coordinator


def serve(run: Path, wishes: Wishes, tell: Callable[[str], None], stop: StopSignals) -> str | None:
    """Serves a run whose folder this machine sees; returns how it ended, None after a signal.

    Call from the main thread. Raises SeedbedError if the run takes no hosts, and TemporaryError if nobody
    coordinates it.
    """
    if not await_run(run, _missing, wishes.limit_s, tell, stop):
        return None
    key = ActorKey.read(run / FOLDER / KEY)
    addresses = Published(run / FOLDER / ADDRESS, False, tell, key)
    return _serve(run, Entrance(addresses), wishes, tell, stop)


def serve_apart(
    run: Path,
    addresses: Callable[[], Sequence[tuple[str, int]]],
    wishes: Wishes,
    tell: Callable[[str], None],
    stop: StopSignals,
) -> str | None:
    """Serves a run whose folder this machine does not see, in one of its own with the key; as `serve`."""
    wishes = wishes._replace(has=wishes.has._replace(shares=False))
    return _serve(run, Entrance(addresses), wishes, tell, stop)


def _serve(
    run: Path, entrance: Entrance, wishes: Wishes, tell: Callable[[str], None], stop: StopSignals
) -> str | None:
    """Runs roles in a folder, the run's or this host's own, until the run ends or a signal comes."""
    has, limit_s = wishes.has, wishes.limit_s
    folder = run.resolve()  # it may be a link: roles stay with the run that it names now
    door = Registration(folder, entrance, has.shares)
    named = door.register(_Patience(limit_s, tell, stop))
    if named is None:
        return None
    if not has.shares:
        write_private(folder / FOLDER / PRIVATE, named.private)
    role = Role(folder, named.name, 1)
    work = hosting.Hosting(role, folder, has, (TRUST,) if wishes.trusted else ())
    stop.call(work.stop)
    where = f" of {printable(run)}" if has.shares else ""
    what = f"{has.cores:.3g} cores, {has.memory_gb:g} GB"
    tell(f"{role.name}{where}: {what}; waiting for its coordinator")
    door.keep(role.name, lambda: role.address, lambda: work.coordinated)
    try:
        at = listening_ports(named.listen)._replace(host="")
        role.serve(work, at, first_s=limit_s)
    finally:
        door.close()
    if stop():
        return None
    if work.lost:
        return f"{printable(run)} is gone"
    if door.refusal is not None:
        raise door.refusal
    if role.alone:
        again = f", with: {resume_command(run)}" if has.shares else ""
        raise TemporaryError(
            "nobody has coordinated the run for a minute: start this host again when the run goes on where "
            f"it was started{again}"
        )
    return "the run has ended"


class _Patience:
    """What a host does while it looks for a coordinator: it tells why none is found, and gives up in time."""

    def __init__(self, limit_s: float, tell: Callable[[str], None], stop: StopSignals) -> None:
        self._tell, self._stop, self._told = tell, stop, ""
        self._limit_s, self._until_s = limit_s, time.monotonic() + limit_s

    def __call__(self, caller: Caller) -> bool:
        """Returns whether to stop; raises TemporaryError if it is time to give up."""
        why = caller.last_error
        if time.monotonic() > self._until_s:
            raise TemporaryError(
                f"no coordinator has answered within {self._limit_s:g} s ({why}): check the address, or wait "
                "longer with --give-up-after"
            )
        if why and why != self._told:
            self._tell(f"looking for the run's coordinator: {why}")
            self._told = why
        return self._stop()


def _missing(run: Path) -> str:
    """Returns what keeps hosts from joining a run that has not begun, "" if nothing does.

    Raises SeedbedError if the run takes no hosts.
    """
    found = read_runtime(run)
    if isinstance(found, str):
        return found
    if not found[1].get("hosts"):
        raise SeedbedError(
            f"the run {printable(run)} takes no hosts: start it with --hosts N --listen ADDRESS"
        )
    return "" if (run / FOLDER / ADDRESS).exists() and (run / FOLDER / KEY).exists() else _NOT_YET
