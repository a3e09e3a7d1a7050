"""Unitree's Go1 with a joystick on tiles and stairs, which get higher the further it goes."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.robots.go1 import Go1Joystick
from seedbed.envs.device.robots.ride import Ride
from seedbed.envs.device.robots.sensed import Sight
from seedbed.envs.device.robots.tiles import Ground, Tiles, tops
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go1Rough(Go1Joystick):
    """Go1 follows a joystick over tiles of random heights, or over stairs, that it does not see.

    The ground is flat within a metre of the origin, where an episode opens. Tiles reach their full height
    four metres away, steps after two flights: who does not walk yet learns where it is easy. Each episode has
    tiles or stairs of its own, as likely as each other. Heights of feet count from the tile below.
    """

    step_height: float = 0.08
    """Largest height of a tile above the lowest, and of a step of stairs, in m."""
    tile_size: float = 0.3
    """Side of a tile, and depth of a step, in m."""
    clearance: ClassVar[float] = 0.12

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be."""
        super().__post_init__()
        self.require_no_less("step_height")
        self.require_no_less("tile_size", least=0.1)

    @property
    def tiles(self) -> Tiles:  # type: ignore[override]
        """Returns what the ground is made of."""
        return Tiles(self.feet, self.tile_size)

    def first_memory(self, key: Array) -> Ground:
        """Draws the ground; consumes the key."""
        return Ground.drawn(key, len(self.feet))

    def remembered(
        self, kept: Ride, now: physics.Data, measured: Array, targets: Array | None
    ) -> Ground:
        """Returns the ground, with where the feet are on it."""
        return kept.memory._replace(feet=self.sites(now)[:, :2])

    def mocap(self, kept: Ride) -> dict[str, Array]:
        """Puts tiles under the feet."""
        return {"mocap_pos": kept.memory.boxes(self.tile_size, self.step_height)}

    def heights(self, now: physics.Data) -> jax.Array:
        """Returns how high the feet are above the tiles below them [4], in m."""
        below = [now.xpos[self.body(names[0])] for names in self.tiles.names()]
        return super().heights(now) - tops(jnp.stack(below))

    def contacts(self, now: physics.Data) -> jax.Array:
        """Returns which feet are on the ground [4]."""
        return jnp.stack([self.any_found(now, each) for each in self.tiles.names()])

    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns what Go1's critic sees, and how high the feet are above the ground."""
        return [*super().privileged(now, kept), self.heights(now)]

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order."""
        return (*super().insights, Sight("feet_height", len(self.feet)))
