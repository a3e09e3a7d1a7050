"""The model of parameter shards and replay shards, which many learners share.

It follows `paramserver/updater.py`, `paramserver/shard.py` and `paramserver/replaying.py`. Assumed: a part of
a batch costs what a step of a group does, and its share of what a whole batch costs beyond that; and what one
process has to tell another on its machine takes no time but that of the processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from seedbed.paramserver.replay_client import SETS_AHEAD
from seedbed.plan.acting import Group, Learner, Sizes
from seedbed.plan.costs import Linear, ReplayCosts, ShardCosts
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
        costs: tuple[ReplayCosts, ReplayCosts],
        parts: Traffic,
        learners: int,
    ) -> None:
        """`machines` are those of the shards; all `learners` draw from them.

        `costs` are those of a learner on the same machine as a shard, and of one on another.
        """
        assert isinstance(sizes.experience, Replay)
        self.simulation, self.sizes, self.parts = simulation, sizes, parts
        self.workers = [Worker(simulation, machine) for machine in machines]
        self.balance = Balance(simulation, sizes.experience, learners)
        self._costs = costs

    def costs(self, worker: Worker, machine: Machine) -> ReplayCosts:
        """Returns the costs of a shard for a learner on a machine."""
        return self._costs[worker.machine is not machine]

    def append(self, worker: Worker, thread: Worker, rows: int) -> Process:
        """Carries a group's step to its shard, where it ends a chunk of so many rows, or of none yet."""
        row = self.costs(worker, thread.machine).row
        yield thread.do(Cost(row.stream))
        if worker.machine is not thread.machine:
            yield thread.machine.card.send(worker.machine.card, self.parts.row)
        yield worker.do(Cost(row.shard))
        if rows:
            self.balance.added(rows * self.sizes.group_size)

    def draw(self, worker: Worker, thread: Worker) -> Process:
        """Brings a learner the part of a batch that one shard has."""
        row, draw = self.costs(worker, thread.machine)
        share = 1 / len(self.workers)

        def part(message: float, whole: float) -> Cost:
            return Cost(message + share * max(0.0, whole - message))

        yield worker.do(part(row.shard, draw.shard))
        if worker.machine is not thread.machine:
            yield worker.machine.card.send(thread.machine.card, share * self.parts.items)
        yield thread.do(part(row.stream, draw.stream))


class ShardedReplay:
    """The replay of one learner, in shards; an `acting.Source`."""

    def __init__(self, shards: ReplayShards, learner: Learner, groups: Mapping[Group, int]) -> None:
        """`groups` has the learner's groups with their numbers among those of all."""
        self.steps = 0.0
        self._shards, self._learning = shards, learner.learning
        # Each shard's stream is a thread of the learner's process.
        self._threads = [
            Worker(shards.simulation, learner.learning.machine, fellows=learner.fellows)
            for _ in shards.workers
        ]
        self._waiting = self._ready = 0
        self._free = AHEAD
        self._changed = Signal(shards.simulation)
        self._homes = {group: number % len(shards.workers) for group, number in groups.items()}
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
            home = self._homes[group]
            carried = shards.append(shards.workers[home], self._threads[home], rows)
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
        pairs = zip(shards.workers, self._threads, strict=True)
        yield shards.simulation.all_of(shards.draw(*each) for each in pairs)
        self._ready += 1
        self._changed.give()

    def take(self) -> Process:
        """Waits for a batch, and takes it."""
        while not self._ready:
            yield self._changed.wait
        self._ready -= 1
        shards = self._shards
        spent = [shards.costs(each, self._learning.machine).draw.caller for each in shards.workers]
        yield self._learning.do(Cost(sum(spent) / len(spent)))
        return None

    def learned(self) -> None:
        """Gives the buffers back."""
        self._free += 1
        self._changed.give()
