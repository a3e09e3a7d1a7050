"""The learner thread: gradients on one device or on several, and the loop."""

from __future__ import annotations

import collections
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from seedbed.central.experience import Source
from seedbed.central.gate import Gate
from seedbed.central.inference import Inference
from seedbed.central.updater import Learned, Metrics, Updater
from seedbed.run.devices import Device
from seedbed.run.group import here, joined, placed
from seedbed.run.measures import Stopwatch
from seedbed.run.stacking import FrameTrajectory, stack_trajectory
from seedbed.run.update import (
    AXIS,
    count_transitions,
    minibatch_gradient,
    progress_of,
    require_finite,
    shuffled,
)
from seedbed.types import Agent, Array, LearnerState, Output, Tree

# Seconds for which the loop waits for a batch before it looks for pauses and for the gradients of others.
_WAIT_S = 0.02
# Bytes of a batch up to which a program takes it faster than `jax.device_put`, which copies no aligned array.
_SMALL = 1 << 18


class BatchResult(NamedTuple):
    """The outcome of a batch."""

    # Those of the batch, which are the lag for unrolls, and then those of each minibatch.
    metrics: list[Metrics]
    priorities: Tree  # [B] float32: new priorities of the batch's items; () outside replay
    transitions: Array  # int32: those of the batch


def mean_metrics(metrics: Sequence[Metrics]) -> dict[str, float]:
    """Returns the metrics of a `BatchResult`, brought to the host: means over the minibatches."""
    own, *found = metrics
    # On the host: on the device, a mean would be a program more.
    means = np.mean([each.values for each in found], axis=0)
    names, values = own.names + found[0].names, [*own.values.tolist(), *means.tolist()]
    return dict(zip(names, values, strict=True))


class Learner:
    """The compiled updates on one device, or data-parallel on several, also on those of other processes.

    Each process has its part of a batch then, and all update at once. For one thread at a time, but for
    `assemble`.
    """

    def __init__(
        self,
        agent: Agent,
        frame_stack: int,
        devices: Sequence[Device],
        key: Array,
        updater: Updater,
        gate: Gate | None = None,
    ) -> None:
        """Takes the agent, bound, and the run's key, from which each update derives its own.

        `gate` is that of the devices that act, too; without one, programs are started without waiting for
        those before. Nothing is compiled yet: the first update does that.
        """
        self.agent, self.updater, self._gate = agent, updater, gate
        self.devices = list(devices)
        self._own = [each for each in devices if each.process_index == jax.process_index()]
        mesh = Mesh(np.array(self.devices), (AXIS,))
        self.key = placed(key, NamedSharding(mesh, P()))
        axis = AXIS if len(self.devices) > 1 else None
        prepare = functools.partial(_prepare, agent, frame_stack)
        shuffle = functools.partial(shuffled, agent, axis=axis)
        gradient = functools.partial(minibatch_gradient, agent, axis=axis)
        whole, rows, envs = P(), P(None, AXIS), P(AXIS)
        batch_specs = FrameTrajectory(rows, rows, rows, envs, rows, envs)  # type: ignore[arg-type]
        self._divided, self._own_divided = (
            FrameTrajectory(*(NamedSharding(each, spec) for spec in batch_specs))  # type: ignore[arg-type]
            for each in (mesh, Mesh(np.array(self._own), (AXIS,)))
        )
        if axis is not None:
            prepare = jax.shard_map(
                prepare, mesh=mesh, in_specs=(whole, batch_specs, whole), out_specs=rows
            )
            shuffle = jax.shard_map(shuffle, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
            gradient = jax.shard_map(
                gradient,
                mesh=mesh,
                in_specs=(whole, rows, whole, whole),
                out_specs=(whole, Output(whole, whole, envs)),  # type: ignore[arg-type]
            )
        compiled = jax.jit if len(self._own) == len(self.devices) else joined().jit
        self._shuffle, self._step = compiled(shuffle), updater.compile(gradient)

        def opened(state: LearnerState, frames: FrameTrajectory, key: Array) -> tuple[_Begun, Tree]:
            prepare_key, key = jax.random.split(jax.random.fold_in(key, state.updates))
            begun = _begin(frames, state.updates, key, agent.epochs)
            return begun, prepare(state, frames, prepare_key)

        self._open = compiled(opened, out_shardings=(NamedSharding(mesh, whole), None))
        self._assemble = jax.jit(_assemble, out_shardings=SingleDeviceSharding(self._own[0]))

    def assemble(self, parts: Sequence[FrameTrajectory]) -> FrameTrajectory:
        """Joins the parts of a batch along B and divides it among the learner's devices. Does not wait.

        Of several processes, each gives its own part of the whole batch. A batch of one part that was
        assembled before stays as it is. Any thread may call this.
        """
        one, home, leaves = len(parts) == 1, self._own[0], jax.tree.leaves(parts)
        there = isinstance(leaves[0], jax.Array) and leaves[0].devices() == set(self.devices)
        if one and there:
            return parts[0]
        if sum(leaf.nbytes for leaf in leaves) < _SMALL:
            joined = self._assemble(parts)
        else:
            put = [jax.device_put(part, home) for part in parts]
            joined = put[0] if one else self._assemble(put)
        if len(self.devices) == 1:
            return joined
        joined = jax.device_put(joined, self._own_divided)
        if len(self._own) == len(self.devices):
            return joined
        return FrameTrajectory(
            *(
                jax.tree.map(functools.partial(self._with_others, sharding=sharding), part)
                for part, sharding in zip(joined, tuple[Any, ...](self._divided), strict=True)
            )
        )

    def _with_others(self, leaf: Array, sharding: NamedSharding) -> Array:
        """Returns an array of all processes, of which this one has a part that is on its devices."""
        axis, shape = sharding.spec.index(AXIS), list(leaf.shape)
        shape[axis] = shape[axis] * len(self.devices) // len(self._own)
        parts = [part.data for part in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)

    def update(self, frames: FrameTrajectory, progress: np.float32) -> BatchResult:
        """Learns from every epoch and minibatch of a batch, by the updater.

        `progress` is the result of `progress_of` before the batch. It waits for results only where there is a
        gate, or where the updater needs them. Call from the learner's thread.
        """
        updater, run = self.updater, self._run if self._gate is None else self._gate.run
        updater.begin(progress)
        begun, batch = run("prepare", self._open, updater.pull(), frames, self.key)
        found: list[Learned] = []
        for order_key, loss_key in begun.epochs:
            order = batch
            if self.agent.minibatches > 1:
                order = run("shuffle", self._shuffle, batch, order_key)
            for index in range(self.agent.minibatches):
                learned, _ = run("minibatch", self._learn, order, loss_key, np.int32(index))
                found.append(learned)
        metrics = [begun.metrics, *(each.metrics for each in found)]
        return BatchResult(metrics, found[-1].priorities, begun.transitions)

    def _run(self, name: str, program: Callable[..., Any], *operands: Any) -> Any:
        """Starts a program of an update, as `Gate.run` does where there is a gate."""
        del name
        return program(*operands)

    def _learn(self, batch: Tree, key: Array, index: np.int32) -> tuple[Learned, Array]:
        """Learns from a minibatch; returns also a count that a gate may wait for."""
        return self._step(batch, key, index), self.updater.state.updates


class _Begun(NamedTuple):
    """The numbers of a batch, and the keys of what is done with it."""

    # The mean and the largest lag: the updates between choosing an action and learning from it. With replay
    # there are none.
    metrics: Metrics
    transitions: Array  # int32
    epochs: list[tuple[Array, Array]]  # the keys of each one's order, and of its losses


def _begin(frames: FrameTrajectory, updates: Array, key: Array, epochs: int) -> _Begun:
    """Derives the keys of epochs, and counts."""
    keys = [tuple(jax.random.split(jax.random.fold_in(key, epoch))) for epoch in range(epochs)]
    rows = jax.tree.leaves(frames.action)[0].shape[0]
    transitions = count_transitions(frames.timesteps.first[-rows:])
    metrics = {}
    for version in jax.tree.leaves(frames.params_version):
        lag = updates - version
        metrics = {"lag_mean": jnp.mean(lag.astype(jnp.float32)), "lag_max": jnp.max(lag)}
    return _Begun(Metrics.of(metrics), transitions, keys)


def _prepare(
    agent: Agent,
    frame_stack: int,
    state: LearnerState,
    frames: FrameTrajectory,
    key: Array,
) -> Tree:
    return agent.prepare(state, stack_trajectory(frames, frame_stack), key)


def _assemble(parts: Sequence[FrameTrajectory]) -> FrameTrajectory:
    def joined(axis: int, name: str) -> Tree:
        leaves = [getattr(part, name) for part in parts]
        return jax.tree.map(lambda *each: jnp.concatenate(each, axis), *leaves)

    return FrameTrajectory(
        timesteps=joined(1, "timesteps"),
        action=joined(1, "action"),
        extras=joined(1, "extras"),
        actor_state=joined(0, "actor_state"),
        params_version=joined(1, "params_version"),
        importance=joined(0, "importance"),
    )


class LearnerLoop:
    """The loop that learns: it runs one update at a time, and publishes the updater's parameters after it.

    Those are a `LocalUpdater`'s of the finished update, or what a learner of a parameter server pulled last.
    One thread calls `run`; any thread may call the other methods and read the figures.
    """

    def __init__(
        self,
        learner: Learner,
        inferences: Sequence[Inference],
        source: Source,
        mark: Callable[[], int] = lambda: 0,
    ) -> None:
        """Publishes the updater's parameters at once.

        `mark` notes what belongs to a snapshot, and returns the transitions that count by then.
        """
        self._mark = mark
        self._learner, self._inferences, self._source = learner, inferences, source
        self._updater = learner.updater
        self.updates = int(self._updater.state.updates)
        # False during an update and after one that failed, when parts of the state may be donated.
        self.intact = True
        # The time of updates, and of waiting for batches.
        self.busy, self.waiting = Stopwatch(), Stopwatch()
        self.starved_since_s = math.inf  # on the monotonic clock; inf while batches come
        self.metrics: dict[str, float] = {}
        self._pausing, self._paused = threading.Event(), threading.Event()
        # Whether a snapshot is wanted, and a lock that is held during updates and copies of the state.
        self._wanted, self._updating = threading.Event(), threading.Lock()
        # The newest snapshot, with the transitions that counted then.
        self._copies = collections.deque[tuple[LearnerState, int]](maxlen=1)
        self._publish()

    def run(self, stop: threading.Event) -> None:
        """Learns until `stop` is set or the source has no more batches.

        The thread that calls this is the learner thread. Raises TrainingDiverged if a metric of an update is
        not finite; the parameters of that update are not published.
        """
        source = self._source
        while not (stop.is_set() or source.over):
            if self._pausing.is_set():
                self._updater.settle()
                self._paused.set()
                stop.wait(_WAIT_S)
                continue
            self._paused.clear()
            # Held from then on when the others of a learner are told to update, too.
            with self._updating:
                self.waiting.start()
                parts = source.take(_WAIT_S)
                self.waiting.stop()
                if parts:
                    self.starved_since_s = math.inf
                    self.busy.start()
                    self._update(parts)
                    self.busy.stop()
            if not parts:
                self.starved_since_s = min(self.starved_since_s, time.monotonic())
                if self._updater.refresh(progress_of(source.env_steps, source.steps)):
                    self.updates = int(self._updater.state.updates)
                    self._publish()
            self._serve_snapshot()

    def pause(self) -> None:
        """Lets the loop rest before its next batch; `paused` says when it does."""
        self._pausing.set()

    def resume(self) -> None:
        """Lets the loop go on."""
        self._pausing.clear()

    @property
    def paused(self) -> bool:
        """Whether the loop rests, and every gradient was applied, or has its answer."""
        return self._pausing.is_set() and self._paused.is_set()

    def _update(self, parts: list[FrameTrajectory]) -> None:
        self.intact = False
        source, batch = self._source, self._learner.assemble(parts)
        progress = progress_of(source.env_steps, source.steps)
        learned, state = self._learner.update(batch, progress), self._updater.state
        found, transitions, priorities, updates = jax.device_get(
            here((learned.metrics, learned.transitions, learned.priorities, state.updates))
        )
        values = mean_metrics(found)
        jax.block_until_ready(state)
        require_finite(values, self.updates + 1)
        self.metrics, self.updates, self.intact = values, int(updates), True
        source.learned(int(transitions), values, priorities)
        self._publish()

    def request_snapshot(self) -> None:
        """Asks for a copy of the state: now, or after the update or the wait under way. Any thread may."""
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

        What the source saves for a checkpoint of so many transitions is as it is now, too.
        Any thread may call this while no update is under way, and `intact` is true.
        """
        return jax.device_get(here(self._updater.state)), self._mark()

    def take_snapshot(self) -> tuple[LearnerState, int] | None:
        """Returns the newest requested copy and its transitions, once; None if there is none yet.

        One thread at a time may call this.
        """
        return self._copies.popleft() if self._copies else None

    def _publish(self) -> None:
        for inference in self._inferences:
            inference.publish(here(self._updater.state.params), self.updates)
