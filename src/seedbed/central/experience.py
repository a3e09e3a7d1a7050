"""The contract between acting and learning: steps go into a sink, and batches come out of a source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from seedbed.central.inference import ActOutput
from seedbed.run.measures import Stopwatch
from seedbed.run.stacking import FrameTrajectory
from seedbed.types import Timestep, Tree


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

    def mark(self) -> int:
        """Returns `env_steps`, and notes what `save` is to write for a checkpoint of that many steps.

        A call undoes the one before, unless `save` has followed it. Any thread may call this.
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
