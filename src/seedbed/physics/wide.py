"""Constraint rows that reach over several dofs: equalities of joints, limits of tendons and of balls.

A row has a number for each of its dofs, the derivative of its position; see `WideRows`. Source:
engine_core_constraint.c, mj_instantiateEquality and mj_instantiateLimit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.physics.model import BALL, Model
from seedbed.physics.softness import impedance, softness
from seedbed.physics.tendons import lengths
from seedbed.types import Array


class WideRows(NamedTuple):
    """The rows [n]: their numbers for dofs, and what `DofRows` has of them."""

    jacobian: tuple[jax.Array, ...]  # [k] each, in the order of `wide_dofs`
    stiffness: jax.Array  # [n] D; zero if the limit is far
    aref: jax.Array  # [n]
    low: np.ndarray  # [n] the slack beyond which the cost is linear, always -inf
    high: np.ndarray  # [n] the same above: inf of an equality, and 0 of a limit


def wide_dofs(model: Model) -> tuple[tuple[int, ...], ...]:
    """Lists the dofs of each row: equalities, then the two limits of each tendon, then balls."""
    rows = []
    for first, second in zip(model.eq_obj1id, model.eq_obj2id, strict=True):
        ends = [first] if second < 0 else [first, second]
        rows.append(tuple(int(model.jnt_dofadr[j]) for j in ends))
    for t in np.flatnonzero(model.tendon_limited):
        rows += [tuple(int(d) for d in np.flatnonzero(model.tendon_moment[t]))] * 2
    for j in _limited_balls(model):
        first = int(model.jnt_dofadr[j])
        rows.append((first, first + 1, first + 2))
    return tuple(rows)


def wide_rows(model: Model, qpos: jax.Array, qvel: jax.Array) -> WideRows | None:
    """Computes D and aref of every row, and its numbers for dofs; None if there is no row."""
    if not wide_dofs(model):
        return None
    parts = [*_equalities(model, qpos), *_tendon_limits(model, qpos), *_ball_limits(model, qpos)]
    stiffness, aref = [], []
    for part, dofs in zip(parts, wide_dofs(model), strict=True):
        speed = sum(part.jacobian[k] * qvel[d] for k, d in enumerate(dofs))
        loose = impedance(part.soft, part.excess)
        hard = (1 - loose) / (loose * part.invweight)
        pull = -part.soft["damper"] * speed - part.soft["spring"] * (1 - loose) * part.excess
        there = part.excess < 0 if part.limit else jnp.bool_(True)
        stiffness.append(jnp.where(there, hard, 0))
        aref.append(jnp.where(there, pull, 0))
    return WideRows(
        tuple(part.jacobian for part in parts),
        jnp.stack(stiffness),
        jnp.stack(aref),
        np.full(len(parts), -np.inf, qpos.dtype),
        np.array([0 if part.limit else np.inf for part in parts], qpos.dtype),
    )


class _Row(NamedTuple):
    """A row: its numbers for dofs, how far its position is from the margin, and its constants."""

    jacobian: jax.Array  # [k]
    excess: jax.Array
    invweight: Array
    soft: dict[str, Any]
    limit: bool  # it pushes only if it is broken


def _soft(model: Model, solref: np.ndarray, solimp: np.ndarray) -> dict[str, Any]:
    columns = softness(model, solref[None], solimp[None])
    return {name: math.constant(column[0:1], solref.dtype)[0] for name, column in columns.items()}


def _equalities(model: Model, qpos: jax.Array) -> list[_Row]:
    """Joints whose positions are a polynomial of another's, or a constant, from those of qpos0."""
    rows, q, rest = [], math.unstack(qpos), math.unstack(model.qpos0)
    invweight = math.unstack(model.dof_invweight0)
    for e, (first, second) in enumerate(zip(model.eq_obj1id, model.eq_obj2id, strict=True)):
        i, c = int(model.jnt_qposadr[first]), model.eq_data[e]
        away, weight = q[i] - rest[i] - c[0], invweight[int(model.jnt_dofadr[first])]
        one = jnp.ones((), qpos.dtype)
        jacobian = one[None]
        if second >= 0:
            k = int(model.jnt_qposadr[second])
            x = q[k] - rest[k]
            away = away - x * (c[1] + x * (c[2] + x * (c[3] + x * c[4])))
            slope = c[1] + x * (2 * c[2] + x * (3 * c[3] + x * 4 * c[4]))
            jacobian = jnp.stack([one, -slope])
            weight = weight + invweight[int(model.jnt_dofadr[second])]
        soft = _soft(model, model.eq_solref[e], model.eq_solimp[e])
        rows.append(_Row(jacobian, away, weight, soft, limit=False))
    return rows


def _tendon_limits(model: Model, qpos: jax.Array) -> list[_Row]:
    rows = []
    length = lengths(model, model.tendon_moment, qpos)
    weight = math.unstack(model.tendon_invweight0)
    for t in np.flatnonzero(model.tendon_limited):
        moment = model.tendon_moment[t]
        soft = _soft(model, model.tendon_solref_lim[t], model.tendon_solimp_lim[t])
        for sign, bound in zip((1, -1), model.tendon_range[t], strict=True):
            excess = sign * (length[t] - bound) - model.tendon_margin[t]
            jacobian = jnp.asarray(sign * moment[moment != 0])
            rows.append(_Row(jacobian, excess, weight[t], soft, limit=True))
    return rows


def _limited_balls(model: Model) -> list[int]:
    return [int(j) for j in np.flatnonzero(model.jnt_limited & (model.jnt_type == BALL))]


def _ball_limits(model: Model, qpos: jax.Array) -> list[_Row]:
    """Balls that may turn by an angle, about any axis."""
    rows, weight = [], math.unstack(model.dof_invweight0)
    rest = np.array([1, 0, 0, 0], qpos.dtype)
    for j in _limited_balls(model):
        i = int(model.jnt_qposadr[j])
        turned = math.quat_difference(qpos[i : i + 4], rest)
        square = math.dot(turned, turned)
        still = square < math.MIN_SQUARE
        angle = jnp.sqrt(jnp.where(still, 1, square))
        axis = turned / angle
        angle = jnp.where(still, 0, angle)
        excess = model.jnt_range[j].max() - angle - model.jnt_margin[j]
        soft = _soft(model, model.jnt_solref[j], model.jnt_solimp[j])
        rows.append(_Row(-axis, excess, weight[int(model.jnt_dofadr[j])], soft, limit=True))
    return rows
