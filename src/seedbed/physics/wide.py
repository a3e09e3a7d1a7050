"""Constraint rows that reach over several dofs: equalities, limits of tendons and of balls.

A row has a number for each of its dofs, the derivative of its position; see `WideRows`. Source:
engine_core_constraint.c, mj_instantiateLimit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.physics.equality import Moving, WideRow, equality_dofs, equality_rows, soft_of
from seedbed.physics.model import BALL, Kinematics, Model
from seedbed.physics.softness import impedance
from seedbed.physics.tendons import lengths


class WideRows(NamedTuple):
    """The rows [n]: their numbers for dofs, and what `DofRows` has of them."""

    jacobian: tuple[jax.Array, ...]  # [k] each, in the order of `wide_dofs`
    stiffness: jax.Array  # [n] D; zero if the limit is far
    aref: jax.Array  # [n]
    low: np.ndarray  # [n] the slack beyond which the cost is linear, always -inf
    high: np.ndarray  # [n] the same above: inf of an equality, and 0 of a limit


def wide_dofs(model: Model) -> tuple[tuple[int, ...], ...]:
    """Lists the dofs of each row: equalities, then the two limits of each tendon, then balls."""
    rows = equality_dofs(model)
    for t in np.flatnonzero(model.tendon_limited):
        rows += [tuple(int(d) for d in np.flatnonzero(model.tendon_moment[t]))] * 2
    for j in _limited_balls(model):
        first = int(model.jnt_dofadr[j])
        rows.append((first, first + 1, first + 2))
    return tuple(rows)


def wide_rows(model: Model, kin: Kinematics, qpos: jax.Array, moving: Moving) -> WideRows | None:
    """Computes D and aref of every row, and its numbers for dofs; None if there is no row."""
    if not wide_dofs(model):
        return None
    equal = list(equality_rows(model, kin, qpos, moving))
    parts = [*equal, *_tendon_limits(model, qpos), *_ball_limits(model, qpos)]
    stiffness, aref = [], []
    for part, dofs in zip(parts, wide_dofs(model), strict=True):
        speed = sum(part.jacobian[k] * moving.qvel[d] for k, d in enumerate(dofs))
        loose = impedance(part.soft, part.excess if part.depth is None else part.depth)
        hard = (1 - loose) / (loose * part.invweight)
        pull = -part.soft["damper"] * speed - part.soft["spring"] * (1 - loose) * part.excess
        there = part.excess < 0 if part.limit else jnp.bool_(True)
        stiffness.append(jnp.where(there, hard, 0))
        aref.append(jnp.where(there, pull - part.drift, 0))
    return WideRows(
        tuple(part.jacobian for part in parts),
        jnp.stack(stiffness),
        jnp.stack(aref),
        np.full(len(parts), -np.inf, qpos.dtype),
        np.array([0 if part.limit else np.inf for part in parts], qpos.dtype),
    )


def _tendon_limits(model: Model, qpos: jax.Array) -> list[WideRow]:
    rows = []
    length = lengths(model, model.tendon_moment, qpos)
    weight = math.unstack(model.tendon_invweight0)
    for t in np.flatnonzero(model.tendon_limited):
        moment = model.tendon_moment[t]
        soft = soft_of(model, model.tendon_solref_lim[t], model.tendon_solimp_lim[t])
        for sign, bound in zip((1, -1), model.tendon_range[t], strict=True):
            excess = sign * (length[t] - bound) - model.tendon_margin[t]
            jacobian = jnp.asarray(sign * moment[moment != 0])
            rows.append(WideRow(jacobian, excess, weight[t], soft, limit=True))
    return rows


def _limited_balls(model: Model) -> list[int]:
    return [int(j) for j in np.flatnonzero(model.jnt_limited & (model.jnt_type == BALL))]


def _ball_limits(model: Model, qpos: jax.Array) -> list[WideRow]:
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
        soft = soft_of(model, model.jnt_solref[j], model.jnt_solimp[j])
        rows.append(WideRow(-axis, excess, weight[int(model.jnt_dofadr[j])], soft, limit=True))
    return rows
