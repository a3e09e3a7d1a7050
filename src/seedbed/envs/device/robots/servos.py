"""Models of robots whose servos have other gains than their file says."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any, NamedTuple

from seedbed import physics
from seedbed.physics.model import EULER

mujoco: Any = importlib.import_module("mujoco")  # a package without types


class Servos(NamedTuple):
    """The gains of a robot's joints; 0 is the file's."""

    kp: float  # N m/rad
    kd: float  # N m s/rad


@functools.cache
def with_servos(path: Any, integrator: str, servos: Servos, iterations: int) -> physics.Model:
    """Loads a model whose servos and joints get other gains, as Playground changes them after compiling."""
    kp, kd = servos
    compiled = mujoco.MjModel.from_xml_path(str(path))
    if kd:
        compiled.dof_damping[6:] = kd
    if kp:
        compiled.actuator_gainprm[:, 0] = kp
        compiled.actuator_biasprm[:, 1] = -kp
    model = physics.load(compiled)
    opt = model.opt
    if integrator == "euler":
        opt = opt._replace(integrator=EULER)
    if iterations:
        opt = opt._replace(iterations=iterations)
    return dataclasses.replace(model, opt=opt)
