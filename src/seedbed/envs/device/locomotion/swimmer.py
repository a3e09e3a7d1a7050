"""Swimmer: three links in a viscous medium are paid for moving along x (Coulom 2002); as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import (
    MujocoTask,
    TaskState,
    Verdict,
    moved,
    noisy_rest,
    squares,
)
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swimmer(MujocoTask):
    """Swimmer-v5: three links in a viscous medium that are paid for moving along x."""

    gymnasium_id: ClassVar[str] = "Swimmer-v5"
    xml_file: str = "swimmer.xml"
    frame_skip: int = 4
    forward_reward_weight: float = 1.0
    """Weight of the speed along x in the reward."""
    ctrl_cost_weight: float = 1e-4
    """Weight of the squared action, a cost."""
    reset_noise_scale: float = 0.1
    """Size of the noise on positions and velocities at the start of an episode."""
    exclude_current_positions_from_observation: bool = True
    """Whether the observation leaves out x and y of the body."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv] near the model's initial position at rest; consumes the key."""
        return noisy_rest(self.physics_model(), key, self.reset_noise_scale)

    def observe(self, now: physics.State) -> Array:
        """Returns positions and velocities."""
        hidden = 2 if self.exclude_current_positions_from_observation else 0
        return jnp.concatenate([now.qpos[hidden:], now.qvel])

    def judge(self, before: TaskState, now: physics.State, action: Array) -> Verdict:
        """Rewards speed along x and subtracts the cost of control; never terminates."""
        terms = {
            "reward_forward": self.forward_reward_weight * moved(before, now, 0) / self.dt,
            "reward_ctrl": -self.ctrl_cost_weight * squares(action),
        }
        return Verdict(sum(terms.values()), jnp.bool_(False), terms)
