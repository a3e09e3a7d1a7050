"""Contacts of a capsule and a box: up to two, each of a sphere on the capsule's segment (mjc_CapsuleBox)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seedbed.physics import math
from seedbed.physics.boxes import box_axes, box_sizes, pick, sphere_box
from seedbed.physics.narrow import Geom, Touch
from seedbed.types import Array


class _Segment(NamedTuple):
    """The capsule's segment, centre + arm t for t from -1 to 1, and half of the box's sides; in its axes."""

    centre: list[Array]
    arm: list[Array]
    half: Array  # of the segment's length
    sizes: list[Array]


class _Nearest(NamedTuple):
    """The nearest point of the segment, and the part of the box that it is nearest to."""

    square: Array  # of the distance
    t: Array  # on the segment
    face: Array  # int32: 0 to 2 if an end is over a face across that axis, else -1
    edge: Array  # int32: 0 to 2 if the part is an edge along that axis, else -1
    at: Array  # on the edge, from -1 to 1
    corner: Array  # int32: bits for the signs of the corner, or of the edge's lower end
    middle: Array  # bool: neither end of the edge


def capsule_box(capsule: Geom, box: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a capsule with a box; two touches, at the nearest point of the segment and one more.

    The second is the farthest point of the segment that is over the same face or along the same edge; it
    does not exist where the segment points away from the box.
    """
    axes = [jnp.asarray(axis) for axis in box_axes(box)]
    apart = capsule.pos - box.pos
    way = [math.dot(axis, capsule.axis) for axis in axes]
    segment = _Segment(
        centre=[math.dot(axis, apart) for axis in axes],
        arm=[x * capsule.half for x in way],
        half=capsule.half,
        sizes=list(box_sizes(box)),
    )
    nearest = _nearest(segment)
    again, step = _second(segment, way, nearest)

    def ball(t: Array) -> Touch:
        centre = capsule.pos + capsule.axis * (capsule.half * t)
        return sphere_box(capsule._replace(pos=centre), box, reach)[0]

    return ball(nearest.t), ball(nearest.t + jnp.where(again, step, 0))._replace(exists=again)


def _nearest(segment: _Segment) -> _Nearest:
    centre, arm, half, sizes = segment
    dtype = centre[0].dtype
    none = jnp.int32(-1)
    zero = jnp.zeros((), dtype)
    best = _Nearest(
        jnp.asarray(jnp.inf, dtype), zero, none, none, zero, jnp.int32(0), jnp.bool_(False)
    )
    for t in (-1, 1):
        end = [c + t * a for c, a in zip(centre, arm, strict=True)]
        over = [jnp.maximum(jnp.abs(x) - size, 0) for x, size in zip(end, sizes, strict=True)]
        outside = [x > 0 for x in over]
        face = functools.reduce(
            lambda found, k: jnp.where(outside[k], k, found), range(3), jnp.int32(-1)
        )
        square = functools.reduce(jnp.add, [x * x for x in over])
        alone = functools.reduce(jnp.add, [x.astype(jnp.int32) for x in outside]) <= 1
        new = _Nearest(
            square, jnp.asarray(t, dtype), face, none, zero, jnp.int32(0), jnp.bool_(False)
        )
        better = alone & (square < best.square)
        best = jax.tree.map(functools.partial(jnp.where, better), new, best)
    # Of equals, the first counts.
    eps = float(jnp.finfo(dtype).eps)
    equal = 4 * eps * (half * half + functools.reduce(jnp.add, [x * x for x in sizes]))
    for j in range(3):
        for i in range(8):
            if not i & (1 << j):
                new = _edge(segment, j, i)
                better = new.square < best.square - equal
                best = jax.tree.map(functools.partial(jnp.where, better), new, best)
    return best


def _edge(segment: _Segment, j: int, i: int) -> _Nearest:
    """Returns the nearest points of the segment and of the edge along axis j at corner i (its bits)."""
    centre, arm, half, sizes = segment
    size = sizes[j]
    start = [(0 if k == j else (1 if i & (1 << k) else -1)) * sizes[k] for k in range(3)]
    gap = [s - c for s, c in zip(start, centre, strict=True)]
    others = [k for k in range(3) if k != j]
    # The arm's part across the edge; MuJoCo's determinants, without their common parts, which would cancel.
    across = functools.reduce(jnp.add, [arm[k] * arm[k] for k in others])
    reach = functools.reduce(jnp.add, [arm[k] * gap[k] for k in others])
    fits = size * size * across >= 1e-15
    divisor = jnp.where(fits, across, 1)
    of_edge = (arm[j] * reach - gap[j] * across) / (divisor * size)
    of_arm = reach / divisor
    along, square = arm[j] * size, half * half
    whole = reach + arm[j] * gap[j]
    clamped = jnp.clip(of_edge, -1, 1)
    of_arm = jnp.where(clamped == of_edge, of_arm, (whole + clamped * along) / square)
    held = jnp.clip(of_arm, -1, 1)
    again = jnp.where(held == of_arm, clamped, (held * arm[j] - gap[j]) / size)
    # MuJoCo counts an end of the edge that was met on the way, even if the point is elsewhere at last.
    end = jnp.where(jnp.abs(again) > 1, again, jnp.where(jnp.abs(of_edge) > 1, of_edge, 0))
    of_edge = jnp.clip(again, -1, 1)
    ways = [gap[k] - arm[k] * held + (size * of_edge if k == j else 0) for k in range(3)]
    distance = functools.reduce(jnp.add, [x * x for x in ways])
    return _Nearest(
        square=jnp.where(fits, distance, jnp.inf),
        t=held,
        face=jnp.int32(-1),
        edge=jnp.int32(j),
        at=of_edge,
        corner=jnp.where(end > 0, i | (1 << j), i).astype(jnp.int32),
        middle=end == 0,
    )


def _second(segment: _Segment, way: list[Array], nearest: _Nearest) -> tuple[Array, Array]:
    """Returns whether there is a second point, and how far along the segment from the first."""
    towards = functools.reduce(
        jnp.bitwise_or, [jnp.where(x > 0, jnp.int32(1 << k), 0) for k, x in enumerate(segment.arm)]
    )
    turned = towards ^ nearest.corner
    at_corner = _from_corner(segment, way, nearest, turned)
    on_edge = _along_edge(segment, way, nearest, turned, towards)
    over_face = _over_face(segment, nearest)
    found = jax.tree.map(functools.partial(jnp.where, nearest.middle), on_edge, at_corner)
    return jax.tree.map(functools.partial(jnp.where, nearest.edge < 0), over_face, found)


def _past(segment: _Segment) -> list[Array]:
    """Returns by how much t grows on the way through the box, along each axis."""
    tiny = float(jnp.finfo(segment.arm[0].dtype).tiny) ** 0.5
    pairs = zip(segment.sizes, segment.arm, strict=True)
    return [2 * size / jnp.maximum(jnp.abs(arm), tiny) for size, arm in pairs]


def _from_corner(
    segment: _Segment, way: list[Array], nearest: _Nearest, turned: Array
) -> tuple[Array, Array]:
    """Goes on from a corner along an edge, or over a face."""
    one = (turned == 1) | (turned == 2) | (turned == 4)
    bit = jnp.where(one, turned, 7 - turned)
    axis = jnp.where(bit == 1, 0, jnp.where(bit == 2, jnp.int32(1), 2))
    sign = jnp.where(one, 1, -1).astype(nearest.t.dtype)
    ahead, behind = 1 - sign * nearest.t, 1 + sign * nearest.t
    past = _past(segment)
    steep = jnp.square(pick(way, axis)) > 0.5
    edge = jnp.minimum(ahead, pick(past, axis))
    face = jnp.minimum(
        behind, jnp.minimum(pick(past[1:] + past[:1], axis), pick(past[2:] + past[:2], axis))
    )
    return (turned != 0) & (turned != 7), sign * jnp.where(steep, edge, -face)


def _along_edge(
    segment: _Segment, way: list[Array], nearest: _Nearest, turned: Array, towards: Array
) -> tuple[Array, Array]:
    """Goes on from the middle of an edge, over the face to which the segment has the lower angle."""
    axis = nearest.edge
    turned = turned & (7 - (1 << jnp.maximum(axis, 0)))
    slopes = [jnp.abs(x) for x in way]
    next_1, next_2 = (axis + 1) % 3, (axis + 2) % 3
    swap = pick(slopes, next_1) > pick(slopes, next_2)
    across = jnp.where(swap, next_1, next_2)
    on = (turned & (1 << across)) != 0
    sign = jnp.where(on, 1, -1).astype(nearest.t.dtype)
    past = _past(segment)
    same = ((towards & (1 << jnp.maximum(axis, 0))) != 0) == on
    left = jnp.where(same, 1 - nearest.at, 1 + nearest.at)
    step = jnp.minimum(1 - sign * nearest.t, pick(past, across))
    step = jnp.minimum(step, 0.5 * left * pick(past, axis))
    return (turned == 1) | (turned == 2) | (turned == 4), sign * step


def _over_face(segment: _Segment, nearest: _Nearest) -> tuple[Array, Array]:
    """Goes on from an end over a face to the other end, or to where the segment leaves the face."""
    sign = -nearest.t
    tiny = float(jnp.finfo(sign.dtype).tiny) ** 0.5
    step = 2 * jnp.ones_like(sign)
    for k, (centre, arm, size) in enumerate(
        zip(segment.centre, segment.arm, segment.sizes, strict=True)
    ):
        end = centre + arm * nearest.t
        rate = jnp.where(jnp.abs(arm) > tiny, arm, tiny) * sign
        for side in (size, -size):
            here = (side - end) / rate
            nearer = (nearest.face != k) & (here > 0) & (here < step)
            step = jnp.where(nearer, here, step)
    return nearest.face >= 0, sign * step
