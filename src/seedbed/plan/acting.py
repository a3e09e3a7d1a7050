"""The model of a learner by central inference: actors, the inference thread, experience, the learner thread.

It follows `central/acting.py`, `central/unrolls.py`, `central/replaying.py` and `central/learning.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from seedbed.central.inference import batch_sizes
from seedbed.plan.costs import ActingCosts, StreamCosts
from seedbed.plan.engine import (
    Cost,
    Device,
    Fellows,
    Machine,
    Process,
    Request,
    Resume,
    Signal,
    Simulation,
    Worker,
)
from seedbed.types import OnPolicy, Replay

JITTER = 0.1
"""The share by which steps and updates take less or more, so that processes do not march in step."""


class Sizes(NamedTuple):
    """The sizes of a learner."""

    group_size: int
    experience: OnPolicy | Replay
    updates: int  # of a batch
    pads: bool  # as `run.devices.DevicePolicy`
    deadline_s: float
    calls: int


@dataclasses.dataclass(eq=False)
class Group:
    """A group of environments."""

    actor: Worker
    path: Path | None  # to the learner; None on its own machine
    resume: Resume | None = None  # what its action lets go on
    since_s: float = 0.0  # when its timestep was complete
    row: int = 0  # of its open unroll, or of its open chunk of replay
    versions: float = 0.0  # sum over the rows of the open unroll
    completed: int = 0  # unrolls since parameters were published


class Path(NamedTuple):
    """The way of a group's timesteps over the network: its host's supervisor, and the ingest process."""

    supervisor: Worker
    ingest: Worker
    costs: StreamCosts

    def up(self) -> Process:
        """Carries a timestep."""
        source, to = self.supervisor.machine.card, self.ingest.machine.card
        yield self.supervisor.do(self.costs.send)
        if source is not to:
            yield source.send(to, self.costs.up_bytes)
        yield self.ingest.do(self.costs.take)

    def down(self) -> Process:
        """Carries an answer."""
        source, to = self.ingest.machine.card, self.supervisor.machine.card
        yield self.ingest.do(self.costs.answer)
        if source is not to:
            yield source.send(to, self.costs.down_bytes)
        yield self.supervisor.do(self.costs.read)


class Source(Protocol):
    """Experience between acting and learning."""

    steps: float  # that count so far

    def arrive(self, group: Group) -> bool:
        """Takes notice of a timestep; returns whether the group may be acted on now."""
        ...

    def add(self, groups: Sequence[Group], version: int) -> Process:
        """Adds the steps of a call, which parameters of this version chose; may wait."""
        ...

    def take(self) -> Process:
        """Waits for a batch; returns the mean version that chose its actions."""
        ...

    def learned(self) -> None:
        """Notes that the batch was learned from."""
        ...

    def flush(self) -> Process:
        """Hands on what is complete; may wait."""
        ...


class Unrolls:
    """Unrolls and their queue; a `Source`."""

    def __init__(self, simulation: Simulation, sizes: Sizes, groups: Sequence[Group]) -> None:
        experience = sizes.experience
        assert isinstance(experience, OnPolicy)
        self.steps = 0.0
        self._unroll, self._size = experience.unroll, sizes.group_size
        self._per_batch = experience.batch // sizes.group_size
        self._quota = self._per_batch // len(groups) if experience.synchronous else 0
        for number, group in enumerate(groups if not self._quota else ()):
            # They complete their unrolls one after the other, from the beginning.
            group.row = self._unroll - 1 - number * self._unroll // len(groups)
        self._complete: collections.deque[float] = collections.deque()
        self._queue: collections.deque[float] = collections.deque()
        self._changed = Signal(simulation)

    def arrive(self, group: Group) -> bool:
        """Completes a full unroll."""
        if group.row == self._unroll:
            self._complete.append(group.versions / self._unroll)
            group.completed += 1
            group.row, group.versions = 0, 0.0
        return not self._quota or group.completed < self._quota

    def add(self, groups: Sequence[Group], version: int) -> Process:
        """Adds rows; does not wait."""
        for group in groups:
            group.row += 1
            group.versions += version
        yield from ()

    def flush(self) -> Process:
        """Puts completed unrolls into the queue of two batches; waits for room."""
        while self._complete:
            while len(self._queue) >= 2 * self._per_batch:
                yield self._changed.wait
            self._queue.append(self._complete.popleft())
            self._changed.give()

    def take(self) -> Process:
        """Waits for a batch."""
        while len(self._queue) < self._per_batch:
            yield self._changed.wait
        taken = [self._queue.popleft() for _ in range(self._per_batch)]
        self._changed.give()
        return sum(taken) / len(taken)

    def learned(self) -> None:
        """Counts the batch."""
        self.steps += self._per_batch * self._size * self._unroll


class Learner:
    """A learner with the groups that it acts for."""

    def __init__(
        self,
        simulation: Simulation,
        sizes: Sizes,
        costs: ActingCosts,
        machine: Machine,
        rng: random.Random,
        devices: tuple[Device, Device] | None = None,
    ) -> None:
        """Starts nothing yet: `begin` does. `devices` are those that act and learn, None for the cores."""
        self.simulation, self.sizes, self.costs, self.rng = simulation, sizes, costs, rng
        lost = costs.company
        self.acts_on, learns_on = devices or (None, None)
        # As the threads beside the learner's see them.
        self.fellows = Fellows(self, lost.acting, lost.waste)
        self.acting = Worker(simulation, machine, fellows=self.fellows)
        self.learning = Worker(
            simulation, machine, device=learns_on, fellows=Fellows(self, lost.learning, lost.waste)
        )
        self.version = self.batches = 0
        self.latencies: list[float] = []
        self.lags: list[float] = []
        self.rows = self.calls = 0
        self.groups: list[Group] = []
        self._call_sizes: tuple[int, ...] = ()  # groups for which acting is compiled
        self._ready: list[Group] = []
        self._resting: list[Group] = []
        self._under_way = self._called = 0  # calls, and groups in those that have no actions yet
        self._changed = Signal(simulation)

    def begin(
        self, groups: Sequence[Group], source: Source, update: Callable[[], Process] | None = None
    ) -> None:
        """Starts its actors and threads; `update` learns from a batch, by default on this machine alone."""
        self.groups, self.source = list(groups), source
        self._call_sizes = batch_sizes(len(groups), self.sizes.pads)
        for group in groups:
            self.simulation.start(self._play(group))
        self.simulation.start(self._act())
        self.simulation.start(self._learn(update or self._update))

    def jitter(self) -> float:
        """Returns a factor around 1."""
        return self.rng.uniform(1 - JITTER, 1 + JITTER)

    def _play(self, group: Group) -> Process:
        """Steps a group for ever."""
        while True:
            yield group.actor.do(self.costs.step.times(self.jitter()))
            since_s = self.simulation.now
            if group.path is not None:
                yield from group.path.up()
            yield self._answer(group)
            if group.path is not None:
                yield from group.path.down()
            self.latencies.append(self.simulation.now - since_s)

    def _answer(self, group: Group) -> Request:
        def begin(resume: Resume) -> None:
            group.resume = resume
            (self._ready if self.source.arrive(group) else self._resting).append(group)
            self._changed.give()

        return begin

    def _act(self) -> Process:
        """The inference thread."""
        while True:
            yield from self.source.flush()
            if not self._ready or self._under_way == self.sizes.calls:
                idle = not self._under_way
                yield self._changed.wait
                if idle and self._ready:
                    yield self.acting.do(Cost(self.costs.wake_s))
                continue
            yield from self._gather()
            size, count = self._size(), len(self._ready)
            groups, self._ready = self._ready[: min(size, count)], self._ready[size:]
            self._under_way += 1
            if self.sizes.calls == 1:
                yield from self._call(groups, size)
            else:
                self.simulation.start(self._call(groups, size))

    def _gather(self) -> Process:
        """Waits for other groups to join a call, at most until its deadline; not for those that cannot."""
        until_s = self.simulation.now + self.sizes.deadline_s
        if not self.sizes.deadline_s:
            return
        self.simulation.after(self.sizes.deadline_s, self._changed.give)
        while self.simulation.now < until_s:
            if len(self._ready) + self._called >= len(self.groups) - len(self._resting):
                return
            yield self._changed.wait

    def _size(self) -> int:
        """Returns the compiled size for the groups that are ready."""
        sizes, count = self._call_sizes, len(self._ready)
        if not self.sizes.pads:
            return max(size for size in sizes if size <= count)
        return min((size for size in sizes if size >= count), default=sizes[-1])

    def _call(self, groups: Sequence[Group], size: int) -> Process:
        cost, version = self.costs.call(size), self.version
        self.calls, self.rows = self.calls + 1, self.rows + len(groups) * self.sizes.group_size
        self._called += len(groups)
        yield self.acting.do(cost.host)
        yield self.acting.do(cost.program._replace(device_s=0.0))
        if self.acts_on is not None and cost.program.device_s:
            # The thread may stage the next call meanwhile.
            yield self.acts_on.work(cost.program.device_s)
        self._called -= len(groups)
        for group in groups:
            assert group.resume is not None
            self.simulation.after(0.0, group.resume)
        yield self.acting.do(cost.keep)
        yield from self.source.add(groups, version)
        self._under_way -= 1
        self._changed.give()

    def _learn(self, update: Callable[[], Process]) -> Process:
        """The learner thread."""
        while True:
            chosen = yield from self.source.take()
            if chosen is not None:
                self.lags.append(self.version - chosen)
            yield from update()
            self.version += self.sizes.updates
            self.batches += 1
            self.source.learned()
            for group in self.groups:
                group.completed = 0
            self._ready, self._resting = self._ready + self._resting, []
            self._changed.give()

    def _update(self) -> Process:
        yield self.learning.do(self.costs.update.times(self.jitter()))
