"""InvertedPendulum: a cart that is to keep a pole upright (Barto et al. 1983); Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.locomotion.task import Carried, MujocoTask, Verdict, noisy_rest
from seedbed.types import Array

TILT = 0.2  # rad, beyond which the pole counts as fallen


@dataclasses.dataclass(frozen=True, kw_only=True)
class InvertedPendulum(MujocoTask):
    """InvertedPendulum-v5."""

    gymnasium_id: ClassVar[str] = "InvertedPendulum-v5"
    xml_file: str = "inverted_pendulum.xml"
    frame_skip: int = 2
    reset_noise_scale: float = 0.01

    def initial(self, key: Array) -> tuple[Array, Array]:
        """The model's own position and rest, with noise."""
        return noisy_rest(self.physics_model(), key, self.reset_noise_scale)

    def observe(self, now: physics.State) -> Array:
        """Positions and velocities."""
        return jnp.concatenate([now.qpos, now.qvel])

    def judge(self, before: Carried, now: physics.State, action: Array) -> Verdict:
        """One for each step on which the pole stands."""
        fallen = jnp.abs(now.qpos[1]) > TILT
        reward = jnp.where(fallen, 0, jnp.float32(1))
        return Verdict(reward, fallen, {"reward_survive": reward})
