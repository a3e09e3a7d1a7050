"""How a machine serves as a host of a run with parameter servers. It imports no JAX."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from seedbed.actors.waiting import StopSignals, await_run, read_runtime
from seedbed.exit_status import TemporaryError
from seedbed.paramserver import hosting
from seedbed.printable import printable, resume_command
from seedbed.run.folder import ROLES
from seedbed.run.trust import OPTION as TRUST
from seedbed.streams.addresses import listening_ports
from seedbed.streams.credentials import FOLDER, KEY
from seedbed.types import SeedbedError


def serve(
    run: Path,
    has: hosting.Facts,
    trusted: bool,
    limit_s: float,
    tell: Callable[[str], None],
    stop: StopSignals,
) -> str | None:
    """Runs roles until the run ends or a signal comes; returns how it ended, None after a signal.

    `has` is what this machine offers, and `limit_s` how long it waits for a coordinator. Call from the main
    thread. Raises SeedbedError if the run takes no hosts, and TemporaryError if nobody coordinates it.
    """
    if not await_run(run, _missing, limit_s, tell, stop):
        return None
    role = hosting.begin(run)
    work = hosting.Hosting(role, run, has, (TRUST,) if trusted else ())
    stop.call(work.stop)
    what = f"{has.cores:.3g} cores, {has.memory_gb:g} GB"
    tell(f"{role.name} of {printable(run)}: {what}; waiting for its coordinator")
    found = read_runtime(run)
    listen = "" if isinstance(found, str) else str(found[1]["listen"])
    role.serve(work, listening_ports(listen)._replace(host=""), first_s=limit_s)
    if stop():
        return None
    if role.alone:
        raise TemporaryError(
            f"nobody has coordinated the run {printable(run)} for a minute: start this host again when the "
            f"run goes on where it was started, with: {resume_command(run)}"
        )
    return f"{printable(run)} is gone" if work.lost else "the run has ended"


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
    begun = (run / FOLDER / KEY).exists() and (run / ROLES).exists()
    return "" if begun else "its coordinator has not made its key yet"
