"""Reacher: a planar arm must move its fingertip to a target; as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, noise, squares
from seedbed.types import Array

REACH = 0.2
"""Largest distance of a target from the origin, in m."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reacher(MujocoTask):
    """Reacher-v5: a planar arm that must move its fingertip to a target."""

    gymnasium_id: ClassVar[str] = "Reacher-v5"
    xml_file: str = "reacher.xml"
    frame_skip: int = 2
    episode_steps: int = 50
    reward_dist_weight: float = 1.0
    """Weight of the fingertip's distance from the target, a cost."""
    reward_control_weight: float = 1.0
    """Weight of the squared action, a cost."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv]: the arm almost straight and at rest, the target in a disc.

        The target is uniform over the disc of radius `REACH`. Consumes the key.
        """
        model, keys = self.physics_model(), jax.random.split(key, 3)
        radius, angle = jax.random.uniform(keys[0], (2,), jnp.float32)
        radius, angle = REACH * jnp.sqrt(radius), 2 * math.pi * angle
        target = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)])
        arm = jnp.float32(model.qpos0[:-2]) + noise(keys[1], model.nq - 2, 0.1)
        swing = noise(keys[2], model.nv - 2, 0.005)
        return jnp.concatenate([arm, target]), jnp.concatenate([swing, jnp.zeros(2, jnp.float32)])

    def observe(self, now: physics.Data) -> Array:
        """Returns the angles' cosines and sines, the target, angular velocities and target-to-fingertip.

        The last is the vector (x, y) from the target to the fingertip in m.
        """
        angles, way = now.qpos[:2], self._way(now)[:2]
        return jnp.concatenate([jnp.cos(angles), jnp.sin(angles), now.qpos[2:], now.qvel[:2], way])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Subtracts the fingertip's distance from the target and the cost of control; never terminates."""
        terms = {
            "reward_dist": -self.reward_dist_weight * jnp.sqrt(squares(self._way(now))),
            "reward_ctrl": -self.reward_control_weight * squares(action),
        }
        return Verdict(sum(terms.values()), jnp.bool_(False), terms)

    def _way(self, now: physics.Data) -> Array:
        return now.xpos[self.body("fingertip")] - now.xpos[self.body("target")]
