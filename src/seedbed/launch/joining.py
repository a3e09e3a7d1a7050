"""`seedbed host`: this machine runs what a run gives it, actors or learners and shards. It imports no JAX."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from seedbed.actors import command as actors
from seedbed.actors.host import ANY, Host, HostOptions
from seedbed.actors.waiting import StopSignals, await_run, read_runtime, require_limit
from seedbed.actors.waiting import declare as declare_waiting
from seedbed.exit_status import TemporaryError
from seedbed.machine import require_linux, usable_cores
from seedbed.nearest import did_you_mean
from seedbed.paramserver import command as roles
from seedbed.paramserver.hosting import facts
from seedbed.paramserver.placement import KINDS
from seedbed.paramserver.role import COORDINATOR, end_with
from seedbed.printable import printable
from seedbed.run.trust import declare as declare_trust
from seedbed.streams.credentials import ADDRESS, ELSEWHERE, FOLDER, KEY, ActorKey, own_folder
from seedbed.streams.dns import Names
from seedbed.streams.handshake import Handshake
from seedbed.streams.reaching import reach
from seedbed.types import SeedbedError

DESCRIPTION = """Runs a part of a run that was started elsewhere: actors for a run with --listen; learners,
parameter shards and replay shards, as its coordinator decides, for one with --runtime paramserver --hosts N.
The run is named by its folder, if this machine sees it, or by an address and the run's key. Waits for a run
that has not begun. Ends when the run ends."""
_RETRY_S = 0.5


class Options(NamedTuple):
    """The choices of whoever starts a host."""

    where: str  # the run's folder, or HOST:PORT
    cores: float  # that it uses
    trusted: bool = False  # whether the user trusts the run's folder, whoever can write it
    give_up_after_s: float = 3600.0
    only: tuple[str, ...] = KINDS  # the kinds of roles that it takes, besides actors
    allow: tuple[str, ...] = ()  # modules whose environments actors may make
    key: Path | None = None  # of the run, where it is named by an address


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to a parser."""
    parser.add_argument(
        "where", metavar="RUN_OR_ADDRESS", help="the folder of the run, or HOST:PORT with --key"
    )
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help=f"the file {FOLDER}/{KEY} of the run's folder"
    )
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
    # Where another process starts hosts and must not leave any behind.
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    declare_trust(parser)
    declare_waiting(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def options_of(given: argparse.Namespace) -> Options:
    """Returns what a command line asks for; raises SeedbedError if it cannot be."""
    if given.parent is not None:
        end_with(given.parent)
    only = tuple(kind for kind in given.only.split(",") if kind) or ("",)
    for kind in only:
        if kind not in KINDS:
            raise SeedbedError(
                f"--only names {kind!r}{did_you_mean(kind, KINDS)}: take {', '.join(KINDS)}"
            )
    if given.cores < 0:
        raise SeedbedError(f"--cores is {given.cores}: it must be 0 or more")
    cores, limit_s = given.cores or usable_cores(), require_limit(given)
    return Options(
        given.where, cores, given.trust_run, limit_s, only, tuple(given.allow), given.key
    )


def serve(
    options: Options, tell: Callable[[str], None], stop: StopSignals | None = None
) -> str | None:
    """Serves a run until it ends or a signal comes; returns how it ended, None after a signal.

    Call from the main thread. Raises SeedbedError if the run takes no hosts; TemporaryError if it has not
    begun in time, or if its coordinator is gone; KeyboardInterrupt after a second signal, which ends
    everything here.
    """
    require_linux("seedbed host", "start it on a Linux machine")
    limit_s, stop = options.give_up_after_s, stop or StopSignals()
    has = facts(options.only, options.cores)
    wishes = roles.Wishes(has, options.trusted, limit_s)
    processes = max(1, int(options.cores))
    allow = (*options.allow, ANY) if options.trusted else options.allow
    allowed = HostOptions(processes, allow=allow, give_up_after_s=limit_s)
    # Not resolved: a link may name another run later.
    run = Path(options.where).absolute()
    if actors.is_address(options.where) or (run / ELSEWHERE).exists():
        with _apart(options, run, tell) as (run, addresses):
            key = ActorKey.read(run / FOLDER / KEY)
            who = _answering(addresses, key, limit_s, tell, stop)
            if who == COORDINATOR:
                return roles.serve_apart(run, addresses, wishes, tell, stop)
            if who is None:
                return None
            return Host(key, addresses, allowed, False, tell).run(stop)
    if not await_run(run, _missing, limit_s, tell, stop):
        return None
    found = read_runtime(run)
    if not isinstance(found, str) and found[0] == "paramserver":
        return roles.serve(run, wishes, tell, stop)
    return actors.serve_run(run, allowed, tell, stop, options.key)


@contextlib.contextmanager
def _apart(
    options: Options, given: Path, tell: Callable[[str], None]
) -> Iterator[tuple[Path, Callable[[], Sequence[tuple[str, int]]]]]:
    """Yields the folder of a host that does not see the run's, and a function with the run's addresses.

    Whoever starts hosts may have made it already; else it is a temporary one.
    """
    if actors.is_address(options.where):
        address = actors.address_of(options.where, options.key)
        assert options.key is not None
        with own_folder(options.key) as run:
            yield run, lambda: [address]
    else:
        yield given, actors.Published(given / FOLDER / ADDRESS, False, tell)


def _answering(
    addresses: Callable[[], Sequence[tuple[str, int]]],
    key: ActorKey,
    limit_s: float,
    tell: Callable[[str], None],
    stop: Callable[[], bool],
) -> str | None:
    """Waits until a process of the run answers; returns its role, None if `stop` returns True first.

    Raises TemporaryError if none does in time.
    """
    context, names, told = key.context(), Names(), ""
    until_s = time.monotonic() + limit_s
    while not stop():
        try:
            reached = reach(None, addresses(), names, context, Handshake, stop)
            if reached is None:
                return None
            reached.connection.close()
            return reached.challenge.role
        except ConnectionError as error:
            why = str(error)
        if time.monotonic() > until_s:
            raise TemporaryError(
                f"nothing of the run has answered within {limit_s:g} s ({why}): check the address, or wait "
                "longer with --give-up-after"
            )
        if why != told:
            tell(f"looking for the run: {why}")
            told = why
        time.sleep(_RETRY_S)
    return None


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
