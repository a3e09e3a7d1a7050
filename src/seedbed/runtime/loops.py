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
from seedbed.runtime.learning import Learner, progress_of
from seedbed.runtime.metrics import EpisodeStatistics
from seedbed.runtime.reporting import Stopwatch, require_finite
from seedbed.runtime.shards import Call, Shard
from seedbed.transport.pool import ActorPool
from seedbed.types import LearnerState, Timestep, Tree


class Feed(Protocol):
    """Where experience goes and batches come from; closing it wakes every thread that waits."""

    env_steps: int  # transitions of the whole run that count so far; one thread writes it
    steps: int  # transitions for which the run trains

    def take(self) -> list[Unroll]:
        """Waits for what makes a batch; returns none if the feed was closed or has ended instead."""
        ...

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Takes note that the batch taken last was learned from.

        `priorities` `[B]` are those of its items, if any. Call from the learner's thread.
        """
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
        """Wakes every thread that waits; nothing more passes."""
        ...


class Recorder(Protocol):
    """Takes what a group saw and did, step by step."""

    env_steps: int  # transitions of the whole run that were appended so far
    steps: int  # transitions for which the run trains
    waited: Stopwatch  # runs while `append` waits for room

    def restart(self, group: int) -> None:
        """Ends the streams of a group whose actor was restarted."""
        ...

    def append(self, group: int, timestep: Timestep, acted: Acted) -> bool:
        """Waits for room; leaves are `[n, ...]`. Returns whether more steps are wanted."""
        ...

    def finish(self) -> None:
        """Ends the stream: nothing more will be appended. Call from the appending thread."""
        ...


class UnrollQueue:
    """A bounded queue of unrolls that blocks at either end and drops nothing until it ends or is closed.

    A transition counts when it has been learned from, so what is dropped then does not count. The queue
    ends when `steps` have been learned from.
    """

    def __init__(
        self, capacity: int, per_batch: int, most_lag: int, env_steps: int, steps: int
    ) -> None:
        """Holds at most `capacity` unrolls, `per_batch` of which make a batch.

        A batch with a lag above `most_lag` is told of. `env_steps` are done before, of `steps`.
        """
        self._capacity, self._per_batch = capacity, per_batch
        self._most_lag, self._notices = most_lag, collections.deque[str](maxlen=1)
        self.env_steps, self.steps = env_steps, steps
        self._items: collections.deque[Unroll] = collections.deque()
        self._condition = threading.Condition()
        self._closed = False
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
            self._condition.wait_for(lambda: self._ended or len(self._items) >= self._per_batch)
            if self._ended:
                return []
            taken = [self._items.popleft() for _ in range(self._per_batch)]
            self._condition.notify_all()
            return taken

    @property
    def _ended(self) -> bool:
        return self._closed or self.env_steps >= self.steps

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Counts the transitions of the batch taken last; says so where it was older than it may be."""
        del priorities
        self.env_steps += transitions
        lag = int(metrics["lag_max"])
        if lag > self._most_lag:
            self._notices.append(
                f"a batch was learned from at a lag of {lag} updates, of which the queue explains "
                f"{self._most_lag}: an actor is much slower than the others"
            )
            self._most_lag = 2 * lag  # said again only where it has become twice as bad

    def metrics(self) -> dict[str, Any]:
        """How many unrolls wait; how old those learned from were, once one was."""
        return {"queued_unrolls": len(self._items), "lag_mean": None, "lag_max": None}

    def seconds(self) -> dict[str, float]:
        """Returns an empty dict: nothing but `put` takes time here."""
        return {}

    def take_notices(self) -> list[str]:
        """Returns, once, that a batch was older than it may be."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def finish(self) -> None:
        """Does nothing: the queue ends by itself, when its steps have been learned from."""

    def close(self) -> None:
        """Wakes every thread that waits; nothing more passes."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


@dataclasses.dataclass
class InferenceCounters:
    """Sums since the start of the process; read by the thread that reports."""

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
    ) -> None:
        """Divides the pool's groups among the devices in order; `sink` takes unrolls, or every step."""
        self._pool, self._sink, self._deadline_s = pool, sink, deadline_s
        self.episodes = episodes
        self.counters = InferenceCounters()
        self._shards: list[Shard] = []
        first = 0
        for inference in inferences:
            self._shards.append(Shard(inference, first, pool.slots[first].timestep))
            first += inference.num_groups
        self._shard_of = [s for s in self._shards for _ in range(s.inference.num_groups)]
        # The incarnation of the step that went to replay last.
        self._recorded = [-1] * pool.num_groups
        self._calls: collections.deque[Call] = collections.deque()
        self._unrolls: collections.deque[Unroll] = collections.deque()  # to be handed on

    def run(self, stop: threading.Event) -> None:
        """Serves until the sink has its steps or is closed, or `stop` is set; then ends its stream."""
        sink = self._sink
        while not stop.is_set() and sink.env_steps < sink.steps:
            self._gather()
            gathered = time.perf_counter()
            able = [s for s in self._shards if s.ready and s.in_flight < s.depth]
            self._calls.extend(self._start(shard) for shard in able)
            full = any(shard.in_flight == shard.depth for shard in self._shards)
            call = self._calls.popleft() if self._calls and (full or not able) else None
            if call is not None:
                self._finish(call)
            blocked_s = self.blocked_s
            if not self._hand_on(call):
                break
            blocked_s = self.blocked_s - blocked_s
            self.counters.busy_s += time.perf_counter() - gathered - blocked_s
        sink.finish()

    @property
    def blocked_s(self) -> float:
        """Seconds since the start in which acting waited for the learner; for any thread."""
        return self._sink.waited.read()

    def _gather(self) -> None:
        """Waits for a group, then a deadline for others, unless a call is in flight."""
        for shard in self._shards:
            shard.renew()
        idle = not self._calls and not any(shard.ready for shard in self._shards)
        if idle and not any(shard.inference.acting_groups for shard in self._shards):
            # Of the devices, this one is the last to get newer parameters.
            self._shards[-1].inference.wait_for_newer(0.1)
            idle = False
        self._receive(0.1 if idle else 0.0)
        if self._calls or not self._deadline_s:
            return
        until = time.perf_counter() + self._deadline_s
        while any(0 < len(s.ready) < s.inference.acting_groups for s in self._shards):
            left = until - time.perf_counter()
            if left <= 0:
                return
            self._receive(left)

    def _receive(self, timeout_s: float) -> None:
        for group in self._pool.poll(timeout_s):
            shard, slot = self._shard_of[group], self._pool.slots[group]
            if shard.begins_life(group, slot):
                self.episodes.reset(group)
            self.episodes.record(group, slot.timestep)
            if (unroll := shard.arrive(group, slot)) is not None:
                self._unrolls.append(unroll)

    def _start(self, shard: Shard) -> Call:
        call = shard.start(self._pool.slots)
        self.counters.calls += 1
        self.counters.rows += len(call.groups) * shard.inference.group_size
        return call

    def _finish(self, call: Call) -> None:
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

    def _hand_on(self, call: Call | None) -> bool:
        """Waits for room for what is complete; returns False if the sink wants no more."""
        if isinstance(self._sink, UnrollQueue):
            while self._unrolls and self._sink.put(self._unrolls[0]):
                self._unrolls.popleft()
            return not self._unrolls
        if call is None:
            return True
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
        self._wanted, self._updating = threading.Event(), threading.Lock()
        self._copies = collections.deque[tuple[LearnerState, int]](maxlen=1)  # the newest asked for
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
        feed, batch = self._feed, self._learner.assemble(unrolls)
        progress = progress_of(feed.env_steps, feed.steps)
        update, transitions = self._learner.update(self.state, batch, progress)
        found, updates, transitions = jax.device_get(
            (update.metrics, update.state.updates, transitions)
        )
        values = {name: float(value) for name, value in found.items()}
        jax.block_until_ready(update.state)
        require_finite(values, self.updates + 1)
        self.state, self.metrics, self.updates = update.state, values, int(updates)
        self.intact = True
        feed.learned(int(transitions), values, jax.device_get(update.priorities))
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
                # Before the copy: a request that comes meanwhile is served once more.
                self._wanted.clear()
                if self.intact:
                    self._copies.append(self.snapshot())
            finally:
                self._updating.release()

    def snapshot(self) -> tuple[LearnerState, int]:
        """Copies the state to the host, with the transitions that count by now; not during an update."""
        return jax.device_get(self.state), self._feed.env_steps

    def take_snapshot(self) -> tuple[LearnerState, int] | None:
        """Returns the copy and its transitions, once, when they are there."""
        return self._copies.popleft() if self._copies else None

    def _publish(self) -> None:
        for inference in self._inferences:
            inference.publish(self.state.params, self.updates)
