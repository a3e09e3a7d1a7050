"""Pendulum-v1: a pendulum is swung up and held by a weak motor."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed.envs.classic.task import ClassicTask, opened, stepped, wrapped
from seedbed.types import Array, ArraySpec, Box, EnvSpec, EnvState

_MAX_SPEED, _MAX_TORQUE, _DT = 8.0, 2.0, 0.05  # rad/s, N m, s; mass and length are 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pendulum(ClassicTask):
    """Keeps (angle from upright in [-pi, pi), angular velocity) `[2]`; Gymnasium lets the angle grow."""

    gymnasium_id: ClassVar[str] = "Pendulum-v1"
    episode_steps: int = 200
    g: float = 10.0  # m/s^2

    @property
    def spec(self) -> EnvSpec:
        """What it shows, and its actions."""
        return EnvSpec(ArraySpec((3,), "float32"), Box((1,), (-_MAX_TORQUE,), (_MAX_TORQUE,)))

    def reset(self, key: Array) -> EnvState:
        """Starts at any angle, slowly."""
        state = jax.random.uniform(key, (2,), jnp.float32, -1, 1) * jnp.array([math.pi, 1.0])
        return opened(state, _shown(state))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Applies a torque; the reward is that of the angle and speed before."""
        angle, speed = state.inner
        torque = jnp.clip(action[0], -_MAX_TORQUE, _MAX_TORQUE)
        cost = jnp.square(angle) + 0.1 * jnp.square(speed) + 0.001 * jnp.square(torque)
        speed = jnp.clip(
            speed + (1.5 * self.g * jnp.sin(angle) + 3 * torque) * _DT, -_MAX_SPEED, _MAX_SPEED
        )
        after = jnp.stack([wrapped(angle + speed * _DT), speed])
        return stepped(after, _shown(after), -cost, jnp.bool_(False))


def _shown(state: Array) -> jax.Array:
    return jnp.stack([jnp.cos(state[0]), jnp.sin(state[0]), state[1]])
