"""Bodies that move together: a body without joints is carried by the moving body that it is welded to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.types import Array


class Welds(NamedTuple):
    """Fixed poses of bodies, geoms and sites in the frame of the moving or mocap body that carries them.

    If nothing carries them, the frame is that of the world.
    """

    body_pos: np.ndarray  # [nbody, 3]
    body_quat: np.ndarray  # [nbody, 4]
    body_mat: np.ndarray  # [nbody, 3, 3]
    geom_pos: Array  # [ngeom, 3]
    geom_low: Array  # [ngeom, 3] what rounding took from geom_pos (`Model.astype`)
    geom_mat: np.ndarray  # [ngeom, 3, 3]
    site_pos: np.ndarray  # [nsite, 3]
    # Pose of a body with its joints at rest, in the frame of what carries its parent.
    rest_pos: np.ndarray  # [nbody, 3]
    rest_low: np.ndarray  # [nbody, 3] what rounding took from rest_pos (`Model.astype`)
    rest_quat: np.ndarray  # [nbody, 4]
    rest_mat: np.ndarray  # [nbody, 3, 3]
    inertial_mat: np.ndarray  # [nbody, 3, 3] principal axes of a body's inertia in its own frame


class Parts(NamedTuple):
    """Rigid parts [n]: one for each moving body with all that it carries, or one for each single body.

    They are single bodies if masses, centres of mass or inertias are JAX arrays (see `parts_of`).
    """

    body: tuple[int, ...]  # the moving body that carries the part
    mass: Array  # [n]
    pos: Array  # [n, 3] centre of mass in the moving body's frame
    axes: np.ndarray  # [n, 3, 3] columns are principal axes in that frame
    inertia: Array  # [n, 3] moment about axis 0; excess over it of the moments about axes 1 and 2


def welds_of(fields: Mapping[str, np.ndarray]) -> Welds:
    """Computes the fixed poses of bodies, geoms and sites relative to the moving bodies that carry them."""
    parent, jntnum = fields["body_parentid"], fields["body_jntnum"]
    nbody = len(parent)
    pos, quat = np.zeros((nbody, 3)), np.tile([1.0, 0, 0, 0], (nbody, 1))
    rest_pos, rest_quat = pos.copy(), quat.copy()
    for b in range(1, nbody):
        p = parent[b]
        rest_pos[b] = pos[p] + math.np_quat_to_mat(quat[p]) @ fields["body_pos"][b]
        rest_quat[b] = math.np_quat_mul(quat[p], fields["body_quat"][b])
        if not jntnum[b] and fields["body_mocapid"][b] < 0:
            pos[b], quat[b] = rest_pos[b], rest_quat[b]
    mat, none = _matrices(quat), np.zeros((0, 3))
    welds = Welds(
        body_pos=math.tidy(pos),
        body_quat=math.tidy(quat),
        body_mat=mat,
        geom_pos=none,
        geom_low=none,
        geom_mat=math.tidy(mat[fields["geom_bodyid"]] @ _matrices(fields["geom_quat"])),
        site_pos=none,
        rest_pos=math.tidy(rest_pos),
        rest_low=np.zeros_like(rest_pos),
        rest_quat=math.tidy(rest_quat),
        rest_mat=_matrices(rest_quat),
        inertial_mat=_matrices(fields["body_iquat"]),
    )
    geom_pos = place(welds, fields["geom_bodyid"], fields["geom_pos"])
    site_pos = place(welds, fields["site_bodyid"], fields["site_pos"])
    return welds._replace(geom_pos=geom_pos, geom_low=np.zeros_like(geom_pos), site_pos=site_pos)


def place(welds: Welds, body: np.ndarray, local: Array) -> Array:
    """Returns points [n, 3], in the frames of bodies [n], in the frames of what carries the bodies."""
    if not isinstance(local, np.ndarray):
        return welds.body_pos[body] + math.apply(welds.body_mat[body], local)
    turned = np.einsum("nij,nj->ni", welds.body_mat[body], local)
    return math.tidy(welds.body_pos[body] + turned)


def _matrices(quats: np.ndarray) -> np.ndarray:
    """Returns the rotation matrices [n, 3, 3] of constant unit quaternions [n, 4]."""
    return np.array([math.np_quat_to_mat(q) for q in quats]).reshape(-1, 3, 3)


def parts_of(fields: Mapping[str, Any]) -> Parts:
    """Merges the bodies that each moving body carries into one part.

    Bodies without mass and inertia are left out.

    If body_mass, body_ipos or body_inertia is a JAX array, every body that moves is a part of its own.
    """
    traced = [
        not isinstance(fields[name], np.ndarray)
        for name in ("body_mass", "body_ipos", "body_inertia")
    ]
    weld, jntnum = fields["body_weldid"], fields["body_jntnum"]
    moving = [b for b in range(1, len(weld)) if jntnum[b]]
    carried = {b: [c for c in range(b, len(weld)) if weld[c] == b] for b in moving}
    if any(traced):
        return _apart(fields, [c for b in moving for c in carried[b]])
    heavy = (fields["body_mass"] > 0) | (fields["body_inertia"] > 0).any(axis=1)
    groups = {b: [c for c in carried[b] if heavy[c]] for b in moving}
    merged = {b: _merge(_apart(fields, group)) for b, group in groups.items() if group}
    columns = zip(*merged.values(), strict=True)
    mass, pos, axes, inertia = (np.array(column) for column in columns)
    return Parts(body=tuple(merged), mass=mass, pos=pos, axes=axes, inertia=inertia)


def _apart(fields: Mapping[str, Any], bodies: list[int]) -> Parts:
    """Makes one part for each body."""
    welds: Welds = fields["welds"]
    mat = welds.body_mat[bodies]
    moments = fields["body_inertia"][np.array(bodies)]
    if isinstance(moments, np.ndarray):
        inertia = np.stack([_excess(row) for row in moments])
    else:
        first = moments[:, :1]
        inertia = jnp.concatenate([first, moments[:, 1:] - first], axis=1)
    ipos = fields["body_ipos"][np.array(bodies)]
    return Parts(
        body=tuple(int(fields["body_weldid"][c]) for c in bodies),
        mass=fields["body_mass"][np.array(bodies)],
        pos=welds.body_pos[bodies] + (mat * ipos[:, None, :]).sum(-1),
        axes=math.tidy(mat @ welds.inertial_mat[bodies]),
        inertia=inertia,
    )


def _merge(parts: Parts) -> tuple[np.floating, np.ndarray, np.ndarray, np.ndarray]:
    """Joins the parts of one moving body into one: mass, pos [3], axes [3, 3], inertia [3]."""
    mass = parts.mass.sum()
    com = parts.mass @ parts.pos / mass if mass else parts.pos[0]
    if len(parts.body) == 1:
        moments, axes = parts.inertia[0] + np.array([0, 1, 1]) * parts.inertia[0, 0], parts.axes[0]
    else:
        inertia = np.zeros((3, 3))
        columns = zip(parts.mass, parts.pos, parts.axes, parts.inertia, strict=True)
        for m, pos, frame, (base, *excess) in columns:
            d = pos - com
            inertia += frame @ np.diag([base, base + excess[0], base + excess[1]]) @ frame.T
            inertia += m * (d @ d * np.eye(3) - np.outer(d, d))
        moments, axes = np.linalg.eigh(inertia)
    # The two most similar moments come first: if they are equal, axis 1 drops out of the inertia's sum.
    gaps = [abs(moments[(k + 1) % 3] - moments[(k + 2) % 3]) for k in range(3)]
    order = [(np.argmin(gaps) + k) % 3 for k in (1, 2, 3)]
    return mass, math.tidy(com), math.tidy(axes[:, order]), _excess(moments[order])


def _excess(moments: np.ndarray) -> np.ndarray:
    """Returns the first of the principal moments [3], and the excess of the other two over it.

    An excess below 1e-10 of the largest moment becomes an exact zero.
    """
    rest = moments[1:] - moments[0]
    rest[np.abs(rest) < 1e-10 * moments.max()] = 0
    return np.array([moments[0], *rest])
