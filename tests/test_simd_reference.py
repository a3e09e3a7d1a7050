"""Loops, branches and arrays in memory against jax.vmap, by the reference evaluator and by the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from control_flow import PROGRAMS, batch, in_memory, nested, newton, over_a_table
from seedbed.simd import vectorize
from seedbed.simd.frontend.trace import trace
from simd_reference import evaluate

pytestmark = pytest.mark.usefixtures("no_fallback")


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
