"""Replay on the host: rows of lock-step groups go in, items of `types.Replay` are drawn, without JAX.

One thread appends; another seals and draws, and any may save:

    layout = Layout(agent.experience, spec, extras, core, num_groups, group_size, frame_stack)
    replay = Replay(layout, folder, seed, priorities)
    replay.append(group, timestep, action, extras, core)  # a step of a group; leaves [n, ...]
    replay.seal_pending()  # compresses, and publishes the items that were completed
    if replay.can_sample(batch):
        sample = replay.sample(batch, out=sample)  # numpy, time-major; the buffers are used again
        replay.update_priorities(sample.slots, sample.generations, output.priorities)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seedbed import trees
from seedbed.replay.layout import Layout
from seedbed.replay.persistence import Keeper
from seedbed.replay.storage import Storage
from seedbed.replay.writing import Priorities, Writer, require_positive
from seedbed.types import SeedbedError, Timestep, Tree, action_array

_SLACK_BATCHES = 8  # by which drawing may be behind `ratio`
_STOP_POLL_S = 0.1


class Sample(NamedTuple):
    """Items `[B]`. Frames are not stacked: the S - 1 rows before an item come with its timesteps."""

    timesteps: Timestep  # [S - 1 + steps, B, ...]
    action: Tree  # [steps, B, ...]
    extras: Tree  # [steps, B, ...]
    core: Tree  # [B, ...] before acting on the first of `steps`
    importance: np.ndarray  # [B] float32, the largest is 1
    slots: np.ndarray  # [B] int64
    generations: np.ndarray  # [B] int64, which item was in the slot


class Replay:
    """Items of all groups, drawn by priority.

    New items are given their priority by `priorities`, called with timesteps and extras `[steps, B]`
    (observation is (), B always the same) for `[B]`, or else the largest so far. With a `folder` data lies
    in files there and can be saved.
    """

    def __init__(
        self,
        layout: Layout,
        folder: Path | None = None,
        seed: int = 0,
        priorities: Priorities | None = None,
    ) -> None:
        self.layout = layout
        self._storage = Storage(layout, folder)
        self._lock, self._items = self._storage.lock, self._storage.items
        self._writer = Writer(self._storage, priorities)
        self._keeper = Keeper(self._storage, self._storage.files) if self._storage.files else None
        self._saving = threading.Lock()
        self._random = np.random.default_rng(seed)
        self._sampled = 0

    def append(
        self, group: int, timestep: Timestep, action: Tree, extras: Tree, core: Tree
    ) -> None:
        """Adds a row to the streams of a group; leaves are `[n, ...]`, copied before this returns.

        `action` and `extras` are what acting chose at the timestep, `core` the memory it entered with.
        For one thread. It seals by itself only where nobody else keeps up.
        """
        self._writer.append(group, timestep, action, extras, core)

    def restart(self, group: int) -> None:
        """Begins new streams for a group whose actor died; half items are dropped. For who appends."""
        self._writer.restart(group)

    def seal_pending(self) -> None:
        """Compresses the chunks that are full and publishes the items that they complete."""
        self._writer.seal_pending()

    @property
    def pending(self) -> int:
        """Sets of chunks that wait to be sealed."""
        return self._writer.pending

    @property
    def items(self) -> int:
        """Items that can be drawn."""
        return self._items.count

    @property
    def inserted(self) -> int:
        """Items that were ever published."""
        return self._items.inserted

    @property
    def sampled(self) -> int:
        """Items that were ever drawn."""
        return self._sampled

    def can_sample(self, batch: int) -> bool:
        """Whether there are `min_size` items, and `ratio` asks for a batch."""
        enough = self._items.count >= max(1, self.layout.experience.min_size)
        return enough and self._items.owed >= batch

    def can_insert(self) -> bool:
        """Whether acting may go on: drawing is not far behind `ratio`."""
        few = self._items.count < self.layout.experience.min_size
        return few or self._items.owed < self._slack

    def wait_until(self, ready: Callable[[], bool], stop: Callable[[], bool]) -> bool:
        """Waits until `ready`, a question about this replay; returns False if `stop` came first."""
        with self._lock:
            while not (stopped := stop()) and not ready():
                self._lock.wait(_STOP_POLL_S)
            return not stopped

    @property
    def _slack(self) -> float:
        return _SLACK_BATCHES * self.layout.experience.batch

    def make_sample(self, batch: int) -> Sample:
        """Allocates buffers for a batch of items."""
        layout = self.layout
        steps = layout.experience.steps
        timesteps = [leaf.zeros(layout.item_rows, batch) for leaf in layout.timestep_leaves]
        rest = [leaf.zeros(steps, batch) for leaf in layout.leaves[len(timesteps) :]]
        actions = len(trees.leaves(action_array(layout.spec.action)))
        core = [leaf.zeros(batch) for leaf in layout.core_leaves]
        return Sample(
            timesteps=trees.unflatten(layout.timestep, timesteps),
            action=trees.unflatten(action_array(layout.spec.action), rest[:actions]),
            extras=trees.unflatten(layout.extras, rest[actions:]),
            core=trees.unflatten(layout.core, core),
            importance=np.zeros(batch, np.float32),
            slots=np.zeros(batch, np.int64),
            generations=np.zeros(batch, np.int64),
        )

    def sample(self, batch: int, out: Sample | None = None) -> Sample:
        """Draws items, into the buffers of an earlier sample of the same size if it is given as `out`.

        Raises SeedbedError where there are none.
        """
        out = self.make_sample(batch) if out is None else out
        items, rows = self._items, self._storage.rows
        with self._lock:
            if not items.count:
                raise SeedbedError("the replay has 0 items: wait for `can_sample` before drawing")
            slots = items.tree.sample(self._random.random(batch))
            chances = items.tree.weights[slots] / items.tree.total
            windows = items.read(slots)
            used = np.unique(windows.chunks // rows.units)
            rows.pins[used] += 1
            self._storage.read_cores(windows, trees.leaves(out.core))
            out.slots[:], out.generations[:] = slots, items.generation[slots]
            count = items.count
            self._sampled += batch
            items.owed -= batch
            self._lock.notify_all()
        try:
            self._storage.records.gather(
                windows, trees.leaves((out.timesteps, out.action, out.extras))
            )
        finally:
            with self._lock:
                rows.pins[used] -= 1
                self._lock.notify_all()
        weights = (count * chances) ** -self.layout.experience.importance_exponent
        out.importance[:] = weights / weights.max()
        return out

    def update_priorities(
        self, slots: np.ndarray, generations: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Gives items `[B]` new priorities, above 0; those that made room meanwhile are passed over."""
        priorities = np.asarray(priorities, np.float64)
        require_positive(priorities)
        with self._lock:
            self._items.prioritise(slots, generations, priorities)

    def save(self, name: str, keep: str | None = None) -> None:
        """Seals, then writes all published items and the state of drawing to the disk under a name.

        One earlier save stays: the newest with the name `keep`, or the newest of all if none has it. Half
        items are not saved. Any thread may call this; the others go on meanwhile. Raises StorageError if
        the disk refuses; the earlier saves are whole then. Raises SeedbedError if the agent gives an item
        an invalid priority; the items published before it are saved first.
        """
        keeper = self._require_keeper()
        with self._saving:
            failure: Exception | None = None
            try:
                with self._writer.sealing:
                    try:
                        self._writer.seal_all()
                    except Exception as error:
                        failure = error
                    with self._lock:
                        random = self._random.bit_generator.state
                        state = {"sampled": self._sampled, "random": random}
                        snapshot = keeper.snapshot(name, state)
                    snapshot.arrays.update(keeper.tables(snapshot))
                keeper.write(snapshot, keep)
            finally:
                if failure is not None:
                    raise failure

    def restore(self, names: Sequence[str]) -> str | None:
        """Goes on with the newest usable save of one of these names, before anything is appended.

        Returns its name, or None where there is none. Everything else in the folder is removed. Raises
        SeedbedError where it was a replay of another shape.
        """
        restored = self._require_keeper().restore(names)
        if restored is None:
            return None
        name, state = restored
        self._sampled = state["sampled"]
        self._random.bit_generator.state = state["random"]
        return name

    def _require_keeper(self) -> Keeper:
        if self._keeper is None:
            raise SeedbedError("this replay is in memory only: give it a folder to save it")
        return self._keeper

    def take_notices(self) -> list[str]:
        """Returns, once each, what people should know of files; for any one thread."""
        files = self._storage.files
        return [] if files is None else [files.notices.popleft() for _ in range(len(files.notices))]

    def stats(self) -> dict[str, float]:
        """Reports items, inserted, sampled, bytes, bytes_per_frame (a row) and compression of images."""
        return {**self._storage.stats(), "sampled": self._sampled}

    def check_valid(self) -> None:
        """Raises AssertionError where an invariant is broken; while nobody appends."""
        with self._writer.sealing:
            self._storage.check_valid(self._writer.held())
