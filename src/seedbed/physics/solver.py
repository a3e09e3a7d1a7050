"""The constrained acceleration: MuJoCo's convex problem, solved to convergence by Newton's method.

qacc is the a that minimises 1/2 (a - a0)' M (a - a0) + sum 1/2 D min(0, J a - aref)^2, where a0 is the smooth
acceleration (Todorov 2014; engine_solver.c, primal form). A row pushes if J a - aref is negative. The cost is
piecewise quadratic: a full step that does not change the set of pushing rows ends at the exact minimum.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seedbed.physics import linear, math
from seedbed.physics.assembly import (
    Rise,
    Slack,
    Sums,
    along,
    at_limits,
    constraint_force,
    hessian,
    over_slots,
    response,
    step_and_sum,
)
from seedbed.physics.collision import Points, Row
from seedbed.physics.constraint import edges, motion_of, velocity
from seedbed.physics.dynamics import body_motion, multiply
from seedbed.physics.problem import Problem
from seedbed.types import Array

TRIALS = 30
"""Most trials of a line search; one to three are usual."""
FLAT = 1e-2
"""A line search ends when the slope has fallen to this share of the first slope (MuJoCo's ls_tolerance)."""
FLOOR = 4
"""The solver stops if `residual` is at most this many rounding errors (eps of the dtype)."""


class Solution(NamedTuple):
    """The result of the solver."""

    qacc: jax.Array  # [nv]
    qfrc_constraint: jax.Array  # [nv]
    wrench: jax.Array  # [nbody, 6] of the contacts on each body, about the reference point
    niter: jax.Array  # int32
    residual: jax.Array  # norm of the gradient divided by the norms of its two terms


class SolverState(NamedTuple):
    """The state of the solver: a point, and the pending step from it."""

    offset: jax.Array  # [nv] acceleration minus the smooth acceleration
    force: jax.Array  # [nv] M offset
    slack: Slack
    direction: jax.Array  # [nv]
    direction_force: jax.Array  # [nv] M direction
    direction_slack: Slack
    size: jax.Array  # of the pending step, as a multiple of `direction`
    done: jax.Array  # bool
    niter: jax.Array  # int32


def search(problem: Problem, qacc_smooth: jax.Array, warmstart: jax.Array) -> Solution:
    """Searches for qacc; its derivative is that of `implicit.solve`.

    The start is `warmstart` or `qacc_smooth`, both [nv]: the one with the lower cost. The search stops at
    convergence or after `opt.iterations`.
    """
    state = lax.while_loop(
        lambda state: ~state.done & (state.niter < problem.model.opt.iterations),
        lambda state: newton(problem, state),
        start(problem, qacc_smooth, warmstart),
    )
    state, sums = advance(problem, state, hessian=False)
    push = constraint_force(problem, state.slack, sums.wrench)
    return Solution(
        qacc_smooth + state.offset,
        push,
        sums.wrench,
        state.niter,
        residual(state.force, push),
    )


def start(problem: Problem, qacc_smooth: jax.Array, warmstart: jax.Array) -> SolverState:
    """Makes the first point, the smooth acceleration, and a pending step to the warm start.

    The size of the step is 1 if the warm start has the lower cost, otherwise 0.
    """
    model, limits = problem.model, problem.limits
    direction = warmstart - qacc_smooth
    direction_force = multiply(problem.mass, direction)
    motions = [body_motion(model, problem.cdof, x) for x in (qacc_smooth, direction)]
    along = [limits.sign * at_limits(problem, x) for x in (qacc_smooth, direction)]
    slack_limits = jnp.where(limits.stiffness > 0, along[0] - limits.aref, 0)

    def cost(stiffness: Array, slack: jax.Array) -> jax.Array:
        pushed = jnp.minimum(slack, 0)
        return (0.5 * stiffness * pushed * pushed).sum()

    def slot(
        costs: tuple[Array, ...], point: Points, stiffness: Array, row: Row, aref: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        slack, step = (
            edges(velocity(point, row, motion_of(row, motion)), row["mu"]) for motion in motions
        )
        slack = slack - aref
        terms = cost(stiffness, slack), cost(stiffness, slack + step)
        costs = tuple(
            jnp.where(point.active, old + new, old) for old, new in zip(costs, terms, strict=True)
        )
        return costs, tuple(jnp.where(point.active, x, 0) for x in (slack, step))

    costs = (
        cost(limits.stiffness, slack_limits),
        0.5 * math.dot(direction, direction_force)
        + cost(limits.stiffness, slack_limits + along[1]),
    )
    slacks, steps = [], []
    for side in problem.sides:
        costs, (slack, step) = over_slots(side, slot, costs, side.aref)
        slacks.append(slack)
        steps.append(step)
    none = jnp.zeros_like(qacc_smooth)
    return SolverState(
        offset=none,
        force=none,
        slack=Slack(slack_limits, tuple(slacks)),
        direction=direction,
        direction_force=direction_force,
        direction_slack=Slack(along[1], tuple(steps)),
        size=jnp.where(costs[1] < costs[0], 1, 0).astype(none.dtype),
        done=costs[0] == 0,  # no row pushes at the smooth acceleration
        niter=jnp.int32(0),
    )


def newton(problem: Problem, search: SolverState) -> SolverState:
    """Takes the pending step and computes the next one, which is then pending."""
    search, sums = advance(problem, search, hessian=True)
    push = constraint_force(problem, search.slack, sums.wrench)
    gradient = search.force - push
    matrix = hessian(problem, search.slack, sums)
    direction = linear.solve(linear.factor(problem.pattern, matrix), -gradient)
    step, rise = response(problem, search.slack, direction, search.direction_slack)
    search = search._replace(
        direction=direction,
        direction_force=multiply(problem.mass, direction),
        direction_slack=step,
    )
    size = line_search(problem, search, math.dot(direction, gradient), rise)
    rounding = FLOOR * jnp.finfo(gradient.dtype).eps
    flat = residual(search.force, push) <= rounding
    return search._replace(
        size=jnp.where(flat, 0, size), done=flat | ~rise.changed, niter=search.niter + 1
    )


def advance(problem: Problem, search: SolverState, *, hessian: bool) -> tuple[SolverState, Sums]:
    """Takes the pending step and sums the rows' wrenches (and, if wanted, their Hessian) at its end."""
    slack, sums = step_and_sum(
        problem, search.slack, search.direction_slack, search.size, hessian=hessian
    )
    moved = search._replace(
        offset=search.offset + search.size * search.direction,
        force=search.force + search.size * search.direction_force,
        slack=slack,
        size=jnp.zeros_like(search.size),
    )
    return moved, sums


class LineSearchState(NamedTuple):
    """The state of a line search: the size to try, the bracket of the best size, and the stopping test."""

    size: jax.Array
    low: jax.Array
    high: jax.Array
    done: jax.Array  # bool: `size` is good enough
    number: jax.Array  # int32: sizes judged so far


def line_search(problem: Problem, search: SolverState, slope: jax.Array, rise: Rise) -> jax.Array:
    """Returns the size of the step that minimises the cost along the direction, by safeguarded Newton.

    `slope` is the cost's derivative at the start, and `rise` the effect of a full step on the rows. A full
    step is exact, and taken at once, if it does not change the set of pushing rows.
    """
    curvature = math.dot(search.direction, search.direction_force)

    def judge(trial: LineSearchState, rise: Rise) -> LineSearchState:
        first = slope + trial.size * curvature + rise.slope
        low = jnp.where(first < 0, trial.size, trial.low)
        high = jnp.where(first < 0, trial.high, trial.size)
        size = trial.size - first / (curvature + rise.bend)
        size = jnp.where((size > low) & (size < high), size, 0.5 * (low + high))
        done = trial.done | (jnp.abs(first) <= FLAT * jnp.abs(slope))
        return LineSearchState(jnp.where(done, trial.size, size), low, high, done, trial.number + 1)

    one = jnp.ones_like(slope)
    trial = lax.while_loop(
        lambda trial: ~trial.done & (trial.number < TRIALS),
        lambda trial: judge(
            trial, along(problem, search.slack, search.direction_slack, trial.size)
        ),
        judge(LineSearchState(one, 0 * one, jnp.inf * one, ~rise.changed, jnp.int32(0)), rise),
    )
    return trial.size


def residual(force: jax.Array, push: jax.Array) -> jax.Array:
    """Returns the norm of the gradient M (a - a0) - J' f, divided by the sum of the norms of its two terms.

    `force` [nv] is M (a - a0), `push` [nv] is J' f.
    """
    norms = [jnp.sqrt(math.dot(x, x)) for x in (force - push, force, push)]
    return norms[0] / jnp.maximum(norms[1] + norms[2], jnp.finfo(force.dtype).tiny)
