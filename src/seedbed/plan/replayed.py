"""The model of replay in the learner's process, which follows `central/replaying.py`."""

from __future__ import annotations

from collections.abc import Sequence

from seedbed.plan.acting import Group, Sizes
from seedbed.plan.costs import ActingCosts
from seedbed.plan.engine import Process, Signal, Simulation, Worker
from seedbed.replay.host.layout import CHUNK
from seedbed.replay.limiter import SLACK_BATCHES
from seedbed.types import Replay

AHEAD = 2
"""Batches that are drawn ahead, that of the learner among them."""


class Balance:
    """The ratio of drawing to adding, of one learner or of all; as `replay.limiter.RatioLimiter`."""

    def __init__(self, simulation: Simulation, experience: Replay, learners: int = 1) -> None:
        """Replay holds `min_size` items already."""
        self._experience, self._owed = experience, 0.0
        self._slack = SLACK_BATCHES * experience.batch * learners
        # Given when a batch may be drawn, to one that waits, and when acting may go on, to all.
        self.drawable, self.addable = Signal(simulation), Signal(simulation)

    def added(self, steps: float) -> None:
        """Counts the items that so many steps begin."""
        self._owed += steps / self._experience.period * self._experience.ratio
        self._offer()

    @property
    def may_add(self) -> bool:
        """Whether acting may go on."""
        return self._owed < self._slack

    def draw(self) -> bool:
        """Takes a batch of draws, if so many are owed; returns whether they were."""
        if self._owed < self._experience.batch:
            return False
        full = not self.may_add
        self._owed -= self._experience.batch
        if full and self.may_add:
            self.addable.give()
        self._offer()
        return True

    def _offer(self) -> None:
        if self._owed >= self._experience.batch:
            self.drawable.give(1)


class Replayed:
    """Replay in the learner's process, with the thread that seals and draws ahead; a `Source`."""

    def __init__(
        self, simulation: Simulation, sizes: Sizes, costs: ActingCosts, thread: Worker
    ) -> None:
        experience = sizes.experience
        assert isinstance(experience, Replay)
        self.steps = 0.0
        self._size, self._costs, self._thread = sizes.group_size, costs, thread
        self._balance = Balance(simulation, experience)
        self._unsealed = self._ready = 0
        self._free = AHEAD
        self._drawn = Signal(simulation)
        simulation.start(self._attend())

    def arrive(self, group: Group) -> bool:
        """Returns True: acting never waits for newer parameters."""
        return True

    def add(self, groups: Sequence[Group], version: int) -> Process:
        """Appends; waits for the learner to catch up."""
        for group in groups:
            while not self._balance.may_add:
                yield self._balance.addable.wait
            self.steps += self._size
            group.row += 1
            if group.row == CHUNK:
                # Rows become items all at once.
                group.row, self._unsealed = 0, self._unsealed + CHUNK
                self._balance.drawable.give()

    def flush(self) -> Process:
        """Passes on nothing: `add` has appended every step."""
        yield from ()

    def _attend(self) -> Process:
        """Seals and draws, as the replay thread does."""
        while True:
            worked = False
            if self._unsealed:
                count, self._unsealed = self._unsealed, 0
                yield self._thread.do(self._costs.seal.times(count))
                self._balance.added(count * self._size)
                worked = True
            if self._free and self._balance.draw():
                self._free -= 1
                yield self._thread.do(self._costs.draw)
                self._ready += 1
                self._drawn.give()
                worked = True
            if not worked:
                yield self._balance.drawable.wait

    def take(self) -> Process:
        """Waits for a batch."""
        while not self._ready:
            yield self._drawn.wait
        self._ready -= 1
        return None

    def learned(self) -> None:
        """Gives the buffers back."""
        self._free += 1
        self._balance.drawable.give()
