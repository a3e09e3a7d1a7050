"""Equalities: of joints, and of bodies that share a point (connect) or a pose (weld).

Each is a few rows that reach over the dofs of both sides, see `WideRow`. Source: engine_core_constraint.c,
mj_instantiateEquality and mj_Jdotv.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.physics.dynamics import accelerations, path
from seedbed.physics.kinematics import between, origin_of
from seedbed.physics.model import Kinematics, Model
from seedbed.physics.softness import softness
from seedbed.types import Array

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_JOINT, _WELD = int(mujoco.mjtEq.mjEQ_JOINT), int(mujoco.mjtEq.mjEQ_WELD)
_SITE = int(mujoco.mjtObj.mjOBJ_SITE)


_Accelerations = tuple[jax.Array, list[Array]]
"""What `dynamics.accelerations` returns."""


class Moving(NamedTuple):
    """How the bodies move, as `dynamics.velocity` has it."""

    qvel: jax.Array  # [nv]
    motion: jax.Array  # [nbody, 6]
    before: jax.Array  # [nv, 3]


class WideRow(NamedTuple):
    """A row: its numbers for dofs, how far its position is from the margin, and its constants."""

    jacobian: jax.Array  # [k]
    excess: Array
    invweight: Array
    soft: dict[str, Any]
    limit: bool  # it pushes only if it is broken
    depth: Array | None = None  # what its impedance depends on, if that is not `excess`
    drift: Array | int = 0  # its acceleration if qacc is zero, where MuJoCo has it


class _End(NamedTuple):
    """One side of an equality of bodies."""

    body: int
    carrier: int  # the moving body that carries it; 0: none
    pos: Array  # [3] its anchor, about the reference point of its tree
    quat: Array  # [4]


def soft_of(model: Model, solref: np.ndarray, solimp: np.ndarray) -> dict[str, Any]:
    """Returns the constants of `softness` for one row."""
    columns = softness(model, solref[None], solimp[None])
    return {name: math.constant(column[0:1], solref.dtype)[0] for name, column in columns.items()}


def equality_dofs(model: Model) -> list[tuple[int, ...]]:
    """Lists the dofs of each row."""
    rows: list[tuple[int, ...]] = []
    for e, kind in enumerate(model.eq_type):
        if kind == _JOINT:
            ends = model.eq_obj1id[e], model.eq_obj2id[e]
            rows.append(tuple(int(model.jnt_dofadr[j]) for j in ends if j >= 0))
        else:
            dofs = sorted(set().union(*(_dofs(model, b) for b in _bodies(model, e))))
            rows += [tuple(dofs)] * (_size(model, e) if dofs else 0)
    return rows


def equality_rows(
    model: Model, kin: Kinematics, qpos: jax.Array, moving: Moving
) -> Iterator[WideRow]:
    """Yields the rows, in the order of `equality_dofs`."""
    resting = accelerations(model, kin, *moving) if holds_bodies(model) else None
    for e, kind in enumerate(model.eq_type):
        if kind == _JOINT:
            yield _joint_row(model, e, qpos)
        elif resting is not None:
            yield from _body_rows(model, kin, e, moving, resting)


def holds_bodies(model: Model) -> bool:
    """Returns whether there is an equality of bodies."""
    return bool((model.eq_type != _JOINT).any())


def held(model: Model, kin: Kinematics, force: jax.Array) -> jax.Array:
    """Returns the wrenches [nbody, 6] of the equalities of bodies, about the reference points of their trees.

    `force` [n] is that of the rows. They are part of mjData's cfrc_ext.
    """
    total: list[Array] = [np.zeros(6, force.dtype)] * model.nbody
    row = 0
    for e, kind in enumerate(model.eq_type):
        if kind == _JOINT:
            row += 1
        elif any(_dofs(model, b) for b in _bodies(model, e)):
            size, ends = _size(model, e), _ends(model, kin, e)
            torque = np.zeros(3, force.dtype)
            if size == 6:
                rates = [_rate(model, e, ends, axis) for axis in np.eye(3, dtype=force.dtype)]
                torque = math.apply(jnp.stack(rates), force[row + 3 : row + 6])
            for end, sign in zip(ends, (1, -1), strict=True):
                push = force[row : row + 3]
                wrench = jnp.concatenate([torque + math.cross(end.pos, push), push])
                if end.body:
                    total[end.body] = total[end.body] + sign * wrench
            row += size
    return jnp.stack(total)


def _size(model: Model, e: int) -> int:
    return 6 if model.eq_type[e] == _WELD else 3


def _dofs(model: Model, body: int) -> list[int]:
    """Lists the dofs that move a body."""
    carrier = model.body_weldid[body]
    last = int(model.body_dofadr[carrier] + model.body_dofnum[carrier]) - 1
    return list(path(model, last)) if carrier else []


def _bodies(model: Model, e: int) -> tuple[int, int]:
    first, second = int(model.eq_obj1id[e]), int(model.eq_obj2id[e])
    if model.eq_objtype[e] == _SITE:
        return int(model.site_bodyid[first]), int(model.site_bodyid[second])
    return first, second


def _ends(model: Model, kin: Kinematics, e: int) -> tuple[_End, _End]:
    """Returns both sides; the pose of the second is where that of the first should be."""
    found, data, weld = [], model.eq_data[e], model.eq_type[e] == _WELD
    numbers = model.eq_obj1id[e], model.eq_obj2id[e]
    for k, (body, number) in enumerate(zip(_bodies(model, e), numbers, strict=True)):
        quat = kin.xquat[body]
        if model.eq_objtype[e] == _SITE:
            pos, quat = kin.site_xpos[number], math.quat_mul(quat, model.site_quat[number])
        else:
            # A weld has the anchors in the other order, and the pose of the second body in the first.
            first = 3 * (1 - k) if weld else 3 * k
            pos = kin.xpos[body] + math.apply(kin.xmat[body], data[first : first + 3])
            if weld and k == 0:
                quat = math.quat_mul(quat, data[6:10])
        found.append(_End(body, int(model.body_weldid[body]), pos, quat))
    return found[0], found[1]


def _body_rows(
    model: Model, kin: Kinematics, e: int, moving: Moving, resting: _Accelerations
) -> Iterator[WideRow]:
    first, second = ends = _ends(model, kin, e)
    reach = [_dofs(model, end.body) for end in ends]
    dofs = sorted(set(reach[0]) | set(reach[1]))
    if not dofs:
        return
    way = between(origin_of(model, kin, first.body), origin_of(model, kin, second.body))
    away = math.unstack(first.pos - second.pos + way)
    turns, moves = [], []
    for d in dofs:
        spin, slide = kin.cdof[d, :3], kin.cdof[d, 3:]
        signs = [float(d in dofs_of) for dofs_of in reach]
        moved = [slide + math.cross(spin, end.pos) for end in ends]
        moves.append(signs[0] * moved[0] - signs[1] * moved[1])
        turns.append((signs[0] - signs[1]) * spin)
    pairs = [_drift(model, kin, end, moving.motion, resting) for end in ends]
    turning, moving_on = (a - b for a, b in zip(*pairs, strict=True))
    columns, drift = [jnp.stack(moves)], math.unstack(moving_on)
    if model.eq_type[e] == _WELD:
        scale = model.eq_data[e, 10]
        back = _inverse(second.quat)
        away += math.unstack(scale * math.quat_mul(back, first.quat)[1:])
        columns.append(jnp.stack([_rate(model, e, ends, turn) for turn in turns]))
        spins = [moving.motion[end.carrier, :3] * bool(end.carrier) for end in ends]
        drift += math.unstack(scale * _turned_rate(first.quat, back, spins, turning))
    jacobian = jnp.concatenate(columns, axis=1)
    soft = soft_of(model, model.eq_solref[e], model.eq_solimp[e])
    square = sum(x * x for x in away)
    met = square < math.MIN_SQUARE
    depth = jnp.where(met, 0, jnp.sqrt(jnp.where(met, 1, square)))
    weight = _weights(model, ends, kin.xpos.dtype)
    for k, (excess, bias) in enumerate(zip(away, drift, strict=True)):
        yield WideRow(jacobian[:, k], excess, weight[k // 3], soft, False, depth, bias)


def _weights(model: Model, ends: tuple[_End, _End], dtype: Any) -> list[Array]:
    """Returns what D is inverse to in the rows of a point, 1/kg, and of a rotation, 1/(kg m^2).

    MuJoCo's is 0 of a point if no joint moves the centres of mass at qpos0: the rows are then as hard as the
    dtype can tell. It is 0 of a rotation if no joint turns the bodies: the rows then have no force.
    """
    found = [sum(model.body_invweight0[end.body, k] for end in ends) for k in (0, 1)]
    parts = zip(model.parts.body, math.unstack(model.parts.mass), strict=True)
    mass = sum(m for body, m in parts if body in {end.carrier for end in ends})
    # The second makes D nothing; infinity would make its derivative NaN.
    other = 100 * float(jnp.finfo(dtype).eps) / mass, 1e30
    return [
        jnp.where(x > 0, x, y) if isinstance(x, jax.Array) or x == 0 else x
        for x, y in zip(found, other, strict=True)
    ]


def _inverse(quat: Array) -> Array:
    return quat * np.array([1, -1, -1, -1], quat.dtype)


def _rate(model: Model, e: int, ends: tuple[_End, _End], turn: Array) -> Array:
    """Returns the rates [3] of a weld's rows of rotation if the first side turns at `turn` [3]."""
    back = _inverse(ends[1].quat)
    return model.eq_data[e, 10] * _spun(back, turn, ends[0].quat)


def _spun(back: Array, turn: Array, quat: Array) -> Array:
    """Returns the rate [3] of the axis of back * quat if quat turns at `turn` [3]."""
    return 0.5 * math.quat_mul(math.quat_mul(back, _pure(turn)), quat)[1:]


def _pure(vector: Array) -> jax.Array:
    return jnp.concatenate([np.zeros(1, vector.dtype), vector])


def _turned_rate(quat: Array, back: Array, spins: list[Array], turning: Array) -> Array:
    """Returns how the rate of the axis of back * quat grows [3]: spins are those of both sides."""
    # The quaternion turns at spins[0], and the one that `back` is the inverse of at spins[1].
    apart, half = spins[0] - spins[1], jnp.asarray(0.5, quat.dtype)
    back_rate = -half * math.quat_mul(back, _pure(spins[1]))
    quat_rate = half * math.quat_mul(_pure(spins[0]), quat)
    return (
        _spun(back_rate, apart, quat) + _spun(back, turning, quat) + _spun(back, apart, quat_rate)
    )


def _drift(
    model: Model, kin: Kinematics, end: _End, motion: jax.Array, resting: _Accelerations
) -> tuple[Array, Array]:
    """Returns the angular and the linear acceleration of an anchor if qacc were zero, without gravity."""
    if not end.carrier:
        zero = np.zeros(3, kin.xpos.dtype)
        return zero, zero
    spin, turning = motion[end.carrier, :3], resting[0][end.carrier]
    arm = end.pos - kin.point[end.carrier]
    whirl = math.cross(spin, math.cross(spin, arm)) + math.cross(turning, arm)
    return turning, resting[1][end.carrier] + model.opt.gravity + whirl


def _joint_row(model: Model, e: int, qpos: jax.Array) -> WideRow:
    """Returns the row of a joint whose position is a polynomial of another's, or a constant, from qpos0."""
    q, rest, invweight = (math.unstack(x) for x in (qpos, model.qpos0, model.dof_invweight0))
    first, second, c = model.eq_obj1id[e], model.eq_obj2id[e], model.eq_data[e]
    i = int(model.jnt_qposadr[first])
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
    soft = soft_of(model, model.eq_solref[e], model.eq_solimp[e])
    return WideRow(jacobian, away, weight, soft, limit=False)
