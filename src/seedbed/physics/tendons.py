"""Fixed tendons: weighted sums of the positions of hinges and slides."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.physics.model import Model
from seedbed.types import Array

mujoco: Any = importlib.import_module("mujoco")  # a package without types


def is_fixed(compiled: Any, tendon: int) -> bool:
    """Returns whether a tendon of an MjModel is fixed; the others are spatial."""
    first = compiled.tendon_adr[tendon]
    kinds = compiled.wrap_type[first : first + compiled.tendon_num[tendon]]
    return bool((kinds == mujoco.mjtWrap.mjWRAP_JOINT).all())


def moments(compiled: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns what a unit of each dof adds to the lengths of tendons and of actuators with a gear of 1.

    They are [ntendon, nv] and [nu, nv]. Spatial tendons have none, nor have actuators that push sites, and
    those that are refused may have any.
    """
    tendons = np.zeros((compiled.ntendon, compiled.nv))
    for tendon in range(compiled.ntendon):
        if is_fixed(compiled, tendon):
            first = int(compiled.tendon_adr[tendon])
            for wrap in range(first, first + int(compiled.tendon_num[tendon])):
                dof = compiled.jnt_dofadr[compiled.wrap_objid[wrap]]
                tendons[tendon, dof] += compiled.wrap_prm[wrap]
    actuators = np.zeros((compiled.nu, compiled.nv))
    for i in range(compiled.nu):
        driven = int(compiled.actuator_trnid[i, 0])
        if compiled.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_TENDON:
            actuators[i] = tendons[driven]
        elif compiled.actuator_trntype[i] != mujoco.mjtTrn.mjTRN_SITE:
            actuators[i, compiled.jnt_dofadr[driven]] = 1
    return tendons, actuators


def lengths(model: Model, moment: np.ndarray, qpos: jax.Array) -> list[Array]:
    """Returns the sum of positions, times their weights, of each row of a moment [n, nv]."""
    address = model.jnt_qposadr[model.dof_jntid]
    return [combined(row, [qpos[address[d]] for d in np.flatnonzero(row)]) for row in moment]


def speeds(moment: np.ndarray, qvel: jax.Array) -> list[Array]:
    """Returns the sum of velocities, times their weights, of each row of a moment [n, nv]."""
    return [combined(row, [qvel[d] for d in np.flatnonzero(row)]) for row in moment]


def combined(row: np.ndarray, values: list[Array]) -> Array:
    """Returns the sum of values, one for each weight of a row that is not 0, times these weights."""
    total: Array = np.zeros((), row.dtype)
    for k, (weight, value) in enumerate(zip(row[row != 0], values, strict=True)):
        term = value if weight == 1 else weight * value
        total = total + term if k else term
    return total


def forces(model: Model, qpos: jax.Array, qvel: jax.Array) -> jax.Array:
    """Computes the forces [nv] of the springs and dampers of tendons (mj_springdamper)."""
    total: list[Array] = [np.zeros((), qpos.dtype)] * model.nv
    speed = speeds(model.tendon_moment, qvel)
    for t, stretch in enumerate(_stretches(model, qpos)):
        force = -model.tendon_stiffness[t] * stretch - model.tendon_damping[t] * speed[t]
        for d in np.flatnonzero(model.tendon_moment[t]):
            total[d] = total[d] + model.tendon_moment[t, d] * force
    return jnp.stack(total)


def energy(model: Model, qpos: jax.Array) -> Array:
    """Computes the potential energy in J of the springs of tendons."""
    terms = [
        0.5 * model.tendon_stiffness[t] * stretch * stretch
        for t, stretch in enumerate(_stretches(model, qpos))
    ]
    return sum(terms)


def has_forces(model: Model) -> bool:
    """Returns whether a tendon has a spring or a damper."""
    return bool(model.tendon_stiffness.any() or model.tendon_damping.any())


def _stretches(model: Model, qpos: jax.Array) -> list[Array]:
    """Returns by how much each tendon is longer than its spring's longest rest, or shorter (below 0)."""
    found = []
    for t, length in enumerate(lengths(model, model.tendon_moment, qpos)):
        low, high = math.unstack(model.tendon_lengthspring[t])
        found.append(jnp.maximum(length - high, 0) + jnp.minimum(length - low, 0))
    return found
