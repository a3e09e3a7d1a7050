"""Sensors of what bodies touch, for models whose files have none."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from seedbed.physics.model import Model, Sensor
from seedbed.physics.slots import candidates

mujoco: Any = importlib.import_module("mujoco")  # a package without types


def touches(model: Model, body: int) -> list[str]:
    """Returns the `NAME` of each sensor `NAME_found` that `with_touch` has given a body."""
    own = [each.name for each in model.sensors if each.name.startswith(f"body {body} on body ")]
    return [name.removesuffix("_found") for name in own]


def with_touch(model: Model, bodies: tuple[int, ...]) -> Model:
    """Returns a model with a sensor for each of `bodies` and each fixed body that it may touch.

    Their names end as those of MuJoCo Playground's files. Returns a model itself that has them.
    """
    kind = int(mujoco.mjtSensor.mjSENS_CONTACT)
    sensors, own = list(model.sensors), int(mujoco.mjtObj.mjOBJ_BODY)
    if touches(model, bodies[0]):
        return model
    pairs = [model.geom_bodyid[pair] for group in candidates(model).fixed for pair in group.pairs]
    for body in bodies:
        fixed = {int(other) for pair in pairs if body in pair for other in pair} - {body}
        for other in sorted(fixed):
            sensors.append(
                Sensor(
                    name=f"body {body} on body {other}_found",
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
