"""Loops, branches and arrays in memory against jax.vmap, by the reference evaluator and by the kernel."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from seedbed.simd import vectorize
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import Unsupported
from simd_reference import evaluate

TABLE = np.arange(1, 61, dtype=np.float32).reshape(20, 3)


@pytest.fixture(autouse=True)
def no_fallback(tmp_path, monkeypatch):
    """A kernel that cannot be made fails the test, and each test starts with an empty cache."""
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def over_a_table(x, n):
    """A scan with constants, a carry, rows of a table, and results written down in reverse."""

    def body(carry, row):
        carry = carry * 0.5 + row @ x
        return carry, jnp.stack([carry, row[0] - x[0]])

    return lax.scan(body, x[0], jnp.asarray(TABLE), reverse=True)


def collatz(x, n):
    """Each example leaves when it has reached 1."""
    return lax.while_loop(
        lambda c: c[0] > 1,
        lambda c: (jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1),
        (jnp.abs(n) % 50 + 1, 0),
    )


def nested(x, n):
    """A counted loop around one that runs until each example has enough."""

    def outer(i, total):
        def goes_on(c):
            return (c[0] < 3.0 + i) & (c[1] < 20)

        grown, steps = lax.while_loop(
            goes_on, lambda c: (c[0] + x[1] ** 2 + 0.1, c[1] + 1), (0.0, 0)
        )
        return total + grown * steps

    return lax.fori_loop(0, 20, outer, x[0])


def in_memory(x, n):
    """An array that a loop reads and writes by its index, and that is read afterwards."""

    def body(i, y):
        y = y.at[i + 1].set(y[i] * 0.9 + x[i % 3])
        return y.at[0].add(y[i + 1])

    y = lax.fori_loop(0, 30, body, jnp.zeros(31).at[0].set(x[0]))
    return y, y[3:7].sum()


def by_own_index(x, n):
    """An index that differs between examples."""
    i = jnp.abs(n) % 20
    y = jnp.zeros(5).at[i % 5].set(x[1])
    return jnp.asarray(TABLE)[i], x[i % 3], y


FAR = np.arange(1, 1201, dtype=np.float32).reshape(400, 3)


def by_own_index_far(x, n):
    """Indices that differ between examples, in arrays too long to compare with every place."""
    first = jnp.abs(n) * 4

    def body(c):
        k, y, on, counts = c
        place = (first + k * 7) % 300
        y = y.at[place].add(x[k % 3] * jnp.asarray(FAR)[place, k % 3])
        on = on.at[place].set(~on[place + 1])
        return k + 1, y, on, counts.at[(first + k * k) % 270].max(k)

    start = 0, jnp.zeros(310), jnp.arange(310) % 3 == 0, jnp.zeros(270, jnp.int32)
    _, y, on, counts = lax.while_loop(lambda c: c[0] < jnp.abs(n) % 9, body, start)
    beyond = jnp.asarray(FAR).at[first * 3, 1].get(mode="fill", fill_value=-1.0)
    return (
        y.sum(),
        y[first % 310],
        on[first % 310],
        counts[first % 270],
        jnp.asarray(FAR)[first],
        beyond,
    )


def branches(x, n):
    return lax.switch(
        n % 3, [lambda v: v, lambda v: v[::-1] * 2, lambda v: jnp.full(3, v.sum())], x
    ), lax.cond(n > 0, lambda: x[0], lambda: -x[1])


def newton(x, n):
    """A loop whose carry is a matrix, with a condition on all of it."""
    a = jnp.outer(x, x) + 3.0 * jnp.eye(3)

    def body(c):
        y, k = c
        return y @ (2.0 * jnp.eye(3) - a @ y), k + 1

    def goes_on(c):
        return (jnp.max(jnp.abs(a @ c[0] - jnp.eye(3))) > 1e-3) & (c[1] < 60)

    start = a.T / (jnp.max(jnp.sum(jnp.abs(a), 0)) * jnp.max(jnp.sum(jnp.abs(a), 1)))
    return lax.while_loop(goes_on, body, (start, 0))


PROGRAMS = (
    over_a_table,
    collatz,
    nested,
    in_memory,
    by_own_index,
    by_own_index_far,
    branches,
    newton,
)


def batch(rows, dtype=np.float32):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 3)).astype(dtype), rng.integers(-99, 99, rows, np.int32)


def by_reference(function, x, n):
    one = jax.ShapeDtypeStruct((3,), x.dtype), jax.ShapeDtypeStruct((), n.dtype)
    closed = jax.make_jaxpr(function)(*one)
    return evaluate(trace(closed, [False, False], limit=10_000), [x, n])


def by_kernel(function, x, n):
    return jax.tree.leaves(vectorize(function)(x, n))


@pytest.mark.parametrize("engine", [by_reference, by_kernel])
@pytest.mark.parametrize("function", PROGRAMS)
def test_control_flow(function, engine):
    x, n = batch(37)
    want = jax.tree.leaves(jax.jit(jax.vmap(function))(x, n))
    for got, expected in zip(engine(function, x, n), want, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [over_a_table, nested, in_memory, newton])
def test_control_flow_in_float64(function):
    x, n = batch(9, np.float64)
    with jax.enable_x64(True):
        want = jax.tree.leaves(jax.jit(jax.vmap(function))(x, n))
        results = by_reference(function, x, n)
    for got, expected in zip(results, want, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_an_example_that_has_left_a_loop_runs_no_loop_inside_it():
    """The inner loop ends only where the outer one has not."""

    def function(n):
        def body(c):
            counted = lax.while_loop(lambda k: k != c[0], lambda k: k + 1, 0)
            return c[0] - 1, c[1] + counted

        return lax.while_loop(lambda c: c[0] >= 0, body, (n, 0))[1]

    closed = jax.make_jaxpr(function)(0)
    n = np.arange(9, dtype=np.int32)
    (total,) = evaluate(trace(closed, [False], limit=1000), [n])
    np.testing.assert_array_equal(total, n * (n + 1) // 2)


def test_shared_operands_have_no_batch():
    x, table = batch(5)[0], np.arange(12, dtype=np.float32).reshape(4, 3)

    def function(x, table):
        return lax.scan(lambda c, row: (c + row @ x, c), 0.0, jnp.tile(table, (5, 1)))

    closed = jax.make_jaxpr(function)(x[0], table)
    program = trace(closed, [False, True], limit=10_000)
    want = jax.vmap(lambda x: function(x, table))(x)
    for got, expected in zip(evaluate(program, [x, table]), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_batches_that_differ_are_refused():
    closed = jax.make_jaxpr(lambda a, b: a + b)(1.0, 1.0)
    program = trace(closed, [False, False], limit=100)
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        evaluate(program, [np.ones(2, np.float32), np.ones(3, np.float32)])


def test_more_arguments_than_a_graph_holds_are_refused():
    closed = jax.make_jaxpr(lambda x: x + 1.0)(np.zeros(200, np.float32))
    with pytest.raises(
        Unsupported, match="more than 100 scalar values; most come from its arguments"
    ):
        trace(closed, [False], limit=100)
