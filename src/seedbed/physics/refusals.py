"""What the engine does not simulate in a compiled model, grouped by kind, with a remedy for each kind."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from seedbed.physics import slots, tendons
from seedbed.physics.colliders import COLLIDERS
from seedbed.physics.model import BALL, EULER, FREE, HINGE, IMPLICITFAST, RK4, SLIDE
from seedbed.printable import printable

mujoco: Any = importlib.import_module("mujoco")  # a package without types

INERT_DISABLED = (
    mujoco.mjtDisableBit.mjDSBL_WARMSTART
    | mujoco.mjtDisableBit.mjDSBL_SENSOR
    | mujoco.mjtDisableBit.mjDSBL_MIDPHASE
    | mujoco.mjtDisableBit.mjDSBL_EULERDAMP
    | mujoco.mjtDisableBit.mjDSBL_ISLAND
    | mujoco.mjtDisableBit.mjDSBL_NATIVECCD
    | mujoco.mjtDisableBit.mjDSBL_REFSAFE
    | mujoco.mjtDisableBit.mjDSBL_FILTERPARENT
)
"""Accepted disable flags: they do not change the result of a step, or are simulated (options of a Model)."""
FOLDED = (
    mujoco.mjtDisableBit.mjDSBL_CONSTRAINT
    | mujoco.mjtDisableBit.mjDSBL_CONTACT
    | mujoco.mjtDisableBit.mjDSBL_LIMIT
    | mujoco.mjtDisableBit.mjDSBL_FRICTIONLOSS
    | mujoco.mjtDisableBit.mjDSBL_EQUALITY
    | mujoco.mjtDisableBit.mjDSBL_GRAVITY
    | mujoco.mjtDisableBit.mjDSBL_ACTUATION
    | mujoco.mjtDisableBit.mjDSBL_CLAMPCTRL
    | mujoco.mjtDisableBit.mjDSBL_SPRING
    | mujoco.mjtDisableBit.mjDSBL_DAMPER
)
"""Disable flags that are the same as a model without what they disable."""
INERT_ENABLED = mujoco.mjtEnableBit.mjENBL_ENERGY | mujoco.mjtEnableBit.mjENBL_FWDINV
"""Accepted enable flags: they do not change the result of a step."""
_JOINT = [int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT)]
_GAINS = [int(mujoco.mjtGain.mjGAIN_FIXED), int(mujoco.mjtGain.mjGAIN_AFFINE)]
_BIASES = [int(mujoco.mjtBias.mjBIAS_NONE), int(mujoco.mjtBias.mjBIAS_AFFINE)]
_OF_BODIES = [int(mujoco.mjtEq.mjEQ_CONNECT), int(mujoco.mjtEq.mjEQ_WELD)]
_ACTIVATIONS = [
    int(mujoco.mjtDyn.mjDYN_NONE),
    int(mujoco.mjtDyn.mjDYN_INTEGRATOR),
    int(mujoco.mjtDyn.mjDYN_FILTER),
    int(mujoco.mjtDyn.mjDYN_FILTEREXACT),
]
WIDTH = 78
"""The most characters of a line about a kind; it is indented by two in a terminal of 80."""
_MOST_NAMES, _LONGEST_NAME = 3, 24


class Refusal(NamedTuple):
    """A thing in a model that is not simulated."""

    kind: str  # what it is, such as `frictionloss of joint`
    remedy: str
    name: str = ""  # which one it is; "" if there is one of the kind at most


def grouped(refusals: Iterable[Refusal]) -> list[str]:
    """Returns a line of at most `WIDTH` characters for each kind: its number, a few names, the remedy."""
    names: dict[tuple[str, str], dict[str, None]] = {}
    for kind, remedy, name in refusals:
        names.setdefault((kind, remedy), {})[name] = None
    return [_line(kind, remedy, list(found)) for (kind, remedy), found in names.items()]


def _line(kind: str, remedy: str, names: list[str]) -> str:
    if names == [""]:
        return f"{kind}: {remedy}"
    count = f"{len(names)}: " if len(names) > 1 else ""
    more = ", ..." if len(names) > 1 else ""
    room = WIDTH - len(f"{kind} ({count}{more}): {remedy}")
    shown: list[str] = []
    for name in names[:_MOST_NAMES]:
        part = _cut(name, _LONGEST_NAME if shown else min(_LONGEST_NAME, room))
        room -= len(part) + (2 if shown else 0)
        if shown and room < 0:
            break
        shown.append(part)
    more = more if len(shown) < len(names) else ""
    return f"{kind} ({count}{', '.join(shown)}{more}): {remedy}"


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: max(most, 4) - 3]}..."


def unsupported(m: Any) -> Iterator[Refusal]:
    """Yields each feature of a compiled model that the engine does not simulate."""
    if not m.nv:
        yield Refusal("a model without joints", "add one, or there is nothing to simulate")
    yield from _options(m)
    yield from _bodies_and_joints(m)
    yield from _actuators(m)
    yield from _tendons(m)
    yield from _collisions(m)
    objects = mujoco.mjtObj
    counts = {
        "equality constraint": (m.neq, objects.mjOBJ_EQUALITY, "use one of bodies or joints"),
        "flex": (m.nflex, objects.mjOBJ_FLEX, "use rigid bodies"),
        "plugin": (m.nplugin, objects.mjOBJ_PLUGIN, "remove it"),
    }
    for what, (count, kind, remedy) in counts.items():
        for i in range(count):
            if what == "equality constraint" and (not m.eq_active0[i] or _holds(m, i)):
                continue
            yield Refusal(what, remedy, _named(m, kind, i))


def _holds(m: Any, i: int) -> bool:
    """Returns whether an equality is of bodies, or of a hinge or a slide, and of another if there are two."""
    if int(m.eq_type[i]) in _OF_BODIES:
        return True
    joints = [m.eq_obj1id[i], *([m.eq_obj2id[i]] if m.eq_obj2id[i] >= 0 else [])]
    return m.eq_type[i] == mujoco.mjtEq.mjEQ_JOINT and all(
        m.jnt_type[j] in (SLIDE, HINGE) for j in joints
    )


def _named(m: Any, kind: Any, i: int | np.integer) -> str:
    """Returns the name of an element as it can be shown, or its number."""
    name = mujoco.mj_id2name(m, kind, i)
    if name:
        return printable(name)
    # Most geoms have no name, and their number is not in the file: the body helps to find them.
    if kind == mujoco.mjtObj.mjOBJ_GEOM:
        return f"{i} of {_named(m, mujoco.mjtObj.mjOBJ_BODY, m.geom_bodyid[i])}"
    return str(i)


def _options(m: Any) -> Iterator[Refusal]:
    option = m.opt
    fluid = option.density or option.viscosity
    if option.integrator == IMPLICITFAST and fluid:
        yield Refusal("implicitfast in a medium", "use Euler, or density and viscosity 0")
    if option.integrator not in (EULER, RK4, IMPLICITFAST):
        integrator = mujoco.mjtIntegrator(option.integrator).name.removeprefix("mjINT_").lower()
        yield Refusal(f"option integrator='{integrator}'", "use Euler, RK4 or implicitfast")
    if option.cone != mujoco.mjtCone.mjCONE_PYRAMIDAL:
        yield Refusal("option cone='elliptic'", "use pyramidal")
    if option.noslip_iterations:
        yield Refusal(f"option noslip_iterations={option.noslip_iterations}", "use 0")
    if option.disableactuator:
        yield Refusal("option actuatorgroupdisable", "remove the actuators instead")
    for bits, inert, kind in (
        (option.disableflags, INERT_DISABLED, mujoco.mjtDisableBit),
        (option.enableflags, INERT_ENABLED, mujoco.mjtEnableBit),
    ):
        for bit in range(32):
            if bits & ~int(inert) & 1 << bit:
                word = "disable" if kind is mujoco.mjtDisableBit else "enable"
                flag = kind(1 << bit).name.split("_")[1].lower()
                yield Refusal(f"option flag {flag}='{word}'", "remove the flag")


def _bodies_and_joints(m: Any) -> Iterator[Refusal]:
    for j in range(m.njnt):
        joint = _named(m, mujoco.mjtObj.mjOBJ_JOINT, j)
        free = m.jnt_type[j] == FREE
        dofs = np.flatnonzero(m.dof_jntid == j)
        if m.jnt_type[j] == BALL and j + 1 < m.njnt and m.jnt_bodyid[j + 1] == m.jnt_bodyid[j]:
            yield Refusal("ball joint before another", "make it the last", joint)
        polynomial = m.jnt_stiffnesspoly[j].any() or m.dof_dampingpoly[dofs].any()
        refused = {
            "stiffness of free joint": free and m.jnt_stiffness[j],
            "stiffness or damping polynomial of joint": polynomial,
            "springyield of joint": m.jnt_plasticadr[j] >= 0,
            "actuatorgravcomp of joint": m.jnt_actgravcomp[j],
            "actuatorfrcrange of free joint": free and m.jnt_actfrclimited[j],
        }
        for what, found in refused.items():
            if found:
                yield Refusal(what, "remove it", joint)
    for g in range(m.ngeom):
        refused = {
            "fluidshape='ellipsoid' of geom": m.geom_fluid[g].any(),
            "surfacevel of geom": m.geom_surfacevel[g].any(),
            "adhesion of geom": m.geom_adhesion[g],
        }
        for what, found in refused.items():
            if found:
                yield Refusal(what, "remove it", _named(m, mujoco.mjtObj.mjOBJ_GEOM, g))


def _collisions(m: Any) -> Iterator[Refusal]:
    """Yields each candidate pair without a collider, and each geom that gives a pair an unsupported condim.

    It must be 1 or 3. Of two geoms, that of the higher priority gives it; of equal ones, the greater counts.
    """
    named = slots.named_pairs(m)
    for pair in slots.pairs(m):
        geoms = [_named(m, mujoco.mjtObj.mjOBJ_GEOM, g) for g in pair]
        types = tuple(int(m.geom_type[g]) for g in pair)
        if types not in COLLIDERS:
            kinds = (mujoco.mjtGeom(t).name.removeprefix("mjGEOM_").lower() for t in types)
            remedy = "use capsules, or set contype"
            yield Refusal(f"{'-'.join(kinds)} contact", remedy, " with ".join(geoms))
            continue
        if pair in named:
            yield from _of_pair(m, named[pair], " with ".join(geoms))
            continue
        first = max(m.geom_priority[g] for g in pair)
        for g, name in zip(pair, geoms, strict=True):
            if m.geom_priority[g] == first and m.geom_condim[g] not in (1, 3):
                yield Refusal(f"condim={m.geom_condim[g]} of geom", "use 1 or 3", name)


def _of_pair(m: Any, k: int, geoms: str) -> Iterator[Refusal]:
    if m.pair_dim[k] not in (1, 3):
        yield Refusal(f"condim={m.pair_dim[k]} of contact pair", "use 1 or 3", geoms)
    if m.pair_adhesion[k]:
        yield Refusal("adhesion of contact pair", "remove it", geoms)
    sliding = m.pair_friction[k, :2]
    if m.pair_dim[k] == 3 and sliding[0] != sliding[1]:
        remedy = "give both directions one"
        yield Refusal("contact pair with two frictions", remedy, geoms)


def _actuators(m: Any) -> Iterator[Refusal]:
    for i in range(m.nactuator):
        actuator = _named(m, mujoco.mjtObj.mjOBJ_ACTUATOR, i)
        # On a hinge or a slide the two are the same.
        if not _is_driven(m, i):
            remedy = "drive joints, fixed tendons or sites"
            yield Refusal("actuator on no hinge or slide", remedy, actuator)
        elif _damps_more(m, i) and _implicit(m):
            remedy = "use the integrator Euler, or drive joints"
            yield Refusal("implicitfast with a servo that damps a tendon or site", remedy, actuator)
        elif _is_site(m, i) and m.actuator_trnid[i, 1] >= 0:
            yield Refusal("actuator with refsite", "push the site alone", actuator)
        if kind := _not_affine(m, i):
            yield Refusal(kind, "use a motor or a servo", actuator)
        refused = {
            "delay": m.actuator_delay[i],
            "damping": m.actuator_damping[i] or m.actuator_dampingpoly[i].any(),
            "armature": m.actuator_armature[i],
            "several controls": m.actuator_ctrlnum[i] != 1 or m.actuator_outnum[i] != 1,
            "several activations": m.actuator_actnum[i] > 1,
        }
        for what, found in refused.items():
            if found:
                yield Refusal(f"{what} of actuator", "give it to the joint, or remove it", actuator)


def _is_driven(m: Any, i: int) -> bool:
    driven = m.actuator_trnid[i, 0]
    if _is_site(m, i):
        return True
    if m.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_TENDON:
        return tendons.is_fixed(m, driven)
    return int(m.actuator_trntype[i]) in _JOINT and m.jnt_type[driven] in (SLIDE, HINGE)


def _is_site(m: Any, i: int) -> bool:
    return bool(m.actuator_trntype[i] == mujoco.mjtTrn.mjTRN_SITE)


def _damps_more(m: Any, i: int) -> bool:
    """Returns whether an actuator damps what is no joint."""
    damps = m.actuator_gainprm[i, 2] or m.actuator_biasprm[i, 2]
    return bool(m.actuator_trntype[i] not in _JOINT and damps)


def _implicit(m: Any) -> bool:
    return m.opt.integrator == IMPLICITFAST


def _not_affine(m: Any, i: int) -> str:
    """Returns what keeps an actuator from being simulated; "" for one whose force is affine."""
    if int(m.actuator_dyntype[i]) not in _ACTIVATIONS:
        kind = mujoco.mjtDyn(m.actuator_dyntype[i]).name.removeprefix("mjDYN_").lower()
        return f"actuator with the activation {kind}"
    affine = int(m.actuator_gaintype[i]) in _GAINS and int(m.actuator_biastype[i]) in _BIASES
    return "" if affine else "actuator that is not affine"


def _tendons(m: Any) -> Iterator[Refusal]:
    for t in range(m.ntendon):
        fixed = tendons.is_fixed(m, t)
        refused = {
            "limits of spatial": m.tendon_limited[t] and not fixed,
            "polynomial stiffness": m.tendon_stiffnesspoly[t].any(),
            "polynomial damping": m.tendon_dampingpoly[t].any(),
            "stiffness of spatial": m.tendon_stiffness[t] and not fixed,
            "damping of spatial": m.tendon_damping[t] and not fixed,
            "implicitfast with damping": m.tendon_damping[t] and _implicit(m),
            "armature": m.tendon_armature[t],
            "frictionloss": m.tendon_frictionloss[t],
            "actuatorfrcrange": m.tendon_actfrclimited[t],
            "springyield": m.tendon_plasticadr[t] >= 0,
        }
        for what, found in refused.items():
            if found:
                tendon = _named(m, mujoco.mjtObj.mjOBJ_TENDON, t)
                remedy = "use a fixed one" if what.endswith("spatial") else "remove it"
                remedy = "use the integrator Euler" if what.startswith("implicit") else remedy
                yield Refusal(f"{what} of tendon", remedy, tendon)
