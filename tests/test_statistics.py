"""Running statistics: any order and any division of the data give the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.ops import statistics
from seedbed.types import ArraySpec

SPEC = {"a": ArraySpec((2,), "float32"), "b": ArraySpec((), "float32")}
UPDATE = jax.jit(statistics.update)
ROWS = 8  # of a batch, always, so that there is one compiled program


def data(seed, batches):
    rng = np.random.default_rng(seed)
    offset, scale = rng.normal(scale=100, size=2), rng.uniform(0.01, 10)
    x = {
        "a": (offset + scale * rng.normal(size=(batches, ROWS, 2))).astype(np.float32),
        "b": rng.normal(size=(batches, ROWS)).astype(np.float32),
    }
    return x, rng.integers(0, 3, size=(batches, ROWS)).astype(np.float32)


def batch(x, i):
    return {name: jnp.asarray(leaf[i]) for name, leaf in x.items()}


def check(actual, expected, scale):
    for mine, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * scale)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.randoms(use_true_random=False))
def test_order_and_division_do_not_matter(seed, batches, random):
    x, weights = data(seed, batches)
    weights[0, 0] = 1  # something is always seen
    order = list(range(batches))
    random.shuffle(order)
    in_turn = statistics.initial(SPEC)
    for i in order:
        in_turn = UPDATE(in_turn, batch(x, i), jnp.asarray(weights[i]))
    merged = statistics.initial(SPEC)
    for i in reversed(order):
        merged = statistics.merge(statistics.of_batch(batch(x, i), jnp.asarray(weights[i])), merged)
    flat = {name: leaf.reshape(-1, *leaf.shape[2:]).astype(float) for name, leaf in x.items()}
    w = weights.reshape(-1).astype(float)
    for name, leaf in flat.items():
        mean = np.average(leaf, axis=0, weights=w)
        variance = np.average((leaf - mean) ** 2, axis=0, weights=w)
        scale = np.abs(mean).max() + 1
        for result in (in_turn, merged):
            check(result.mean[name], mean, scale)
            check(result.variance[name], variance, scale)
            assert result.weight == w.sum()


def test_nothing_seen_is_the_identity_and_divides_by_nothing():
    state = statistics.initial(SPEC)
    x = {"a": jnp.array([[1.0, -2.0]]), "b": jnp.array([0.5])}
    state = statistics.update(state, x, jnp.zeros(1))
    state = statistics.merge(state, statistics.initial(SPEC))
    for mine, theirs in zip(
        jax.tree.leaves(statistics.normalise(state, x)), jax.tree.leaves(x), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_constants_and_outliers_stay_bounded():
    spec = ArraySpec((), "float32")
    state = statistics.update(statistics.initial(spec), jnp.full((5,), 3.0), jnp.ones(5, bool))
    normalised = statistics.normalise(state, jnp.array([3.0, 4.0, -1e30]), clip=5.0)
    np.testing.assert_array_equal(normalised, [0.0, 5.0, -5.0])


def test_masked_rows_may_hold_anything():
    x, mask = jnp.array([1.0, jnp.inf, 3.0, jnp.nan]), jnp.array([True, False, True, False])
    result = statistics.of_batch(x, mask)
    assert (result.weight, result.mean, result.variance) == (2.0, 2.0, 1.0)


def test_small_spread_on_a_large_offset_survives_many_batches():
    rng = np.random.default_rng(0)
    state = statistics.initial(ArraySpec((), "float32"))
    x = (1e4 + rng.normal(size=(200, ROWS))).astype(np.float32)
    for rows in x:
        state = UPDATE(state, jnp.asarray(rows), jnp.ones(ROWS))
    np.testing.assert_allclose(state.mean, x.mean(dtype=float), rtol=1e-6)
    np.testing.assert_allclose(state.variance, x.var(dtype=float), rtol=1e-2)


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
    for name, leaf in x.items():
        apart = leaf.astype(np.float64) - mean[name]
        np.testing.assert_allclose(found.first[name], apart.sum(0), rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(found.second[name], (apart**2).sum(0), rtol=1e-5)
