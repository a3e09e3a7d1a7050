"""Models of robots whose servos have other gains than their file says."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from typing import Any, NamedTuple

import numpy as np

from seedbed import physics
from seedbed.physics.model import EULER

mujoco: Any = importlib.import_module("mujoco")  # a package without types


class Servos(NamedTuple):
    """The gains of a robot's joints, of which 0 is the file's, and which of its bodies cannot touch."""

    kp: float  # N m/rad
    kd: float  # N m s/rad
    critical: bool = False  # servos damp critically, by the inertia of each joint in qpos0
    apart: tuple[str, ...] = ()  # bodies that never reach each other, whose contacts are left out


def compiled_with(path: Any, servos: Servos) -> Any:
    """Compiles a model and changes its gains, as Playground does after compiling; returns an mjModel.

    MuJoCo 3 took the joints' inertia in qpos0 for what a file's `dampratio` damps; MuJoCo 4 takes another.
    """
    spec = mujoco.MjSpec.from_file(str(path))
    kp, kd, critical, apart = servos
    for one, two in itertools.combinations(apart, 2):
        spec.add_exclude(bodyname1=one, bodyname2=two)
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
def with_servos(path: Any, integrator: str, servos: Servos, iterations: int) -> physics.Model:
    """Loads a model whose servos and joints get other gains."""
    model = physics.load(compiled_with(path, servos))
    opt = model.opt
    if integrator == "euler":
        opt = opt._replace(integrator=EULER)
    if iterations:
        opt = opt._replace(iterations=iterations)
    return dataclasses.replace(model, opt=opt)
