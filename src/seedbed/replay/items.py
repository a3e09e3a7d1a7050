"""The table of items: where their rows are, how likely each is drawn, and which are the oldest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seedbed.replay.layout import CHUNK, Layout
from seedbed.replay.segments import Segments
from seedbed.replay.sumtree import SumTree


class Windows(NamedTuple):
    """Where the rows of items are; leaves are `[I]` int64, `chunks` `[I, M]`."""

    chunks: np.ndarray  # the last is repeated where an item lies in fewer
    offset: np.ndarray  # its first row in its first chunk
    front: np.ndarray  # rows of padding before that
    length: np.ndarray  # rows
    core: np.ndarray  # row of its memory
    env: np.ndarray


class Items:
    """At most `capacity` items; item number g (its generation) is in slot g modulo capacity.

    An item with weight 0 in `tree` is gone. For one thread at a time.
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
        self.inserted = 0  # items so far, the generation of the next
        self.largest = 1.0  # priority so far
        self.owed = 0.0  # draws that the ratio asked for as items came, less those that were made

    @property
    def num_bytes(self) -> int:
        """Bytes that the table and the tree take."""
        return sum(leaf.nbytes for leaf in self.windows) + 24 * self.capacity

    def add(self, windows: Windows, priorities: np.ndarray | None) -> None:
        """Adds items with these priorities, or the largest so far; the oldest make room for them.

        Draws are owed for those that come when `min_size` items are there.
        """
        missing = max(0, self._experience.min_size - self.count)
        self.owed += max(0, len(windows.env) - missing) * self._experience.ratio
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
        """Removes the items in those of `slots` (all different) that have one."""
        slots = slots[self.tree.weights[slots] > 0]
        if len(slots):
            self._refer(slots, -1)
            self.tree.set(slots, np.zeros(len(slots)))
            self.count -= len(slots)

    def evict_rows_of(self, segment: int) -> None:
        """Removes the items that have rows in a segment."""
        chunks = self._rows.units
        self.evict(np.flatnonzero((self.windows.chunks // chunks == segment).any(axis=1)))

    def evict_cores_of(self, segment: int) -> None:
        """Removes the items whose memory is in a segment of these."""
        assert self._cores is not None
        self.evict(np.flatnonzero(self.windows.core // self._cores.units == segment))

    def prioritise(
        self, slots: np.ndarray, generations: np.ndarray, priorities: np.ndarray
    ) -> None:
        """Sets priorities `[k]` of the items that are still there."""
        there = (self.generation[slots] == generations) & (self.tree.weights[slots] > 0)
        if there.any():
            self._weigh(slots[there], priorities[there])

    def read(self, slots: np.ndarray) -> Windows:
        """Copies where items are."""
        return Windows(*(leaf[slots].astype(np.int64) for leaf in self.windows))

    def _weigh(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self.largest = max(self.largest, float(priorities.max()))
        self.tree.set(
            slots, np.asarray(priorities, np.float64) ** self._experience.priority_exponent
        )

    def _refer(self, slots: np.ndarray, change: int) -> None:
        segments = self.windows.chunks[slots] // self._rows.units
        np.add.at(self._rows.references, segments.reshape(-1), change)
        if self._cores is not None:
            np.add.at(self._cores.references, self.windows.core[slots] // self._cores.units, change)

    def load(self, windows: Windows, generation: np.ndarray, weights: np.ndarray) -> None:
        """Takes over the items of a save, leaves `[count, ...]`, where there are none yet."""
        slots = generation % self.capacity
        for mine, leaf in zip(self.windows, windows, strict=True):
            mine[slots] = leaf
        self.generation[slots] = generation
        self.tree.set(slots, weights)
        self.count = len(slots)
        self._refer(slots, 1)

    def check_valid(self) -> None:
        """Raises AssertionError where an invariant is broken."""
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
