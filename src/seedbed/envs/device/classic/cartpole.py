"""CartPole-v1: an agent pushes a cart to keep its pole upright (Barto, Sutton and Anderson 1983)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed.envs.device.classic.task import ClassicTask
from seedbed.types import Array, ArraySpec, Discrete, EnvSpec, EnvState

_GRAVITY, _FORCE, _DT = 9.8, 10.0, 0.02  # m/s^2, N, s
_POLE, _TOTAL = 0.1, 1.1  # kg: mass of the pole, mass of pole and cart
_LENGTH = 0.5  # m, half the length of the pole
_MAX_ANGLE, _MAX_POSITION = 12 * 2 * math.pi / 360, 2.4  # rad, m


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartPole(ClassicTask):
    """A cart with a pole on it. The aim is to keep the pole upright and the cart near the middle.

    The state, which is also the observation, is (position, velocity, angle, angular velocity) `[4]` in
    m, m/s, rad and rad/s.
    """

    gymnasium_id: ClassVar[str] = "CartPole-v1"
    sutton_barto_reward: bool = False
    """Whether the reward is 0 on each step and -1 at the end, instead of 1 on each step."""

    @property
    def spec(self) -> EnvSpec:
        """Returns the observation, float32 `[4]`, and two actions."""
        return EnvSpec(ArraySpec((4,), "float32"), Discrete(2))

    def reset(self, key: Array) -> EnvState:
        """Starts near rest, with the pole almost upright; consumes the key."""
        state = jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05)
        return EnvState.opening(state, state)

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Pushes the cart to the left for action 0, to the right for action 1.

        The episode terminates when the pole tilts by more than 12 degrees or the cart is more than 2.4 m
        from the middle.
        """
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
        return EnvState.after(after, after, reward, fell)
