"""Contacts of one pair of geoms: distance, point and normal, as in MuJoCo's colliders.

Each collider takes two geoms, in MuJoCo's order of types, and a distance `reach`. It returns as many touches
as the pair can have (engine_collision_primitive.c). For a capsule and a cylinder, the collider compares the
capsule's segment with the solid cylinder. If the capsule lies on a disc, the contacts are the two ends of the
part that lies on it (engine_collision_gjk.c, multicontact).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from seedbed.physics import math
from seedbed.physics.roots import root_of
from seedbed.types import Array

PLANE, SPHERE, CAPSULE, CYLINDER, BOX = 0, 2, 3, 5, 6
"""MuJoCo's numbers for the geom types (mjtGeom)."""
LEVEL = 0.0888
"""Sine of the largest angle between a capsule and a disc at which MuJoCo (4.0) lets the capsule lie on it."""
SIDES = 16
"""Corners of the polygon that MuJoCo uses for a cylinder's disc; one is on the cylinder's x axis."""


class Geom(NamedTuple):
    """The pose and size of a geom, in world axes."""

    pos: Array  # [3]
    axis: Array  # [3] its z axis: a plane's normal, a capsule's or cylinder's axis
    side: Array  # [3] its x axis
    radius: Array  # of a box, half of its length along x
    half: Array  # half of the length; 0 for a sphere; of a box, along y
    depth: Array = np.zeros(())  # of a box, half of its length along z


class Touch(NamedTuple):
    """One contact. The normal points from the first geom to the second."""

    dist: Array  # negative if the geoms overlap
    pos: Array  # [3] midway between the surfaces
    normal: Array  # [3]
    tangent: Array | None  # [3] preferred first tangent; None: MuJoCo's default
    exists: Array  # bool: the pair makes this contact if it is near enough


Collider = Callable[[Geom, Geom, Array], tuple[Touch, ...]]


def unit(v: Array) -> tuple[jax.Array, jax.Array]:
    """Returns the length of v [3] and its direction [3]; 0 and the x axis if v is zero (mju_normalize3)."""
    square = math.dot(v, v)
    fits = square > math.MIN_SQUARE
    length = jnp.sqrt(jnp.where(fits, square, 1))
    x_axis = jnp.stack([jnp.ones_like(length), jnp.zeros_like(length), jnp.zeros_like(length)])
    return jnp.where(fits, length, 0), jnp.where(fits, v / length, x_axis)


def unit2(v: Array) -> jax.Array:
    """Returns the direction of v [2], which must not be zero."""
    return v / jnp.sqrt(math.dot(v, v))


def frame(normal: Array, tangent: Array | None) -> jax.Array:
    """Makes a contact frame [3, 3] with rows normal, first and second tangent (mju_makeFrame)."""
    if tangent is None:
        upright = jnp.abs(normal[1]) < 0.5
        one, zero = jnp.ones_like(normal[0]), jnp.zeros_like(normal[0])
        tangent = jnp.stack([zero, jnp.where(upright, one, zero), jnp.where(upright, zero, one)])
    # (n x t) x n is t without its part along n. It is exactly level for a level plane.
    _, first = unit(math.cross(math.cross(normal, tangent), normal))
    return jnp.stack([jnp.asarray(normal), first, math.cross(normal, first)])


def plane_sphere(plane: Geom, ball: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a plane with a sphere; one touch."""
    return (_plane_point(plane, ball.pos, ball.radius, None),)


def plane_capsule(plane: Geom, capsule: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a plane with the two ends of a capsule; two touches, the first tangent along the capsule."""
    arm = capsule.axis * capsule.half
    ends = capsule.pos + arm, capsule.pos - arm
    return tuple(_plane_point(plane, end, capsule.radius, capsule.axis) for end in ends)


def _plane_point(plane: Geom, centre: Array, radius: Array, tangent: Array | None) -> Touch:
    dist = math.dot(plane.axis, centre - plane.pos) - radius
    pos = centre - plane.axis * (0.5 * dist + radius)
    return Touch(dist, pos, plane.axis, tangent, jnp.bool_(True))


def plane_cylinder(plane: Geom, cylinder: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a plane with a cylinder; four touches, which exist if the lowest point is within reach.

    They are the lowest points of both discs, and two more points on the rim of the lower disc.
    """
    normal = plane.axis
    slope = math.dot(normal, cylinder.axis)
    # With this sign the axis points towards the plane.
    down = jnp.where(slope > 0, -1, 1).astype(slope.dtype)
    axis, slope = cylinder.axis * down, slope * down
    # The normal's part across the axis, as a product of products: a difference would cancel where the
    # cylinder stands upright.
    tilt, hinge = unit(math.cross(axis, normal))
    direction = math.cross(axis, hinge)
    fits = tilt > 0
    rim = jnp.where(fits, direction, cylinder.side) * cylinder.radius
    arm, slope = axis * cylinder.half, slope * cylinder.half
    height = math.dot(cylinder.pos - plane.pos, normal)
    drop = -tilt * cylinder.radius
    _, across = unit(math.cross(rim, arm))
    across = across * (cylinder.radius * 3**0.5 / 2)
    lowest = height + slope + drop
    level = height + slope - 0.5 * drop
    near = lowest <= reach

    def touch(dist: Array, offset: Array) -> Touch:
        pos = cylinder.pos + offset - normal * (0.5 * dist)
        return Touch(dist, pos, normal, None, near)

    return (
        touch(lowest, rim + arm),
        touch(height - slope + drop, rim - arm),
        touch(level, across + arm - 0.5 * rim),
        touch(level, arm - across - 0.5 * rim),
    )


def sphere_sphere(a: Geom, b: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides two spheres; one touch."""
    return (_balls(a, a.pos, b, b.pos, jnp.bool_(True)),)


def _balls(a: Geom, at_a: Array, b: Geom, at_b: Array, exists: Array) -> Touch:
    """Collides two spheres, with the geoms' radii, around points of the geoms (mjraw_SphereSphere)."""
    length, direction = unit(at_b - at_a)
    _, axes_normal = unit(math.cross(a.axis, b.axis))
    normal = jnp.where(length > 0, direction, axes_normal)
    dist = length - a.radius - b.radius
    return Touch(dist, at_a + normal * (a.radius + 0.5 * dist), normal, None, exists)


def sphere_capsule(ball: Geom, capsule: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a sphere with the nearest point of a capsule's segment; one touch."""
    along = math.dot(capsule.axis, ball.pos - capsule.pos)
    nearest = capsule.pos + capsule.axis * jnp.clip(along, -capsule.half, capsule.half)
    return (_balls(ball, ball.pos, capsule, nearest, jnp.bool_(True)),)


def capsule_capsule(a: Geom, b: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides two capsules at the nearest points of their segments; two touches.

    The second touch exists only if the segments are parallel. The touches are then the ends of the overlap.
    """
    arm_a, arm_b, apart = a.axis * a.half, b.axis * b.half, a.pos - b.pos
    aa, ab, bb = math.dot(arm_a, arm_a), math.dot(arm_a, arm_b), math.dot(arm_b, arm_b)
    u, v = -math.dot(arm_a, apart), math.dot(arm_b, apart)
    # Products of cross products equal the determinants in MuJoCo's formula, but do not cancel.
    normal = math.cross(arm_a, arm_b)
    det = math.dot(normal, normal)
    parallel = det < 1e-8 * aa * bb
    x_a = math.dot(normal, math.cross(arm_b, apart)) / jnp.where(parallel, 1, det)
    x_a = jnp.clip(x_a, -1, 1)
    x_b = (v + ab * x_a) / bb
    x_a = jnp.where(jnp.abs(x_b) > 1, jnp.clip((u + ab * jnp.clip(x_b, -1, 1)) / aa, -1, 1), x_a)
    end = jnp.abs(ab)
    low, high = jnp.clip((u - end) / aa, -1, 1), jnp.clip((u + end) / aa, -1, 1)

    def touch(at: Array, exists: Array) -> Touch:
        other = jnp.clip((v + ab * at) / bb, -1, 1)
        return _balls(a, a.pos + arm_a * at, b, b.pos + arm_b * other, exists)

    return touch(jnp.where(parallel, low, x_a), jnp.bool_(True)), touch(high, parallel)


def sphere_cylinder(ball: Geom, cylinder: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a sphere's centre with the solid cylinder; one touch."""
    return (_segment_cylinder(ball, cylinder),)


def capsule_cylinder(capsule: Geom, cylinder: Geom, reach: Array) -> tuple[Touch, ...]:
    """Collides a capsule's segment with the solid cylinder; two touches.

    The second touch exists only if the capsule lies on a disc: it is parallel to the disc and touches along
    the disc's normal, both within LEVEL. The touches are then the ends of the part over the disc, and each
    has its own distance (multicontact). MuJoCo's iterative collider gives the same result, to its tolerance
    of 1e-6. MuJoCo 4.0.0 also makes two contacts if a level capsule touches the rim from the side, with any
    normal, and lists a single end twice; here each of these is one contact.
    """
    alone = _segment_cylinder(capsule, cylinder)
    slope, upright = (math.dot(v, cylinder.axis) for v in (capsule.axis, alone.normal))
    up = cylinder.axis * jnp.where(upright > 0, -1, 1).astype(slope.dtype)
    # MuJoCo inflates both geoms by half of the reach and compares the capsule's nearest line with the disc.
    margin = 0.5 * reach
    down = alone.normal - capsule.axis * math.dot(capsule.axis, alone.normal)
    line = capsule.pos - cylinder.pos + down * (capsule.radius + margin)
    arm = capsule.axis * capsule.half
    first, last = _over_disc(line, arm, cylinder)
    ends = [line + arm * t for t in (first, last)]
    heights = [math.dot(up, end) - (cylinder.half + margin) for end in ends]
    lower, higher = heights[0] <= heights[1], heights[0] > heights[1]
    level = (jnp.abs(slope) < LEVEL) & (jnp.abs(upright) > (1 - LEVEL**2) ** 0.5)
    lies = level & (first < last) & (jnp.minimum(*heights) < 0)

    def touch(at_first: Array) -> Touch:
        height = jnp.where(at_first, *heights)
        pos = cylinder.pos + jnp.where(at_first, *ends) - up * (0.5 * height)
        return Touch(height + reach, pos, -up, None, lies)

    first_end = touch(lower)
    first_touch = Touch(
        dist=jnp.where(lies, first_end.dist, alone.dist),
        pos=jnp.where(lies, first_end.pos, alone.pos),
        normal=jnp.where(lies, first_end.normal, alone.normal),
        tangent=None,
        exists=alone.exists,
    )
    return first_touch, touch(higher)


def _over_disc(line: Array, arm: Array, cylinder: Geom) -> tuple[Array, Array]:
    """Returns the first and last t, from -1 to 1, at which line + arm t is over MuJoCo's polygon of a disc.

    If there is no such t, the first is not below the last. `line` [3] is relative to the cylinder's centre.
    """
    x, y = cylinder.side, math.cross(cylinder.axis, cylinder.side)
    # One normal for each pair of opposite sides.
    angles = (2 * np.arange(SIDES // 2) + 1) * (np.pi / SIDES)
    normals = [(float(np.cos(a)), float(np.sin(a))) for a in angles]
    across, along = (
        jnp.stack([c * math.dot(v, x) + s * math.dot(v, y) for c, s in normals])
        for v in (line, arm)
    )
    slant = jnp.maximum(jnp.abs(along), jnp.finfo(along.dtype).tiny ** 0.5)
    middle = jnp.where(along > 0, -across, across)
    apothem = cylinder.radius * float(np.cos(np.pi / SIDES))
    first = ((middle - apothem) / slant).max()
    last = ((middle + apothem) / slant).min()
    return jnp.maximum(first, -1), jnp.minimum(last, 1)


def _segment_cylinder(capsule: Geom, cylinder: Geom) -> Touch:
    """Collides the nearest point of a capsule's segment with the solid cylinder; a sphere's is its centre.

    If the segment meets the cylinder, the touch has the normal of the shortest way out: through a disc, the
    side or a rim.
    """
    arm, apart = capsule.axis * capsule.half, capsule.pos - cylinder.pos
    t, outward, distance = _outside(arm, apart, cylinder)
    inside = distance == 0
    # A rim's search finds a side, too, but not where on it: of equals, the first counts.
    equal = 16 * jnp.finfo(distance.dtype).eps * (cylinder.radius + cylinder.half)
    for way_out in (_through_disc, _through_side, _through_rim):
        here, normal, depth = way_out(arm, apart, cylinder)
        nearer = inside & ((distance == 0) | (-depth > distance + equal))
        t, distance = jnp.where(nearer, here, t), jnp.where(nearer, -depth, distance)
        outward = jnp.where(nearer, normal, outward)
    dist = distance - capsule.radius
    pos = capsule.pos + arm * t - outward * (capsule.radius + 0.5 * dist)
    return Touch(dist, pos, -outward, None, jnp.bool_(True))


def _outside(arm: Array, apart: Array, cylinder: Geom) -> tuple[Array, Array, Array]:
    """Finds the nearest points of a segment and a solid cylinder.

    The distance is convex along the segment; its slope is bisected. Returns the place on the segment (-1 to
    1), the normal out of the cylinder, and the distance, which is zero if the two meet.
    """

    def excess(t: Array, given: tuple[Array, Array, Geom]) -> tuple[Array, Array, Array, Array]:
        arm, apart, cylinder = given
        z = cylinder.axis
        apart_z, arm_z = math.dot(z, apart), math.dot(z, arm)
        apart_r, arm_r = apart - z * apart_z, arm - z * arm_z
        length, direction = unit(apart_r + arm_r * t)
        along = apart_z + arm_z * t
        over = jnp.maximum(length - cylinder.radius, 0)
        above = jnp.sign(along) * jnp.maximum(jnp.abs(along) - cylinder.half, 0)
        return over, direction, above, over * math.dot(direction, arm_r) + above * arm_z

    def find(given: tuple[Array, Array, Geom]) -> jax.Array:
        def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
            t = 0.5 * (bracket[0] + bracket[1])
            rising = excess(t, given)[3] > 0
            return jnp.where(rising, bracket[0], t), jnp.where(rising, t, bracket[1])

        one = jnp.ones_like(math.dot(given[2].axis, given[1]))
        halvings = jnp.finfo(one.dtype).nmant + 1
        return lax.fori_loop(0, halvings, halve, (-one, one))[0]

    given = arm, apart, cylinder
    t = root_of(lambda t, given: excess(t, given)[3], find, given)
    over, direction, above, _ = excess(t, given)
    distance, outward = unit(direction * over + cylinder.axis * above)
    return t, outward, distance


def _through_disc(arm: Array, apart: Array, cylinder: Geom) -> tuple[Array, Array, Array]:
    """Returns the place (-1 to 1), normal and depth of a segment's deepest point under the nearer disc."""
    apart_z, arm_z = math.dot(cylinder.axis, apart), math.dot(cylinder.axis, arm)
    side = jnp.where(apart_z < 0, -1, 1).astype(apart_z.dtype)
    place = jnp.where(arm_z * side > 0, -1, 1).astype(apart_z.dtype)
    return place, cylinder.axis * side, cylinder.half - side * (apart_z + arm_z * place)


def _through_side(arm: Array, apart: Array, cylinder: Geom) -> tuple[Array, Array, Array]:
    """Returns the place (-1 to 1), normal and depth of a segment's deepest point under a cylinder's side."""
    z = cylinder.axis
    arm, apart = arm - z * math.dot(z, arm), apart - z * math.dot(z, apart)
    square = math.dot(arm, arm)
    place = -math.dot(apart, arm) / jnp.where(square > math.MIN_SQUARE, square, 1)
    place = jnp.clip(place, -1, 1)
    length, outward = unit(apart + arm * place)
    _, across = unit(math.cross(z, arm))
    return place, jnp.where(length > 0, outward, across), cylinder.radius - length


class _Tilt(NamedTuple):
    """A segment under the rim of a cylinder, as `_through_rim` sees it."""

    c: Array
    a: Array
    b: Array
    radius: Array
    half: Array
    slant: Array


def _through_rim(arm: Array, apart: Array, cylinder: Geom) -> tuple[Array, Array, Array]:
    """Returns the place (-1 to 1), normal and depth of a segment under the rim of a cylinder.

    The normal is at a right angle to the segment: u cos f + w sin f, with u parallel to the discs. The depth
    is then R sqrt(1 - (c sin f)^2) + h c sin f - a cos f - b sin f. Its slope over cos f is convex in tan f,
    and the depth is least at the root beyond the slope's own minimum. Bisection finds that root.
    """
    z, radius, half = cylinder.axis, cylinder.radius, cylinder.half
    length, along = unit(arm)
    c, u = unit(math.cross(z, along))
    w = math.cross(along, u)
    a, b = jnp.abs(math.dot(apart, u)), jnp.abs(math.dot(apart, w))
    tilt = _Tilt(c, a, b, radius, half, jnp.abs(math.dot(along, z)))
    cos, sin = root_of(_slope_of_depth, _least_depth, tilt, lambda x: jnp.stack([-x[1], x[0]]))
    root = jnp.sqrt(jnp.maximum(1 - (c * sin) ** 2, 1e-15))
    depth = radius * root + half * c * sin - a * cos - b * sin
    to_u = jnp.where(math.dot(apart, u) < 0, -1, 1) * cos
    to_w = jnp.where(math.dot(apart, w) < 0, -1, 1) * sin
    normal = u * to_u + w * to_w
    normal_z = math.dot(normal, z)
    _, radial = unit(normal - z * normal_z)
    rim = radial * radius + z * jnp.where(normal_z < 0, -half, half)
    place = jnp.clip(math.dot(rim - apart, along) / jnp.where(length > 0, length, 1), -1, 1)
    oblique = (length > 0) & (c > 1e-6)
    return place, normal, jnp.where(oblique, depth, radius + half)


def _slope_of_depth(x: Array, tilt: _Tilt) -> Array:
    """Returns the derivative of the depth by f, at x = [cos f, sin f]."""
    c, a, b, radius, half, _ = tilt
    cos, sin = math.unstack(x)
    root = jnp.sqrt(jnp.maximum(1 - (c * sin) ** 2, 1e-15))
    return (half * c - b - radius * c * c * sin / root) * cos + a * sin


def _least_depth(tilt: _Tilt) -> jax.Array:
    """Returns [cos f, sin f] where the depth is least."""
    c, a, _, radius, _, slant = tilt
    bend = jnp.maximum(radius * c * c / jnp.maximum(a, 1e-15), 1) ** (2 / 3) - 1

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = unit2(ends[0] + ends[1])
        slope = _slope_of_depth(middle, tilt)
        return jnp.where(slope > 0, ends[0], middle), jnp.where(slope > 0, middle, ends[1])

    # In the limit of a level segment the search begins at cos f = 1.
    level = (slant <= 0) & (bend <= 0)
    first = unit2(jnp.stack([jnp.where(level, 1, slant), jnp.sqrt(bend)]))
    top = jnp.stack([jnp.zeros_like(c), jnp.ones_like(c)])
    return lax.fori_loop(0, jnp.finfo(c.dtype).nmant + 1, halve, (first, top))[0]
