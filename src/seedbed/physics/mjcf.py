"""Loads MJCF with MuJoCo's own compiler. Features that the engine does not simulate are refused by name."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.arguments import refusal, require
from seedbed.physics import tendons
from seedbed.physics.leaves import reaches
from seedbed.physics.model import Keyframe, Model, Names, Option, Sensor
from seedbed.physics.refusals import FOLDED, grouped, unsupported
from seedbed.physics.rigid import parts_of, welds_of
from seedbed.printable import printable
from seedbed.types import SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_CLIPPED = tuple(
    int(kind)
    for kind in (mujoco.mjtDataType.mjDATATYPE_REAL, mujoco.mjtDataType.mjDATATYPE_POSITIVE)
)
_CONTACT = mujoco.mjtSensor.mjSENS_CONTACT
ITERATIONS = 100
"""Most iterations of the solver: MuJoCo's default. The solver converges in fewer than 15."""


def load(path_or_xml: Any) -> Model:
    """Compiles an MJCF or URDF file, XML text, or an MjSpec into a Model, which is for one environment.

    A string `path_or_xml` that starts with "<" is XML text, another one and a Path are paths. An MjModel is
    taken as it is, with all that was changed in it after it was compiled. Units are MuJoCo's SI: m, kg, s,
    and rad after compilation. Flags that disable contacts, limits, friction loss, gravity, actuators, springs
    or dampers are part of the model. Sensors that are not simulated are accepted, and read NaN.

    The file's `iterations`, `tolerance` and `solver` are not used: the solver runs to convergence. To limit
    its iterations, replace the option: `dataclasses.replace(model, opt=model.opt._replace(iterations=5))`.

    Raises:
        SeedbedError: MuJoCo cannot compile the model, or the model uses features that are not simulated. The
            text has a line for each kind of them, with their number, a few of their names and the remedy.
    """
    compiled, name = _compiled(path_or_xml)
    effective = with_flags(compiled)
    refused = grouped(unsupported(effective))
    if len(refused) == 1:
        raise SeedbedError(f"{name} uses something that cannot be simulated: {refused[0]}")
    if refused:
        first = f"{name} uses {len(refused)} kinds of things that cannot be simulated:"
        raise SeedbedError("\n  ".join([first, *refused]))
    return from_mujoco(effective)


def _compiled(path_or_xml: Any) -> tuple[Any, str]:
    """Returns MuJoCo's model, and what it is called in messages."""
    if isinstance(path_or_xml, mujoco.MjModel):
        return path_or_xml, "the MjModel"
    if isinstance(path_or_xml, mujoco.MjSpec):
        try:
            return path_or_xml.compile(), "the MjSpec"
        except (ValueError, mujoco.FatalError) as error:
            reason = " ".join(str(error).split())[:300]
            raise SeedbedError(f"MuJoCo cannot compile the MjSpec: {reason}; correct it") from error
    if isinstance(path_or_xml, bytes):
        raise refusal("load: path_or_xml", path_or_xml, "give text, such as data.decode()")
    require("load: path_or_xml", path_or_xml, str | Path)
    # Editors put a mark before the text of a file.
    given = path_or_xml.removeprefix("\ufeff") if isinstance(path_or_xml, str) else path_or_xml
    is_text = isinstance(given, str) and given.lstrip().startswith("<")
    name = "the XML text" if is_text else printable(path_or_xml)[:300]
    # Unlike pathlib, this takes a text that is too long for a path.
    if not is_text and (given == "" or os.path.isdir(given)):  # noqa: PTH112
        what = f"{name} is a folder" if given else "load: path_or_xml is '', which is empty"
        raise SeedbedError(f"{what}: give the path of an MJCF file, or its text")
    try:
        if is_text:
            return mujoco.MjModel.from_xml_string(given), name
        return mujoco.MjModel.from_xml_path(str(path_or_xml)), name
    except (ValueError, mujoco.FatalError) as error:
        reason = " ".join(str(error).split())[:300]  # MuJoCo's message has several lines
        remedy = "correct it" if is_text else "correct it, or the path"
        raise SeedbedError(f"MuJoCo cannot compile {name}: {reason}; {remedy}") from error


def with_flags(compiled: Any) -> Any:
    """Returns a copy of MuJoCo's model in which what a flag disables is gone, and so is the flag."""
    m, bits = copy.copy(compiled), mujoco.mjtDisableBit
    flags = m.opt.disableflags

    def off(*names: Any) -> bool:
        return any(flags & bit for bit in names)

    if off(bits.mjDSBL_CONTACT, bits.mjDSBL_CONSTRAINT):
        m.geom_contype[:] = m.geom_conaffinity[:] = 0
        m.pair_geom2[:] = m.pair_geom1  # of a geom with itself, which is left out
    if off(bits.mjDSBL_LIMIT, bits.mjDSBL_CONSTRAINT):
        m.jnt_limited[:] = 0
        m.tendon_limited[:] = 0
    if off(bits.mjDSBL_FRICTIONLOSS, bits.mjDSBL_CONSTRAINT):
        m.dof_frictionloss[:] = 0
        m.tendon_frictionloss[:] = 0
    if off(bits.mjDSBL_EQUALITY, bits.mjDSBL_CONSTRAINT):
        m.eq_active0[:] = 0
    if off(bits.mjDSBL_GRAVITY):
        m.opt.gravity[:] = 0
    if off(bits.mjDSBL_CLAMPCTRL):
        m.actuator_ctrllimited[:] = 0
    if off(bits.mjDSBL_ACTUATION):
        m.actuator_gainprm[:] = m.actuator_biasprm[:] = 0
        m.actuator_forcelimited[:] = m.jnt_actfrclimited[:] = m.actuator_actlimited[:] = 0
        # An activation stays what it is: it integrates a control that is always 0. Actuators of several
        # controls are refused.
        driven = m.actuator_actnum > 0
        m.actuator_dyntype[driven] = mujoco.mjtDyn.mjDYN_INTEGRATOR
        if m.nu == m.nactuator:
            m.actuator_ctrllimited[driven], m.actuator_ctrlrange[driven] = 1, 0
    if off(bits.mjDSBL_SPRING):
        m.jnt_stiffness[:] = 0
        m.tendon_stiffness[:] = 0
    if off(bits.mjDSBL_DAMPER):
        m.dof_damping[:] = 0
        m.tendon_damping[:] = 0
    if off(bits.mjDSBL_SPRING) and off(bits.mjDSBL_DAMPER):
        # mj_passive then leaves out all of its forces.
        m.opt.density = m.opt.viscosity = 0
        m.body_gravcomp[:] = 0
    m.opt.disableflags = flags & ~int(FOLDED)
    return m


def from_mujoco(compiled: Any) -> Model:
    """Copies the fields of a compiled model. It does not check for features that are not simulated."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Model):
        if field.name not in (
            "opt",
            "dof_rubs",
            "body_carrierid",
            "geom_lever",
            "geom_extent",
            "welds",
            "parts",
            "names",
            "keyframes",
            "sensors",
            "tendon_moment",
            "actuator_moment",
            "actuator_site",
            "actuator_used",
        ):
            value = getattr(compiled, field.name)
            fields[field.name] = np.array(value) if isinstance(value, np.ndarray) else int(value)
    fields["tendon_moment"], fields["actuator_moment"] = tendons.moments(compiled)
    pushes = compiled.actuator_trntype == mujoco.mjtTrn.mjTRN_SITE
    fields["actuator_site"] = np.where(pushes, compiled.actuator_trnid[:, 0], -1)
    active = np.array(compiled.eq_active0, bool)
    for name in fields:
        if name.startswith("eq_"):
            fields[name] = fields[name][active]
    fields["names"] = _names(compiled)
    fields["sensors"] = tuple(_sensor(compiled, i) for i in range(compiled.nsensor))
    weld = fields["body_weldid"]
    fields["body_carrierid"] = weld.copy()
    weld[np.isin(weld, np.flatnonzero(compiled.body_mocapid >= 0))] = 0
    fields["opt"] = _option(compiled)
    affine_gain = compiled.actuator_gaintype == mujoco.mjtGain.mjGAIN_AFFINE
    affine_bias = compiled.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE
    fields["actuator_dynprm"] = fields["actuator_dynprm"][:, :1]
    used = affine_gain[:, None] | (np.arange(3) == 0), np.repeat(affine_bias[:, None], 3, axis=1)
    fields["actuator_used"] = np.stack(used)
    for name, each in zip(("actuator_gainprm", "actuator_biasprm"), used, strict=True):
        fields[name] = fields[name][:, :3] * each
    fields["keyframes"] = tuple(
        Keyframe(
            mujoco.mj_id2name(compiled, mujoco.mjtObj.mjOBJ_KEY, i) or "",
            float(compiled.key_time[i]),
            *(
                np.array(getattr(compiled, f"key_{name}")[i])
                for name in ("qpos", "qvel", "act", "ctrl")
            ),
            mocap_pos=np.array(compiled.key_mpos[i]).reshape(-1, 3),
            mocap_quat=np.array(compiled.key_mquat[i]).reshape(-1, 4),
        )
        for i in range(compiled.nkey)
    )
    fields["dof_rubs"] = fields["dof_frictionloss"] > 0
    fields |= reaches(fields)
    fields["welds"] = welds_of(fields)
    fields["parts"] = parts_of(fields)
    return Model(**fields)


def _option(compiled: Any) -> Option:
    option = compiled.opt
    return Option(
        timestep=float(option.timestep),
        gravity=np.array(option.gravity),
        density=float(option.density),
        viscosity=float(option.viscosity),
        wind=np.array(option.wind),
        integrator=int(option.integrator),
        iterations=ITERATIONS,
        eulerdamp=not option.disableflags & mujoco.mjtDisableBit.mjDSBL_EULERDAMP,
        impratio=float(option.impratio),
        refsafe=not option.disableflags & mujoco.mjtDisableBit.mjDSBL_REFSAFE,
        hardens=True,
        filterparent=not option.disableflags & mujoco.mjtDisableBit.mjDSBL_FILTERPARENT,
    )


def _names(m: Any) -> Names:
    kinds = mujoco.mjtObj
    return Names(
        *(
            tuple(mujoco.mj_id2name(m, kind, i) or "" for i in range(count))
            for kind, count in (
                (kinds.mjOBJ_BODY, m.nbody),
                (kinds.mjOBJ_JOINT, m.njnt),
                (kinds.mjOBJ_GEOM, m.ngeom),
                (kinds.mjOBJ_SITE, m.nsite),
                (kinds.mjOBJ_ACTUATOR, m.nu),
            )
        )
    )


def _sensor(m: Any, i: int) -> Sensor:
    objects = mujoco.mjtObj
    known = [objects.mjOBJ_BODY, objects.mjOBJ_XBODY, objects.mjOBJ_GEOM, objects.mjOBJ_SITE]
    referred = m.sensor_refid[i] < 0 or int(m.sensor_reftype[i]) in [int(kind) for kind in known]
    kind, number = int(m.sensor_objtype[i]), int(m.sensor_objid[i])
    own = kind != int(objects.mjOBJ_CAMERA)
    own &= kind != int(objects.mjOBJ_TENDON) or tendons.is_fixed(m, number)
    if m.sensor_type[i] == mujoco.mjtSensor.mjSENS_CONTACT:
        # Contacts in the gap, which MuJoCo counts, are not kept here.
        counts = int(m.sensor_intprm[i, 0]) == 1 << int(mujoco.mjtConDataField.mjCONDATA_FOUND)
        own &= counts and kind != int(objects.mjOBJ_SITE)
        own &= not (m.geom_gap.any() or m.pair_gap.any())
    return Sensor(
        name=mujoco.mj_id2name(m, objects.mjOBJ_SENSOR, i) or "",
        kind=int(m.sensor_type[i]),
        objtype=int(m.sensor_objtype[i]),
        objid=int(m.sensor_objid[i]),
        reftype=int(m.sensor_reftype[i]),
        refid=int(m.sensor_refid[i]),
        adr=int(m.sensor_adr[i]),
        dim=int(m.sensor_dim[i]),
        cutoff=float(m.sensor_cutoff[i]),
        clipped=int(m.sensor_datatype[i]) in _CLIPPED and m.sensor_type[i] != _CONTACT,
        intprm=(int(m.sensor_intprm[i, 0]), int(m.sensor_intprm[i, 1])),
        of_forces=int(m.sensor_needstage[i]) == int(mujoco.mjtStage.mjSTAGE_ACC),
        simulated=bool(referred and own and not (m.sensor_delay[i] or m.sensor_interval[i].any())),
    )
