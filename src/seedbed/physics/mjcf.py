"""Loads MJCF with MuJoCo's own compiler. Features that the engine does not simulate are refused by name."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.physics import slots
from seedbed.physics.model import EULER, FREE, RK4, Model, Option
from seedbed.physics.narrow import COLLIDERS
from seedbed.physics.rigid import parts_of, welds_of
from seedbed.types import SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

INERT_DISABLED = (
    mujoco.mjtDisableBit.mjDSBL_WARMSTART
    | mujoco.mjtDisableBit.mjDSBL_SENSOR
    | mujoco.mjtDisableBit.mjDSBL_MIDPHASE
    | mujoco.mjtDisableBit.mjDSBL_EULERDAMP
    | mujoco.mjtDisableBit.mjDSBL_ISLAND
)
"""Accepted disable flags: they do not change the result of a step, except eulerdamp, which is simulated."""
INERT_ENABLED = mujoco.mjtEnableBit.mjENBL_ENERGY | mujoco.mjtEnableBit.mjENBL_FWDINV
"""Accepted enable flags: they do not change the result of a step."""
ITERATIONS = 100
"""Most iterations of the solver: MuJoCo's default. The solver converges in fewer than 15."""


def load(path_or_xml: str | Path) -> Model:
    """Compiles an MJCF file, or XML text, into a Model, which is for one environment.

    A string `path_or_xml` that starts with "<" is XML text, anything else a path. Units are those of the
    file, MuJoCo's SI: m, kg, s, and rad after compilation.

    The file's `iterations`, `tolerance` and `solver` are not used: the solver runs to convergence. To limit
    its iterations, replace the option: `dataclasses.replace(model, opt=model.opt._replace(iterations=5))`.

    Raises:
        SeedbedError: MuJoCo cannot compile the model, or the model uses features that are not simulated. The
            text names each of them, and the remedy.
    """
    is_text = isinstance(path_or_xml, str) and path_or_xml.lstrip().startswith("<")
    name = "the XML text" if is_text else str(path_or_xml)
    try:
        if is_text:
            compiled = mujoco.MjModel.from_xml_string(path_or_xml)
        else:
            compiled = mujoco.MjModel.from_xml_path(str(path_or_xml))
    except ValueError as error:
        reason = " ".join(str(error).split())  # MuJoCo's message has several lines
        remedy = "correct it" if is_text else "correct it, or the path"
        raise SeedbedError(f"MuJoCo cannot compile {name}: {reason}; {remedy}") from error
    refused = list(unsupported(compiled))
    if refused:
        number = "something" if len(refused) == 1 else f"{len(refused)} things"
        raise SeedbedError(f"{name} uses {number} that cannot be simulated: {'; '.join(refused)}")
    return from_mujoco(compiled)


def from_mujoco(compiled: Any) -> Model:
    """Copies the fields of a compiled model. It does not check for features that are not simulated."""
    option = compiled.opt
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Model):
        if field.name not in ("opt", "geom_lever", "geom_extent", "welds", "parts"):
            value = getattr(compiled, field.name)
            fields[field.name] = np.array(value) if isinstance(value, np.ndarray) else int(value)
    fields["opt"] = Option(
        timestep=float(option.timestep),
        gravity=np.array(option.gravity),
        density=float(option.density),
        viscosity=float(option.viscosity),
        wind=np.array(option.wind),
        integrator=int(option.integrator),
        iterations=ITERATIONS,
        eulerdamp=not option.disableflags & mujoco.mjtDisableBit.mjDSBL_EULERDAMP,
    )
    offsets = fields["geom_pos"] - fields["body_ipos"][fields["geom_bodyid"]]
    fields["geom_lever"] = np.linalg.norm(offsets, axis=1) + fields["geom_rbound"]
    fields["geom_extent"] = _extents(fields)
    fields["welds"] = welds_of(fields)
    fields["parts"] = parts_of(fields)
    return Model(**fields)


def _extents(fields: dict[str, Any]) -> np.ndarray:
    """Computes how far geoms reach from the root of their tree if all is stretched out, [ngeom] in m.

    A static geom reaches as far as from its own center.
    """
    body, parent, weld = (fields[name] for name in ("geom_bodyid", "body_parentid", "body_weldid"))
    reach = np.zeros(len(parent))
    for b in np.flatnonzero(weld[parent]):
        reach[b] = reach[parent[b]] + np.linalg.norm(fields["body_pos"][b])
    own = reach[body] + np.linalg.norm(fields["geom_pos"], axis=1)
    return np.where(weld[body], own, 0) + fields["geom_rbound"]


def unsupported(m: Any) -> Iterator[str]:
    """Yields a line for each feature of a compiled model that the engine does not simulate, with a remedy."""
    if not m.nv:
        yield "a model without joints: add one, or there is nothing to simulate"
    yield from _options(m)
    yield from _bodies_and_joints(m)
    yield from _actuators(m)
    yield from _tendons(m)
    yield from _collisions(m)
    counts = {
        "equality constraint": (m.neq, "model the bodies as welded, or as one tree"),
        "sensor": (m.nsensor, "remove it and read the state instead"),
        "contact pair": (m.npair, "let contype and conaffinity choose the pairs"),
        "flex": (m.nflex, "use rigid bodies"),
        "plugin": (m.nplugin, "remove it"),
        "mocap body": (m.nmocap, "make it a static body"),
    }
    for what, (count, remedy) in counts.items():
        if count:
            yield f"{what} ({count} in the model): {remedy}"


def _named(m: Any, kind: Any, i: int | np.integer, element: str) -> str:
    name = mujoco.mj_id2name(m, kind, i)
    if name:
        return f"{element} '{name}'"
    # Most geoms have no name, and their number is not in the file: the body helps to find them.
    if kind == mujoco.mjtObj.mjOBJ_GEOM:
        body = _named(m, mujoco.mjtObj.mjOBJ_BODY, m.geom_bodyid[i], "body")
        return f"{element} {i} of {body}"
    return f"{element} {i}"


def _options(m: Any) -> Iterator[str]:
    option = m.opt
    if option.integrator not in (EULER, RK4):
        integrator = mujoco.mjtIntegrator(option.integrator).name.removeprefix("mjINT_").lower()
        yield f"option integrator='{integrator}': use Euler or RK4"
    if option.cone != mujoco.mjtCone.mjCONE_PYRAMIDAL:
        yield "option cone='elliptic': use pyramidal"
    if option.impratio != 1:
        yield f"option impratio={option.impratio}: use 1"
    if option.noslip_iterations:
        yield f"option noslip_iterations={option.noslip_iterations}: use 0"
    if option.disableactuator:
        yield "option actuatorgroupdisable: remove the actuators instead"
    for bits, inert, kind in (
        (option.disableflags, INERT_DISABLED, mujoco.mjtDisableBit),
        (option.enableflags, INERT_ENABLED, mujoco.mjtEnableBit),
    ):
        for bit in range(32):
            if bits & ~int(inert) & 1 << bit:
                word = "disable" if kind is mujoco.mjtDisableBit else "enable"
                flag = kind(1 << bit).name.split("_")[1].lower()
                yield f"option flag {flag}='{word}': remove the flag"


def _bodies_and_joints(m: Any) -> Iterator[str]:
    for b in np.flatnonzero(m.body_gravcomp):
        yield _named(m, mujoco.mjtObj.mjOBJ_BODY, b, "gravcomp of body") + ": remove it"
    for j in range(m.njnt):
        joint = _named(m, mujoco.mjtObj.mjOBJ_JOINT, j, "joint")
        free = m.jnt_type[j] == FREE
        dofs = np.flatnonzero(m.dof_jntid == j)
        if m.jnt_type[j] == mujoco.mjtJoint.mjJNT_BALL:
            yield f"{joint} of type ball: use three hinges"
        refused = {
            "stiffness of a free joint": free and m.jnt_stiffness[j],
            "a stiffness or damping polynomial": m.jnt_stiffnesspoly[j].any()
            or m.dof_dampingpoly[dofs].any(),
            "springyield": m.jnt_plasticadr[j] >= 0,
            "frictionloss": m.dof_frictionloss[dofs].any(),
            "actuatorfrcrange": m.jnt_actfrclimited[j],
        }
        for what, found in refused.items():
            if found:
                yield f"{what} at {joint}: remove it"
    for g in range(m.ngeom):
        refused = {
            "fluidshape='ellipsoid'": m.geom_fluid[g].any(),
            "surfacevel": m.geom_surfacevel[g].any(),
            "adhesion": m.geom_adhesion[g],
        }
        for what, found in refused.items():
            if found:
                yield f"{what} at {_named(m, mujoco.mjtObj.mjOBJ_GEOM, g, 'geom')}: remove it"


def _collisions(m: Any) -> Iterator[str]:
    """Yields a line for each candidate pair without a collider, and for each geom with an unsupported condim.

    Only geoms in candidate pairs are checked; condim must be 1 or 3.
    """
    for pair in slots.pairs(m):
        geoms = [_named(m, mujoco.mjtObj.mjOBJ_GEOM, g, "geom") for g in pair]
        types = tuple(int(m.geom_type[g]) for g in pair)
        if types not in COLLIDERS:
            kinds = (mujoco.mjtGeom(t).name.removeprefix("mjGEOM_").lower() for t in types)
            first, second = (f"{g} ({kind})" for g, kind in zip(geoms, kinds, strict=True))
            yield (
                f"collision of {first} with {second}: use spheres, capsules and planes, or rule the pair"
                " out with contype and conaffinity"
            )
            continue
        for g, (name, other) in zip(pair, (geoms, geoms[::-1]), strict=True):
            if m.geom_condim[g] not in (1, 3):
                yield f"condim={m.geom_condim[g]} of {name}, which may touch {other}: use 1 or 3"


def _actuators(m: Any) -> Iterator[str]:
    for i in range(m.nactuator):
        actuator = _named(m, mujoco.mjtObj.mjOBJ_ACTUATOR, i, "actuator")
        joint = m.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_JOINT
        if not joint or m.jnt_type[m.actuator_trnid[i, 0]] == FREE:
            yield f"{actuator} on what is not a hinge or slide joint: drive joints"
        motor = (
            m.actuator_dyntype[i] == mujoco.mjtDyn.mjDYN_NONE
            and m.actuator_gaintype[i] == mujoco.mjtGain.mjGAIN_FIXED
            and m.actuator_biastype[i] == mujoco.mjtBias.mjBIAS_NONE
        )
        if not motor:
            yield f"{actuator} that is not a motor: use a motor and compute its control"
        refused = {
            "delay": m.actuator_delay[i],
            "damping": m.actuator_damping[i] or m.actuator_dampingpoly[i].any(),
            "armature": m.actuator_armature[i],
        }
        for what, found in refused.items():
            if found:
                yield f"{what} of {actuator}: give it to the joint, or remove it"


def _tendons(m: Any) -> Iterator[str]:
    for t in range(m.ntendon):
        refused = {
            "limits": m.tendon_limited[t],
            "stiffness": m.tendon_stiffness[t] or m.tendon_stiffnesspoly[t].any(),
            "damping": m.tendon_damping[t] or m.tendon_dampingpoly[t].any(),
            "armature": m.tendon_armature[t],
            "frictionloss": m.tendon_frictionloss[t],
        }
        for what, found in refused.items():
            if found:
                tendon = _named(m, mujoco.mjtObj.mjOBJ_TENDON, t, "tendon")
                yield f"{what} of {tendon}: only tendons without force are accepted"
