"""The replay of a central run: steps are added after they were acted on, and batches are drawn in advance."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from seedbed.actors.pool import ActorPool
from seedbed.central.experience import Share
from seedbed.central.inference import ActOutput, act_output
from seedbed.replay.host.layout import Layout
from seedbed.replay.host.replay import HostReplay, ReplayCut, Sample
from seedbed.run.checkpoint_helper import list_steps, name_of
from seedbed.run.devices import host_device
from seedbed.run.measures import Stopwatch
from seedbed.run.stacking import FrameTrajectory
from seedbed.types import ActorState, EnvSpec, Replay, ReplayAgent, StorageError, Timestep, Tree

# The learner uses one buffer while the other is filled.
_BUFFERS = 2
# Seconds between two looks for work while nothing notifies the replay thread.
_WAKE_S = 0.1


def _priorities(agent: ReplayAgent) -> Callable[[Timestep, Tree], np.ndarray]:
    """Returns the agent's priorities of new items, computed on the host: they would wait for the learner."""
    compiled, host = jax.jit(agent.initial_priorities), host_device()

    def priorities(timesteps: Timestep, extras: Tree) -> np.ndarray:
        with jax.default_device(host):
            return np.asarray(compiled(timesteps, extras))

    return priorities


def layout_of(
    agent: ReplayAgent,
    experience: Replay,
    spec: EnvSpec,
    frame_stack: int,
    groups: int,
    group_size: int,
) -> Layout:
    """Returns the layout of a replay that keeps what acting gives, too, for a bound agent.

    `experience` is the agent's, or that of a part of the run's replay. `spec` is without stacked frames.
    """
    output = act_output(agent, spec, frame_stack, 1)
    extras, core = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), (output.extras, output.actor_state.core)
    )
    return Layout(experience, spec, extras, core, groups, group_size, frame_stack)


def trajectory_of(sample: Sample) -> FrameTrajectory:
    """Returns the batch that the learner gets; its leaves are views of the sample's."""
    action, extras = jax.tree.map(lambda leaf: leaf[:-1], (sample.action, sample.extras))
    memory = ActorState(sample.core, ())
    return FrameTrajectory(sample.timesteps, action, extras, memory, importance=sample.importance)


class ReplayFeed:
    """Replay between three threads: one acts and appends, one seals and draws (`run`), and one learns.

    It is both a `central.experience.Sink` and a `SavedSource`.
    They are called the inference thread, the replay thread and the learner thread. Acting and learning wait
    for each other, so that an item is drawn as often as the agent's ratio says. A transition counts when it
    is appended. After the last one, learning goes on until it has made the updates that the ratio asks for.
    """

    def __init__(
        self,
        agent: ReplayAgent,
        pool: ActorPool,
        frame_stack: int,
        share: Share,
        transfer: Callable[[Sequence[FrameTrajectory]], FrameTrajectory] | None = None,
    ) -> None:
        """Allocates memory for a bound agent, in the share's folder if it has one.

        The pool must know its spec. `transfer` starts to copy a batch to the learner's devices, as
        `Learner.assemble`; with it, that is done as soon as a batch is drawn. Raises SeedbedError if the
        folder cannot be made.
        """
        self.env_steps, self.steps = share.env_steps, share.steps
        experience, folder = share.experience, share.replay
        assert isinstance(experience, Replay), "the agent learns from replay"
        self._batch = experience.batch
        layout = layout_of(
            agent, experience, pool.spec, frame_stack, pool.num_groups, pool.group_size
        )
        self.replay = HostReplay(layout, folder, share.seed, _priorities(agent))
        self._transfer = transfer
        self.waited = Stopwatch()  # runs while `add` waits for the learner to catch up
        self._drawing_s = 0.0
        self._saves, self._checkpoints = folder is not None, share.checkpoints
        self._closed = threading.Event()
        # No more steps will be appended; no batches are left either.
        self._finished = self._ended = False
        # Held while a step is appended and counted, and while a cut is made, so that the two agree.
        self._moment = threading.Lock()
        self._marked: dict[int, ReplayCut] = {}  # cuts that are not saved yet, by steps
        # By group: the life of its last step in replay.
        self._lives = [-1] * pool.num_groups
        # Guards `_free`, `_ready`, `_idle` and additions to `_learned`. Notified when a waiting thread may
        # go on.
        self._work = threading.Condition()
        self._free: list[Sample] = [self.replay.make_sample(self._batch) for _ in range(_BUFFERS)]
        self._ready: collections.deque[tuple[Sample, FrameTrajectory]] = collections.deque()
        self._learned: collections.deque[tuple[Sample, Any]] = collections.deque()
        self._taken: Sample | None = None
        # Runs while the replay thread has nothing to do.
        self._idle = Stopwatch()
        # Seconds in which the learner waited and `_idle` ran.
        self._short_s = 0.0
        # What `_idle` showed when the learner began to wait; infinity if the learner is not waiting.
        self._idle_at_take = math.inf
        self._notices: collections.deque[str] = collections.deque()

    @property
    def done(self) -> bool:
        """Whether the run has its steps, or the feed was closed. Any thread may read it."""
        return self._closed.is_set() or self.env_steps >= self.steps

    @property
    def loops(self) -> dict[str, Callable[[threading.Event], None]]:
        """The loop of the replay thread."""
        return {"replay": self.run}

    def arrive(self, group: int, life: int, timestep: Timestep) -> bool:
        """Returns True: acting never waits for newer parameters. Call from the inference thread only."""
        return True

    def add(
        self, groups: Sequence[int], lives: Sequence[int], timestep: Timestep, output: ActOutput
    ) -> None:
        """Adds steps, leaves `[k, n, ...]`, until `done`; waits while `HostReplay.can_insert` is false.

        A group's first step in a new life starts new streams. May seal inline, as `HostReplay.append`, and
        then raises SeedbedError if the agent gives an item an invalid priority. Call from the inference
        thread only.
        """
        core = output.actor_state.core
        step = jax.tree.map(np.asarray, (timestep, output.action, output.extras, core))
        for position, group in enumerate(groups):
            if lives[position] != self._lives[group]:
                self._lives[group] = lives[position]
                self.replay.restart(group)
            self._append(group, *jax.tree.map(lambda leaf, at=position: leaf[at], step))
            if self.done:
                return

    def _append(
        self, group: int, timestep: Timestep, action: Tree, extras: Tree, core: Tree
    ) -> None:
        """Adds a step of a group, leaves `[n, ...]`, when there is room; a closed feed drops it."""
        replay = self.replay
        if not replay.can_insert():
            self.waited.start()
            replay.wait_until(replay.can_insert, self._closed.is_set)
            self.waited.stop()
        if self._closed.is_set():
            return
        with self._moment:
            replay.append(group, timestep, action, extras, core)
            self.env_steps += timestep.first.size - int(np.count_nonzero(timestep.first))
        if replay.pending:
            with self._work:
                self._idle.stop()
                self._work.notify_all()

    def flush(self) -> None:
        """Does nothing: `add` has handed on every step. Call from the inference thread only."""

    def renew(self, groups: Sequence[int]) -> None:
        """Does nothing: no group waits for parameters. Call from the inference thread only."""

    def finish(self) -> None:
        """Ends all streams and leaves their last rows to be sealed. Call from the inference thread only."""
        for group in range(len(self._lives)):
            self.replay.restart(group)
        with self._work:
            self._finished = True
            self._work.notify_all()

    def run(self, stop: threading.Event) -> None:
        """Seals, updates priorities and draws ahead, until the feed is closed or has ended, or `stop` is set.

        The feed ends when the streams have ended and no batch is left. The thread that calls this is the
        replay thread. Raises SeedbedError if a priority is invalid or a stored image is damaged.
        """
        while not (stop.is_set() or self._closed.is_set()):
            if not self._attend():
                with self._work:
                    learned = len(self._free) == _BUFFERS
                    if self._finished and learned and not self._has_work():
                        self._ended = True
                        self._work.notify_all()
                        return
                    self._idle.start()
                    self._work.wait_for(self._has_work, _WAKE_S)
                    self._idle.stop()

    def _has_work(self) -> bool:
        drawable = bool(self._free) and self.replay.can_sample(self._batch)
        return bool(self._closed.is_set() or self.replay.pending or self._learned or drawable)

    def _attend(self) -> bool:
        """Seals, updates priorities and draws at most one batch; returns whether there was any work."""
        replay, begun = self.replay, time.perf_counter()
        worked = bool(replay.pending or self._learned)
        replay.seal_pending()
        while self._learned:
            sample, priorities = self._learned.popleft()
            if not isinstance(priorities, tuple):
                replay.update_priorities(sample.slots, sample.generations, priorities)
            with self._work:
                self._free.append(sample)
        if self._free and replay.can_sample(self._batch):
            with self._work:
                buffers = self._free.pop()
            sample = replay.sample(self._batch, out=buffers, ahead=True)
            batch = trajectory_of(sample)
            if self._transfer is not None:
                batch = self._transfer([batch])
            with self._work:
                self._ready.append((sample, batch))
                self._work.notify_all()
            worked = True
        if worked:
            self._drawing_s += time.perf_counter() - begun
        return worked

    @property
    def over(self) -> bool:
        """Whether no more batches come. Any thread may read it."""
        return self._closed.is_set() or (self._ended and not self._ready)

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        """Waits at most so long for a batch: numpy buffers, or what `transfer` made of them.

        It is valid until `learned`. Returns [] if there is none. Call from the learner thread only.
        """
        with self._work:
            self._idle_at_take = self._idle.read()
            self._work.wait_for(lambda: self.over or bool(self._ready), timeout_s)
            self._short_s += self._idle.read() - self._idle_at_take
            self._idle_at_take = math.inf
            if self._closed.is_set() or not self._ready:
                return []
            self._taken, batch = self._ready.popleft()
            self._work.notify_all()
        return [batch]

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Hands new priorities `[B]` of the last batch's items, and its buffers, to the replay thread.

        If `priorities` is (), items keep theirs. Call from the learner thread only, after `take`.
        """
        del transitions, metrics
        assert self._taken is not None, "take comes first"
        self.replay.learned(self._batch)
        with self._work:
            self._learned.append((self._taken, priorities))
            self._taken = None
            self._idle.stop()
            self._work.notify_all()

    def mark(self, step: int | None = None) -> int:
        """Notes the replay as it is, for a checkpoint of `step` steps, or of `env_steps`; returns that.

        Of marks whose checkpoints are not saved, only the last two are kept. If the disk refuses, this leaves
        a notice. Any thread may call this; acting waits meanwhile.
        """
        with self._moment:
            marked = self.env_steps if step is None else step
            if self._saves:
                self._forget([marked, *list(self._marked)[:-1]])
                try:
                    self._marked[marked] = self.replay.cut(name_of(marked))
                except StorageError as error:
                    self._notices.append(f"{error}; training goes on")
            return marked

    def _forget(self, steps: Sequence[int]) -> None:
        """Lets go of the cuts of marks. The caller holds `_moment`."""
        for step in steps:
            if cut := self._marked.pop(step, None):
                self.replay.discard(cut)

    def save(self, step: int, settle: Callable[[], None]) -> None:
        """Saves the replay as it was at the `mark` of `step` steps, if it has a folder.

        That comes before the checkpoint, so that no checkpoint lacks its replay. The newest whole checkpoint
        keeps its replay, so `settle` is called first: it waits until the one before is written or has failed.
        If the disk refuses, this only leaves a notice. Raises SeedbedError if the agent gives an item an
        invalid priority; the items published before it are saved first. Any thread may call this.
        """
        if not self._saves:
            return
        with self._moment:
            cut = self._marked.pop(step, None)
            self._forget([older for older in self._marked if older < step])
        if cut is None:
            return  # the disk had no room, which was told
        settle()
        # All checkpoints after the newest one on the disk may have failed, so the replay of that one stays.
        whole = [name_of(each) for each in list_steps(self._checkpoints)[-1:]]
        try:
            self.replay.write(cut, *whole)
        except StorageError as error:
            self._notices.append(f"{error}; training goes on")

    def restore(self, step: int) -> str:
        """Loads the replay that was saved with the checkpoint of `step`, if there is one.

        Returns a message that says whether it was loaded. Raises SeedbedError if that replay has another
        layout. Call before other threads use the feed.
        """
        if not self._saves or self.replay.restore([name_of(step)]) is None:
            return "the run's replay was not saved: filling it again"
        return f"replay goes on with {self.replay.items:,} items"

    def metrics(self) -> dict[str, Any]:
        """Returns the figures of `HostReplay.stats`, with names `replay/...`. Any thread may call this."""
        return {f"replay/{name}": value for name, value in self.replay.stats().items()}

    def seconds(self) -> dict[str, float]:
        """Returns the seconds since the start of `replay/busy` and `replay/short`. Any thread may call this.

        `replay/busy` is the time in which the replay thread sealed, updated priorities or drew.
        `replay/short` is the part of the learner's waiting in which the replay thread had nothing to do:
        acting had not yet brought the steps that `min_size` and `ratio` ask for.
        """
        short_s = self._short_s + max(0.0, self._idle.read() - self._idle_at_take)
        return {"replay/busy": self._drawing_s, "replay/short": short_s}

    def take_notices(self) -> list[str]:
        """Returns messages about the disk, each once. One thread at a time may call this."""
        own = [self._notices.popleft() for _ in range(len(self._notices))]
        return [*own, *self.replay.take_notices()]

    def close(self) -> None:
        """Wakes every thread that waits; nothing passes afterwards. Any thread may call this."""
        self._closed.set()
        with self._work:
            self._work.notify_all()
