"""Hopper: a planar leg is paid for hopping along x (Erez et al. 2011), and what Walker2d shares with it."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.locomotion.task import LocomotionTask
from seedbed.envs.device.mujoco import TaskState, Verdict, within
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanarLegs(LocomotionTask, abc.ABC):
    """A base of the tasks with legs in a plane, which can fall."""

    frame_skip: int = 4
    ctrl_cost_weight: float = 1e-3
    reset_noise_scale: float = 5e-3
    healthy_reward: float = 1.0
    """Reward of each step on which the body is healthy."""
    terminate_when_unhealthy: bool = True
    """Whether an unhealthy body ends the episode."""
    healthy_z_range: tuple[float, float]
    """Heights of a healthy body, in m."""
    healthy_angle_range: tuple[float, float]
    """Tilts of a healthy body, in rad."""

    def observe(self, now: physics.Data) -> Array:
        """Returns positions and velocities; velocities are clipped to [-10, 10]."""
        return super().observe(now._replace(qvel=jnp.clip(now.qvel, -10, 10)))

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Rewards speed along x and health; subtracts the cost of control."""
        healthy = self.healthy(now)
        moving = super().judge(before, now, action).metrics
        # In Gymnasium's order, which decides how the sum is rounded.
        terms = {
            "reward_forward": moving["reward_forward"],
            "reward_survive": jnp.where(healthy, self.healthy_reward, 0),
            "reward_ctrl": moving["reward_ctrl"],
        }
        terminated = ~healthy if self.terminate_when_unhealthy else jnp.bool_(False)
        return Verdict(sum(terms.values()), terminated, terms)

    def healthy(self, now: physics.Data) -> Array:
        """Returns whether the body is at a healthy height and tilt."""
        upright = within(now.qpos[2], self.healthy_angle_range)
        return within(now.qpos[1], self.healthy_z_range) & upright


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hopper(PlanarLegs):
    """Hopper-v5: a planar leg that is paid for hopping along x."""

    gymnasium_id: ClassVar[str] = "Hopper-v5"
    xml_file: str = "hopper.xml"
    healthy_z_range: tuple[float, float] = (0.7, float("inf"))
    healthy_angle_range: tuple[float, float] = (-0.2, 0.2)
    healthy_state_range: tuple[float, float] = (-100.0, 100.0)
    """Values of all angles and velocities of a healthy body."""

    def healthy(self, now: physics.Data) -> Array:
        """Returns whether the body is at a healthy height and tilt, with healthy angles and velocities."""
        rest = jnp.concatenate([now.qpos[2:], now.qvel])
        return within(rest, self.healthy_state_range).all() & super().healthy(now)
