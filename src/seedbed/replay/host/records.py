"""The rows of all environments: each is stored once, even if items share it, and copied into batches."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from seedbed.replay.host import kernels
from seedbed.replay.host.arena import Arena, Files
from seedbed.replay.host.frames import Frames, Spans
from seedbed.replay.host.items import Windows
from seedbed.replay.host.kernels import Place
from seedbed.replay.host.layout import CHUNK, Layout
from seedbed.replay.host.segments import Segments
from seedbed.types import Array


class Records:
    """Chunks of `CHUNK` rows of one environment; row r of chunk c is row `c * CHUNK + r`.

    A set is n consecutive chunks, one for each of the n environments of a group. Its leaves are written
    directly to their place, with two exceptions, which wait in a buffer until `seal`: images, which are
    compressed, and all leaves if their place is a file, because a busy disk must not delay acting. `lock` is
    the storage's lock and guards the segments.
    """

    def __init__(self, layout: Layout, files: Files | None, lock: threading.Condition) -> None:
        self._layout = layout
        # Chunks of a segment.
        self._chunks = layout.segment_rows // CHUNK
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
        # Padding: a row of zeros with `first` set, after all segments.
        self._padding = num_chunks * CHUNK
        names = [leaf.name for leaf in raw]
        self._typed[names.index("first")][num_chunks, 0] = True
        self._flags = [self._typed[names.index(n)] for n in ("first", "terminated", "truncated")]
        self._buffers: list[list[np.ndarray]] = []

    def open(self, first: int) -> list[np.ndarray]:
        """Returns the arrays to write chunks `[first, first + n)` to: `[n, CHUNK, ...]` for each leaf.

        Call from the appending thread only, under the storage's lock. Give the arrays to `seal` or `drop`.
        """
        views = dict(zip(self._unpacked, self._places(first), strict=True))
        if self._buffers:
            buffers = self._buffers.pop()
        else:
            leaves, size = self._layout.leaves, self._layout.group_size
            buffers = [leaves[index].zeros(size, CHUNK) for index in self._waiting]
        views.update(zip(self._waiting, buffers, strict=True))
        return [views[index] for index in range(len(views))]

    def write(self, views: list[np.ndarray], row: int, leaves: Sequence[Array]) -> None:
        """Copies row `row` of each chunk of a set, leaves `[n, ...]`, to `views`, which `open` returned.

        Call from the appending thread only.
        """
        for view, leaf, large, waits in zip(views, leaves, *self._ways, strict=True):
            if large:
                kernels.scatter(leaf, view, row, waits)
            else:
                view[:, row] = leaf

    def seal(self, firsts: Sequence[int], written: Sequence[list[np.ndarray]]) -> None:
        """Compresses images, moves what waits in buffers to its place, and takes the buffers back.

        `firsts` are the first chunks of sets, and `written` has the list that `open` returned for each. Call
        from the thread that holds the writer's `sealing`, without the storage's lock.
        """
        images = [[views[index] for index in self._packed] for views in written]
        self.frames.store(firsts, images)
        for first, views in zip(firsts, written, strict=True):
            for index, place in zip(self._unpacked, self._places(first), strict=True):
                if index in self._waiting:
                    place[:] = views[index]
            self.drop(views)

    def drop(self, views: list[np.ndarray]) -> None:
        """Takes back the buffers in `views`, which `open` returned. Any thread may call this, once a set."""
        self._buffers.append([views[index] for index in self._waiting])

    def copy(self, first: int) -> list[np.ndarray]:
        """Returns the rows of a set that was sealed: `[n, CHUNK, ...]` for each leaf; images are copies.

        `first` is the set's first chunk, which must be pinned or held, or in no danger.
        """
        size = self._layout.group_size
        found = dict(zip(self._unpacked, self._places(first), strict=True))
        if self._packed:
            images = [self._layout.leaves[index].zeros(CHUNK, size) for index in self._packed]
            envs, zeros = np.arange(size), np.zeros(size, np.int64)
            self.frames.read(Spans(first + envs, envs, zeros, zeros, zeros + CHUNK), images)
            found |= {
                index: np.swapaxes(image, 0, 1)
                for index, image in zip(self._packed, images, strict=True)
            }
        return [found[index] for index in range(len(found))]

    def ends(self, first: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns `first`, and whether the episode ended, in the first `rows` rows of the set's chunks.

        Both are bool `[n, rows]`. The argument `first` is the set's first chunk. Call after `seal`, from the
        thread that holds the writer's `sealing`.
        """
        chunks = slice(first, first + self._layout.group_size)
        opening, terminated, truncated = (flag[chunks, :rows] for flag in self._flags)
        return opening, terminated | truncated

    def gather(self, windows: Windows, batch: Sequence[np.ndarray | None]) -> None:
        """Copies items `[B]` to `batch`: for each leaf an array `[T, B, ...]`, or None to leave it out.

        The array gets the last T of the item's `item_rows` rows; T of an image is `item_rows`. Rows that an
        item lacks are padding. The chunks must be pinned or held; then any thread may call this, without
        the lock. Raises SeedbedError if an image cannot be decompressed.
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
        where = Place(
            chunks=windows.chunks,
            offset=windows.offset,
            front=windows.front,
            length=windows.length,
            rows=self._layout.item_rows,
        )
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
        """Returns the runs of rows of each item in each of its chunks."""
        before = np.arange(self._layout.item_chunks) * CHUNK
        offset, length = windows.offset[:, None], windows.length[:, None]
        start = np.maximum(offset - before, 0)
        end = np.minimum(offset + length - before, CHUNK)
        item, position = np.nonzero(start < end)
        start, end = start[item, position], end[item, position]
        row = windows.front[item] + before[position] + start - windows.offset[item]
        return Spans(
            chunk=windows.chunks[item, position],
            column=item,
            row=row,
            start=start,
            rows=end - start,
        )

    def _forget(self, segment: int) -> None:
        self.frames.forget(segment * self._chunks, self._chunks)
