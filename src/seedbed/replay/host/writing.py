"""The way from rows to items: rows are written as they come, then sealed a set of chunks at a time.

To seal a set means to compress its images, to find the items that it completes, and to publish these with
their priorities.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from seedbed import trees
from seedbed.replay.host.items import Windows
from seedbed.replay.host.layout import CHUNK, Layout
from seedbed.replay.host.sequences import CompletedItems, CoreStates, Sequencer
from seedbed.replay.host.storage import ReplayStorage
from seedbed.types import SeedbedError, Timestep, Tree

Priorities: TypeAlias = Callable[[Timestep, Tree], np.ndarray]
"""A function from timesteps and extras `[steps, B]` to the priorities `[B]` of new items, all above 0."""
# Full sets of chunks that may wait for each group. If there are more, the appending thread seals them itself.
_PENDING_PER_GROUP = 4


@dataclasses.dataclass(eq=False)
class _ChunkSet:
    """A set of chunks, one for each environment of a group, with the same rows of all of them."""

    group: int
    first: int  # number of the first chunk
    opens: bool  # whether a stream begins with this set
    views: list[np.ndarray]  # [n, CHUNK, ...] for each leaf of a record
    cores: list[np.ndarray]  # [n, CHUNK, ...] for each leaf of the core state
    rows: int = 0  # rows written
    in_place: bool = False  # whether `Records.seal` has moved the rows to their place
    # The items that the set completes, with their core states; None until the sequencer has seen its rows.
    items: tuple[Windows, list[np.ndarray]] | None = None


class _Stream:
    """The state of the stream of a group, which begins when its actor starts."""

    def __init__(self, layout: Layout) -> None:
        self.open: _ChunkSet | None = None
        self.opens = True
        self.sequencer, self.cores = Sequencer(layout), CoreStates(layout)
        # First chunks of the newest sealed sets, whose rows unfinished items may need.
        self.sets: list[int] = []


class ReplayWriter:
    """The streams of all groups. One thread appends and restarts; any thread may seal.

    `sealing` is a lock that the sealing thread holds. Take it before the storage's lock, and never while
    holding that one.
    """

    def __init__(self, storage: ReplayStorage, priorities: Priorities | None) -> None:
        self._storage, self._priorities = storage, priorities
        self._layout, self._lock = storage.layout, storage.lock
        self._rows, self._records = storage.rows, storage.records
        self.sealing = threading.Lock()
        self._streams = [_Stream(self._layout) for _ in range(self._layout.num_groups)]
        self._pending: collections.deque[_ChunkSet] = collections.deque()
        # Sets that were taken from `_pending` and are not published yet.
        self._sealing: collections.deque[_ChunkSet] = collections.deque()
        self._core_buffers: list[list[np.ndarray]] = []
        period = self._layout.experience.period
        self._batch = max(8, -(-self._layout.group_size * CHUNK // period))

    def append(
        self, group: int, timestep: Timestep, action: Tree, extras: Tree, core: Tree
    ) -> None:
        """Adds a row to the streams of a group; leaves are `[n, ...]`, copied before this returns.

        `action` and `extras` are those that acting returned for the timestep, and `core` is the core state
        before it. Call from the appending thread only. It seals inline if the sealing thread has fallen
        behind, or if no segment is free. If none is free after that, it drops the items of the oldest
        segment, and waits until copies from it have ended. Raises SeedbedError as `seal_all`.
        """
        stream = self._streams[group]
        chunk = stream.open or self._open(group)
        row = chunk.rows
        leaves = [*trees.leaves(timestep.observation), timestep.reward, timestep.terminated]
        leaves += [timestep.truncated, timestep.first]
        leaves += [*trees.leaves(action), *trees.leaves(extras)]
        self._records.write(chunk.views, row, leaves)
        for view, leaf in zip(chunk.cores, trees.leaves(core), strict=True):
            view[:, row] = leaf
        chunk.rows = row + 1
        if chunk.rows == CHUNK:
            self._hand_over(stream)

    def restart(self, group: int) -> None:
        """Starts new streams for a group whose actor died, and drops its unfinished items.

        Call from the appending thread only. It seals inline if the sealing thread has fallen behind, and then
        raises SeedbedError as `seal_all`.
        """
        stream = self._streams[group]
        if stream.open is not None:
            self._hand_over(stream)
        stream.opens = True

    def _open(self, group: int) -> _ChunkSet:
        size, stream = self._layout.group_size, self._streams[group]
        with self._lock:
            first = self._allocate_chunks()
        if first is None:
            with self.sealing:
                self.seal_all()
                first = self.allocate()
        with self._lock:
            cores = self._core_buffers.pop() if self._core_buffers else None
            views = self._records.open(first)
        if cores is None:
            cores = [leaf.zeros(size, CHUNK) for leaf in self._layout.core_leaves]
        stream.open = _ChunkSet(
            group=group, first=first, opens=stream.opens, views=views, cores=cores
        )
        stream.opens = False
        return stream.open

    def allocate(self) -> int:
        """Returns the first chunk of a new set, which is held until `release`.

        It drops the oldest items if there is no room. The caller must hold `sealing`.
        """
        with self._lock:
            while (first := self._allocate_chunks()) is None:
                self._recycle_rows()
            return first

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
        """Frees the oldest segment: drops its items, and cuts the streams of groups that stalled in it.

        The caller holds `sealing` and the storage's lock. This waits until no copy from the segment runs.
        """
        oldest = self._rows.oldest()
        for stream in self._streams:
            chunk = stream.open
            sets = [*stream.sets, *([] if chunk is None else [chunk.first])]
            if any(first // self._rows.units == oldest for first in sets):
                self.release(sets)
                stream.sets.clear()
                if chunk is not None:
                    self._core_buffers.append(chunk.cores)
                    self._records.drop(chunk.views)
                    stream.open = None
                stream.opens = True
        self._storage.items.evict_rows_of(oldest)
        self._lock.wait_for(lambda: not self._rows.pins[oldest])

    def release(self, sets: Sequence[int]) -> None:
        """Lets sets be dropped once no item has rows in them. Call under the storage's lock."""
        for first in sets:
            self._rows.holds[first // self._rows.units] -= 1

    def held(self) -> list[int]:
        """Returns the first chunks of the sets that are being written or belong to unfinished items.

        Call from the thread that holds `sealing`, while no thread appends.
        """
        waiting = [*self._sealing, *self._pending]
        held = [chunk.first for chunk in waiting if chunk.items is None]
        for stream in self._streams:
            held += stream.sets if stream.open is None else [*stream.sets, stream.open.first]
        return held

    @property
    def pending(self) -> int:
        """Returns the number of sets of chunks that wait to be sealed. Any thread may read it."""
        return len(self._sealing) + len(self._pending)

    def seal_pending(self) -> None:
        """Compresses the pending sets of chunks and publishes the items that they complete.

        Any thread that does not hold `sealing` may call this. Raises SeedbedError as `seal_all`.
        """
        with self.sealing:
            self.seal_all()

    def seal_all(self) -> None:
        """Seals every pending set. The caller must hold `sealing`.

        A set stays pending until its items are published. Raises SeedbedError if the agent gives an item
        an invalid priority; the next call continues with that item's set.
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

    def _publish(self, chunk: _ChunkSet) -> None:
        """Publishes the items that a set completes. `Records.seal` must have moved its rows before."""
        if chunk.items is None:
            chunk.items = self._complete(chunk)
        windows, cores = chunk.items
        if len(windows.env):
            self._storage.publish(windows, cores, self._first_priorities(windows))
        stream = self._streams[chunk.group]
        with self._lock:
            done = len(stream.sets) + 1 - self._layout.item_chunks
            if done > 0:
                self.release(stream.sets[:done])
                del stream.sets[:done]
            self._core_buffers.append(chunk.cores)

    def _complete(self, chunk: _ChunkSet) -> tuple[Windows, list[np.ndarray]]:
        """Adds a set to its stream; returns the items that it completes, and their core states."""
        stream = self._streams[chunk.group]
        if chunk.opens:
            with self._lock:
                self.release(stream.sets)
            stream.sets.clear()
            stream.sequencer.restart()
        stream.sets.append(chunk.first)
        opening, ended = self._records.ends(chunk.first, chunk.rows)
        sequencer, oldest = stream.sequencer, stream.sequencer.rows // CHUNK + 1 - len(stream.sets)
        steps = sequencer.steps(opening)
        found = sequencer.complete(steps, ended)
        cores = stream.cores.collect(steps, chunk.cores, found)
        return self._windows(chunk, found, oldest), cores

    def _windows(self, chunk: _ChunkSet, found: CompletedItems, oldest: int) -> Windows:
        """Returns the places of the items that a set completed, leaves `[I, ...]`.

        `oldest` is the number in the stream of the first set in `_Stream.sets`.
        """
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
        """Returns the priorities `[I]` of new items, or None if there is no function for them.

        The function is called with batches of one size, so it is compiled once. Raises SeedbedError if a
        priority is invalid.
        """
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
            reward, terminated, truncated, first = leaves[:4]
            timesteps = Timestep(
                observation=(),
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                first=first,
            )
            kept = trees.unflatten(layout.extras, leaves[len(leaves) - extras :])
            given = np.asarray(self._priorities(timesteps, kept), np.float64)
            found[start : start + size] = given[: count - start]
        require_positive(found)
        return found


def require_positive(priorities: np.ndarray) -> None:
    """Raises SeedbedError if a priority is not above 0, or not finite."""
    wrong = ~(np.isfinite(priorities) & (priorities > 0))
    if wrong.any():
        raise SeedbedError(
            f"an item was given priority {priorities[wrong][0]}: the agent must give finite priorities "
            "above 0; if this is not a number, training diverged: lower the learning rate"
        )
