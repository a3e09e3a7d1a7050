"""Derivatives of what is solved for: linear systems, and the constrained acceleration.

Each rule differentiates the equation that the solution satisfies, at the solution, instead of the way there.
So no loop of a solver is differentiated, no elimination is transposed, and a start has no derivative. The
rules are differentiable themselves.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from seedbed.physics import linear
from seedbed.physics.assembly import (
    Compensation,
    constraint_force,
    hessian,
    raised,
    sums_at,
    wrenches,
)
from seedbed.physics.collision import Contacts
from seedbed.physics.constraint import Rows
from seedbed.physics.dynamics import Matrix, multiply
from seedbed.physics.model import Kinematics, Model
from seedbed.physics.problem import Problem, pose
from seedbed.physics.roots import parted
from seedbed.physics.solver import Solution, search
from seedbed.simd.derivative import KEPT


class Smooth(NamedTuple):
    """The unconstrained force [nv], and the acceleration M^-1 force [nv]."""

    force: jax.Array
    qacc: jax.Array


def divide(pattern: linear.Pattern, matrix: Matrix, vector: jax.Array) -> jax.Array:
    """Returns H^-1 b [nv] for H by entry and b [nv]; its tangent is H^-1 (db - dH x)."""
    entries = tuple(matrix)
    arrays, rebuild = parted((tuple(matrix.values()), vector))

    @jax.custom_jvp
    def solved(arrays: list[jax.Array]) -> jax.Array:
        values, right = rebuild(arrays)
        return linear.solve(linear.factor(pattern, dict(zip(entries, values, strict=True))), right)

    @solved.defjvp
    def tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
        (arrays,), (moves,) = primals, tangents
        x = solved(arrays)

        def product(arrays: list[jax.Array]) -> jax.Array:
            values, right = rebuild(arrays)
            return right - multiply(dict(zip(entries, values, strict=True)), x)

        change = jax.jvp(product, (arrays,), (moves,))[1]
        values, _ = rebuild(arrays)
        return x, divide(pattern, dict(zip(entries, values, strict=True)), change)

    return solved(arrays)


def _free(model: Model, qacc: jax.Array) -> Solution:
    """Returns the solution without constraint rows."""
    none, wrench, error = (jnp.zeros(n, qacc.dtype) for n in (model.nv, (model.nbody, 6), ()))
    return Solution(qacc, none, none, wrench, (), jnp.int32(0), error)


def solve(
    model: Model,
    kin: Kinematics,
    mass: Matrix,
    smooth: Smooth,
    warmstart: jax.Array,
    contacts: Contacts,
    rows: Rows,
) -> Solution:
    """Solves for qacc (mj_fwdConstraint), and for the forces and wrenches of the constraints.

    The derivative is that of M a - force - J' f = 0 with the rows that push at the solution; `warmstart` has
    none, and neither have `niter` and `error`. Without constraint rows, qacc is that of `smooth`.
    """
    entries = tuple(mass)
    leaves = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    given = (leaves, kin, tuple(mass.values()), contacts, rows)
    arrays, rebuild = parted((given, smooth.force))

    def posed(arrays: list[jax.Array], raise_by: Compensation = ()) -> tuple[Problem, jax.Array]:
        (leaves, kin, values, contacts, rows), force = rebuild(arrays)
        matrix = dict(zip(entries, values, strict=True))
        return raised(pose(Model(**leaves), kin, matrix, contacts, rows), raise_by), force

    problem, _ = posed(arrays)
    if not problem.sides and not len(problem.rows_dof) and not problem.wide_dofs:
        return _free(model, smooth.qacc)

    @jax.custom_jvp
    def minimum(arrays: list[jax.Array], qacc: jax.Array, warmstart: jax.Array) -> Solution:
        return search(posed(arrays)[0], qacc, warmstart)

    @minimum.defjvp
    def tangent(primals: Any, tangents: Any) -> tuple[Solution, Solution]:
        (arrays, *start), (moves, *_) = primals, tangents
        # What depends on them needs no second search.
        found = jax.tree.map(lambda x: checkpoint_name(x, KEPT), minimum(arrays, *start))
        a = found.qacc

        def balance(arrays: list[jax.Array]) -> jax.Array:
            problem, force = posed(arrays, found.compensation)
            slack, sums = sums_at(problem, a, hessian=False)
            return multiply(problem.mass, a) - force - constraint_force(problem, slack, sums.wrench)

        problem, _ = posed(arrays, found.compensation)
        matrix = hessian(problem, *sums_at(problem, a, hessian=True))
        move = -divide(problem.pattern, matrix, jax.jvp(balance, (arrays,), (moves,))[1])

        def pushed(arrays: list[jax.Array], a: jax.Array) -> tuple[jax.Array, jax.Array]:
            problem, force = posed(arrays, found.compensation)
            sums = sums_at(problem, a, hessian=False)[1]
            return multiply(problem.mass, a) - force, wrenches(problem, sums)

        push, wrench = jax.jvp(pushed, (arrays, a), (moves, move))[1]
        none: Any = np.zeros((), jax.dtypes.float0)  # of an integer
        still, error = jax.tree.map(jnp.zeros_like, (found.compensation, found.error))
        return found, Solution(move, push, push, wrench, still, none, error)

    return minimum(arrays, smooth.qacc, warmstart)
