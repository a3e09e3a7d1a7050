"""The constants of constraints that MuJoCo derives from a model when it compiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from seedbed.arguments import checked
from seedbed.physics import linear, math
from seedbed.physics.dynamics import mass_matrix, path
from seedbed.physics.kinematics import kinematics
from seedbed.physics.leaves import LEAVES
from seedbed.physics.model import BALL, FREE, Model
from seedbed.types import Array

DERIVED = ("body_invweight0", "dof_invweight0", "tendon_invweight0")
"""What `set_const` computes."""


@checked
def set_const(model: Model) -> Model:
    """Returns the model with the `invweight0` of bodies, dofs and tendons of what it holds now (mj_setConst).

    They say how hard limits, contacts and friction losses are: call it after masses, inertias, their places,
    armatures or qpos0 were replaced. If no leaf is a JAX array, neither are the new ones.
    """
    given = [x for x in (model.leaf(name) for name in LEAVES) if isinstance(x, jax.Array)]
    if given:
        found = _inverse_weights(model.astype(jnp.result_type(*given)))
    else:
        with jax.ensure_compile_time_eval():
            found = _inverse_weights(model.astype(jnp.result_type(float)))
            found = tuple(np.asarray(x, np.float64) for x in found)
    return dataclasses.replace(model, **dict(zip(DERIVED, found, strict=True)))


def _inverse_weights(model: Model) -> tuple[Array, ...]:
    """Returns the mean diagonals of J M^-1 J' at qpos0 of centres of mass, of dofs, and of tendons.

    They are [nbody, 2], translation and rotation, [nv], and [ntendon].
    """
    qpos = jnp.asarray(model.qpos0)
    kin = kinematics(model, qpos, jnp.zeros(len(model.root_dofs), qpos.dtype))
    mass = mass_matrix(model, kin)
    inertia = linear.factor(linear.pattern(model.nv, set(mass)), mass)
    moves = np.zeros((model.nbody, model.nv), qpos.dtype)
    for b in np.flatnonzero(model.body_weldid):
        carrier = model.body_weldid[b]
        moves[b, path(model, int(model.body_dofadr[carrier] + model.body_dofnum[carrier]) - 1)] = 1

    def of_body(_: tuple[()], row: Any) -> tuple[tuple[()], jax.Array]:
        moved, place = row
        turn, slide = kin.cdof[:, :3], kin.cdof[:, 3:]
        there = jnp.concatenate([slide + math.cross(turn, place[None]), turn], axis=1)
        diagonal = linear.quadratic(inertia, math.unstack(moved[:, None] * there, 0))
        return (), jnp.stack([diagonal[:3].sum() / 3, diagonal[3:].sum() / 3])

    def of_dof(_: tuple[()], unit: jax.Array) -> tuple[tuple[()], jax.Array]:
        return (), linear.quadratic(inertia, math.unstack(unit))

    body = lax.scan(of_body, (), (jnp.asarray(moves), kin.xipos))[1]
    dof = lax.scan(of_dof, (), jnp.eye(model.nv, dtype=qpos.dtype))[1]
    tendon: Array = jnp.zeros(0, qpos.dtype)
    if len(model.tendon_moment):
        tendon = lax.scan(of_dof, (), jnp.asarray(model.tendon_moment))[1]
    return _of_simple(model, body), _of_joints(model, dof), tendon


def _of_simple(model: Model, body: jax.Array) -> jax.Array:
    """Replaces the rows of bodies that only slide, along their own axes: MuJoCo takes their mass."""
    simple = model.body_simple == 2
    weight = jnp.where(simple, 1 / jnp.maximum(model.body_mass, 1e-15), body[:, 0])
    return jnp.stack([weight, jnp.where(simple, 0, body[:, 1])], axis=1)


def _of_joints(model: Model, dof: jax.Array) -> jax.Array:
    """Returns the weights [nv] in which the three dofs of a translation, and of a rotation, share one."""
    rows: list[Array] = math.unstack(dof)
    mass = math.unstack(jnp.asarray(model.body_mass))
    for j in range(model.njnt):
        d, b = int(model.jnt_dofadr[j]), int(model.jnt_bodyid[j])
        if model.body_simple[b] == 2:
            rows[d] = 1 / jnp.maximum(mass[b], 1e-15)
        elif model.jnt_type[j] in (FREE, BALL):
            for first in (d, d + 3)[: 2 if model.jnt_type[j] == FREE else 1]:
                rows[first : first + 3] = [sum(rows[first : first + 3]) / 3] * 3
    return jnp.stack(rows)
