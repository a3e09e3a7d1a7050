"""The two loops of central inference: acting in the inference thread, learning in the learner thread."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from seedbed.actors.pool import ActorPool
from seedbed.central.inference import Acted, Inference, Unroll
from seedbed.central.learner import Learner
from seedbed.central.shards import Call, Shard
from seedbed.run.clocks import Stopwatch
from seedbed.run.metrics import EpisodeStatistics
from seedbed.run.update import progress_of, require_finite
from seedbed.types import LearnerState, Timestep, Tree


class Feed(Protocol):
    """A buffer between acting and learning, from which the learner takes batches."""

    env_steps: int  # transitions of the whole run that count so far; one thread writes it
    steps: int  # transitions for which the run trains

    def take(self) -> list[Unroll]:
        """Waits for a batch; returns [] if the feed has ended or closed. Call from the learner thread."""
        ...

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Reports that the batch taken last has been learned from, with its transitions and metrics.

        `priorities` are the new ones of its items `[B]`, or () if there are none. Call from the learner
        thread only.
        """
        ...

    def metrics(self) -> dict[str, Any]:
        """Returns figures about the feed for a line of metrics. Any thread may call this."""
        ...

    def seconds(self) -> dict[str, float]:
        """Returns seconds since the start, by name; reports show their shares. Any thread may call this."""
        ...

    def take_notices(self) -> list[str]:
        """Returns messages for the user, each once. One thread at a time may call this."""
        ...

    def close(self) -> None:
        """Wakes every thread that waits; nothing passes afterwards. Any thread may call this."""
        ...


class Recorder(Protocol):
    """A store for the timesteps and actions of groups. One thread, the appending thread, calls it."""

    env_steps: int  # transitions of the whole run that were appended so far
    steps: int  # transitions for which the run trains
    waited: Stopwatch  # runs while `append` waits for room

    def restart(self, group: int) -> None:
        """Starts new streams for a group whose actor was restarted. Call from the appending thread only."""
        ...

    def append(self, group: int, timestep: Timestep, acted: Acted) -> bool:
        """Waits for room and adds a step `[n, ...]`; returns whether to go on. For the appending thread."""
        ...

    def finish(self) -> None:
        """Ends all streams: nothing is appended afterwards. Call from the appending thread only."""
        ...


class UnrollQueue:
    """A bounded queue of unrolls that blocks at either end, and drops nothing until it ends or is closed.

    It ends when `steps` transitions have been learned from. Only what was learned from counts, so the
    unrolls that are dropped then do not.
    """

    def __init__(
        self, capacity: int, per_batch: int, most_lag: int, env_steps: int, steps: int
    ) -> None:
        """Makes an empty queue for at most `capacity` unrolls, of which `per_batch` make a batch.

        A batch with a lag above `most_lag` updates raises a notice. `env_steps` of the run's `steps`
        transitions count already.
        """
        self._capacity, self._per_batch = capacity, per_batch
        self._most_lag, self._notices = most_lag, collections.deque[str](maxlen=1)
        self.env_steps, self.steps = env_steps, steps
        self._items: collections.deque[Unroll] = collections.deque()
        self._condition = threading.Condition()
        self._closed = False
        self.waited = Stopwatch()  # runs while `put` waits for room

    def put(self, unroll: Unroll) -> bool:
        """Waits for room; returns False if the queue was closed instead. Call from the inference thread."""
        with self._condition:
            self.waited.start()
            self._condition.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            self.waited.stop()
            if not self._closed:
                self._items.append(unroll)
                self._condition.notify_all()
            return not self._closed

    def take(self) -> list[Unroll]:
        """Waits for a batch; returns [] if the queue has ended or closed. Call from the learner thread."""
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
        """Counts the last batch's transitions; notes a too large lag. Call from the learner thread only."""
        del priorities
        self.env_steps += transitions
        lag = int(metrics["lag_max"])
        if lag > self._most_lag:
            self._notices.append(
                f"a batch was learned from at a lag of {lag} updates, of which the queue explains "
                f"{self._most_lag}: an actor is much slower than the others"
            )
            # There is another notice only if the lag has doubled.
            self._most_lag = 2 * lag

    def metrics(self) -> dict[str, Any]:
        """Returns the number of queued unrolls, and None for the lags, which the learner's metrics replace.

        Any thread may call this.
        """
        return {"queued_unrolls": len(self._items), "lag_mean": None, "lag_max": None}

    def seconds(self) -> dict[str, float]:
        """Returns an empty dict: nothing but `put` takes time here. Any thread may call this."""
        return {}

    def take_notices(self) -> list[str]:
        """Returns the newest notice about a too large lag, once. One thread at a time may call this."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def finish(self) -> None:
        """Does nothing: the queue ends when its steps have been learned from. Any thread may call this."""

    def close(self) -> None:
        """Wakes every thread that waits; nothing passes afterwards. Any thread may call this."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


@dataclasses.dataclass
class InferenceCounters:
    """Sums over the run of an inference loop. The inference thread writes them, and any thread may read."""

    calls: int = 0  # inference calls
    rows: int = 0  # environments that the calls acted on, without padding
    busy_s: float = 0.0  # seconds, without gathering timesteps and waiting for the sink


class InferenceLoop:
    """The loop that acts: it sends actions to every group, and hands on unrolls or steps to the sink."""

    def __init__(
        self,
        pool: ActorPool,
        inferences: Sequence[Inference],
        sink: UnrollQueue | Recorder,
        episodes: EpisodeStatistics,
        deadline_s: float,
    ) -> None:
        """Divides the pool's groups among the devices in order; the pool must know its spec.

        `sink` is a queue that takes unrolls, or a recorder that takes every step. A call waits at most
        `deadline_s` seconds for more groups. `episodes` is written by the inference thread.
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
        # By group, the incarnation of the actor of the last step that went to replay.
        self._recorded = [-1] * pool.num_groups
        # Calls that were started and are not finished, the oldest first.
        self._calls: collections.deque[Call] = collections.deque()
        # Completed unrolls that are to be handed on.
        self._unrolls: collections.deque[Unroll] = collections.deque()

    def run(self, stop: threading.Event) -> None:
        """Runs until the sink has its steps or is closed, or `stop` is set; then calls `finish` of the sink.

        The thread that calls this is the inference thread. Raises SeedbedError if the actors fail for good.
        """
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
        """The seconds since the start in which acting waited for the learner. Any thread may read it."""
        return self._sink.waited.read()

    def _gather(self) -> None:
        """Receives timesteps; unless a call is in flight, waits for a first group, and then for others.

        It waits at most 0.1 s for the first group, and at most `deadline_s` for the others.
        """
        for shard in self._shards:
            shard.renew()
        idle = not self._calls and not any(shard.ready for shard in self._shards)
        if idle and not any(shard.inference.acting_groups for shard in self._shards):
            # The last device is also the last one to get newer parameters.
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
        """Waits for the actions of a call, and sends them to their groups."""
        call.acted = jax.tree.map(np.asarray, call.acted)
        action = call.acted.action
        call.shard.in_flight -= 1
        for position, group in enumerate(call.groups):
            slot = self._pool.slots[group]
            if slot.incarnation != call.incarnations[position]:
                # The actor died meanwhile, and its successor has not asked for an action yet.
                continue
            jax.tree.map(lambda to, leaf, at=position: np.copyto(to, leaf[at]), slot.action, action)
            self._pool.reply(group)

    def _hand_on(self, call: Call | None) -> bool:
        """Waits for the sink to take all unrolls, or the call's steps; returns False if it wants no more."""
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
    """The loop that learns: it runs one update at a time, and publishes parameters of finished updates."""

    def __init__(
        self,
        learner: Learner,
        state: LearnerState,
        inferences: Sequence[Inference],
        feed: Feed,
    ) -> None:
        """Copies the initial state to the learner's devices, and publishes its parameters at once."""
        self._learner, self._inferences, self._feed = learner, inferences, feed
        self.state = learner.place(state)
        self.updates = int(state.updates)
        # False during an update and after one that failed, when parts of the state may be donated.
        self.intact = True
        # The time of updates, and of waiting for batches.
        self.busy, self.waiting = Stopwatch(), Stopwatch()
        self.metrics: dict[str, float] = {}
        # Whether a snapshot is wanted, and a lock that is held during updates and copies of the state.
        self._wanted, self._updating = threading.Event(), threading.Lock()
        # The newest snapshot, with the transitions that counted then.
        self._copies = collections.deque[tuple[LearnerState, int]](maxlen=1)
        self._publish()

    def run(self, stop: threading.Event) -> None:
        """Learns until `stop` is set or the feed has no more batches.

        The thread that calls this is the learner thread. Raises TrainingDiverged if a metric of an update is
        not finite; the parameters of that update are not published.
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
        """Asks for a copy of the state: now, or after the update under way. Any thread may call this."""
        self._wanted.set()
        self._serve_snapshot()

    def _serve_snapshot(self) -> None:
        """Copies the state if a copy is wanted and no update is under way. Any thread may call this.

        It is called after every request and after every update. If a request comes during an update, the
        learner thread sees it when the update has ended. After a failed update, no copy is made.
        """
        while self._wanted.is_set() and self._updating.acquire(blocking=False):
            try:
                # Cleared before the copy, so that a request during the copy gets another one.
                self._wanted.clear()
                if self.intact:
                    self._copies.append(self.snapshot())
            finally:
                self._updating.release()

    def snapshot(self) -> tuple[LearnerState, int]:
        """Returns a copy of the state on the host, and the transitions that count by now.

        Any thread may call this while no update is under way, and `intact` is true.
        """
        return jax.device_get(self.state), self._feed.env_steps

    def take_snapshot(self) -> tuple[LearnerState, int] | None:
        """Returns the newest requested copy and its transitions, once; None if there is none yet.

        One thread at a time may call this.
        """
        return self._copies.popleft() if self._copies else None

    def _publish(self) -> None:
        for inference in self._inferences:
            inference.publish(self.state.params, self.updates)
