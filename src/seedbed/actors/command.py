"""The command `seedbed actor`: its options, and how it finds the learner. It imports no JAX."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from seedbed.actors.credentials import ADDRESS, FOLDER, KEY, ActorKey
from seedbed.actors.host import Host, HostOptions
from seedbed.machine import require_linux, usable_cores
from seedbed.types import SeedbedError

DESCRIPTION = """Steps environments of this machine for a run that listens, on this machine or another one.
Ends when the run ends; until then it looks for the learner again whenever it loses it. Needs no JAX."""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
        "--insecure",
        action="store_true",
        help="plaintext, for a run with --insecure on this machine",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def serve(given: argparse.Namespace, tell: Callable[[str], None]) -> str:
    """Serves the learner until its run ends or a signal comes; returns how it ended.

    Call from the main thread. Raises SeedbedError if the options cannot be, if the learner refuses this
    actor, or if its environments cannot work.
    """
    require_linux("seedbed actor", "start it on a Linux machine")
    for name in ("processes", "envs"):
        if getattr(given, name) < 0:
            raise SeedbedError(f"--{name} is {getattr(given, name)}: it must be 0 or more")
    key, addresses = _find(given, tell)
    options = HostOptions(
        processes=given.processes or max(1, int(usable_cores())),
        envs=given.envs,
        allow=tuple(given.allow),
    )
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if stopped:
            raise KeyboardInterrupt("interrupted twice")
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    host = Host(key, addresses, options, given.insecure, tell)
    tell(f"looking for the learner of {given.where}")
    return host.run(lambda: bool(stopped))


def _find(
    given: argparse.Namespace, tell: Callable[[str], None]
) -> tuple[ActorKey, Callable[[], Sequence[tuple[str, int]]]]:
    """Returns the key, and a function that returns where the learner may be."""
    folder = Path(given.where)
    if folder.is_dir():
        listening = folder / FOLDER
        if not listening.is_dir():
            raise SeedbedError(
                f"the run {folder} does not listen: start it with seedbed train ... --listen HOST:PORT"
            )
        key = ActorKey.read(given.key or listening / KEY)
        return key, _Published(listening / ADDRESS, given.insecure, tell)
    host, colon, port = given.where.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 1 << 16):
        raise SeedbedError(
            f"{given.where!r} is neither the folder of a run nor HOST:PORT: check the path or the address"
        )
    if given.key is None:
        raise SeedbedError(
            f"an address needs the run's key: copy {FOLDER}/{KEY} of the run's folder, and name it with --key"
        )
    address = (host.removeprefix("[").removesuffix("]"), int(port))
    _require_loopback(address[0], given.insecure)
    return ActorKey.read(given.key), lambda: [address]


class _Published:
    """The addresses that the run's newest learner has written to its folder. For one thread."""

    def __init__(self, path: Path, insecure: bool, tell: Callable[[str], None]) -> None:
        self._path, self._insecure, self._tell = path, insecure, tell
        self._known: list[tuple[str, int]] = []
        self._missed = False  # whether the user knows that the file cannot be read

    def __call__(self) -> list[tuple[str, int]]:
        """Returns them; without the file those that it had last, and none if there never was one.

        Raises SeedbedError if the streams are not what the options say.
        """
        try:
            content = json.loads(self._path.read_text())
            pairs = [text.rpartition(":") for text in content["addresses"]]
            found = [(host.strip("[]"), int(port)) for host, _, port in pairs]
            if not all(host and 0 < port < 1 << 16 for host, port in found):
                raise ValueError(f"{content['addresses']} are no addresses")
            plaintext = bool(content["insecure"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._miss(error)
            return self._known
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
        if self._missed or not (gone or self._known):
            return
        self._missed = True
        what = (
            f"{self._path.parent} is gone: it was removed, or the run ended before it had saved anything"
            if gone
            else f"{self._path} cannot be read ({error})"
        )
        where = ", ".join(f"{host}:{port}" for host, port in self._known)
        self._tell(f"{what}; still looking for its learner" + (f" at {where}" if where else ""))


def _require_loopback(host: str, insecure: bool) -> None:
    if insecure and host not in _LOOPBACK:
        raise SeedbedError(f"--insecure is for a learner on this machine, not at {host}")
