"""Sensors of what bodies touch, for models whose files have none."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from seedbed.physics.model import Model, Sensor
from seedbed.physics.slots import candidates

mujoco: Any = importlib.import_module("mujoco")  # a package without types


def touches(model: Model, body: int) -> dict[str, int]:
    """Returns the bodies that are fixed to the world and that `body` may touch, by `NAME` of its sensor.

    The sensor is `NAME_found`, as those of MuJoCo Playground's files.
    """
    pairs = [model.geom_bodyid[pair] for kind in candidates(model).fixed for pair in kind.pairs]
    fixed = sorted({int(other) for pair in pairs if body in pair for other in pair} - {body})
    return {f"body {body} on body {other}": other for other in fixed}


def with_touch(model: Model, bodies: tuple[int, ...]) -> Model:
    """Returns a model with a sensor for each of `bodies` and what it may touch; itself if it has these."""
    kind = int(mujoco.mjtSensor.mjSENS_CONTACT)
    sensors, own = list(model.sensors), int(mujoco.mjtObj.mjOBJ_BODY)
    if any(each.name.startswith(f"body {bodies[0]} on body ") for each in sensors):
        return model
    for body in bodies:
        for name, other in touches(model, body).items():
            sensors.append(
                Sensor(
                    name=f"{name}_found",
                    kind=kind,
                    objtype=own,
                    objid=body,
                    reftype=own,
                    refid=other,
                    adr=sum(each.dim for each in sensors),
                    dim=1,
                    cutoff=0.0,
                    clipped=False,
                    simulated=True,
                    intprm=(1, 1),
                    of_forces=True,
                )
            )
    return dataclasses.replace(model, sensors=tuple(sensors))
