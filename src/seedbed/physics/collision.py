"""The contacts of one configuration.

The pairs of geoms that may touch are rows of constant tables. One `lax.scan` for each kind of pair runs the
collider of that kind; a test of bounding spheres comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from seedbed.physics import math
from seedbed.physics.colliders import COLLIDERS
from seedbed.physics.kinematics import between, origin_of
from seedbed.physics.model import Kinematics, Model, Origin
from seedbed.physics.narrow import BOX, PLANE, SPHERE, Geom, Touch, frame
from seedbed.physics.slots import TOUCH, PairKind, Slots, candidates, may_harden, slots
from seedbed.types import Array

Row = dict[str, Any]
"""One row of a constant table: values by column name."""


MOST_SLOTS, MOST_CONTACTS = 256, 128
"""If a group has more slots than the first number, only contacts that are there are kept, at most the second.

They are packed in the order of their slots; so the cost of a step follows what touches.
"""


def are_packed(slots: int) -> bool:
    """Returns whether a group of so many slots keeps only contacts that are there."""
    return slots > MOST_SLOTS


class Points(NamedTuple):
    """The contacts of a group, one for each slot [n], or packed; zero if not active.

    A frame has three rows: the normal from geom 1 to geom 2, and two tangents. Its constant parts are not
    stored, so that the shape of `frame` is [n, 3, 3]; [n, 1, 3] without friction; [n, 2] on planes (the x
    and y components of the first tangent in the plane); [n, 0] on planes without friction.
    """

    active: jax.Array  # bool
    dist: jax.Array
    pos: jax.Array  # [n, 3] relative to the reference point of `Slots.frame`
    frame: jax.Array
    slot: jax.Array  # [n, 1] int32, the slot of each contact, if they are packed; otherwise [n, 0]
    # [n, 3] the way from there to the reference point of the other body; [n, 0] if it is not needed
    apart: jax.Array


class Contacts(NamedTuple):
    """The contacts of one configuration."""

    fixed: Points  # with the static world
    moving: Points  # between moving bodies
    ncon: jax.Array  # int32: number of contacts that MuJoCo would list, with those in the gap
    lost: Array  # bool: there are more contacts than can be kept; a constant if none can be lost


def scan_slots(
    points: Points, table: Row, body: Callable[..., tuple[Any, Any]], carry: Any, *arrays: jax.Array
) -> tuple[Any, Any]:
    """Scans body(carry, point, row, *values) -> (carry, out) over the contacts of a group.

    `table` has a row for each slot, and the `arrays` one for each contact. Returns the last carry and outs.
    """
    if not points.slot.shape[1]:

        def slot(carry: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
            return body(carry, *inputs)

        return lax.scan(slot, carry, (points, table, *arrays))

    def packed(carry: Any, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        point, *values = inputs
        row = {name: row_of(column, point.slot[0]) for name, column in table.items()}
        return body(carry, point, row, *values)

    return lax.scan(packed, carry, (points, *arrays))


def split(**columns: Array) -> tuple[Row, Row]:
    """Splits a table into columns that have one value in every row, given as that value, and the others.

    A JAX array always counts as one of the others.
    """
    same, rows = {}, {}
    for name, column in columns.items():
        if isinstance(column, np.ndarray) and len(column) and (column == column[:1]).all():
            same[name] = column[0]
        else:
            rows[name] = column
    return same, rows


def row_of(array: Array, i: Any) -> Any:
    """Reads row i of [n, ...]; i is a constant or a traced integer."""
    return array[i] if isinstance(i, int | np.integer) else math.take(array, i)


def frame_of(point: Points, row: Row) -> jax.Array:
    """Returns the frame [3, 3] of one contact, or only the normal [1, 3] without friction."""
    if "basis" not in row:
        return point.frame
    normal, x, y = row["basis"]
    if not len(point.frame):
        return normal[None]
    along, across = point.frame
    return jnp.stack([jnp.asarray(normal), x * along + y * across, y * along - x * across])


def detect(model: Model, kin: Kinematics) -> Contacts:
    """Computes the contacts of one configuration (mj_collision)."""
    dtype = kin.geom_xpos.dtype
    ncon = jnp.int32(0)
    groups: list[Points] = []
    lost: Array = np.zeros((), bool)
    for kinds in candidates(model):
        table = slots(model, kinds)
        n, friction = len(table.geom), table.rows > 1
        packed = are_packed(n)
        n = MOST_CONTACTS if packed else n
        shape = (3 if friction else 1, 3) if table.basis is None else (2 if friction else 0,)
        points = (
            jnp.zeros(n, bool),
            jnp.zeros(n, dtype),
            jnp.zeros((n, 3), dtype),
            jnp.zeros((n, *shape), dtype),
            jnp.zeros((n, int(packed)), np.int32),
        )
        positions, places = _places(model, kin, table)
        first, found = 0, _Found(ncon, points, jnp.int32(0) if packed else None)
        for kind in kinds:
            after = first + len(kind.pairs) * COLLIDERS[kind.types][1]
            place = Placing(first, positions, places[first:after])
            found = _detect_kind(model, kin, kind, place, found)
            first = after
        ncon, points, total = found
        groups.append(Points(*points, apart=_apart(model, kin, table, points[-1])))
        lost = lost if total is None else (total > MOST_CONTACTS) | lost
    return Contacts(groups[0], groups[1], ncon, lost)


class _Found(NamedTuple):
    """What a search for contacts has found so far."""

    ncon: jax.Array  # see Contacts
    points: tuple[jax.Array, ...]  # the fields of Points before `apart`
    total: jax.Array | None  # int32, contacts so far, if they are packed


class Placing(NamedTuple):
    """The first slot of one kind of pair, and where its geoms are."""

    slot: int
    positions: jax.Array  # [k, 3]
    rows: np.ndarray  # [slots of the kind, 2] in `positions`


def _apart(model: Model, kin: Kinematics, table: Slots, slot: jax.Array) -> jax.Array:
    """Computes `Points.apart`: [n, 3], or [n, 0] if no wrench or motion needs it.

    Contacts between trees need it, and static bodies other than the world. `slot` is that of Points.
    """
    tree = model.body_treeid[table.body]
    needed = (tree[:, 0] != tree[:, 1]) & ((tree >= 0) | (table.body > 0)).all(1)
    if not needed.any():
        return jnp.zeros((len(slot), 0), kin.xpos.dtype)
    ways: dict[tuple[int, int], Array] = {}
    rows = []
    for body, ends in zip(table.frame, table.mover, strict=True):
        other = int(ends[0] if ends[1] == body else ends[1])
        key = int(model.body_treeid[body]), int(model.body_treeid[other])
        if key not in ways:
            ways[key] = between(origin_of(model, kin, other), origin_of(model, kin, body))
        rows.append(key)
    if not slot.shape[1]:
        return jnp.stack([ways[key] for key in rows])
    keys, every = list(ways), jnp.stack([jnp.asarray(way) for way in ways.values()])
    number = np.array([keys.index(key) for key in rows], np.int32)

    def way(_: tuple[()], slot: jax.Array) -> tuple[tuple[()], jax.Array]:
        return (), row_of(every, row_of(number, slot[0]))

    return lax.scan(way, (), slot)[1]


def _places(model: Model, kin: Kinematics, table: Slots) -> tuple[jax.Array, np.ndarray]:
    """Computes the positions of geoms relative to the reference points of the slots' frames.

    Returns the positions [k, 3] and, for both geoms of each slot, the row [n, 2] of its position. Row g is
    geom g's own; a geom that meets several trees has further rows at the end.
    """
    if not len(table.geom):
        return kin.geom_xpos, table.geom
    rows = math.unstack(kin.geom_xpos, 0)
    tree_of = model.body_treeid[model.geom_bodyid]
    places = {(g, int(tree)): g for g, tree in enumerate(tree_of) if tree >= 0}
    unplaced = {g for g, tree in enumerate(tree_of) if tree < 0}
    found = np.zeros((len(table.geom), 2), np.int32)
    for slot, body in enumerate(table.frame):
        tree = int(model.body_treeid[body])
        for side, g in enumerate(int(g) for g in table.geom[slot]):
            if (g, tree) not in places:
                own = g in unplaced
                places[g, tree] = g if own else len(rows)
                unplaced.discard(g)
                if own:
                    rows[g] = _seen(model, kin, g, tree)
                else:
                    rows.append(_seen(model, kin, g, tree))
            found[slot, side] = places[g, tree]
    return jnp.stack(rows), found


def _seen(model: Model, kin: Kinematics, geom: int, tree: int) -> Array:
    """Returns the position [3] of a geom relative to the reference point of a tree that is not its own."""
    body = model.geom_bodyid[geom]
    if model.body_treeid[body] < 0:
        if model.body_carrierid[body]:
            pos = kin.geom_xpos[geom]
            return between(Origin(pos, jnp.zeros_like(pos)), kin.origins[tree])
        fixed = Origin(model.welds.geom_pos[geom], model.welds.geom_low[geom])
        return between(fixed, kin.origins[tree])
    return kin.geom_xpos[geom] + between(origin_of(model, kin, body), kin.origins[tree])


def _detect_kind(
    model: Model,
    kin: Kinematics,
    kind: PairKind,
    placing: Placing,
    found: _Found,
) -> _Found:
    """Adds the contacts of one kind of pair, whose slots begin at `placing.slot`, to what was `found`.

    Every result of a collider is used only under the mask `near`, so that a kernel skips the collider if the
    pair is near in none of its lanes. Only active slots are written.
    """
    collider, touches = COLLIDERS[kind.types]
    same, rows = split(**_pair_columns(model, kind, kin.geom_xpos.dtype))
    rows["slot"] = np.arange(len(kind.pairs), dtype=np.int32) * touches + np.int32(placing.slot)
    place_rows = placing.rows[::touches]
    moved = not np.array_equal(place_rows, kind.pairs)
    if moved:
        rows |= {"p1": place_rows[:, 0], "p2": place_rows[:, 1]}

    def geom(row: Row, name: str) -> Geom:
        mat = row_of(kin.geom_xmat, row["g" + name])
        pos = row_of(placing.positions, row[("p" if moved else "g") + name])
        depth = row.get("depth" + name, np.zeros((), pos.dtype))
        return Geom(pos, mat[:, 2], mat[:, 0], row["radius" + name], row["half" + name], depth)

    def pair(carry: Any, row: Row) -> tuple[Any, None]:
        row = row | same
        ncon, points, total = carry
        first, second = geom(row, "1"), geom(row, "2")
        apart = second.pos - first.pos
        near = jnp.bool_(True) if kind.types[0] == PLANE else math.dot(apart, apart) <= row["bound"]
        number, kept_now = ncon, total
        for k, touch in enumerate(collider(first, second, row["reach"])):
            dist = jnp.where(touch.exists, touch.dist, jnp.inf)
            active = dist < row["touching"]
            slot = row["slot"] + k
            own = slot[None] if kept_now is not None else jnp.zeros(0, np.int32)
            stored = _store_frame(touch, row, points[3].shape[1:])
            new = active, dist, touch.pos, stored, own
            held = active
            if kept_now is not None:
                slot = jnp.minimum(kept_now, MOST_CONTACTS - 1)
                held = active & (kept_now < MOST_CONTACTS)
                kept_now = jnp.where(active, kept_now + 1, kept_now)
            old = tuple(math.take(array, slot) for array in points)
            kept = (
                jnp.where(near, jnp.where(held, x, y), y) for x, y in zip(new, old, strict=True)
            )
            points = tuple(math.put(x, slot, y) for x, y in zip(points, kept, strict=True))
            number = jnp.where(dist <= row["counted"], number + 1, number)
        if total is not None and kept_now is not None:
            kept_now = jnp.where(near, kept_now, total)
        return _Found(jnp.where(near, number, ncon), points, kept_now), None

    return lax.scan(pair, found, rows)[0]


def _pair_columns(model: Model, kind: PairKind, dtype: Any) -> dict[str, Array]:
    """Makes the constant columns [n, ...] that the loop over the pairs of one kind reads."""
    table = slots(model, (kind,))
    once = slice(None, None, COLLIDERS[kind.types][1])
    reach = table.reach[once]
    touch = TOUCH * float(jnp.finfo(dtype).eps) * model.geom_extent[kind.pairs].sum(1)
    hard = may_harden(model, table, dtype)[once]
    columns: dict[str, Any] = {
        "touching": table.margin[once] + touch * hard,
        "counted": reach,
        "reach": reach + touch,
        "bound": (model.geom_rbound[kind.pairs].sum(1) + reach + touch) ** 2,
    }
    for name, g in zip("12", kind.pairs.T, strict=True):
        columns["radius" + name] = model.geom_size[g, 0]
        columns["half" + name] = model.geom_size[g, 1] * (model.geom_type[g] != SPHERE)
        if BOX in kind.types:
            columns["depth" + name] = model.geom_size[g, 2]
    columns = {name: column.astype(dtype) for name, column in columns.items()}
    for name, g in zip("12", kind.pairs.T, strict=True):
        columns["g" + name] = g.astype(np.int32)
    if table.basis is not None:
        columns["basis"] = table.basis[once].astype(dtype)
    return columns


def _store_frame(touch: Touch, row: Row, shape: tuple[int, ...]) -> jax.Array:
    """Returns the part of a contact's frame that is stored, of the shape that `Points.frame` has."""
    if shape == (1, 3):
        return touch.normal[None]
    if shape == (3, 3):
        return frame(touch.normal, touch.tangent)
    if shape == (0,):
        return jnp.zeros(0, touch.normal.dtype)
    _, first, _ = frame(row["basis"][0], touch.tangent)
    return jnp.stack([math.dot(first, row["basis"][k]) for k in (1, 2)])
