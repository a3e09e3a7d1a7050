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


MOST_PAIRS = 6
"""Hessian entries that a packed contact may add to, for each entry that it reaches. In profiles of LEAP and a
cube with AVX-512, the loop over contacts took a tenth of the time for each entry if it lies at the same place
for all lanes."""


def coupling_tables(
    model: Model, group: Group
) -> tuple[tuple[linear.Entry, ...], dict[str, np.ndarray]]:
    """Lists the Hessian entries that contacts between moving bodies add to, and the columns of each slot.

    `dof` and `turn` [n, places] are the dofs on the path between the two bodies, and the sign with which
    each moves the contact; 0 is one that does not. `entry` [n, places (places + 1) / 2] is the index of the
    Hessian entry of each pair of places; a pair that no contact reaches points past the last entry. Both
    results are empty without slots.

    If contacts are packed, lanes are at contacts of different slots. Then every dof that some contact of the
    group moves has a place, the same in all slots, unless those are too many (MOST_PAIRS).
    """
    # Many slots are between the same two bodies.
    bodies, slots = np.unique(group.slots.mover, axis=0, return_inverse=True)
    paths = [_turns_between(model, *pair) for pair in bodies]
    if not paths:
        return (), {}
    reached = {(i, j) for path in paths for i in path for j in path if j <= i}
    entries = tuple(sorted(reached))
    count, every = max(map(len, paths)), sorted(set().union(*paths))
    rows = [sorted(path) for path in paths]
    if are_packed(slots.size) and _pairs(len(every)) <= MOST_PAIRS * _pairs(count):
        rows, count = [every] * len(paths), len(every)
    padded = [row + [0] * (count - len(row)) for row in rows]
    turns = [
        [path.get(d, 0.0) if k < len(row) else 0.0 for k, d in enumerate(dofs)]
        for path, row, dofs in zip(paths, rows, padded, strict=True)
    ]
    first, second = np.tril_indices(count)
    place = np.full((model.nv, model.nv), len(entries), np.int32)
    place[tuple(np.array(entries).T)] = np.arange(len(entries))
    dof = np.array(padded, np.int32)
    ends = dof[:, first], dof[:, second]
    columns = {
        "dof": dof,
        "turn": np.array(turns),
        "entry": place[np.maximum(*ends), np.minimum(*ends)],
    }
    return entries, {name: column[slots.reshape(-1)] for name, column in columns.items()}


def _pairs(count: int) -> int:
    return count * (count + 1) // 2


def _turns_between(model: Model, body1: int, body2: int) -> dict[int, float]:
    """Returns the dofs on the path between two bodies, with the sign with which each moves a contact."""
    last = [int(model.body_dofadr[b] + model.body_dofnum[b]) - 1 for b in (body1, body2)]
    first, second = ({*path(model, dof)} for dof in last)
    return dict.fromkeys(first - second, -1.0) | dict.fromkeys(second - first, 1.0)
