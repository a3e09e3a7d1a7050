"""The pytrees of processes without JAX, against JAX's own."""

from __future__ import annotations

import jax
import pytest

from seedbed import trees

TREE = {"b": (1, [2, 3]), "a": {}, "c": 4}


def test_leaves_come_in_jaxs_order_and_go_back():
    flat = trees.leaves(TREE)
    assert flat == jax.tree.leaves(TREE)
    assert trees.unflatten(TREE, flat) == TREE


@pytest.mark.parametrize("count", [0, 3, 5])
def test_another_number_of_leaves_is_refused(count):
    with pytest.raises(ValueError, match=f"{count} leaves do not fit .* which has 4"):
        trees.unflatten(TREE, list(range(count)))
