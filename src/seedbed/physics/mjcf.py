"""Loads MJCF with MuJoCo's own compiler. Features that the engine does not simulate are refused by name."""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.arguments import refusal, require
from seedbed.physics.model import Model, Option
from seedbed.physics.refusals import grouped, unsupported
from seedbed.physics.rigid import parts_of, welds_of
from seedbed.printable import printable
from seedbed.types import SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

ITERATIONS = 100
"""Most iterations of the solver: MuJoCo's default. The solver converges in fewer than 15."""
_REMEDIES = {
    mujoco.MjSpec: "give its text, spec.to_xml()",
    mujoco.MjModel: "give the MJCF file, or the text, that it was compiled from",
    bytes: "give text, such as data.decode()",
}
"""What to give instead of what holds a model, too."""


def load(path_or_xml: str | Path) -> Model:
    """Compiles an MJCF file, or XML text, into a Model, which is for one environment.

    A string `path_or_xml` that starts with "<" is XML text, anything else a path. Units are those of the
    file, MuJoCo's SI: m, kg, s, and rad after compilation.

    The file's `iterations`, `tolerance` and `solver` are not used: the solver runs to convergence. To limit
    its iterations, replace the option: `dataclasses.replace(model, opt=model.opt._replace(iterations=5))`.

    Raises:
        SeedbedError: MuJoCo cannot compile the model, or the model uses features that are not simulated. The
            text has a line for each kind of them, with their number, a few of their names and the remedy.
    """
    for kind, remedy in _REMEDIES.items():
        if isinstance(path_or_xml, kind):
            raise refusal("load: path_or_xml", path_or_xml, remedy)
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
            compiled = mujoco.MjModel.from_xml_string(given)
        else:
            compiled = mujoco.MjModel.from_xml_path(str(path_or_xml))
    except (ValueError, mujoco.FatalError) as error:
        reason = " ".join(str(error).split())[:300]  # MuJoCo's message has several lines
        remedy = "correct it" if is_text else "correct it, or the path"
        raise SeedbedError(f"MuJoCo cannot compile {name}: {reason}; {remedy}") from error
    refused = grouped(unsupported(compiled))
    if len(refused) == 1:
        raise SeedbedError(f"{name} uses something that cannot be simulated: {refused[0]}")
    if refused:
        first = f"{name} uses {len(refused)} kinds of things that cannot be simulated:"
        raise SeedbedError("\n  ".join([first, *refused]))
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
