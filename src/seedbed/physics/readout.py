"""The quantities that users of MuJoCo read.

Positions are absolute; velocities, inertias and wrenches are about the centres of mass of the trees.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math, tendons
from seedbed.physics.kinematics import between, origin_of
from seedbed.physics.model import BALL, FREE, Kinematics, Model
from seedbed.types import Array


def readout(
    model: Model, kin: Kinematics, motion: jax.Array, wrench: jax.Array
) -> dict[str, jax.Array]:
    """Computes the fields of Data for positions, velocities, inertias and contact forces, by name.

    `motion` [nbody, 6] is the motion of the moving bodies. `wrench` [nbody, 6] is the wrench of the contacts
    on every body. Both are about the reference points of `Kinematics`.
    """
    com = subtree_com(model, kin)
    tree_com = _tree_com(model, kin, com)
    bodies = np.arange(model.nbody)
    return {
        "xpos": absolute(model, kin, kin.xpos, bodies),
        "xquat": kin.xquat,
        "xipos": absolute(model, kin, kin.xipos, bodies),
        "site_xpos": absolute(model, kin, kin.site_xpos, model.site_bodyid),
        "subtree_com": absolute(model, kin, com, bodies),
        "cvel": math.shift_motion(_rows(motion, model.body_weldid), tree_com),
        "cinert": _inertia(model, kin, tree_com),
        "cfrc_ext": math.shift_force(wrench, tree_com),
    }


def absolute(model: Model, kin: Kinematics, pos: jax.Array, bodies: np.ndarray) -> jax.Array:
    """Returns positions [n, 3] in the world of points of `bodies` [n]."""
    if not len(bodies):
        return pos
    origins = [origin_of(model, kin, b) for b in bodies]
    low, high = (jnp.stack([getattr(o, part) for o in origins]) for part in ("low", "high"))
    return (pos + low) + high


def _tree_com(model: Model, kin: Kinematics, com: jax.Array) -> jax.Array:
    """Returns the centre of mass [nbody, 3] that mjData's velocities and inertias of each body are about.

    It is relative to the body's own reference point.
    """
    rows = []
    for b, root in enumerate(model.body_rootid):
        row = com[int(root)]
        if model.body_treeid[root] != model.body_treeid[b]:
            row = row + between(origin_of(model, kin, root), origin_of(model, kin, b))
        rows.append(row)
    return jnp.stack(rows)


def energy(
    model: Model, kin: Kinematics, qpos: jax.Array, motion: jax.Array, qvel: jax.Array
) -> jax.Array:
    """Computes the potential and kinetic energy [2] in J (mj_energyPos, mj_energyVel)."""
    xipos = absolute(model, kin, kin.xipos, np.arange(model.nbody))
    fall = math.dot(xipos, -model.opt.gravity[None])
    potential = (model.body_mass * fall).sum()
    q = math.unstack(qpos)
    for j in range(model.njnt):
        i = model.jnt_qposadr[j]
        if model.jnt_type[j] == BALL and math.may_differ(model.jnt_stiffness[j : j + 1]):
            turned = math.quat_difference(qpos[i : i + 4], model.qpos_spring[i : i + 4])
            potential = potential + 0.5 * model.jnt_stiffness[j] * math.dot(turned, turned)
        elif model.jnt_type[j] not in (FREE, BALL):
            stretch = q[i] - model.qpos_spring[i]
            potential = potential + 0.5 * model.jnt_stiffness[j] * stretch * stretch
    if tendons.has_forces(model):
        potential = potential + tendons.energy(model, qpos)
    local = math.shift_motion(motion, kin.point)
    kinetic = math.dot(local, math.inertia_mul(kin.inertia, local)).sum()
    kinetic = 0.5 * (kinetic + (model.dof_armature * qvel * qvel).sum())
    return jnp.stack([potential, kinetic])


def subtree_com(model: Model, kin: Kinematics) -> jax.Array:
    """Computes the centre of mass [nbody, 3] of each body with its descendants.

    It is relative to the body's reference point. If they have no mass, it is the origin of the body's own
    inertial frame, as in mj_comPos.
    """
    mass = math.unstack(model.body_mass)
    pos = math.unstack(kin.xipos, 0)
    moment = [m * x for m, x in zip(mass, pos, strict=True)]
    for b in range(model.nbody - 1, 0, -1):
        p = model.body_parentid[b]
        if model.body_treeid[b] != model.body_treeid[p]:
            way = between(origin_of(model, kin, b), origin_of(model, kin, p))
            moment[p] = moment[p] + mass[b] * way
        mass[p], moment[p] = mass[p] + mass[b], moment[p] + moment[b]
    xp: Any = np if isinstance(model.body_mass, np.ndarray) else jnp
    total = xp.stack(mass)
    heavy = total > 0
    inverse = xp.where(heavy, 1 / xp.where(heavy, total, 1), 0)[:, None]
    return jnp.where(heavy[:, None], jnp.stack(moment) * inverse, kin.xipos)


def _inertia(model: Model, kin: Kinematics, centre: jax.Array) -> jax.Array:
    """Computes the spatial inertia [nbody, 10] of each body about `centre` [nbody, 3]; zero for the world."""
    real = (np.arange(model.nbody) > 0).astype(centre.dtype)
    mass = model.body_mass * real
    moments = model.body_inertia * real[:, None]
    turned = (kin.ximat[:, :, None, :] * moments[:, None, None, :] * kin.ximat[:, None, :, :]).sum(
        -1
    )
    d = kin.xipos - centre
    dd = math.dot(d, d)[:, None, None] * np.eye(3, dtype=d.dtype)[None]
    about = turned + mass[:, None, None] * (dd - d[:, :, None] * d[:, None, :])
    pairs = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))
    entries = [about[:, i, j] for i, j in pairs]
    return math.stack([*entries, *math.unstack(mass[:, None] * d), jnp.asarray(mass)])


def _rows(values: jax.Array, indices: Array) -> jax.Array:
    rows = math.unstack(values, 0)
    return jnp.stack([rows[i] for i in indices])
