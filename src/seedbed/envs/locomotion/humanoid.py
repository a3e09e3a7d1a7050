"""Humanoid: a body with 17 motors that is paid for walking along x (Tassa et al. 2012); Gymnasium's v5."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.locomotion.task import Carried, MujocoTask, Verdict, noisy_rest, squares, within
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanoidBody(MujocoTask, abc.ABC):
    """What both tasks of the humanoid show, and how they begin."""

    frame_skip: int = 5
    ctrl_cost_weight: float = 0.1
    reset_noise_scale: float = 1e-2
    exclude_current_positions_from_observation: bool = True
    include_cinert_in_observation: bool = True
    include_cvel_in_observation: bool = True
    include_qfrc_actuator_in_observation: bool = True
    include_cfrc_ext_in_observation: bool = True

    def initial(self, key: Array) -> tuple[Array, Array]:
        """The model's own position and rest, with noise."""
        return noisy_rest(self.physics_model(), key, self.reset_noise_scale)

    def observe(self, now: physics.State) -> Array:
        """Positions, velocities and, if wanted, inertias, velocities and contact forces of the bodies."""
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
    """Humanoid-v5."""

    gymnasium_id: ClassVar[str] = "Humanoid-v5"
    xml_file: str = "humanoid.xml"
    forward_reward_weight: float = 1.25
    contact_cost_weight: float = 5e-7
    contact_cost_range: tuple[float, float] = (-float("inf"), 10.0)
    healthy_reward: float = 5.0
    terminate_when_unhealthy: bool = True
    healthy_z_range: tuple[float, float] = (1.0, 2.0)

    def keep(self, now: physics.State) -> Array:
        """Where along x the centre of mass was at the last forward pass."""
        return now.subtree_com[0, 0]

    def judge(self, before: Carried, now: physics.State, action: Array) -> Verdict:
        """The centre of mass's speed and a bonus for being healthy, less control and contact."""
        healthy = within(now.qpos[2], self.healthy_z_range)
        contact = self.contact_cost_weight * squares(now.cfrc_ext)
        terms = {
            "reward_forward": self.forward_reward_weight * (self.keep(now) - before.kept) / self.dt,
            "reward_survive": jnp.where(healthy, self.healthy_reward, 0),
            "reward_ctrl": -self.ctrl_cost_weight * squares(action),
            "reward_contact": -jnp.clip(contact, *self.contact_cost_range),
        }
        terminated = ~healthy if self.terminate_when_unhealthy else jnp.bool_(False)
        return Verdict(sum(terms.values()), terminated, terms)
