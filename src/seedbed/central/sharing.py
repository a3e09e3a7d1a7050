"""Batches of which each process of a learner has a part: all begin an update at once, as the leader says."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from seedbed.central.experience import SavedSource
from seedbed.run.group import Command, Group
from seedbed.run.stacking import FrameTrajectory
from seedbed.types import Tree

# Seconds for the others to save what belongs to a checkpoint.
_SAVED_S = 600.0
# Seconds between two counts of the others' transitions.
_COUNT_S = 1.0
# Seconds for which a process that is ready waits for the leader's command at once.
_COMMAND_S = 1.0


class _SharedSource:
    """What both kinds of process do with their own source: a `SavedSource` but for `take`, `over` and saving.

    `adds` says whether the transitions of all processes are counted together, as those of replays are. Those
    of unrolls count when they are learned from, which all do at once.
    """

    def __init__(
        self, own: SavedSource, group: Group, adds: bool, steps: int, env_steps: int
    ) -> None:
        """Takes the source of this process's part of batches, and counts of the whole run."""
        self.steps = steps
        self._own, self._group, self._adds = own, group, adds
        self._parts: list[FrameTrajectory] = []  # of the next update
        self._saves = 0

    @property
    def loops(self) -> dict[str, Callable[[threading.Event], None]]:
        """The loops of the own source."""
        return self._own.loops

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Reports that the whole batch has been learned from; `priorities` are those of the own part."""
        self._own.learned(transitions, metrics, priorities)

    def restore(self, step: int) -> str:
        """Loads what this process has saved with the checkpoint of `step`; returns a message, or ""."""
        return self._own.restore(step)

    def metrics(self) -> dict[str, Any]:
        """Returns figures of the own source. Any thread may call this."""
        return self._own.metrics()

    def seconds(self) -> dict[str, float]:
        """Returns seconds of the own source, by name. Any thread may call this."""
        return self._own.seconds()

    def take_notices(self) -> list[str]:
        """Returns messages of the own source, each once. One thread at a time may call this."""
        return self._own.take_notices()

    def close(self) -> None:
        """Wakes every thread that waits for the own source. Any thread may call this."""
        self._own.close()


class LeadingSource(_SharedSource):
    """The source of the process that leads: an update begins when all processes have their parts of it."""

    def __init__(
        self, own: SavedSource, group: Group, adds: bool, steps: int, env_steps: int
    ) -> None:
        super().__init__(own, group, adds, steps, env_steps)
        self._others = env_steps - own.env_steps  # transitions of the others, beyond the own ones
        self._told: int | None = None  # `env_steps` of the update under way
        self._counted_s = -math.inf

    @property
    def env_steps(self) -> int:
        """Transitions of the whole run that count so far, as the others have last told.

        While a batch is learned from, it is the number that all schedules follow. Any thread may read it.
        """
        return self._own.env_steps + self._others if self._told is None else self._told

    @property
    def over(self) -> bool:
        """Whether the run has its steps, or no more batches come. Any thread may read it."""
        return self._own.over or self.env_steps >= self.steps

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        """Waits at most so long for a batch; returns this process's part of it, or [] if there is none.

        The others take theirs, too. Call from the learner thread only. Raises PeerLost if another process is
        gone, or is to leave.
        """
        self._group.require_all()
        if time.monotonic() > self._counted_s + _COUNT_S:
            self._count()
        self._parts = self._parts or self._own.take(timeout_s)
        if self.over or not (self._parts and self._group.are_ready()):
            return []
        self._told = self.env_steps
        self._group.command(Command("step", self._told))
        parts, self._parts = self._parts, []
        return parts

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Reports that the whole batch has been learned from; `priorities` are those of the own part."""
        super().learned(transitions, metrics, priorities)
        self._told = None

    def _count(self) -> None:
        self._counted_s = time.monotonic()
        if self._adds:
            self._others = sum(self._group.counts()) or self._others

    def mark(self, step: int | None = None) -> int:
        """Notes what `save` is to write for a checkpoint of `env_steps` steps, here and in the others.

        Returns the step. Any thread may call this while no update is under way.
        """
        self._count()
        step = self._own.mark(self.env_steps if step is None else step)
        self._group.command(Command("mark", step))
        return step

    def save(self, step: int, settle: Callable[[], None]) -> None:
        """Saves what a checkpoint of `step` needs, here and in the others, and waits for them.

        It does not wait once a process is known to be gone, or to have failed. Raises PeerLost if one is
        gone, and SeedbedError if one has failed.
        """
        settle()
        self._group.command(Command("save", step))
        self._own.save(step, lambda: None)
        self._saves += 1
        if not self._group.lacks:
            # After a signal, this is the checkpoint that it asks for.
            self._group.meet(f"saved-{self._saves}", _SAVED_S, looks=False)


class FollowingSource(_SharedSource):
    """The source of a process that follows: it has its part of the next batch ready, and obeys the leader."""

    def __init__(
        self, own: SavedSource, group: Group, adds: bool, steps: int, env_steps: int
    ) -> None:
        super().__init__(own, group, adds, steps, env_steps)
        self.env_steps = env_steps  # at the last update
        self._ended, self._told, self._counted_s = threading.Event(), False, -math.inf
        self._failures: list[BaseException] = []  # of a save

    @property
    def over(self) -> bool:
        """Whether the leader has ended the run. Any thread may read it."""
        return self._ended.is_set()

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        """Waits at most so long for the leader's command to update; returns this process's part of the batch.

        Returns [] if there is none, and obeys other commands. Call from the learner thread only. Raises
        PeerLost if the leader is gone, and the failure of a save.
        """
        if self._failures:
            raise self._failures[0]
        if time.monotonic() > self._counted_s + _COUNT_S:
            self._counted_s = time.monotonic()
            self._group.count(self._own.env_steps)
        if not self._told:
            self._parts = self._own.take(timeout_s)
            if self._parts:
                self._group.report()
                self._told = True
        # Without steps to come, as while the leader evaluates at the end, only the leader has news.
        waits = self._told or self._own.over
        command = self._group.next_command(_COMMAND_S if waits else 0.0)
        if command is None:
            return []
        if command.what == "end":
            self._ended.set()
        elif command.what == "mark":
            self._own.mark(command.env_steps)
        elif command.what == "save":
            # The next update does not wait for it.
            self._saves += 1
            saving = threading.Thread(target=self._save, args=(command.env_steps, self._saves))
            saving.start()
        else:
            self.env_steps, self._told = command.env_steps, False
            parts, self._parts = self._parts, []
            return parts
        return []

    def _save(self, step: int, number: int) -> None:
        try:
            self._own.save(step, lambda: None)
        except BaseException as failure:
            self._failures.append(failure)
        finally:
            self._group.arrive(f"saved-{number}")

    def mark(self, step: int | None = None) -> int:
        """Returns the step: the leader says when to note something."""
        return self.env_steps if step is None else step

    def save(self, step: int, settle: Callable[[], None]) -> None:
        """Does nothing: the leader says when to save."""
