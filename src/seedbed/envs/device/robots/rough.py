"""Robots with a joystick on tiles and stairs, which get higher the further they go."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.robots.g1 import G1Joystick
from seedbed.envs.device.robots.go1 import Go1Joystick
from seedbed.envs.device.robots.joystick import JoystickTask
from seedbed.envs.device.robots.ride import Ride
from seedbed.envs.device.robots.sensed import Sight
from seedbed.envs.device.robots.tiles import Ground, Tiles, tops
from seedbed.types import Array

if TYPE_CHECKING:
    _Task = JoystickTask
else:
    # Its fields without a default would hide those of the robot's task.
    _Task = object


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rough(_Task):
    """A base of the tasks in which a robot goes over tiles of random heights, or stairs, unseen.

    The ground is flat within a metre of the origin, where an episode opens. Tiles reach their full height
    four metres away, steps after two flights: who does not walk yet learns where it is easy. Each episode has
    tiles or stairs of its own, as likely as each other. Heights of feet count from the tile below.
    """

    step_height: float = 0.08
    """Largest height of a tile above the lowest, and of a step of stairs, in m."""
    tile_size: float = 0.3
    """Side of a tile, and depth of a step, in m."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be."""
        super().__post_init__()
        self.require_no_less("step_height")
        self.require_no_less("tile_size", least=0.1)

    @property
    def tiles(self) -> Tiles:  # type: ignore[override]
        """Returns what the ground is made of."""
        return Tiles(self.feet, self.tile_size)

    def begin(self, key: Array) -> Ride:
        """Draws the ground, the first command and the first push; consumes the key."""
        ground = Ground.drawn(jax.random.fold_in(key, 0x6D656D6F), len(self.feet))
        return super().begin(key)._replace(ground=ground)

    def keep(self, now: physics.Data, kept: Ride, action: Array | None = None) -> Ride:
        """Returns what is kept after a step, with where the feet are on the ground."""
        ground = kept.ground._replace(feet=self.sites(now)[:, :2])
        return super().keep(now, kept, action)._replace(ground=ground)

    def mocap(self, kept: Ride) -> dict[str, Array]:
        """Puts tiles under the feet."""
        return {"mocap_pos": kept.ground.boxes(self.tile_size, self.step_height)}

    def heights(self, now: physics.Data) -> jax.Array:
        """Returns how high the feet are above the tiles below them [n], in m."""
        below = [now.xpos[self.body(names[0])] for names in self.tiles.names()]
        return super().heights(now) - tops(jnp.stack(below))

    def contacts(self, now: physics.Data) -> jax.Array:
        """Returns which feet are on the ground [n]."""
        return jnp.stack([self.any_found(now, each) for each in self.tiles.names()])

    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns what critics see on flat ground, and how high the feet are above this one."""
        return [*super().privileged(now, kept), self.heights(now)]

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order."""
        return (*super().insights, Sight("feet_height", len(self.feet)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go1Rough(Rough, Go1Joystick):  # type: ignore[misc]
    """Go1 follows a joystick over uneven ground."""

    clearance: ClassVar[float] = 0.12


@dataclasses.dataclass(frozen=True, kw_only=True)
class G1Rough(Rough, G1Joystick):  # type: ignore[misc]
    """G1, a humanoid of 29 joints, follows a joystick over uneven ground."""
