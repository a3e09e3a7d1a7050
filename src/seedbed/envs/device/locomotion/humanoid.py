"""Humanoid: a body with 17 motors is paid for walking along x (Tassa et al. 2012); as Gymnasium's v5."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, noisy_rest, squares, within
from seedbed.types import Array, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanoidBody(MujocoTask, abc.ABC):
    """A base of both humanoid tasks, with their observation and initial state."""

    frame_skip: int = 5
    ctrl_cost_weight: float = 0.1
    """Weight of the squared action, a cost."""
    reset_noise_scale: float = 1e-2
    """Size of the noise on positions and velocities at the start of an episode."""
    exclude_current_positions_from_observation: bool = True
    """Whether the observation leaves out x and y of the body."""
    include_cinert_in_observation: bool = True
    """Whether the observation has the inertia of each body."""
    include_cvel_in_observation: bool = True
    """Whether the observation has the velocity of each body."""
    include_qfrc_actuator_in_observation: bool = True
    """Whether the observation has the actuators' forces."""
    include_cfrc_ext_in_observation: bool = True
    """Whether the observation has the contact forces on each body."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv] near the model's initial position at rest; consumes the key."""
        return noisy_rest(self.physics_model(), key, self.reset_noise_scale)

    def observe(self, now: physics.Data) -> Array:
        """Returns positions and velocities, then the parts that the options include.

        These are, in this order, the inertias and velocities of the bodies, the actuators' forces and the
        contact forces on the bodies.
        """
        shown = [now.qpos[2:] if self.exclude_current_positions_from_observation else now.qpos]
        shown.append(now.qvel)
        if self.include_cinert_in_observation:
            shown.append(now.cinert[1:].ravel())
        if self.include_cvel_in_observation:
            shown.append(now.cvel[1:].ravel())
        if self.include_qfrc_actuator_in_observation:
            shown.append(now.qfrc_actuator[6:])
        if self.include_cfrc_ext_in_observation:
            shown.append(now.cfrc_ext[1:].ravel())
        return jnp.concatenate(shown)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Humanoid(HumanoidBody):
    """Humanoid-v5: a humanoid that is paid for walking along x."""

    gymnasium_id: ClassVar[str] = "Humanoid-v5"
    xml_file: str = "humanoid.xml"
    forward_reward_weight: float = 1.25
    """Weight of the speed along x in the reward."""
    contact_cost_weight: float = 5e-7
    """Weight of the squared contact forces, a cost."""
    contact_cost_range: tuple[float, float] = (-float("inf"), 10.0)
    """Bounds to which the cost of contact is clipped."""
    healthy_reward: float = 5.0
    """Reward of each step on which the body is healthy."""
    terminate_when_unhealthy: bool = True
    """Whether an unhealthy body ends the episode."""
    healthy_z_range: tuple[float, float] = (1.0, 2.0)
    """Heights of a healthy body, in m."""

    def keep(self, now: physics.Data, kept: Tree, action: Array | None = None) -> Array:
        """Returns x of the centre of mass, in m, at the last forward pass."""
        return now.subtree_com[0, 0]

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Rewards the centre of mass's speed along x and health; subtracts control and contact."""
        healthy = within(now.qpos[2], self.healthy_z_range)
        contact = self.contact_cost_weight * squares(now.cfrc_ext)
        terms = {
            "reward_forward": self.forward_reward_weight
            * (self.keep(now, ()) - before.kept)
            / self.dt,
            "reward_survive": jnp.where(healthy, self.healthy_reward, 0),
            "reward_ctrl": -self.ctrl_cost_weight * squares(action),
            "reward_contact": -jnp.clip(contact, *self.contact_cost_range),
        }
        terminated = ~healthy if self.terminate_when_unhealthy else jnp.bool_(False)
        return Verdict(sum(terms.values()), terminated, terms)
