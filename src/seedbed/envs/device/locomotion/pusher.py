"""Pusher: an arm with seven joints must push a cylinder to a goal; as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, noise, squares
from seedbed.types import Array

APART = 0.17
"""Distance in m; at the start the cylinder is further than this from the goal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pusher(MujocoTask):
    """Pusher-v5: an arm with seven joints that must push a cylinder to a goal."""

    gymnasium_id: ClassVar[str] = "Pusher-v5"
    xml_file: str = "pusher_v5.xml"
    frame_skip: int = 5
    episode_steps: int = 100
    reward_near_weight: float = 0.5
    """Weight of the cylinder's distance from the arm's tip, a cost."""
    reward_dist_weight: float = 1.0
    """Weight of the cylinder's distance from the goal, a cost."""
    reward_control_weight: float = 0.1
    """Weight of the squared action, a cost."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv]: the arm in the model's own position and almost at rest.

        The cylinder is at a random place near the goal (see `_cylinder`). Consumes the key.
        """
        model, (place, speed) = self.physics_model(), jax.random.split(key)
        fixed = jnp.zeros(2, jnp.float32)  # the goal
        qpos = jnp.concatenate([jnp.float32(model.qpos0[:-4]), _cylinder(place), fixed])
        arm = noise(speed, model.nv - 4, 0.005)
        return qpos, jnp.concatenate([arm, jnp.zeros(4, jnp.float32)])

    def observe(self, now: physics.Data) -> Array:
        """Returns the arm's angles and angular velocities, and the places of tip, cylinder and goal."""
        places = [now.xpos[self.body(name)] for name in ("tips_arm", "object", "goal")]
        return jnp.concatenate([now.qpos[:7], now.qvel[:7], *places])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Subtracts the cylinder's distances from tip and goal, and control; never terminates."""
        tip, cylinder, goal = (now.xpos[self.body(n)] for n in ("tips_arm", "object", "goal"))
        terms = {
            "reward_near": -self.reward_near_weight * jnp.sqrt(squares(cylinder - tip)),
            "reward_dist": -self.reward_dist_weight * jnp.sqrt(squares(cylinder - goal)),
            "reward_ctrl": -self.reward_control_weight * squares(action),
        }
        return Verdict(sum(terms.values()), jnp.bool_(False), terms)


def _cylinder(key: Array) -> jax.Array:
    """Draws the cylinder's qpos [2], in a rectangle but outside a disc about the goal.

    The rectangle is [-0.3, 0) by [-0.2, 0.2) m, the disc has radius `APART` and centre 0. Consumes the key.
    """
    low, high = jnp.float32([-0.3, -0.2]), jnp.float32([0.0, 0.2])

    def draw(loop: tuple[Any, Any]) -> tuple[Any, Any]:
        key, here = jax.random.split(loop[0])
        return key, low + (high - low) * jax.random.uniform(here, (2,), jnp.float32)

    def near(loop: tuple[Any, Any]) -> jax.Array:
        return squares(loop[1]) <= APART * APART

    return jax.lax.while_loop(near, draw, draw((key, low)))[1]
