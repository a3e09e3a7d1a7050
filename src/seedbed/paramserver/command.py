"""The command `seedbed learner`: a learner of a run whose other roles are elsewhere. It imports no JAX."""

from __future__ import annotations

import argparse
import fcntl
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from seedbed.machine import require_linux
from seedbed.paramserver.directory import Directory, this_machine
from seedbed.paramserver.starting import DIVERGED, FATAL, FULL, EarlyDeaths, start_role
from seedbed.run.folder import ROLES
from seedbed.types import SeedbedError

DESCRIPTION = """Learns on this machine, with actors of its own, for a run that was started elsewhere with
--runtime paramserver --remote-learners N --listen ADDRESS. Both machines see the run's folder. Ends when the
run ends; a learner that dies is started again."""
_RETRY_S = 1.0
_ROOM_S = 5.0  # between two starts for which the disk has no room


def declare(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to a parser."""
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of the run")
    parser.add_argument(
        "--seat",
        type=int,
        metavar="N",
        help="its place among the run's learners, from 0 on (default: the first that is free)",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def serve(given: argparse.Namespace, tell: Callable[[str], None]) -> str:
    """Learns until the run ends or a signal comes; returns how it ended.

    Call from the main thread. Raises SeedbedError if the run takes no learners of other machines, if all its
    places are taken, or if the learner cannot work.
    """
    require_linux("seedbed learner", "start it on a Linux machine")
    run = given.run.resolve()
    seat = take_seat(run, given.seat)
    stopped: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        if child is not None:
            child.send_signal(signal.SIGKILL if len(stopped) > 1 else signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    tell(f"learner {seat.number} of {run}")
    deaths = EarlyDeaths()
    while not stopped:
        deaths.begin()
        arguments = ("--seat", str(seat.number), "--host", "")
        child = start_role(run, "seedbed.paramserver.learner", arguments, None)
        status = child.wait()
        if stopped:
            break
        if status == 0:
            return (
                "the run has ended, has been without a coordinator for a minute, or has another learner in "
                "this place"
            )
        if status == FULL:
            tell(
                f"the disk of {run} is full: make room there; it is tried again every {_ROOM_S:.0f} s"
            )
            time.sleep(_ROOM_S)
            continue
        if deaths.add() or status in (DIVERGED, FATAL):
            raise SeedbedError(f"the learner ended with status {status}: what it says is above")
        tell(f"the learner ended with status {status}; started again")
        time.sleep(_RETRY_S)
    return "stopped"


def _config(run: Path) -> dict[str, Any]:
    try:
        config = json.loads((run / ROLES / "job.json").read_text())["config"]
    except (OSError, ValueError, KeyError) as error:
        raise SeedbedError(
            f"{run} is not the folder of a run with --runtime paramserver ({error}): check the path, or "
            "start the run first"
        ) from error
    if not config["remote_learners"]:
        raise SeedbedError(
            f"the run {run} takes no learners of other machines: start it with --remote-learners N --listen "
            "ADDRESS"
        )
    return config


class Seat:
    """A learner's place in a run, which no other command takes while this process lives."""

    def __init__(self, run: Path, number: int) -> None:
        """Locks the place if no other command has; raises SeedbedError if the disk refuses."""
        self.number = number
        path = run / ROLES / f"learner-{number}" / "seat.lock"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        except OSError as error:
            raise SeedbedError(
                f"{path} cannot be written ({error.strerror}): give this user the right to write there"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.locked = True
        except BlockingIOError:
            self.locked = False

    def release(self) -> None:
        """Lets others take the place."""
        self._file.close()


def take_seat(run: Path, number: int | None) -> Seat:
    """Takes the place of this number, or if it is None, the first that no learner has.

    Without a number, it takes no place whose learner has told another machine's address, even if that machine
    is gone. Raises SeedbedError if there is no such place.
    """
    config, directory = _config(run), Directory(run)
    first, last = config["learners"] - config["remote_learners"], config["learners"] - 1
    if number is not None and not first <= number <= last:
        raise SeedbedError(
            f"seat is {number}: this run has places from {first} to {last} for learners of other machines; "
            "name one of them, or leave --seat out"
        )
    if number is not None:
        return Seat(run, number)
    for each in range(first, last + 1):
        seat, address = Seat(run, each), directory.find(f"learner-{each}")
        mine = address is not None and address.machine == this_machine()
        gone = address is None or (mine and not Path(f"/proc/{address.pid}").exists())
        if seat.locked and gone:
            return seat
        seat.release()
    raise SeedbedError(
        f"all {config['remote_learners']} places for learners of other machines are taken: name the one of a "
        "machine that is gone with --seat"
    )
