"""Touch sensors: the normal forces of the contacts of a body whose rays meet the volume of a site.

A ray begins at the contact and runs along its normal, out of the body. Source: mj_sensorAcc, mju_rayGeom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.physics.assembly import over_slots
from seedbed.physics.collision import Points, Row, frame_of
from seedbed.physics.cone import push
from seedbed.physics.constraint import groups, motion_of, velocity
from seedbed.physics.kinematics import between, origin_of, site_xmat
from seedbed.physics.model import Kinematics, Model
from seedbed.physics.narrow import BOX, CAPSULE, CYLINDER, SPHERE
from seedbed.physics.problem import Problem, contact_motion
from seedbed.physics.slots import Slots
from seedbed.types import Array

_Interval = tuple[Array, Array]


def touches(
    model: Model, kin: Kinematics, problem: Problem, qacc: jax.Array, sites: Sequence[int]
) -> jax.Array:
    """Returns the force in N that each of `sites` feels, at the solution qacc [nv] of the problem."""
    motion, mats = contact_motion(problem, qacc), [site_xmat(model, kin, s) for s in sites]

    def slot(
        total: jax.Array,
        point: Points,
        stiffness: Array,
        row: Row,
        aref: Array,
    ) -> tuple[jax.Array, None]:
        sides, ways = row["rays"], row["ways"]
        slack = velocity(point, row, motion_of(point, row, motion)) - aref
        force, normal = push(stiffness, row["mu"], slack).force[0], frame_of(point, row)[0]
        felt = []
        for k, (site, mat) in enumerate(zip(sites, mats, strict=True)):
            begin = math.apply(mat.T, point.pos + ways[k] - kin.site_xpos[site])
            ray = sides[k] * math.apply(mat.T, normal)
            met = _meets(int(model.site_type[site]), model.site_size[site], begin, ray)
            felt.append(jnp.where(met & (sides[k] != 0) & (force > 0), force, 0))
        return jnp.where(point.active, total + jnp.stack(felt), total), None

    total = jnp.zeros(len(sites), qacc.dtype)
    tables = [group.slots for group in groups(model) if len(group.slots.geom)]
    for side, table in zip(problem.sides, tables, strict=True):
        signs, ways = _places(model, kin, table, sites)
        added = {"rays": signs.astype(qacc.dtype), "ways": ways}
        side = side._replace(table=side.table | added)
        total, _ = over_slots(side, slot, total, side.aref)
    return total


def _places(
    model: Model, kin: Kinematics, table: Slots, sites: Sequence[int]
) -> tuple[np.ndarray, jax.Array]:
    """Returns, for each slot and site, where the ray goes [n, k], and the way to the site's reference point.

    A ray goes along the normal (1), against it (-1), or the site's body has no part in the contact (0).
    """
    bodies = [int(model.site_bodyid[site]) for site in sites]
    signs = np.array([[int(a == b) - int(c == b) for b in bodies] for a, c in table.body])
    ways: dict[tuple[int, int], Array] = {}
    for frame in table.frame:
        for b in bodies:
            ends = int(model.body_treeid[frame]), int(model.body_treeid[b])
            if ends not in ways:
                ways[ends] = between(origin_of(model, kin, frame), origin_of(model, kin, b))
    rows = [
        jnp.stack([ways[int(model.body_treeid[frame]), int(model.body_treeid[b])] for b in bodies])
        for frame in table.frame
    ]
    return signs, jnp.stack(rows)


def _meets(kind: int, size: np.ndarray, begin: jax.Array, ray: jax.Array) -> jax.Array:
    """Returns whether a ray [3] from `begin` [3] meets a shape of MuJoCo's `kind` about the origin."""
    x, y, z = (math.unstack(part) for part in (begin, ray, jnp.asarray(size)))
    if kind == BOX:
        return _ahead(*(_slab(*each) for each in zip(x, y, z, strict=True)))
    if kind == SPHERE:
        return _ahead(_ball(x, y, z[0]))
    if kind in (CYLINDER, CAPSULE):
        disc = _ball(x[:2], y[:2], z[0])
        met = _ahead(disc, _slab(x[2], y[2], z[1]))
        if kind == CAPSULE:
            for end in (z[1], -z[1]):
                met = met | _ahead(_ball([*x[:2], x[2] - end], y, z[0]))
        return met
    # An ellipsoid is a ball in its own units.
    near, far = ([a / c for a, c in zip(part, z, strict=True)] for part in (x, y))
    return _ahead(_ball(near, far, jnp.ones_like(z[0])))


def _ball(begin: Sequence[Any], ray: Sequence[Any], radius: Array) -> _Interval:
    """Returns between which multiples of the ray the line is in a ball; nowhere: from inf to -inf."""
    a, b = sum(d * d for d in ray), sum(x * d for x, d in zip(begin, ray, strict=True))
    c = sum(x * x for x in begin) - radius * radius
    root = b * b - a * c
    flat = a < math.MIN_SQUARE
    a, wide = jnp.where(flat, 1, a), jnp.sqrt(jnp.where(root > 0, root, 0))
    low, high = (-b - wide) / a, (-b + wide) / a
    inside, crossing = flat & (c <= 0), ~flat & (root >= 0)
    return (
        jnp.where(inside, -jnp.inf, jnp.where(crossing, low, jnp.inf)),
        jnp.where(inside, jnp.inf, jnp.where(crossing, high, -jnp.inf)),
    )


def _slab(begin: Array, ray: Array, half: Array) -> _Interval:
    """Returns between which multiples of the ray the line is between two planes."""
    return _ball([begin], [ray], half)


def _ahead(*intervals: _Interval) -> jax.Array:
    """Returns whether intervals have a point in common that is not negative."""
    low, high = intervals[0]
    for more, less in intervals[1:]:
        low, high = jnp.maximum(low, more), jnp.minimum(high, less)
    return jnp.maximum(low, 0) <= high
