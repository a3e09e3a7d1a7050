"""Surfaces of meshes and height fields, packed for a replay page."""

from __future__ import annotations

import base64
import gzip
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedbed.viewer.recording import MjModel, mujoco

MESHES = (int(mujoco.mjtGeom.mjGEOM_MESH), int(mujoco.mjtGeom.mjGEOM_SDF))
HFIELD = int(mujoco.mjtGeom.mjGEOM_HFIELD)
_PLACES, _NORMALS = 65535, 127


class Surface(NamedTuple):
    """The triangles of a mesh or a height field."""

    place: NDArray[Any]  # [points, 3] m
    normal: NDArray[Any]  # [points, 3], of length 1
    face: NDArray[Any]  # [faces, 3] numbers of points, anticlockwise from outside


def surface_of(model: MjModel, geom: int) -> tuple[int, int] | None:
    """Returns the kind and the number of a geom's surface; None for a simple shape."""
    kind = int(model.geom_type[geom])
    return (kind, int(model.geom_dataid[geom])) if kind in (*MESHES, HFIELD) else None


def read_surface(model: MjModel, surface: tuple[int, int]) -> Surface:
    """Returns the triangles of a surface, by its kind and its number."""
    kind, number = surface
    return Surface(*(_hills if kind == HFIELD else _mesh)(model, number))


def describe_surface(surface: Surface) -> dict[str, Any]:
    """Packs the triangles of a surface; `web/src/data.js` unpacks them.

    `data` is base64 of gzip: uint32 numbers of points `[faces, 3]`, then uint16 places of points
    `[points, 3]` in the box from `low` with the sizes `size` in m, then int8 normals `[points, 3]`.
    """
    place, normal, face = surface
    low = place.min(0)
    size = np.maximum(place.max(0) - low, 1e-9)
    packed = face.astype("<u4").tobytes()
    packed += np.round((place - low) / size * _PLACES).astype("<u2").tobytes()
    packed += np.round(normal * _NORMALS).astype("<i1").tobytes()
    return {
        "points": len(place),
        "faces": len(face),
        "low": [float(f"{x:.7g}") for x in low],
        "size": [float(f"{x:.7g}") for x in size],
        "data": base64.b64encode(gzip.compress(packed, 9, mtime=0)).decode(),
    }


def _mesh(model: MjModel, number: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns the points of a mesh `[n, 3]`, their normals `[n, 3]` and its faces `[m, 3]`.

    A vertex at a sharp edge has several normals, as MuJoCo's compiler gave them, and so makes several points.
    """
    first, count = model.mesh_faceadr[number], model.mesh_facenum[number]
    vertex = model.mesh_face[first : first + count].ravel()
    turned = model.mesh_facenormal[first : first + count].ravel()
    pairs, face = np.unique(np.stack([vertex, turned], axis=1), axis=0, return_inverse=True)
    place = model.mesh_vert[model.mesh_vertadr[number] + pairs[:, 0]]
    normal = model.mesh_normal[model.mesh_normaladr[number] + pairs[:, 1]]
    return place, normal, face.reshape(-1, 3)


def _hills(model: MjModel, number: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns the same of the upper side of a height field."""
    rows, columns = int(model.hfield_nrow[number]), int(model.hfield_ncol[number])
    first, size = int(model.hfield_adr[number]), model.hfield_size[number]
    height = model.hfield_data[first : first + rows * columns].reshape(rows, columns) * size[2]
    y, x = (np.linspace(-s, s, n) for s, n in ((size[1], rows), (size[0], columns)))
    along, across = np.gradient(height, y, x)
    normal = np.stack([-across, -along, np.ones_like(height)], axis=-1).reshape(-1, 3)
    place = np.stack([*np.meshgrid(x, y), height], axis=-1).reshape(-1, 3)
    corner = np.arange(rows * columns).reshape(rows, columns)
    a, b, c, d = (corner[i : rows - 1 + i, k : columns - 1 + k] for i in (0, 1) for k in (0, 1))
    face = np.stack([a, b, d, a, d, c], axis=-1).reshape(-1, 3)
    return place, normal / np.linalg.norm(normal, axis=1, keepdims=True), face
