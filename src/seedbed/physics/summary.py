"""What a model is, in a few lines, for a person who wants to train it."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from seedbed.physics.colliders import COLLIDERS
from seedbed.physics.mjcf import load
from seedbed.physics.model import BALL, EULER, FREE, HINGE, RK4, SLIDE, Model
from seedbed.physics.sensors import is_simulated
from seedbed.physics.slots import candidates
from seedbed.physics.slots import slots as slots_of
from seedbed.printable import printable

ROUNDED = 1e-6
"""A joint that is less than this beyond its limit, in m or rad, is at it."""
MOST_NOTES = 5
"""Most joints that are listed as beyond their limits."""
_JOINTS = {FREE: "free", BALL: "ball", SLIDE: "slide", HINGE: "hinge"}
_GEOMS = {0: "plane", 2: "sphere", 3: "capsule", 5: "cylinder", 6: "box"}
_INTEGRATORS = {EULER: "Euler", RK4: "RK4"}


def summary(path_or_xml: Any) -> list[str]:
    """Returns lines about a model; raises SeedbedError, with all reasons, if `load` refuses it."""
    model = load(path_or_xml)
    joints = collections.Counter(_JOINTS[int(kind)] for kind in model.jnt_type)
    integrator = _INTEGRATORS.get(model.opt.integrator, "implicitfast")
    lines = [
        f"bodies      {model.nbody - 1}, of {model.body_mass[1:].sum():.4g} kg in all",
        f"joints      {model.nv} degrees of freedom: {_counted(joints)}",
        f"time step   {model.opt.timestep:g} s, {integrator}",
        f"actuators   {model.nu}{_servos(model)}",
        f"contacts    {_contacts(model)}",
        f"sensors     {_sensors(model)}",
        f"keyframes   {', '.join(printable(key.name) or '-' for key in model.keyframes) or 'none'}",
    ]
    if lossy := int((model.dof_frictionloss > 0).sum()):
        lines.append(f"friction    {lossy} degrees of freedom with loss")
    return [*lines, *(f"note        {text}" for text in _beyond(model))]


def _counted(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items())


def _servos(model: Model) -> str:
    servos = int((model.actuator_biasprm[:, 1] != 0).sum())
    text = f", {servos} of them position servos" if servos else ""
    if free := int((model.actuator_ctrllimited == 0).sum()):
        text += f"; {free} of them without a range of controls"
    return text


def _contacts(model: Model) -> str:
    """Tells the pairs that may touch, and the contacts that a kernel looks at in each step."""
    kinds, slots, dims = collections.Counter[str](), 0, set[int]()
    for group in candidates(model):
        dims |= {int(dim) for dim in slots_of(model, group).condim}
        for kind in group:
            names = "-".join(_GEOMS[geom] for geom in kind.types)
            kinds[names] += len(kind.pairs)
            slots += len(kind.pairs) * COLLIDERS[kind.types][1]
    if not kinds:
        return "none"
    dim = " and ".join(str(dim) for dim in sorted(dims))
    return (
        f"{sum(kinds.values())} pairs ({_counted(kinds)}), {slots} contacts at most, condim {dim}"
    )


def _beyond(model: Model) -> list[str]:
    """Tells which postures of the file are beyond the limits of joints, whose constraints then push."""
    postures = {"qpos0": np.asarray(model.qpos0)}
    for number, key in enumerate(model.keyframes):
        postures[f"keyframe {printable(key.name) or number}"] = key.qpos
    found = []
    for name, qpos in postures.items():
        for j in np.flatnonzero(model.jnt_limited):
            low, high = model.jnt_range[j]
            at = qpos[model.jnt_qposadr[j]]
            if model.jnt_type[j] in (SLIDE, HINGE) and not low - ROUNDED <= at <= high + ROUNDED:
                joint = printable(model.names.joint[j]) or f"joint {j}"
                found.append(f"{name} has {joint} at {at:.4g}, outside of {low:.4g} to {high:.4g}")
    more = len(found) - MOST_NOTES
    return [*found[:MOST_NOTES], f"and {more} more"] if more > 0 else found


def _sensors(model: Model) -> str:
    if not model.sensors:
        return "none"
    blind = [each.name or "-" for each in model.sensors if not is_simulated(each)]
    count = f"{len(model.sensors)}, {int(np.sum([each.dim for each in model.sensors]))} numbers"
    if not blind:
        return count
    names = ", ".join(map(printable, blind[:3])) + (", ..." if len(blind) > 3 else "")
    return f"{count}; {len(blind)} read NaN, as they are not simulated: {names}"
