"""The two threads of central inference: one acts for all environments, one learns."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from seedbed.runtime.inference import Acted, Inference, Unroll
from seedbed.runtime.learning import Learner
from seedbed.runtime.metrics import EpisodeStatistics
from seedbed.runtime.reporting import Stopwatch, require_finite
from seedbed.transport.pool import ActorPool
from seedbed.types import LearnerState, Timestep, Tree


class Feed(Protocol):
    """Where experience goes and batches come from; closing it wakes every thread that waits."""

    def take(self) -> list[Unroll]:
        """Waits for what makes a batch; returns none if the feed was closed or has ended instead."""
        ...

    def learned(self, priorities: Tree) -> None:
        """Tells that the batch taken last was learned from, and its items' priorities `[B]`, if any."""
        ...

    def metrics(self) -> dict[str, Any]:
        """What is to be reported of it."""
        ...

    def seconds(self) -> dict[str, float]:
        """Returns seconds since the start, by name; what is reported is their share of each interval."""
        ...

    def take_notices(self) -> list[str]:
        """Returns, once each, what people should know."""
        ...

    def close(self) -> None:
        """Wakes every thread that waits; nothing more passes, and what is queued is dropped."""
        ...


class Recorder(Protocol):
    """Takes what a group saw and did, step by step."""

    waited: Stopwatch  # runs while `append` waits for room

    def restart(self, group: int) -> None:
        """Ends the streams of a group whose actor was restarted."""
        ...

    def append(self, group: int, timestep: Timestep, acted: Acted) -> bool:
        """Waits for room; leaves are `[n, ...]`. Returns False if it was closed instead."""
        ...

    def finish(self) -> None:
        """Ends the stream: nothing more will be appended."""
        ...


class UnrollQueue:
    """A bounded queue of unrolls that blocks at either end.

    It ends in one of two ways. `finish`, at the end of a run, drops nothing: what is queued is taken batch
    by batch, all but the rest that makes no batch. `close`, when a run is stopped or fails, drops up to two
    batches; the steps in them count as done and are not learned from.
    """

    def __init__(self, capacity: int, per_batch: int) -> None:
        """Holds at most `capacity` unrolls; `per_batch` of them make a batch."""
        self._capacity, self._per_batch = capacity, per_batch
        self._items: collections.deque[Unroll] = collections.deque()
        self._condition = threading.Condition()
        self._closed = self._ended = False
        self.waited = Stopwatch()  # runs while `put` waits for room

    def put(self, unroll: Unroll) -> bool:
        """Waits for room; returns False if the queue was closed instead. Call from one thread."""
        with self._condition:
            self.waited.start()
            self._condition.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            self.waited.stop()
            if not self._closed:
                self._items.append(unroll)
                self._condition.notify_all()
            return not self._closed

    def take(self) -> list[Unroll]:
        """Waits for a batch's unrolls; returns none if the queue was closed or has ended instead."""
        with self._condition:
            enough = self._per_batch
            self._condition.wait_for(lambda: self._ended or len(self._items) >= enough)
            if self._closed or len(self._items) < enough:
                return []
            taken = [self._items.popleft() for _ in range(self._per_batch)]
            self._condition.notify_all()
            return taken

    def learned(self, priorities: Tree) -> None:
        """Unrolls are used once: there is nothing to note."""
        del priorities

    def metrics(self) -> dict[str, Any]:
        """How many unrolls wait; how old those learned from were, once one was."""
        return {"queued_unrolls": len(self._items), "lag_mean": None, "lag_max": None}

    def seconds(self) -> dict[str, float]:
        """Returns an empty dict: nothing but `put` takes time here."""
        return {}

    def take_notices(self) -> list[str]:
        """Returns an empty list: unrolls raise no notices."""
        return []

    def finish(self) -> None:
        """Ends the stream after the last `put`: whole batches that are queued can still be taken."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def close(self) -> None:
        """Wakes every thread that waits; nothing more passes, and what is queued is dropped."""
        with self._condition:
            self._closed = self._ended = True
            self._condition.notify_all()


class _Shard:
    """One inference device: its groups `[first, first + G)` of the pool and its staging buffers."""

    def __init__(self, inference: Inference, first: int, timestep: Timestep) -> None:
        self.inference, self.first = inference, first
        self.ready: list[int] = []
        self.in_flight = 0
        # The device may still read a buffer while the next call is staged, so they alternate.
        self.depth = 1 if inference.device.platform == "cpu" else 2

        def staging(size: int) -> list[Timestep]:
            return [
                jax.tree.map(lambda leaf: np.zeros((size, *leaf.shape), leaf.dtype), timestep)
                for _ in range(self.depth)
            ]

        self._staging = {size: staging(size) for size in inference.sizes}
        self._turn = 0

    def batch_size(self) -> int:
        """Picks the compiled size for what is ready: never padded on a CPU, where padding costs."""
        sizes, count = self.inference.sizes, len(self.ready)
        if self.inference.device.platform == "cpu":
            return max(size for size in sizes if size <= count)
        return min((size for size in sizes if size >= count), default=sizes[-1])

    def stage(self, size: int) -> Timestep:
        """Returns the next staging buffer of this size, leaves `[k, n, ...]`."""
        self._turn = (self._turn + 1) % self.depth
        return self._staging[size][self._turn]


@dataclasses.dataclass
class _Call:
    """An inference call that was started."""

    shard: _Shard
    timestep: Timestep  # staged, [k, n, ...]
    acted: Acted
    groups: list[int]
    incarnations: list[int]
    unrolls: list[Unroll]


@dataclasses.dataclass
class InferenceCounters:
    """Sums since the start of the process; read by the thread that reports."""

    env_steps: int = 0
    calls: int = 0
    rows: int = 0
    busy_s: float = 0.0


class InferenceLoop:
    """Serves actions to every actor group, and hands on what they saw and did."""

    def __init__(
        self,
        pool: ActorPool,
        inferences: Sequence[Inference],
        sink: UnrollQueue | Recorder,
        episodes: EpisodeStatistics,
        deadline_s: float,
        max_env_steps: int,
    ) -> None:
        """Divides the pool's groups among the devices in order; `sink` takes unrolls, or every step."""
        self._max_env_steps = max_env_steps
        self._pool, self._sink, self._deadline_s = pool, sink, deadline_s
        self.episodes = episodes
        self.counters = InferenceCounters()
        self._shards: list[_Shard] = []
        first = 0
        for inference in inferences:
            self._shards.append(_Shard(inference, first, pool.slots[first].timestep))
            first += inference.num_groups
        self._shard_of = [s for s in self._shards for _ in range(s.inference.num_groups)]
        self._incarnation = [-1] * pool.num_groups
        # Of the step that went to replay last.
        self._recorded = [-1] * pool.num_groups
        self._calls: collections.deque[_Call] = collections.deque()

    def run(self, stop: threading.Event) -> None:
        """Serves until the steps are done, `stop` is set or the sink is closed; then ends its stream."""
        while not stop.is_set() and self.counters.env_steps < self._max_env_steps:
            self._gather()
            gathered = time.perf_counter()
            able = [s for s in self._shards if s.ready and s.in_flight < s.depth]
            self._calls.extend(self._start(shard) for shard in able)
            full = any(shard.in_flight == shard.depth for shard in self._shards)
            blocked_s = self.blocked_s
            if self._calls and (full or not able) and not self._complete(self._calls.popleft()):
                return
            blocked_s = self.blocked_s - blocked_s
            self.counters.busy_s += time.perf_counter() - gathered - blocked_s
        # Calls in flight are counted as done: what they complete is learned from too.
        while self._calls and self._complete(self._calls.popleft()):
            pass
        self._sink.finish()

    @property
    def blocked_s(self) -> float:
        """Seconds since the start in which acting waited for the learner; for any thread."""
        return self._sink.waited.read()

    def _gather(self) -> None:
        """Waits for a group, then a deadline for others, unless a call is in flight."""
        idle = not self._calls and not any(shard.ready for shard in self._shards)
        self._receive(0.1 if idle else 0.0)
        if self._calls or not self._deadline_s:
            return
        until = time.perf_counter() + self._deadline_s
        while any(0 < len(s.ready) < s.inference.num_groups for s in self._shards):
            left = until - time.perf_counter()
            if left <= 0:
                return
            self._receive(left)

    def _receive(self, timeout_s: float) -> None:
        for group in self._pool.poll(timeout_s):
            shard = self._shard_of[group]
            if group not in shard.ready:
                shard.ready.append(group)

    def _start(self, shard: _Shard) -> _Call:
        size = shard.batch_size()
        groups, shard.ready = shard.ready[:size], shard.ready[size:]
        staging = shard.stage(size)
        incarnations = []
        for position, group in enumerate(groups):
            slot = self._pool.slots[group]
            incarnations.append(slot.incarnation)
            if slot.incarnation != self._incarnation[group]:
                self._incarnation[group] = slot.incarnation
                shard.inference.restart(group - shard.first)
                self.episodes.reset(group)
            timestep = slot.timestep
            jax.tree.map(lambda to, leaf, at=position: np.copyto(to[at], leaf), staging, timestep)
            row = jax.tree.map(lambda leaf, at=position: leaf[at], staging)
            self.episodes.record(group, row)
            self.counters.env_steps += row.first.size - int(np.count_nonzero(row.first))
        local = [group - shard.first for group in groups]
        acted, complete = shard.inference.act(staging, local)
        taken = [shard.inference.take(group) for group in complete]
        shard.in_flight += 1
        self.counters.calls += 1
        self.counters.rows += len(groups) * shard.inference.group_size
        unrolls = [unroll for unroll in taken if unroll is not None]
        return _Call(shard, staging, acted, groups, incarnations, unrolls)

    def _complete(self, call: _Call) -> bool:
        """Replies to a call's groups and hands on what it yields; returns False if the sink was closed."""
        self._reply(call)
        return self._hand_on(call)

    def _reply(self, call: _Call) -> None:
        """Waits for the actions and replies."""
        call.acted = jax.tree.map(np.asarray, call.acted)
        action = call.acted.action
        call.shard.in_flight -= 1
        for position, group in enumerate(call.groups):
            slot = self._pool.slots[group]
            if slot.incarnation != call.incarnations[position]:
                continue  # the actor died meanwhile; its successor has not asked yet
            jax.tree.map(lambda to, leaf, at=position: np.copyto(to, leaf[at]), slot.action, action)
            self._pool.reply(group)

    def _hand_on(self, call: _Call) -> bool:
        """Waits for room for what a finished call yields; returns False if the sink was closed."""
        if isinstance(self._sink, UnrollQueue):
            return all(self._sink.put(unroll) for unroll in call.unrolls)
        for position, group in enumerate(call.groups):
            if call.incarnations[position] != self._recorded[group]:
                self._recorded[group] = call.incarnations[position]
                self._sink.restart(group)
            timestep, acted = jax.tree.map(
                lambda leaf, at=position: leaf[at], (call.timestep, call.acted)
            )
            if not self._sink.append(group, timestep, acted):
                return False
        return True


class LearnerLoop:
    """Turns unrolls into parameters, one update in flight, and publishes only finished ones."""

    def __init__(
        self,
        learner: Learner,
        state: LearnerState,
        inferences: Sequence[Inference],
        feed: Feed,
    ) -> None:
        """Publishes the initial parameters at once."""
        self._learner, self._inferences, self._feed = learner, inferences, feed
        self.state = learner.place(state)
        self.updates = int(state.updates)
        self.intact = True  # false where a failure left the state half donated
        self.busy, self.waiting = Stopwatch(), Stopwatch()  # of updates, and of waiting for batches
        self.metrics: dict[str, float] = {}
        self._wanted, self._snapshot = threading.Event(), threading.Event()
        self._updating = threading.Lock()
        self._copy: LearnerState | None = None
        self._publish()

    def run(self, stop: threading.Event) -> None:
        """Learns until `stop` is set or the feed has no more batches.

        Raises TrainingDiverged before bad parameters are published.
        """
        while not stop.is_set():
            self.waiting.start()
            unrolls = self._feed.take()
            self.waiting.stop()
            if not unrolls:
                break
            self.busy.start()
            with self._updating:
                self._update(unrolls)
            self.busy.stop()
            self._serve_snapshot()

    def _update(self, unrolls: list[Unroll]) -> None:
        self.intact = False
        batch = self._learner.assemble(unrolls)
        state, metrics, priorities = self._learner.update(self.state, batch)
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        jax.block_until_ready(state)
        require_finite(values, self.updates + 1)
        self.state, self.metrics, self.updates = state, values, int(state.updates)
        self.intact = True
        self._feed.learned(jax.device_get(priorities))
        self._publish()

    def request_snapshot(self) -> None:
        """Asks for a copy of the state: now, if the learner waits, else after its update."""
        self._wanted.set()
        self._serve_snapshot()

    def _serve_snapshot(self) -> None:
        """Copies the state if a copy is wanted and no update is under way; any thread may call it.

        It is called after every request and after every update. A request that finds an update under way
        is set before that update ends, so the learner sees it.
        """
        while self._wanted.is_set() and self._updating.acquire(blocking=False):
            try:
                if self._wanted.is_set() and self.intact:
                    self._copy = jax.device_get(self.state)
                    self._snapshot.set()
                self._wanted.clear()
            finally:
                self._updating.release()

    def take_snapshot(self) -> LearnerState | None:
        """Returns the copy on the host, once, when it is there."""
        if not self._snapshot.is_set():
            return None
        self._snapshot.clear()
        copy, self._copy = self._copy, None
        return copy

    def _publish(self) -> None:
        for inference in self._inferences:
            inference.publish(self.state.params, self.updates)
