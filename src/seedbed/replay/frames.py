"""Images, compressed: a chunk of consecutive rows of one environment is one lz4 block."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import lz4.block
import numpy as np

from seedbed.replay.arena import Arena, Files
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
    pinned; `lock` guards the segments. Compression is divided between the caller and a thread of our own;
    lz4 leaves the interpreter to others meanwhile.
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
        self._bytes = self.segments.arena.views[0].data
        self._lock = lock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="replay-frames")

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown()

    def store(self, first: int, staged: list[np.ndarray]) -> None:
        """Keeps chunks `[first, first + n)`; `staged` has `[n, CHUNK, ...]` for each leaf."""
        for index, rows in enumerate(staged):
            flat = rows.reshape(len(rows), -1)
            half = (len(flat) + 1) // 2
            later = self._pool.submit(_compress, flat[half:])
            blobs = _compress(flat[:half])
            blobs += later.result()
            sizes = np.array([len(blob) for blob in blobs])
            data = b"".join(blobs)
            with self._lock:
                start = self.segments.allocate(len(data))
                assert start is not None, "twice the chunks' bytes is enough"
                self.segments.references[start // self.segments.units] += len(blobs)
            self._bytes[start : start + len(data)] = data
            chunks = slice(first, first + len(flat))
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
            leaf = self._leaves[index]
            offset, size = self.offset[index, spans.chunk], self.size[index, spans.chunk]
            work = list(zip(offset.tolist(), size.tolist(), *_lists(spans), strict=True))
            half = (len(work) + 1) // 2
            shape = (CHUNK, *leaf.shape)
            later = self._pool.submit(_decompress, self._bytes, shape, work[half:], out)
            _decompress(self._bytes, shape, work[:half], out)
            later.result()

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


def _lists(spans: Spans) -> list[list[int]]:
    return [array.tolist() for array in spans[1:]]


def _compress(chunks: np.ndarray) -> list[bytes]:
    """Compresses each of `chunks` `[n, bytes]`."""
    blobs = []
    for chunk in chunks:
        blob = lz4.block.compress(chunk, store_size=False)
        blobs.append(blob if len(blob) < _WORTH * chunk.nbytes else chunk.tobytes())
    return blobs


def _decompress(
    memory: memoryview, shape: tuple[int, ...], work: list[tuple[int, ...]], out: np.ndarray
) -> None:
    """Writes rows of chunks of `shape` into `out`; `work` names offset and size in memory, and the span."""
    whole = int(np.prod(shape))
    for offset, size, column, row, start, count in work:
        data = memory[offset : offset + size]
        if size != whole:
            data = lz4.block.decompress(data, uncompressed_size=whole)
        rows = np.frombuffer(data, np.uint8).reshape(shape)
        out[row : row + count, column] = rows[start : start + count]
