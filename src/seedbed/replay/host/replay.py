"""Replay on the host, without JAX: it takes rows of lock-step groups, and draws items (`types.Replay`).

One thread appends, another one seals and draws, and any thread may save:

    layout = Layout(agent.experience, spec, extras, core, num_groups, group_size, frame_stack)
    replay = HostReplay(layout, folder, seed, priorities)
    replay.append(group, timestep, action, extras, core)  # a step of a group; leaves [n, ...]
    replay.seal_pending()  # compresses images, and publishes the items that were completed
    if replay.can_sample(batch):
        sample = replay.sample(batch, out=sample)  # numpy, time-major; the buffers are reused
        replay.update_priorities(sample.slots, sample.generations, output.priorities)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seedbed import trees
from seedbed.ops.priorities import importance_weights, is_prioritised
from seedbed.replay.host.layout import Layout
from seedbed.replay.host.persistence import ReplayArchive, ReplaySnapshot
from seedbed.replay.host.resharding import move_streams
from seedbed.replay.host.storage import ReplayStorage
from seedbed.replay.host.writing import Priorities, ReplayWriter, require_positive
from seedbed.types import SeedbedError, Timestep, Tree, action_array

# Seconds between two calls of `stop` in `wait_until`.
_STOP_POLL_S = 0.1


class Sample(NamedTuple):
    """A batch of B items.

    Frames are not stacked: for a frame stack of S, the S - 1 rows before an item come with its timesteps.
    `steps` is `types.Replay.steps`.
    """

    timesteps: Timestep  # [S - 1 + steps, B, ...]
    action: Tree  # [steps, B, ...]
    extras: Tree  # [steps, B, ...]
    core: Tree  # [B, ...] before acting on the first of `steps`
    importance: np.ndarray  # [B] float32, the largest is 1
    weights: np.ndarray  # [B] float64, to which drawing was proportional
    slots: np.ndarray  # [B] int64
    generations: np.ndarray  # [B] int64, the number of the item in the slot


def empty_sample(layout: Layout, batch: int) -> Sample:
    """Returns new buffers, of zeros, for a batch of items of a replay of this layout."""
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
        weights=np.zeros(batch, np.float64),
        slots=np.zeros(batch, np.int64),
        generations=np.zeros(batch, np.int64),
    )


class ReplayCut(NamedTuple):
    """The content of a save, as of one moment."""

    snapshot: ReplaySnapshot
    failure: Exception | None  # of the sealing before it


class HostReplay:
    """A replay of the items of all groups, drawn by priority, or all alike if `priority_exponent` is 0.

    `priorities` returns the priorities `[B]` of new items; without it they get the largest priority so far.
    It is called with timesteps and extras `[steps, B, ...]` (the observation is (), and B is always the
    same), by the thread that seals, one call at a time, and never if all items are drawn alike. With a
    `folder`, data lies in files there and can be saved; the constructor raises SeedbedError if it cannot
    make the folder or reserve the memory. `seed` is that of drawing.
    """

    def __init__(
        self,
        layout: Layout,
        folder: Path | None = None,
        seed: int = 0,
        priorities: Priorities | None = None,
    ) -> None:
        self.layout = layout
        self._storage = ReplayStorage(layout, folder)
        self._lock, self._items = self._storage.lock, self._storage.items
        self._prioritised = is_prioritised(layout.experience)
        self._writer = ReplayWriter(self._storage, priorities if self._prioritised else None)
        self._archive = (
            ReplayArchive(self._storage, self._storage.files) if self._storage.files else None
        )
        self._saving = threading.Lock()
        self._random = np.random.default_rng(seed)
        self._sampled = 0
        # Those of `_sampled` that were drawn ahead and not learned from yet.
        self._ahead = 0

    def append(
        self, group: int, timestep: Timestep, action: Tree, extras: Tree, core: Tree
    ) -> None:
        """Adds a row to the streams of a group; leaves are `[n, ...]`, copied before this returns.

        `action` and `extras` are those that acting returned for the timestep, and `core` is the core state
        before it. Call from the appending thread only. It seals inline when the sealing thread has fallen
        behind, or when no memory is free, and then raises SeedbedError as `seal_pending`.
        """
        self._writer.append(group, timestep, action, extras, core)

    def restart(self, group: int) -> None:
        """Starts new streams for a group whose actor died, and drops its unfinished items.

        Call from the appending thread only. It may seal inline, as `append`.
        """
        self._writer.restart(group)

    def seal_pending(self) -> None:
        """Compresses the pending sets of chunks and publishes the items that they complete.

        Any thread may call this. Raises SeedbedError if the agent gives an item an invalid priority; the next
        call continues with that item's set.
        """
        self._writer.seal_pending()

    @property
    def pending(self) -> int:
        """Returns the number of sets of chunks that wait to be sealed. Any thread may read it."""
        return self._writer.pending

    @property
    def items(self) -> int:
        """Returns the number of items that can be drawn. Any thread may read it."""
        return self._items.count

    @property
    def inserted(self) -> int:
        """Returns the number of items that were ever published. Any thread may read it."""
        return self._items.inserted

    @property
    def total_weight(self) -> float:
        """Returns the sum of the weights, to which drawing is proportional. Any thread may read it."""
        with self._lock:
            return self._items.tree.total

    def inserted_of(self, group: int) -> int:
        """Returns the number of items of a group that this object has published. Any thread may call this."""
        return int(self._items.inserted_of[group])

    def count(self, groups: Iterable[int]) -> int:
        """Returns the number of items of some groups. Any thread may call this."""
        with self._lock:
            slots = np.flatnonzero(self._items.tree.weights > 0)
            owners = self._items.windows.env[slots] // self.layout.group_size
        return int(np.isin(owners, list(groups)).sum())

    @property
    def sampled(self) -> int:
        """Returns the number of items that were ever drawn. Any thread may read it."""
        return self._sampled

    def can_sample(self, batch: int) -> bool:
        """Returns whether there are `min_size` items, and `ratio` asks for `batch` more draws.

        Any thread may call this.
        """
        return self._items.limiter.may_draw(batch, self._items.count)

    def can_insert(self) -> bool:
        """Returns whether acting may go on: there are fewer than `min_size` items, or drawing keeps up.

        Drawing keeps up while it is less than 8 batches behind `ratio`. Any thread may call this.
        """
        return self._items.limiter.may_add(self._items.count)

    def wait_until(self, ready: Callable[[], bool], stop: Callable[[], bool]) -> bool:
        """Waits until `ready` returns True; returns False if `stop` returns True first.

        Both are called under the replay's lock, when items are published or drawn and at least every 0.1 s,
        so they must be quick. Any thread may call this.
        """
        with self._lock:
            while not (stopped := stop()) and not ready():
                self._lock.wait(_STOP_POLL_S)
            return not stopped

    def make_sample(self, batch: int) -> Sample:
        """Returns new buffers, of zeros, for a batch of items. Any thread may call this."""
        return empty_sample(self.layout, batch)

    def sample(self, batch: int, out: Sample | None = None, ahead: bool = False) -> Sample:
        """Draws `batch` items with replacement, in proportion to priority to the power `priority_exponent`.

        They are written to the buffers `out` of the same batch size, if given, and else to new ones. If they
        are drawn `ahead`, a save does not count them as drawn before `learned` is called. One thread at a
        time may call this. Raises SeedbedError if there are no items, or if a stored image is
        damaged.
        """
        out = self.make_sample(batch) if out is None else out
        items, rows = self._items, self._storage.rows
        with self._lock:
            if not items.count:
                raise SeedbedError("the replay has 0 items: wait for `can_sample` before drawing")
            slots = items.tree.sample(self._random.random(batch))
            out.weights[:] = items.tree.weights[slots]
            windows = items.read(slots)
            used = np.unique(windows.chunks // rows.units)
            rows.pins[used] += 1
            self._storage.read_cores(windows, trees.leaves(out.core))
            out.slots[:], out.generations[:] = slots, items.generation[slots]
            self._sampled += batch
            self._ahead += batch if ahead else 0
            items.limiter.drawn(batch)
            self._lock.notify_all()
        try:
            self._storage.records.gather(
                windows, trees.leaves((out.timesteps, out.action, out.extras))
            )
        finally:
            with self._lock:
                rows.pins[used] -= 1
                self._lock.notify_all()
        out.importance[:] = importance_weights(self.layout.experience, out.weights)
        return out

    def learned(self, items: int) -> None:
        """Says that so many items that were drawn ahead were learned from. Any thread may call this."""
        with self._lock:
            self._ahead -= items

    def update_priorities(
        self, slots: np.ndarray, generations: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Sets the priorities `[B]`, above 0, of items; items that were replaced meanwhile are skipped.

        `slots` and `generations` are those of a `Sample`. It does nothing if all items are drawn alike. Any
        thread may call this. Raises SeedbedError if a priority is not above 0, or not finite.
        """
        if not self._prioritised:
            return
        priorities = np.asarray(priorities, np.float64)
        require_positive(priorities)
        with self._lock:
            self._items.prioritise(slots, generations, priorities)

    def save(self, name: str, keep: str | None = None) -> None:
        """Saves what is published now: `cut`, then `write`. Any thread may call this; raises as they do."""
        self.write(self.cut(name), keep)

    def cut(self, name: str) -> ReplayCut:
        """Seals, then notes all published items and the state of drawing, to be written under a name.

        Items that were drawn ahead and not learned from yet count as not drawn. Unfinished items are left
        out. The data that the cut needs stay until `write` or `discard`, one of which must follow. Any thread
        may call this; sealing waits meanwhile. Raises StorageError if the disk has no room, SeedbedError if
        the replay has no folder.
        """
        archive, failure = self._require_archive(), None
        with self._writer.sealing:
            try:
                self._writer.seal_all()
            except Exception as error:
                failure = error
            with self._lock:
                random = self._random.bit_generator.state
                state = {"sampled": self._sampled - self._ahead, "random": random}
                snapshot = archive.snapshot(name, state)
                # A run that goes on from here draws them again.
                snapshot.header["owed"] += self._ahead
            snapshot.arrays.update(archive.tables(snapshot))
        return ReplayCut(snapshot, failure)

    def write(self, cut: ReplayCut, keep: str | None = None) -> None:
        """Writes a cut to the disk.

        One earlier save stays: the newest with the name `keep`, or the newest of all if none has it. Any
        thread may call this; others go on meanwhile. Raises StorageError if the disk refuses; the earlier
        saves are whole then. Raises SeedbedError if the agent gave an item an invalid priority; the items
        published before that one are written first.
        """
        with self._saving:
            try:
                self._require_archive().write(cut.snapshot, keep)
            finally:
                if cut.failure is not None:
                    raise cut.failure

    def discard(self, cut: ReplayCut) -> None:
        """Lets go of a cut that is not to be written. Any thread may call this."""
        with self._saving:
            self._require_archive().discard(cut.snapshot)

    def restore(self, names: Sequence[str] | None = None) -> str | None:
        """Loads the newest usable save with one of `names`, or with any; call it before anything is appended.

        Returns the name of the save, or None if there is none. If one is loaded, all other saves and segment
        files in the folder are removed. Call before other threads use the replay. Raises SeedbedError if the
        replay has no folder, or if the save is of a replay with another layout.
        """
        restored = self._require_archive().restore(names)
        if restored is None:
            return None
        name, state = restored
        self._sampled = state["sampled"]
        self._random.bit_generator.state = state["random"]
        return name

    def take_over(self, sources: Sequence[tuple[HostReplay, Mapping[int, int]]]) -> int:
        """Copies all items of some groups of other replays, the oldest first; returns how many there were.

        With each replay come the groups that are copied, and their groups here. Layouts must be alike but for
        capacity and the number of groups. Call before other threads use the replays.
        """
        storages = [(replay._storage, groups) for replay, groups in sources]
        return move_streams(storages, self._storage, self._writer)

    def _require_archive(self) -> ReplayArchive:
        if self._archive is None:
            raise SeedbedError("this replay is in memory only: give it a folder to save it")
        return self._archive

    def take_notices(self) -> list[str]:
        """Returns messages for the user about files, each once. One thread at a time may call this."""
        files = self._storage.files
        return [] if files is None else [files.notices.popleft() for _ in range(len(files.notices))]

    def stats(self) -> dict[str, float]:
        """Returns items, inserted, sampled, bytes, bytes_per_frame (a row) and the compression of images.

        The compression is raw size over stored size. Any thread may call this.
        """
        return {**self._storage.stats(), "sampled": self._sampled}

    def check_valid(self) -> None:
        """Raises AssertionError if an invariant is broken. Any thread may call this while none appends."""
        with self._writer.sealing:
            self._storage.check_valid(self._writer.held())
