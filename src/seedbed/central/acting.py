"""The inference thread: groups, from the arrival of their timesteps to the calls that answer them."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Sequence

import jax
import numpy as np

from seedbed.actors.pool import ActorPool
from seedbed.actors.slots import Slot
from seedbed.central.experience import Place, Sink
from seedbed.central.gate import Gate
from seedbed.central.inference import ActOutput, Inference
from seedbed.run.measures import EpisodeStatistics
from seedbed.types import Timestep

# Seconds between two looks at the pool and at calls that are under way, while there is nothing to do.
_NAP_S = 1e-4
_ALONE = Place()


@dataclasses.dataclass
class Call:
    """An inference call that was started, for the inference thread."""

    number: int  # of the calls of all devices
    shard: Shard
    timestep: Timestep  # [k, n, ...] the staging buffer; rows beyond `groups` are padding
    output: ActOutput
    groups: list[int]  # numbers in the pool
    lives: list[int]  # of the groups when their timesteps were staged

    @property
    def ready(self) -> bool:
        """Whether the device has computed the actions. Call from the inference thread only."""
        return all(leaf.is_ready() for leaf in jax.tree.leaves(self.output.action))


class Shard:
    """One inference device, with its groups `[first, first + G)` of the pool and its staging buffers.

    After construction, only the inference thread uses it. Group numbers are those of the pool.
    """

    def __init__(self, inference: Inference, first: int, timestep: Timestep) -> None:
        """Allocates staging buffers. `timestep` is a template: a timestep of one group, `[n, ...]`."""
        self.inference, self.policy = inference, inference.policy
        self.groups = range(first, first + inference.num_groups)
        # Groups that have a timestep to act on, and when the first of them came; infinity if there is none.
        self.ready: list[int] = []
        self._since_s = math.inf
        # Calls that were started and are not finished, the oldest first; at most `policy.calls`.
        self.calls: collections.deque[Call] = collections.deque()
        # How many groups have environments.
        self.present = len(self.groups)
        # Groups that have a timestep and wait for newer parameters.
        self._resting: list[int] = []

        def staging(size: int) -> list[Timestep]:
            return [
                jax.tree.map(lambda leaf: np.zeros((size, *leaf.shape), leaf.dtype), timestep)
                # The device may still read the buffer of a call while the next one is staged.
                for _ in range(self.policy.calls)
            ]

        self._staging = {size: staging(size) for size in inference.sizes}
        self._turn = 0

    def renew(self) -> bool:
        """Makes resting groups ready if newer parameters were published; returns whether they were.

        Call from the inference thread only.
        """
        newer = self.inference.renew()
        if newer and self._resting:
            self._since_s = min(self._since_s, time.perf_counter())
            self.ready, self._resting = self.ready + self._resting, []
        return newer

    @property
    def acting_groups(self) -> int:
        """The number of groups that act: they have environments and do not rest.

        Read it from the inference thread only.
        """
        return self.present - len(self._resting)

    def arrive(self, group: int, may_act: bool) -> None:
        """Makes a group with a new timestep ready, or lets it rest until newer parameters are published.

        Call from the inference thread only.
        """
        if group not in self.ready and group not in self._resting:
            (self.ready if may_act else self._resting).append(group)
        if self.ready:
            self._since_s = min(self._since_s, time.perf_counter())

    @property
    def full(self) -> bool:
        """Whether no other call may start before one has ended. Read it from the inference thread only."""
        return len(self.calls) == self.policy.calls

    @property
    def start_s(self) -> float:
        """The time from which on the next call is to start; infinity if it may not, or no group is ready.

        A call does not wait for groups that cannot come: those that rest, and those in calls. Read it from
        the inference thread only.
        """
        if not self.ready or self.full:
            return math.inf
        acting = sum(len(call.groups) for call in self.calls)
        complete = len(self.ready) + acting >= self.acting_groups
        return self._since_s + (0.0 if complete else self.policy.deadline_s)

    def start(self, slots: Sequence[Slot], number: int) -> Call:
        """Stages as many ready groups as one call takes, and starts acting for them; adds it to `calls`.

        At least one group must be ready, and the shard must not be `full`. Call from the inference thread
        only.
        """
        size = self._batch_size()
        groups, self.ready = self.ready[:size], self.ready[size:]
        if not self.ready:
            self._since_s = math.inf
        self._turn = (self._turn + 1) % self.policy.calls
        staging, lives = self._staging[size][self._turn], []
        for position, group in enumerate(groups):
            slot = slots[group]
            lives.append(slot.life)
            timestep = slot.timestep
            jax.tree.map(lambda to, leaf, at=position: np.copyto(to[at], leaf), staging, timestep)
        output = self.inference.act(staging, [group - self.groups.start for group in groups])
        call = Call(number, self, staging, output, groups, lives)
        self.calls.append(call)
        return call

    def _batch_size(self) -> int:
        """Returns the compiled size for the ready groups."""
        sizes, count = self.inference.sizes, len(self.ready)
        if not self.policy.pads:
            return max(size for size in sizes if size <= count)
        return min((size for size in sizes if size >= count), default=sizes[-1])


@dataclasses.dataclass
class InferenceCounters:
    """Sums over the run of an inference loop. The inference thread writes them, and any thread may read."""

    calls: int = 0  # inference calls
    rows: int = 0  # environments that the calls acted on, without padding
    busy_s: float = 0.0  # seconds, without gathering timesteps and waiting for the sink


class InferenceLoop:
    """The loop that acts: it sends actions to every group, and then gives the steps to the sink."""

    def __init__(
        self,
        pool: ActorPool,
        inferences: Sequence[Inference],
        sink: Sink,
        episodes: EpisodeStatistics,
        gate: Gate | None = None,
        place: Place = _ALONE,
    ) -> None:
        """Divides the pool's groups among the devices in order; the pool must know its spec.

        `gate` is that of the devices that learn, too. `episodes` is written by the inference thread.
        """
        self._pool, self._sink, self._gate, self._place = pool, sink, gate, place
        self.episodes = episodes
        self.counters = InferenceCounters()
        self._shards: list[Shard] = []
        first = 0
        for inference in inferences:
            self._shards.append(Shard(inference, first, pool.slots[first].timestep))
            first += inference.num_groups
        self._shard_of = [s for s in self._shards for _ in range(s.inference.num_groups)]
        self._lives = [-1] * pool.num_groups  # by group: that of its last timestep
        self._members = tuple(range(pool.num_groups))  # the groups that actor states are made for

    def run(self, stop: threading.Event) -> None:
        """Runs until the sink is done, or `stop` is set; then calls `finish` of the sink.

        The thread that calls this is the inference thread. Raises SeedbedError if the actors fail for good.
        """
        sink = self._sink
        while not stop.is_set() and not sink.done:
            begun = self._gather_and_start(stop)
            call = self._next_call()
            blocked_s = self.blocked_s
            if call is not None:
                self._finish(call)
                sink.add(call.groups, call.lives, call.timestep, call.output)
            sink.flush()
            blocked_s = self.blocked_s - blocked_s
            self.counters.busy_s += time.perf_counter() - begun - blocked_s
        sink.finish()

    @property
    def blocked_s(self) -> float:
        """The seconds since the start in which acting waited for the learner. Any thread may read it."""
        return self._sink.waited.read()

    def _gather_and_start(self, stop: threading.Event) -> float:
        """Receives timesteps until there is something to do, and starts the calls whose time has come.

        Returns when the first of them began to start. The learner is let through the gate again before
        anything waits for it.
        """
        try:
            self._gather(stop)
            begun = time.perf_counter()
            for shard in self._shards:
                if shard.start_s <= begun:
                    self._start(shard)
        finally:
            if self._gate is not None:
                self._gate.withdraw()
        return begun

    def _gather(self, stop: threading.Event) -> None:
        """Receives timesteps until a call is to start or has ended, or `stop` is set.

        If no call is under way and no group is ready, it waits at most 0.1 s for a first one.
        """
        self._renew()
        idle = not any(shard.calls or shard.ready for shard in self._shards)
        if idle and self._members and not any(shard.acting_groups for shard in self._shards):
            # The last device is also the last one to get newer parameters.
            self._shards[-1].inference.wait_for_newer(0.1)
            idle = False
        self._receive(0.1 if idle else 0.0)
        while self._must_wait() and not stop.is_set():
            time.sleep(_NAP_S)
            self._renew()
            self._receive(0.0)

    def _must_wait(self) -> bool:
        """Returns whether there is something to wait for, and no call to start or to finish."""
        starts = [shard.start_s for shard in self._shards]
        if self._gate is not None and any(
            start_s < math.inf and self._shares(shard)
            for shard, start_s in zip(self._shards, starts, strict=True)
        ):
            self._gate.announce()
        pending = any(shard.calls or shard.ready for shard in self._shards)
        return pending and min(starts) > time.perf_counter() and self._next_call() is None

    def _renew(self) -> None:
        for shard in self._shards:
            if shard.renew():
                self._sink.renew(shard.groups)

    def _receive(self, timeout_s: float) -> None:
        groups = self._pool.poll(timeout_s)
        if self._pool.members != self._members:
            self._seat(self._pool.members)
        for group in groups:
            slot = self._pool.slots[group]
            if slot.life != self._lives[group]:
                self._lives[group] = slot.life
                self.episodes.reset(group)
            self.episodes.record(group, slot.timestep, slot.success)
            may_act = self._sink.arrive(group, slot.life, slot.timestep)
            self._shard_of[group].arrive(group, may_act)

    def _seat(self, members: Sequence[int]) -> None:
        """Gives the groups that have environments their places, from 0 on."""
        self._members = members
        for shard in self._shards:
            shard.present = sum(group in shard.groups for group in members)
        # Nobody acts until somebody comes, and then there are members again.
        if not members:
            return
        places = np.zeros(self._pool.num_groups, np.int64)
        # The others have as many.
        before, everywhere = self._place.number * len(members), self._place.of * len(members)
        places[list(members)] = np.arange(before, before + len(members))
        for shard in self._shards:
            shard.inference.seat(places[shard.groups.start : shard.groups.stop], everywhere)

    def _shares(self, shard: Shard) -> bool:
        return self._gate is not None and shard.inference.device in self._gate.devices

    def _start(self, shard: Shard) -> None:
        call = shard.start(self._pool.slots, self.counters.calls)
        if self._gate is not None and self._shares(shard):
            self._gate.started()
        self.counters.calls += 1
        self.counters.rows += len(call.groups) * shard.inference.group_size

    def _next_call(self) -> Call | None:
        """Returns the call to finish now: the oldest that is ready.

        Where there is one device, and it may start no other call, it is the oldest, ready or not: nothing is
        left but to wait for it. A shard's calls end in their order: the buffer of an older one must not be
        staged again before its steps are in the sink.
        """
        oldest = [shard.calls[0] for shard in self._shards if shard.calls]
        only = len(self._shards) == 1 and self._shards[0].full
        return min(
            (call for call in oldest if only or call.ready),
            key=lambda call: call.number,
            default=None,
        )

    def _finish(self, call: Call) -> None:
        """Waits for the actions of a call, and sends them to their groups."""
        action = jax.tree.map(np.asarray, call.output.action)
        call.shard.calls.popleft()
        if self._gate is not None and self._shares(call.shard):
            self._gate.finished()
        for position, group in enumerate(call.groups):
            slot = self._pool.slots[group]
            if slot.life != call.lives[position]:
                # The group has begun a new life: the action answers a timestep of an earlier one.
                continue
            jax.tree.map(lambda to, leaf, at=position: np.copyto(to, leaf[at]), slot.action, action)
            self._pool.reply(group)
