"""Unrolls between acting and learning: steps are cut into unrolls, which wait in a queue for the learner.

An unroll is of a group here: it has the unrolls of all environments of the group, in the sense of
`OnPolicy.batch`, side by side.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.central.inference import ActOutput
from seedbed.run.measures import Stopwatch
from seedbed.run.stacking import FrameTrajectory, zero_timesteps
from seedbed.types import EnvSpec, OnPolicy, Timestep, Tree, action_array


class UnrollQueue:
    """A bounded queue of unrolls that blocks at either end, and drops nothing until it ends or is closed.

    It is a `central.experience.SavedSource`. It ends when `steps` transitions have been learned from. Only
    what was learned from counts, so the unrolls that are dropped then do not.
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
        self._items: collections.deque[FrameTrajectory] = collections.deque()
        self._condition = threading.Condition()
        self._closed = False
        self.waited = Stopwatch()  # runs while `put` waits for room

    @property
    def loops(self) -> dict[str, Callable[[threading.Event], None]]:
        """An empty dict: a queue needs no thread of its own."""
        return {}

    def put(self, unroll: FrameTrajectory) -> bool:
        """Waits for room; returns False if the queue was closed instead. Call from the inference thread."""
        with self._condition:
            self.waited.start()
            self._condition.wait_for(lambda: self._closed or len(self._items) < self._capacity)
            self.waited.stop()
            if not self._closed:
                self._items.append(unroll)
                self._condition.notify_all()
            return not self._closed

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        """Waits at most so long for a batch; returns [] if there is none. Call from the learner thread."""
        with self._condition:
            self._condition.wait_for(
                lambda: self.over or len(self._items) >= self._per_batch, timeout_s
            )
            if self.over or len(self._items) < self._per_batch:
                return []
            taken = [self._items.popleft() for _ in range(self._per_batch)]
            self._condition.notify_all()
            return taken

    @property
    def over(self) -> bool:
        """Whether nothing more is learned from. Any thread may read it."""
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

    def mark(self, step: int | None = None) -> int:
        """Returns the step: no data is saved. Any thread may call this."""
        return self.env_steps if step is None else step

    def save(self, step: int, settle: Callable[[], None]) -> None:
        """Does nothing: unrolls are not saved. Any thread may call this."""

    def restore(self, step: int) -> str:
        """Returns "": there is nothing to load. Any thread may call this."""
        return ""

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

    def close(self) -> None:
        """Wakes every thread that waits; nothing passes afterwards. Any thread may call this."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


class _OpenUnroll(NamedTuple):
    """The unroll that a group is filling, numpy."""

    unroll: FrameTrajectory
    # Views `[T + 1, n, ...]` of the leaves of timesteps, and `[T, n, ...]` of those of action and extras.
    rows: list[np.ndarray]
    start: list[np.ndarray]  # the leaves of `unroll.actor_state`


class UnrollSink:
    """The open unrolls of all groups, which go to a queue as they complete; a `central.experience.Sink`.

    An unroll has the rows 0 to T, and its last row is the first of the group's next unroll. With a
    synchronous agent, a group that has completed its unrolls of a batch rests until `renew`. With any other
    agent, groups complete their first unrolls one after the other: if they did so together, these would fill
    the queue at once and then wait for the learner. The steps before a group's turn are dropped.
    """

    def __init__(
        self,
        queue: UnrollQueue,
        experience: OnPolicy,
        spec: EnvSpec,
        frame_stack: int,
        output: ActOutput,
        groups: int,
    ) -> None:
        """Allocates memory. `output` says the shapes of what acting gives for one group, `[n, ...]`."""
        self._queue, self._steps = queue, experience.unroll
        self._spec, self._frame_stack, self._output = spec, frame_stack, output
        self._size = jax.tree.leaves(output.action)[0].shape[0]
        self._open = [self._make() for _ in range(groups)]
        self._row = [0] * groups
        self._dropped = [False] * groups  # whether the open unroll is one that does not count
        self._quota = 0
        if experience.synchronous:
            self._quota, rest = divmod(experience.batch, groups * self._size)
            assert self._quota and not rest, "CentralConfig.fitted sees to that"
        else:
            for group in range(groups):
                before = group * self._steps // groups
                self._row[group] = self._steps - before if before else 0
                self._dropped[group] = before > 0
        # By group: unrolls completed since `renew`, of which there may be `_quota`; 0 means no limit.
        self._completed = [0] * groups
        self._lives = [-1] * groups
        self._complete: collections.deque[FrameTrajectory] = collections.deque()
        self.waited = queue.waited

    @property
    def done(self) -> bool:
        """Whether the queue has ended. Any thread may read it."""
        return self._queue.over

    def arrive(self, group: int, life: int, timestep: Timestep) -> bool:
        """Completes a full unroll with a group's next timestep, numpy `[n, ...]`; does not wait.

        A new life of the group drops its open unroll. Returns whether the group may be acted on now. The
        arrays may change afterwards. Call from the inference thread only.
        """
        if life != self._lives[group]:
            if self._lives[group] >= 0:
                self._row[group], self._dropped[group] = 0, False
            self._lives[group] = life
        if self._row[group] == self._steps:
            self._close(group, timestep)
        return not self._quota or self._completed[group] < self._quota

    def _close(self, group: int, timestep: Timestep) -> None:
        """Stores row T of a group's unroll, and begins the next one with it and the S - 1 rows before it."""
        done, begun = self._open[group], self._make()
        for view, leaf in zip(done.rows, jax.tree.leaves(timestep), strict=False):
            view[self._steps] = leaf
        for new, old in zip(
            jax.tree.leaves(begun.unroll.timesteps),
            jax.tree.leaves(done.unroll.timesteps),
            strict=True,
        ):
            new[: self._frame_stack] = old[-self._frame_stack :]
        self._open[group], self._row[group] = begun, 0
        if self._dropped[group]:
            self._dropped[group] = False
            return
        self._complete.append(done.unroll)
        self._completed[group] += 1

    def add(
        self, groups: Sequence[int], lives: Sequence[int], timestep: Timestep, output: ActOutput
    ) -> None:
        """Stores the steps of one call, leaves `[k, n, ...]`; drops those of lives that are over.

        Does not wait. The arrays may change afterwards. Call from the inference thread only.
        """
        leaves = jax.tree.leaves((timestep, output.action, output.extras))
        leaves = [np.asarray(leaf) for leaf in leaves]
        for position, group in enumerate(groups):
            if lives[position] != self._lives[group]:
                continue
            row, mine = self._row[group], self._open[group]
            for view, leaf in zip(mine.rows, leaves, strict=True):
                view[row] = leaf[position]
            mine.unroll.params_version[row] = output.params_version
            if row == 0:
                before = jax.tree.leaves(output.actor_state)
                for view, leaf in zip(mine.start, before, strict=True):
                    view[...] = np.asarray(leaf)[position]
            self._row[group] = row + 1

    def flush(self) -> None:
        """Puts completed unrolls into the queue; waits for room. Call from the inference thread only."""
        while self._complete and self._queue.put(self._complete[0]):
            self._complete.popleft()

    def renew(self, groups: Sequence[int]) -> None:
        """Lets groups fill the unrolls of another batch. Call from the inference thread only."""
        for group in groups:
            self._completed[group] = 0

    def finish(self) -> None:
        """Does nothing: open unrolls are dropped. Call from the inference thread only."""

    def _make(self) -> _OpenUnroll:
        """Allocates an unroll. The learner keeps the arrays of the one before, so they cannot be reused."""
        rows = (self._frame_stack + self._steps, self._size)

        def steps(leaf: Any) -> np.ndarray:
            return np.zeros((self._steps, *leaf.shape), leaf.dtype)

        action = action_array(self._spec.action)
        unroll = FrameTrajectory(
            timesteps=zero_timesteps(self._spec, rows),
            action=np.zeros((self._steps, self._size, *action.shape), action.dtype),
            extras=jax.tree.map(steps, self._output.extras),
            actor_state=jax.tree.map(
                lambda leaf: np.zeros(leaf.shape, leaf.dtype), self._output.actor_state
            ),
            params_version=np.zeros((self._steps, self._size), np.int32),
        )
        shown = jax.tree.map(lambda leaf: leaf[self._frame_stack - 1 :], unroll.timesteps)
        return _OpenUnroll(
            unroll,
            jax.tree.leaves((shown, unroll.action, unroll.extras)),
            jax.tree.leaves(unroll.actor_state),
        )
