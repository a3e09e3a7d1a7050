"""The sum tree against a list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.replay.host.sumtree import SumTree

WEIGHT = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


@given(st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_the_list(capacity, data):
    tree, weights = SumTree(capacity), np.zeros(capacity)
    for _ in range(data.draw(st.integers(1, 5))):
        count = data.draw(st.integers(1, 10))
        slots = np.array(data.draw(st.lists(st.integers(0, capacity - 1), min_size=count)))
        given_ = np.array(data.draw(st.lists(WEIGHT, min_size=len(slots), max_size=len(slots))))
        tree.set(slots, given_)
        for slot, weight in zip(slots, given_, strict=True):
            weights[slot] = weight  # the last counts
        tree.check_valid()
        np.testing.assert_array_equal(tree.weights, weights)
        assert tree.total == pytest.approx(weights.sum(), rel=1e-12)
        if not weights.any():
            continue
        uniforms = np.array(data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1)))
        drawn = tree.sample(uniforms)
        assert (weights[drawn] > 0).all()
        ends = np.cumsum(weights)
        tolerance = 1e-9 * ends[-1]
        target = uniforms * ends[-1]
        assert (target <= ends[drawn] + tolerance).all()
        assert (target >= ends[drawn] - weights[drawn] - tolerance).all()


def test_every_slot_has_its_share_of_the_unit_interval():
    weights = np.array([0.0, 3.0, 0.0, 1.0, 4.0, 0.0])
    tree = SumTree(6)
    tree.set(np.arange(6), weights)
    drawn = tree.sample((np.arange(800) + 0.5) / 800)
    np.testing.assert_array_equal(np.bincount(drawn, minlength=6), weights * 100)


def test_a_million_leaves_are_exact_enough():
    weights = np.random.default_rng(0).random(10**6) ** 4
    tree = SumTree(len(weights))
    tree.set(np.arange(len(weights)), weights)
    assert tree.total == pytest.approx(weights.sum(), rel=1e-13)
    uniforms = np.linspace(0, 1, 1000, endpoint=False)
    expected = np.searchsorted(np.cumsum(weights), uniforms * weights.sum(), side="right")
    assert (np.abs(tree.sample(uniforms) - expected) <= 1).all()


def test_rounding_never_draws_an_empty_slot():
    tree = SumTree(8)
    tree.set(np.array([0, 5]), np.array([1e-300, 1.0]))
    top = np.nextafter(1.0, 0.0)
    assert tree.sample(np.array([0.0, top])).tolist() == [0, 5]
    tree.set(np.array([5]), np.array([0.0]))
    assert tree.sample(np.array([0.0, 0.5, top])).tolist() == [0, 0, 0]
