"""Pusher: an arm with seven joints that is to push a cylinder to a goal; Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.locomotion.task import Carried, MujocoTask, Verdict, noise, squares
from seedbed.types import Array

APART = 0.17  # m, by which the cylinder is further from the goal at first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pusher(MujocoTask):
    """Pusher-v5."""

    gymnasium_id: ClassVar[str] = "Pusher-v5"
    xml_file: str = "pusher_v5.xml"
    frame_skip: int = 5
    episode_steps: int = 100
    reward_near_weight: float = 0.5
    reward_dist_weight: float = 1.0
    reward_control_weight: float = 0.1

    def initial(self, key: Array) -> tuple[Array, Array]:
        """The arm at its place and almost at rest; the cylinder before the goal."""
        model, (place, speed) = self.physics_model(), jax.random.split(key)
        fixed = jnp.zeros(2, jnp.float32)  # the goal
        qpos = jnp.concatenate([jnp.float32(model.qpos0[:-4]), _cylinder(place), fixed])
        arm = noise(speed, model.nv - 4, 0.005)
        return qpos, jnp.concatenate([arm, jnp.zeros(4, jnp.float32)])

    def observe(self, now: physics.State) -> Array:
        """The arm's angles and angular velocities, where its tip, the cylinder and the goal are."""
        places = [now.xpos[self.body(name)] for name in ("tips_arm", "object", "goal")]
        return jnp.concatenate([now.qpos[:7], now.qvel[:7], *places])

    def judge(self, before: Carried, now: physics.State, action: Array) -> Verdict:
        """Minus the cylinder's distances from the goal and from the tip, and control; no end."""
        tip, cylinder, goal = (now.xpos[self.body(n)] for n in ("tips_arm", "object", "goal"))
        terms = {
            "reward_near": -self.reward_near_weight * jnp.sqrt(squares(cylinder - tip)),
            "reward_dist": -self.reward_dist_weight * jnp.sqrt(squares(cylinder - goal)),
            "reward_ctrl": -self.reward_control_weight * squares(action),
        }
        return Verdict(sum(terms.values()), jnp.bool_(False), terms)


def _cylinder(key: Array) -> jax.Array:
    """Draws a place [2] in a rectangle, outside a disc about the goal; consumes the key."""
    low, high = jnp.float32([-0.3, -0.2]), jnp.float32([0.0, 0.2])

    def draw(loop: tuple[Any, Any]) -> tuple[Any, Any]:
        key, here = jax.random.split(loop[0])
        return key, low + (high - low) * jax.random.uniform(here, (2,), jnp.float32)

    def near(loop: tuple[Any, Any]) -> jax.Array:
        return squares(loop[1]) <= APART * APART

    return jax.lax.while_loop(near, draw, draw((key, low)))[1]
