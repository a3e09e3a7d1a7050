"""Microbenchmarks of what a learner with actors does: each part alone, in the run's own code.

The inference thread is fed by a pool whose timesteps were played before, the learner thread by one batch that
comes again and again. Replay is filled by the former and sealed and drawn from between its turns.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seedbed.central.acting import InferenceLoop
from seedbed.central.experience import Share, Sink
from seedbed.central.inference import ActOutput, Inference, act_output
from seedbed.central.learning import Learner, LearnerLoop
from seedbed.central.replaying import ReplayFeed, trajectory_of
from seedbed.central.unrolls import UnrollQueue, UnrollSink
from seedbed.central.updater import Gradient, Learned, LocalUpdater, Step, Updater
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.machine import usable_cores
from seedbed.plan.costs import CallCost
from seedbed.plan.engine import NOTHING, Company, Cost
from seedbed.plan.played import APART, PLAYED, PlayedPool, clocks
from seedbed.plan.stepping import REST_S
from seedbed.run.devices import Device
from seedbed.run.folder import RunFolder
from seedbed.run.measures import EpisodeStatistics
from seedbed.run.options import CentralConfig
from seedbed.run.stacking import FrameTrajectory, stacked_spec
from seedbed.types import (
    Agent,
    Array,
    LearnerState,
    Timestep,
    Tree,
    bind,
    learns_from_replay,
    on_policy,
)

GROUPS = 8
"""Groups for which acting is measured."""
_FEWEST = 8  # measurements of a part, whatever they take
_UPDATES = 5  # beside acting, whatever they take
_FILL_S = 20.0  # seconds for which replay is filled, at most


def cost_of(spent: Sequence[np.ndarray], device: Device) -> Cost:
    """Returns the cost of a part of which each row is a measurement: seconds `[2]` of CPU time and time.

    Other programs lengthen the time more than the CPU time: its lower quarter counts, and the upper one of
    the cores. What a CPU's time lacks of the time is an accelerator's.
    """
    rows = np.array(spent)
    cpu_s = float(np.median(rows[:, 0]))
    if device.platform != "cpu":
        wall_s = float(np.quantile(rows[:, 1], 0.25))
        return Cost(cpu_s, 1.0, max(0.0, wall_s - cpu_s))
    width = float(np.quantile(rows[:, 0] / rows[:, 1], 0.75))
    return Cost(cpu_s, min(usable_cores(), max(1.0, width)))


def repeated(call: Callable[[], Any], seconds: float, rest_s: float = 0.0) -> list[np.ndarray]:
    """Returns the costs of calls, each after a rest, after one that does not count."""
    call()
    spent, until = list[np.ndarray](), time.perf_counter() + seconds
    while len(spent) < _FEWEST or time.perf_counter() < until:
        time.sleep(rest_s)
        begun = clocks()
        call()
        spent.append(clocks() - begun)
    return spent


class TimedSink:
    """A sink whose time is taken apart, and which is done after a while; a `central.experience.Sink`."""

    def __init__(self, sink: Sink) -> None:
        self.sink, self.waited = sink, sink.waited
        self.until_s, self.turns = 0.0, 0
        self.spent: list[np.ndarray] = []

    @property
    def done(self) -> bool:
        """Whether there were enough turns."""
        return time.perf_counter() > self.until_s and len(self.spent) > _FEWEST

    def arrive(self, group: int, life: int, timestep: Timestep) -> bool:
        """Passes a timestep on."""
        return self.sink.arrive(group, life, timestep)

    def add(
        self, groups: Sequence[int], lives: Sequence[int], timestep: Timestep, output: ActOutput
    ) -> None:
        """Adds steps, and takes the time."""
        begun = clocks()
        self.sink.add(groups, lives, timestep, output)
        self.spent.append(clocks() - begun)

    def flush(self) -> None:
        """Hands on what is complete."""
        self.sink.flush()

    def renew(self, groups: Sequence[int]) -> None:
        """Passes it on."""
        self.sink.renew(groups)

    def finish(self) -> None:
        """Does nothing: the streams go on in the next measurement."""


class SameBatch:
    """A source that gives the same batch again and again, and reads the clocks before each."""

    def __init__(self, parts: list[FrameTrajectory], seconds: float, rest_s: float = 0.0) -> None:
        self._parts, self._seconds, self._rest_s = parts, seconds, rest_s
        self._read: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # when an update ends, and the next begins
        self._until_s = float("inf")
        self.env_steps, self.steps = 0, 1
        self.priorities: Tree = ()

    @property
    def spent(self) -> list[np.ndarray]:
        """The costs of updates, but for the first: it compiles."""
        begun, ended = self._read[1:-1], self._read[2:]
        return [end[0] - begin[1] for begin, end in zip(begun, ended, strict=True)]

    @property
    def over(self) -> bool:
        """Whether there were enough updates."""
        return time.perf_counter() > self._until_s and len(self._read) > _FEWEST

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        """Returns the batch."""
        del timeout_s
        ended = clocks()
        time.sleep(self._rest_s)
        self._read.append((ended, clocks()))
        if len(self._read) == 2:
            self._until_s = time.perf_counter() + self._seconds
        return [] if self.over else self._parts

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Keeps the priorities."""
        del transitions, metrics
        self.priorities = priorities

    def close(self) -> None:
        """Wakes nobody: no thread waits for this source."""


class NoShards:
    """An updater that brings gradients to the host and leaves the parameters as they are."""

    def __init__(self, state: LearnerState) -> None:
        self.state = state

    def begin(self, progress: np.float32) -> None:
        """Ignores the progress: no schedule changes a cost."""

    def pull(self) -> LearnerState:
        """Returns the learner state without the optimizer's."""
        return self.state._replace(optimizer_state=())

    def compile(self, gradient: Gradient) -> Step:
        """Returns what computes a gradient, and waits for it."""

        def learned(*operands: Any) -> tuple[Tree, Learned]:
            grads, output = gradient(*operands)
            return grads, Learned.of(output)

        program = jax.jit(learned)

        def step(batch: Tree, key: Array, index: np.int32) -> Learned:
            grads, learned = program(self.pull(), batch, key, index)
            jax.tree.map(np.asarray, grads)
            return learned

        return step

    def settle(self) -> None:
        """Returns at once: a step has waited."""

    def refresh(self, progress: np.float32) -> bool:
        """Returns False: nobody else changes the parameters."""
        return False


class Bench:
    """The parts of a learner, each measured alone. For one thread."""

    def __init__(
        self, env: HostEnvConfig, agent: Agent, size: int, folder: Path, seconds: float
    ) -> None:
        """Makes all for groups of `size` environments; `seconds` is what a measurement takes about."""
        experience = on_policy(agent)
        self.pool = PlayedPool(env, GROUPS, size)
        self.agent = bind(agent, stacked_spec(self.pool.spec, env.frame_stack))
        self.device, self._stack, self._seconds = jax.devices()[0], env.frame_stack, seconds
        spec, every = self.pool.spec, np.arange(self.pool.num_envs).reshape(GROUPS, size)
        self.state = self.agent.init(jax.random.key(0))
        self.inference = Inference(
            self.agent, spec, self._stack, self.device, every, self.pool.num_envs, jax.random.key(0)
        )
        self.inference.publish(self.state.params, 0)
        self.inference.compile(spec)
        self._sealing_s = self._between_s = 0.0  # CPU seconds of this thread so far
        self._batch: list[FrameTrajectory] = []
        self._learner: Learner | None = None
        self.feed: ReplayFeed | None = None
        if learns_from_replay(self.agent):
            # In memory: files are written while nothing waits for them.
            config = CentralConfig(save_replay=False, steps=1 << 60)
            run = RunFolder(folder)
            share = Share.of(self.agent, config, run, 0)
            self.feed = ReplayFeed(self.agent, self.pool, self._stack, share)
            sink: Sink = self.feed
        else:
            assert experience is not None
            self._queue = UnrollQueue(1 << 60, experience.batch // size, 1 << 60, 0, 1 << 60)
            output = act_output(self.agent, spec, self._stack, size)
            # Acting is measured alone: it must not wait for parameters that nobody publishes.
            experience = dataclasses.replace(experience, synchronous=False)
            sink = UnrollSink(self._queue, experience, spec, self._stack, output, GROUPS)
        self.sink = TimedSink(sink)
        self.pool.between = self._between

    def _between(self) -> None:
        """Does what other threads do: seals, draws what is owed, and empties the queue."""
        begun_s = time.thread_time()
        if self.feed is None:
            self._batch = self._queue.take(0.0) or self._batch
        else:
            replay, batch = self.feed.replay, self.agent.experience.batch
            sealing_s = time.thread_time()
            replay.seal_pending()
            self._sealing_s += time.thread_time() - sealing_s
            while replay.can_sample(batch):
                replay.sample(batch)
        self._between_s += time.thread_time() - begun_s

    def calls(self) -> list[CallCost]:
        """Measures turns of the inference thread with each compiled number of groups."""
        found, self.pool.rest_s = [], REST_S
        for groups in self.inference.sizes:
            self.pool.wished, self.pool.spent, self.sink.spent = groups, [], []
            self._turns(self._seconds)
            turn = statistics.median(float(each[0]) for each in self.pool.spent[1:])
            keep = statistics.median(float(each[0]) for each in self.sink.spent[1:])
            program = self._program(groups)
            # The rest of a turn is Python, which uses one core.
            host = max(0.0, turn - keep - program.cpu_s)
            found.append(CallCost(groups, Cost(host), program, Cost(keep)))
        self.pool.rest_s = 0.0  # beside other threads it is their rests that count
        return found

    def _turns(self, seconds: float) -> None:
        pool, episodes = self.pool, EpisodeStatistics(self.pool.num_groups, self.pool.group_size)
        self.sink.until_s = time.perf_counter() + seconds
        InferenceLoop(pool, [self.inference], self.sink, episodes).run(threading.Event())

    def _program(self, groups: int) -> Cost:
        rows = [self.pool.peer.steps[APART * group % PLAYED] for group in range(groups)]
        shape = self.pool.slots[0].timestep
        leaves = [np.stack(each) for each in zip(*rows, strict=True)]
        timestep = jax.tree.unflatten(jax.tree.structure(shape), leaves)

        def act() -> None:
            output = self.inference.act(timestep, list(range(groups)))
            jax.tree.map(np.asarray, output.action)

        return cost_of(repeated(act, 0.5 * self._seconds, REST_S), self.device)

    def seal(self) -> Cost:
        """Returns what sealing costs for one step of a group. Call `calls` first."""
        if self.feed is None:
            return NOTHING
        return Cost(self._sealing_s / max(1, sum(slot.step for slot in self.pool.slots)))

    def batch(self) -> list[FrameTrajectory]:
        """Returns a batch, for which it acts as long as need be."""
        self.pool.wished = self.pool.num_groups
        until = time.perf_counter() + _FILL_S
        while self.feed is None and not self._batch:
            self._turns(0.1)
        while self.feed is not None and not self.feed.replay.items:
            self._turns(0.1)
            if time.perf_counter() > until:
                break
        if self.feed is None:
            return self._batch
        return [trajectory_of(self.feed.replay.sample(self.agent.experience.batch))]

    def draw(self, priorities: Tree) -> Cost:
        """Returns what a batch of replay costs, with the new priorities of its items."""
        if self.feed is None:
            return NOTHING
        replay, batch = self.feed.replay, self.agent.experience.batch
        buffers = replay.make_sample(batch)

        def once() -> None:
            sample = replay.sample(batch, out=buffers)
            if not isinstance(priorities, tuple):
                replay.update_priorities(sample.slots, sample.generations, priorities)

        return cost_of(repeated(once, 0.5 * self._seconds), self.device)

    def update(self, parts: list[FrameTrajectory], sharded: bool) -> tuple[Cost, Tree]:
        """Returns the cost of an update in the learner's loop, and the priorities that it has given.

        With `sharded`, it ends with the gradient on the host.
        """
        if self._learner is None:
            updater: Updater = LocalUpdater(self.agent, self.state, [self.device])
            if sharded:
                updater = NoShards(jax.device_put(self.state, self.device))
            self._learner = Learner(
                self.agent, self._stack, [self.device], jax.random.key(1), updater
            )
        learner = self._learner
        again = SameBatch(parts, 2 * self._seconds, REST_S)
        LearnerLoop(learner, [self.inference], again).run(threading.Event())
        self._parts = parts
        self._updating = np.median(again.spent, axis=0)
        return cost_of(again.spent, self.device), again.priorities

    def company(self) -> Company:
        """Measures turns of the inference thread beside updates of the learner thread. Call `update` first.

        What they lose beyond what the cores explain is lost to Python's lock, which threads of a process
        share, and to the caches.
        """
        each_s, turn_s = self._turning(lambda: True)
        again = SameBatch(self._parts, float("inf"), REST_S)
        assert self._learner is not None
        loop, stop = LearnerLoop(self._learner, [self.inference], again), threading.Event()
        begun_s, between_s = time.process_time(), self._between_s
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            learning = threads.submit(loop.run, stop)
            try:
                _, beside_s = self._turning(lambda: len(again.spent) >= _UPDATES or learning.done())
            finally:
                stop.set()
            learning.result()
        used_s, between_s = time.process_time() - begun_s, self._between_s - between_s
        spent = again.spent
        update_cpu_s, update_s = self._updating
        # Neither seals nor draws in what is compared.
        crowd = max(1.0, (each_s / turn_s + update_cpu_s / update_s) / usable_cores())
        # The first update is not among those that count.
        own_s = len(self.pool.spent) * each_s + (len(spent) + 1) * update_cpu_s + between_s
        return Company(
            acting=max(1.0, beside_s / turn_s / crowd),
            learning=max(1.0, float(np.median(spent, axis=0)[1]) / update_s / crowd),
            waste=max(1.0, used_s / own_s),
        )

    def _turning(self, enough: Callable[[], bool]) -> np.ndarray:
        """Takes turns with one group for a while, and until `enough`; returns a turn's CPU time and time."""
        self.pool.wished, self.pool.spent, self.sink.spent = 1, [], []
        self._turns(2 * self._seconds)
        while not enough():
            self._turns(0.2 * self._seconds)
        return np.median(self.pool.spent, axis=0)


@contextlib.contextmanager
def bench(
    env: HostEnvConfig, agent: Agent, size: int, folder: Path, seconds: float
) -> Iterator[Bench]:
    """Makes the parts of a learner, and closes what has to be closed."""
    made = Bench(env, agent, size, folder, seconds)
    try:
        yield made
    finally:
        made.pool.close()
