"""Ant: a four-legged body is paid for walking along x (Schulman et al. 2015); as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.locomotion.task import LocomotionTask
from seedbed.envs.device.mujoco import (
    TaskState,
    Verdict,
    normal_noise,
    squares,
)
from seedbed.types import Array, SeedbedError, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ant(LocomotionTask):
    """Ant-v5: a four-legged body that is paid for walking along x."""

    gymnasium_id: ClassVar[str] = "Ant-v5"
    xml_file: str = "ant.xml"
    frame_skip: int = 5
    ctrl_cost_weight: float = 0.5
    contact_cost_weight: float = 5e-4
    """Weight of the squared contact forces, a cost."""
    healthy_reward: float = 1.0
    """Reward of each step on which the body is healthy."""
    main_body: int | str = 1
    """Body whose speed is rewarded: its number, or its name in the MJCF file."""
    terminate_when_unhealthy: bool = True
    """Whether an unhealthy body ends the episode."""
    healthy_z_range: tuple[float, float] = (0.2, 1.0)
    """Heights of a healthy body, in m."""
    contact_force_range: tuple[float, float] = (-1.0, 1.0)
    """Bounds to which contact forces are clipped."""
    include_cfrc_ext_in_observation: bool = True
    """Whether the observation has the contact forces on each body."""
    coordinates: ClassVar[int] = 2
    velocity_noise = staticmethod(normal_noise)

    def keep(self, now: physics.Data, kept: Tree, action: Array | None = None) -> Array:
        """Returns the main body's x in m at the last forward pass."""
        body, count = self.main_body, self.physics_model().nbody
        if isinstance(body, str):
            body = self.body(body)
        elif not 0 <= body < count:
            raise SeedbedError(f"Ant.main_body is {body}; give 0 to {count - 1}, or a name")
        return now.xpos[body, 0]

    def observe(self, now: physics.Data) -> Array:
        """Returns positions, velocities and, by option, the contact forces on each body."""
        shown = super().observe(now)
        if not self.include_cfrc_ext_in_observation:
            return shown
        return jnp.concatenate([shown, self._contact_forces(now)[1:].ravel()])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Rewards speed along x and health; subtracts the costs of control and contact."""
        low, high = self.healthy_z_range
        healthy = (low <= now.qpos[2]) & (now.qpos[2] <= high)
        terms = {
            "reward_forward": self.forward_reward_weight
            * (self.keep(now, ()) - before.kept)
            / self.dt,
            "reward_survive": jnp.where(healthy, self.healthy_reward, 0),
            "reward_ctrl": -self.ctrl_cost_weight * squares(action),
            "reward_contact": -self.contact_cost_weight * squares(self._contact_forces(now)),
        }
        terminated = ~healthy if self.terminate_when_unhealthy else jnp.zeros_like(healthy)
        return Verdict(sum(terms.values()), terminated, terms)

    def _contact_forces(self, now: physics.Data) -> Array:
        return jnp.clip(now.cfrc_ext, *self.contact_force_range)
