"""Sums over the rows of all constraints: their velocities, their forces and their share of the Hessian.

The Jacobian J is never formed. J x is computed from the motions of the bodies. J' f sums wrenches by body.
J' D J is accumulated in two ways: contacts with the static world add a 6 x 6 stiffness to their body, and
contacts between two moving bodies add to the entries along the path between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.physics.collision import Points, Row, frame_of, row_of, scan_slots
from seedbed.physics.cone import Rise, compliance, curvature, push, rise, rise_of_rows
from seedbed.physics.constraint import motion_of, velocity
from seedbed.physics.dynamics import Matrix, composite, project
from seedbed.physics.equality import equality_dofs
from seedbed.physics.problem import Problem, Side, contact_motion
from seedbed.simd.derivative import recomputed
from seedbed.types import Array

UPPER = tuple(i.astype(np.int32) for i in np.triu_indices(6))
"""Row and column indices of the 21 elements that a packed symmetric 6 x 6 matrix stores."""


class Slack(NamedTuple):
    """J x - aref for a point x, or J x for a step x: of dofs, and of contacts along their axes."""

    dofs: jax.Array  # [n]
    sides: tuple[jax.Array, ...]  # [n, axes] each


Compensation = tuple[jax.Array, ...]
"""By how much the aref of each side's normals is raised [n], in m/s^2; length 0 if none gives way."""


class Sums(NamedTuple):
    """Sums over contacts. The last two arrays have length 0 if the Hessian is not wanted."""

    wrench: jax.Array  # [touched, 6] on each body that contacts touch
    stiffness: jax.Array  # [movers, 21] upper triangle, of each moving body that they reach
    coupling: jax.Array  # [entries + 1] Hessian entries along paths; the last is for padding


def over_slots(
    side: Side, body: Callable[..., tuple[Any, Any]], carry: Any, *arrays: jax.Array
) -> tuple[Any, Any]:
    """Scans body(carry, point, D, row, *values) -> (carry, out) over the slots of a side.

    Returns the last carry and the stacked outs [n, ...].
    """

    def slot(
        carry: Any, point: Points, row: Row, stiffness: Array, *values: Array
    ) -> tuple[Any, Any]:
        return body(carry, point, stiffness, row | side.same, *values)

    return scan_slots(side.points, side.table, slot, carry, side.stiffness, *arrays)


def rewrite_slots(
    side: Side,
    body: Callable[..., tuple[Any, Array]],
    carry: Any,
    rows: jax.Array,
    *arrays: jax.Array,
) -> tuple[Any, jax.Array]:
    """Scans body(carry, old, point, D, row, *values) -> (carry, new) over the slots of a side.

    `old` and `new` [k] are a slot's row of `rows` [n, k]. A row changes, in place, only if its contact is
    active; `body` must treat the carry alike. So a slot that is inactive in all environments costs nothing.
    """

    def slot(
        total: tuple[Any, jax.Array], point: Points, stiffness: Array, row: Row, *values: Array
    ) -> tuple[tuple[Any, jax.Array], None]:
        (carry, rows), (number, *rest) = total, values
        old = row_of(rows, number)
        carry, new = body(carry, old, point, stiffness, row, *rest)
        return (carry, math.put(rows, number, jnp.where(point.active, new, old))), None

    numbers = jnp.arange(len(side.stiffness), dtype=np.int32)
    return over_slots(side, slot, (carry, rows), numbers, *arrays)[0]


def response(problem: Problem, slack: Slack, x: jax.Array, before: Slack) -> tuple[Slack, Rise]:
    """Returns J x of every row, for x [nv], and the Rise of the step x from `slack`.

    J x overwrites `before`; rows of inactive contacts keep their values.
    """
    motion = contact_motion(problem, x)
    dofs = at_rows(problem, x)

    def slot(
        total: Rise, _: Array, point: Points, stiffness: Array, row: Row, slack: Array
    ) -> tuple[Rise, jax.Array]:
        step = velocity(point, row, motion_of(point, row, motion))
        return _added(point.active, total, rise(stiffness, row["mu"], slack, step, 1)), step

    total = _rise_of_dofs(problem, slack, dofs, 1)
    steps = []
    for side, start, old in zip(problem.sides, slack.sides, before.sides, strict=True):
        total, step = rewrite_slots(side, slot, total, old, start)
        steps.append(step)
    return Slack(dofs, tuple(steps)), total


def along(problem: Problem, slack: Slack, step: Slack, size: jax.Array) -> Rise:
    """Returns the Rise of `size` times `step` from `slack`."""
    total = _rise_of_dofs(problem, slack, step.dofs, size)

    def slot(
        total: Rise, point: Points, stiffness: Array, row: Row, slack: Array, step: Array
    ) -> tuple[Rise, None]:
        return _added(point.active, total, rise(stiffness, row["mu"], slack, step, size)), None

    for side, *ends in zip(problem.sides, slack.sides, step.sides, strict=True):
        total, _ = over_slots(side, slot, total, *ends)
    return total


def _added(active: Array, rise: Rise, more: Rise) -> Rise:
    total = Rise(rise.slope + more.slope, rise.bend + more.bend, rise.changed | more.changed)
    return Rise(*(jnp.where(active, x, y) for x, y in zip(total, rise, strict=True)))


def _rise_of_dofs(problem: Problem, slack: Slack, step: jax.Array, size: Array | int) -> Rise:
    dofs = problem.dofs
    bounds = None if dofs.low is None or dofs.high is None else (dofs.low, dofs.high)
    return rise_of_rows(dofs.stiffness, slack.dofs, step, size, bounds)


def at_rows(problem: Problem, x: jax.Array) -> jax.Array:
    """Returns J x of the rows of dofs [n], for x [nv]."""
    single = jnp.zeros(0, x.dtype)
    if len(problem.rows_dof):
        single = problem.dofs.sign * jnp.stack([x[d] for d in problem.rows_dof])
    if not problem.wide_dofs:
        return single
    wide = [
        math.dot(row, jnp.stack([x[d] for d in dofs]))
        for row, dofs in zip(problem.dofs.wide, problem.wide_dofs, strict=True)
    ]
    return jnp.concatenate([single, jnp.stack(wide)])


def equality_force(problem: Problem, qacc: jax.Array) -> jax.Array:
    """Returns the forces [n] of the equalities, which come first of the rows over several dofs."""
    slack = at_rows(problem, qacc) - problem.dofs.aref
    first = len(problem.rows_dof)
    last = first + len(equality_dofs(problem.model))
    return (-problem.dofs.stiffness * slack)[first:last]


def step_and_sum(
    problem: Problem, slack: Slack, step: Slack, size: jax.Array, *, hessian: bool
) -> tuple[Slack, Sums]:
    """Moves the rows by `size` times `step`; sums their wrenches there and, if wanted, their Hessian."""
    sums = _no_sums(problem, size.dtype, hessian=hessian)

    def slot(
        sums: Sums, slack: Array, point: Points, stiffness: Array, row: Row, step: Array
    ) -> tuple[Sums, jax.Array]:
        slack = slack + size * step
        force, pushing = push(stiffness, row["mu"], slack)
        wrench = _wrench(point, row, force)
        sums = sums._replace(wrench=_add_wrench(sums.wrench, row, point, wrench))
        if hessian:
            bend = curvature(stiffness, row["mu"], pushing)
            sums = _add_stiffness(problem, sums, point, row, bend)
        return sums, slack

    moved = []
    for side, *rows in zip(problem.sides, slack.sides, step.sides, strict=True):
        sums, there = rewrite_slots(side, slot, sums, *rows)
        moved.append(there)
    return Slack(slack.dofs + size * step.dofs, tuple(moved)), sums


def due(
    problem: Problem, slack: Slack, step: Slack, size: jax.Array, before: Compensation
) -> Compensation:
    """Returns what each contact's normal gives way after `size` times `step` from `slack`.

    It overwrites the compensation `before`; inactive contacts keep theirs.
    """

    def slot(
        carry: tuple[()],
        _: Array,
        point: Points,
        stiffness: Array,
        row: Row,
        slack: Array,
        step: Array,
    ) -> tuple[tuple[()], jax.Array]:
        force = push(stiffness, row["mu"], slack + size * step).force
        return carry, (compliance(stiffness) * force[0])[None]

    return tuple(
        rewrite_slots(side, slot, (), old[:, None], start, move)[1][:, 0] if side.gives else old
        for side, start, move, old in zip(
            problem.sides, slack.sides, step.sides, before, strict=True
        )
    )


def compensated(rows: jax.Array, change: jax.Array) -> jax.Array:
    """Returns the rows [n, axes] of a side with `change` [n] added to the normal's; it may have length 0."""
    if not len(change):
        return rows
    return jnp.concatenate([rows[:, :1] + change[:, None], rows[:, 1:]], axis=1)


def raised(problem: Problem, compensation: Compensation) -> Problem:
    """Returns the problem with the normals' aref raised; () raises nothing."""
    if not compensation:
        return problem
    sides = zip(problem.sides, compensation, strict=True)
    return problem._replace(
        sides=tuple(s._replace(aref=compensated(s.aref, change)) for s, change in sides)
    )


def sums_at(problem: Problem, x: jax.Array, *, hessian: bool) -> tuple[Slack, Sums]:
    """Returns the slack of single dofs at x [nv], and the sums over contacts there; contacts' slack is ().

    In derivatives, what a slot computes is computed again.
    """
    motion = contact_motion(problem, x)
    dofs = problem.dofs
    slack_dofs = at_rows(problem, x) - dofs.aref

    def slot(
        sums: Sums, point: Points, stiffness: Array, row: Row, aref: Array
    ) -> tuple[Sums, None]:
        integers = {name: value for name, value in row.items() if not _is_float(value)}

        def wrench_of(
            motion: Array, point: Points, stiffness: Array, floats: Row, aref: Array
        ) -> Any:
            row = integers | floats
            slack = velocity(point, row, motion_of(point, row, motion)) - aref
            force, pushing = push(stiffness, row["mu"], slack)
            bend = curvature(stiffness, row["mu"], pushing) if hessian else None
            return _wrench(point, row, force), bend

        floats = {name: value for name, value in row.items() if _is_float(value)}
        wrench, bend = recomputed(wrench_of)(motion, point, stiffness, floats, aref)
        sums = sums._replace(wrench=_add_wrench(sums.wrench, row, point, wrench))
        if hessian:
            sums = _add_stiffness(problem, sums, point, row, bend)
        return sums, None

    sums = _no_sums(problem, x.dtype, hessian=hessian)
    for side in problem.sides:
        sums, _ = over_slots(side, slot, sums, side.aref)
    return Slack(jnp.where(dofs.stiffness > 0, slack_dofs, 0), ()), sums


def _is_float(value: Array) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating)


def _no_sums(problem: Problem, dtype: Any, *, hessian: bool) -> Sums:
    return Sums(
        jnp.zeros((len(problem.touched), 6), dtype),
        jnp.zeros((len(problem.movers) if hessian else 0, 21), dtype),
        jnp.zeros(len(problem.entries) + 1 if hessian else 0, dtype),
    )


def _wrench(point: Points, row: Row, force: jax.Array) -> jax.Array:
    """Returns the wrench [6] of a force along the axes of a contact's frame, [3] or [1]."""
    pushed = (frame_of(point, row) * force[:, None]).sum(0)
    return jnp.concatenate([math.cross(point.pos, pushed), pushed])


def _add_wrench(total: jax.Array, row: Row, point: Points, wrench: jax.Array) -> jax.Array:
    """Adds a contact's wrench [6] to its second body in total [touched, 6], and subtracts it from its first.

    Each is about the reference point of its own body.
    """
    for name, sign in (("real1", -1), ("real2", 1)):
        body = row[name]
        # A constant below 0 is the world in all slots, whose wrench is not needed.
        if not (isinstance(body, np.integer) and body < 0):
            own = wrench
            if len(point.apart):
                # The contact is relative to the only moving body or, of two, to the second.
                away = row["sign"] * sign < 0 if "sign" in row else name == "real1"
                own = jnp.where(away, math.shift_force(wrench, point.apart), wrench)
            old = row_of(total, body)
            total = math.put(total, row[name], jnp.where(point.active, old + sign * own, old))
    return total


def _add_stiffness(
    problem: Problem, sums: Sums, point: Points, row: Row, curvature: jax.Array
) -> Sums:
    """Adds a contact's share of the Hessian; `curvature` [k, k] is along the k axes of its frame."""
    if "sign" not in row:
        return sums._replace(coupling=_couple(problem, sums.coupling, point, row, curvature))
    basis = frame_of(point, row)
    bent = (curvature[:, :, None] * basis[None]).sum(1)
    world = (basis[:, :, None] * bent[:, None, :]).sum(0)
    turned = math.cross(point.pos[None], world)
    both = math.cross(point.pos[None], turned.T)
    full = jnp.concatenate(
        [jnp.concatenate([both, turned.T], 1), jnp.concatenate([turned, world], 1)]
    )
    old = row_of(sums.stiffness, row["body"])
    new = jnp.where(point.active, old + full[UPPER], old)
    return sums._replace(stiffness=math.put(sums.stiffness, row["body"], new))


def _couple(
    problem: Problem, coupling: jax.Array, point: Points, row: Row, curvature: jax.Array
) -> jax.Array:
    """Adds a contact between moving bodies to the Hessian entries [entries + 1] of the path between them.

    Places that only pad a shorter path add nothing.
    """
    bent: list[jax.Array] = []
    entries = math.unstack(row["entry"])
    for dof, turn in zip(math.unstack(row["dof"]), math.unstack(row["turn"]), strict=True):
        motion = turn * row_of(problem.cdof, dof)
        if len(point.apart):
            # Dofs with a negative sign are those of the first body.
            motion = math.shift_motion(motion, -point.apart * (turn < 0))
        lever = velocity(point, row, motion)
        bent.append((curvature * lever[None]).sum(1))
        reached = point.active & (turn != 0)
        first = len(bent) * (len(bent) - 1) // 2
        for place, other in enumerate(bent):
            entry = entries[first + place]
            old = math.take(coupling, entry)
            new = old + math.dot(lever, other)
            coupling = math.put(coupling, entry, jnp.where(reached, new, old))
    return coupling


def constraint_force(problem: Problem, slack: Slack, wrench: jax.Array) -> jax.Array:
    """Returns J' f [nv]: the forces of single dofs and the contacts' wrenches [touched, 6] on the dofs."""
    total: dict[int, Array] = {}
    carriers = problem.model.body_weldid[problem.touched].tolist()
    for body, row in zip(carriers, math.unstack(wrench, 0), strict=True):
        total[body] = total[body] + row if body in total else row
    force = math.unstack(project(problem.model, problem.cdof, total))
    count, cut = len(problem.rows_dof), problem.dofs.cut(slack.dofs)
    push = -problem.dofs.sign * problem.dofs.stiffness[:count] * cut[:count]
    for dof, pushed in zip(problem.rows_dof, math.unstack(push), strict=True):
        force[dof] = force[dof] + pushed
    wide = zip(problem.dofs.wide, problem.wide_dofs, strict=True)
    for row, (numbers, dofs) in enumerate(wide, count):
        pushed = problem.dofs.stiffness[row] * cut[row]
        for number, dof in zip(math.unstack(numbers), dofs, strict=True):
            force[dof] = force[dof] - number * pushed
    return jnp.stack(force)


def wrenches(problem: Problem, sums: Sums) -> jax.Array:
    """Returns the wrenches of contacts on all bodies [nbody, 6]; none on the world, as in MuJoCo."""
    rows: list[Array] = [np.zeros(6, sums.wrench.dtype)] * problem.model.nbody
    for body, row in zip(problem.touched, math.unstack(sums.wrench, 0), strict=True):
        rows[body] = row if body else rows[body]
    return jnp.stack(rows)


def hessian(problem: Problem, slack: Slack, sums: Sums) -> Matrix:
    """Returns M + J' D J, summed over the rows that push."""
    matrix = dict(problem.mass)
    if any("sign" in side.same | side.table for side in problem.sides):
        square = np.zeros((6, 6), int)
        square[UPPER] = np.arange(21)
        full = math.unstack(sums.stiffness[:, np.maximum(square, square.T)], 0)
        stiffness = dict(zip(problem.movers.tolist(), full, strict=True))
        for entry, value in composite(problem.model, problem.cdof, stiffness).items():
            matrix[entry] = matrix[entry] + value
    inside = problem.dofs.inside(slack.dofs)
    pushing = math.unstack(jnp.where(inside, problem.dofs.stiffness, 0))
    for row, dof in enumerate(problem.rows_dof):
        matrix[dof, dof] = matrix[dof, dof] + pushing[row]
    wide = zip(problem.dofs.wide, problem.wide_dofs, strict=True)
    for row, (numbers, dofs) in enumerate(wide, len(problem.rows_dof)):
        ends = list(zip(dofs, math.unstack(numbers), strict=True))
        for i, a in ends:
            for j, b in ends:
                if j <= i:
                    value = pushing[row] * a * b
                    matrix[i, j] = matrix[i, j] + value if (i, j) in matrix else value
    coupling = math.unstack(sums.coupling[: len(problem.entries)], 0)
    for entry, value in zip(problem.entries, coupling, strict=True):
        matrix[entry] = matrix[entry] + value if entry in matrix else value
    return matrix
