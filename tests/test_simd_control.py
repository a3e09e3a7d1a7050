"""Loops, branches, arrays in memory and guards, through the kernel, against jax.vmap."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from seedbed import simd
from seedbed.simd.frontend.trace import trace
from seedbed.simd.schedule.sparse import masked

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(20, 3)).astype(np.float32)
ROWS = RNG.integers(0, 5, 20).astype(np.int32)
BATCH = 19


def draw(*shape):
    return jnp.asarray(RNG.normal(size=(BATCH, *shape)), jnp.float32)


def iterate(x, points):
    """Rewrites an array that the while loop carries, in place, while lanes leave one by one."""

    def body(carry):
        number, y, kept, _ = carry

        def slot(inner, row):
            total, kept = inner
            k, i, t = row
            z = lax.dynamic_index_in_dim(points, i, keepdims=False)
            on = z.sum() * k > 0.2
            old = lax.dynamic_index_in_dim(kept, t, keepdims=False)
            total = jnp.where(on, total + jnp.sqrt(jnp.abs(z * k)) / (1 + z * z), total)
            new = jnp.where(on, old * 0.5 + jnp.sqrt(jnp.abs(z[0])) + y[0], old)
            return (total, lax.dynamic_update_index_in_dim(kept, new, t, 0)), None

        steps = np.arange(20, dtype=np.int32)
        (total, kept), _ = lax.scan(slot, (jnp.zeros(3), kept), (TABLE[:, 0], ROWS, steps))
        after = y - 0.1 * (y - total)
        return number + 1, after, kept, jnp.abs(after - y).sum()

    start = (jnp.int32(0), x, jnp.zeros(20), jnp.float32(1))
    return lax.while_loop(lambda c: (c[0] < 30) & (c[3] > 0.05), body, start)


def substeps(x, v):
    def one(carry, _):
        x, v = carry
        push = jnp.sqrt(jnp.abs(x[2])) * jnp.array([1.0, 2, 3]) + v.sum() / (1 + x @ x) * v
        v = v + 0.01 * (jnp.where(x[2] < 0, push, 0) - x - 0.1 * v)
        return (x + 0.01 * v, v), None

    return lax.scan(one, (x, v), None, length=50)[0]


def backwards(x):
    return lax.scan(lambda c, t: (c * 0.5 + t, c), 0.0, x, reverse=True)


def packed(x, points):
    """Writes what each example finds at its own next place, under two masks, while lanes leave one by one."""

    def body(carry):
        number, kept, found = carry

        def slot(inner, row):
            kept, found = inner
            z = points[row] * x * number
            near = z.sum() > 0
            size = jnp.sqrt(jnp.abs(z)).sum()
            held = size > 1.5
            at = jnp.minimum(found, 29)
            old = lax.dynamic_index_in_dim(kept, at, keepdims=False)
            new = jnp.where(near, jnp.where(held, size, old), old)
            kept = lax.dynamic_update_index_in_dim(kept, new, at, 0)
            return (kept, jnp.where(near & held, found + 1, found)), None

        return number + 1, *lax.scan(slot, (kept, found), ROWS)[0]

    start = (jnp.int32(1), jnp.zeros(30), jnp.int32(0))
    return lax.while_loop(lambda c: (c[0] < 6) & (c[2] < 20), body, start)


def shared(x, points):
    """Writes at an example's own place what other masks, other writes and indices read, too."""

    def slot(carry, row):
        kept, best, found, total = carry
        z = points[row] * x
        near, held = z.sum() > 0, z[0] > 0.1
        dear = jnp.sqrt(jnp.abs(jnp.concatenate([z, z + 1, z + 2, z + 3]))).sum()
        at = jnp.minimum(found, 29)
        old = lax.dynamic_index_in_dim(kept, at, keepdims=False)
        inner = jnp.where(held, dear, old)
        kept = lax.dynamic_update_index_in_dim(kept, jnp.where(near, inner, old), at, 0)
        first = lax.dynamic_index_in_dim(best, at, keepdims=False)
        new = jnp.where(held, jnp.sqrt(jnp.abs(z)).sum(), first)
        probe = lax.dynamic_index_in_dim(best, jnp.int32(new * 5) % 30, keepdims=False)
        best = lax.dynamic_update_index_in_dim(best, new, at, 0)
        total = jnp.where(held, jnp.maximum(total, dear) + probe, total) + inner
        return (kept, best, jnp.where(near & held, found + 1, found), total), None

    start = (jnp.zeros(30), jnp.arange(30.0), jnp.int32(0), jnp.float32(0))
    return lax.scan(slot, start, ROWS)[0]


def costly(x, points):
    """Writes under two masks what costs more than the rest, and is read under the inner mask again."""

    def slot(carry, row):
        kept, found, total = carry
        z = points[row] * x
        near, held = z.sum() > 0, z[0] > 0.1
        dear = jnp.sqrt(jnp.abs(jnp.concatenate([z, z + 1, z + 2, z + 3]))).sum()
        at = jnp.minimum(found, 29)
        old = lax.dynamic_index_in_dim(kept, at, keepdims=False)
        new = jnp.where(near, jnp.where(held, dear, old), old)
        kept = lax.dynamic_update_index_in_dim(kept, new, at, 0)
        total = jnp.where(held, total + dear, total)
        return (kept, jnp.where(near & held, found + 1, found), total), None

    return lax.scan(slot, (jnp.zeros(30), jnp.int32(0), jnp.float32(0)), ROWS)[0]


def others(x, points):
    """Writes whole numbers and bools under two masks, each at an example's own place."""

    def slot(carry, row):
        marks, counts = carry
        z = points[row] * x
        near, held = z.sum() > 0, z[0] > 0.1
        at = jnp.int32(jnp.abs(z[1]) * 10) % 30
        olds = [lax.dynamic_index_in_dim(a, at, keepdims=False) for a in carry]
        mark = jnp.where(near, jnp.where(held, ~olds[0], olds[0]), olds[0])
        count = jnp.where(near, jnp.where(held, olds[1] + 1, olds[1]), olds[1])
        marks = lax.dynamic_update_index_in_dim(marks, mark, at, 0)
        return (marks, lax.dynamic_update_index_in_dim(counts, count, at, 0)), None

    return lax.scan(slot, (jnp.zeros(30, bool), jnp.arange(30)), ROWS)[0]


def literals(x, points):
    """Adds to elements of an array whose indices are literals, under the mask of each."""

    def add(total, row):
        for i, z in enumerate((points[row] * x).reshape(-1)):
            old = lax.dynamic_index_in_dim(total, 7 * i, keepdims=False)
            new = jnp.where(z > 0, old + z, old)
            total = lax.dynamic_update_index_in_dim(total, new, 7 * i, 0)
        return total, total[14] - total[0]

    return lax.scan(add, jnp.arange(168.0), ROWS)


CASES = {
    "iterate": (iterate, (draw(3), draw(5, 3))),
    "packed": (packed, (draw(3), draw(5, 3))),
    "shared": (shared, (draw(3), draw(5, 3))),
    "costly": (costly, (draw(3), draw(5, 3))),
    "others": (others, (draw(3), draw(5, 3))),
    "literals": (literals, (draw(3), draw(5, 3))),
    "substeps": (substeps, (draw(3), draw(3))),
    "backwards": (backwards, (draw(40),)),
}


@pytest.mark.parametrize("name", CASES)
def test_control_flow_is_that_of_vmap(name, no_fallback):
    function, args = CASES[name]
    ours = jax.jit(simd.vectorize(function))(*args)
    theirs = jax.jit(jax.vmap(function))(*args)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["packed", "literals", "others"])
def test_a_write_that_keeps_the_element_elsewhere_is_masked(name):
    function, args = CASES[name]
    program = trace(jax.make_jaxpr(function)(*(x[0] for x in args)), [False] * len(args))
    stores = [node for node in program.graph.nodes if node.op == "store"]
    assert stores and all(len(masked(node)) == (1 if name == "literals" else 2) for node in stores)


def test_a_while_loop_under_vmap_ends_for_each_of_its_examples():
    def grow(x: Any) -> Any:
        return jax.vmap(lambda y: lax.while_loop(lambda c: c < 3, lambda c: c + 1 + y * y, y))(x)

    x = jnp.asarray(np.random.default_rng(2).normal(size=(37, 4)), jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no fallback
        np.testing.assert_array_equal(simd.vectorize(grow)(x), jax.vmap(grow)(x))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_a_large_table_is_read_at_an_examples_own_index(kind):
    """Its elements have no nodes: a graph may have fewer than the table has elements."""
    numbers = np.random.default_rng(0).normal(size=500_000).astype(np.float32)
    given, index = kind(numbers), jnp.arange(40, dtype=jnp.int32) * 12_345

    def pick(i: Any, x: Any) -> Any:
        return jnp.asarray(given)[i] * x + lax.fori_loop(
            0, 3, lambda k, total: total + jnp.asarray(given)[i + k], jnp.float32(0)
        )

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = jax.jit(simd.vectorize(pick))(index, jnp.full(40, 2.0))
    places = np.asarray(index)
    wanted = 2 * numbers[places] + sum(numbers[places + k] for k in range(3))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["scan", "compare_all"])
def test_sorted_search_has_a_kernel(method):
    rng = np.random.default_rng(0)
    edges = jnp.sort(jnp.asarray(rng.normal(size=40), jnp.float32))
    x = jnp.asarray([*rng.normal(size=60), 0.0, -0.0, np.nan, np.inf], jnp.float32)

    def search(x: Any) -> Any:
        return jnp.searchsorted(edges, x, method=method)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(simd.vectorize(search)(x), jax.vmap(search)(x))
