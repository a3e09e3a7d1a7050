"""The command `seedbed learner`: a learner of a run whose other roles are elsewhere. It imports no JAX."""

from __future__ import annotations

import argparse
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from seedbed.actors.waiting import await_run, read_runtime, require_limit
from seedbed.actors.waiting import declare as declare_waiting
from seedbed.exit_status import ExitStatus, TemporaryError
from seedbed.files import load_json
from seedbed.machine import require_linux
from seedbed.paramserver.launching import start_role
from seedbed.paramserver.seats import BEAT_S, Seat, take_seat
from seedbed.printable import printable, resume_command
from seedbed.run.folder import ROLES
from seedbed.run.trust import declare as declare_trust
from seedbed.streams.supervisor import Supervisor, exit_text
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
    declare_trust(parser)
    declare_waiting(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def serve(given: argparse.Namespace, tell: Callable[[str], None]) -> str | None:
    """Learns until the run ends or a signal comes; returns how it ended, None after a signal.

    Call from the main thread. Raises SeedbedError if the run takes no learners of other machines, or if the
    learner cannot work; TemporaryError if all places of the run are taken, if the run has not begun after
    --give-up-after, or if nobody coordinates it any more; KeyboardInterrupt after a second signal, which
    kills the learner.
    """
    require_linux("seedbed learner", "start it on a Linux machine")
    run, limit_s = given.run.resolve(), require_limit(given)
    stopped: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        if child is not None:
            child.send_signal(signal.SIGKILL if len(stopped) > 1 else signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    if not await_run(run, _missing, limit_s, tell, lambda: bool(stopped)):
        return None
    seat = take_seat(run, _places(run), given.seat, tell, lambda: bool(stopped))
    if seat is None:
        return None
    tell(f"learner {seat.number} of {printable(run)}")
    # What the learner says is on the terminal, above.
    supervisor = Supervisor("the learner")
    trusted = ("--trust-run",) if given.trust_run else ()
    while not stopped:
        supervisor.begin()
        arguments = ("--seat", str(seat.number), "--host", "", *trusted)
        child = start_role(run, "seedbed.paramserver.learner", arguments, None)
        status = _outlive(child, seat)
        if stopped:
            break
        if status == ExitStatus.FINISHED:
            return "the run has ended, or has another learner in this place"
        if status == ExitStatus.ALONE:
            raise TemporaryError(
                f"nobody has coordinated the run {printable(run)} for a minute: start this learner again "
                "when the run "
                f"goes on where it was started, with: {resume_command(run)}"
            )
        if status == ExitStatus.NO_ROOM:
            tell(
                f"the disk of {printable(run)} is full: make room there; it is tried again every "
                f"{_ROOM_S:.0f} s"
            )
            time.sleep(_ROOM_S)
            continue
        if status in (ExitStatus.DIVERGED, ExitStatus.REFUSED):
            raise SeedbedError(f"the learner ended with status {status}: what it says is above")
        tell(supervisor.end(exit_text(status)))
        time.sleep(_RETRY_S)
    if len(stopped) > 1:
        raise KeyboardInterrupt("interrupted twice")
    return None


def _outlive(child: subprocess.Popen[bytes], seat: Seat) -> int:
    """Waits for the end of a learner, and keeps its place meanwhile; returns its exit status."""
    while True:
        seat.beat()
        try:
            return child.wait(BEAT_S)
        except subprocess.TimeoutExpired:
            continue


def _missing(run: Path) -> str:
    """Returns what keeps learners from joining a run that has not begun, "" if nothing does.

    Raises SeedbedError if the run takes no learners of other machines.
    """
    found = read_runtime(run)
    if isinstance(found, str):
        return found
    runtime, options = found
    if runtime != "paramserver":
        raise SeedbedError(
            f"the run {printable(run)} has --runtime {runtime}, which has one learner: check the path, "
            "or start it with "
            "--runtime paramserver"
        )
    if not options.get("remote_learners"):
        raise SeedbedError(
            f"the run {printable(run)} takes no learners of other machines: start it with "
            "--remote-learners N --listen "
            "ADDRESS"
        )
    return "" if _job(run).is_file() else "its coordinator has not divided it yet"


def _job(run: Path) -> Path:
    return run / ROLES / "job.json"


def _places(run: Path) -> range:
    """Returns the places of a run for learners of other machines."""
    try:
        config = load_json(_job(run))["config"]
        return range(config["learners"] - config["remote_learners"], config["learners"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SeedbedError(f"{_job(run)} cannot be read ({error}): start the run again") from error
