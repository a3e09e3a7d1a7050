"""Velocities, the mass matrix and the smooth forces: bias, passive and actuator.

Spatial vectors are about the reference point of `Kinematics`. J is the Jacobian that takes qvel [nv] to the
motions of the moving bodies [nbody, 6]; the rows of other bodies are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math, tendons
from seedbed.physics.linear import Entry
from seedbed.physics.model import BALL, FREE, Kinematics, Model
from seedbed.types import Array

Matrix = dict[Entry, Any]
"""A symmetric matrix over dofs: scalars by entry (i, j), i >= j. Absent entries are zero."""


def path(model: Model, dof: int) -> list[int]:
    """Lists a dof and the dofs that move it, nearest first."""
    dofs = [dof]
    while model.dof_parentid[dofs[-1]] >= 0:
        dofs.append(int(model.dof_parentid[dofs[-1]]))
    return dofs


def body_motion(model: Model, cdof: jax.Array, x: jax.Array) -> jax.Array:
    """Returns J x [nbody, 6] for x [nv]."""
    return jnp.stack(_accumulate(model, cdof * x[:, None])[0])


def project(model: Model, cdof: jax.Array, wrenches: Mapping[int, Array]) -> jax.Array:
    """Returns J' f [nv] for wrenches f [6] on some moving bodies; those on others are ignored."""
    total = _subtree(model, wrenches)
    force: list[Array] = [np.zeros((), cdof.dtype)] * model.nv
    if dofs := [d for d, b in enumerate(model.dof_bodyid) if b in total]:
        moved = jnp.stack([total[model.dof_bodyid[d]] for d in dofs])
        for d, along in zip(dofs, math.unstack(math.dot(select(cdof, dofs), moved)), strict=True):
            force[d] = along
    return jnp.stack(force)


def composite(model: Model, cdof: jax.Array, matrices: Mapping[int, Array]) -> Matrix:
    """Returns the entries of J' K J that may not be 0, for symmetric K [6, 6] of some moving bodies.

    Only the upper triangle of K is read.
    """
    total = _subtree(model, matrices)
    dofs = [d for d, b in enumerate(model.dof_bodyid) if b in total]
    if not dofs:
        return {}
    above = np.triu(np.ones((1, 6, 6), cdof.dtype))
    below = np.tril(np.ones((1, 6, 6), cdof.dtype), -1)
    full = jnp.stack([total[model.dof_bodyid[d]] for d in dofs])
    full = full * above + jnp.swapaxes(full, 1, 2) * below
    moved = (full * select(cdof, dofs)[:, None, :]).sum(-1)
    products = (moved[:, None, :] * cdof[None, :, :]).sum(-1)
    rows = [math.unstack(row) for row in math.unstack(products, 0)]
    return {(i, j): row[j] for i, row in zip(dofs, rows, strict=True) for j in path(model, i)}


def mass_matrix(model: Model, kin: Kinematics) -> Matrix:
    """Computes the joint-space inertia with armature, by composite rigid bodies.

    The share of each body is computed about the body's own point. About one point for all bodies, the small
    inertias of distant limbs would be differences of large numbers. Source: Featherstone (2008), table 6.2.
    """
    inertia, point = math.unstack(kin.inertia, 0), math.unstack(kin.point, 0)
    axis = math.unstack(kin.axis, 0)
    momenta: dict[int, list[Array]] = {b: [] for b in model.moving}
    dofs: dict[int, list[int]] = {b: [] for b in model.moving}
    matrix: Matrix = {}
    for b in reversed(model.moving):
        own = range(int(model.body_dofadr[b]), int(model.body_dofadr[b] + model.body_dofnum[b]))
        axes = jnp.stack([axis[d] for d in own])
        momenta[b].append(math.inertia_mul(inertia[b][None], axes))
        dofs[b].extend(own)
        momentum = jnp.concatenate(momenta[b])
        entries = (momentum[:, None, :] * axes[None, :, :]).sum(-1)
        for i, row in zip(dofs[b], math.unstack(entries, 0), strict=True):
            matrix.update(
                {(i, j): x for j, x in zip(own, math.unstack(row), strict=True) if j <= i}
            )
        p = model.tree_parent[b]
        if p:
            offset = point[b] - point[p]
            inertia[p] = inertia[p] + math.shift_inertia(inertia[b], offset)
            momenta[p].append(math.shift_force(momentum, -offset[None]))
            dofs[p].extend(dofs[b])
    for i, armature in enumerate(math.unstack(model.dof_armature)):
        matrix[i, i] = matrix[i, i] + armature
    return matrix


def multiply(matrix: Matrix, x: jax.Array) -> jax.Array:
    """Multiplies a symmetric matrix by x [nv]; returns [nv]."""
    xs = math.unstack(x)
    products: list[list[Any]] = [[] for _ in xs]
    for (i, j), entry in matrix.items():
        products[i].append(entry * xs[j])
        if i != j:
            products[j].append(entry * xs[i])
    return jnp.stack([sum(terms[1:], terms[0]) for terms in products])


def velocity(model: Model, cdof: jax.Array, qvel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the motions of the moving bodies [nbody, 6] and the angular velocity before each dof [nv, 3].

    The second is the sum over the dofs that come before the dof on its path. Source: mj_comVel.
    """
    motions, before = _accumulate(model, cdof * qvel[:, None])
    return jnp.stack(motions), jnp.stack(before)[:, :3]


def bias(
    model: Model, kin: Kinematics, qvel: jax.Array, motion: jax.Array, before: jax.Array
) -> jax.Array:
    """Computes the Coriolis, centrifugal and gravity forces [nv] (mj_rne, qfrc_bias).

    The method is recursive Newton-Euler (Luh, Walker and Paul 1980) over the bodies' points. Gravity enters
    as an opposite acceleration of the world. `motion` and `before` are the results of `velocity`.
    """
    spin, point = motion[:, :3], math.unstack(kin.point, 0)
    turning, linear = accelerations(model, kin, qvel, motion, before)
    offset: list[Array] = [np.zeros(3, qvel.dtype)] * model.nbody
    for b in model.moving:
        if p := model.tree_parent[b]:
            offset[b] = point[b] - point[p]
    force, torque = _forces(kin.inertia, spin, turning, jnp.stack(linear))
    forces, torques = math.unstack(force, 0), math.unstack(torque, 0)
    for b in reversed(model.moving):
        p = model.tree_parent[b]
        if p:
            forces[p] = forces[p] + forces[b]
            torques[p] = torques[p] + (torques[b] + math.cross(offset[b], forces[b]))
    wrench = jnp.concatenate([jnp.stack(torques), jnp.stack(forces)], axis=1)
    return math.dot(kin.axis, _by_dof(model, wrench))


def accelerations(
    model: Model, kin: Kinematics, qvel: jax.Array, motion: jax.Array, before: jax.Array
) -> tuple[jax.Array, list[Array]]:
    """Returns the moving bodies' accelerations if qacc is zero: angular [nbody, 3], and of their points [3].

    Gravity enters as an opposite acceleration of the world.
    """
    spin, point = motion[:, :3], math.unstack(kin.point, 0)
    relative = kin.axis * qvel[:, None]
    turn, slide = relative[:, :3], relative[:, 3:]
    turning = jnp.stack(_accumulate(model, math.cross(before, turn))[0])
    sliding = _by_body(model, math.cross(2 * before + turn, slide))
    spins, turnings = math.unstack(spin, 0), math.unstack(turning, 0)
    linear: list[Array] = [-model.opt.gravity] * model.nbody
    for b in model.moving:
        p = model.tree_parent[b]
        linear[b] = linear[p] + sliding[b]
        if p:
            r = point[b] - point[p]
            whirl = math.cross(spins[p], math.cross(spins[p], r))
            linear[b] = linear[b] + (math.cross(turnings[p], r) + whirl)
    return turning, linear


def _forces(
    inertia: jax.Array, spin: jax.Array, turning: jax.Array, linear: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the forces and torques [n, 3] that bodies of inertia [n, 10] need for their acceleration.

    `spin` is the angular velocity, `turning` the angular acceleration and `linear` the acceleration of the
    body's point, [n, 3] each. Inertias and torques are about that point.
    """
    moment, mass = inertia[:, 6:9], inertia[:, 9:]
    whirl = math.cross(turning, moment) + math.cross(spin, math.cross(spin, moment))
    momentum = math.rotational_mul(inertia, spin)
    torque = math.rotational_mul(inertia, turning) + math.cross(spin, momentum)
    return mass * linear + whirl, torque + math.cross(moment, linear)


def passive(
    model: Model, kin: Kinematics, qpos: jax.Array, qvel: jax.Array, motion: jax.Array
) -> jax.Array:
    """Computes the spring, damping and fluid forces [nv] (mj_passive, qfrc_passive)."""
    force = -model.dof_damping * qvel
    q = math.unstack(qpos)
    stretch: list[Array] = [np.zeros((), qpos.dtype)] * model.nv
    for j in range(model.njnt):
        i, d = model.jnt_qposadr[j], model.jnt_dofadr[j]
        if model.jnt_type[j] == BALL and math.may_differ(model.jnt_stiffness[j : j + 1]):
            turned = math.quat_difference(qpos[i : i + 4], model.qpos_spring[i : i + 4])
            stretch[d : d + 3] = math.unstack(-model.jnt_stiffness[j] * turned)
        elif model.jnt_type[j] not in (FREE, BALL):
            stretch[d] = -model.jnt_stiffness[j] * (q[i] - model.qpos_spring[i])
    force = force + jnp.stack(stretch)
    if tendons.has_forces(model):
        force = force + tendons.forces(model, qpos, qvel)
    if model.body_gravcomp.any():
        force = force + project(model, kin.cdof, _gravity_compensation(model, kin))
    if model.opt.density > 0 or model.opt.viscosity > 0:
        force = force + project(model, kin.cdof, _fluid(model, kin, motion))
    return force


def applied_wrench(model: Model, kin: Kinematics, xfrc_applied: Array) -> jax.Array:
    """Returns the wrenches [nbody, 6] of forces and torques [nbody, 6] at the centres of mass.

    They are about the reference point of each body's tree; nothing acts on the world.
    """
    push, turn = xfrc_applied[:, :3], xfrc_applied[:, 3:]
    wrench = jnp.concatenate([turn + math.cross(kin.xipos, push), push], axis=1)
    return wrench * (np.arange(model.nbody) > 0)[:, None].astype(wrench.dtype)


def applied(model: Model, kin: Kinematics, wrench: Array) -> jax.Array:
    """Returns the forces [nv] on the dofs of wrenches [nbody, 6] on the bodies (mj_xfrcAccumulate)."""
    moving = np.flatnonzero(model.body_weldid)
    return project(model, kin.cdof, _gather(model.body_weldid[moving], select(wrench, moving)))


def _gravity_compensation(model: Model, kin: Kinematics) -> dict[int, Array]:
    """Computes the wrenches [6] on the moving bodies that carry shares of weights (mj_gravcomp)."""
    bodies = np.array([b for b in np.flatnonzero(model.body_gravcomp) if model.body_weldid[b]])
    if not len(bodies):
        return {}
    carried = (model.body_mass * model.body_gravcomp)[bodies][:, None] * -model.opt.gravity[None]
    push = jnp.broadcast_to(jnp.asarray(carried), (len(bodies), 3))
    torque = math.cross(select(kin.xipos, bodies), push)
    return _gather(model.body_weldid[bodies], jnp.concatenate([torque, push], axis=1))


def _fluid(model: Model, kin: Kinematics, motion: jax.Array) -> dict[int, Array]:
    """Computes the drag of the medium on the bodies' inertia boxes (mj_inertiaBoxFluidModel).

    Returns wrenches [6] on the moving bodies, each the sum over the bodies that it carries.
    """
    bodies = [b for b in range(1, model.nbody) if model.body_weldid[b]]
    carriers = model.body_weldid[bodies]
    sides = _inertia_box(model)[np.array(bodies)]
    rows = select(motion, carriers), select(kin.xipos, bodies), select(kin.ximat, bodies)
    carried, xipos, ximat = rows
    at_com = math.shift_motion(carried, xipos)
    to_local = jnp.swapaxes(ximat, 1, 2)
    w = math.apply(to_local, at_com[:, :3])
    v = math.apply(to_local, at_com[:, 3:] - model.opt.wind[None])
    diameter = sides.sum(1, keepdims=True) / 3
    viscosity, density = model.opt.viscosity, model.opt.density
    torque = -np.pi * viscosity * diameter**3 * w
    force = -3 * np.pi * viscosity * diameter * v
    x, y, z = math.unstack(sides)
    area = math.stack([y * z, x * z, x * y])
    lever = math.stack([x * (y**4 + z**4), y * (x**4 + z**4), z * (x**4 + y**4)])
    torque = torque - density / 64 * lever * jnp.abs(w) * w
    force = force - 0.5 * density * area * jnp.abs(v) * v
    wrench = jnp.concatenate([math.apply(ximat, torque), math.apply(ximat, force)], axis=1)
    return _gather(carriers, math.shift_force(wrench, -xipos))


def _inertia_box(model: Model) -> Array:
    """Returns the sides [nbody, 3] of boxes that have the bodies' inertias; zero for bodies without mass."""
    xp: Any = np
    if not all(isinstance(x, np.ndarray) for x in (model.body_inertia, model.body_mass)):
        xp = jnp
    ix, iy, iz = math.unstack(model.body_inertia)
    heavy = model.body_mass > 0
    scale = 6 / xp.where(heavy, model.body_mass, 1)
    squares = [iy + iz - ix, ix + iz - iy, ix + iy - iz]
    # The root of a body without mass is not that of 0, whose derivative is infinite.
    sides = [xp.sqrt(xp.maximum(square, 1e-15) * scale) for square in squares]
    return xp.stack([xp.where(heavy, side, 0) for side in sides], axis=-1)


def is_sane(x: jax.Array) -> jax.Array:
    """Marks elements that are finite and at most 1e10 in size: MuJoCo accepts them (mju_isBad, mjMAXVAL)."""
    return jnp.abs(x) <= 1e10


def _accumulate(model: Model, terms: jax.Array) -> tuple[list[Array], list[Array]]:
    """Sums terms [nv, k] from the root, over the dofs that move each body and over those before each dof.

    Returns both sums: [k] for each body, zero for bodies without joints, and [k] for each dof. The three
    rotations of a free joint or a ball have the same dofs before them, and none of the rotations.
    """
    zero = np.zeros(terms.shape[1], terms.dtype)
    bodies: list[Array] = [zero] * model.nbody
    before: list[Array] = []
    rows = math.unstack(terms, 0)
    for b in model.moving:
        total = bodies[model.tree_parent[b]]
        first = int(model.body_dofadr[b])
        for d in range(first, first + model.body_dofnum[b]):
            joint = model.dof_jntid[d]
            first_turn = {FREE: 3, BALL: 0}.get(int(model.jnt_type[joint]), d)
            turn = d - model.jnt_dofadr[joint] > first_turn
            before.append(before[-1] if turn else total)
            total = rows[d] if total is zero else total + rows[d]
        bodies[b] = total
    return bodies, before


def _subtree(model: Model, values: Mapping[int, Array]) -> dict[int, Array]:
    """Adds to the values of moving bodies those of their moving descendants; bodies without any have none."""
    total = dict(values)
    for b in reversed(model.moving):
        p = model.tree_parent[b]
        if p and b in total:
            total[p] = total[p] + total[b] if p in total else total[b]
    return total


def _by_dof(model: Model, values: jax.Array) -> jax.Array:
    """Picks from values [nbody, ...] the value of the body of each dof, [nv, ...]."""
    return select(values, model.dof_bodyid)


def select(values: jax.Array, indices: Any) -> jax.Array:
    """Picks rows of values; the indices must be constants."""
    rows = math.unstack(values, 0)
    return jnp.stack([rows[i] for i in indices]) if len(indices) else values[:0]


def _by_body(model: Model, values: jax.Array) -> list[Array]:
    """Sums values [nv, 3] over each body's own dofs; returns [3] for each body."""
    total: list[Array] = [np.zeros(3, values.dtype)] * model.nbody
    for b, row in zip(model.dof_bodyid, math.unstack(values, 0), strict=True):
        total[b] = total[b] + row
    return total


def _gather(carriers: np.ndarray, wrench: jax.Array) -> dict[int, Array]:
    """Sums wrenches [n, 6] by the bodies that `carriers` [n] names."""
    total: dict[int, Array] = {}
    for b, row in zip(carriers.tolist(), math.unstack(wrench, 0), strict=True):
        total[b] = total[b] + row if b in total else row
    return total
