"""How rows become items: written as they come, then sealed a chunk of each environment at a time."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from seedbed import trees
from seedbed.replay.items import Windows
from seedbed.replay.layout import CHUNK, Layout
from seedbed.replay.sequences import CoreStates, Found, Sequencer
from seedbed.replay.storage import Storage
from seedbed.types import SeedbedError, Timestep, Tree

Priorities: TypeAlias = Callable[[Timestep, Tree], np.ndarray]
_PENDING_PER_GROUP = 4  # sets of chunks; who appends more seals them itself


@dataclasses.dataclass(eq=False)
class _Set:
    """A chunk for each environment of a group, being written: the same rows of all."""

    group: int
    first: int  # chunk
    opens: bool  # whether a stream begins with it
    views: list[np.ndarray]  # [n, CHUNK, ...] for each leaf
    cores: list[np.ndarray]  # the same
    rows: int = 0
    in_place: bool = False  # whether the rows have been copied from `views` to their place
    # The items that it completes and their memory; None until the sequencer has seen its rows.
    items: tuple[Windows, list[np.ndarray]] | None = None


class _Stream:
    """What is known of the rows of a group since its start."""

    def __init__(self, layout: Layout) -> None:
        self.open: _Set | None = None
        self.opens = True
        self.sequencer, self.cores = Sequencer(layout), CoreStates(layout)
        self.sets: list[int] = []  # first chunks of the newest sets that were sealed


class Writer:
    """The streams of all groups: one thread appends and restarts, any thread seals."""

    def __init__(self, storage: Storage, priorities: Priorities | None) -> None:
        self._storage, self._priorities = storage, priorities
        self._layout, self._lock = storage.layout, storage.lock
        self._rows, self._records = storage.rows, storage.records
        self.sealing = threading.Lock()  # taken before the storage's
        self._streams = [_Stream(self._layout) for _ in range(self._layout.num_groups)]
        self._pending: collections.deque[_Set] = collections.deque()
        self._sealing: collections.deque[_Set] = collections.deque()  # taken from `_pending`
        self._core_buffers: list[list[np.ndarray]] = []
        period = self._layout.experience.period
        self._batch = max(8, -(-self._layout.group_size * CHUNK // period))

    def append(
        self, group: int, timestep: Timestep, action: Tree, extras: Tree, core: Tree
    ) -> None:
        """Adds a row to the streams of a group; leaves are `[n, ...]`, copied before this returns.

        `action` and `extras` are what acting chose at the timestep, `core` the memory it entered with.
        """
        stream = self._streams[group]
        chunk = stream.open or self._open(group)
        row = chunk.rows
        leaves = [*trees.leaves(timestep.observation), *timestep[1:]]
        leaves += [*trees.leaves(action), *trees.leaves(extras)]
        self._records.write(chunk.views, row, leaves)
        for view, leaf in zip(chunk.cores, trees.leaves(core), strict=True):
            view[:, row] = leaf
        chunk.rows = row + 1
        if chunk.rows == CHUNK:
            self._hand_over(stream)

    def restart(self, group: int) -> None:
        """Begins new streams for a group whose actor died; half items are dropped. For who appends."""
        stream = self._streams[group]
        if stream.open is not None:
            self._hand_over(stream)
        stream.opens = True

    def _open(self, group: int) -> _Set:
        size, stream = self._layout.group_size, self._streams[group]
        with self._lock:
            first = self._allocate_chunks()
        if first is None:
            with self.sealing:
                self.seal_all()
                with self._lock:
                    while (first := self._allocate_chunks()) is None:
                        self._recycle_rows()
        with self._lock:
            cores = self._core_buffers.pop() if self._core_buffers else None
            views = self._records.open(first)
        if cores is None:
            cores = [leaf.zeros(size, CHUNK) for leaf in self._layout.core_leaves]
        stream.open = _Set(group, first, stream.opens, views, cores)
        stream.opens = False
        return stream.open

    def _allocate_chunks(self) -> int | None:
        first = self._rows.allocate(self._layout.group_size)
        if first is not None:
            self._rows.holds[first // self._rows.units] += 1
        return first

    def _hand_over(self, stream: _Stream) -> None:
        assert stream.open is not None
        with self._lock:
            self._pending.append(stream.open)
            stream.open = None
            self._lock.notify_all()
        if len(self._pending) > _PENDING_PER_GROUP * self._layout.num_groups:
            self.seal_pending()

    def _recycle_rows(self) -> None:
        """Makes the oldest segment unused: drops its items, and cuts streams of groups that stalled in it."""
        oldest = self._rows.oldest()
        for stream in self._streams:
            chunk = stream.open
            sets = [*stream.sets, *([] if chunk is None else [chunk.first])]
            if any(first // self._rows.units == oldest for first in sets):
                self._release(sets)
                stream.sets.clear()
                if chunk is not None:
                    self._core_buffers.append(chunk.cores)
                    self._records.drop(chunk.views)
                    stream.open = None
                stream.opens = True
        self._storage.items.evict_rows_of(oldest)
        self._lock.wait_for(lambda: not self._rows.pins[oldest])

    def _release(self, sets: Sequence[int]) -> None:
        for first in sets:
            self._rows.holds[first // self._rows.units] -= 1

    def held(self) -> list[int]:
        """Lists the first chunks of the sets that are written or part of half items; while nobody appends."""
        waiting = [*self._sealing, *self._pending]
        held = [chunk.first for chunk in waiting if chunk.items is None]
        for stream in self._streams:
            held += stream.sets if stream.open is None else [*stream.sets, stream.open.first]
        return held

    @property
    def pending(self) -> int:
        """Sets of chunks that wait to be sealed."""
        return len(self._sealing) + len(self._pending)

    def seal_pending(self) -> None:
        """Compresses the chunks that are full and publishes the items that they complete."""
        with self.sealing:
            self.seal_all()

    def seal_all(self) -> None:
        """Seals every pending set. The caller must hold `sealing`.

        A set stays pending until its items are published. Raises SeedbedError if the agent gives an item
        an invalid priority; the next call goes on at that item's set.
        """
        while self.pending:
            with self._lock:
                self._sealing.extend(self._pending)
                self._pending.clear()
            if new := [chunk for chunk in self._sealing if not chunk.in_place]:
                self._records.seal([chunk.first for chunk in new], [chunk.views for chunk in new])
            for chunk in new:
                chunk.in_place = True
            while self._sealing:
                self._publish(self._sealing[0])
                self._sealing.popleft()

    def _publish(self, chunk: _Set) -> None:
        """Publishes the items that a set, which is in its place, completes."""
        if chunk.items is None:
            chunk.items = self._complete(chunk)
        windows, cores = chunk.items
        if len(windows.env):
            self._storage.publish(windows, cores, self._first_priorities(windows))
        stream = self._streams[chunk.group]
        with self._lock:
            done = len(stream.sets) + 1 - self._layout.item_chunks
            if done > 0:
                self._release(stream.sets[:done])
                del stream.sets[:done]
            self._core_buffers.append(chunk.cores)

    def _complete(self, chunk: _Set) -> tuple[Windows, list[np.ndarray]]:
        """Adds a set to its stream; returns the items that it completes, and their memory."""
        stream = self._streams[chunk.group]
        if chunk.opens:
            with self._lock:
                self._release(stream.sets)
            stream.sets.clear()
            stream.sequencer.restart()
        stream.sets.append(chunk.first)
        opening, ended = self._records.ends(chunk.first, chunk.rows)
        sequencer, oldest = stream.sequencer, stream.sequencer.rows // CHUNK + 1 - len(stream.sets)
        steps = sequencer.steps(opening)
        found = sequencer.complete(steps, ended)
        cores = stream.cores.collect(steps, chunk.cores, found)
        return self._windows(chunk, found, oldest), cores

    def _windows(self, chunk: _Set, found: Found, oldest: int) -> Windows:
        """Says where the items that a set completed are; `oldest` numbers the first set that is known."""
        sets = self._streams[chunk.group].sets
        place = found.begin // CHUNK - oldest
        every = np.minimum(place[:, None] + np.arange(self._layout.item_chunks), len(sets) - 1)
        return Windows(
            chunks=np.array(sets)[every] + found.env[:, None],
            offset=found.begin % CHUNK,
            front=found.front,
            length=found.length,
            core=np.zeros_like(found.env),
            env=chunk.group * self._layout.group_size + found.env,
        )

    def _first_priorities(self, windows: Windows) -> np.ndarray | None:
        """Asks for the priorities of new items, always for a batch of the same size."""
        if self._priorities is None:
            return None
        count, size, layout = len(windows.env), self._batch, self._layout
        found = np.zeros(count, np.float64)
        for start in range(0, count, size):
            these = np.minimum(np.arange(start, start + size), count - 1)
            observed, extras = len(layout.observation_leaves), len(trees.leaves(layout.extras))
            leaves = [
                leaf.zeros(layout.experience.steps, size) for leaf in layout.leaves[observed:]
            ]
            mine = Windows(*(leaf[these] for leaf in windows))
            self._records.gather(mine, [None] * observed + leaves)
            timesteps = Timestep((), *leaves[:4])
            kept = trees.unflatten(layout.extras, leaves[len(leaves) - extras :])
            given = np.asarray(self._priorities(timesteps, kept), np.float64)
            found[start : start + size] = given[: count - start]
        require_positive(found)
        return found


def require_positive(priorities: np.ndarray) -> None:
    """Raises SeedbedError for priorities that are not above 0, or not finite."""
    wrong = ~(np.isfinite(priorities) & (priorities > 0))
    if wrong.any():
        raise SeedbedError(
            f"an item was given priority {priorities[wrong][0]}: the agent must give finite priorities "
            "above 0; if this is not a number, training diverged: lower the learning rate"
        )
