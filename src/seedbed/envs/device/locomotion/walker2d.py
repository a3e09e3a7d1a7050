"""Walker2d: a planar body with two legs is paid for walking along x; as Gymnasium's v5."""

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
class Walker2d(MujocoTask):
    """Walker2d-v5: a planar body with two legs that is paid for walking along x."""

    gymnasium_id: ClassVar[str] = "Walker2d-v5"
    xml_file: str = "walker2d_v5.xml"
    frame_skip: int = 4
    forward_reward_weight: float = 1.0
    """Weight of the speed along x in the reward."""
    ctrl_cost_weight: float = 1e-3
    """Weight of the squared action, a cost."""
    healthy_reward: float = 1.0
    """Reward of each step on which the body is healthy."""
    terminate_when_unhealthy: bool = True
    """Whether an unhealthy body ends the episode."""
    healthy_z_range: tuple[float, float] = (0.8, 2.0)
    """Heights of a healthy body, in m."""
    healthy_angle_range: tuple[float, float] = (-1.0, 1.0)
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
        upright = within(now.qpos[2], self.healthy_angle_range)
        healthy = within(now.qpos[1], self.healthy_z_range) & upright
        terms = {
            "reward_forward": self.forward_reward_weight * moved(before, now, 0) / self.dt,
            "reward_survive": jnp.where(healthy, self.healthy_reward, 0),
            "reward_ctrl": -self.ctrl_cost_weight * squares(action),
        }
        terminated = ~healthy if self.terminate_when_unhealthy else jnp.bool_(False)
        return Verdict(sum(terms.values()), terminated, terms)
