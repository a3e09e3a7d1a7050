"""Contacts of boxes: with planes, spheres and boxes. The colliders' form is that of `narrow`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from seedbed.physics import math
from seedbed.physics.narrow import Geom, Touch, unit
from seedbed.types import Array

_CORNERS = np.array([[-1, -1, -1], [1, -1, -1], [-1, 1, -1], [1, 1, -1]])
"""One of each two opposite corners of a box."""


def box_axes(box: Geom) -> tuple[Array, Array, Array]:
    """Returns the axes x, y and z [3] of a box."""
    return box.side, math.cross(box.axis, box.side), box.axis


def box_sizes(box: Geom) -> tuple[Array, Array, Array]:
    """Returns half of the lengths of a box along its axes."""
    return box.radius, box.half, box.depth


def plane_box(plane: Geom, box: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a plane with a box; four touches, at the lower of each two opposite corners (mjc_PlaneBox)."""
    height = math.dot(plane.axis, box.pos - plane.pos)
    arms = [size * axis for size, axis in zip(box_sizes(box), box_axes(box), strict=True)]
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
    axes, away = jnp.stack([jnp.asarray(axis) for axis in box_axes(box)]), ball.pos - box.pos
    center, size = math.apply(axes, away), jnp.stack(jnp.broadcast_arrays(*box_sizes(box)))
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


class _Frame(NamedTuple):
    """A box as another sees it: the way to its centre, its axes, and half of its lengths along them."""

    apart: Array  # [3]
    axes: list[Array]  # three of [3]
    sizes: list[Array]


class _Edge(NamedTuple):
    """The pair of edges across which two boxes are farthest apart, or overlap least."""

    sep: Array
    axis: Array  # [3] unit, at right angles to both; either way
    square: Array  # squared sine of the angle between them
    along: tuple[Array, Array]  # [3] each
    half: tuple[Array, Array]  # half of their lengths


def box_box(one: Geom, two: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides two boxes; eight touches, of which those in front exist.

    If boxes are farthest apart along the normal of a face, the other box's face that is turned to it most is
    cut to its outline, and each corner of what is left is a touch. If it is across two edges, the nearest
    points of these are one. A face is preferred to edges that are hardly better (mjc_BoxBox).
    """
    apart = two.pos - one.pos
    first = _Frame(apart, [jnp.asarray(x) for x in box_axes(one)], list(box_sizes(one)))
    second = _Frame(-apart, [jnp.asarray(x) for x in box_axes(two)], list(box_sizes(two)))
    eps = float(jnp.finfo(apart.dtype).eps)
    rounding = 8 * eps * functools.reduce(jnp.add, [*first.sizes, *second.sizes])
    face, code = _best_face(first, second)
    edge, beyond = _best_edge(first, second, face + rounding)
    meet = jnp.maximum(face, beyond) <= reach + rounding
    normal = pick([*first.axes, *second.axes], code)
    alike = jnp.abs(math.dot(edge.axis, normal)) > 0.99
    by_face = (edge.sep <= face) | (alike & (edge.sep < face + 0.05 * jnp.abs(face)))
    crossing = _crossing(first, second, edge)
    flat = _on_face(one.pos, two.pos, first, second, code)
    touches = []
    for k, touch in enumerate(flat):
        if not k:
            touch = Touch(
                jnp.where(by_face, touch.dist, crossing.dist),
                jnp.where(by_face, touch.pos, one.pos + crossing.pos),
                jnp.where(by_face, touch.normal, crossing.normal),
                None,
                touch.exists | ~by_face,
            )
        else:
            touch = touch._replace(exists=touch.exists & by_face)
        touches.append(touch._replace(exists=touch.exists & meet))
    return tuple(touches)


def pick(values: Sequence[Array], i: Array) -> Array:
    """Returns values[i], for a small number of values."""
    found = values[-1]
    for k in range(len(values) - 2, -1, -1):
        found = jnp.where(i == k, values[k], found)
    return found


def _best_face(first: _Frame, second: _Frame) -> tuple[Array, Array]:
    """Returns the largest separation along a face's normal, and the face (0 to 5)."""
    best, code = jnp.asarray(-jnp.inf, first.apart.dtype), jnp.int32(0)
    for k, (own, other) in enumerate(((first, second), (second, first))):
        for i, (axis, size) in enumerate(zip(own.axes, own.sizes, strict=True)):
            sep = jnp.abs(math.dot(axis, own.apart)) - size - _radius(other, axis)
            code = jnp.where(sep > best, 3 * k + i, code)
            best = jnp.maximum(best, sep)
    return best, code


def _radius(box: _Frame, axis: Array) -> Array:
    """Returns half of the width of a box along an axis."""
    parts = zip(box.axes, box.sizes, strict=True)
    return functools.reduce(jnp.add, [size * jnp.abs(math.dot(axis, x)) for x, size in parts])


def _best_edge(first: _Frame, second: _Frame, face: Array) -> tuple[_Edge, Array]:
    """Returns the best pair of edges, and the largest separation across edges.

    The separation of the best is -inf if none is larger than `face`, that of the best face, and its rounding.
    """
    dtype = first.apart.dtype
    parallel = 1e-7 if dtype == jnp.float32 else 1e-16
    zero, none = jnp.zeros(3, dtype), jnp.asarray(-jnp.inf, dtype)
    best = _Edge(none, zero, jnp.ones((), dtype), (zero, zero), (zero[0], zero[0]))
    bar, largest = face, none
    for along_1, half_1 in zip(first.axes, first.sizes, strict=True):
        for along_2, half_2 in zip(second.axes, second.sizes, strict=True):
            axis = math.cross(along_1, along_2)
            square = math.dot(axis, axis)
            fits = square >= parallel
            axis = axis * lax.rsqrt(jnp.where(fits, square, 1))
            sep = (
                jnp.abs(math.dot(axis, first.apart)) - _radius(first, axis) - _radius(second, axis)
            )
            sep = jnp.where(fits, sep, -jnp.inf)
            better = (sep - 1e-6 * jnp.abs(jnp.where(fits, sep, 0)) > bar) & (sep > face)
            new = _Edge(sep, axis, square, (along_1, along_2), (half_1, half_2))
            best = jax.tree.map(functools.partial(jnp.where, better), new, best)
            bar, largest = jnp.where(better, sep, bar), jnp.maximum(largest, sep)
    return best, largest


def _crossing(first: _Frame, second: _Frame, edge: _Edge) -> Touch:
    """Collides two edges; the position is relative to the first box."""
    axis = edge.axis * jnp.where(math.dot(edge.axis, first.apart) < 0, -1, 1)

    def middle(box: _Frame, along: Array, way: int) -> Array:
        """Returns the middle of the edge of a box that lies farthest along `way` times the axis."""
        arms = [
            x * jnp.where(math.dot(axis, x) >= 0, way * size, -way * size)
            for x, size in zip(box.axes, box.sizes, strict=True)
        ]
        corner = functools.reduce(jnp.add, arms)
        return corner - along * math.dot(along, corner)

    (along_1, along_2), (half_1, half_2) = edge.along, edge.half
    start_1 = middle(first, along_1, 1)
    start_2 = first.apart + middle(second, along_2, -1)
    gap = start_2 - start_1
    gap_1, gap_2, cos = (
        math.dot(a, b) for a, b in ((along_1, gap), (along_2, gap), (along_1, along_2))
    )
    s = jnp.clip((gap_1 - cos * gap_2) / edge.square, -half_1, half_1)
    t = jnp.clip(cos * s - gap_2, -half_2, half_2)
    s = jnp.clip(gap_1 + cos * t, -half_1, half_1)
    point_1, point_2 = start_1 + along_1 * s, start_2 + along_2 * t
    dist = math.dot(point_2 - point_1, axis)
    return Touch(dist, 0.5 * (point_1 + point_2), axis, None, jnp.bool_(True))


def _on_face(
    pos_1: Array, pos_2: Array, first: _Frame, second: _Frame, code: Array
) -> tuple[Touch, ...]:
    """Collides a face, 0 to 2 of the first box or 3 to 5 of the second, with the other box; eight touches."""
    own = code < 3
    a = jnp.where(own, code, code - 3)
    apart, axes, sizes = jax.tree.map(
        functools.partial(jnp.where, own), tuple(first), tuple(second)
    )
    other_axes, other_sizes = jax.tree.map(
        functools.partial(jnp.where, own), tuple(second)[1:], tuple(first)[1:]
    )
    # The face's frame: x and y along its sides, z out of it.
    x, y, normal = (pick(axes[k:] + axes[:k], a) for k in (1, 2, 0))
    size_x, size_y, size_z = (pick(sizes[k:] + sizes[:k], a) for k in (1, 2, 0))
    up = jnp.where(math.dot(normal, apart) >= 0, 1, -1).astype(apart.dtype)
    z = normal * up
    slopes = [jnp.abs(math.dot(z, axis)) for axis in other_axes]
    steep = jnp.where(slopes[1] > slopes[0], jnp.int32(1), 0)
    steep = jnp.where(slopes[2] > jnp.maximum(slopes[0], slopes[1]), 2, steep)
    u, v, w = (pick(other_axes[k:] + other_axes[:k], steep) for k in (1, 2, 0))
    size_u, size_v, size_w = (pick(other_sizes[k:] + other_sizes[:k], steep) for k in (1, 2, 0))
    w = w * jnp.where(math.dot(z, w) > 0, -size_w, size_w)

    def local(way: Array) -> Array:
        return jnp.stack([math.dot(axis, way) for axis in (x, y, z)])

    centre = local(apart + w) - jnp.stack([jnp.zeros_like(size_z), jnp.zeros_like(size_z), size_z])
    corners = _outline(centre, local(u * size_u), local(v * size_v), (size_x, size_y))
    base = jnp.where(own, pos_1, pos_2)
    out = jnp.where(own, z, -z)
    touches = []
    for exists, (along, across, dist) in corners:
        pos = base + x * along + y * across + z * (size_z + 0.5 * dist)
        touches.append(Touch(dist, pos, out, None, exists))
    return tuple(touches)


def _outline(
    centre: Array, u: Array, v: Array, sizes: tuple[Array, Array]
) -> list[tuple[Array, list[Array]]]:
    """Cuts a parallelogram to the rectangle |x| <= sizes[0], |y| <= sizes[1]; z is carried along.

    `u` and `v` [3] are half of its sides. Returns eight corners (x, y, z), of which those in front exist.
    """
    found: list[tuple[Array, Array]] = []
    # On each side, the first point in the rectangle; the last, too, if it is not the next side's first.
    for sign_u, sign_v, side in ((1, 1, -2 * u), (-1, 1, -2 * v), (-1, -1, 2 * u), (1, -1, 2 * v)):
        corner = centre + sign_u * u + sign_v * v
        first, last = _within(corner, side, sizes)
        found.append((first <= last, corner + side * first))
        found.append(((first <= last) & (last < 1), corner + side * last))
    det = u[0] * v[1] - u[1] * v[0]
    det = jnp.where(jnp.abs(det) > 0, det, 1)
    for sign_x, sign_y in ((1, 1), (-1, 1), (-1, -1), (1, -1)):
        at_x, at_y = sign_x * sizes[0], sign_y * sizes[1]
        way_x, way_y = at_x - centre[0], at_y - centre[1]
        of_u, of_v = (way_x * v[1] - way_y * v[0]) / det, (u[0] * way_y - u[1] * way_x) / det
        inside = (jnp.abs(of_u) <= 1) & (jnp.abs(of_v) <= 1)
        height = centre[2] + of_u * u[2] + of_v * v[2]
        found.append((inside, jnp.stack([at_x, at_y, height])))
    return _packed(found, sizes)


def _within(corner: Array, side: Array, sizes: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the first and last t, from 0 to 1, at which corner + side t is in the rectangle."""
    first, last = jnp.zeros_like(side[0]), jnp.ones_like(side[0])
    tiny = float(jnp.finfo(side.dtype).tiny) ** 0.5
    for k, size in enumerate(sizes):
        way = jnp.where(jnp.abs(side[k]) > tiny, side[k], tiny)
        ends = (-size - corner[k]) / way, (size - corner[k]) / way
        first = jnp.maximum(first, jnp.minimum(*ends))
        last = jnp.minimum(last, jnp.maximum(*ends))
    return first, last


def _packed(
    found: list[tuple[Array, Array]], sizes: tuple[Array, Array]
) -> list[tuple[Array, list[Array]]]:
    """Returns the points that exist, without those that are there twice, in the first of eight places."""
    dtype = found[0][1].dtype
    near = 1e-10 if dtype == jnp.float32 else 1e-14
    near = near * (sizes[0] * sizes[0] + sizes[1] * sizes[1])
    kept: list[Array] = []
    for k, (exists, point) in enumerate(found):
        for i in range(k):
            way = point[:2] - found[i][1][:2]
            exists = exists & ~(kept[i] & (math.dot(way, way) < near))
        kept.append(exists)
    places, number = [], jnp.int32(0)
    for exists in kept:
        places.append(number)
        number = number + exists
    packed = []
    for place in range(8):
        taken, values = jnp.bool_(False), [jnp.zeros((), dtype)] * 3
        for k in range(place, len(found)):
            here = kept[k] & (places[k] == place)
            point = math.unstack(found[k][1])
            values = [jnp.where(here, new, old) for new, old in zip(point, values, strict=True)]
            taken = taken | here
        packed.append((taken, values))
    return packed
