"""The rows of all environments: stored once, whatever items share them, and gathered into batches."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from seedbed.replay import kernels
from seedbed.replay.arena import Arena, Files
from seedbed.replay.frames import Frames, Spans
from seedbed.replay.items import Windows
from seedbed.replay.kernels import Place
from seedbed.replay.layout import CHUNK, Layout
from seedbed.replay.segments import Segments
from seedbed.types import Array


class Records:
    """Chunks of `CHUNK` rows of one environment; row r of chunk c is row `c * CHUNK + r`.

    Leaves are written straight to their place, but for images, which wait in a buffer for compression, and
    all those whose place is a file: a disk that is busy must not keep acting from going on. `lock` guards
    the segments.
    """

    def __init__(self, layout: Layout, files: Files | None, lock: threading.Condition) -> None:
        self._layout = layout
        self._chunks = layout.segment_rows // CHUNK  # of a segment
        num_chunks = layout.num_segments * self._chunks
        self.frames = Frames(layout, num_chunks, files, lock)
        raw = [leaf for leaf in layout.leaves if not leaf.compressed]
        self._packed = [i for i, leaf in enumerate(layout.leaves) if leaf.compressed]
        self._unpacked = [i for i, leaf in enumerate(layout.leaves) if not leaf.compressed]
        self._waiting = self._packed if files is None else list(range(len(layout.leaves)))
        every = range(len(layout.leaves))
        self._ways = [leaf.large for leaf in layout.leaves], [i in self._waiting for i in every]
        sizes = [layout.segment_rows * leaf.num_bytes for leaf in raw]
        self._arena = Arena("rows", layout.num_segments, sizes, files)
        self.segments = Segments(self._arena, self._chunks, self._forget)
        self._bytes, self._typed = [], []
        for leaf, view in zip(raw, self._arena.views, strict=True):
            self._bytes.append(view.reshape(-1, leaf.num_bytes))
            self._typed.append(view.view(leaf.dtype).reshape(-1, CHUNK, *leaf.shape))
        # A row of zeros with `first` set, behind all segments, stands for what an item lacks.
        self._padding = num_chunks * CHUNK
        names = [leaf.name for leaf in raw]
        self._typed[names.index("first")][num_chunks, 0] = True
        self._flags = [self._typed[names.index(n)] for n in ("first", "terminated", "truncated")]
        self._buffers: list[list[np.ndarray]] = []

    def open(self, first: int) -> list[np.ndarray]:
        """Returns where chunks `[first, first + n)` are written: `[n, CHUNK, ...]` for each leaf."""
        views = dict(zip(self._unpacked, self._places(first), strict=True))
        if self._buffers:
            buffers = self._buffers.pop()
        else:
            leaves, size = self._layout.leaves, self._layout.group_size
            buffers = [leaves[index].zeros(size, CHUNK) for index in self._waiting]
        views.update(zip(self._waiting, buffers, strict=True))
        return [views[index] for index in range(len(views))]

    def write(self, views: list[np.ndarray], row: int, leaves: Sequence[Array]) -> None:
        """Copies a row of each chunk, leaves `[n, ...]`, to `views`, which came from `open`."""
        for view, leaf, large, waits in zip(views, leaves, *self._ways, strict=True):
            if large:
                kernels.scatter(leaf, view, row, waits)
            else:
                view[:, row] = leaf

    def seal(self, firsts: Sequence[int], written: Sequence[list[np.ndarray]]) -> None:
        """Brings what was written to views from `open`, a list a set, to its place, and takes them back."""
        images = [[views[index] for index in self._packed] for views in written]
        self.frames.store(firsts, images)
        for first, views in zip(firsts, written, strict=True):
            for index, place in zip(self._unpacked, self._places(first), strict=True):
                if index in self._waiting:
                    place[:] = views[index]
            self.drop(views)

    def drop(self, views: list[np.ndarray]) -> None:
        """Takes back what `open` gave."""
        self._buffers.append([views[index] for index in self._waiting])

    def ends(self, first: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads of chunks `[first, first + n)` `first`, and whether an episode ended: both `[n, rows]`."""
        chunks = slice(first, first + self._layout.group_size)
        opening, terminated, truncated = (flag[chunks, :rows] for flag in self._flags)
        return opening, terminated | truncated

    def gather(self, windows: Windows, batch: Sequence[np.ndarray | None]) -> None:
        """Copies items `[B]` to `batch`: for each leaf `[T, B, ...]`, or None for one that is not wanted.

        T are the last rows of `item_rows`; what an item lacks is padding. The chunks must be pinned.
        """
        raw = iter(self._bytes)
        images: list[np.ndarray] = []
        leaves: list[tuple[np.ndarray, np.ndarray]] = []
        for leaf, out in zip(self._layout.leaves, batch, strict=True):
            source = None if leaf.compressed else next(raw)
            if out is None:
                continue
            if source is None:
                images.append(out)
            else:
                leaves.append((source, out.reshape(-1).view(np.uint8).reshape(-1, leaf.num_bytes)))
        where = Place(*windows[:4], self._layout.item_rows)
        kernels.gather(where, self._padding, leaves)
        if images:
            for item, (front, length) in enumerate(zip(windows.front, windows.length, strict=True)):
                for out in images:
                    out[:front, item] = 0
                    out[front + length :, item] = 0
            self.frames.read(self._spans(windows), images)

    def _places(self, first: int) -> list[np.ndarray]:
        chunks = slice(first, first + self._layout.group_size)
        return [view[chunks] for view in self._typed]

    def _spans(self, windows: Windows) -> Spans:
        """Divides items among their chunks."""
        before = np.arange(self._layout.item_chunks) * CHUNK
        offset, length = windows.offset[:, None], windows.length[:, None]
        start = np.maximum(offset - before, 0)
        end = np.minimum(offset + length - before, CHUNK)
        item, position = np.nonzero(start < end)
        start, end = start[item, position], end[item, position]
        row = windows.front[item] + before[position] + start - windows.offset[item]
        return Spans(windows.chunks[item, position], item, row, start, end - start)

    def _forget(self, segment: int) -> None:
        self.frames.forget(segment * self._chunks, self._chunks)
