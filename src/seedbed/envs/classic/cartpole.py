"""CartPole-v1: a pole on a cart is kept upright by pushing the cart (Barto, Sutton and Anderson 1983)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed.envs.classic.task import ClassicTask, opened, stepped
from seedbed.types import Array, ArraySpec, Discrete, EnvSpec, EnvState

_GRAVITY, _FORCE, _DT = 9.8, 10.0, 0.02  # m/s^2, N, s
_POLE, _TOTAL = 0.1, 1.1  # kg: the pole; pole and cart
_LENGTH = 0.5  # m, half the pole
_MAX_ANGLE, _MAX_POSITION = 12 * 2 * math.pi / 360, 2.4  # rad, m


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartPole(ClassicTask):
    """Keeps (position, velocity, angle, angular velocity) `[4]`, which is what it shows."""

    gymnasium_id: ClassVar[str] = "CartPole-v1"
    sutton_barto_reward: bool = False  # 0 a step and -1 at the end, instead of 1 a step

    @property
    def spec(self) -> EnvSpec:
        """What it shows, and its actions."""
        return EnvSpec(ArraySpec((4,), "float32"), Discrete(2))

    def reset(self, key: Array) -> EnvState:
        """Starts near the upright rest."""
        state = jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05)
        return opened(state, state)

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Pushes to the left (0) or right (1)."""
        x, x_dot, theta, theta_dot = state.inner
        cos, sin = jnp.cos(theta), jnp.sin(theta)
        force = jnp.where(action == 1, _FORCE, -_FORCE)
        push = (force + _POLE * _LENGTH * jnp.square(theta_dot) * sin) / _TOTAL
        theta_acc = (_GRAVITY * sin - cos * push) / (
            _LENGTH * (4 / 3 - _POLE * jnp.square(cos) / _TOTAL)
        )
        x_acc = push - _POLE * _LENGTH * theta_acc * cos / _TOTAL
        x, x_dot = x + _DT * x_dot, x_dot + _DT * x_acc
        theta, theta_dot = theta + _DT * theta_dot, theta_dot + _DT * theta_acc
        fell = (jnp.abs(x) > _MAX_POSITION) | (jnp.abs(theta) > _MAX_ANGLE)
        reward = jnp.where(fell, -1.0, 0.0) if self.sutton_barto_reward else jnp.float32(1)
        after = jnp.stack([x, x_dot, theta, theta_dot])
        return stepped(after, after, reward, fell)
