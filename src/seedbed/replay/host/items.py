"""The table of items: the places of their rows, their weights when drawing, and their ages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seedbed.ops.priorities import draw_weights
from seedbed.replay.host.layout import CHUNK, Layout
from seedbed.replay.host.segments import Segments
from seedbed.replay.host.sumtree import SumTree
from seedbed.replay.limiter import RatioLimiter


class Windows(NamedTuple):
    """The places of the rows of I items; leaves are `[I]`, but `chunks` is `[I, M]`.

    M is `Layout.item_chunks`. Leaves are int64 when handed over, and int32 in the table of `Items`.
    """

    # The chunks that the item's rows lie in. The last is repeated if there are fewer than M.
    chunks: np.ndarray
    offset: np.ndarray  # first row of the item in its first chunk
    front: np.ndarray  # rows of padding before that row
    length: np.ndarray  # rows without padding
    core: np.ndarray  # row of its core state in the segments of core states
    env: np.ndarray  # number of the environment among those of all groups


class Items:
    """A table of at most `capacity` items; item number g (its generation) is in slot g modulo capacity.

    A slot whose weight in `tree` is 0 is empty. Use it under the storage's lock; any thread may read the
    numbers `count` and `inserted`, and ask the limiter, without it.
    """

    def __init__(self, layout: Layout, rows: Segments, cores: Segments | None) -> None:
        self._experience, capacity = layout.experience, layout.experience.capacity
        self._rows, self._cores = rows, cores
        self.capacity = capacity
        self.tree = SumTree(capacity)
        self.windows = Windows(
            np.zeros((capacity, layout.item_chunks), np.int32),
            *(np.zeros(capacity, np.int32) for _ in Windows._fields[1:]),
        )
        self.generation = np.full(capacity, -1, np.int64)
        self.count = 0
        # Items added so far, which is the generation of the next item.
        self.inserted = 0
        # By group, and only since this table was made.
        self.inserted_of = np.zeros(layout.num_groups, np.int64)
        self._group_size = layout.group_size
        # The largest priority so far, and at least 1.
        self.largest = 1.0
        self.limiter = RatioLimiter(layout.experience)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of the table and the tree.

        This counts 16 bytes a slot for the tree. If `capacity` is not a power of two, the tree takes up to
        twice that.
        """
        return sum(leaf.nbytes for leaf in self.windows) + 24 * self.capacity

    def add(self, windows: Windows, priorities: np.ndarray | None) -> None:
        """Adds I items in place of the oldest ones; leaves of `windows` are `[I, ...]`.

        `priorities` is `[I]`, or None for the largest priority so far. Call under the storage's lock.
        """
        self.limiter.added(len(windows.env), self.count)
        np.add.at(self.inserted_of, windows.env // self._group_size, 1)
        for start in range(0, len(windows.env), self.capacity):
            part = slice(start, start + self.capacity)
            added = Windows(*(leaf[part] for leaf in windows))
            generation = self.inserted + np.arange(len(added.env))
            slots = generation % self.capacity
            self.evict(slots)
            for mine, leaf in zip(self.windows, added, strict=True):
                mine[slots] = leaf
            self.generation[slots] = generation
            self.inserted += len(slots)
            self.count += len(slots)
            self._refer(slots, 1)
            given = np.full(len(slots), self.largest) if priorities is None else priorities[part]
            self._weigh(slots, given)

    def evict(self, slots: np.ndarray) -> None:
        """Removes the items in `slots`, which must be distinct; empty slots are allowed.

        Call under the storage's lock.
        """
        slots = slots[self.tree.weights[slots] > 0]
        if len(slots):
            self._refer(slots, -1)
            self.tree.set(slots, np.zeros(len(slots)))
            self.count -= len(slots)

    def evict_rows_of(self, segment: int) -> None:
        """Removes the items that have rows in a segment of rows. Call under the storage's lock."""
        chunks = self._rows.units
        self.evict(np.flatnonzero((self.windows.chunks // chunks == segment).any(axis=1)))

    def evict_cores_of(self, segment: int) -> None:
        """Removes the items whose core state is in a segment of core states.

        Call under the storage's lock.
        """
        assert self._cores is not None
        self.evict(np.flatnonzero(self.windows.core // self._cores.units == segment))

    def prioritise(
        self, slots: np.ndarray, generations: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Sets the priorities `[k]` of the items in `slots`, except items that were replaced or removed.

        `generations` `[k]` are the numbers of the items that the priorities are for. Call under the storage's
        lock.
        """
        there = (self.generation[slots] == generations) & (self.tree.weights[slots] > 0)
        if there.any():
            self._weigh(slots[there], priorities[there])

    def read(self, slots: np.ndarray) -> Windows:
        """Returns a copy of the places of the items in `slots` `[B]`, as int64.

        Call under the storage's lock.
        """
        return Windows(*(leaf[slots].astype(np.int64) for leaf in self.windows))

    def _weigh(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.largest = max(self.largest, float(priorities.max()))
        self.tree.set(slots, draw_weights(self._experience, np.asarray(priorities, np.float64)))

    def _refer(self, slots: np.ndarray, change: int) -> None:
        segments = self.windows.chunks[slots] // self._rows.units
        np.add.at(self._rows.references, segments.reshape(-1), change)
        if self._cores is not None:
            np.add.at(self._cores.references, self.windows.core[slots] // self._cores.units, change)

    def load(self, windows: Windows, generation: np.ndarray, weights: np.ndarray) -> None:
        """Loads the items of a save into an empty table; leaves are `[count, ...]`.

        `weights` are priorities to the power of `priority_exponent`. The caller must set `inserted`,
        `largest` and `limiter.owed`. Call under the storage's lock.
        """
        slots = generation % self.capacity
        for mine, leaf in zip(self.windows, windows, strict=True):
            mine[slots] = leaf
        self.generation[slots] = generation
        self.tree.set(slots, weights)
        self.count = len(slots)
        self._refer(slots, 1)

    def check_valid(self) -> None:
        """Raises AssertionError if an invariant is broken. Call under the storage's lock."""
        self.tree.check_valid()
        live = np.flatnonzero(self.tree.weights > 0)
        assert self.count == len(live), f"{self.count} items counted, {len(live)} there"
        generation = self.generation[live]
        assert (generation % self.capacity == live).all(), "an item is in another's slot"
        assert (generation < self.inserted).all() and (
            generation >= self.inserted - self.capacity
        ).all(), "an item is older than capacity allows"
        chunks, offset, front, length, core, _ = self.read(live)
        assert ((offset >= 0) & (offset < CHUNK) & (front >= 0) & (length >= 2)).all()
        assert (offset + length <= CHUNK * chunks.shape[1]).all(), "an item is too long"
        opened = self._rows.opened[chunks // self._rows.units]
        assert (opened >= 0).all(), "an item's rows are in a closed segment"
        count = np.bincount(
            (chunks // self._rows.units).reshape(-1), minlength=len(self._rows.references)
        )
        assert (count == self._rows.references).all(), "references to rows are miscounted"
        if self._cores is not None:
            count = np.bincount(core // self._cores.units, minlength=len(self._cores.references))
            assert (count == self._cores.references).all(), "references to memory are miscounted"
