"""The numbers of a model that may be replaced, traced or not, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from seedbed.physics.narrow import BOX, CAPSULE, CYLINDER, SPHERE
from seedbed.physics.rigid import parts_of, place
from seedbed.types import Array, SeedbedError

LEAVES = {
    "gravity": "",
    "qpos0": "qpos",
    "qpos_spring": "qpos",
    "body_mass": "body",
    "body_inertia": "body",
    "body_ipos": "body",
    "body_invweight0": "body",
    "jnt_stiffness": "joint",
    "dof_armature": "dof",
    "dof_damping": "dof",
    "dof_frictionloss": "dof",
    "dof_invweight0": "dof",
    "tendon_invweight0": "",
    "geom_size": "geom",
    "geom_pos": "geom",
    "geom_friction": "geom",
    "pair_friction": "",
    "actuator_gear": "actuator",
    "actuator_gainprm": "actuator",
    "actuator_biasprm": "actuator",
}
"""Fields that `Model.replace` accepts, with the kind of element that each row belongs to; "": none."""
_USED = {"actuator_gainprm": 0, "actuator_biasprm": 1}  # by row of Model.actuator_used
_IMPLICITFAST = 3  # as in model.py, which imports this module


def replaced(given: Mapping[str, Any], leaves: Mapping[str, Array]) -> dict[str, Any]:
    """Returns the fields of a model with other leaves; see `Model.replace`, which calls this."""
    for name, value in leaves.items():
        if name not in LEAVES:
            known = ", ".join(LEAVES)
            raise SeedbedError(f"model.replace: {name} is not replaceable; these are: {known}")
        kind = getattr(value, "dtype", type(value).__name__)
        if not (hasattr(value, "dtype") and jnp.issubdtype(kind, jnp.floating)):
            raise SeedbedError(
                f"model.replace: {name} is of type {kind}: give an array of floating-point numbers"
            )
        have, got = np.shape(leaf(given, name)), np.shape(value)
        if have != got:
            raise SeedbedError(
                f"model.replace: {name} has shape {got} instead of {have}: give one"
                " environment's, and batch with simd.vectorize or jax.vmap"
            )
        if name in _USED:
            value = value * given["actuator_used"][_USED[name]]
            leaves = {**leaves, name: value}
        if not isinstance(value, Tracer):
            _check(given, name, np.asarray(value))
    fields = {**given, **{name: x for name, x in leaves.items() if name != "gravity"}}
    if "gravity" in leaves:
        fields["opt"] = fields["opt"]._replace(gravity=leaves["gravity"])
    if "geom_size" in leaves:
        fields["geom_rbound"] = _bounds(fields)
    if leaves.keys() & {"geom_size", "geom_pos", "body_ipos"}:
        fields |= reaches(fields)
    if "geom_pos" in leaves:
        geom_pos = place(fields["welds"], fields["geom_bodyid"], fields["geom_pos"])
        low = np.zeros(geom_pos.shape)
        fields["welds"] = fields["welds"]._replace(geom_pos=geom_pos, geom_low=low)
    fields["parts"] = parts_of(fields)
    return fields


def _check(fields: Mapping[str, Any], name: str, value: np.ndarray) -> None:
    """Raises SeedbedError if a leaf has numbers that `load` refuses in a file."""
    if name == "jnt_stiffness":
        free = np.bincount(fields["dof_jntid"]) == 6
        wrong, remedy = free & (value != 0), "a free joint has 0"
    elif name == "pair_friction":
        apart = value[:, 0] != value[:, 1]
        wrong, remedy = apart & (fields["pair_dim"] == 3), "give both directions of sliding one"
    elif name in ("actuator_gainprm", "actuator_biasprm"):
        shared = (fields["actuator_site"] >= 0) | ((fields["actuator_moment"] != 0).sum(1) > 1)
        wrong = shared & (value[:, 2] != 0) & (fields["opt"].integrator == _IMPLICITFAST)
        remedy = "with implicitfast, a servo of a tendon or site has no damping, so use Euler"
    else:
        return
    for row in np.flatnonzero(wrong)[:1]:
        raise SeedbedError(f"model.replace: row {row} of {name} is {value[row]}: {remedy}")


def leaf(fields: Mapping[str, Any], name: str) -> Array:
    """Returns a leaf by its name, from the fields of a model."""
    return fields["opt"].gravity if name == "gravity" else fields[name]


def _bounds(fields: Mapping[str, Any]) -> Array:
    """Returns the radius [ngeom] of a sphere around each geom of a kind that collides."""
    size, kind, bound = fields["geom_size"], fields["geom_type"], fields["geom_rbound"]
    a, b, c = (size[:, k] for k in range(3))
    xp: Any = np if isinstance(size, np.ndarray) else jnp
    size = a, a + b, xp.sqrt(a * a + b * b), xp.sqrt(a * a + b * b + c * c)
    for which, radius in zip((SPHERE, CAPSULE, CYLINDER, BOX), size, strict=True):
        bound = xp.where(kind == which, radius, bound)
    return bound


def reaches(fields: Mapping[str, Any]) -> dict[str, Array]:
    """Returns how far geoms reach, [ngeom] in m each: `geom_lever` and `geom_extent`. They are upper bounds.

    The first is from the centre of mass of its body, the second from the root of its tree if all is
    stretched out; a static geom reaches as far as from its own center. They have no derivative.
    """
    body, parent, weld = (fields[name] for name in ("geom_bodyid", "body_parentid", "body_weldid"))
    reach = np.zeros(len(parent))
    for b in np.flatnonzero(weld[parent]):
        reach[b] = reach[parent[b]] + np.linalg.norm(fields["body_pos"][b])
    pos, bound = fields["geom_pos"], fields["geom_rbound"]
    own = reach[body] + _norm(pos)
    extent = own * (weld[body] > 0) + bound
    lever = _norm(pos - fields["body_ipos"][body]) + bound
    return {"geom_lever": _constant(lever), "geom_extent": _constant(extent)}


def _norm(x: Array) -> Array:
    if isinstance(x, np.ndarray):
        return np.linalg.norm(x, axis=1)
    return jnp.sqrt(jax.lax.stop_gradient((x * x).sum(1)))


def _constant(x: Array) -> Array:
    return x if isinstance(x, np.ndarray) else jax.lax.stop_gradient(x)
