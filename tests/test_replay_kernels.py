"""The machine code of replay, against numpy and against lz4 itself."""

from __future__ import annotations

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.replay.host import kernels
from seedbed.replay.host.kernel_ir import CHUNK, LEAST_BYTES
from seedbed.replay.host.kernels import Pieces, Place
from seedbed.types import SeedbedError

SIZES = st.integers(LEAST_BYTES, LEAST_BYTES + 700)


def random_bytes(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def shifted(array: np.ndarray, by: int) -> np.ndarray:
    """The same values at an address that is `by` bytes off."""
    room = np.zeros(array.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + by
    result = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    result[...] = array
    return result


@given(
    size=SIZES,
    n=st.integers(1, 5),
    row=st.integers(0, 3),
    by=st.integers(0, 63),
    soon=st.booleans(),
)
@settings(deadline=None)
def test_scatter_writes_one_row_of_each_and_nothing_else(size, n, row, by, soon):
    source = shifted(random_bytes(0, n, size), 64 - by)
    result = shifted(random_bytes(1, n, 4, size), by)
    expected = result.copy()
    expected[:, row] = source
    kernels.scatter(source, result, row, soon)
    np.testing.assert_array_equal(result, expected)


def test_scatter_takes_rows_as_numpy_would():
    result = np.zeros((3, 2, 20, 20), np.float32)
    source = (
        np.arange(3 * 400, dtype=np.float64).reshape(20, 20, 3).T
    )  # neither contiguous nor float32
    source.flags.writeable = False
    kernels.scatter(source, result, 1, soon=False)
    np.testing.assert_array_equal(result[:, 1], source.astype(np.float32))
    assert not result[:, 0].any()
    with pytest.raises(ValueError, match=r"rows \(2, 400\) do not go into \(3, 2, 20, 20\)"):
        kernels.scatter(np.zeros((2, 400)), result, 0, soon=True)


@pytest.mark.slow
@given(st.data())
@settings(deadline=None)
def test_gather_is_the_slow_account(data):
    draw = data.draw
    count, most, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    chunks = 7
    items = []
    for _ in range(count):
        front = draw(st.integers(0, rows))
        length = draw(st.integers(0, min(rows - front, most * CHUNK)))
        offset = draw(st.integers(0, most * CHUNK - length).map(lambda x: min(x, CHUNK - 1)))
        items.append(
            (
                draw(st.lists(st.integers(0, chunks - 1), min_size=most, max_size=most)),
                offset,
                front,
                length,
            )
        )
    place = Place(*(np.array(x, np.int64) for x in zip(*items, strict=True)), rows)
    padding = chunks * CHUNK
    pairs, expected = [], []
    for seed, size in enumerate((1, 3, 4, 8, LEAST_BYTES - 1, LEAST_BYTES, draw(SIZES))):
        source = random_bytes(seed, padding + 1, size)
        steps = draw(st.integers(1, rows))
        pairs.append((source, random_bytes(99, steps * count, size)))
        wanted = np.empty((rows, count, size), np.uint8)
        for item, (mine, offset, front, length) in enumerate(items):
            for t in range(rows):
                at = t - front + offset
                inside = front <= t < front + length
                wanted[t, item] = source[
                    mine[at // CHUNK] * CHUNK + at % CHUNK if inside else padding
                ]
        expected.append(wanted[rows - steps :].reshape(-1, size))
    kernels.gather(place, padding, pairs)
    for (_, result), wanted in zip(pairs, expected, strict=True):
        np.testing.assert_array_equal(result, wanted)


def images(kind: str, n: int, size: int) -> np.ndarray:
    flat = {
        "noise": random_bytes(0, n, CHUNK * size),
        "flat": np.full((n, CHUNK * size), 7, np.uint8),
    }
    flat["both"] = np.where(np.arange(n)[:, None] % 2 == 0, flat["noise"], flat["flat"])
    return flat[kind]


@pytest.mark.parametrize("kind", ["noise", "flat", "both"])
@pytest.mark.parametrize("sets", [1, 3])
def test_compressed_chunks_are_lz4s_or_as_they_are(kind, sets):
    size, n = LEAST_BYTES + 5, 4
    chunks = [images(kind, n, size) + np.uint8(i) for i in range(sets)]
    whole, result = CHUNK * size, np.zeros(sets * n * CHUNK * size, np.uint8)
    sizes = kernels.compress(chunks, int(0.9 * whole), result)
    assert sizes.shape == (sets, n)
    end = 0
    for length, chunk in zip(sizes.reshape(-1), np.concatenate(chunks), strict=True):
        blob = result[end : end + length]
        end += length
        if length == whole:
            np.testing.assert_array_equal(blob, chunk)
        else:
            assert lz4.block.decompress(blob, uncompressed_size=whole) == chunk.tobytes()
    noise = {"noise": n, "flat": 0, "both": n // 2}[kind] * sets
    assert (sizes == whole).sum() == noise
    assert not result[end:].any()


@pytest.mark.parametrize("kind", ["noise", "flat", "both"])
def test_pieces_go_where_they_belong(kind):
    size, n, batch, steps = LEAST_BYTES + 3, 4, 3, 10
    chunks, whole = images(kind, n, size), CHUNK * size
    memory = np.zeros(n * whole, np.uint8)
    sizes = kernels.compress([chunks], int(0.9 * whole), memory)[0]
    pieces = Pieces(
        offset=np.cumsum(sizes) - sizes,
        size=sizes,
        start=np.array([0, 3, 7, 2]),
        rows=np.array([8, 5, 1, 2]),
        place=np.array([2, 0, 1, 8]) * batch + np.array([0, 1, 2, 1]),
    )
    result = random_bytes(5, steps, batch, size)
    expected = result.copy()
    rows = chunks.reshape(n, CHUNK, size)
    expected[2:10, 0], expected[0:5, 1] = rows[0], rows[1, 3:]
    expected[1, 2], expected[8:10, 1] = rows[2, 7], rows[3, 2:4]
    kernels.decompress(memory, pieces, whole, result)
    np.testing.assert_array_equal(result, expected)


def test_a_damaged_chunk_is_told():
    size, whole = LEAST_BYTES, CHUNK * LEAST_BYTES
    memory = np.zeros(2 * whole, np.uint8)
    sizes = kernels.compress([images("flat", 2, size)], whole, memory)[0]
    memory[: sizes[0]] = 255  # lengths that never end
    each = np.zeros(2, np.int64)
    pieces = Pieces(np.cumsum(sizes) - sizes, sizes, each, each + CHUNK, np.arange(2))
    with pytest.raises(SeedbedError, match="1 of 2 chunks of images in the replay are damaged"):
        kernels.decompress(memory, pieces, whole, np.zeros((CHUNK, 2, size), np.uint8))
