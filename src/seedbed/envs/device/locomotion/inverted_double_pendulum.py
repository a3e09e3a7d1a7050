"""InvertedDoublePendulum: a cart must keep two poles upright, one on the other; as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, noisy_rest, normal_noise
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvertedDoublePendulum(MujocoTask):
    """InvertedDoublePendulum-v5: a cart that must keep two poles upright, one on the other."""

    gymnasium_id: ClassVar[str] = "InvertedDoublePendulum-v5"
    xml_file: str = "inverted_double_pendulum.xml"
    frame_skip: int = 5
    healthy_reward: float = 10.0
    """Reward of each step on which the poles stand."""
    reset_noise_scale: float = 0.1
    """Size of the noise on positions and velocities at the start of an episode."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv] near the model's initial position at rest; consumes the key."""
        return noisy_rest(self.physics_model(), key, self.reset_noise_scale, normal_noise)

    def observe(self, now: physics.Data) -> Array:
        """Returns the cart's position, the angles' sines and cosines, velocities and a force.

        The force is that of the constraints on the cart, from its joint's limits. It and the velocities
        are clipped to [-10, 10].
        """
        x, angles = now.qpos[:1], now.qpos[1:]
        limits = [jnp.clip(now.qvel, -10, 10), jnp.clip(now.qfrc_constraint[:1], -10, 10)]
        return jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles), *limits])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Rewards a tip above 1 m; subtracts its distance from (0, 2) m and the poles' speeds.

        Both penalties are weighted sums of squares. A tip at or below 1 m terminates the episode.
        """
        x, y, velocity = now.site_xpos[0, 0], now.site_xpos[0, 2], now.qvel
        fallen = y <= 1
        terms = {
            "reward_survive": jnp.where(fallen, 0, jnp.float32(self.healthy_reward)),
            "distance_penalty": -(0.01 * x**2 + (y - 2) ** 2),
            "velocity_penalty": -(1e-3 * velocity[1] ** 2 + 5e-3 * velocity[2] ** 2),
        }
        return Verdict(sum(terms.values()), fallen, terms)
