"""Machine code that copies rows, compresses chunks and walks the sum tree of replay, many in a call.

With a call for each frame, most of the time would go to waiting for memory and for the interpreter. Here
the next row is prefetched while one row is copied, and rows that are not read soon bypass the caches. All
functions but `weigh` and `draw` release the interpreter lock (GIL) while they work. Any thread may call them,
as long as no other thread writes to the same memory. The first call compiles the kernels.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from seedbed.compression import lz4_address
from seedbed.llvm import compile_object, host_target, load_object
from seedbed.replay.host import kernel_ir
from seedbed.types import SeedbedError


class Place(NamedTuple):
    """The places of the rows of B items; arrays are contiguous int64, `[B]` but for `chunks`."""

    chunks: np.ndarray  # [B, M] chunks of the item, in order
    offset: np.ndarray  # first row of the item in its first chunk
    front: np.ndarray  # rows of padding before that row
    length: np.ndarray  # rows without padding
    rows: int  # rows of every item with its padding


class Pieces(NamedTuple):
    """Runs of rows in compressed chunks, and their places in a result; leaves are `[k]` int64."""

    offset: np.ndarray  # first byte of the chunk in the memory
    # Bytes of the chunk in the memory. A chunk with the size of its raw rows is not compressed.
    size: np.ndarray
    start: np.ndarray  # first row in the chunk
    rows: np.ndarray  # number of rows
    place: np.ndarray  # row of the result for the first row


class _Kernels(NamedTuple):
    """The compiled functions; their arguments are addresses and counts."""

    scatter: Callable[..., int]
    stream: Callable[..., int]
    gather: Callable[..., int]
    compress: Callable[..., int]
    decompress: Callable[..., int]
    weigh: Callable[..., int]
    draw: Callable[..., int]


def scatter(source: np.ndarray, result: np.ndarray, row: int, soon: bool) -> None:
    """Copies `source` `[n, ...]` to `result[:, row]`; `result` is `[n, R, ...]` and contiguous.

    A row must have at least `LEAST_BYTES` bytes. Set `soon` if the result is read soon: otherwise the copy
    bypasses the caches. Raises ValueError if the shapes do not fit.
    """
    source = np.ascontiguousarray(source, result.dtype)
    if source.shape != result.shape[:1] + result.shape[2:]:
        raise ValueError(f"rows {source.shape} do not go into {result.shape}")
    assert result.flags.c_contiguous
    stride, size = result.strides[:2]
    copy = _kernels().scatter if soon else _kernels().stream
    copy(_address(result) + row * size, stride, _address(source), size, len(source))


def gather(place: Place, padding: int, leaves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies rows of items from a source `[R, bytes]` to a result `[T * B, bytes]` for each pair of `leaves`.

    A result gets the last T of the `place.rows` rows of each item. Row `padding` of the source is copied to
    the rows before and after an item.
    """
    count, chunks = place.chunks.shape
    assert all(x.dtype == np.int64 and x.flags.c_contiguous for x in place[:4])
    table = np.empty((len(leaves), 4), np.int64)
    for line, (source, result) in zip(table, leaves, strict=True):
        assert source.flags.c_contiguous and result.flags.c_contiguous
        assert source.shape[1] == result.shape[1] and not len(result) % count
        skipped = place.rows * count - len(result)
        line[:] = _address(result), _address(source), source.shape[1], skipped
    rows = np.empty(place.rows * count, np.int64)
    _kernels().gather(
        *(_address(leaf) for leaf in (place.chunks, place.offset, place.front, place.length)),
        chunks,
        place.rows,
        count,
        padding,
        _address(rows),
        _address(table),
        len(table),
    )


def compress(sets: Sequence[np.ndarray], most: int, result: np.ndarray) -> np.ndarray:
    """Compresses every chunk of all `sets` (each `[n, bytes]`, contiguous), packed into `result`.

    A chunk that would take more than `most` bytes is copied as it is, so `result` needs room for all raw
    chunks. Returns the sizes in bytes, `[sets, n]` int64.
    """
    (count, size), each = sets[0].shape, np.arange(len(sets[0])) * sets[0].shape[1]
    assert result.nbytes >= len(sets) * count * size
    chunks = np.array([_address(chunks) + each for chunks in sets])
    sizes = np.empty(chunks.shape, np.int64)
    _kernels().compress(
        _address(chunks),
        size,
        chunks.size,
        _address(result),
        most,
        _address(sizes),
        lz4_address("LZ4_compress_fast"),
    )
    return sizes


def decompress(memory: np.ndarray, pieces: Pieces, whole: int, result: np.ndarray) -> None:
    """Copies rows of the compressed chunks in `memory` to `result` `[T, B, bytes]`.

    `whole` is the raw size of a chunk in bytes. Row i of a piece goes to
    `result.reshape(T * B, bytes)[place + i * B]`. A row must have at least `LEAST_BYTES` bytes. Raises
    SeedbedError if a chunk cannot be decompressed.
    """
    assert memory.flags.c_contiguous and result.flags.c_contiguous
    work = np.array(pieces)
    size = result.strides[1]
    scratch = np.empty(whole, np.uint8)
    failed = _kernels().decompress(
        _address(memory),
        _address(work),
        work.shape[1],
        _address(result),
        size,
        result.strides[0],
        _address(scratch),
        whole,
        lz4_address("LZ4_decompress_safe"),
    )
    if failed:
        raise SeedbedError(
            f"{failed} of {work.shape[1]} chunks of images in the replay are damaged: the memory or a "
            "file of the run's folder replay was changed; go on without it (remove that folder)"
        )


def weigh(nodes: np.ndarray, slots: np.ndarray, weights: np.ndarray) -> None:
    """Sets leaves `slots` `[k]` (int64) of the binary sum tree `nodes` `[2 * leaves]` (float64) to `weights`.

    Node 1 is the root, and node k has the children 2k and 2k + 1; the number of leaves is a power of two.
    `weights` is `[k]` float64. If a slot occurs twice, its last weight counts.
    """
    first = len(nodes) // 2
    assert slots.dtype == np.int64 and weights.dtype == nodes.dtype == np.float64
    assert len(weights) == len(slots) and (
        not len(slots) or 0 <= slots.min() <= slots.max() < first
    )
    depth = first.bit_length() - 1
    _kernels().weigh(_address(nodes), depth, first, _address(slots), _address(weights), len(slots))


def draw(nodes: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Returns leaves `[k]` (int64) of a sum tree as in `weigh`, drawn in proportion to their weights.

    `uniforms` is `[k]` float64 in [0, 1), contiguous. The total must be above 0; then no leaf of weight 0 is
    returned.
    """
    first, slots = len(nodes) // 2, np.empty(len(uniforms), np.int64)
    assert uniforms.dtype == np.float64 and uniforms.flags.c_contiguous
    depth = first.bit_length() - 1
    _kernels().draw(_address(nodes), depth, first, _address(uniforms), _address(slots), len(slots))
    return slots


def _address(array: np.ndarray) -> int:
    # This takes a third of the time of `ctypes.data`, but it refuses arrays that are read-only or empty.
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return array.ctypes.data


@functools.cache
def _kernels() -> _Kernels:
    code = compile_object(kernel_ir.module(), host_target())
    p, n = ctypes.c_void_p, ctypes.c_int64
    long: dict[str, list[type]] = {
        "scatter": [p, n, p, n, n],
        "stream": [p, n, p, n, n],
        "gather": [p, p, p, p, n, n, n, n, p, p, n],
        "compress": [p, n, n, p, n, p, p],
        "decompress": [p, p, n, p, n, n, p, n, p],
    }
    short: dict[str, list[type]] = {"weigh": [p, n, n, p, p, n], "draw": [p, n, n, p, p, n]}
    # The short ones keep the GIL (PYFUNCTYPE): releasing it would take longer than they run.
    kinds = {name: ctypes.CFUNCTYPE(n, *given) for name, given in long.items()}
    kinds |= {name: ctypes.PYFUNCTYPE(n, *given) for name, given in short.items()}
    return _Kernels(**{name: kind(load_object(code, name)) for name, kind in kinds.items()})
