"""Coarser meshes: a page draws a robot many times a second, on machines without a graphics processor, too."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seedbed.named import require_packages
from seedbed.viewer.surfaces import Surface

MOST_FACES = 40_000
"""The most triangles of all meshes of a robot together, each counted as often as it is drawn."""
SMALL = 400
"""The most triangles of a mesh that is left as it is."""
_CREASE = np.cos(np.deg2rad(40.0))
"""Faces that meet at a larger angle keep an edge."""


def coarse(surfaces: list[Surface], used: list[int]) -> list[Surface]:
    """Returns surfaces that have MOST_FACES together, each counted as often as it is `used`.

    Those with SMALL triangles at most stay as they are, and no other gets fewer: there may be more then.
    """
    pairs = list(zip(surfaces, used, strict=True))
    small = sum(len(s.face) * count for s, count in pairs if len(s.face) <= SMALL)
    large = sum(len(s.face) * count for s, count in pairs if len(s.face) > SMALL)
    if small + large <= MOST_FACES or not large:
        return surfaces
    share = max(0.0, MOST_FACES - small) / large
    return [
        coarser(s, max(share, SMALL / len(s.face))) if len(s.face) > SMALL else s for s in surfaces
    ]


def coarser(surface: Surface, share: float) -> Surface:
    """Returns a surface with about `share` of its triangles."""
    require_packages("a page with fine meshes", "web", "fast_simplification")
    simplifier: Any = importlib.import_module("fast_simplification")
    place, which = np.unique(surface.place.astype(np.float32), axis=0, return_inverse=True)
    face = which.reshape(-1)[surface.face]
    face = face[(face != np.roll(face, 1, axis=1)).all(axis=1)]
    place, face = simplifier.simplify(place, face, target_reduction=1.0 - share)
    return creased(np.asarray(place, float), np.asarray(face))


def creased(place: NDArray[Any], face: NDArray[Any]) -> Surface:
    """Returns the surface of triangles, whose normals are smooth but where faces meet at a sharp angle."""
    corners = place[face]
    flat = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    face, flat = face[(flat != 0).any(axis=1)], flat[(flat != 0).any(axis=1)]
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    # All pairs of corners of faces at the same point, as runs of equal points in the sorted corners.
    point, owner = face.reshape(-1), np.repeat(np.arange(len(face)), 3)
    order = np.argsort(point, kind="stable")
    counts = np.bincount(point, minlength=len(place))[point[order]]
    starts = np.searchsorted(point[order], point[order])
    mine = np.repeat(np.arange(len(order)), counts)
    offset = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
    other = owner[order][starts[mine] + offset]
    near = (unit[owner[order][mine]] * unit[other]).sum(axis=1) >= _CREASE
    normal = np.zeros((len(order), 3))
    np.add.at(normal, mine[near], flat[other[near]])
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    corner = np.empty_like(normal)
    corner[order] = normal
    rows = np.concatenate([point[:, None], np.round(corner * 127)], axis=1)
    kept, index = np.unique(rows, axis=0, return_inverse=True)
    return Surface(
        place[kept[:, 0].astype(int)], kept[:, 1:] / 127, index.reshape(-1, 3).astype(np.uint32)
    )
