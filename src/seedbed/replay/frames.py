"""Images, compressed: a chunk of consecutive rows of one environment is one lz4 block."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seedbed.replay import kernels
from seedbed.replay.arena import Arena, Files
from seedbed.replay.kernels import Pieces
from seedbed.replay.layout import CHUNK, Layout
from seedbed.replay.segments import Segments

_WORTH = 0.9  # a chunk that does not shrink below this is kept as it is


class Spans(NamedTuple):
    """Consecutive rows of chunks and where in a batch they go; leaves are `[k]`."""

    chunk: np.ndarray
    column: np.ndarray  # item of the batch
    row: np.ndarray  # first row of the batch
    start: np.ndarray  # first row of the chunk
    rows: np.ndarray  # how many


class Frames:
    """The compressed leaves of all chunks.

    `store` is for one thread at a time and `read` for another, as long as the chunks that are read are
    pinned; `lock` guards the segments.
    """

    def __init__(
        self, layout: Layout, num_chunks: int, files: Files | None, lock: threading.Condition
    ) -> None:
        self._leaves = [leaf for leaf in layout.leaves if leaf.compressed]
        self.offset = np.full((len(self._leaves), num_chunks), -1, np.int64)
        self.size = np.zeros((len(self._leaves), num_chunks), np.int32)
        raw = sum(leaf.num_bytes for leaf in self._leaves) * CHUNK * num_chunks
        # Twice what can be: a segment's end may be too short for the next chunks. Addresses cost nothing.
        count = 2 * raw // layout.blob_bytes + 8 if self._leaves else 0
        self.segments = Segments(
            Arena("images", count, [layout.blob_bytes], files), layout.blob_bytes
        )
        self._bytes = self.segments.arena.views[0]
        self._lock = lock
        self._scratch = np.empty(0, np.uint8)

    def store(self, firsts: Sequence[int], staged: Sequence[list[np.ndarray]]) -> None:
        """Keeps sets of chunks `[first, first + n)`; `staged` has the leaves `[n, CHUNK, ...]` of each."""
        for index, leaf in enumerate(self._leaves):
            whole = CHUNK * leaf.num_bytes
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
        """Gives back what chunks `[first, first + count)` take; call it under the lock."""
        chunks = self.offset[:, first : first + count]
        np.subtract.at(self.segments.references, chunks[chunks >= 0] // self.segments.units, 1)
        chunks[:] = -1

    def load(self, chunks: np.ndarray, offset: np.ndarray, size: np.ndarray) -> None:
        """Takes over the table of a save: these `chunks` `[k]`, `[L, k]` for L compressed leaves."""
        self.offset[:, chunks], self.size[:, chunks] = offset, size
        stored = self.offset[self.offset >= 0] // self.segments.units
        self.segments.references[:] = np.bincount(stored, minlength=len(self.segments.references))

    def read(self, spans: Spans, batch: list[np.ndarray]) -> None:
        """Writes rows of chunks to `batch`, `[T, B, ...]` for each leaf."""
        for index, out in enumerate(batch):
            pieces = Pieces(
                offset=self.offset[index, spans.chunk],
                size=self.size[index, spans.chunk],
                start=spans.start,
                rows=spans.rows,
                place=spans.row * out.shape[1] + spans.column,
            )
            whole = CHUNK * self._leaves[index].num_bytes
            flat = out.reshape(*out.shape[:2], -1).view(np.uint8)
            kernels.decompress(self._bytes, pieces, whole, flat)

    def check_valid(self) -> None:
        """Raises AssertionError where an invariant is broken."""
        stored = self.offset[self.offset >= 0]
        segment = stored // self.segments.units
        count = np.bincount(segment, minlength=len(self.segments.references))
        assert (count == self.segments.references).all(), "references to images are miscounted"
        assert (self.segments.opened[segment] >= 0).all(), "an image is in a closed segment"

    def compression(self) -> float:
        """Returns how many times smaller the images became; 1 where there are none."""
        there = self.offset >= 0
        whole = np.array([CHUNK * leaf.num_bytes for leaf in self._leaves]) @ there.sum(axis=1)
        return float(whole / max(1, self.size[there].sum())) if there.any() else 1.0
