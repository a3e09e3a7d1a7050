"""SIGTERM to the processes of a run at any moment: the runs, the moments, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from machines import wait_until

from seedbed.exit_status import ExitStatus
from seedbed.run.checkpoint_helper import list_steps

HUNG_S = 20.0
"""Seconds after which whatever of a run has not ended hangs."""
_OFTEN = "--log-every-s 0.2 --checkpoint-every-s 0.5 --evaluate-every 300 --evaluate-episodes 20"
_COUNTING = (
    "counting_environment:make_slow --agent counting_agent:CountingReplayAgent --envs-per-actor 4 "
    "--agent.actions 1000 --agent.capacity 100000 --agent.min-size 20"
)
_SHARDS = "--runtime paramserver --learners 2 --parameter-shards 2 --replay-shards 2"
CENTRAL = (
    f"{_COUNTING} --actors 2 {_OFTEN}",
    f"cartpole --agent impala --actors 2 --envs-per-actor 4 {_OFTEN}",
    f"CartPole-v1 --agent dqn --actors 2 --envs-per-actor 4 {_OFTEN}",
)
"""What `seedbed train` is given for a run of central inference."""
GORILA = (
    f"{_COUNTING} {_SHARDS} {_OFTEN}",
    f"cartpole/gorila --envs-per-actor 4 {_OFTEN}",
)
"""What it is given for a run with parameter shards."""


class Moment(NamedTuple):
    """When SIGTERM comes, and to whom."""

    awaited: str  # a regular expression that the run prints first, "" for its start
    within_s: float  # it comes so many seconds later at most
    whom: str  # "all" or "one", maybe with ", twice"; if one is not the command, all follow

    @classmethod
    def draw(cls, chance: random.Random, number: int) -> Moment:
        """Draws a moment: starts, compilations, first and later cuts, and evaluations take turns."""
        awaited, within_s = (
            ("", 4.0),
            ("compiling|parameter shards", 3.0),
            ("compiling|parameter shards", 12.0),
            (r"SAVED", 0.6),
            (r"SAVED", 5.0),
            (r"evaluation at", 3.0),
        )[number % 6]
        return cls(
            awaited, within_s, chance.choice(["all", "all", "all, twice", "one", "one, twice"])
        )


class Stopped(NamedTuple):
    """How a run has ended after SIGTERM."""

    seconds: float  # from the signal on, until no process was left
    status: int  # as `subprocess` has it
    said: str
    twice: bool  # whether the command had two signals
    harmed: bool  # whether another process had one before, alone


class Trained:
    """A `seedbed train` of a run's folder. A context manager, which leaves no process of it."""

    def __init__(self, run: Path, arguments: str) -> None:
        self.run, self._log = run, run.with_name(f"{run.name}-{time.monotonic_ns()}.log")
        command = [sys.executable, "-m", "seedbed", "train", *shlex.split(arguments)]
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen(
                [*command, "--run", str(run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        self._seen = dict[int, psutil.Process]()

    def __enter__(self) -> Trained:
        return self

    def __exit__(self, *failure: object) -> None:
        for process in [*self.tree(), *left_of(self.run)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.kill()
        self.popen.wait()

    def said(self) -> str:
        """Returns what it has printed."""
        return self._log.read_text(errors="replace")

    def tree(self) -> list[psutil.Process]:
        """Returns the processes of the run that live, the command first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.popen.pid)
            self._seen |= {each.pid: each for each in [root, *root.children(recursive=True)]}
        return [each for each in self._seen.values() if _lives(each)]

    def await_moment(self, moment: Moment, chance: random.Random) -> None:
        """Waits for a moment, or until the command has ended; raises TimeoutError."""

        def come() -> bool:
            saved = moment.awaited == "SAVED" and bool(list_steps(self.run / "checkpoints"))
            return saved or self.popen.poll() is not None or bool(
                re.search(moment.awaited, self.said())
            )  # fmt: skip

        wait_until(come, moment.awaited, 120)
        time.sleep(chance.uniform(0.0, moment.within_s))
        self.tree()

    def stop(self, moment: Moment, chance: random.Random) -> Stopped:
        """Sends what the moment says, and waits for the end; raises TimeoutError if something hangs."""
        begun, twice, harmed = time.monotonic(), moment.whom.endswith("twice"), False
        if moment.whom.startswith("one"):
            victim = chance.choice(self.tree())
            harmed = victim.pid != self.popen.pid
            for _ in range(1 + twice):
                _terminate([victim])
                time.sleep(chance.uniform(0.0, 1.5))
            if harmed:
                begun, twice = time.monotonic(), False
        for _ in range(1 + twice) if harmed or moment.whom.startswith("all") else ():
            processes = self.tree()
            chance.shuffle(processes)
            _terminate(processes)
            time.sleep(chance.uniform(0.0, 1.5) if twice else 0.0)
        try:
            wait_until(
                lambda: self.popen.poll() is not None and not self.tree() and not left_of(self.run),
                "the end of the run",
                HUNG_S,
            )
        except TimeoutError as error:
            left = [" ".join(each.cmdline()) for each in [*self.tree(), *left_of(self.run)]]
            raise TimeoutError(f"{error}: {left}\n{self.said()}") from None
        return Stopped(time.monotonic() - begun, self.popen.returncode, self.said(), twice, harmed)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _terminate(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


def left_of(run: Path) -> list[psutil.Process]:
    """Returns the processes that name a run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(run) in word for word in process.info["cmdline"] or ()) and _lives(process):
            found.append(process)
    return found


def metrics(run: Path) -> list[dict[str, float]]:
    """Returns the lines of a run's metrics."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def shared_memory() -> set[str]:
    """Returns the names in /dev/shm, but for those of clocks that other drills put wrong."""
    return {path.name for path in Path("/dev/shm").iterdir() if "faketime" not in path.name}


def names_in_use(run: Path) -> Iterator[str]:
    """Lists the abstract names of a run's roles that somebody still listens at."""
    taken = Path("/proc/net/unix").read_text()
    for path in (run / "roles").glob("*/address.json"):
        name = json.loads(path.read_text())["socket"]
        if f"@{name}\n" in taken:
            yield name


def require_end(run: Path, stopped: Stopped, shared: set[str], exact: bool) -> None:
    """Asserts that a run has ended as the table of exit statuses says, and has left nothing.

    `shared` is the `shared_memory` before. `exact` says that nothing is learned between the last line of
    metrics and the checkpoint.
    """
    status, said = stopped.status, stopped.said
    assert "Traceback" not in said and "a bug" not in said, said
    if "stopped and saved" in said:
        assert status in (ExitStatus.STOPPED, *([-15] if stopped.twice else [])), said
        last, told = list_steps(run / "checkpoints")[-1], metrics(run)[-1]["env_steps"]
        assert last == told if exact else last >= told, (last, told)
    elif "there was nothing to save" in said:
        assert status == ExitStatus.STOPPED, said
    elif stopped.twice and status == ExitStatus.GIVEN_UP:
        assert "interrupted" in said, said
    else:
        # The signal came before the program had begun to handle it, or as it was ending.
        assert status == -15 and not list_steps(run / "checkpoints"), (status, said)
    assert not list(names_in_use(run))
    assert shared_memory() <= shared
    assert not list((run / "checkpoints").glob(".writing-*")) or stopped.twice


def resume(run: Path, arguments: str, more: int) -> str:
    """Goes on with a run for some steps as a scheduler does, until it is finished; returns what it says."""
    begun = (run / "config.json").exists()
    steps = (list_steps(run / "checkpoints") or [0])[-1] + more
    with Trained(run, f"{'--resume' if begun else arguments} --steps {steps}") as again:
        wait_until(lambda: again.popen.poll() is not None, "the resumed run's end", 180)
        assert again.popen.returncode == ExitStatus.FINISHED, again.said()
        assert list_steps(run / "checkpoints")[-1] >= steps
        return again.said()
