"""Running statistics: any order, division and origin of the sums give the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.agents.base import scaling_of
from seedbed.agents.learning_statistics import sampled_row, unroll_sums
from seedbed.nets.rescaling import CLIP, rescale
from seedbed.ops import statistics
from seedbed.types import ArraySpec

SPEC = {"a": ArraySpec((2,), "float32"), "b": ArraySpec((), "float32")}
ROWS = 8  # of a batch, always, so that there is one compiled program
ABSORB, ADD = jax.jit(statistics.absorb), jax.jit(statistics.add)


@jax.jit
def summed(x, origin):
    """Sums of a batch about an origin which the statistics had once."""
    return statistics.deviations(statistics.initial(SPEC)._replace(mean=origin), x)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.randoms(use_true_random=False))
def test_order_division_and_origin_do_not_matter(seed, batches, random):
    rng = np.random.default_rng(seed)
    offset, scale = rng.normal(scale=100, size=2), rng.uniform(1, 10)
    x = {
        "a": (offset + scale * rng.normal(size=(batches, ROWS, 2))).astype(np.float32),
        "b": rng.normal(size=(batches, ROWS)).astype(np.float32),
    }
    sums = []
    for i in range(batches):
        origin = {"a": offset + scale * rng.normal(size=2), "b": rng.normal()}
        origin = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), origin)
        sums.append(summed({name: leaf[i] for name, leaf in x.items()}, origin))
    random.shuffle(sums)
    in_turn = statistics.initial(SPEC)
    for each in sums:
        in_turn = ABSORB(in_turn, each)
    joined = sums[0]
    for each in sums[1:]:
        joined = ADD(joined, each)
    at_once = ABSORB(statistics.initial(SPEC), joined)
    for name, leaf in x.items():
        flat = leaf.reshape(-1, *leaf.shape[2:]).astype(float)
        for result in (in_turn, at_once):
            assert result.weight == len(flat)
            np.testing.assert_allclose(result.mean[name], flat.mean(0), rtol=1e-4, atol=1e-3)
            np.testing.assert_allclose(result.variance[name], flat.var(0), rtol=2e-3, atol=1e-2)


def test_sums_of_no_rows_change_nothing():
    state = statistics.initial(SPEC)
    nothing = statistics.no_deviations(state)
    jax.tree.map(np.testing.assert_array_equal, statistics.absorb(state, nothing), state)
    x = {"a": jnp.ones((ROWS, 2)), "b": jnp.arange(8.0)}
    some = statistics.deviations(state, x)
    jax.tree.map(np.testing.assert_array_equal, statistics.add(nothing, some), some)
    seen = statistics.absorb(state, some)
    jax.tree.map(np.testing.assert_array_equal, statistics.absorb(seen, nothing), seen)


def test_bytes_begin_scaled_and_the_first_data_replaces_that():
    """Before anything was seen, both ends of a byte are within two deviations of the middle."""
    spec = {"camera": ArraySpec((2, 3), "uint8"), "arm": ArraySpec((2,), "float32")}
    state = statistics.initial(spec)
    for end in (0.0, 255.0):
        apart = (end - state.mean["camera"]) / np.sqrt(state.variance["camera"])
        assert apart.shape == (2, 3) and (np.abs(apart) <= 2).all() and (np.abs(apart) > 1.9).all()
    assert (state.mean["arm"] == 0).all() and (state.variance["arm"] == 1).all()
    pixels = np.random.default_rng(0).integers(0, 9, (5, 2, 3), np.uint8)
    x = {"camera": pixels, "arm": np.ones((5, 2), np.float32)}
    seen = statistics.absorb(state, statistics.deviations(state, x))
    np.testing.assert_allclose(seen.mean["camera"], pixels.mean(0), atol=1e-4)
    np.testing.assert_allclose(seen.variance["camera"], pixels.var(0), atol=1e-2)


def test_small_spread_on_a_large_offset_survives_many_batches():
    rng = np.random.default_rng(0)
    state = statistics.initial(ArraySpec((), "float32"))
    x = (1e4 + rng.normal(size=(200, ROWS))).astype(np.float32)
    add = jax.jit(lambda state, rows: statistics.absorb(state, statistics.deviations(state, rows)))
    for rows in x:
        state = add(state, rows)
    np.testing.assert_allclose(state.mean, x.mean(dtype=float), rtol=1e-6)
    # The first batch, summed about 0, cannot tell the spread; its share in what it got wrong is 1 / 200.
    np.testing.assert_allclose(state.variance, x.var(dtype=float), rtol=0.1)


def test_the_largest_numbers_leave_statistics_finite():
    """As of a sensor that says with them that it sees nothing."""
    largest = np.finfo(np.float32).max
    x = np.array([[1.0, largest, -largest], [2.0, largest, largest]] * 8, np.float32)
    state = statistics.initial(ArraySpec((3,), "float32"))
    add = jax.jit(lambda state, rows: statistics.absorb(state, statistics.deviations(state, rows)))
    for _ in range(3):
        state = add(state, x)
    assert all(np.isfinite(leaf).all() for leaf in state)
    np.testing.assert_allclose([state.mean[0], state.variance[0]], [1.5, 0.25], rtol=1e-5)
    assert np.abs(rescale(x, scaling_of(ArraySpec((3,), "float32"), *state[1:]))).max() <= CLIP


def test_deviations_are_sums_about_the_mean():
    rng = np.random.default_rng(0)
    x = {
        "pixels": rng.integers(0, 256, (5, 3, 2), np.uint8),
        "number": rng.normal(size=5).astype(np.float32),
    }
    mean = {
        "pixels": rng.uniform(0, 255, (3, 2)).astype(np.float32),
        "number": np.float32(0.5),
    }
    seen = statistics.RunningStatistics(jnp.float32(9), mean, mean)
    found = jax.jit(statistics.deviations)(seen, x)
    assert found.weight == 5
    for name, leaf in x.items():
        apart = leaf.astype(np.float64) - mean[name]
        np.testing.assert_array_equal(found.origin[name], mean[name])
        np.testing.assert_allclose(found.first[name], apart.sum(0), rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(found.second[name], (apart**2).sum(0), rtol=1e-5)


@pytest.mark.parametrize("rows", [5, 7, 11, 16, 80])
def test_every_row_of_unrolls_has_its_turn(rows):
    turns = [int(sampled_row(jnp.int32(n), rows)) for n in range(20 * rows)]
    counts = np.bincount(turns, minlength=rows)
    assert len(counts) == rows and counts.min() >= 18 and counts.max() <= 22
    # Episodes as long as unrolls are seen whole.
    assert len(set(turns[: 2 * rows])) > 0.9 * rows


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_rows_that_are_padding_count_for_nothing(later):
    x = np.random.default_rng(3).normal(300.0, 1.0, (6, 8, 2)).astype(np.float32)
    valid = np.arange(6)[:, None] < np.array([6, 6, 4, 1, 2, 6, 3, 5])
    shown = np.where(valid[..., None], x, 0.0)
    seen = statistics.initial(jax.ShapeDtypeStruct((2,), np.float32))
    if later:
        seen = seen._replace(weight=jnp.float32(1.0), mean=jnp.full(2, 299.0))
    row = int(sampled_row(jnp.int32(7), 6))
    rows = x[row][valid[row]] if later else x[valid]
    sums = jax.jit(unroll_sums)(seen, shown, valid, jnp.int32(7))
    np.testing.assert_allclose(
        sums.first / sums.weight, (rows - np.asarray(seen.mean)).mean(0), rtol=1e-4, atol=1e-4
    )
