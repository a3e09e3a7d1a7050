"""Models of robots that are not quite as their file says: with other gains, or on other ground."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from typing import Any, NamedTuple

import numpy as np

from seedbed import physics
from seedbed.envs.device.robots.tiles import Tiles, lay
from seedbed.physics.model import EULER

mujoco: Any = importlib.import_module("mujoco")  # a package without types


class Edits(NamedTuple):
    """What a task changes in its file."""

    kp: float  # N m/rad, of the servos; 0 is the file's
    kd: float  # N m s/rad, of the joints; 0 is the file's
    critical: bool = False  # servos damp critically, by the inertia of each joint in qpos0
    apart: tuple[str, ...] = ()  # bodies that never reach each other, whose contacts are left out
    tiles: Tiles | None = None  # of what the floor is made


def compiled_with(path: Any, edits: Edits) -> Any:
    """Compiles a model and changes its gains, as Playground does after compiling; returns an mjModel.

    MuJoCo 3 took the joints' inertia in qpos0 for what a file's `dampratio` damps; MuJoCo 4 takes another.
    """
    spec = mujoco.MjSpec.from_file(str(path))
    kp, kd, critical, apart, tiles = edits
    for one, two in itertools.combinations(apart, 2):
        spec.add_exclude(bodyname1=one, bodyname2=two)
    if tiles is not None:
        lay(spec, tiles, path)
    model = spec.compile()
    if kd:
        free = model.jnt_type == mujoco.mjtJoint.mjJNT_FREE
        model.dof_damping[~free[model.dof_jntid]] = kd
    if kp:
        model.actuator_gainprm[:, 0] = kp
        model.actuator_biasprm[:, 1] = -kp
    if critical:
        dofs = model.jnt_dofadr[model.actuator_trnid[:, 0]]
        damping = 2 * np.sqrt(model.actuator_gainprm[:, 0] * model.dof_M0[dofs])
        model.actuator_biasprm[:, 2] = -damping
    return model


@functools.cache
def model_with(path: Any, integrator: str, edits: Edits, iterations: int) -> physics.Model:
    """Loads a model that is changed."""
    model = physics.load(compiled_with(path, edits))
    opt = model.opt
    if integrator == "euler":
        opt = opt._replace(integrator=EULER)
    if iterations:
        opt = opt._replace(iterations=iterations)
    return dataclasses.replace(model, opt=opt)
