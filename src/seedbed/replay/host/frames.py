"""Compressed images: a chunk of `CHUNK` consecutive rows of one environment is one lz4 block."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seedbed.replay.host import kernels
from seedbed.replay.host.arena import Arena, Files
from seedbed.replay.host.kernels import Pieces
from seedbed.replay.host.layout import CHUNK, Layout
from seedbed.replay.host.segments import Segments

# A chunk is stored uncompressed unless lz4 makes it at most this share of its size.
_WORTH = 0.9


class Spans(NamedTuple):
    """Runs of consecutive rows in chunks, and their places in a batch; leaves are `[k]`."""

    chunk: np.ndarray  # number of the chunk
    column: np.ndarray  # item of the batch
    row: np.ndarray  # first row in the batch
    start: np.ndarray  # first row in the chunk
    rows: np.ndarray  # number of rows


class Frames:
    """The compressed leaves of all chunks.

    `lock` is the storage's lock and guards the segments. One thread may store while others read, as long as
    the chunks that they read are pinned.
    """

    def __init__(
        self, layout: Layout, num_chunks: int, files: Files | None, lock: threading.Condition
    ) -> None:
        self._leaves = [leaf for leaf in layout.leaves if leaf.compressed]
        self.offset = np.full((len(self._leaves), num_chunks), -1, np.int64)
        self.size = np.zeros((len(self._leaves), num_chunks), np.int32)
        # Of an uncompressed chunk of each leaf.
        self.whole_bytes = np.array([CHUNK * leaf.num_bytes for leaf in self._leaves], np.int64)
        raw = int(self.whole_bytes.sum()) * num_chunks
        # Twice the largest possible need: the end of a segment may be too short for the next chunks.
        # Addresses cost nothing.
        count = 2 * raw // layout.blob_bytes + 8 if self._leaves else 0
        self.segments = Segments(
            Arena("images", count, [layout.blob_bytes], files), layout.blob_bytes
        )
        self._bytes = self.segments.arena.views[0]
        self._lock = lock
        self._scratch = np.empty(0, np.uint8)

    def store(self, firsts: Sequence[int], staged: Sequence[list[np.ndarray]]) -> None:
        """Compresses and stores sets of chunks; set i is the chunks `[firsts[i], firsts[i] + n)`.

        `staged[i]` has the compressed leaves of set i, `[n, CHUNK, ...]` each. Call from one thread at a time
        (the holder of the writer's `sealing`), without the storage's lock: this takes it.
        """
        for index, whole in enumerate(self.whole_bytes.tolist()):
            sets = [leaves[index].reshape(-1, whole) for leaves in staged]
            room = sum(chunks.size for chunks in sets)
            if len(self._scratch) < room:
                self._scratch = np.empty(room, np.uint8)
            found, end = kernels.compress(sets, int(_WORTH * whole), self._scratch), 0
            for first, sizes in zip(firsts, found, strict=True):
                total = int(sizes.sum())
                with self._lock:
                    start = self.segments.allocate(total)
                    assert start is not None, "twice the chunks' bytes is enough"
                    self.segments.references[start // self.segments.units] += len(sizes)
                self._bytes[start : start + total] = self._scratch[end : end + total]
                end += total
                chunks = slice(first, first + len(sizes))
                self.offset[index, chunks] = start + np.cumsum(sizes) - sizes
                self.size[index, chunks] = sizes

    def forget(self, first: int, count: int) -> None:
        """Releases the memory of chunks `[first, first + count)`. Call under the storage's lock."""
        chunks = self.offset[:, first : first + count]
        np.subtract.at(self.segments.references, chunks[chunks >= 0] // self.segments.units, 1)
        chunks[:] = -1

    def load(self, chunks: np.ndarray, offset: np.ndarray, size: np.ndarray) -> None:
        """Loads the table of a save: `chunks` `[k]`, `offset` and `size` `[L, k]` for L compressed leaves.

        Call under the storage's lock.
        """
        self.offset[:, chunks], self.size[:, chunks] = offset, size
        stored = self.offset[self.offset >= 0] // self.segments.units
        self.segments.references[:] = np.bincount(stored, minlength=len(self.segments.references))

    def read(self, spans: Spans, batch: list[np.ndarray]) -> None:
        """Copies rows of chunks to `batch`, which has an array `[T, B, ...]` for each compressed leaf.

        Any thread may call this without the lock, if the chunks are pinned. Raises SeedbedError if a chunk
        cannot be decompressed.
        """
        for index, out in enumerate(batch):
            pieces = Pieces(
                offset=self.offset[index, spans.chunk],
                size=self.size[index, spans.chunk],
                start=spans.start,
                rows=spans.rows,
                place=spans.row * out.shape[1] + spans.column,
            )
            whole = int(self.whole_bytes[index])
            flat = out.reshape(*out.shape[:2], -1).view(np.uint8)
            kernels.decompress(self._bytes, pieces, whole, flat)

    def check_valid(self) -> None:
        """Raises AssertionError if an invariant is broken. Call under the storage's lock."""
        stored = self.offset[self.offset >= 0]
        segment = stored // self.segments.units
        count = np.bincount(segment, minlength=len(self.segments.references))
        assert (count == self.segments.references).all(), "references to images are miscounted"
        assert (self.segments.opened[segment] >= 0).all(), "an image is in a closed segment"

    def compression(self) -> float:
        """Returns the raw size of the images over their stored size, 1 if there are no images.

        Call under the storage's lock.
        """
        there = self.offset >= 0
        whole = self.whole_bytes @ there.sum(axis=1)
        return float(whole / max(1, self.size[there].sum())) if there.any() else 1.0
