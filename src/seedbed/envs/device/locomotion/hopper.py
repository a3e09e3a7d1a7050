"""Hopper: a planar leg is paid for hopping along x (Erez et al. 2011); as Gymnasium's v5."""

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
    within,
)
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hopper(MujocoTask):
    """Hopper-v5: a planar leg that is paid for hopping along x."""

    gymnasium_id: ClassVar[str] = "Hopper-v5"
    xml_file: str = "hopper.xml"
    frame_skip: int = 4
    forward_reward_weight: float = 1.0
    """Weight of the speed along x in the reward."""
    ctrl_cost_weight: float = 1e-3
    """Weight of the squared action, a cost."""
    healthy_reward: float = 1.0
    """Reward of each step on which the body is healthy."""
    terminate_when_unhealthy: bool = True
    """Whether an unhealthy body ends the episode."""
    healthy_state_range: tuple[float, float] = (-100.0, 100.0)
    """Values of all angles and velocities of a healthy body."""
    healthy_z_range: tuple[float, float] = (0.7, float("inf"))
    """Heights of a healthy body, in m."""
    healthy_angle_range: tuple[float, float] = (-0.2, 0.2)
    """Tilts of a healthy body, in rad."""
    reset_noise_scale: float = 5e-3
    """Size of the noise on positions and velocities at the start of an episode."""
    exclude_current_positions_from_observation: bool = True
    """Whether the observation leaves out x of the body."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv] near the model's initial position at rest; consumes the key."""
        return noisy_rest(self.physics_model(), key, self.reset_noise_scale)

    def observe(self, now: physics.State) -> Array:
        """Returns positions and velocities; velocities are clipped to [-10, 10]."""
        hidden = 1 if self.exclude_current_positions_from_observation else 0
        return jnp.concatenate([now.qpos[hidden:], jnp.clip(now.qvel, -10, 10)])

    def judge(self, before: TaskState, now: physics.State, action: Array) -> Verdict:
        """Rewards speed along x and health; subtracts the cost of control."""
        rest = jnp.concatenate([now.qpos[2:], now.qvel])
        healthy = (
            within(rest, self.healthy_state_range).all()
            & within(now.qpos[1], self.healthy_z_range)
            & within(now.qpos[2], self.healthy_angle_range)
        )
        terms = {
            "reward_forward": self.forward_reward_weight * moved(before, now, 0) / self.dt,
            "reward_survive": jnp.where(healthy, self.healthy_reward, 0),
            "reward_ctrl": -self.ctrl_cost_weight * squares(action),
        }
        terminated = ~healthy if self.terminate_when_unhealthy else jnp.bool_(False)
        return Verdict(sum(terms.values()), terminated, terms)
