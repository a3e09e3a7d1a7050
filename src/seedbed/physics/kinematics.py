"""Poses of bodies, geoms and sites, motion axes and spatial inertias, from qpos.

The spatial algebra is that of Featherstone (2008), Rigid Body Dynamics Algorithms. It uses world axes and
one reference point for each tree: the position of its root after the root's translation. So the results keep
their precision far from the world's origin and from other trees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.physics.model import BALL, FREE, HINGE, SLIDE, Inputs, Kinematics, Model, Origin
from seedbed.types import Array


class _Frames(NamedTuple):
    """Poses of the moving and mocap bodies, by number (0: the world), and axis and anchor of each dof."""

    pos: dict[int, Array]  # [3]
    mat: dict[int, Array]  # [3, 3]
    quat: dict[int, Array]  # [4]
    point: dict[int, Array]  # [3] as in Kinematics; the world has none
    axis: list[Array]  # [3]
    anchor: list[Array]  # [3]


def kinematics(
    model: Model, qpos: jax.Array, qpos_low: jax.Array, inputs: Inputs | None = None
) -> Kinematics:
    """Computes forward kinematics from qpos [nq] and its residue (mj_kinematics, mj_comPos).

    Mocap bodies are where the `inputs` have them, or the file.
    """
    frames = _placed(model, qpos.dtype, inputs)
    origins = reference_points(model, qpos, qpos_low, frames)
    _chain(model, qpos, frames)
    welds, carrier = model.welds, model.body_carrierid
    mat = _rows(frames.mat, carrier)
    xmat = math.matmul(mat, welds.body_mat)
    xpos = _rows(frames.pos, carrier) + math.apply(mat, welds.body_pos)
    geom_carrier = carrier[model.geom_bodyid]
    geom_mat = _rows(frames.mat, geom_carrier)
    site_carrier = carrier[model.site_bodyid]
    site_mat = _rows(frames.mat, site_carrier)
    return Kinematics(
        origins=origins,
        xpos=xpos,
        xquat=math.quat_mul(_rows(frames.quat, carrier), welds.body_quat),
        xmat=xmat,
        xipos=xpos + math.apply(xmat, model.body_ipos),
        ximat=math.matmul(xmat, welds.inertial_mat),
        geom_xpos=_rows(frames.pos, geom_carrier) + math.apply(geom_mat, welds.geom_pos),
        geom_xmat=math.matmul(geom_mat, welds.geom_mat),
        site_xpos=_rows(frames.pos, site_carrier) + math.apply(site_mat, welds.site_pos),
        cdof=_motion_axes(model, frames.axis, frames.anchor),
        point=jnp.stack([frames.point.get(b, frames.pos[0]) for b in range(model.nbody)]),
        axis=_motion_axes(model, frames.axis, _offsets(model, frames)),
        inertia=_inertia(model, frames.mat),
    )


def _placed(model: Model, dtype: Any, inputs: Inputs | None) -> _Frames:
    """Returns the frames of the world and of the mocap bodies, to which others are added."""
    zero, eye = np.zeros(3, dtype), np.eye(3, dtype=dtype)
    frames = _Frames({0: zero}, {0: eye}, {0: np.array([1, 0, 0, 0], dtype)}, {}, [], [])
    given = inputs or Inputs(np.zeros(0))
    for number, b in enumerate(model.mocaps):
        pos, quat = model.body_pos[b], model.body_quat[b]
        frames.pos[b], frames.quat[b] = pos, quat
        frames.mat[b] = math.np_quat_to_mat(quat).astype(dtype)
        if given.mocap_pos is not None and given.mocap_quat is not None:
            frames.pos[b] = jnp.asarray(given.mocap_pos[number])
            frames.quat[b] = math.normalize_quat(jnp.asarray(given.mocap_quat[number]))
            frames.mat[b] = math.quat_to_mat(frames.quat[b])
    return frames


def reference_points(
    model: Model, qpos: jax.Array, qpos_low: jax.Array, frames: _Frames
) -> tuple[Origin, ...]:
    """Returns the position of each tree's root after its translation, in the order of `model.roots`.

    The `frames` are those of the world and of the mocap bodies.
    """
    q, q_low = math.unstack(qpos), math.unstack(qpos_low)
    points = []
    for root in model.roots:
        high, low = model.welds.rest_pos[root], model.welds.rest_low[root]
        above = model.carrier_above(root)
        if above:
            high, low = frames.pos[above] + math.apply(frames.mat[above], high), np.zeros_like(low)
        for j in model.joints(root):
            i, d = int(model.jnt_qposadr[j]), int(model.jnt_dofadr[j])
            if d not in model.root_dofs:
                break
            k = model.root_dofs.index(d)
            if model.jnt_type[j] == FREE:
                high, low = qpos[i : i + 3], qpos_low[k : k + 3]
                break
            axis = model.welds.rest_mat[root] @ model.jnt_axis[j]
            axis = math.apply(frames.mat[above], axis) if above else axis
            moved, lost = math.two_sum(q[i], -model.qpos0[i])
            high, rounded = math.two_sum(high, axis * moved)
            low = low + (rounded + axis * (lost + q_low[k]))
        points.append(Origin(high, low))
    return tuple(points)


def between(to: Origin, start: Origin) -> Array:
    """Returns the way [3] from one point to another; the nearer they are, the more exact it is."""
    return (to.high - start.high) + (to.low - start.low)


def origin_of(model: Model, kin: Kinematics, body: int | np.integer) -> Origin:
    """Returns the reference point of a body."""
    tree = int(model.body_treeid[body])
    if tree >= 0:
        return kin.origins[tree]
    zero = np.zeros(3, kin.xpos.dtype)
    return Origin(zero, zero)


def site_xmat(model: Model, kin: Kinematics, site: int) -> jax.Array:
    """Returns the axes [3, 3] of a site."""
    local = math.np_quat_to_mat(model.site_quat[site])
    return math.matmul(kin.xmat[int(model.site_bodyid[site])][None], local[None])[0]


def _chain(model: Model, qpos: jax.Array, frames: _Frames) -> None:
    """Adds the poses of the moving bodies to the frames, from the roots outwards."""
    zero, eye = np.zeros(3, qpos.dtype), np.eye(3, dtype=qpos.dtype)
    q, turns, welds = math.unstack(qpos), _hinge_turns(model, qpos), model.welds
    for b in model.moving:
        carrier, pos = model.carrier_above(b), zero
        if model.tree_parent[b]:
            pos = frames.pos[carrier] + math.apply(frames.mat[carrier], welds.rest_pos[b])
        mat = math.matmul(frames.mat[carrier], welds.rest_mat[b])
        quat = math.quat_mul(frames.quat[carrier], welds.rest_quat[b])
        point = None
        for j in model.joints(b):
            i, kind = model.jnt_qposadr[j], model.jnt_type[j]
            at_origin = model.jnt_dofadr[j] in model.root_dofs
            if kind == FREE:
                quat = math.normalize_quat(qpos[i + 3 : i + 7])
                mat = math.quat_to_mat(quat)
                frames.axis.extend([*eye, *math.unstack(mat)])
                frames.anchor.extend([pos] * 6)
                continue
            # Consecutive hinges about one point share the array, so that `_offsets` has an exact zero.
            if point is None or (model.jnt_pos[j] != model.jnt_pos[j - 1]).any():
                anchor = pos + math.apply(mat, model.jnt_pos[j])
            else:
                anchor = point
            if kind == BALL:
                turn_quat = math.normalize_quat(qpos[i : i + 4])
                mat, quat = (
                    math.matmul(mat, math.quat_to_mat(turn_quat)),
                    math.quat_mul(quat, turn_quat),
                )
                pos, point = anchor - math.apply(mat, model.jnt_pos[j]), anchor
                frames.axis.extend(math.unstack(mat))
                frames.anchor.extend([anchor] * 3)
                continue
            frames.axis.append(math.apply(mat, model.jnt_axis[j]))
            frames.anchor.append(anchor)
            if kind == SLIDE:
                pos = zero if at_origin else pos + frames.axis[-1] * (q[i] - model.qpos0[i])
                point = None
            else:
                turn, turn_quat = turns[j]
                mat, quat = math.matmul(mat, turn), math.quat_mul(quat, turn_quat)
                pos, point = anchor - math.apply(mat, model.jnt_pos[j]), anchor
        frames.pos[b], frames.mat[b], frames.quat[b] = pos, mat, quat
        frames.point[b] = pos if point is None else point


def _hinge_turns(model: Model, qpos: jax.Array) -> dict[int, tuple[jax.Array, jax.Array]]:
    """Returns the rotation of each hinge, by joint, as a matrix [3, 3] (Rodrigues) and a quaternion [4]."""
    hinges = np.flatnonzero(model.jnt_type == HINGE)
    if not len(hinges):
        return {}
    address = model.jnt_qposadr[hinges]
    q = math.unstack(qpos)
    angle = jnp.stack([q[i] for i in address]) - _picked(model.qpos0, address)
    axis = model.jnt_axis[hinges]
    outer = axis[:, :, None] * axis[:, None, :]
    skew = np.cross(np.eye(3, dtype=qpos.dtype), axis[:, None, :])
    cos, sin = jnp.cos(angle)[:, None, None], jnp.sin(angle)[:, None, None]
    mats = outer + cos * (np.eye(3, dtype=qpos.dtype) - outer) + sin * skew
    half = 0.5 * angle[:, None]
    quats = jnp.concatenate([jnp.cos(half), jnp.sin(half) * axis], axis=1)
    rotations = zip(math.unstack(mats, 0), math.unstack(quats, 0), strict=True)
    return {int(j): rotation for j, rotation in zip(hinges, rotations, strict=True)}


def _picked(x: Array, places: np.ndarray) -> Array:
    """Returns elements of x [n]; the places must be constants."""
    if isinstance(x, np.ndarray):
        return x[places]
    elements = math.unstack(x)
    return jnp.stack([elements[i] for i in places])


def _rows(table: dict[int, Array], bodies: np.ndarray) -> Array:
    """Stacks the table's values of `bodies` [n]; returns [n, ...]."""
    shape = np.shape(table[0])
    return (
        jnp.stack([table[int(b)] for b in bodies])
        if len(bodies)
        else np.zeros((0, *shape), table[0].dtype)
    )


def _motion_axes(model: Model, axis: list[Array], anchor: list[Array]) -> jax.Array:
    """Returns the motion [nv, 6] of each dof per unit velocity, from its axis [3] and its anchor [3].

    The motion is about the point that the anchors are relative to.
    """
    axes = jnp.stack(axis)
    kind = model.jnt_type[model.dof_jntid]
    place = np.arange(model.nv) - model.jnt_dofadr[model.dof_jntid]
    turning = (kind == HINGE) | (kind == BALL) | ((kind == FREE) & (place >= 3))
    turns = turning[:, None].astype(axes.dtype)
    linear = turns * math.cross(jnp.stack(anchor), axes) + (1 - turns) * axes
    return jnp.concatenate([turns * axes, linear], axis=1)


def _offsets(model: Model, frames: _Frames) -> list[Array]:
    """Returns the anchors [nv, 3] relative to the points of the bodies that the dofs move."""
    zero = np.zeros(3, frames.pos[0].dtype)
    points = [frames.point[int(b)] for b in model.dof_bodyid]
    pairs = zip(frames.anchor, points, strict=True)
    return [zero if anchor is point else anchor - point for anchor, point in pairs]


def _inertia(model: Model, frame: dict[int, Array]) -> jax.Array:
    """Returns the spatial inertia [nbody, 10] of each moving body with all bodies welded to it.

    It is about the body's point (`Kinematics.point`), and zero for other bodies.
    """
    parts = model.parts
    lever = np.zeros((model.nbody, 3), model.jnt_pos.dtype)
    for b in model.moving:
        last = model.joints(b)[-1]
        if model.jnt_type[last] in (HINGE, BALL):
            lever[b] = model.jnt_pos[last]
    bodies = np.array(parts.body, int)
    mat = _rows(frame, bodies)
    mass, base = parts.mass, parts.inertia[:, 0]
    axes = math.matmul(mat, parts.axes)
    d = math.unstack(math.apply(mat, parts.pos - lever[bodies]))
    u, v = math.unstack(axes[:, :, 1]), math.unstack(axes[:, :, 2])
    eu, ev = ([parts.inertia[:, k] * x for x in xs] for k, xs in ((1, u), (2, v)))
    md = [mass * x for x in d]
    dd = sum(x * y for x, y in zip(md, d, strict=True))

    def entry(i: int, j: int) -> Array:
        product = eu[i] * u[j] + ev[i] * v[j] - md[i] * d[j]
        return product + (base + dd) if i == j else product

    pairs = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))
    rows = math.stack([*(entry(i, j) for i, j in pairs), *md, mass])
    zero = np.zeros(10, rows.dtype)
    total: list[Array] = [zero] * model.nbody
    for row, b in zip(math.unstack(rows, 0), parts.body, strict=True):
        total[b] = row if total[b] is zero else total[b] + row
    return jnp.stack(total)
