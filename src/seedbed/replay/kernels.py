"""Machine code for the bytes of replay: rows copied, chunks compressed, many in a call.

A call for each frame would cost more in waiting for memory, and for the interpreter, than in copying. Here
the next row is fetched while one is copied, rows that nobody reads soon pass the caches by, and other threads
have the interpreter meanwhile.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import lz4.block
import numpy as np

from seedbed.llvm import compile_object, host_vector_unit, load_object
from seedbed.replay import kernel_ir
from seedbed.types import SeedbedError


class Place(NamedTuple):
    """Where the rows of items are; leaves are `[B]` int64."""

    chunks: np.ndarray  # [B, M]
    offset: np.ndarray  # of the first row in the first chunk
    front: np.ndarray  # rows of padding before that
    length: np.ndarray  # rows
    rows: int  # of an item with its padding


class Pieces(NamedTuple):
    """Rows of compressed chunks, and where they go; leaves are `[k]` int64."""

    offset: np.ndarray  # byte of the memory
    size: np.ndarray  # bytes there; a chunk that is as large as its rows was not compressed
    start: np.ndarray  # first row of the chunk
    rows: np.ndarray  # how many
    place: np.ndarray  # row of the result


class _Kernels(NamedTuple):
    """Functions of machine code; arguments are addresses and counts."""

    scatter: Callable[..., int]
    stream: Callable[..., int]
    gather: Callable[..., int]
    compress: Callable[..., int]
    decompress: Callable[..., int]
    weigh: Callable[..., int]
    draw: Callable[..., int]


def scatter(source: np.ndarray, result: np.ndarray, row: int, soon: bool) -> None:
    """Copies `source` `[n, ...]` to `result[:, row]`, of `[n, R, ...]`; `soon` says that it is read soon."""
    source = np.ascontiguousarray(source, result.dtype)
    if source.shape != result.shape[:1] + result.shape[2:]:
        raise ValueError(f"rows {source.shape} do not go into {result.shape}")
    assert result.flags.c_contiguous
    stride, size = result.strides[:2]
    copy = _kernels().scatter if soon else _kernels().stream
    copy(_address(result) + row * size, stride, _address(source), size, len(source))


def gather(place: Place, padding: int, leaves: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copies rows of items from sources `[R, bytes]` to results `[T * B, bytes]`, a pair for each leaf.

    T are the last rows of `place.rows`; row `padding` stands for what an item lacks.
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
        *(chunks, place.rows, count, padding, _address(rows), _address(table), len(table)),
    )


def compress(sets: Sequence[np.ndarray], most: int, result: np.ndarray) -> np.ndarray:
    """Compresses every chunk of all `sets` `[n, bytes]`, one behind the other, to `result`.

    A chunk that would take more than `most` bytes is copied as it is. Returns sizes `[sets, n]` int64.
    """
    (count, size), each = sets[0].shape, np.arange(len(sets[0])) * sets[0].shape[1]
    assert result.nbytes >= len(sets) * count * size
    chunks = np.array([_address(chunks) + each for chunks in sets])
    sizes = np.empty(chunks.shape, np.int64)
    _kernels().compress(
        *(_address(chunks), size, chunks.size, _address(result)),
        *(most, _address(sizes), _lz4("LZ4_compress_fast")),
    )
    return sizes


def decompress(memory: np.ndarray, pieces: Pieces, whole: int, result: np.ndarray) -> None:
    """Copies rows of chunks of `whole` bytes in `memory` to `result` `[T, B, bytes]`.

    The rows of a chunk go to `result.reshape(T * B, bytes)[place + i * B]`. Raises SeedbedError where what
    is in memory cannot be decompressed.
    """
    assert memory.flags.c_contiguous and result.flags.c_contiguous
    work = np.array(pieces)
    size = result.strides[1]
    scratch = np.empty(whole, np.uint8)
    failed = _kernels().decompress(
        *(_address(memory), _address(work), work.shape[1], _address(result)),
        *(size, result.strides[0], _address(scratch), whole, _lz4("LZ4_decompress_safe")),
    )
    if failed:
        raise SeedbedError(
            f"{failed} of {work.shape[1]} chunks of images in the replay are damaged: the memory or a "
            "file of the run's folder replay was changed; go on without it (remove that folder)"
        )


def weigh(nodes: np.ndarray, slots: np.ndarray, weights: np.ndarray) -> None:
    """Sets leaves `slots` `[k]` (int64) of the binary tree of sums `nodes` `[2 * leaves]` (float64).

    Node 1 is the root, node k has the children 2k and 2k + 1; `weights` are `[k]` float64. Of a slot that is
    named twice the last weight counts.
    """
    first = len(nodes) // 2
    assert slots.dtype == np.int64 and weights.dtype == nodes.dtype == np.float64
    assert len(weights) == len(slots) and (
        not len(slots) or 0 <= slots.min() <= slots.max() < first
    )
    depth = first.bit_length() - 1
    _kernels().weigh(
        *(_address(nodes), depth, first, _address(slots), _address(weights), len(slots))
    )


def draw(nodes: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Returns leaves `[k]` (int64) of such a tree for `uniforms` `[k]` in [0, 1); never one that is 0."""
    first, slots = len(nodes) // 2, np.empty(len(uniforms), np.int64)
    assert uniforms.dtype == np.float64 and uniforms.flags.c_contiguous
    depth = first.bit_length() - 1
    _kernels().draw(
        *(_address(nodes), depth, first, _address(uniforms), _address(slots), len(slots))
    )
    return slots


def _address(array: np.ndarray) -> int:
    try:  # this takes a third of the time of the other
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, or empty
        return array.ctypes.data


@functools.cache
def _lz4(name: str) -> int:
    """Address of a function of the library that the package lz4 is made of, or links to."""
    library = ctypes.CDLL(lz4.block._block.__file__)  # type: ignore[attr-defined]
    try:
        function = getattr(library, name)
    except AttributeError:
        raise SeedbedError(
            f"the package lz4 {lz4.__version__} does not show its function {name}: "
            "install it from PyPI (pip install --force-reinstall lz4)"
        ) from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def _kernels() -> _Kernels:
    code = compile_object(kernel_ir.module(), host_vector_unit().width)
    p, n = ctypes.c_void_p, ctypes.c_int64
    long: dict[str, list[type]] = {
        "scatter": [p, n, p, n, n],
        "stream": [p, n, p, n, n],
        "gather": [p, p, p, p, n, n, n, n, p, p, n],
        "compress": [p, n, n, p, n, p, p],
        "decompress": [p, p, n, p, n, n, p, n, p],
    }
    short: dict[str, list[type]] = {"weigh": [p, n, n, p, p, n], "draw": [p, n, n, p, p, n]}
    # To hand the interpreter over takes longer than the short ones do.
    kinds = {name: ctypes.CFUNCTYPE(n, *given) for name, given in long.items()}
    kinds |= {name: ctypes.PYFUNCTYPE(n, *given) for name, given in short.items()}
    return _Kernels(**{name: kind(load_object(code, name)) for name, kind in kinds.items()})
