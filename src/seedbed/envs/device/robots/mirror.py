"""The mirror symmetry of a robot, found in its model: which joints and feet are each other's images."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from seedbed.envs.device.robots.sensed import SensedRobot, Sight
from seedbed.spaces import PRIVILEGED, Mirror, Reflection, joined
from seedbed.types import SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_VECTOR = Reflection((0, 1, 2), (1, -1, 1))  # across the trunk's, or the world's, xz plane
_TURNING = Reflection((0, 1, 2), (-1, 1, -1))  # angular velocities
_FIXED = {
    **dict.fromkeys(("base_lin_vel", "projected_gravity", "upvector"), _VECTOR),
    **dict.fromkeys(("accelerometer", "position", "push"), _VECTOR),
    **dict.fromkeys(("base_ang_vel", "global_ang_vel"), _TURNING),
    "orientation": Reflection((0, 1, 2, 3), (1, -1, 1, -1)),
    "command": Reflection((0, 1, 2), (1, -1, -1)),
}
_NUMBERS = ("ones", "gait_frequency", "gait_kind", "gait_height", "height", "pushed")
_JOINTS = ("joint_pos", "joint_angles", "joint_vel", "servo_error")
_NEAR = 0.02  # of the robot's size, within which places are the same
# rad or m, by which the posture, and the axes of sensors, may differ from their images
_BENT = 0.02
_STRONGER = 0.05  # by which servos may differ from their images


def _numbers(*names: str) -> list[int]:
    # `in` would not find NumPy's number of a sensor among the members of an enumeration.
    return [getattr(mujoco.mjtSensor, f"mjSENS_{name}").value for name in names]


# Sensors whose numbers are by axes of their own, and others that may have a reference whose axes count.
_TURNED = _numbers("ACCELEROMETER", "VELOCIMETER", "GYRO", "FRAMEQUAT")
_TURNED += _numbers("FRAMEXAXIS", "FRAMEYAXIS", "FRAMEZAXIS")
_REFERRED = _numbers("FRAMEPOS", "FRAMELINVEL", "FRAMEANGVEL", "FRAMELINACC")


class Asymmetric(SeedbedError):
    """Raised for a robot without a mirror symmetry; it says which part has no image."""


class Sides(NamedTuple):
    """The images of a robot's parts in a mirror."""

    joints: Reflection  # of the joints that have servos, in the order of these
    servos: Reflection  # of the actuators
    feet: Reflection  # of a number of each foot

    def of(self, sight: Sight) -> Reflection | None:
        """Returns the reflection of a part of an observation; None if its name is unknown."""
        vectors = _threefold(self.feet)
        made: dict[str, Callable[[], Reflection]] = {
            **dict.fromkeys(_JOINTS, lambda: self.joints),
            **dict.fromkeys(("actions", "actuator_force"), lambda: self.servos),
            **dict.fromkeys(("feet_pos", "feet_vel"), lambda: vectors),
            **dict.fromkeys(("feet_contact", "feet_air_time", "feet_height"), lambda: self.feet),
            "gait_phase": lambda: joined([self.feet, self.feet]),
            **dict.fromkeys(_NUMBERS, lambda: _same(sight.size)),
        }
        one = _FIXED.get(sight.name) or made.get(sight.name, lambda: None)()
        return None if one is None else joined([one] * sight.history)


def mirror_of(task: SensedRobot) -> Mirror | None:
    """Returns the symmetry of a robot and its task; None if the robot or what it sees has none."""
    model = task.compiled()
    try:
        sides = sides_of(model, task.at_home, task.feet)
    except Asymmetric:
        return None
    measured = {model.sensor(name).id for sight in task.sights for name in sight.sensors}
    if not task.sights or not _straight(model, task.at_home, measured):
        return None
    parts = [[sides.of(sight) for sight in seen] for seen in (task.sights, task.insights)]
    if None in parts[0] + parts[1]:
        return None
    shown, critics = (joined(filter(None, seen)) for seen in parts)
    unseen = {PRIVILEGED: critics} if task.insights else {}
    return Mirror({"state": shown} | unseen, sides.servos)


def _straight(model: Any, qpos: np.ndarray, measured: set[int]) -> bool:
    """Returns whether the frames of the sensors `measured` are their own images: turned by pitch only.

    Where in the trunk a sensor sits is not compared.
    """
    data = _standing(model, qpos)
    frames = {
        mujoco.mjtObj.mjOBJ_SITE.value: data.site_xmat,
        mujoco.mjtObj.mjOBJ_GEOM.value: data.geom_xmat,
        mujoco.mjtObj.mjOBJ_BODY.value: data.ximat,
        mujoco.mjtObj.mjOBJ_XBODY.value: data.xmat,
    }
    across = np.array(_VECTOR.signs)
    for sensor in measured:
        found = [(model.sensor_reftype[sensor], model.sensor_refid[sensor])]
        if model.sensor_type[sensor] in _TURNED:
            found.append((model.sensor_objtype[sensor], model.sensor_objid[sensor]))
        elif model.sensor_type[sensor] not in _REFERRED:
            continue
        for kind, number in found:
            if number < 0 or kind not in frames:
                continue
            turn = frames[kind][number].reshape(3, 3)
            if not np.allclose(across[:, None] * turn * across, turn, atol=_BENT):
                return False
    return True


def _standing(model: Any, qpos: np.ndarray) -> Any:
    """Returns the MjData of a posture [nq], with the trunk at the origin and not turned."""
    data = mujoco.MjData(model)
    data.qpos[:] = qpos
    data.qpos[:7] = [0, 0, 0, 1, 0, 0, 0]
    mujoco.mj_kinematics(model, data)
    return data


def _near(data: Any) -> float:
    """Returns within how many m places of a robot are the same."""
    return _NEAR * float(np.abs(data.xanchor[1:]).max(initial=0.0))


def sides_of(model: Any, qpos: np.ndarray, feet: Sequence[str]) -> Sides:
    """Returns what a mirror across the trunk's xz plane makes of a robot; raises Asymmetric without symmetry.

    Joints are images of each other by their places and axes, feet by their places, and actuators by their
    joints, in the posture `qpos`, which must be symmetric too. Masses and ranges are not compared: those of
    robots and of their files are often a little different on both sides.

    Args:
        model: mujoco.MjModel of a robot whose first joint is free and whose others are hinges or slides.
        qpos: its posture, [nq].
        feet: names of sites, or of bodies.
    """
    data = _standing(model, qpos)
    places, axes, near = data.xanchor[1:], data.xaxis[1:], _near(data)
    hinges = model.jnt_type[1:] == mujoco.mjtJoint.mjJNT_HINGE
    across = np.array(_VECTOR.signs)
    # The axis of a hinge is that of a turning, which a mirror reflects the other way.
    images = np.where(hinges[:, None], -1, 1) * across * axes
    parallel, apart = images @ axes.T, (across * places)[:, None] - places
    # Where on its axis a hinge is said to be does not matter.
    along = hinges[:, None] * (apart * axes).sum(axis=-1)
    off_axis = np.linalg.norm(apart - along[..., None] * axes, axis=-1)
    same = (np.abs(parallel) > 0.98) & (off_axis < near)
    distances = np.where(same, np.linalg.norm(apart, axis=-1), np.inf)
    names = [f"the joint {model.joint(i).name or i}" for i in range(1, model.njnt)]
    joints = _matched(distances, np.sign(parallel), names)
    sites = np.array([_place(model, data, foot) for foot in feet])
    apart = np.linalg.norm((across * sites)[:, None] - sites, axis=-1)
    distances = np.where(apart < near, apart, np.inf)
    paired = _matched(distances, np.ones(apart.shape), [f"the foot {foot}" for foot in feet])
    bent, signs = qpos[7:], np.array(joints.signs)
    _require_alike(signs * bent[list(joints.order)], bent, names, "the posture", (1e-5, _BENT))
    servos = model.actuator_trnid[:, 0] - 1
    driven = [names[joint] for joint in servos]
    order = [np.flatnonzero(servos == joints.order[joint]) for joint in servos]
    for name, found in zip(driven, order, strict=True):
        if len(found) != 1:
            raise Asymmetric(f"the image of {name} has {len(found)} servos")
    images = np.array([int(found[0]) for found in order])
    geared = model.actuator_gear[:, 0] * model.actuator_gear[images, 0]
    strengths = [model.actuator_gainprm[:, 0], *model.actuator_biasprm[:, 1:3].T]
    for each in strengths:
        _require_alike(each[images], each, driven, "a gain", (_STRONGER, 1e-8))
    signs, images = signs[servos], tuple(map(int, images))
    moved, told = (tuple(map(int, each)) for each in (signs, signs * np.sign(geared)))
    return Sides(Reflection(images, moved), Reflection(images, told), paired)


def _require_alike(
    images: np.ndarray, own: np.ndarray, names: Sequence[str], what: str, near: tuple[float, float]
) -> None:
    """Raises Asymmetric, with the first of `names`, unless numbers [n] are those of their images.

    `near` is by how much they may differ: as a share, and besides.
    """
    for i in np.flatnonzero(~np.isclose(images, own, *near)):
        raise Asymmetric(
            f"{what} of {names[int(i)]} is {own[i]:.4g}, and in the mirror {images[i]:.4g}"
        )


def _matched(distances: np.ndarray, signs: np.ndarray, names: Sequence[str]) -> Reflection:
    """Returns the reflection of what is nearest to images, with the signs of pairs.

    Both arrays are [n, n]; a distance is infinite where two parts cannot be images of each other. Raises
    Asymmetric, with its name, if a part has no image.
    """
    order, every = distances.argmin(axis=1), np.arange(len(distances))
    for i in np.flatnonzero(np.isinf(distances.min(axis=1)) | (order[order] != every)):
        raise Asymmetric(f"{names[int(i)]} has no image on the other side")
    return Reflection(tuple(map(int, order)), tuple(map(int, signs[every, order])))


def _place(model: Any, data: Any, name: str) -> np.ndarray:
    site = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_SITE, name)
    return data.site(name).xpos if site >= 0 else data.body(name).xpos


def _threefold(numbers: Reflection) -> Reflection:
    """Returns the reflection of a vector for each number."""
    order = tuple(3 * i + k for i in numbers.order for k in range(3))
    return Reflection(order, tuple(s * k for s in numbers.signs for k in _VECTOR.signs))


def _same(size: int) -> Reflection:
    return Reflection(tuple(range(size)), (1,) * size)
