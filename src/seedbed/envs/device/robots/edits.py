"""Models of robots that are not quite as their file says: with other gains, or on other ground."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seedbed import physics
from seedbed.envs.device.mjcf_files import Version
from seedbed.envs.device.robots.tiles import Tiles, lay
from seedbed.physics.model import EULER
from seedbed.types import SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types


class Edits(NamedTuple):
    """The changes that a task makes to the model in its file."""

    kp: float  # N m/rad, of the servos; 0 is the file's
    kd: float  # N m s/rad, of the joints that servos drive; 0 is the file's
    critical: bool = False  # servos damp critically, by the inertia of each joint in qpos0
    apart: tuple[str, ...] = ()  # bodies that never reach each other, whose contacts are left out
    tiles: Tiles | None = None  # of what the floor is made
    motor_hz: float = (
        0.0  # at which servos swing with their motors' inertia, damped twice critically
    )


def compiled_with(path: Path, edits: Edits) -> Any:
    """Compiles a model and changes its gains, as Playground does after compiling; returns an mjModel.

    A servo with a `dampratio` has the damping that this means for the stiffness that it gets. Raises
    SeedbedError, which names the file, if MuJoCo does not compile it.
    MuJoCo 3 took the joints' inertia in qpos0 for what a file's `dampratio` damps; MuJoCo 4 takes another.
    """
    try:
        spec = mujoco.MjSpec.from_file(str(path))
    except ValueError as error:
        raise _uncompiled(path, error) from error
    kp, kd, critical, apart, tiles, motor_hz = edits
    for one, two in itertools.combinations(apart, 2):
        spec.add_exclude(bodyname1=one, bodyname2=two)
    if tiles is not None:
        lay(spec, tiles, str(path))
    for servo in spec.actuators if kp else ():
        if servo.biasprm[2] > 0:  # MuJoCo's mark of a dampratio, for which it takes kv from kp
            servo.gainprm[0], servo.biasprm[1] = kp, -kp
    try:
        model = spec.compile()
    except ValueError as error:
        raise _uncompiled(path, error) from error
    if motor_hz:
        _swing_at(model, motor_hz, path)
    if kd:
        servos = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
        model.dof_damping[model.jnt_dofadr[model.actuator_trnid[servos, 0]]] = kd
    if kp:
        model.actuator_gainprm[:, 0] = kp
        model.actuator_biasprm[:, 1] = -kp
    if critical:
        dofs = model.jnt_dofadr[model.actuator_trnid[:, 0]]
        damping = 2 * np.sqrt(model.actuator_gainprm[:, 0] * model.dof_M0[dofs])
        model.actuator_biasprm[:, 2] = -damping
    return model


def _uncompiled(path: Path, error: ValueError) -> SeedbedError:
    return SeedbedError(f"{path} is no model that MuJoCo compiles: {error}")


def _swing_at(model: Any, motor_hz: float, path: Any) -> None:
    """Gives servos the gains with which motors alone would swing at a frequency, damped twice critically.

    The choice of BeyondMimic (Liao et al., 2025). Raises SeedbedError if a motor has no inertia.
    """
    dofs = model.jnt_dofadr[model.actuator_trnid[:, 0]]
    inertia, turns = model.dof_armature[dofs], 2 * np.pi * motor_hz
    if not inertia.all():
        raise SeedbedError(
            f"{path} has joints without an armature, the inertia of their motors, which the gains of this "
            "task are made of: give them one"
        )
    model.actuator_gainprm[:, 0] = inertia * turns**2
    model.actuator_biasprm[:, 1] = -model.actuator_gainprm[:, 0]
    model.dof_damping[dofs] = 4 * inertia * turns
    # A strong torque takes a target beyond where the joint can go.
    model.actuator_ctrllimited[:] = 0


def torque_ranges(model: Any) -> np.ndarray:
    """Returns the bounds [nu, 2] of the torques on the joints of servos in N m, infinite without a limit.

    They are the narrower of the servo's (`forcerange`) and the joint's (`actuatorfrcrange`).
    """
    joints = model.actuator_trnid[:, 0]
    servos = limits(model.actuator_forcelimited, model.actuator_forcerange)
    own = limits(model.jnt_actfrclimited[joints], model.jnt_actfrcrange[joints])
    return np.stack([np.maximum(servos, own)[:, 0], np.minimum(servos, own)[:, 1]], axis=1)


def limits(limited: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Returns the bounds of `ranges` [n, 2], which are infinite where there is no limit."""
    return np.where(limited[:, None] != 0, ranges, [-np.inf, np.inf])


@functools.cache
def model_with(file: Version, integrator: str, edits: Edits, iterations: int) -> physics.Model:
    """Loads a model that is changed; raises SeedbedError, which names the file, if it is not simulated."""
    compiled = compiled_with(file.path, edits)
    try:
        model = physics.load(compiled)
    except SeedbedError as error:
        raise SeedbedError(f"{file.path}: {error}") from error
    opt = model.opt
    if integrator == "euler":
        opt = opt._replace(integrator=EULER)
    if iterations:
        opt = opt._replace(iterations=iterations)
    return dataclasses.replace(model, opt=opt)
