"""`seedbed host`: this machine runs what a run gives it, actors or learners and shards. It imports no JAX."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from seedbed.actors import command as actors
from seedbed.actors.host import HostOptions
from seedbed.actors.waiting import StopSignals, await_run, read_runtime, require_limit
from seedbed.actors.waiting import declare as declare_waiting
from seedbed.machine import require_linux, usable_cores
from seedbed.nearest import did_you_mean
from seedbed.paramserver import command as roles
from seedbed.paramserver.hosting import facts
from seedbed.paramserver.placement import KINDS
from seedbed.printable import printable
from seedbed.run.trust import declare as declare_trust
from seedbed.types import SeedbedError

DESCRIPTION = """Runs a part of a run that was started elsewhere: actors for a run with --listen; learners,
parameter shards and replay shards, as its coordinator decides, for one with --runtime paramserver --hosts N.
Both machines see the run's folder (without one: seedbed actor HOST:PORT). Waits for a run that has not begun.
Ends when the run ends."""


class Options(NamedTuple):
    """The choices of whoever starts a host."""

    run: Path
    cores: float  # that it uses
    trusted: bool = False  # whether the user trusts the run's folder, whoever can write it
    give_up_after_s: float = 3600.0
    only: tuple[str, ...] = KINDS  # the kinds of roles that it takes, besides actors
    allow: tuple[str, ...] = ()  # modules whose environments actors may make


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to a parser."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of the run")
    parser.add_argument(
        "--only",
        metavar="KIND[,KIND]",
        default=",".join(KINDS),
        help=f"the kinds of roles that it takes in Gorila's runtime (default: {','.join(KINDS)})",
    )
    parser.add_argument(
        "--cores", type=int, default=0, metavar="N", help="cores that it uses (default: all)"
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module whose environments the learner may ask actors for; may be repeated",
    )
    declare_trust(parser)
    declare_waiting(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def options_of(given: argparse.Namespace) -> Options:
    """Returns what a command line asks for; raises SeedbedError if it cannot be."""
    only = tuple(kind for kind in given.only.split(",") if kind) or ("",)
    for kind in only:
        if kind not in KINDS:
            raise SeedbedError(
                f"--only names {kind!r}{did_you_mean(kind, KINDS)}: take {', '.join(KINDS)}"
            )
    if given.cores < 0:
        raise SeedbedError(f"--cores is {given.cores}: it must be 0 or more")
    cores, limit_s = given.cores or usable_cores(), require_limit(given)
    return Options(given.run, cores, given.trust_run, limit_s, only, tuple(given.allow))


def serve(
    options: Options, tell: Callable[[str], None], stop: StopSignals | None = None
) -> str | None:
    """Serves a run until it ends or a signal comes; returns how it ended, None after a signal.

    Call from the main thread. Raises SeedbedError if the run takes no hosts; TemporaryError if it has not
    begun in time, or if its coordinator is gone; KeyboardInterrupt after a second signal, which ends
    everything here.
    """
    require_linux("seedbed host", "start it on a Linux machine")
    run, limit_s, stop = options.run.resolve(), options.give_up_after_s, stop or StopSignals()
    if not await_run(run, _missing, limit_s, tell, stop):
        return None
    found = read_runtime(run)
    if not isinstance(found, str) and found[0] == "paramserver":
        has = facts(options.only, options.cores)
        return roles.serve(run, has, options.trusted, limit_s, tell, stop)
    processes = max(1, int(options.cores))
    allowed = HostOptions(processes, allow=options.allow, give_up_after_s=limit_s)
    return actors.serve_run(run, allowed, tell, stop)


def _missing(run: Path) -> str:
    """Returns what keeps hosts from joining a run, "" if nothing does; raises SeedbedError if they cannot."""
    found = read_runtime(run)
    if isinstance(found, str):
        return found
    if found[0] == "fused":
        raise SeedbedError(
            f"the run {printable(run)} trains in one process, and takes no hosts: check the path"
        )
    return ""
