"""The run of a job: its folder, its configuration before it has begun, and which start of rank 0 this is."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.flags import TrainArguments
from seedbed.exit_status import ExitStatus, TemporaryError
from seedbed.files import load_json, write_json
from seedbed.launch.as_one import learners_of
from seedbed.launch.ranks import PARENT, Rank
from seedbed.printable import printable
from seedbed.run.bucket import address_of
from seedbed.run.folder import CONFIG, RunFolder
from seedbed.streams.credentials import FOLDER
from seedbed.streams.supervisor import start_module
from seedbed.types import SeedbedError

JOB = f"{FOLDER}/job.json"
"""A file in a run's folder: the job that trains it, and how its rank 0 has ended."""
SETTLED = f"{FOLDER}/settled.json"
"""A file in a run's folder: the configuration before the run has one, for ranks that Ray starts."""


class Job(NamedTuple):
    """A start of rank 0, as it tells the other processes of the job in the run's folder."""

    start: str  # of the job; see `ranks.Rank`
    token: str  # of this start of rank 0, which no other has
    ended: str = ""  # how rank 0 has ended
    status: int = 0  # with which it has ended then
    step: int = -1  # of the run when it was queued again last
    requeues: int = 0  # in a row, without a step more

    @classmethod
    def read(cls, run: Path) -> Job | None:
        """Returns it, None if there is none."""
        try:
            return cls(**load_json(run / JOB))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, run: Path) -> None:
        """Writes it; raises SeedbedError if the folder cannot be written."""
        write_for_ranks(run, JOB, self._asdict())


def write_for_ranks(run: Path, name: str, data: dict[str, Any]) -> None:
    """Writes a file into a run's folder for the other ranks; raises SeedbedError if it cannot be written."""
    path = run / name
    try:
        # As a run makes its folder, which others must not be able to write.
        run.mkdir(0o755, parents=True, exist_ok=True)
        path.parent.mkdir(0o700, exist_ok=True)
        write_json(path, data)
    except OSError as error:
        raise SeedbedError(
            f"{printable(path)} cannot be written ({error.strerror}): name a folder that all machines see "
            "with --run"
        ) from error


def folder_of(run: Path | None, rank: Rank) -> Path:
    """Returns the folder of a job's run; raises SeedbedError if it has no name."""
    if run is not None:
        if address := address_of(run):
            raise SeedbedError(
                f"--run is {address}, and the machines of a job find one another in a folder: name one "
                "that all of them see"
            )
        return run
    if not rank.job:
        raise SeedbedError(
            "this job has no name: add --run DIR, a folder that all its machines see"
        )
    return Path("runs") / f"job-{rank.job}"


def options_for(config: TrainConfig, given: Sequence[str], processes: int) -> list[str]:
    """Returns the options with which hosts can join a run, but for those that were given.

    There are none where all processes of a job learn as one.
    """
    runtime, asked = config.runtime.runtime, flags.given(given, "--learners")
    if processes == 1 or learners_of({runtime: vars(config.runtime)}, asked) != 1:
        return []
    options = {"central": {"--listen": "0.0.0.0:0"}, "paramserver": {"--listen": "0.0.0.0"}}[
        runtime
    ]
    if runtime == "paramserver":
        options["--hosts"] = str(processes - 1)
    return [word for name, value in options.items() if name not in given for word in (name, value)]


def more_for(given: TrainArguments) -> Callable[[TrainConfig], list[str]] | None:
    """Returns what tells the options that a command adds as one process of several; None if it is alone."""
    if given.cluster is None:
        return None
    return lambda config: options_for(config, given.rest, 2)


def settled(run: Path | None) -> dict[str, Any]:
    """Returns the configuration of a run, or what this command line asks for, as JSON.

    A child settles it, as JAX must not start here, unless rank 0 has for a rank of Ray's. Raises SystemExit
    if the child refuses it.
    """
    with contextlib.suppress(OSError, ValueError):
        if run is not None:
            return dict(load_json(run / CONFIG))
    with contextlib.suppress(OSError, ValueError):
        # Others must not believe what a command has left that was killed.
        if run is not None and PARENT in os.environ:
            return dict(load_json(run / SETTLED)["config"])
    words = sys.argv[2:]
    asked = flags.split_train_arguments(words).request
    if asked.what is not None or asked.file is not None:
        # The job goes on with the run once there is one.
        words = [word for word in words if word != "--resume"]
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    child = start_module("seedbed", ["config", *words, "--json"], settings, stdout=subprocess.PIPE)
    try:
        said = child.communicate()[0]
    finally:
        child.kill()  # after a signal
    if status := child.returncode:  # it has said why, unless it was killed
        raise SystemExit(status if status > 0 else ExitStatus.TRY_AGAIN)
    return dict(json.loads(said))


def require_idle(run: Path) -> None:
    """Raises TemporaryError if another process trains into a folder."""
    if RunFolder(run).is_training():
        raise TemporaryError(
            f"another process trains into {printable(run)}: wait for it, stop it, or name another folder"
        )
