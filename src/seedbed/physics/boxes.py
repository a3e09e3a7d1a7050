"""Contacts of boxes: with a plane, and with a sphere. The colliders' form is that of `narrow`."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.physics.narrow import Geom, Touch, unit
from seedbed.types import Array

_CORNERS = np.array([[-1, -1, -1], [1, -1, -1], [-1, 1, -1], [1, 1, -1]])
"""One of each two opposite corners of a box."""


def _axes(box: Geom) -> tuple[Array, Array, Array]:
    return box.side, math.cross(box.axis, box.side), box.axis


def _sizes(box: Geom) -> tuple[Array, Array, Array]:
    return box.radius, box.half, box.depth


def plane_box(plane: Geom, box: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a plane with a box; four touches, at the lower of each two opposite corners (mjc_PlaneBox)."""
    height = math.dot(plane.axis, box.pos - plane.pos)
    arms = [size * axis for size, axis in zip(_sizes(box), _axes(box), strict=True)]
    touches = []
    for signs in _CORNERS:
        corner = functools.reduce(jnp.add, [s * a for s, a in zip(signs, arms, strict=True)])
        rise = math.dot(plane.axis, corner)
        corner, rise = corner * jnp.where(rise > 0, -1, 1), -jnp.abs(rise)
        dist = height + rise
        pos = box.pos + corner - plane.axis * (0.5 * dist)
        touches.append(Touch(dist, pos, plane.axis, None, jnp.bool_(True)))
    return tuple(touches)


def sphere_box(ball: Geom, box: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a sphere with the nearest point of a box, or of its surface from inside; one touch.

    Source: mjraw_SphereBox.
    """
    axes, away = jnp.stack([jnp.asarray(axis) for axis in _axes(box)]), ball.pos - box.pos
    center, size = math.apply(axes, away), jnp.stack(jnp.broadcast_arrays(*_sizes(box)))
    nearest = jnp.clip(center, -size, size)
    length, outward = unit(nearest - center)
    # The nearest face, of those of equal distance the first: -x, x, -y, y, -z, z.
    depth = size - jnp.abs(center)
    x, y, z = math.unstack(depth)
    way = jnp.where(center > 0, -1, 1).astype(center.dtype)
    first = jnp.stack([(x <= y) & (x <= z), (x > y) & (y <= z), (x > z) & (y > z)])
    inward = jnp.where(first, way, 0)
    least = jnp.minimum(jnp.minimum(x, y), z)
    inside = length <= 0
    dist = jnp.where(inside, -least, length) - ball.radius
    local = jnp.where(
        inside,
        center + inward * (0.5 * (ball.radius - least)),
        0.5 * (nearest + center + outward * ball.radius),
    )
    normal = math.apply(axes.T, jnp.where(inside, inward, outward))
    pos = box.pos + math.apply(axes.T, local)
    return (Touch(dist, pos, normal, None, jnp.bool_(True)),)
