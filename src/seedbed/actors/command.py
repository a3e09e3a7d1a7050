"""The command `seedbed actor`: its options, and how it finds the learner. It imports no JAX."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from seedbed.actors.host import Host, HostOptions
from seedbed.actors.link import RunFinished
from seedbed.actors.waiting import StopSignals, await_run, read_runtime, require_limit
from seedbed.actors.waiting import declare as declare_waiting
from seedbed.exit_status import TemporaryError
from seedbed.files import load_json
from seedbed.machine import require_linux, usable_cores
from seedbed.printable import printable
from seedbed.streams.addresses import LOOPBACK, bare_host
from seedbed.streams.credentials import ADDRESS, ENDED, FOLDER, KEY, ActorKey
from seedbed.streams.supervisor import last_line
from seedbed.types import SeedbedError

DESCRIPTION = """Steps environments of this machine for a run that listens, on this machine or another one.
Waits for a run that has not begun. Ends when the run ends; until then it looks for the learner again whenever
it loses it. Needs no JAX."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to a parser."""
    parser.add_argument(
        "where", metavar="RUN_OR_ADDRESS", help="the folder of the run, or HOST:PORT with --key"
    )
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help=f"the file {FOLDER}/{KEY} of the run's folder"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="processes (default: one a usable core)",
    )
    parser.add_argument(
        "--envs",
        type=int,
        default=0,
        metavar="N",
        help="environments of each process (default: two groups of the run's size)",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module whose environments the learner may ask for, as module:factory; may be repeated",
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="the Python whose packages the environments need, if it is another one; it must have seedbed",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="plaintext, for a run with --insecure on this machine",
    )
    declare_waiting(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def serve(given: argparse.Namespace, tell: Callable[[str], None]) -> str | None:
    """Serves the learner until its run ends or a signal comes; returns how it ended, None after a signal.

    Call from the main thread. Raises SeedbedError if the options cannot be, if the learner refuses this
    actor, if its environments cannot work, or if there was no learner for longer than --give-up-after.
    """
    require_linux("seedbed actor", "start it on a Linux machine")
    if given.python is not None:
        _go_on_in(given.python)
    for name in ("processes", "envs"):
        if getattr(given, name) < 0:
            raise SeedbedError(f"--{name} is {getattr(given, name)}: it must be 0 or more")
    options = HostOptions(
        processes=given.processes or max(1, int(usable_cores())),
        envs=given.envs,
        allow=tuple(given.allow),
        give_up_after_s=require_limit(given),
    )
    stop = StopSignals()
    if not is_address(given.where):
        return serve_run(Path(given.where), options, tell, stop, given.key, given.insecure)
    address = address_of(given.where, given.key)
    _require_loopback(address[0], given.insecure)
    host = Host(ActorKey.read(given.key), lambda: [address], options, given.insecure, tell)
    tell(f"looking for the learner of {given.where}")
    return host.run(stop)


def serve_run(
    run: Path,
    options: HostOptions,
    tell: Callable[[str], None],
    stop: Callable[[], bool],
    key: Path | None = None,
    insecure: bool = False,
) -> str | None:
    """Serves the learner of a run in a folder; returns how it ended, None if `stop` returned True first."""
    if not await_run(run, _missing, options.give_up_after_s, tell, stop):
        return None
    listening = run / FOLDER
    secret = ActorKey.read(key or listening / KEY)
    published = Published(listening / ADDRESS, insecure, tell, None if key else secret)
    host = Host(secret, published, options, insecure, tell)
    tell(f"looking for the learner of {printable(run)}")
    return host.run(stop)


def _go_on_in(python: str) -> NoReturn:
    """Goes on as the same command of another Python; raises SeedbedError if that has no seedbed."""
    python = shutil.which(python) or python
    try:
        # With -P, nothing is imported from the current folder.
        probe = [python, "-P", "-c", "import seedbed.actors.command"]
        tried = subprocess.run(probe, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SeedbedError(
            f"--python {python} cannot be started ({error}): give the path of an interpreter, such as "
            "VENV/bin/python"
        ) from error
    if tried.returncode:
        raise SeedbedError(
            f"--python {python} cannot import seedbed ({last_line(tried.stderr)}): install it there with "
            f"{python} -m pip install -r requirements-actor.txt and --no-deps ."
        )
    rest, left_out = [], False
    for word in sys.argv[2:]:
        # argparse takes the beginning of an option's name, too.
        name, equals, _ = word.partition("=")
        named = name.startswith("--py") and "--python".startswith(name)
        if not (left_out or named):
            rest.append(word)
        left_out = named and not equals
    os.execv(python, [python, "-P", "-m", "seedbed", "actor", *rest])


def is_address(where: str) -> bool:
    """Returns whether a user means HOST:PORT, and not a folder."""
    return ":" in where and not Path(where).is_dir()


def address_of(where: str, key: Path | None) -> tuple[str, int]:
    """Splits HOST:PORT; raises SeedbedError if it is none, or if there is no key for it."""
    host, colon, port = where.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise SeedbedError(
            f"{where!r} is neither the folder of a run nor HOST:PORT: check the path or the address"
        )
    host = bare_host(host)
    if key is None:
        raise SeedbedError(
            f"an address needs the run's key: copy {FOLDER}/{KEY} of the run's folder, and name it with --key"
        )
    return host, int(port)


def _missing(run: Path) -> str:
    """Returns what keeps actors from joining a run that has not begun, "" if nothing does.

    Raises SeedbedError if no actor can join the run.
    """
    found = read_runtime(run)
    if isinstance(found, str):
        return found
    runtime, options = found
    if runtime == "paramserver":
        raise SeedbedError(
            f"the run {printable(run)} has --runtime paramserver, whose learners have actors of their "
            "own: no actor can "
            "join it, but machines can, with seedbed host"
        )
    if not options.get("listen"):
        raise SeedbedError(
            f"the run {printable(run)} does not listen: start it with seedbed train ... --listen HOST:PORT"
        )
    return "" if (run / FOLDER / KEY).exists() else f"it has no {FOLDER}/{KEY}"


class Published:
    """The addresses that the run's newest learner has written to its folder. For one thread."""

    def __init__(
        self,
        path: Path,
        insecure: bool,
        tell: Callable[[str], None],
        key: ActorKey | None = None,
    ) -> None:
        """`key` is the one that the folder had, if it must have the same still."""
        self._path, self._insecure, self._tell, self._key = path, insecure, tell, key
        self._known: list[tuple[str, int]] = []
        self._missed = False  # whether the user knows that the file cannot be read

    def __call__(self) -> list[tuple[str, int]]:
        """Returns them; without the file those that it had last, and none if there never was one.

        Raises SeedbedError if the streams are not what the options say, TemporaryError if another run has
        taken the place of this one, and RunFinished if the run has ended since it was there. A run that had
        ended before may be resumed.
        """
        if self._key is not None and self._key.is_replaced_in(self._path.with_name(KEY)):
            raise TemporaryError(
                f"another run is now in {printable(self._path.parent.parent)}: start this host again"
            )
        try:
            content = load_json(self._path)
            pairs = [text.rpartition(":") for text in content["addresses"]]
            found = [(host.strip("[]"), int(port)) for host, _, port in pairs]
            if not all(host and 0 < port < 1 << 16 for host, port in found):
                raise ValueError(f"{content['addresses']} are no addresses")
            plaintext, ended = bool(content["insecure"]), content.get(ENDED)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._miss(error)
            return self._known
        if ended is not None:
            if self._known:
                raise RunFinished(str(ended))
            self._tell_once(f"{ended}: waiting for its next start, with --resume")
            return []
        if plaintext != self._insecure:
            raise SeedbedError(
                "the run's streams are plaintext: add --insecure"
                if plaintext
                else "the run's streams are encrypted: leave out --insecure"
            )
        for host, _ in found:
            _require_loopback(host, self._insecure)
        self._known, self._missed = found, False
        return found

    def _miss(self, error: Exception) -> None:
        """Tells once that the folder is gone, or that the file was there and cannot be read any more."""
        gone = not self._path.parent.is_dir()
        if not (gone or self._known):
            return
        what = (
            f"{self._path.parent} is gone: it was removed, or the run ended before it had saved anything"
            if gone
            else f"{self._path} cannot be read ({error})"
        )
        where = ", ".join(f"{host}:{port}" for host, port in self._known)
        self._tell_once(
            f"{what}; still looking for its learner" + (f" at {where}" if where else "")
        )

    def _tell_once(self, text: str) -> None:
        """Tells something, unless the user knows already that there is no address to go by."""
        if not self._missed:
            self._missed = True
            self._tell(text)


def _require_loopback(host: str, insecure: bool) -> None:
    if insecure and host not in LOOPBACK:
        raise SeedbedError(f"--insecure is for a learner on this machine, not at {host}")
