"""Waiting for a run that has not been started yet, for commands that join one. It imports no JAX."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed.exit_status import TemporaryError
from seedbed.files import load_json
from seedbed.printable import printable
from seedbed.scheduler import gives_up
from seedbed.types import SeedbedError

GIVE_UP_S = 3600.0
"""Seconds for which a command waits by default for a run or its learner."""
_CONFIG, _RUNTIMES = "config.json", ("central", "fused", "paramserver")
_LOOK_S = 0.2


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the option that limits the waiting to a command's parser."""
    parser.add_argument(
        "--give-up-after",
        type=float,
        default=GIVE_UP_S,
        metavar="SECONDS",
        help="end after so many seconds without the run (default: 3600; 0 is never)",
    )


def require_limit(given: argparse.Namespace) -> float:
    """Returns the option's value, infinity for never; raises SeedbedError if it cannot be."""
    limit_s: float = given.give_up_after
    if not limit_s >= 0:
        raise SeedbedError(f"--give-up-after is {limit_s}: it must be 0 or more seconds")
    return limit_s or float("inf")


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP for a command that joins a run. Make it in the main thread.

    The first one asks the command to stop, a second one raises KeyboardInterrupt in that thread.
    """

    def __init__(self) -> None:
        self._come = False
        self._then: list[Callable[[], None]] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # As nohup has it.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._take)

    def __call__(self) -> bool:
        """Returns whether a signal has come."""
        return self._come

    def call(self, function: Callable[[], None]) -> None:
        """Has a function called at the first signal, or now if it has come."""
        self._then.append(function)
        if self._come:
            function()

    def _take(self, number: int, frame: object) -> None:
        if self._come:
            if gives_up(number):
                raise KeyboardInterrupt("interrupted twice")
            return
        self._come = True
        for function in self._then:
            function()


def await_run(
    run: Path,
    missing: Callable[[Path], str],
    limit_s: float,
    tell: Callable[[str], None],
    stop: Callable[[], bool],
) -> bool:
    """Waits until nothing of a run is missing, and tells what is; returns False if `stop` does.

    `missing` returns what a run lacks, "" if nothing. Raises TemporaryError after `limit_s` seconds, and what
    `missing` raises.
    """
    told, until_s = "", time.monotonic() + limit_s
    while not stop():
        if not (lacks := missing(run)):
            return True
        if time.monotonic() > until_s:
            raise TemporaryError(
                f"the run {printable(run)} did not begin within {limit_s:g} s ({lacks}): check the path, "
                "or wait longer "
                "with --give-up-after"
            )
        if lacks != told:
            tell(f"waiting for the run {run.absolute()} to begin: {lacks}")
            told = lacks
        time.sleep(_LOOK_S)
    return False


def read_runtime(run: Path) -> tuple[str, dict[str, Any]] | str:
    """Returns the name and the options of a run's runtime, or in words what is missing."""
    if not run.is_dir():
        return "there is no such folder"
    try:
        config = load_json(run / _CONFIG)
        return next((name, dict(config[name])) for name in config if name in _RUNTIMES)
    except FileNotFoundError:
        return f"it has no {_CONFIG}"
    except (OSError, ValueError, TypeError, RecursionError, StopIteration) as error:
        return f"{_CONFIG} cannot be read ({error!r})"
