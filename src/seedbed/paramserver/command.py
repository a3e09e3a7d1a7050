"""The command `seedbed learner`: a learner of a run whose other roles are elsewhere. It imports no JAX."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from seedbed.actors.child import same_modules
from seedbed.paramserver.directory import Directory, this_machine
from seedbed.run import memory
from seedbed.run.folder import ROLES
from seedbed.types import SeedbedError

DESCRIPTION = """Learns on this machine, with actors of its own, for a run that was started elsewhere with
--runtime paramserver --remote-learners N --listen ADDRESS. Both machines see the run's folder. Ends when the
run ends; a learner that dies is started again."""
_FATAL = 3  # as in `role.FATAL`, which this command does not import: it would load JAX
_MAX_DEATHS, _EARLY_S, _RETRY_S = 5, 30.0, 1.0


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
    run = given.run.resolve()
    seat = _free_seat(run) if given.seat is None else _checked(run, given.seat)
    stopped: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        if child is not None:
            child.send_signal(signal.SIGKILL if len(stopped) > 1 else signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    tell(f"learner {seat} of {run}")
    deaths = 0
    while not stopped:
        begun_s = time.monotonic()
        child = _start(run, seat)
        status = child.wait()
        if stopped:
            break
        if status == 0:
            return "the run has ended, or has been without a coordinator for a minute"
        deaths = deaths + 1 if time.monotonic() < begun_s + _EARLY_S else 1
        if status == _FATAL or deaths >= _MAX_DEATHS:
            raise SeedbedError(f"the learner ended with status {status}: what it says is above")
        tell(f"the learner ended with status {status}; started again")
        time.sleep(_RETRY_S)
    return "stopped"


def _start(run: Path, seat: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", "seedbed.paramserver.learner"]
    settings = {memory.NAME: memory.settings(os.cpu_count() or 1)}
    return subprocess.Popen(
        [*command, "--run", str(run), "--seat", str(seat), "--host", ""],
        env={**settings, **os.environ, **same_modules()},
        stdin=subprocess.DEVNULL,
        # What the terminal sends is for this process, which passes it on.
        start_new_session=True,
    )


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


def _checked(run: Path, seat: int) -> int:
    config = _config(run)
    first, last = config["learners"] - config["remote_learners"], config["learners"] - 1
    if not first <= seat <= last:
        raise SeedbedError(
            f"seat is {seat}: this run has places from {first} to {last} for learners of other machines"
        )
    return seat


def _free_seat(run: Path) -> int:
    """Returns the first place that nobody has taken, or that was this machine's and is free again."""
    config, directory = _config(run), Directory(run)
    for seat in range(config["learners"] - config["remote_learners"], config["learners"]):
        address = directory.find(f"learner-{seat}")
        mine = address is not None and address.machine == this_machine()
        if address is None or (mine and not Path(f"/proc/{address.pid}").exists()):
            return seat
    raise SeedbedError(
        f"all {config['remote_learners']} places for learners of other machines are taken: name the one of a "
        "machine that is gone with --seat"
    )
