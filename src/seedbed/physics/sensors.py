"""Sensors of a model, laid out as MuJoCo's sensordata. What is not simulated reads NaN.

Values are those of the forward pass, as all derived fields of Data, without noise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.arguments import checked
from seedbed.nearest import did_you_mean
from seedbed.physics import math
from seedbed.physics.actuators import Actuation
from seedbed.physics.collision import Contacts, Points, Row, scan_slots
from seedbed.physics.dynamics import accelerations, body_motion
from seedbed.physics.kinematics import between, origin_of, site_xmat
from seedbed.physics.model import Data, Kinematics, Model, Sensor
from seedbed.physics.problem import Problem
from seedbed.physics.readout import absolute
from seedbed.physics.slots import candidates, slots
from seedbed.physics.tendons import lengths, speeds
from seedbed.physics.touch import touches
from seedbed.types import Array, SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_OBJECT, _KIND = mujoco.mjtObj, mujoco.mjtSensor


class Moment(NamedTuple):
    """The results of a forward pass that sensors read."""

    kin: Kinematics
    time: jax.Array
    qpos: jax.Array  # [nq]
    qvel: jax.Array  # [nv]
    qacc: jax.Array  # [nv]
    motion: jax.Array  # [nbody, 6] of the moving bodies
    before: jax.Array  # [nv, 3] as of `dynamics.velocity`
    actuated: Actuation
    subtree_com: jax.Array  # [nbody, 3] in the world
    contacts: Contacts
    wrench: jax.Array  # [nbody, 6] of contacts and applied forces, about the reference points
    problem: Problem  # the solver's, whose solution is qacc


class _Frame(NamedTuple):
    """A body, site or geom: where it is and how it moves, in world axes."""

    body: int
    pos: Array  # [3] about the reference point of the body's tree
    mat: Array  # [3, 3]
    spin: Array  # [3] rad/s
    velocity: Array  # [3] m/s


def sensordata(model: Model, moment: Moment) -> jax.Array:
    """Computes all sensors [nsensordata] of one environment."""
    dtype = moment.qpos.dtype
    rows: list[Array] = []
    touching = [s for s in model.sensors if s.kind == _KIND.mjSENS_TOUCH and s.simulated]
    sites = [s.objid for s in touching]
    felt = touches(model, moment.kin, moment.problem, moment.qacc, sites) if sites else None
    for sensor in model.sensors:
        if felt is not None and sensor in touching:
            value = felt[touching.index(sensor)][None]
            rows.append(jnp.minimum(value, sensor.cutoff) if sensor.cutoff > 0 else value)
            continue
        compute = _SENSORS.get(sensor.kind)
        if compute is None or not sensor.simulated:
            rows.append(np.full(sensor.dim, np.nan, dtype))
            continue
        value = jnp.atleast_1d(compute(model, moment, sensor))
        if sensor.cutoff > 0 and sensor.clipped:
            value = jnp.clip(value, -sensor.cutoff, sensor.cutoff)
        rows.append(value)
    return jnp.concatenate([jnp.zeros(0, dtype), *map(jnp.asarray, rows)])


def is_simulated(sensor: Sensor) -> bool:
    """Returns whether a sensor has a value."""
    return sensor.simulated and (sensor.kind in _SENSORS or sensor.kind == _KIND.mjSENS_TOUCH)


@checked
def sensor(model: Model, data: Data, name: str) -> jax.Array:
    """Returns the value [..., dim] of a sensor of the `model` by its name.

    It is from the `data` of a step, or of a batch of steps, [...].

    Raises SeedbedError if there is no such sensor, or if it is not simulated.
    """
    for each in model.sensors:
        if each.name == name:
            if not is_simulated(each):
                raise SeedbedError(
                    f"sensor: {name} is of a kind that is not simulated: compute it from the other fields"
                )
            return data.sensordata[..., each.adr : each.adr + each.dim]
    names = [each.name for each in model.sensors if each.name]
    known = ", ".join(names) or "none with a name"
    hint = did_you_mean(name, names, cutoff=0.5) or f": it has {known}"
    raise SeedbedError(f"sensor: the model has no sensor {name!r}{hint}")


def _frame(model: Model, moment: Moment, kind: int, number: int) -> _Frame:
    kin = moment.kin
    if kind == _OBJECT.mjOBJ_SITE:
        body, pos = int(model.site_bodyid[number]), kin.site_xpos[number]
        mat = site_xmat(model, kin, number)
    elif kind == _OBJECT.mjOBJ_GEOM:
        body, pos = int(model.geom_bodyid[number]), kin.geom_xpos[number]
        mat = kin.geom_xmat[number]
    elif kind == _OBJECT.mjOBJ_BODY:
        body, pos, mat = number, kin.xipos[number], kin.ximat[number]
    else:
        body, pos, mat = number, kin.xpos[number], kin.xmat[number]
    carried = moment.motion[int(model.body_weldid[body])]
    still = not model.body_weldid[body]
    spin = np.zeros(3, pos.dtype) if still else carried[:3]
    velocity = spin if still else carried[3:] + math.cross(spin, pos)
    return _Frame(body, pos, mat, spin, velocity)


def _own(model: Model, moment: Moment, sensor: Sensor) -> _Frame:
    return _frame(model, moment, sensor.objtype, sensor.objid)


def _reference(model: Model, moment: Moment, sensor: Sensor) -> _Frame | None:
    if sensor.refid < 0:
        return None
    return _frame(model, moment, sensor.reftype, sensor.refid)


def _to(mat: Array, vector: Array) -> jax.Array:
    """Returns a vector of world axes in those of a frame."""
    return math.apply(jnp.asarray(mat).T, vector)


def _apart(model: Model, kin: Kinematics, frame: _Frame, reference: _Frame) -> jax.Array:
    way = between(origin_of(model, kin, frame.body), origin_of(model, kin, reference.body))
    return frame.pos - reference.pos + way


def _gyro(model: Model, moment: Moment, sensor: Sensor) -> jax.Array:
    frame = _own(model, moment, sensor)
    return _to(frame.mat, frame.spin)


def _velocimeter(model: Model, moment: Moment, sensor: Sensor) -> jax.Array:
    frame = _own(model, moment, sensor)
    return _to(frame.mat, frame.velocity)


class _Accelerations(NamedTuple):
    """How the moving bodies accelerate: if qacc were zero, and what qacc adds."""

    turning: Array  # [nbody, 3]
    linear: list[Array]  # [3] each, of the bodies' points
    pushed: Array  # [nbody, 6]


def _accelerations(model: Model, moment: Moment) -> _Accelerations:
    now = moment.kin, moment.qvel, moment.motion, moment.before
    pushed = body_motion(model, moment.kin.cdof, moment.qacc)
    return _Accelerations(*accelerations(model, *now), pushed)


def _acceleration(
    model: Model, kin: Kinematics, bodies: _Accelerations, frame: _Frame
) -> tuple[Array, Array]:
    """Returns the angular and the linear acceleration of a frame; gravity is part of the second."""
    carrier = int(model.body_weldid[frame.body])
    if not carrier:
        return np.zeros(3, frame.pos.dtype), jnp.asarray(-model.opt.gravity)
    turning, linear, pushed = bodies.turning, bodies.linear, bodies.pushed[carrier]
    arm = frame.pos - kin.point[carrier]
    whirl = math.cross(frame.spin, math.cross(frame.spin, arm))
    moved = linear[carrier] + math.cross(turning[carrier], arm) + whirl
    return turning[carrier] + pushed[:3], moved + pushed[3:] + math.cross(pushed[:3], frame.pos)


def _accelerometer(model: Model, moment: Moment, sensor: Sensor) -> jax.Array:
    frame = _own(model, moment, sensor)
    bodies = _accelerations(model, moment)
    return _to(frame.mat, _acceleration(model, moment.kin, bodies, frame)[1])


def _frame_acceleration(part: int) -> _Compute:
    def compute(model: Model, moment: Moment, sensor: Sensor) -> Array:
        bodies, own = _accelerations(model, moment), _own(model, moment, sensor)
        return _acceleration(model, moment.kin, bodies, own)[part]

    return compute


def _frame_pos(model: Model, moment: Moment, sensor: Sensor) -> jax.Array:
    frame, reference = _own(model, moment, sensor), _reference(model, moment, sensor)
    if reference is None:
        return absolute(model, moment.kin, frame.pos[None], np.array([frame.body]))[0]
    return _to(reference.mat, _apart(model, moment.kin, frame, reference))


def _axis(number: int) -> _Compute:
    def compute(model: Model, moment: Moment, sensor: Sensor) -> Array:
        axis = _own(model, moment, sensor).mat[:, number]
        reference = _reference(model, moment, sensor)
        return axis if reference is None else _to(reference.mat, axis)

    return compute


def _frame_quat(model: Model, moment: Moment, sensor: Sensor) -> jax.Array:
    """Returns the unit quaternion [4] of a frame, or its turn as another frame sees it."""
    own = _quat(model, moment.kin, sensor.objtype, sensor.objid)
    if sensor.refid < 0:
        return own
    reference = _quat(model, moment.kin, sensor.reftype, sensor.refid)
    return math.quat_mul(reference * np.array([1, -1, -1, -1], own.dtype), own)


def _quat(model: Model, kin: Kinematics, kind: int, number: int) -> jax.Array:
    body = number
    if kind == _OBJECT.mjOBJ_SITE:
        body, local = int(model.site_bodyid[number]), model.site_quat[number]
    elif kind == _OBJECT.mjOBJ_GEOM:
        body, local = int(model.geom_bodyid[number]), model.geom_quat[number]
    elif kind == _OBJECT.mjOBJ_BODY:
        local = model.body_iquat[number]
    else:
        return kin.xquat[number]
    return math.quat_mul(kin.xquat[body], local)


def _frame_velocity(linear: bool) -> _Compute:
    def compute(model: Model, moment: Moment, sensor: Sensor) -> Array:
        frame, reference = _own(model, moment, sensor), _reference(model, moment, sensor)
        if reference is None:
            return frame.velocity if linear else frame.spin
        if not linear:
            return _to(reference.mat, frame.spin - reference.spin)
        way = _apart(model, moment.kin, frame, reference)
        turned = math.cross(way, reference.spin)
        return _to(reference.mat, frame.velocity - reference.velocity + turned)

    return compute


def _subtree_velocity(model: Model, moment: Moment, sensor: Sensor) -> jax.Array:
    """Returns the velocity of the centre of mass of a body with its descendants."""
    bodies = _subtree(model, sensor.objid)
    total, mass = jnp.zeros(3, moment.qpos.dtype), sum(model.body_mass[b] for b in bodies)
    for b in bodies:
        if model.body_weldid[b]:
            total = (
                total + model.body_mass[b] * _frame(model, moment, _OBJECT.mjOBJ_BODY, b).velocity
            )
    return total / jnp.maximum(mass, 1e-15)


def _subtree_momentum(model: Model, moment: Moment, sensor: Sensor) -> jax.Array:
    """Returns the angular momentum of a body with its descendants about their centre of mass."""
    velocity = _subtree_velocity(model, moment, sensor)
    total = jnp.zeros(3, moment.qpos.dtype)
    for b in _subtree(model, sensor.objid):
        frame = _frame(model, moment, _OBJECT.mjOBJ_BODY, b)
        spin = _turned(frame.mat, model.body_inertia[b], frame.spin)
        arm = (
            moment.kin.xipos[b] + _to_world(model, moment.kin, b) - moment.subtree_com[sensor.objid]
        )
        swing = math.cross(arm, frame.velocity - velocity)
        total = total + spin + model.body_mass[b] * swing
    return total


def _subtree(model: Model, body: int) -> list[int]:
    """Lists a body and its descendants."""
    inside = [body]
    for b in range(body + 1, model.nbody):
        if int(model.body_parentid[b]) in inside:
            inside.append(b)
    return inside


def _turned(mat: Array, moments: Array, vector: Array) -> jax.Array:
    """Returns the product of an inertia, given by its axes [3, 3] and moments [3], and a vector [3]."""
    return math.apply(mat, moments * _to(mat, vector))


def _to_world(model: Model, kin: Kinematics, body: int) -> Array:
    origin = origin_of(model, kin, body)
    return origin.high + origin.low


def _interaction(part: int) -> _Compute:
    """Returns the function of a torque (0) or force (1) sensor: what the parent does to the site's body.

    It is what moves the body with all that hangs from it, without what acts on them from outside. Source:
    mj_rnePostConstraint, cfrc_int.
    """

    def compute(model: Model, moment: Moment, sensor: Sensor) -> Array:
        site, bodies = _own(model, moment, sensor), _accelerations(model, moment)
        force = jnp.zeros(3, moment.qpos.dtype)
        torque = force
        for b in _subtree(model, site.body):
            frame = _frame(model, moment, _OBJECT.mjOBJ_BODY, b)
            turning, moving = _acceleration(model, moment.kin, bodies, frame)
            mass, moments = model.body_mass[b], model.body_inertia[b]
            momentum = _turned(frame.mat, moments, frame.spin)
            whirl = _turned(frame.mat, moments, turning) + math.cross(frame.spin, momentum)
            push, arm = mass * moving, _apart(model, moment.kin, frame, site)
            origin = arm - frame.pos
            outside = moment.wrench[b]
            force = force + push - outside[3:]
            twist = outside[:3] + math.cross(origin, outside[3:])
            torque = torque + whirl + math.cross(arm, push) - twist
        return _to(site.mat, force if part else torque)

    return compute


def _found(model: Model, moment: Moment, sensor: Sensor) -> jax.Array:
    """Returns the number of contacts between what a contact sensor names, in each place that it fills."""
    total = jnp.int32(0)
    points = moment.contacts.fixed, moment.contacts.moving
    ends = (sensor.objtype, sensor.objid), (sensor.reftype, sensor.refid)

    def count(total: Array, point: Points, row: Row) -> tuple[Array, None]:
        return jnp.where(point.active & row["counted"], total + 1, total), None

    for kinds, group in zip(candidates(model), points, strict=True):
        counted = []
        for pair in slots(model, kinds).geom:
            first, second = ([_is_of(model, *end, int(g)) for g in pair] for end in ends)
            counted.append((first[0] and second[1]) or (first[1] and second[0]))
        if any(counted):
            total, _ = scan_slots(group, {"counted": np.array(counted)}, count, total)
    place = np.arange(sensor.dim)
    net = sensor.intprm[1] == _NET_FORCE
    filled = place == 0 if net else place < total
    return jnp.where(filled, total, 0).astype(moment.qpos.dtype)


def _is_of(model: Model, kind: int, number: int, geom: int) -> bool:
    """Returns whether a geom is what a contact sensor names: itself, of a body, of a subtree, or any."""
    body = int(model.geom_bodyid[geom])
    if kind == _OBJECT.mjOBJ_GEOM:
        return number == geom
    if kind == _OBJECT.mjOBJ_BODY:
        return number == body
    while kind == _OBJECT.mjOBJ_XBODY and body > number:
        body = int(model.body_parentid[body])
    return kind != _OBJECT.mjOBJ_XBODY or body == number


_NET_FORCE = 3  # MuJoCo's number for a contact sensor that adds its contacts up
_Compute = Callable[[Model, Moment, Sensor], Array]
_SENSORS: dict[int, _Compute] = {
    int(kind): compute
    for kind, compute in {
        _KIND.mjSENS_GYRO: _gyro,
        _KIND.mjSENS_VELOCIMETER: _velocimeter,
        _KIND.mjSENS_ACCELEROMETER: _accelerometer,
        _KIND.mjSENS_FRAMEPOS: _frame_pos,
        _KIND.mjSENS_FRAMEXAXIS: _axis(0),
        _KIND.mjSENS_FRAMEYAXIS: _axis(1),
        _KIND.mjSENS_FRAMEZAXIS: _axis(2),
        _KIND.mjSENS_CONTACT: _found,
        _KIND.mjSENS_FRAMEQUAT: _frame_quat,
        _KIND.mjSENS_FRAMELINVEL: _frame_velocity(True),
        _KIND.mjSENS_FRAMEANGVEL: _frame_velocity(False),
        _KIND.mjSENS_FRAMEANGACC: _frame_acceleration(0),
        _KIND.mjSENS_FRAMELINACC: _frame_acceleration(1),
        _KIND.mjSENS_JOINTPOS: lambda m, at, s: at.qpos[int(m.jnt_qposadr[s.objid])],
        _KIND.mjSENS_JOINTVEL: lambda m, at, s: at.qvel[int(m.jnt_dofadr[s.objid])],
        _KIND.mjSENS_JOINTACTFRC: lambda m, at, s: at.actuated.force[int(m.jnt_dofadr[s.objid])],
        _KIND.mjSENS_BALLQUAT: lambda m, at, s: math.normalize_quat(
            at.qpos[int(m.jnt_qposadr[s.objid]) :][:4]
        ),
        _KIND.mjSENS_BALLANGVEL: lambda m, at, s: at.qvel[int(m.jnt_dofadr[s.objid]) :][:3],
        _KIND.mjSENS_TENDONPOS: lambda m, at, s: lengths(m, m.tendon_moment, at.qpos)[s.objid],
        _KIND.mjSENS_TENDONVEL: lambda m, at, s: speeds(m.tendon_moment, at.qvel)[s.objid],
        _KIND.mjSENS_ACTUATORPOS: lambda m, at, s: at.actuated.length[s.objid],
        _KIND.mjSENS_ACTUATORVEL: lambda m, at, s: at.actuated.speed[s.objid],
        _KIND.mjSENS_ACTUATORFRC: lambda m, at, s: at.actuated.output[s.objid],
        _KIND.mjSENS_SUBTREECOM: lambda m, at, s: at.subtree_com[s.objid],
        _KIND.mjSENS_SUBTREELINVEL: _subtree_velocity,
        _KIND.mjSENS_SUBTREEANGMOM: _subtree_momentum,
        _KIND.mjSENS_TORQUE: _interaction(0),
        _KIND.mjSENS_FORCE: _interaction(1),
        _KIND.mjSENS_CLOCK: lambda m, at, s: at.time,
    }.items()
}
