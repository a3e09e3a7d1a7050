"""Rows of the soft constraints: the reference acceleration (aref) and the stiffness (D) of each row.

A contact has one row, or four rows along the edges of the friction pyramid. A limited joint has one row, or
two (see `limit_table`), a dof with friction loss has one. The source is MuJoCo's engine_core_constraint.c,
but the Jacobian is never formed: a row's velocity is computed from the motions of the bodies.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from seedbed.physics import linear, math
from seedbed.physics.collision import (
    Contacts,
    Points,
    Row,
    frame_of,
    row_of,
    scan_slots,
    split,
)
from seedbed.physics.cone import gains
from seedbed.physics.dynamics import Matrix, path, select
from seedbed.physics.equality import Moving
from seedbed.physics.model import HINGE, SLIDE, Kinematics, Model
from seedbed.physics.slots import HARDEST, Slots, candidates, may_harden, slots
from seedbed.physics.softness import impedance, softness
from seedbed.physics.wide import wide_rows
from seedbed.types import Array

LEAST_SQUARE = 1e-12
"""The square of a coefficient of friction is at least this."""
LEAST_RESPONSE = 1e-12
"""The least that a unit of force accelerates, 1/kg: it may be nothing, as on the axis of a hinge."""

Worst = tuple[jax.Array, jax.Array]
"""The hardness of the hardest contact so far, and whether a normal gives way."""


class DofRows(NamedTuple):
    """The rows of dofs [n]: joint limits, friction losses, and then those that reach over several dofs.

    The velocity of a row of one dof is sign * qvel[dof], that of another a sum over its dofs. Its force is
    -D * slack, with the slack cut to where the cost is quadratic: `low` to `high`, or if they are None to
    what is not positive.
    """

    sign: (
        jax.Array
    )  # [m] of single dofs: 1 for a lower bound and for friction, -1 for an upper bound
    stiffness: jax.Array  # D; zero if the limit is far
    aref: jax.Array
    low: jax.Array | None  # None if there are only joint limits
    high: jax.Array | None
    wide: tuple[jax.Array, ...]  # the numbers for their dofs of the last n - m rows

    def inside(self, slack: jax.Array) -> jax.Array:
        """Returns whether the slack [n] is where the cost is quadratic."""
        if self.low is None or self.high is None:
            return slack < 0
        return (slack > self.low) & (slack < self.high)

    def cut(self, slack: jax.Array) -> jax.Array:
        """Returns the slack [n], cut to where the cost is quadratic."""
        if self.low is None or self.high is None:
            return jnp.minimum(slack, 0)
        return jnp.minimum(jnp.maximum(slack, self.low), self.high)

    def cost(self, slack: jax.Array) -> jax.Array:
        """Returns the cost of all rows: quadratic, and beyond the bounds of the friction linear."""
        cut = self.cut(slack)
        within = (0.5 * self.stiffness * cut * cut).sum()
        if self.low is None:
            return within
        return within + (self.stiffness * cut * (slack - cut)).sum()


class Edges(NamedTuple):
    """The rows of one group of contacts, by slot; zero if there is no contact."""

    stiffness: (
        jax.Array
    )  # [n] D of every row of the slot, or [n, 6] if some give way (`cone.gains`)
    aref: jax.Array  # [n, axes] along the axes of the contact's frame


class Rows(NamedTuple):
    """All rows: those of single dofs, contacts with the static world, contacts between moving bodies."""

    dofs: DofRows
    fixed: Edges
    moving: Edges
    hardness: jax.Array  # D times the response to a force, of the hardest contact
    compliant: jax.Array  # bool: some contact's normal gives way, or should


class Group(NamedTuple):
    """The constants of one group of contacts."""

    slots: Slots
    columns: dict[str, Array]  # constants that a loop over the slots reads: movers, sign, mu, basis
    movers: np.ndarray  # the moving bodies that contacts of both groups reach


def groups(model: Model) -> tuple[Group, Group]:
    """Returns the groups of contacts with the static world and of contacts between moving bodies.

    Their columns `body`, `body1` and `body2` number the bodies by their places in `movers`.
    """
    fixed, moving = (slots(model, kinds) for kinds in candidates(model))
    # Only one body moves. The relative velocity is its own, or minus its own if it is the first body.
    first = fixed.mover[:, 0] > 0
    body = np.where(first, fixed.mover[:, 0], fixed.mover[:, 1])
    sign = np.where(first, -1.0, 1.0)
    movers = np.unique(np.concatenate([body, moving.mover.ravel()]))
    body, *ends = (np.searchsorted(movers, b).astype(np.int32) for b in (body, *moving.mover.T))
    return (
        _group(fixed, {"body": body, "sign": sign}, movers),
        _group(moving, {"body1": ends[0], "body2": ends[1]}, movers),
    )


def _group(table: Slots, columns: dict[str, Array], movers: np.ndarray) -> Group:
    columns = columns | {"mu": table.friction * (table.condim == 3)}
    if table.basis is not None:
        columns["basis"] = table.basis
    return Group(table, columns, movers)


def limit_table(model: Model) -> dict[str, Array]:
    """Makes the table of joint limits, by row: address, dof, bounds, margin and solver parameters.

    The two bounds of a joint share a row if they cannot both be active at once. Otherwise each has its own.
    """
    joints, low, high = [], [], []
    for j in range(model.njnt):
        if model.jnt_limited[j] and model.jnt_type[j] in (SLIDE, HINGE):
            least, most = model.jnt_range[j]
            apart = most - least >= 2 * model.jnt_margin[j]
            joints += [j] if apart else [j, j]
            low += [least] if apart else [least, -np.inf]
            high += [most] if apart else [np.inf, most]
    j = np.array(joints, int)
    return {
        "address": model.jnt_qposadr[j],
        "dof": model.jnt_dofadr[j],
        "low": np.array(low),
        "high": np.array(high),
        "margin": model.jnt_margin[j],
        "invweight": model.dof_invweight0[model.jnt_dofadr[j]],
        **softness(model, model.jnt_solref[j], model.jnt_solimp[j]),
    }


def friction_table(model: Model) -> dict[str, Array]:
    """Makes the table of friction losses, by row: dof, most force in N or N m, and solver parameters."""
    d = np.flatnonzero(model.dof_rubs)
    return {
        "dof": d,
        "friction": model.dof_frictionloss[d],
        "invweight": model.dof_invweight0[d],
        **softness(model, model.dof_solref[d], model.dof_solimp[d]),
    }


def rows_dof(model: Model) -> np.ndarray:
    """Returns the dof of each row of a single dof [n]."""
    return np.concatenate([limit_table(model)["dof"], friction_table(model)["dof"]]).astype(int)


def motion_of(point: Points, row: Row, motion: Array) -> jax.Array:
    """Returns the motion [6] of a slot's second body relative to its first; `motion` is [movers, 6].

    It is about the reference point that the contact is relative to.
    """
    if "sign" in row:
        return row["sign"] * row_of(motion, row["body"])
    first = row_of(motion, row["body1"])
    if len(point.apart):
        first = math.shift_motion(first, -point.apart)
    return row_of(motion, row["body2"]) - first


def velocity(point: Points, row: Row, motion: Array) -> jax.Array:
    """Returns the velocity of one contact along its frame's axes, [3] or [1]; `motion` [6] is relative."""
    at_point = motion[3:] + math.cross(motion[:3], point.pos)
    return math.apply(frame_of(point, row), at_point)


def make_rows(
    model: Model,
    kin: Kinematics,
    contacts: Contacts,
    qpos: jax.Array,
    moving: Moving,
    mass: Matrix,
) -> Rows:
    """Computes D and aref of every row (mj_makeConstraint, mj_referenceConstraint).

    `moving` is the motion of the moving bodies, `mass` is M.
    """
    fixed, free = groups(model)
    worst = jnp.zeros((), qpos.dtype), jnp.zeros((), bool)
    worst, first = _contacts(model, kin, fixed, contacts.fixed, moving.motion, mass, worst)
    worst, second = _contacts(model, kin, free, contacts.moving, moving.motion, mass, worst)
    return Rows(_dof_rows(model, kin, qpos, moving), first, second, *worst)


def response(
    cdof: jax.Array, inertia: linear.Factor, point: Points, row: Row
) -> tuple[jax.Array, jax.Array]:
    """Returns how much a unit of force accelerates a contact: across and along its normal, 1/kg.

    `turn` [nv] of `row` says which dofs [nv, 6] move the contact, and with which sign.
    """
    levers = []
    for motion, turn in zip(math.unstack(cdof, 0), math.unstack(row["turn"]), strict=True):
        if len(point.apart) and "sign" not in row:
            # Dofs with a negative sign are those of the first body.
            motion = math.shift_motion(motion, -point.apart * (turn < 0))
        levers.append(turn * velocity(point, row, motion))
    found = jnp.maximum(linear.quadratic(inertia, levers), LEAST_RESPONSE)
    along, *across = math.unstack(jnp.where(point.active, found, 1))
    return functools.reduce(jnp.maximum, across, along), along


def _turns(model: Model, table: Slots) -> np.ndarray:
    """Returns which dofs move the contacts of slots, and with which sign, [n, nv]."""
    turns = np.zeros((len(table.mover), model.nv))
    for body, sign in zip(table.mover.T, (-1, 1), strict=True):
        for n, b in enumerate(body):
            if b:
                turns[n, path(model, int(model.body_dofadr[b] + model.body_dofnum[b]) - 1)] += sign
    return turns


def _dof_rows(model: Model, kin: Kinematics, qpos: jax.Array, moving: Moving) -> DofRows:
    qvel = moving.qvel
    limits, friction = _limits(model, qpos, qvel), friction_table(model)
    wide = wide_rows(model, kin, qpos, moving)
    if not len(friction["dof"]) and wide is None:
        return limits
    free = np.full(len(limits.sign), np.inf, qpos.dtype)
    start: tuple[Array, ...] = (*limits[:3], -free, np.zeros_like(free))
    rows = [[column] for column in start]
    if len(friction["dof"]):
        for column, more in zip(rows, _frictions(friction, qvel), strict=True):
            column.append(more)
    if wide is not None:
        for column, more in zip(rows[1:], wide[1:], strict=True):
            column.append(more)
    joined = (jnp.concatenate([jnp.asarray(x) for x in column]) for column in rows)
    return DofRows(*joined, wide=() if wide is None else wide.jacobian)


def _frictions(table: dict[str, Array], qvel: jax.Array) -> tuple[Array, ...]:
    """Returns sign, D, aref and the bounds of the slack of friction losses."""
    row = {name: math.constant(column, qvel.dtype) for name, column in table.items()}
    # A friction loss has no position, and so no spring; its impedance is the least.
    stiffness = (1 - row["loose"]) / (row["loose"] * row["invweight"])
    bound = row["friction"] / stiffness
    speed = jnp.stack([qvel[d] for d in table["dof"]])
    signs = np.ones(len(table["dof"]), qvel.dtype)
    return signs, stiffness, -row["damper"] * speed, -bound, bound


def _limits(model: Model, qpos: jax.Array, qvel: jax.Array) -> DofRows:
    table = limit_table(model)
    if not len(table["dof"]):
        none = jnp.zeros(0, qpos.dtype)
        return DofRows(none, none, none, None, None, ())
    row = {name: math.constant(column, qpos.dtype) for name, column in table.items()}
    q, v = (jnp.stack([x[i] for i in row[at]]) for x, at in ((qpos, "address"), (qvel, "dof")))
    above, under = q - row["low"], row["high"] - q
    lower = above < under
    sign = jnp.where(lower, 1, -1).astype(q.dtype)
    excess = jnp.where(lower, above, under) - row["margin"]
    slack = impedance(row, excess)
    stiffness = (1 - slack) / (slack * row["invweight"])
    aref = -row["damper"] * sign * v - row["spring"] * (1 - slack) * excess
    near = excess < 0
    return DofRows(sign, jnp.where(near, stiffness, 0), jnp.where(near, aref, 0), None, None, ())


def _contacts(
    model: Model,
    kin: Kinematics,
    group: Group,
    points: Points,
    motion: jax.Array,
    mass: Matrix,
    worst: Worst,
) -> tuple[Worst, Edges]:
    """Computes D and aref of a group of contacts; returns the larger of `worst` and theirs, and both."""
    table, dtype = group.slots, motion.dtype
    if not len(table.geom):
        return worst, Edges(jnp.zeros(0, dtype), jnp.zeros((0, 3), dtype))
    motion = select(motion, group.movers)
    columns: dict[str, Any] = group.columns | {"margin": table.margin, "weight": table.weight}
    columns["response"] = table.response
    columns |= softness(model, table.solref, table.solimp)
    hard = HARDEST / float(jnp.finfo(dtype).eps)
    harder = may_harden(model, table, dtype)
    gives = not isinstance(harder, np.ndarray) or harder.any()
    inertia = None
    if gives:
        columns["turn"] = _turns(model, table)
        cdof, entries = lax.stop_gradient((kin.cdof, mass))
        inertia = cdof, linear.factor(linear.pattern(model.nv, set(entries)), entries)
    same, rows = split(**{name: math.constant(x, dtype) for name, x in columns.items()})

    def slot(worst: Worst, here: Points, row: Row) -> tuple[Worst, Edges]:
        row = row | same
        speed = velocity(here, row, motion_of(here, row, motion))
        excess = here.dist - row["margin"]
        slack = impedance(row, excess)
        stiffness = (1 - slack) / (slack * row["weight"])
        across = along = row["response"]
        gave = worst[1]
        if inertia is not None:
            across, along = response(*inertia, lax.stop_gradient(here), row)
            friction = 2 * jnp.maximum(row["mu"] * row["mu"], LEAST_SQUARE)
            # Divided twice, since the product's square, which the derivative has, would be too small.
            stiffness = jnp.minimum(stiffness, hard / across / friction)
        total = jnp.minimum(table.rows * stiffness, hard / along)
        if not model.opt.hardens:
            gave = gave | lax.stop_gradient(table.rows * stiffness * along > hard)
        hardest = jnp.maximum(worst[0], lax.stop_gradient(total * along))
        if gives:
            compliance = jnp.maximum(along / hard - 1 / (table.rows * stiffness), 0)
            gave = gave | (lax.stop_gradient(compliance) > 0)
            stiffness = gains(stiffness, compliance)
        elif not model.opt.hardens:
            stiffness = total / table.rows
        aref = -row["damper"] * speed
        pull = row["spring"] * (1 - slack) * excess
        aref = jnp.stack([aref[0] - pull, *math.unstack(aref)[1:]])
        found = (jnp.where(here.active, x, 0) for x in (stiffness, aref))
        worse = zip((hardest, gave), worst, strict=True)
        hardest, gave = (jnp.where(here.active, x, y) for x, y in worse)
        return (hardest, gave), Edges(*found)

    return scan_slots(points, rows, slot, worst)
