"""InvertedPendulum: a cart must keep a pole upright (Barto et al. 1983); as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, noisy_rest
from seedbed.types import Array

TILT = 0.2
"""Largest angle of a standing pole, in rad."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvertedPendulum(MujocoTask):
    """InvertedPendulum-v5: a cart that must keep a pole upright."""

    gymnasium_id: ClassVar[str] = "InvertedPendulum-v5"
    xml_file: str = "inverted_pendulum.xml"
    frame_skip: int = 2
    reset_noise_scale: float = 0.01
    """Size of the noise on positions and velocities at the start of an episode."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv] near the model's initial position at rest; consumes the key."""
        return noisy_rest(self.physics_model(), key, self.reset_noise_scale)

    def observe(self, now: physics.Data) -> Array:
        """Returns positions and velocities."""
        return jnp.concatenate([now.qpos, now.qvel])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Rewards each step on which the pole stands with 1; a fallen pole terminates the episode."""
        fallen = jnp.abs(now.qpos[1]) > TILT
        reward = jnp.where(fallen, 0, jnp.float32(1))
        return Verdict(reward, fallen, {"reward_survive": reward})
