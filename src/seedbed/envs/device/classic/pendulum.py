"""Pendulum-v1: a weak motor swings a pendulum up and holds it there."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed.envs.device.classic.task import ClassicTask, wrapped
from seedbed.types import Array, ArraySpec, Box, EnvSpec, EnvState

# The mass and the length of the pendulum are 1.
_MAX_SPEED, _MAX_TORQUE, _DT = 8.0, 2.0, 0.05  # rad/s, N m, s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pendulum(ClassicTask):
    """A pendulum with a weak motor. The aim is to swing it up and to keep it upright.

    The state is (angle from upright, angular velocity) `[2]` in rad and rad/s. The angle stays in
    [-pi, pi), while Gymnasium's grows without limit. The observation `[3]` is (cosine of the angle, sine
    of the angle, angular velocity). An episode ends by its time limit only.
    """

    gymnasium_id: ClassVar[str] = "Pendulum-v1"
    episode_steps: int = 200
    g: float = 10.0
    """Gravity in m/s^2."""

    @property
    def spec(self) -> EnvSpec:
        """Returns the observation, float32 `[3]`, and the action, a torque `[1]` in [-2, 2] N m."""
        return EnvSpec(ArraySpec((3,), "float32"), Box((1,), (-_MAX_TORQUE,), (_MAX_TORQUE,)))

    def reset(self, key: Array) -> EnvState:
        """Starts at a random angle, with a speed of at most 1 rad/s; consumes the key."""
        state = jax.random.uniform(key, (2,), jnp.float32, -1, 1) * jnp.array([math.pi, 1.0])
        return EnvState.opening(state, _shown(state))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Applies the torque `[1]`; the reward is computed from the angle and speed before the step."""
        angle, speed = state.inner
        torque = jnp.clip(action[0], -_MAX_TORQUE, _MAX_TORQUE)
        cost = jnp.square(angle) + 0.1 * jnp.square(speed) + 0.001 * jnp.square(torque)
        speed = jnp.clip(
            speed + (1.5 * self.g * jnp.sin(angle) + 3 * torque) * _DT, -_MAX_SPEED, _MAX_SPEED
        )
        after = jnp.stack([wrapped(angle + speed * _DT), speed])
        return EnvState.after(after, _shown(after), -cost, False)


def _shown(state: Array) -> jax.Array:
    return jnp.stack([jnp.cos(state[0]), jnp.sin(state[0]), state[1]])
