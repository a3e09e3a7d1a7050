"""The model of parameter shards and replay shards, which many learners share.

It follows `paramserver/updater.py`, `paramserver/shard.py` and `paramserver/replaying.py`. Assumed: a replay
shard takes for a megabyte what a parameter shard takes, besides sealing and drawing; a megabyte of replay
costs a learner what one of parameters does; and what one process has to tell another on its machine takes no
time but that of the processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seedbed.paramserver.replay_client import SETS_AHEAD
from seedbed.plan.acting import Group, Learner, Sizes
from seedbed.plan.costs import MB, ActingCosts, Linear, ShardCosts
from seedbed.plan.engine import Cost, Machine, Process, Signal, Simulation, Worker
from seedbed.plan.replayed import AHEAD, Balance
from seedbed.replay.host.layout import CHUNK
from seedbed.types import Replay

_HELD = SETS_AHEAD * CHUNK  # rows that may wait with each group, before it acts no further


class Traffic(NamedTuple):
    """Bytes of an update, by parameter shard; and those of replay."""

    up: list[int]
    down: list[int]
    items: float  # of a batch, from all replay shards
    row: float  # of a group's step


class ParameterShards:
    """The parameter shards of a run."""

    def __init__(
        self,
        simulation: Simulation,
        machines: Sequence[Machine],
        costs: ShardCosts,
        parts: Traffic,
        most_lag: int,
    ) -> None:
        """`machines` are those of the shards."""
        self.workers = [Worker(simulation, machine) for machine in machines]
        self.applied = [0] * len(machines)
        self.lags: list[int] = []
        self.pushes = self.discarded = 0
        self._simulation, self._costs, self._parts = simulation, costs, parts
        self._most_lag = most_lag

    def ways(self, machine: Machine) -> list[tuple[Linear, Linear]]:
        """Returns the costs of a learner on a machine and of each shard for it."""
        near, far = self._costs[:2], self._costs[2:]
        return [near if worker.machine is machine else far for worker in self.workers]

    def update(self, learner: Learner) -> Process:
        """Makes a gradient of the newest parameters, pushes it to all shards and pulls."""
        machine, ways = learner.learning.machine, self.ways(learner.learning.machine)
        # A learner that has waited for its batch has pulled again.
        base = list(self.applied)
        size = sum(self._parts.up) + sum(self._parts.down)
        shards = len(self.workers)
        own = sum(way[0].of(shards, size) for way in ways) / shards
        yield learner.learning.do(learner.costs.update.times(learner.jitter()))
        yield learner.learning.do(Cost(own))
        order = learner.rng.sample(range(shards), shards)
        yield self._simulation.all_of(
            self._exchange(machine, shard, ways[shard][1], base) for shard in order
        )

    def _exchange(self, machine: Machine, shard: int, cost: Linear, base: list[int]) -> Process:
        worker, up, down = self.workers[shard], self._parts.up[shard], self._parts.down[shard]
        here = worker.machine is machine
        if not here:
            yield machine.card.send(worker.machine.card, up)
        yield worker.do(Cost(cost.of(0, up + down)))
        lag = self.applied[shard] - base[shard]
        self.pushes += 1
        if lag > self._most_lag:
            self.discarded += 1
        else:
            self.applied[shard] += 1
            self.lags.append(lag)
        if not here:
            yield worker.machine.card.send(machine.card, down)


class ReplayShards:
    """The replay shards of a run, and the one ratio of drawing to adding."""

    def __init__(
        self,
        simulation: Simulation,
        machines: Sequence[Machine],
        sizes: Sizes,
        acting: ActingCosts,
        costs: ShardCosts,
        parts: Traffic,
        learners: int,
    ) -> None:
        """`machines` are those of the shards; all `learners` draw from them."""
        assert isinstance(sizes.experience, Replay)
        self.simulation, self.sizes, self.parts = simulation, sizes, parts
        self.workers = [Worker(simulation, machine) for machine in machines]
        self.balance = Balance(simulation, sizes.experience, learners)
        self._acting, self._costs = acting, costs

    def cost(self, worker: Worker, machine: Machine, size: float) -> tuple[Cost, Cost]:
        """Returns what so many bytes cost a learner on a machine, and a shard."""
        near = worker.machine is machine
        learner, shard = self._costs[:2] if near else self._costs[2:]
        return Cost(learner.megabyte * size / MB), Cost(shard.megabyte * size / MB)

    def append(self, worker: Worker, thread: Worker, rows: int) -> Process:
        """Carries a group's step to its shard, where it ends a chunk of so many rows, or of none yet."""
        own, theirs = self.cost(worker, thread.machine, self.parts.row)
        yield thread.do(own)
        if worker.machine is not thread.machine:
            yield thread.machine.card.send(worker.machine.card, self.parts.row)
        yield worker.do(_sum(theirs, self._acting.seal.times(rows)))
        if rows:
            self.balance.added(rows * self.sizes.group_size)

    def draw(self, worker: Worker, thread: Worker) -> Process:
        """Brings a learner the part of a batch that one shard has."""
        shards = len(self.workers)
        size = self.parts.items / shards
        own, theirs = self.cost(worker, thread.machine, size)
        yield worker.do(_sum(theirs, self._acting.draw.times(1 / shards)))
        if worker.machine is not thread.machine:
            yield worker.machine.card.send(thread.machine.card, size)
        yield thread.do(own)


class ShardedReplay:
    """The replay of one learner, in shards; an `acting.Source`."""

    def __init__(self, shards: ReplayShards, machine: Machine, groups: Mapping[Group, int]) -> None:
        """`machine` is the learner's, and `groups` has its groups with their numbers among those of all."""
        self.steps = 0.0
        self._shards = shards
        # The threads of the streams.
        self._thread = Worker(shards.simulation, machine)
        self._waiting = self._ready = 0
        self._free = AHEAD
        self._changed = Signal(shards.simulation)
        self._homes = {
            group: shards.workers[number % len(shards.workers)] for group, number in groups.items()
        }
        shards.simulation.start(self._attend())

    def arrive(self, group: Group) -> bool:
        """Returns True: acting never waits for newer parameters."""
        return True

    def add(self, groups: Sequence[Group], version: int) -> Process:
        """Sends steps to their shards; waits for the ratio, and for rows that wait."""
        shards = self._shards
        for group in groups:
            while not shards.balance.may_add:
                yield shards.balance.addable.wait
            while self._waiting >= _HELD * len(self._homes):
                yield self._changed.wait
            self.steps += shards.sizes.group_size
            self._waiting += 1
            group.row = (group.row + 1) % CHUNK
            rows = 0 if group.row else CHUNK
            carried = shards.append(self._homes[group], self._thread, rows)
            shards.simulation.start(carried, self._appended)

    def _appended(self) -> None:
        self._waiting -= 1
        self._changed.give()

    def flush(self) -> Process:
        """Passes on nothing: `add` has sent every step."""
        yield from ()

    def _attend(self) -> Process:
        """Draws ahead."""
        shards = self._shards
        while True:
            while not self._free:
                yield self._changed.wait
            while not shards.balance.draw():
                yield shards.balance.drawable.wait
            self._free -= 1
            shards.simulation.start(self._fetch())

    def _fetch(self) -> Process:
        shards = self._shards
        yield shards.simulation.all_of(shards.draw(each, self._thread) for each in shards.workers)
        self._ready += 1
        self._changed.give()

    def take(self) -> Process:
        """Waits for a batch."""
        while not self._ready:
            yield self._changed.wait
        self._ready -= 1
        return None

    def learned(self) -> None:
        """Gives the buffers back."""
        self._free += 1
        self._changed.give()


def _sum(first: Cost, second: Cost) -> Cost:
    return Cost(first.cpu_s + second.cpu_s, 1.0, first.device_s + second.device_s)
