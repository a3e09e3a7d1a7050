"""A run with parameter shards on two machines (`machines.py`), and the faults that the drill makes in it.

A learner is on a machine of its own; the coordinator and all other roles are on the other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from machines import RUNS, Link, Machine, Process, World, wait_until

from seedbed.paramserver.directory import SAVE
from seedbed.paramserver.saves import ShardSave

LOCAL, REMOTE = "learner-1", "learner-0"
PARAMETERS, REPLAY = ("parameters-0", "parameters-1"), ("replay-0", "replay-1")
TRAIN = (
    "counting_environment:make_slow --agent counting_agent:CountingReplayAgent --runtime paramserver "
    "--learners 2 --hosts 1 --listen 0.0.0.0 --envs-per-actor 4 --evaluate-every 0 "
    "--log-every-s 0.25 --checkpoint-every-s 20 --agent.capacity 100000 --agent.min-size 20 "
    "--steps 1_000_000"
)
_USUAL = {"delay_s": 0.001}  # how the link is between faults
_MODULES = {
    "parameters": "seedbed.paramserver.shard",
    "replay": "seedbed.paramserver.replay_shard",
    "learner": "seedbed.paramserver.learner",
}
# A stretch that a fault lasts; shards save within ten seconds.
_SHORT_S, _SAVE_S = 3.0, 12.0


class Drill:
    """The run. For one thread."""

    def __init__(self, world: World) -> None:
        """Starts it, and waits until both learners learn."""
        self.world, self.run = world, world.runs / "run"
        self.here, self.there = Machine(world, "shards"), Machine(world, "learner")
        self.link = Link(world, self.here, self.there, 1)
        self.link.set(**_USUAL)
        self.train = self.coordinate()
        self.learner = self.there.seedbed("host", "host", f"{RUNS}/run")
        self.recovered(120)

    def coordinate(self, resume: bool = False) -> Process:
        """Starts a coordinator: the first, or the next one."""
        arguments = ["--resume"] if resume else TRAIN.split()
        return self.here.seedbed("train", "train", *arguments, "--run", f"{RUNS}/run")

    def lines(self) -> list[dict[str, Any]]:
        """Returns the metrics so far."""
        path = self.run / "metrics.jsonl"
        if not path.exists():
            return []
        # The last line may be half written.
        return [json.loads(line) for line in path.read_text().splitlines(True) if line[-1] == "\n"]

    def recovered(self, seconds: float) -> float:
        """Waits until both learners step and the parameters change; returns how long that took.

        Raises TimeoutError after `seconds`, RuntimeError if a command has ended.
        """
        seen = len(self.lines())

        def moves() -> bool:
            for process in (self.train, self.learner):
                if process.code() is not None:
                    raise RuntimeError(process.said())
            lines = self.lines()[seen:]
            pairs = list(itertools.pairwise(lines))
            names = ("learner_steps", f"cluster/steps/{LOCAL}", f"cluster/steps/{REMOTE}")
            return all(any(_grows(name, *pair) for pair in pairs) for name in names)

        return wait_until(moves, "both learners", seconds)

    def role(self, name: str) -> psutil.Process:
        """Returns the process of a role; raises LookupError if there is none."""
        kind, _, number = name.partition("-")
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command = process.cmdline()
                if _MODULES[kind] in command and f"--number {number} " in " ".join(command):
                    return process
        raise LookupError(f"no process of {name}")

    def start_of(self, name: str) -> int:
        """Returns the number of a role's newest start that has told where it is."""
        return json.loads((self.run / "roles" / name / "address.json").read_text())["number"]

    def fill(self) -> Path:
        """Fills the disk of the run's folder; returns the file to remove."""
        path = self.world.runs / "filler"
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while file.write(b"\0" * 65_536):
                pass
        return path


def _grows(name: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    return (after.get(name) or 0) > (before.get(name) or 0) > 0


class Fault(NamedTuple):
    """What is done to a run."""

    name: str
    make: Callable[[Drill], None]  # returns at the fault's end
    victim: str = ""  # the role that is started again
    within_s: float = 0.0  # seconds in which it must be back

    @property
    def loses(self) -> str:
        """The replay shard that loses items; "" if none does."""
        return self.victim if self.victim in REPLAY else ""


def _kill(name: str) -> Callable[[Drill], None]:
    return lambda drill: drill.role(name).kill()


def _kill_actor(drill: Drill) -> None:
    drill.role(LOCAL).children()[0].kill()


def _kill_coordinator(drill: Drill) -> None:
    drill.train.kill()
    time.sleep(_SHORT_S)
    drill.train = drill.coordinate(resume=True)


def _stop(name: str) -> Callable[[Drill], None]:
    def make(drill: Drill) -> None:
        process = drill.role(name)
        process.suspend()
        time.sleep(_SHORT_S)
        process.resume()

    return make


def _link(seconds: float, **conditions: float) -> Callable[[Drill], None]:
    def make(drill: Drill) -> None:
        drill.link.set(**conditions)
        time.sleep(seconds)
        drill.link.set(**_USUAL)

    return make


def _full_disk(drill: Drill) -> None:
    filler = drill.fill()
    time.sleep(_SAVE_S)
    filler.unlink()


_SHARD_S, _LEARNER_S = 5.0, 15.0
FAULTS = [
    *(Fault(f"{name} is killed", _kill(name), name, _SHARD_S) for name in PARAMETERS + REPLAY),
    Fault("a learner is killed", _kill(LOCAL), LOCAL, _LEARNER_S),
    Fault("a learner elsewhere is killed", _kill(REMOTE), REMOTE, _LEARNER_S),
    Fault("an actor is killed", _kill_actor),
    Fault("the coordinator is killed", _kill_coordinator),
    *(Fault(f"{name} stops", _stop(name)) for name in (PARAMETERS[0], REPLAY[1], LOCAL, REMOTE)),
    Fault("the link is cut", _link(_SHORT_S, cut=True)),
    Fault("the link loses 5 %", _link(_SHORT_S, delay_s=0.005, loss=0.05)),
    Fault("the link repeats and reorders", _link(_SHORT_S, duplicate=0.3, jitter_s=0.02)),
    Fault("old connections hang", _link(8.0, keep=True)),
    Fault("the disk is full", _full_disk),
]


def require_books(run: Path) -> dict[str, int]:
    """Asserts that both shards have had the same pushes, and have applied as many as they say."""
    found = [ShardSave.read(run / "roles" / name / SAVE) for name in PARAMETERS]
    books = [save.books["pushes"]["books"] for save in found]
    ends = [{learner: sum(counts) for learner, counts in each.items()} for each in books]
    assert ends[0] == ends[1]
    for save, each in zip(found, books, strict=True):
        applied = sum(counts[0] for counts in each.values())
        updates = [int(leaf) for leaf in save.leaves if leaf.dtype == np.int32 and not leaf.shape]
        assert save.books["pushes"]["number"] == applied and set(updates) == {applied}
    return {
        "pushes": sum(ends[0].values()),
        **{name: sum(counts[i] for each in books for counts in each.values())
           for i, name in enumerate(("applied", "discarded", "rolled_back"))},
    }  # fmt: skip
