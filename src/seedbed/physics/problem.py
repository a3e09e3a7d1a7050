"""The constants of the solver in one configuration: matrices, constraint rows, and where contacts add up."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from seedbed.physics import linear, math
from seedbed.physics.collision import Contacts, Points, Row, are_packed, split
from seedbed.physics.constraint import DofRows, Edges, Group, Rows, groups, rows_dof
from seedbed.physics.dynamics import Matrix, body_motion, path, select
from seedbed.physics.model import Kinematics, Model
from seedbed.physics.wide import wide_dofs


class Side(NamedTuple):
    """One group of contacts in this configuration, and the constants that a loop over its slots reads."""

    points: Points
    stiffness: jax.Array  # [n] or [n, 6], see Edges
    aref: jax.Array  # [n, axes]
    same: Row  # constants that are equal in all slots
    table: Row  # the other constants, [n, ...] each

    @property
    def gives(self) -> bool:
        """Returns whether the normal of any of the contacts may give way."""
        return self.stiffness.ndim > 1


class Problem(NamedTuple):
    """The solver's constants: the model, and the matrices and constraint rows of one configuration."""

    model: Model
    cdof: jax.Array  # [nv, 6]
    mass: Matrix
    dofs: DofRows
    hardness: jax.Array  # of the hardest contact, see Rows
    compliant: jax.Array  # bool: some contact's normal gives way
    rows_dof: np.ndarray  # [m] of the rows of single dofs
    wide_dofs: tuple[tuple[int, ...], ...]  # of each row that reaches over several
    sides: tuple[Side, ...]  # only the groups that have slots
    movers: np.ndarray  # the moving bodies that contacts reach, see `constraint.groups`
    touched: np.ndarray  # the bodies with a wrench of contacts, which `real1` and `real2` number
    entries: tuple[linear.Entry, ...]  # Hessian entries that contacts of moving bodies add to
    pattern: linear.Pattern  # of the Hessian


def pose(model: Model, kin: Kinematics, mass: Matrix, contacts: Contacts, rows: Rows) -> Problem:
    """Gathers the values that do not change while the solver runs."""
    fixed, moving = groups(model)
    entries, columns = coupling_tables(model, moving)
    ends = [body for group in (fixed, moving) for body in group.slots.body.T if body.any()]
    touched = np.unique(np.concatenate([np.zeros(0, int), *ends]))
    sides = (
        _side(fixed, touched, contacts.fixed, rows.fixed, {}),
        _side(moving, touched, contacts.moving, rows.moving, columns),
    )
    wide = wide_dofs(model)
    pairs = {(i, j) for i in range(model.nv) for j in path(model, i)}
    pairs |= {(i, j) for dofs in wide for i in dofs for j in dofs if j <= i}
    return Problem(
        model=model,
        cdof=kin.cdof,
        mass=mass,
        dofs=rows.dofs,
        hardness=rows.hardness,
        compliant=rows.compliant,
        rows_dof=rows_dof(model),
        wide_dofs=wide,
        sides=tuple(side for side in sides if len(side.stiffness)),
        movers=fixed.movers,
        touched=touched,
        entries=entries,
        pattern=linear.pattern(model.nv, pairs | set(entries)),
    )


def contact_motion(problem: Problem, x: jax.Array) -> jax.Array:
    """Returns the motion [movers, 6] by x [nv] of the bodies that contacts reach."""
    return select(body_motion(problem.model, problem.cdof, x), problem.movers)


def _side(
    group: Group,
    touched: np.ndarray,
    points: Points,
    rows: Edges,
    columns: dict[str, np.ndarray],
) -> Side:
    # The wrench on the world is not needed, where a column has nothing else.
    body = {
        name: (np.searchsorted(touched, b) if b.any() else b - 1).astype(np.int32)
        for name, b in zip(("real1", "real2"), group.slots.body.T, strict=True)
    }
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

    Lanes that are at contacts of different slots would read and write each entry at an index of their own,
    which takes longer than to add to all entries: if contacts are packed, every dof has its place.
    """
    paths = []
    # Many slots are between the same two bodies.
    bodies, slots = np.unique(group.slots.mover, axis=0, return_inverse=True)
    for body1, body2 in bodies:
        last = [int(model.body_dofadr[b] + model.body_dofnum[b]) - 1 for b in (body1, body2)]
        ends = [path(model, dof) for dof in last]
        only = [[d for d in end if d not in other] for end, other in (ends, ends[::-1])]
        paths.append(sorted([(d, -1.0) for d in only[0]] + [(d, 1.0) for d in only[1]]))
    if not paths:
        return (), {}
    if are_packed(len(slots)):
        dofs = sorted({d for p in paths for d, _ in p})
        paths = [[(d, dict(p).get(d, 0.0)) for d in dofs] for p in paths]
    places = max(len(p) for p in paths)
    pairs = [
        {
            (max(p[a][0], p[b][0]), min(p[a][0], p[b][0])): 0
            for a in range(len(p))
            for b in range(a + 1)
            if p[a][1] and p[b][1]
        }
        for p in paths
    ]
    entries = tuple(sorted(set().union(*pairs)))
    place = {entry: k for k, entry in enumerate(entries)}
    padded = [p + [(0, 0.0)] * (places - len(p)) for p in paths]
    ones, others = np.tril_indices(places)
    target = [
        [
            place.get((max(p[a][0], p[b][0]), min(p[a][0], p[b][0])), len(entries))
            for a, b in zip(ones, others, strict=True)
        ]
        for p in padded
    ]
    columns = {
        "dof": np.array([[d for d, _ in p] for p in padded], np.int32),
        "turn": np.array([[sign for _, sign in p] for p in padded]),
        "entry": np.array(target, np.int32),
    }
    return entries, {name: column[slots] for name, column in columns.items()}
