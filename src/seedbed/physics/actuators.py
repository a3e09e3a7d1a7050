"""Actuators: activations, and the forces of motors and servos on dofs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math, tendons
from seedbed.physics.dynamics import applied, is_sane
from seedbed.physics.kinematics import site_xmat
from seedbed.physics.model import Kinematics, Model
from seedbed.types import Array

INTEGRATOR, FILTER, FILTEREXACT = 1, 2, 3
"""MuJoCo's numbers for the kinds of activation (mjtDyn); 0 is none."""


class Actuation(NamedTuple):
    """The actuators' forces on the dofs, and how they change with the velocity."""

    force: jax.Array  # [nv] N and N m, qfrc_actuator
    output: jax.Array  # [nu] N and N m, of each actuator
    length: jax.Array  # [nu] m and rad
    speed: jax.Array  # [nu] m/s and rad/s
    slope: tuple[Array, ...]  # by dof, N s/m and N m s: derivative of its force by its own velocity
    act_dot: jax.Array  # [na] rates of the activations, 1/s


class Acting(NamedTuple):
    """The configuration in which actuators act: poses, motions and activations."""

    kin: Kinematics
    motion: jax.Array  # [nbody, 6] of the moving bodies
    qpos: jax.Array  # [nq]
    qvel: jax.Array  # [nv]
    act: jax.Array  # [na] activations


def actuation(model: Model, ctrl: jax.Array, now: Acting) -> Actuation:
    """Computes the joint forces of the actuators at controls [nu] (mj_fwdActuation).

    If any control, after clamping, is not finite or is larger than 1e10 in size, all controls count as zero.
    At a bound of its own force or the joint's, an actuator has no slope (mjd_actuator_vel).
    """
    qpos, qvel, act = now.qpos, now.qvel, now.act
    force: list[Array] = [np.zeros((), ctrl.dtype)] * model.nv
    slope = list(force)
    if not model.nu:
        none = jnp.zeros(0, ctrl.dtype)
        return Actuation(jnp.stack(force), none, none, none, tuple(slope), none)
    moment = model.actuator_moment
    gear = model.actuator_gear[:, 0]
    low, high = model.actuator_ctrlrange.T
    clamped = jnp.where(model.actuator_ctrllimited, jnp.clip(ctrl, low, high), ctrl)
    clamped = jnp.where(jnp.all(is_sane(clamped)), clamped, 0)
    clamped, act_dot = _activated(model, clamped, act)
    output = model.actuator_gainprm[:, 0] * clamped
    length = gear * jnp.stack(tendons.lengths(model, moment, qpos))
    pushes = _pushes(model, now.kin)
    speeds = math.unstack(gear * jnp.stack(tendons.speeds(moment, qvel)))
    for i, (body, wrench) in pushes.items():
        speeds[i] = math.dot(wrench, now.motion[body])
    speed = jnp.stack(speeds)
    if math.may_differ(model.actuator_gainprm[:, 1:]) or math.may_differ(model.actuator_biasprm):
        gain, bias = (
            prm[:, 0] + prm[:, 1] * length + prm[:, 2] * speed
            for prm in (model.actuator_gainprm, model.actuator_biasprm)
        )
        output = gain * clamped + bias
    low, high = model.actuator_forcerange.T
    limited = model.actuator_forcelimited
    inside = ~limited | ((output > low) & (output < high))
    output = jnp.where(limited, jnp.clip(output, low, high), output)
    bend = model.actuator_gainprm[:, 2] * clamped + model.actuator_biasprm[:, 2]
    bend = jnp.where(inside, bend, 0) * gear * gear
    for row, term, more in zip(
        moment, math.unstack(output * gear), math.unstack(bend), strict=True
    ):
        for d in np.flatnonzero(row):
            force[d] = force[d] + (term if row[d] == 1 else row[d] * term)
            slope[d] = slope[d] + (more if row[d] == 1 else row[d] ** 2 * more)
    if pushes:
        pushed = math.unstack(_pushed(model, now.kin, pushes, output))
        force = [x + y for x, y in zip(force, pushed, strict=True)]
    for j in np.flatnonzero(model.jnt_actfrclimited):
        d, (least, most) = model.jnt_dofadr[j], model.jnt_actfrcrange[j]
        inside = (force[d] > least) & (force[d] < most)
        force[d], slope[d] = jnp.clip(force[d], least, most), jnp.where(inside, slope[d], 0)
    return Actuation(jnp.stack(force), output, length, speed, tuple(slope), act_dot)


def _pushes(model: Model, kin: Kinematics) -> dict[int, tuple[int, jax.Array]]:
    """Returns the moving body and the wrench [6] of a unit of force, of each actuator that pushes a site.

    The wrench is about the reference point of the body's tree. A site without another to refer to has no
    length (mj_transmission).
    """
    found = {}
    for i in np.flatnonzero(model.actuator_site >= 0):
        site = int(model.actuator_site[i])
        body, mat = int(model.body_weldid[model.site_bodyid[site]]), site_xmat(model, kin, site)
        gear = model.actuator_gear[i]
        push, turn = math.apply(mat, gear[:3]), math.apply(mat, gear[3:])
        if body:
            lever = math.cross(kin.site_xpos[site], push)
            found[int(i)] = body, jnp.concatenate([turn + lever, push])
    return found


def _pushed(
    model: Model, kin: Kinematics, pushes: dict[int, tuple[int, jax.Array]], output: jax.Array
) -> jax.Array:
    """Returns the forces [nv] on the dofs of actuators that push sites."""
    wrenches: list[Array] = [jnp.zeros(6, output.dtype)] * model.nbody
    for i, (body, wrench) in pushes.items():
        wrenches[body] = wrenches[body] + output[i] * wrench
    return applied(model, kin, jnp.stack(wrenches))


def _activated(model: Model, ctrl: jax.Array, act: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what gains multiply [nu], controls or activations, and the activations' rates [na]."""
    if not model.na:
        return ctrl, act
    driven = model.actuator_actadr >= 0
    kind, tau = model.actuator_dyntype[driven], _time(model)
    controls = math.unstack(ctrl)
    wanted = jnp.stack([controls[i] for i in np.flatnonzero(driven)])
    rate = jnp.where(kind == INTEGRATOR, wanted, (wanted - act) / tau)
    early = model.actuator_actearly[driven] != 0
    used = math.unstack(jnp.where(early, next_activation(model, act, rate), act))
    for place, i in enumerate(np.flatnonzero(driven)):
        controls[i] = used[place]
    return jnp.stack(controls), rate


def next_activation(model: Model, act: jax.Array, act_dot: jax.Array) -> jax.Array:
    """Returns the activations [na] after a time step at rates [na] (mj_nextActivation)."""
    driven, h = model.actuator_actadr >= 0, model.opt.timestep
    tau = _time(model)
    exact = model.actuator_dyntype[driven] == FILTEREXACT
    reach = np.where(exact, tau * -np.expm1(-h / tau), h).astype(act.dtype)
    moved = act + reach * act_dot
    low, high = model.actuator_actrange[driven].T
    return jnp.where(model.actuator_actlimited[driven] != 0, jnp.clip(moved, low, high), moved)


def _time(model: Model) -> np.ndarray:
    """Returns the time constants [na] of filters in s; those of integrators are not used."""
    given = model.actuator_dynprm[model.actuator_actadr >= 0, 0]
    return np.maximum(given, np.asarray(1e-15, given.dtype))
