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
from jax import lax

from seedbed.physics import linear, math
from seedbed.physics.collision import Contacts, Points, Row, frame_of, row_of, split
from seedbed.physics.constraint import (
    Edges,
    Group,
    Limits,
    Rows,
    edges,
    groups,
    limit_table,
    motion_of,
    velocity,
)
from seedbed.physics.dynamics import Matrix, body_motion, composite, path, project
from seedbed.physics.model import Kinematics, Model
from seedbed.types import Array

UPPER = np.triu_indices(6)
"""Row and column indices of the 21 elements that a packed symmetric 6 x 6 matrix stores."""


class Side(NamedTuple):
    """One group of contacts in this configuration, and the constants that a loop over its slots reads."""

    points: Points
    stiffness: jax.Array  # [n] D
    aref: jax.Array  # [n, rows]
    same: Row  # constants that are equal in all slots
    table: Row  # the other constants, [n, ...] each


class Problem(NamedTuple):
    """The solver's constants: the model, and the matrices and constraint rows of one configuration."""

    model: Model
    cdof: jax.Array  # [nv, 6]
    mass: Matrix
    limits: Limits
    limit_dof: np.ndarray  # [n]
    sides: tuple[Side, ...]  # only the groups that have slots
    entries: tuple[linear.Entry, ...]  # Hessian entries that contacts of moving bodies add to
    pattern: linear.Pattern  # of the Hessian


class Slack(NamedTuple):
    """The value of every row: J x - aref for a point x, or J x for a step x."""

    limits: jax.Array  # [n]
    sides: tuple[jax.Array, ...]  # [n, rows] each


class Rise(NamedTuple):
    """The effect of a step on the rows' cost along it."""

    slope: jax.Array  # the slope at the end of the step minus the slope at its start
    bend: jax.Array  # the curvature at the end
    changed: jax.Array  # bool: the rows that push at the end are not those that push at the start


class Sums(NamedTuple):
    """Sums over contacts. The last two arrays have length 0 if the Hessian is not wanted."""

    wrench: jax.Array  # [nbody, 6] on each body
    stiffness: jax.Array  # [nbody, 21] upper triangle, of each moving body
    coupling: jax.Array  # [entries + 1] Hessian entries along paths; the last is for padding


def pose(model: Model, kin: Kinematics, mass: Matrix, contacts: Contacts, rows: Rows) -> Problem:
    """Gathers the values that do not change while the solver runs."""
    fixed, moving = groups(model)
    entries, columns = coupling_tables(model, moving)
    sides = (
        _side(fixed, contacts.fixed, rows.fixed, {}),
        _side(moving, contacts.moving, rows.moving, columns),
    )
    pairs = {(i, j) for i in range(model.nv) for j in path(model, i)}
    return Problem(
        model=model,
        cdof=kin.cdof,
        mass=mass,
        limits=rows.limits,
        limit_dof=limit_table(model)["dof"],
        sides=tuple(side for side in sides if len(side.stiffness)),
        entries=entries,
        pattern=linear.pattern(model.nv, pairs | set(entries)),
    )


def _side(group: Group, points: Points, rows: Edges, columns: dict[str, np.ndarray]) -> Side:
    body = {f"real{k + 1}": group.slots.body[:, k].astype(np.int32) for k in (0, 1)}
    cast = {
        name: math.constant(column, rows.aref.dtype)
        for name, column in (group.columns | body | columns).items()
    }
    same, table = split(**cast)
    return Side(points=points, stiffness=rows.stiffness, aref=rows.aref, same=same, table=table)


def coupling_tables(
    model: Model, group: Group
) -> tuple[tuple[linear.Entry, ...], dict[str, np.ndarray]]:
    """Lists the Hessian entries that contacts between moving bodies add to, and the columns of each slot.

    `dof` and `turn` [n, places] are the dofs on the path between the two bodies, and the sign with which
    each moves the contact; 0 is padding. `entry` [n, places (places + 1) / 2] is the index of the Hessian
    entry of each pair of places; padding points past the last entry. Both results are empty without slots.
    """
    paths = []
    for body1, body2 in group.slots.mover:
        last = [int(model.body_dofadr[b] + model.body_dofnum[b]) - 1 for b in (body1, body2)]
        ends = [path(model, dof) for dof in last]
        only = [[d for d in end if d not in other] for end, other in (ends, ends[::-1])]
        paths.append([(d, -1.0) for d in only[0]] + [(d, 1.0) for d in only[1]])
    if not paths:
        return (), {}
    places = max(len(p) for p in paths)
    pairs = [
        {
            (max(p[a][0], p[b][0]), min(p[a][0], p[b][0])): 0
            for a in range(len(p))
            for b in range(a + 1)
        }
        for p in paths
    ]
    entries = tuple(sorted(set().union(*pairs)))
    place = {entry: k for k, entry in enumerate(entries)}
    padded = [p + [(0, 0.0)] * (places - len(p)) for p in paths]
    rows, columns = np.tril_indices(places)
    target = [
        [
            place[max(p[a][0], p[b][0]), min(p[a][0], p[b][0])] if a < len(p) else len(entries)
            for a, b in zip(rows, columns, strict=True)
        ]
        for p in paths
    ]
    return entries, {
        "dof": np.array([[d for d, _ in p] for p in padded], np.int32),
        "turn": np.array([[sign for _, sign in p] for p in padded]),
        "entry": np.array(target, np.int32),
    }


def over_slots(
    side: Side, body: Callable[..., tuple[Any, Any]], carry: Any, *arrays: jax.Array
) -> tuple[Any, Any]:
    """Scans body(carry, point, D, row, *values) -> (carry, out) over the slots of a side.

    Returns the last carry and the stacked outs [n, ...].
    """

    def slot(carry: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        point, stiffness, row, *values = inputs
        return body(carry, point, stiffness, row | side.same, *values)

    return lax.scan(slot, carry, (side.points, side.stiffness, side.table, *arrays))


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
    motion = body_motion(problem.model, problem.cdof, x)
    limits = problem.limits.sign * at_limits(problem, x)

    def slot(
        rise: Rise, _: Array, point: Points, stiffness: Array, row: Row, slack: Array
    ) -> tuple[Rise, jax.Array]:
        step = edges(velocity(point, row, motion_of(row, motion)), row["mu"])
        return _added(point.active, rise, _rise(stiffness, slack, step, 1)), step

    rise = _rise(problem.limits.stiffness, slack.limits, limits, 1)
    steps = []
    for side, start, old in zip(problem.sides, slack.sides, before.sides, strict=True):
        rise, step = rewrite_slots(side, slot, rise, old, start)
        steps.append(step)
    return Slack(limits, tuple(steps)), rise


def along(problem: Problem, slack: Slack, step: Slack, size: jax.Array) -> Rise:
    """Returns the Rise of `size` times `step` from `slack`."""

    def slot(rise: Rise, inputs: tuple[Array, ...]) -> tuple[Rise, None]:
        active, stiffness, slack, step = inputs
        return _added(active, rise, _rise(stiffness, slack, step, size)), None

    rise = _rise(problem.limits.stiffness, slack.limits, step.limits, size)
    for side, *rows in zip(problem.sides, slack.sides, step.sides, strict=True):
        rise, _ = lax.scan(slot, rise, (side.points.active, side.stiffness, *rows))
    return rise


def _rise(stiffness: Array, slack: Array, step: Array, size: Array | int) -> Rise:
    """Returns the Rise of `size` times `step` in rows that share one stiffness or have one each.

    The slope is computed as a change, because the large forces that balance at the start would hide it.
    """
    there = slack + size * step
    before, after = slack < 0, there < 0
    moved = jnp.where(before, jnp.where(after, size * step, -slack), jnp.where(after, there, 0))
    weight = stiffness * step
    changed = (before != after) & (stiffness > 0)
    return Rise((weight * moved).sum(), jnp.where(after, weight * step, 0).sum(), changed.any())


def _added(active: Array, rise: Rise, more: Rise) -> Rise:
    total = Rise(rise.slope + more.slope, rise.bend + more.bend, rise.changed | more.changed)
    return Rise(*(jnp.where(active, x, y) for x, y in zip(total, rise, strict=True)))


def at_limits(problem: Problem, x: jax.Array) -> jax.Array:
    """Returns the elements of x [nv] at the dofs of the limits [n]."""
    if not len(problem.limit_dof):
        return jnp.zeros(0, x.dtype)
    return jnp.stack([x[d] for d in problem.limit_dof])


def step_and_sum(
    problem: Problem, slack: Slack, step: Slack, size: jax.Array, *, hessian: bool
) -> tuple[Slack, Sums]:
    """Moves the rows by `size` times `step`; sums their wrenches there and, if wanted, their Hessian."""
    nbody, dtype = problem.model.nbody, size.dtype
    sums = Sums(
        jnp.zeros((nbody, 6), dtype),
        jnp.zeros((nbody if hessian else 0, 21), dtype),
        jnp.zeros(len(problem.entries) + 1 if hessian else 0, dtype),
    )

    def slot(
        sums: Sums, slack: Array, point: Points, stiffness: Array, row: Row, step: Array
    ) -> tuple[Sums, jax.Array]:
        slack = slack + size * step
        pushing = jnp.where(slack < 0, stiffness, 0)
        force = _contact_force(-pushing * slack, row["mu"])
        pushed = (frame_of(point, row) * force[:, None]).sum(0)
        wrench = jnp.concatenate([math.cross(point.pos, pushed), pushed])
        sums = sums._replace(wrench=_add_wrench(sums.wrench, row, point.active, wrench))
        if hessian:
            sums = _add_stiffness(problem, sums, point, row, _curvature(pushing, row["mu"]))
        return sums, slack

    moved = []
    for side, *rows in zip(problem.sides, slack.sides, step.sides, strict=True):
        sums, there = rewrite_slots(side, slot, sums, *rows)
        moved.append(there)
    return Slack(slack.limits + size * step.limits, tuple(moved)), sums


def _contact_force(force: jax.Array, mu: Array) -> jax.Array:
    """Turns forces along the rows, [4] or [1], into a force in the contact frame, [3] or [1]."""
    if len(force) == 1:
        return force
    a, b, c, d = math.unstack(force)
    return jnp.stack([a + b + c + d, mu * (a - b), mu * (c - d)])


def _curvature(d: jax.Array, mu: Array) -> jax.Array:
    """Returns the second derivative, [3, 3] or [1, 1], of the cost by the velocity in the contact frame.

    `d` [4] or [1] is the stiffness of the rows, zero for rows that do not push.
    """
    if len(d) == 1:
        return d[None]
    a, b, c, d = math.unstack(d)
    zero = np.zeros((), a.dtype)
    first, second = mu * (a - b), mu * (c - d)
    rows = (
        [a + b + c + d, first, second],
        [first, mu * mu * (a + b), zero],
        [second, zero, mu * mu * (c + d)],
    )
    return jnp.stack([jnp.stack(row) for row in rows])


def _add_wrench(total: jax.Array, row: Row, active: Array, wrench: jax.Array) -> jax.Array:
    """Adds a contact's wrench [6] to its second body in total [nbody, 6], and subtracts it from its first."""
    for name, sign in (("real1", -1), ("real2", 1)):
        body = row[name]
        # A constant 0 is the world in all slots, whose wrench is not needed.
        if not (isinstance(body, np.integer) and body == 0):
            old = row_of(total, body)
            total = math.put(total, row[name], jnp.where(active, old + sign * wrench, old))
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
    levers: list[jax.Array] = []
    bent: list[jax.Array] = []
    for dof, turn in zip(math.unstack(row["dof"]), math.unstack(row["turn"]), strict=True):
        motion = turn * row_of(problem.cdof, dof)
        levers.append(velocity(point, row, motion))
        bent.append((curvature * levers[-1][None]).sum(1))
        reached = point.active & (turn != 0)
        first = len(levers) * (len(levers) - 1) // 2
        for place, other in enumerate(bent):
            entry = row["entry"][first + place]
            old = row_of(coupling, entry)
            new = old + math.dot(levers[-1], other)
            coupling = math.put(coupling, entry, jnp.where(reached, new, old))
    return coupling


def constraint_force(problem: Problem, slack: Slack, wrench: jax.Array) -> jax.Array:
    """Returns J' f [nv]: the limits' forces and the contacts' wrenches [nbody, 6] on the dofs."""
    model = problem.model
    total: list[Any] = [jnp.zeros(6, wrench.dtype)] * model.nbody
    for body, row in enumerate(math.unstack(wrench, 0)):
        if carrier := model.body_weldid[body]:
            total[carrier] = total[carrier] + row
    force = math.unstack(project(model, problem.cdof, jnp.stack(total)))
    push = -problem.limits.sign * problem.limits.stiffness * jnp.minimum(slack.limits, 0)
    for row, dof in enumerate(problem.limit_dof):
        force[dof] = force[dof] + push[row]
    return jnp.stack(force)


def hessian(problem: Problem, slack: Slack, sums: Sums) -> Matrix:
    """Returns M + J' D J, summed over the rows that push."""
    matrix = dict(problem.mass)
    if any("sign" in side.same | side.table for side in problem.sides):
        square = np.zeros((6, 6), int)
        square[UPPER] = np.arange(21)
        stiffness = sums.stiffness[:, np.maximum(square, square.T)]
        for entry, value in composite(problem.model, problem.cdof, stiffness).items():
            matrix[entry] = matrix[entry] + value
    pushing = jnp.where(slack.limits < 0, problem.limits.stiffness, 0)
    for row, dof in enumerate(problem.limit_dof):
        matrix[dof, dof] = matrix[dof, dof] + pushing[row]
    for place, entry in enumerate(problem.entries):
        value = sums.coupling[place]
        matrix[entry] = matrix[entry] + value if entry in matrix else value
    return matrix
