"""InvertedDoublePendulum: a cart that is to keep two poles upright, one on the other; Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.locomotion.task import Carried, MujocoTask, Verdict, noisy_rest, normal_noise
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvertedDoublePendulum(MujocoTask):
    """InvertedDoublePendulum-v5."""

    gymnasium_id: ClassVar[str] = "InvertedDoublePendulum-v5"
    xml_file: str = "inverted_double_pendulum.xml"
    frame_skip: int = 5
    healthy_reward: float = 10.0
    reset_noise_scale: float = 0.1

    def initial(self, key: Array) -> tuple[Array, Array]:
        """The model's own position and rest, with noise."""
        return noisy_rest(self.physics_model(), key, self.reset_noise_scale, normal_noise)

    def observe(self, now: physics.State) -> Array:
        """The cart, sines and cosines of the angles, velocities, the force on the cart at its limits."""
        x, angles = now.qpos[:1], now.qpos[1:]
        limits = [jnp.clip(now.qvel, -10, 10), jnp.clip(now.qfrc_constraint[:1], -10, 10)]
        return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles), *limits])

    def judge(self, before: Carried, now: physics.State, action: Array) -> Verdict:
        """A bonus while the tip is above 1 m, less its distance from (0, 2) and the poles' speeds."""
        x, y, velocity = now.site_xpos[0, 0], now.site_xpos[0, 2], now.qvel
        fallen = y <= 1
        terms = {
            "reward_survive": jnp.where(fallen, 0, jnp.float32(self.healthy_reward)),
            "distance_penalty": -(0.01 * x**2 + (y - 2) ** 2),
            "velocity_penalty": -(1e-3 * velocity[1] ** 2 + 5e-3 * velocity[2] ** 2),
        }
        return Verdict(sum(terms.values()), fallen, terms)
