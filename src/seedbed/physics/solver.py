"""The constrained acceleration: MuJoCo's convex problem, solved to convergence by Newton's method.

qacc is the a that minimises 1/2 (a - a0)' M (a - a0) + sum 1/2 D min(0, J a - aref)^2, where a0 is the smooth
acceleration (Todorov 2014; engine_solver.c, primal form). A row pushes if J a - aref is negative. A row of
friction loss pulls, too, and its cost is linear beyond the force that it has at most. The cost is piecewise
quadratic: a full step that does not change the pieces of the rows ends at the exact minimum.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from seedbed.physics import linear, math
from seedbed.physics.assembly import (
    Compensation,
    Slack,
    Sums,
    along,
    at_rows,
    compensated,
    constraint_force,
    due,
    hessian,
    over_slots,
    response,
    step_and_sum,
    wrenches,
)
from seedbed.physics.collision import Points, Row
from seedbed.physics.cone import Rise, cost
from seedbed.physics.constraint import motion_of, velocity
from seedbed.physics.dynamics import multiply
from seedbed.physics.model import Model
from seedbed.physics.problem import Problem, contact_motion
from seedbed.types import Array

TINY = 1e-30
"""A norm below this counts as zero."""
TRIALS = 30
"""Most trials of a line search; one to three are usual."""
FLAT = 1e-2
"""A line search ends when the slope has fallen to this share of the first slope (MuJoCo's ls_tolerance)."""
FLOOR = 4
"""The solver stops if the step to the minimum is at most this many rounding errors of qacc."""
EXACT = 3e-5
"""A full step is the last one if the rounding of the rows' forces moves qacc by this share of it at most."""
DUE = 1e-6
"""No compensation is made for less than this share of qacc, since it may act on a short lever."""
STILL = 1e-5
"""Compensation ends with one that moves qacc by at most this share: what is left moves it by less."""
ROUNDS = 10
"""Most compensations of one search; one or two are usual."""


class Solution(NamedTuple):
    """The result of the solver."""

    qacc: jax.Array  # [nv]
    qfrc_constraint: jax.Array  # [nv]
    force: (
        jax.Array
    )  # [nv] M (qacc - qacc_smooth): qfrc_constraint without the rounding of large forces
    wrench: jax.Array  # [nbody, 6] of the contacts on each body, about its reference point
    compensation: Compensation
    niter: jax.Array  # int32
    error: jax.Array  # m/s^2 and rad/s^2, estimated norm of qacc minus the minimum


class Rounds(NamedTuple):
    """The compensation of normals that give way, round by round."""

    compensation: Compensation
    settled: jax.Array  # bool: the pending step ends at the minimum with this compensation
    moved: jax.Array  # how far qacc has moved since the last round; infinite before the first
    number: jax.Array  # int32


class SolverState(NamedTuple):
    """The state of the solver: a point, and the pending step from it."""

    offset: jax.Array  # [nv] acceleration minus the smooth acceleration
    force: jax.Array  # [nv] M offset
    slack: Slack
    direction: jax.Array  # [nv]
    direction_force: jax.Array  # [nv] M direction
    direction_slack: Slack
    size: jax.Array  # of the pending step, as a multiple of `direction`
    rounds: Rounds
    error: jax.Array  # estimated distance from the minimum after the pending step
    done: jax.Array  # bool
    niter: jax.Array  # int32


def search(problem: Problem, qacc_smooth: jax.Array, warmstart: jax.Array) -> Solution:
    """Searches for qacc; its derivative is that of `implicit.solve`.

    The start is `warmstart` or `qacc_smooth`, both [nv]: the one with the lower cost. The search stops at
    convergence or after `opt.iterations` steps.
    """
    state = lax.while_loop(
        lambda state: ~state.done,
        lambda state: newton(problem, qacc_smooth, state),
        start(problem, qacc_smooth, warmstart),
    )
    state, sums = advance(problem, state, hessian=False)
    push = constraint_force(problem, state.slack, sums.wrench)
    return Solution(
        qacc_smooth + state.offset,
        push,
        state.force,
        wrenches(problem, sums),
        state.rounds.compensation,
        state.niter,
        state.error,
    )


def start(problem: Problem, qacc_smooth: jax.Array, warmstart: jax.Array) -> SolverState:
    """Makes the first point, the smooth acceleration, and a pending step to the warm start.

    The size of the step is 1 if the warm start has the lower cost, otherwise 0.
    """
    dofs = problem.dofs
    direction = warmstart - qacc_smooth
    direction_force = multiply(problem.mass, direction)
    motions = [contact_motion(problem, x) for x in (qacc_smooth, direction)]
    along = [at_rows(problem, x) for x in (qacc_smooth, direction)]
    slack_dofs = jnp.where(dofs.stiffness > 0, along[0] - dofs.aref, 0)

    def slot(
        costs: tuple[Array, ...], point: Points, stiffness: Array, row: Row, aref: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        slack, step = (velocity(point, row, motion_of(point, row, motion)) for motion in motions)
        slack = slack - aref
        terms = (cost(stiffness, row["mu"], y) for y in (slack, slack + step))
        costs = tuple(
            jnp.where(point.active, old + new, old) for old, new in zip(costs, terms, strict=True)
        )
        return costs, tuple(jnp.where(point.active, x, 0) for x in (slack, step))

    costs = (
        dofs.cost(slack_dofs),
        0.5 * math.dot(direction, direction_force) + dofs.cost(slack_dofs + along[1]),
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
        slack=Slack(slack_dofs, tuple(slacks)),
        direction=direction,
        direction_force=direction_force,
        direction_slack=Slack(along[1], tuple(steps)),
        size=jnp.where(costs[1] < costs[0], 1, 0).astype(none.dtype),
        rounds=Rounds(
            tuple(
                jnp.zeros_like(side.aref[:, 0] if side.gives else side.aref[:0, 0])
                for side in problem.sides
            ),
            settled=jnp.zeros((), bool),
            moved=jnp.full((), jnp.inf, none.dtype),
            number=jnp.int32(0),
        ),
        error=jnp.zeros((), none.dtype),
        done=costs[0] == 0,  # no row pushes at the smooth acceleration
        niter=jnp.int32(0),
    )


def newton(problem: Problem, qacc_smooth: jax.Array, search: SolverState) -> SolverState:
    """Takes the pending step and computes the next one, which is then pending.

    After `opt.iterations` steps, or where the next step would be lost in rounding, its size is zero.
    """
    gives = any(side.gives for side in problem.sides)
    left, changes = jnp.zeros_like(search.size), search.rounds.compensation
    if gives:
        search, left, changes = compensate(problem, search, _norm(qacc_smooth))
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
    curvature = math.dot(direction, search.direction_force)
    size = line_search(problem, search, math.dot(direction, gradient), curvature, rise)
    eps = jnp.finfo(gradient.dtype).eps
    length, span = _norm(direction), _norm(qacc_smooth) + _norm(search.offset)
    limit = problem.model.opt.iterations
    lost = size * length <= FLOOR * eps * span
    stays = lost | (search.niter >= limit) | search.rounds.settled
    # A step on which no row changes its side ends at the minimum, but for the rounding of the step, which
    # hard rows multiply.
    rounding = eps * (1 + problem.hardness) * length
    exact = ~rise.changed & (rounding <= EXACT * span)
    ends = stays | exact
    # The last compensation moves forces only.
    vain = lost & (search.rounds.moved == 0)
    done = ends & (~problem.compliant | search.rounds.settled | vain | (search.niter >= limit))
    moved = search.rounds.moved + jnp.where(stays, 0, size * length)
    search = search._replace(
        size=jnp.where(stays, 0, size),
        error=jnp.maximum(jnp.where(exact & ~stays, rounding, length), jnp.where(vain, 0, left)),
        rounds=search.rounds._replace(settled=ends, moved=moved),
        done=done if gives else ends,
        niter=search.niter + jnp.where(stays, 0, 1),
    )
    return _raised(search, tuple(jnp.where(vain, -x, 0) for x in changes)) if gives else search


def compensate(
    problem: Problem, search: SolverState, smooth: jax.Array
) -> tuple[SolverState, jax.Array, Compensation]:
    """Raises the normals' aref by as much as they give way, if the pending step ends at a minimum.

    `smooth` is the norm of the smooth acceleration. Also returns about how far qacc is from that of hard
    contacts, and by how much aref was raised: if it was not, the search is still settled.

    This is the method of multipliers (Bertsekas 1982). A normal that gives way by c f for a force f, and
    whose aref was raised by c times the force of the last minimum, comes to the force of one that does not
    give way: a round leaves about c / (c + A) of the difference, where A is what a unit of force accelerates.
    Forces that do not move anything, as of a body between two walls, stay those of the soft contacts.
    """
    rounds = search.rounds
    wanted = due(problem, search.slack, search.direction_slack, search.size, rounds.compensation)
    left = jnp.zeros_like(smooth)
    for new, old in zip(wanted, rounds.compensation, strict=True):
        if len(old):
            left = jnp.maximum(left, jnp.abs(new - old).max())
    span = smooth + _norm(search.offset)
    more = rounds.settled & (left > DUE * span) & (rounds.moved > STILL * span)
    more = more & (rounds.number < ROUNDS) & (search.niter < problem.model.opt.iterations)
    pairs = zip(wanted, rounds.compensation, strict=True)
    changes = tuple(jnp.where(more, new - old, 0) for new, old in pairs)
    rounds = Rounds(
        rounds.compensation,
        settled=rounds.settled & ~more,
        moved=jnp.where(more, 0, rounds.moved),
        number=rounds.number + more,
    )
    left = jnp.minimum(left, search.rounds.moved)
    return _raised(search._replace(rounds=rounds), changes), left, changes


def _raised(search: SolverState, changes: Compensation) -> SolverState:
    """Returns the search with aref raised by `changes`, and the slack lowered."""
    old = search.rounds.compensation
    rounds = search.rounds._replace(
        compensation=tuple(x + y for x, y in zip(old, changes, strict=True))
    )
    sides = tuple(compensated(x, -y) for x, y in zip(search.slack.sides, changes, strict=True))
    return search._replace(rounds=rounds, slack=search.slack._replace(sides=sides))


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


def line_search(
    problem: Problem, search: SolverState, slope: jax.Array, curvature: jax.Array, rise: Rise
) -> jax.Array:
    """Returns the size of the step that minimises the cost along the direction, by safeguarded Newton.

    `slope` is the cost's derivative at the start, `curvature` the inertia's share of its second derivative,
    and `rise` the effect of a full step on the rows. A full step is taken at once if it does not change the
    set of pushing rows.
    """

    def judge(trial: LineSearchState, rise: Rise) -> LineSearchState:
        first = slope + trial.size * curvature + rise.slope
        low = jnp.where(first < 0, trial.size, trial.low)
        high = jnp.where(first < 0, trial.high, trial.size)
        size = trial.size - first / (curvature + rise.bend)
        size = jnp.where((size > low) & (size < high), size, 0.5 * (low + high))
        done = trial.done | (jnp.abs(first) <= FLAT * jnp.abs(slope))
        return LineSearchState(jnp.where(done, trial.size, size), low, high, done, trial.number + 1)

    one = jnp.ones_like(slope)
    # Of a quadratic, which is 1 but where hard rows hide a soft direction's curvature from the factorisation.
    whole = -slope / jnp.maximum(curvature + rise.bend, TINY)
    trial = lax.while_loop(
        lambda trial: ~trial.done & (trial.number < TRIALS),
        lambda trial: judge(
            trial, along(problem, search.slack, search.direction_slack, trial.size)
        ),
        judge(LineSearchState(one, 0 * one, jnp.inf * one, ~rise.changed, jnp.int32(0)), rise),
    )
    return jnp.where(rise.changed, trial.size, whole)


def relative_error(
    model: Model, solution: Solution, qacc_smooth: jax.Array, qvel: jax.Array
) -> jax.Array:
    """Returns the solver's estimated error over the size of what a step changes.

    That is the largest of the norms of qacc, of `qacc_smooth` [nv] and of 2 % of `qvel` [nv] over a time
    step. It has no derivative.
    """
    drift = 0.02 / model.opt.timestep * qvel
    sizes = [_norm(lax.stop_gradient(x)) for x in (solution.qacc, qacc_smooth, drift)]
    return solution.error / jnp.maximum(jnp.stack(sizes).max(), TINY)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(math.dot(x, x))
