"""MountainCar-v0: a car that is too weak for a hill must gain speed by driving to and fro (Moore 1990)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed.envs.device.classic.task import ClassicTask
from seedbed.types import Array, ArraySpec, Discrete, EnvSpec, EnvState

_LEFT, _RIGHT, _MAX_SPEED, _GOAL = -1.2, 0.6, 0.07, 0.5
_FORCE, _GRAVITY = 0.001, 0.0025


@dataclasses.dataclass(frozen=True, kw_only=True)
class MountainCar(ClassicTask):
    """A weak car in a valley. The aim is to reach the top of the hill on the right.

    The state, which is also the observation, is (position, velocity) `[2]`; velocity is per step.
    """

    gymnasium_id: ClassVar[str] = "MountainCar-v0"
    episode_steps: int = 200
    goal_velocity: float = 0.0
    """Smallest velocity at which reaching the top counts."""

    @property
    def spec(self) -> EnvSpec:
        """Returns the observation, float32 `[2]`, and three actions."""
        return EnvSpec(ArraySpec((2,), "float32"), Discrete(3))

    def reset(self, key: Array) -> EnvState:
        """Starts at rest near the bottom of the valley; consumes the key."""
        position = jax.random.uniform(key, (), jnp.float32, -0.6, -0.4)
        state = jnp.stack([position, jnp.zeros_like(position)])
        return EnvState.opening(state, state)

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Accelerates to the left, not at all or to the right for action 0, 1 or 2.

        The reward is -1 on each step. The episode terminates at the top of the hill.
        """
        position, velocity = state.inner
        push = (action - 1).astype(jnp.float32) * _FORCE
        velocity = velocity + push - _GRAVITY * jnp.cos(3 * position)
        velocity = jnp.clip(velocity, -_MAX_SPEED, _MAX_SPEED)
        position = jnp.clip(position + velocity, _LEFT, _RIGHT)
        velocity = jnp.where((position == _LEFT) & (velocity < 0), 0.0, velocity)
        reached = (position >= _GOAL) & (velocity >= self.goal_velocity)
        after = jnp.stack([position, velocity])
        return EnvState.after(after, after, -1.0, reached)
