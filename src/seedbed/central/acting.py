"""The inference thread: groups, from the arrival of their timesteps to the calls that answer them."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Sequence

import jax
import numpy as np

from seedbed.actors.pool import ActorPool
from seedbed.actors.slots import Slot
from seedbed.central.experience import Sink
from seedbed.central.inference import ActOutput, Inference
from seedbed.run.measures import EpisodeStatistics
from seedbed.types import Timestep


@dataclasses.dataclass
class Call:
    """An inference call that was started, for the inference thread."""

    shard: Shard
    timestep: Timestep  # [k, n, ...] the staging buffer; rows beyond `groups` are padding
    output: ActOutput
    groups: list[int]  # numbers in the pool
    lives: list[int]  # of the groups when their timesteps were staged


class Shard:
    """One inference device, with its groups `[first, first + G)` of the pool and its staging buffers.

    After construction, only the inference thread uses it. Group numbers are those of the pool.
    """

    def __init__(self, inference: Inference, first: int, timestep: Timestep) -> None:
        """Allocates staging buffers. `timestep` is a template: a timestep of one group, `[n, ...]`."""
        self.inference = inference
        self.groups = range(first, first + inference.num_groups)
        # Groups that have a timestep to act on.
        self.ready: list[int] = []
        # Calls that were started and are not finished; at most `depth`.
        self.in_flight = 0
        # The device may still read a buffer while the next call is staged, so two buffers alternate.
        self.depth = 1 if inference.device.platform == "cpu" else 2
        # How many groups have environments.
        self.present = len(self.groups)
        # Groups that have a timestep and wait for newer parameters.
        self._resting: list[int] = []

        def staging(size: int) -> list[Timestep]:
            return [
                jax.tree.map(lambda leaf: np.zeros((size, *leaf.shape), leaf.dtype), timestep)
                for _ in range(self.depth)
            ]

        self._staging = {size: staging(size) for size in inference.sizes}
        self._turn = 0

    def renew(self) -> bool:
        """Makes resting groups ready if newer parameters were published; returns whether they were.

        Call from the inference thread only.
        """
        newer = self.inference.renew()
        if newer:
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

    def start(self, slots: Sequence[Slot]) -> Call:
        """Stages as many ready groups as one call takes, and starts acting for them.

        At least one group must be ready, and `in_flight` must be below `depth`. The caller lowers `in_flight`
        when the call is finished. Call from the inference thread only.
        """
        size = self._batch_size()
        groups, self.ready = self.ready[:size], self.ready[size:]
        self._turn = (self._turn + 1) % self.depth
        staging, lives = self._staging[size][self._turn], []
        for position, group in enumerate(groups):
            slot = slots[group]
            lives.append(slot.life)
            timestep = slot.timestep
            jax.tree.map(lambda to, leaf, at=position: np.copyto(to[at], leaf), staging, timestep)
        output = self.inference.act(staging, [group - self.groups.start for group in groups])
        self.in_flight += 1
        return Call(self, staging, output, groups, lives)

    def _batch_size(self) -> int:
        """Returns the compiled size for the ready groups. On a CPU, where padding costs, it never pads."""
        sizes, count = self.inference.sizes, len(self.ready)
        if self.inference.device.platform == "cpu":
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
        deadline_s: float,
    ) -> None:
        """Divides the pool's groups among the devices in order; the pool must know its spec.

        A call waits at most `deadline_s` seconds for more groups. `episodes` is written by the inference
        thread.
        """
        self._pool, self._sink, self._deadline_s = pool, sink, deadline_s
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
        # Calls that were started and are not finished, the oldest first.
        self._calls: collections.deque[Call] = collections.deque()

    def run(self, stop: threading.Event) -> None:
        """Runs until the sink is done, or `stop` is set; then calls `finish` of the sink.

        The thread that calls this is the inference thread. Raises SeedbedError if the actors fail for good.
        """
        sink = self._sink
        while not stop.is_set() and not sink.done:
            self._gather()
            gathered = time.perf_counter()
            able = [s for s in self._shards if s.ready and s.in_flight < s.depth]
            self._calls.extend(self._start(shard) for shard in able)
            full = any(shard.in_flight == shard.depth for shard in self._shards)
            call = self._calls.popleft() if self._calls and (full or not able) else None
            blocked_s = self.blocked_s
            if call is not None:
                self._finish(call)
                sink.add(call.groups, call.lives, call.timestep, call.output)
            sink.flush()
            blocked_s = self.blocked_s - blocked_s
            self.counters.busy_s += time.perf_counter() - gathered - blocked_s
        sink.finish()

    @property
    def blocked_s(self) -> float:
        """The seconds since the start in which acting waited for the learner. Any thread may read it."""
        return self._sink.waited.read()

    def _gather(self) -> None:
        """Receives timesteps; unless a call is in flight, waits for a first group, and then for others.

        It waits at most 0.1 s for the first group, and at most `deadline_s` for the others.
        """
        for shard in self._shards:
            if shard.renew():
                self._sink.renew(shard.groups)
        idle = not self._calls and not any(shard.ready for shard in self._shards)
        if idle and self._members and not any(shard.acting_groups for shard in self._shards):
            # The last device is also the last one to get newer parameters.
            self._shards[-1].inference.wait_for_newer(0.1)
            idle = False
        self._receive(0.1 if idle else 0.0)
        if self._calls or not self._deadline_s:
            return
        until = time.perf_counter() + self._deadline_s
        while any(0 < len(s.ready) < s.acting_groups for s in self._shards):
            left = until - time.perf_counter()
            if left <= 0:
                return
            self._receive(left)

    def _receive(self, timeout_s: float) -> None:
        groups = self._pool.poll(timeout_s)
        if self._pool.members != self._members:
            self._seat(self._pool.members)
        for group in groups:
            slot = self._pool.slots[group]
            if slot.life != self._lives[group]:
                self._lives[group] = slot.life
                self.episodes.reset(group)
            self.episodes.record(group, slot.timestep)
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
        places[list(members)] = np.arange(len(members))
        for shard in self._shards:
            shard.inference.seat(places[shard.groups.start : shard.groups.stop], len(members))

    def _start(self, shard: Shard) -> Call:
        call = shard.start(self._pool.slots)
        self.counters.calls += 1
        self.counters.rows += len(call.groups) * shard.inference.group_size
        return call

    def _finish(self, call: Call) -> None:
        """Waits for the actions of a call, and sends them to their groups."""
        action = jax.tree.map(np.asarray, call.output.action)
        call.shard.in_flight -= 1
        for position, group in enumerate(call.groups):
            slot = self._pool.slots[group]
            if slot.life != call.lives[position]:
                # The group started anew meanwhile, and has not asked for an action yet.
                continue
            jax.tree.map(lambda to, leaf, at=position: np.copyto(to, leaf[at]), slot.action, action)
            self._pool.reply(group)
