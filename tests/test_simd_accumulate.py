"""Sums of cotangents by rows: the same numbers as JAX's own sums, and no array is added where a row is."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

import mujoco_states as oracle
from seedbed import physics, simd
from seedbed.simd.accumulate import accumulated
from seedbed.simd.derivative import linearize, transpose
from seedbed.simd.store.function import Function
from seedbed.simd.vectorize import trace_example

ROWS = np.array([3, 0, 3, 1, 2, 0], np.int32)


def read_rows(table, x):
    def body(total, row):
        twice = lax.dynamic_index_in_dim(table, row, keepdims=False) * x
        next_ = lax.dynamic_slice(table, (jnp.minimum(row + 1, 3), 1), (1, 2))
        return total + jnp.sin(twice).sum() * next_.sum(), None

    return lax.scan(body, jnp.float32(0), ROWS)[0]


def carried_rows(table, x):
    """Reads and writes rows of what a loop carries, some twice."""

    def body(table, row):
        old = lax.dynamic_index_in_dim(table, row, keepdims=False)
        return lax.dynamic_update_index_in_dim(table, jnp.tanh(old * x) + old[0], row, 0), None

    return (lax.scan(body, table, ROWS)[0] * np.arange(1, 13, dtype=np.float32).reshape(4, 3)).sum()


def read_before(table, x):
    """The first row is read where an index counts from the end to before it."""

    def body(total, row):
        return total + (lax.dynamic_index_in_dim(table, row - 9, keepdims=False) * x).sum(), None

    return lax.scan(body, jnp.float32(0), ROWS)[0]


def read_outside(table, x):
    i = jnp.int32(x[0] > 0)
    return (lax.dynamic_slice(table, (i, 0), (2, 3)) * x[None]).sum() + table[i, 1] * table.sum()


def chosen(table, x):
    """A branch that reads and one that does not."""
    return lax.cond(x[0] > 0, lambda: table[1] @ x + read_rows(table, x), lambda: x.sum())


@pytest.mark.quick("read_rows", "carried_rows", "read_before")
@pytest.mark.parametrize("function", [read_rows, carried_rows, read_before, read_outside, chosen])
def test_gradients_are_those_of_vmap(function):
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=(5, *shape)), jnp.float32) for shape in ((4, 3), (3,))]

    def run(batch: Any) -> Any:
        return jax.grad(lambda table, x: batch(function)(table, x).sum(), argnums=(0, 1))(*given)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # all have kernels
        kernels = run(simd.vectorize)
    for ours, theirs in zip(kernels, run(jax.vmap), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def loops(jaxpr: Any) -> list[Any]:
    """Returns the equations inside all loops of a jaxpr."""
    found = []
    for eqn in jaxpr.eqns:
        for inner in core.jaxprs_in_params(eqn.params):
            inner = getattr(inner, "jaxpr", inner)
            found += inner.eqns if eqn.primitive.name in ("scan", "while") else []
            found += loops(inner)
    return found


@pytest.mark.parametrize("function", [read_rows, carried_rows])
def test_loops_add_rows_and_not_tables(function):
    closed = jax.make_jaxpr(jax.grad(function, argnums=(0, 1)))(np.ones((4, 3)), np.ones(3))
    adds = [
        [e for e in loops(jaxpr) if e.primitive.name == "add_any" and e.outvars[0].aval.size == 12]
        for jaxpr in (closed.jaxpr, accumulated(closed).jaxpr)
    ]
    assert adds[0]
    assert not adds[1]


def test_zeros_that_are_a_result_are_made():
    closed = jax.make_jaxpr(lambda x: (jnp.zeros((2, 3)), x + jnp.zeros(3)))(np.ones(3, np.float32))
    run = core.jaxpr_as_fun(accumulated(closed))
    for ours, theirs in zip(
        run(np.ones(3, np.float32)), (np.zeros((2, 3)), np.ones(3)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "integrator", [oracle.EULER, pytest.param(oracle.RK4, marks=pytest.mark.slow)]
)
def test_the_pull_back_of_physics_searches_for_nothing(integrator):
    """Neither the solver's loop nor a line search is in it; what it keeps is small."""
    model = physics.load(oracle.path("hopper"))
    model = dataclasses.replace(model, opt=model.opt._replace(integrator=integrator))
    state = physics.init(model, np.float32(model.qpos0))

    def step(qpos: jax.Array, qvel: jax.Array, ctrl: jax.Array) -> tuple[jax.Array, jax.Array]:
        after = physics.step(model, state._replace(qpos=qpos, qvel=qvel), ctrl)
        return after.qpos, after.qvel

    given = state.qpos, state.qvel, np.zeros(model.nu, np.float32)
    closed = trace_example(step, "step", (given, {})).closed
    linear = linearize(Function.of(closed), (True,) * 3, (False,) * 3)
    tangents = len(linear.tangent.in_avals) - 3
    pulled = transpose(linear.tangent, (False,) * tangents + (True,) * 3, (True, True))
    assert " while[" in str(closed)
    assert " while[" not in str(pulled.function.closed)
    kept = sum(aval.size for aval in linear.forward.out_avals[2:])
    assert kept == (2 if integrator == oracle.EULER else 4) * model.nv


@pytest.mark.slow
def test_a_step_that_is_differentiated_has_the_same_bits():
    model = physics.load(oracle.path("hopper"))
    cases = oracle.cases(oracle.path("hopper"), 40)
    blank = physics.init(model, np.float32(model.qpos0))
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (40, *x.shape)), blank)
    step = simd.vectorize(lambda state, ctrl: physics.step(model, state, ctrl))
    ctrl = jnp.asarray(cases.ctrl, jnp.float32)

    def moved(qpos: jax.Array, qvel: jax.Array) -> physics.State:
        return step(states._replace(qpos=qpos, qvel=qvel), ctrl)

    given = jnp.asarray(cases.qpos, jnp.float32), jnp.asarray(cases.qvel, jnp.float32)
    plain = moved(*given)
    differentiated, _ = jax.vjp(moved, *given)
    for ours, theirs in zip(differentiated, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)
