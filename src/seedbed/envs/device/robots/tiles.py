"""Uneven ground of square tiles, without an end: boxes that are put under the feet as they go.

A thousand boxes would be a thousand pairs of geoms for each foot. Each foot has three boxes of its own
instead: the tile below it and the nearest two beside it, which are moved before a step and stand still in it.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.types import Array, SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_EACH = 3  # tiles of a foot
_DEEP = 0.5  # m, half of the height of a box
_OVER = 0.05  # m, by which the box below a foot is larger than its tile, for a foot that leaves it in a step
_FLAT, _FULL = (
    1.0,
    4.0,
)  # m from the origin: where the ground begins to be uneven, and is so in full
_FLIGHT = 8  # tiles of stairs that go up and down again
_FLIGHTS = 3  # until steps have their full height
_EXACT = 1e-3  # tiles, by which float32 may be off where a ring of stairs begins
_SURFACE = ("material", "friction", "condim", "priority", "solmix", "solref", "solimp", "margin")
"""What boxes have of the floor."""
_OF_PAIR = ("friction", "condim", "solref", "solimp", "solreffriction", "margin", "gap")


class Tiles(NamedTuple):
    """The make of the ground; part of what a model is cached by."""

    feet: tuple[str, ...]  # geoms
    size: float  # m, the side of a tile

    def names(self) -> list[list[str]]:
        """Returns the names of each foot's boxes, the one below it first."""
        return [[f"{foot}_tile{i}" for i in range(_EACH)] for foot in self.feet]


class Ground(NamedTuple):
    """The ground of an episode, and where the feet are on it."""

    key: Array  # of the heights
    stairs: Array  # bool: rings of stairs around the origin, or else tiles of random heights
    feet: Array  # [n, 2] m

    @classmethod
    def drawn(cls, key: Array, feet: int) -> Ground:
        """Draws the ground; consumes the key. Until the first step no foot stands on it."""
        stairs = jax.random.bernoulli(jax.random.fold_in(key, 0))
        return cls(jax.random.fold_in(key, 1), stairs, jnp.zeros((feet, 2), jnp.float32))

    def boxes(self, size: float, top: float) -> jax.Array:
        """Returns where the boxes are [3 n, 3], in m, of tiles of this size and of heights up to `top`."""
        cells = [_cells(foot, size) for foot in self.feet]
        heights = jnp.concatenate([self._heights(of_foot, size, top) for of_foot in cells])
        centres = (jnp.concatenate(cells).astype(jnp.float32) + 0.5) * size
        return jnp.concatenate([centres, heights[:, None] - _DEEP], axis=1)

    def _heights(self, cells: Array, size: float, top: float) -> jax.Array:
        """Returns the heights of a foot's boxes [3], in m; those beside it are out of reach unless higher.

        Feet sink into the ground by a centimetre. Near the seam of two tiles of one height, a foot would be
        pushed aside by the edge of the one beside it.
        """
        own, *beside = (self._height(cell, size, top) for cell in cells)
        return jnp.stack([own, *(jnp.where(one > own, one, own - 2 * _DEEP) for one in beside)])

    def _height(self, cell: Array, size: float, top: float) -> Array:
        """Returns the height in m of a tile [2], whose steps are up to `top`."""
        away = jnp.abs((cell.astype(jnp.float32) + 0.5) * size).max()
        key = jax.random.fold_in(jax.random.fold_in(self.key, cell[0]), cell[1])
        rough = jnp.clip((away - _FLAT) / (_FULL - _FLAT), 0.0, 1.0)
        random = top * rough * jax.random.uniform(key, (), jnp.float32)
        ring = jnp.maximum(jnp.floor((away - _FLAT) / size + _EXACT), 0.0)
        step, flight = jnp.mod(ring, _FLIGHT), jnp.floor(ring / _FLIGHT)
        climbed = jnp.minimum(step, _FLIGHT - step)
        stairs = top * jnp.minimum((flight + 1) / _FLIGHTS, 1.0) * climbed
        return jnp.where(self.stairs, stairs, random)


def _cells(foot: Array, size: float) -> jax.Array:
    """Returns the tile below a foot [2] and the nearest two beside it, [3, 2] int32."""
    place = foot / size
    below = jnp.floor(place)
    beside = jnp.where(place - below < 0.5, -1.0, 1.0)
    others = below[None] + jnp.diag(beside)
    return jnp.concatenate([below[None], others]).astype(jnp.int32)


def lay(spec: Any, tiles: Tiles, xml_file: str) -> None:
    """Puts boxes for the feet into an MjSpec, with the surface of the geom `floor`, which they replace.

    Where the file pairs a foot with the floor, its boxes touch it as that pair says. Raises SeedbedError if
    the file has no such floor or feet.
    """
    missing = [name for name in ("floor", *tiles.feet) if spec.geom(name) is None]
    if missing:
        raise SeedbedError(f"{xml_file} has no geom {missing[0]!r}, which uneven ground needs")
    floor = spec.geom("floor")
    slide, turn, roll = floor.friction
    for sensor in [each for each in spec.sensors if "floor" in (each.objname, each.refname)]:
        spec.delete(sensor)
    paired: dict[str, dict[str, Any]] = {}
    for pair in [each for each in spec.pairs if "floor" in (each.geomname1, each.geomname2)]:
        (other,) = {pair.geomname1, pair.geomname2} - {"floor"}
        paired[other] = {field: np.array(getattr(pair, field)) for field in _OF_PAIR}
        spec.delete(pair)
    for foot, names in zip(tiles.feet, tiles.names(), strict=True):
        # A pair takes the larger friction, whatever the priorities of its geoms are.
        ahead = floor.priority > spec.geom(foot).priority
        rubs = {"friction": [slide, slide, turn, roll, roll]} if ahead else {}
        rubs = paired.get(foot, rubs)
        for name in names:
            half = tiles.size / 2 + _OVER * (name == names[0])
            body = spec.worldbody.add_body(name=name, mocap=True, pos=[0, 0, -_DEEP])
            body.add_geom(
                name=name,
                type=mujoco.mjtGeom.mjGEOM_BOX,
                size=[half, half, _DEEP],
                mass=0,  # a push is as strong as the robot is heavy
                contype=0,
                conaffinity=0,
                **{field: getattr(floor, field) for field in _SURFACE},
            )
            spec.add_pair(geomname1=foot, geomname2=name, **rubs)
            spec.add_sensor(
                name=f"{name}_found",
                type=mujoco.mjtSensor.mjSENS_CONTACT,
                objtype=mujoco.mjtObj.mjOBJ_GEOM,
                objname=foot,
                reftype=mujoco.mjtObj.mjOBJ_GEOM,
                refname=name,
                intprm=[1, 1, 1],
            )
    # It is still drawn, below the tiles.
    floor.contype = floor.conaffinity = 0


def tops(places: Array) -> jax.Array:
    """Returns how high boxes at `places` [n, 3] reach [n], in m."""
    return jnp.asarray(places[:, 2] + _DEEP)
