"""The base of the tasks that pay a body for moving along x; options have Gymnasium's names."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import (
    MujocoTask,
    TaskState,
    Verdict,
    moved,
    noise,
    noisy_rest,
    squares,
)
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocomotionTask(MujocoTask, abc.ABC):
    """A base of the tasks that pay a body for moving along x."""

    forward_reward_weight: float = 1.0
    """Weight of the speed along x in the reward."""
    ctrl_cost_weight: float
    """Weight of the squared action, a cost."""
    reset_noise_scale: float = 0.1
    """Size of the noise on positions and velocities at the start of an episode."""
    exclude_current_positions_from_observation: bool = True
    """Whether the observation leaves out x of the body, and y if it can move along y."""
    coordinates: ClassVar[int] = 1
    """How many numbers of qpos say where the body is: x, and y if it can move along y."""
    velocity_noise: ClassVar[Callable[[Array, int, float], Array]] = staticmethod(noise)
    """Function that draws the noise on velocities."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv] near the model's initial position at rest; consumes the key."""
        model, scale = self.physics_model(), self.reset_noise_scale
        return noisy_rest(model, key, scale, self.velocity_noise)

    def observe(self, now: physics.Data) -> Array:
        """Returns positions and velocities."""
        hidden = self.coordinates if self.exclude_current_positions_from_observation else 0
        return jnp.concatenate([now.qpos[hidden:], now.qvel])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Rewards speed along x and subtracts the cost of control; never terminates."""
        terms = {
            "reward_forward": self.forward_reward_weight * moved(before, now, 0) / self.dt,
            "reward_ctrl": -self.ctrl_cost_weight * squares(action),
        }
        return Verdict(sum(terms.values()), jnp.bool_(False), terms)
