"""What an episode of a robot with a joystick keeps besides the physics, and how its reward is weighted."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seedbed.types import Array, Tree


class Feet(NamedTuple):
    """The state of the feet, in the order of `JoystickTask.feet`."""

    contact: Array  # [n] bool: on the ground after the last step
    air_time: Array  # [n] s since a foot left the ground
    peak: Array  # [n] m, its greatest height since


class Push(NamedTuple):
    """A push of the trunk along the ground, and the time until it."""

    wait: Array  # int32, steps from one push to the next
    steps: Array  # int32, how long it lasts
    seconds: Array  # the same, not rounded
    speed: Array  # m/s
    since: Array  # int32, steps since the last one
    step: Array  # int32, steps of this one
    direction: Array  # [3]

    def force(self, mass: Array, dt: float) -> jax.Array:
        """Returns the force in a step of `dt` s on a robot of `mass` kg [3], in N: half a sine in all."""
        phase = jnp.pi * self.step * dt / self.seconds
        size = 0.5 * jnp.sin(phase) * mass * self.speed / self.seconds
        return jnp.where(self.since >= self.wait, size, 0.0) * self.direction

    def later(self, key: Array) -> Push:
        """Returns the push of the next step; consumes the key."""
        pushed = self.since >= self.wait
        since = jnp.where(pushed, jnp.where(self.step >= self.steps, 0, self.since), self.since + 1)
        starts = ~pushed & (since >= self.wait)
        angle = jax.random.uniform(key, (), jnp.float32, 0.0, 2 * math.pi)
        way = jnp.stack([jnp.cos(angle), jnp.sin(angle), jnp.float32(0)])
        return self._replace(
            since=since,
            step=jnp.where(pushed, self.step + 1, jnp.where(starts, 0, self.step)),
            direction=jnp.where(starts, way, self.direction),
        )


class Seen(NamedTuple):
    """The parts of the observation after a step that do not follow from the physics alone."""

    measured: Array  # [m] what the robot measures, with noise
    command: Array  # [3] m/s and rad/s: forward, left, turning left
    action: Array  # [nu] of the step before
    contact: Array  # [n] bool, before the step
    air_time: Array  # [n] s
    push: Array  # [3] N, in the step
    pushed: Array  # bool


class Ride(NamedTuple):
    """The state of an episode besides the physics."""

    key: Array
    step: Array  # int32
    command: Array  # [3] by which the next step is judged
    until: Array  # int32, steps until the command changes
    action: Array  # [nu] of the last step
    earlier: Array  # [nu] of the one before
    feet: Feet
    push: Push
    seen: Seen
    memory: Tree  # what the task itself remembers of what was measured
    ground: Tree = ()  # what the robot goes on, where that is not the same for all episodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scales:
    """The weights in 1/s of the terms of a reward; names and numbers are MuJoCo Playground's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuadrupedScales(Scales):
    """The weights in 1/s of the terms of `JoystickTask.usual_terms`."""

    tracking_lin_vel: float = 1.0
    tracking_ang_vel: float = 0.5
    lin_vel_z: float = -0.5
    ang_vel_xy: float = -0.05
    orientation: float = -5.0
    termination: float = -1.0
    torques: float = -0.0002
    energy: float = -0.001
    feet_clearance: float = -2.0
    feet_height: float = -0.2
    feet_slip: float = -0.1
    feet_air_time: float = 0.1
    action_rate: float = -0.01
