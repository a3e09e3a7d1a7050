"""ReacherAngle: a planar arm with servos must move its tip to a target; after Brax v1's."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, noise
from seedbed.envs.device.targets.task import length
from seedbed.types import Array

REACH = 0.2
"""Largest distance of a target from the origin along the ground, in m."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReacherAngle(MujocoTask):
    """Brax's ReacherAngle: a planar arm whose actions are angles must move its tip to a target.

    Reward and observation are Brax v1's; the target stays for the whole episode.
    """

    xml_file: str = "reacher_angle.xml"
    frame_skip: int = 4

    def begin(self, key: Array) -> Array:
        """Draws the target [3] in m, uniform over a disc of radius `REACH`; consumes the key."""
        radius, turn = jax.random.uniform(key, (2,), jnp.float32)
        radius, turn = REACH * jnp.sqrt(radius), 2 * math.pi * turn
        return jnp.stack([radius * jnp.cos(turn), radius * jnp.sin(turn), jnp.float32(0.01)])

    def mocap(self, kept: Array) -> dict[str, Array]:
        """Puts the target where it was drawn."""
        return {"mocap_pos": kept[None]}

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [2] and qvel [2] near the straight arm at rest; consumes the key."""
        place, speed = jax.random.split(key)
        return noise(place, 2, 0.1), noise(speed, 2, 0.005)

    def observe(self, now: physics.Data) -> Array:
        """Returns the angles' cosines and sines, the target (x, y), the tip's velocity and its way.

        The velocity (x, y) is in m/s; the way [3] leads from the target to the tip, in m.
        """
        velocity = physics.sensor(self.physics_model(), now, "tip_velocity")[:2]
        target = now.xpos[self.body("target")][:2]
        turned = [jnp.cos(now.qpos), jnp.sin(now.qpos)]
        return jnp.concatenate([*turned, target, velocity, self._way(now)])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Subtracts the tip's distance from the target; never terminates."""
        del before, action
        reward = -length(self._way(now))
        return Verdict(reward, jnp.bool_(False), {"reward_dist": reward})

    def _way(self, now: physics.Data) -> Array:
        tip = physics.sensor(self.physics_model(), now, "tip")
        return tip - now.xpos[self.body("target")]
