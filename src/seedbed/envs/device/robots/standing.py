"""How a legged robot of a file stands: its posture and its feet, found in MuJoCo's C code, or a refusal."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seedbed.envs.device.mjcf_files import Version
from seedbed.envs.device.robots.edits import Edits, compiled_with
from seedbed.envs.device.robots.mirror import Asymmetric, sides_of
from seedbed.envs.device.robots.sensed import require_ungeared
from seedbed.types import SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_SETTLES, _LOOKS = 1.0, 0.2  # s, and its last part, in which what touches the ground is a foot
_LOW = 0.3  # of the height of the centre of mass, below which the trunk's frame is no trunk's
_ROUNDED = 1e-6  # rad or m
_AS_IT_IS = Edits(kp=0.0, kd=0.0)


class Standing(NamedTuple):
    """How a robot stands on its feet."""

    qpos: np.ndarray  # [nq] the posture, and the trunk where it comes to rest in it
    settled: np.ndarray  # [nq] the same, with the joints as its weight bends them
    servos: np.ndarray  # [nu] where in qpos each actuator's joint is
    dofs: np.ndarray  # [nu] and where in qvel
    feet: tuple[int, ...]  # bodies
    names: tuple[str, ...]  # of these
    ground: float  # m, the mean height of where they touch it
    soles: np.ndarray  # [n, 3] where in its body's frame each foot touches the ground, m
    trunk: str  # name of its body
    home: str | None  # name of the keyframe that has the posture; None: qpos0 has it
    asymmetry: str  # what keeps it from being its own mirror image; "" if nothing does

    def told(self) -> str:
        """Returns what has been found, for a person who compares it with the robot."""
        posture = "qpos0" if self.home is None else f"keyframe {self.home or 0}"
        sides = f"no mirror symmetry: {self.asymmetry}" if self.asymmetry else "mirror symmetry"
        return (
            f"feet {', '.join(self.names)}; trunk {self.trunk or 1}; posture of {posture}; {sides}"
        )


@functools.cache
def timestep_of(file: Version) -> float:
    """Returns the time step of a file's physics in s; raises SeedbedError if MuJoCo does not compile it."""
    return float(compiled_with(file.path, _AS_IT_IS).opt.timestep)


def verdict(path: Path) -> str:
    """Returns a line about whether `seedbed train FILE.xml` takes a robot, and as what, or why not."""
    try:
        found = standing(Version.of(path), _AS_IT_IS, ())
    except SeedbedError as error:
        return f"seedbed train does not take it: {error}"
    return f"seedbed train takes it: {found.told()}"


@functools.cache
def standing(file: Version, edits: Edits, named: tuple[str, ...]) -> Standing:
    """Lets a robot stand in MuJoCo's C code; raises SeedbedError if it cannot.

    It stands for a second; the bodies that touch what is fixed near its end are its feet. Where its feet are
    `named` it need not stay up: it comes down in its posture until each of them has touched.
    """
    path, model = file.path, compiled_with(file.path, edits)
    free = model.njnt and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
    if not free or model.nq - 7 != model.nv - 6 or model.nv == 6:
        raise SeedbedError(
            f"{path} is no robot that walks: its first joint must be free, all others hinges or slides; "
            "give the trunk's body a <freejoint/>, and take out what else is free"
        )
    driven = _servos(model, path)
    servos, dofs = model.jnt_qposadr[driven], model.jnt_dofadr[driven]
    wanted = _numbers(model, named, path)
    data = mujoco.MjData(model)
    if model.nkey:
        mujoco.mj_resetDataKeyframe(model, data, 0)
    pose = data.qpos.copy()
    _require_reach(model, pose[servos], path)
    mujoco.mj_forward(model, data)
    centre = float(data.subtree_com[model.jnt_bodyid[0], 2] - data.qpos[2])
    # A posture that begins in the ground would be thrown out of it.
    data.qpos[2] -= min([0.0, *(contact.dist for contact in data.contact)])
    data.qvel[:], data.ctrl[:] = 0, pose[servos]
    height = float(data.qpos[2])
    points = _touching(model, data, wanted)
    _require_feet(model, points, wanted, path)
    ground = float(np.mean([at[2] for at, _ in points.values()] or [0.0]))
    now = float(data.qpos[2]) - ground
    heights = (now if wanted else height - ground, now)
    _require_frame(model, heights[0], heights[0] + centre, path)
    _require_upright(model, data, points, None if wanted else heights, path)
    settled = np.array([0.0, 0.0, *data.qpos[2:]])
    names = tuple(model.body(foot).name for foot in points)
    return Standing(
        qpos=np.array([*settled[:7], *pose[7:]]),
        settled=settled,
        servos=servos,
        dofs=dofs,
        feet=tuple(points),
        names=names,
        ground=ground,
        soles=np.array([sole for _, sole in points.values()]),
        trunk=model.body(int(model.jnt_bodyid[0])).name,
        home=model.key(0).name if model.nkey else None,
        asymmetry=_asymmetry(model, pose, names),
    )


def _asymmetry(model: Any, pose: np.ndarray, feet: tuple[str, ...]) -> str:
    try:
        sides_of(model, pose, feet)
    except Asymmetric as error:
        return str(error)
    return ""


def _touching(
    model: Any, data: Any, wanted: tuple[int, ...]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Steps for a second, or until each of the bodies `wanted` has touched what is fixed.

    Returns the bodies that touch it in the end, with where they do last in the world and in their frames, m.
    """
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    steps, looks = (round(seconds / model.opt.timestep) for seconds in (_SETTLES, _LOOKS))
    for left in range(steps, 0, -1):
        mujoco.mj_step(model, data)
        touched = _touched(model, data) if wanted or left <= looks else {}
        for body, at in touched.items():
            if not wanted or body in wanted:
                sole = data.xmat[body].reshape(3, 3).T @ (at - data.xpos[body])
                found[body] = at, sole
        if wanted and len(found) == len(wanted):
            break
    return dict(sorted(found.items()))


def _touched(model: Any, data: Any) -> dict[int, np.ndarray]:
    """Returns the bodies that touch what is fixed, with the mean place of their contacts."""
    found: dict[int, list[np.ndarray]] = {}
    for contact in data.contact:
        bodies = [int(model.geom_bodyid[geom]) for geom in contact.geom]
        moving = [body for body in bodies if model.body_weldid[body]]
        if len(moving) == 1:
            found.setdefault(moving[0], []).append(contact.pos.copy())
    return {body: np.mean(places, axis=0) for body, places in found.items()}


def _require_feet(model: Any, points: dict[int, Any], wanted: tuple[int, ...], path: Path) -> None:
    """Raises SeedbedError if a foot that is named has not touched the ground, or a foot has no name."""
    for foot in set(wanted) - set(points):
        raise SeedbedError(
            f"{path}: the foot {model.body(foot).name} does not touch the ground within a second from the "
            "posture: name the body that has the geom (--env.foot-bodies), or give the file a first keyframe "
            "in which it stands"
        )
    for foot in points:
        if not model.body(foot).name:
            parent = model.body(model.body_parentid[foot]).name
            raise SeedbedError(
                f"{path}: body {foot}, a foot, which {parent or 'another without a name'} carries, has no "
                "name: give it one"
            )


def _require_upright(
    model: Any, data: Any, points: dict[int, Any], heights: tuple[float, float] | None, path: Path
) -> None:
    """Raises SeedbedError unless the trunk is upright, where it should be, and above the feet.

    `heights` are those of the trunk before and after; None where it need not stay up.
    """
    trunk = int(model.jnt_bodyid[0])
    up, how = data.xmat[trunk].reshape(3, 3)[2, 2], ""
    if not points or trunk in model.body_weldid[[*points]] or (heights and len(points) < 2):
        names = [model.body(body).name for body in points]
        how = f"what touches the ground is {', '.join(names) or 'nothing'}, and no two feet alone"
    if heights and heights[1] < 0.7 * heights[0]:
        how = f"its trunk sinks from {heights[0]:.2f} to {heights[1]:.2f} m"
    if up < 0.8:
        how = (
            f"it leans: the z axis of its trunk, the body {model.body(trunk).name or trunk}, is {up:.2f} of "
            "upright (x is forward, y left and z up)"
        )
    if how:
        raise SeedbedError(
            f"{path}: the robot does not stand in its posture for a second: {how}; give the file a first "
            "keyframe in which it stands, or stiffer servos (--env.kp), or name the feet of one that cannot "
            "stand by itself (--env.foot-bodies)"
        )


def _require_frame(model: Any, height: float, centre: float, path: Path) -> None:
    """Raises SeedbedError if the trunk's frame is near the ground, as the thresholds of heights are its.

    `height` is the frame's and `centre` that of the robot's centre of mass, in the posture, in m.
    """
    trunk = int(model.jnt_bodyid[0])
    if height < _LOW * centre:
        raise SeedbedError(
            f"{path}: the frame of {model.body(trunk).name or trunk}, the body with the free joint, is "
            f"{height:.2f} m above the ground, and the robot's centre of mass {centre:.2f} m: put the free "
            "joint into the body of the trunk, with its frame in the trunk"
        )


def _require_reach(model: Any, targets: np.ndarray, path: Path) -> None:
    """Raises SeedbedError if a servo cannot be told the posture: actions would then do nothing at first."""
    low, high = model.actuator_ctrlrange.T
    outside = (targets < low - _ROUNDED) | (targets > high + _ROUNDED)
    for i in np.flatnonzero(outside & (model.actuator_ctrllimited != 0)):
        joint = model.joint(int(model.actuator_trnid[i, 0])).name
        raise SeedbedError(
            f"{path}: the posture has the joint {joint or i} at {targets[i]:.4g}, outside of {low[i]:.4g} to "
            f"{high[i]:.4g}, the ctrlrange of its servo: widen that, or give the file a first keyframe "
            "inside of it"
        )


def _numbers(model: Any, names: tuple[str, ...], path: Path) -> tuple[int, ...]:
    """Returns the bodies with these names; raises SeedbedError if there is none, or one twice."""
    found = [mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_BODY, name) for name in names]
    for name, body in zip(names, found, strict=True):
        if body < 0 or not model.body_weldid[body] or found.count(body) > 1:
            known = [model.body(i).name for i in range(model.nbody) if model.body_weldid[i]]
            raise SeedbedError(
                f"{path}: foot_bodies names {name!r}, which is no body of the robot, or is twice there: it "
                f"has {', '.join(filter(None, known)) or 'none with a name'}"
            )
    return tuple(found)


def _servos(model: Any, path: Path) -> np.ndarray:
    """Returns the joint of each actuator [nu]; raises SeedbedError if one is no servo."""
    joints = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    affine = model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE
    servos = joints & affine & (model.actuator_gainprm[:, 0] > 0)
    servos &= np.isclose(model.actuator_gainprm[:, 0], -model.actuator_biasprm[:, 1])
    servos &= model.actuator_dyntype == mujoco.mjtDyn.mjDYN_NONE
    if not model.nu or not servos.all():
        names = [model.actuator(i).name or str(i) for i in np.flatnonzero(~servos)]
        raise SeedbedError(
            f"{path}: the actuators {', '.join(names[:4]) or 'are missing, which'} are no position servos of "
            "joints, without an activation (timeconst, <intvelocity>): give each joint a <position>, or "
            "write a task (docs/train-your-robot.md)"
        )
    names = [model.actuator(i).name for i in range(model.nu)]
    require_ungeared(model.actuator_gear[:, 0], names, path)
    return np.asarray(model.actuator_trnid[:, 0])
