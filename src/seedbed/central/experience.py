"""The contract between acting and learning: steps go into a sink, and batches come out of a source."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from seedbed.central.inference import ActOutput
from seedbed.ops.keys import derived_seed
from seedbed.printable import printable
from seedbed.run.folder import RunFolder
from seedbed.run.group import Group
from seedbed.run.measures import Stopwatch
from seedbed.run.options import CentralConfig
from seedbed.run.stacking import FrameTrajectory
from seedbed.types import Agent, OnPolicy, Replay, StorageError, Timestep, Tree


class Place(NamedTuple):
    """A process's place among those that train as one learner, each with actors and experience of its own."""

    number: int = 0
    of: int = 1
    rank: int = 0  # of the job, which stays when another process is lost

    @classmethod
    def here(cls) -> Place:
        """Returns that of this process."""
        member = None if Group.joined is None else Group.joined.member
        return cls() if member is None else cls(member.number, member.of, member.rank)

    def part(self, count: int) -> int:
        """Returns this process's part of a count; the parts of all add up to it."""
        return count // self.of + (self.number < count % self.of)

    def seed(self, seed: int) -> int:
        """Returns a seed that no other process has; that of the first is `seed`."""
        return derived_seed(seed, self.rank) if self.rank else seed


class Share(NamedTuple):
    """A process's part of a run's experience, and the folder that keeps it."""

    experience: OnPolicy | Replay  # its part of the agent's
    env_steps: int  # transitions that count already
    steps: int  # transitions for which it trains
    seed: int
    replay: Path | None  # the folder of the replay, None if that is not saved
    checkpoints: Path

    @classmethod
    def of(cls, agent: Agent, config: CentralConfig, run: RunFolder, env_steps: int) -> Share:
        """Returns this process's share in a run of which `env_steps` transitions count already.

        Transitions of unrolls count when all have learned from them, and those of a replay are its own.
        """
        whole, learners, place = agent.experience, config.learners, Place.here()
        batch = whole.batch // place.of
        if isinstance(whole, OnPolicy):
            part = dataclasses.replace(whole, batch=batch)
            return cls(part, env_steps, config.steps, config.seed, None, run.checkpoints)
        # Their sizes stay as they are when a process is lost, so that the others keep theirs.
        sizes = {name: -(-getattr(whole, name) // learners) for name in ("capacity", "min_size")}
        folder = run.replay if learners == 1 else run.replay / f"{place.rank}-of-{learners}"
        return cls(
            dataclasses.replace(whole, batch=batch, **sizes),
            place.part(env_steps),
            # The leader says when all have their steps together.
            config.steps if Group.joined is None else sys.maxsize,
            place.seed(config.seed),
            folder if config.save_replay else None,
            run.checkpoints,
        )


def forget_others(replay: Path, learners: int) -> None:
    """Removes what a run with another number of learners has kept in its folder for replays: it fits none."""
    try:
        for entry in replay.iterdir() if replay.is_dir() else ():
            shared = re.fullmatch(r"\d+-of-(\d+)", entry.name)
            if (int(shared[1]) if shared else 1) != learners:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    except OSError as error:
        raise StorageError(
            f"{printable(replay)} cannot be cleared ({error.strerror}): remove what is of another number of "
            "learners there"
        ) from error


class Sink(Protocol):
    """The place where steps go. One thread, the inference thread, calls it.

    A group is known by its number in the pool. A group has a new life when its timesteps start anew, as
    they do when its actor was restarted.
    """

    waited: Stopwatch  # runs while `add` or `flush` waits for the learner

    @property
    def done(self) -> bool:
        """Whether no more steps are wanted."""
        ...

    def arrive(self, group: int, life: int, timestep: Timestep) -> bool:
        """Takes notice of a group's next timestep, numpy `[n, ...]`, before it is acted on; does not wait.

        Returns whether the group may be acted on now; otherwise it has to wait for newer parameters. The
        arrays may change afterwards. Call from the inference thread only.
        """
        ...

    def add(
        self, groups: Sequence[int], lives: Sequence[int], timestep: Timestep, output: ActOutput
    ) -> None:
        """Adds the steps of one call of inference; may wait for the learner.

        Row i of `timestep` (numpy) and of `output`, leaves `[k, n, ...]`, belongs to `groups[i]` in its life
        `lives[i]`; rows after those are padding. The arrays may change afterwards. Call from the inference
        thread only.
        """
        ...

    def flush(self) -> None:
        """Hands on what is complete; may wait for the learner. Call from the inference thread only."""
        ...

    def renew(self, groups: Sequence[int]) -> None:
        """Lets groups act again: they have newer parameters. Call from the inference thread only."""
        ...

    def finish(self) -> None:
        """Ends acting: nothing is added afterwards. Call from the inference thread only."""
        ...


class Source(Protocol):
    """The place where batches come from."""

    steps: int  # transitions for which the run trains

    @property
    def env_steps(self) -> int:
        """Transitions of the whole run that count so far. Any thread may read it."""
        ...

    @property
    def over(self) -> bool:
        """Whether no more batches come. Any thread may read it."""
        ...

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        """Waits at most so long for a batch, and returns its parts, which are to be joined along B.

        Returns [] if there is none. The arrays are valid until `learned`. Call from the learner thread only.
        """
        ...

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Reports that the batch taken last has been learned from, with its transitions and metrics.

        `priorities` are the new ones of its items `[B]`, or () if there are none. Call from the learner
        thread only.
        """
        ...

    def close(self) -> None:
        """Wakes every thread that waits; nothing passes afterwards. Any thread may call this."""
        ...


class SavedSource(Source, Protocol):
    """A source of this process, which a session saves and reports."""

    @property
    def loops(self) -> dict[str, Callable[[threading.Event], None]]:
        """Functions that must run in threads of their own, by the threads' names, until an event is set."""
        ...

    def mark(self, step: int | None = None) -> int:
        """Notes what `save` is to write for a checkpoint of `step` steps; by default of `env_steps`.

        Returns the step. A call undoes the one before, unless `save` has followed it. Any thread may call
        this.
        """
        ...

    def save(self, step: int, settle: Callable[[], None]) -> None:
        """Saves what a checkpoint of `step` needs besides the learner state, as it was at its `mark`.

        `settle` waits until the checkpoint before is written or has failed. Failures of the disk become
        notices. Raises SeedbedError for another failure. Any thread may call this.
        """
        ...

    def restore(self, step: int) -> str:
        """Loads what was saved with the checkpoint of `step`; returns a message for the user, or "".

        Raises SeedbedError if that does not fit. Call before other threads use the source.
        """
        ...

    def metrics(self) -> dict[str, Any]:
        """Returns figures for a line of metrics. Any thread may call this."""
        ...

    def seconds(self) -> dict[str, float]:
        """Returns seconds since the start, by name; reports show their shares. Any thread may call this."""
        ...

    def take_notices(self) -> list[str]:
        """Returns messages for the user, each once. One thread at a time may call this."""
        ...
