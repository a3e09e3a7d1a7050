"""Acrobot-v1: a motor between two links swings them up.

Sources: Sutton (1996); Sutton and Barto (1998), section 11.3.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed.envs.device.classic.task import ClassicTask, wrapped
from seedbed.types import Array, ArraySpec, Discrete, EnvSpec, EnvState

# The masses, lengths and moments of inertia of both links are 1.
_DT, _GRAVITY = 0.2, 9.8  # s, m/s^2
_CENTRE = 0.5  # m, distance of a link's centre of mass from its joint
_MAX_SPEED_1, _MAX_SPEED_2 = 4 * math.pi, 9 * math.pi  # rad/s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acrobot(ClassicTask):
    """Two links with one motor. The aim is to raise the tip by a link's length (1 m) above the pivot.

    The state is (angle 1, angle 2, angular velocity 1, angular velocity 2) `[4]` in rad and rad/s. Angle 1
    is 0 when the first link hangs down, angle 2 is 0 when the links are in line. The observation `[6]`
    has the cosine and sine of each angle, then both angular velocities.
    """

    gymnasium_id: ClassVar[str] = "Acrobot-v1"

    @property
    def spec(self) -> EnvSpec:
        """Returns the observation, float32 `[6]`, and three actions."""
        return EnvSpec(ArraySpec((6,), "float32"), Discrete(3))

    def reset(self, key: Array) -> EnvState:
        """Starts near rest, with both links hanging down; consumes the key."""
        state = jax.random.uniform(key, (4,), jnp.float32, -0.1, 0.1)
        return EnvState.opening(state, _shown(state))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Applies a torque of -1, 0 or 1 N m for action 0, 1 or 2.

        The reward is -1 on each step, but 0 on the step that raises the tip more than 1 m above the pivot
        and so terminates the episode.
        """
        after = _runge_kutta(state.inner, (action - 1).astype(jnp.float32))
        angles = wrapped(after[:2])
        after = jnp.stack(
            [
                angles[0],
                angles[1],
                jnp.clip(after[2], -_MAX_SPEED_1, _MAX_SPEED_1),
                jnp.clip(after[3], -_MAX_SPEED_2, _MAX_SPEED_2),
            ]
        )
        high = -jnp.cos(angles[0]) - jnp.cos(angles[1] + angles[0]) > 1
        return EnvState.after(after, _shown(after), jnp.where(high, 0.0, -1.0), high)


def _runge_kutta(y: Array, torque: Array) -> jax.Array:
    """Returns the state `[4]` after one step of the fourth-order Runge-Kutta method."""
    k1 = _slope(y, torque)
    k2 = _slope(y + _DT / 2 * k1, torque)
    k3 = _slope(y + _DT / 2 * k2, torque)
    k4 = _slope(y + _DT * k3, torque)
    return y + _DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def _slope(y: Array, torque: Array) -> jax.Array:
    """Returns the time derivative of the state `[4]`; Sutton and Barto (1998), section 11.3."""
    angle1, angle2, speed1, speed2 = y
    cos, sin = jnp.cos(angle2), jnp.sin(angle2)
    d1 = _CENTRE**2 + 1 + _CENTRE**2 + 2 * _CENTRE * cos + 2
    d2 = _CENTRE**2 + _CENTRE * cos + 1
    phi2 = _CENTRE * _GRAVITY * jnp.sin(angle1 + angle2)
    phi1 = (
        -_CENTRE * sin * speed2 * (speed2 + 2 * speed1)
        + (_CENTRE + 1) * _GRAVITY * jnp.sin(angle1)
        + phi2
    )
    pull = torque + d2 / d1 * phi1 - _CENTRE * jnp.square(speed1) * sin - phi2
    acceleration2 = pull / (_CENTRE**2 + 1 - jnp.square(d2) / d1)
    acceleration1 = -(d2 * acceleration2 + phi1) / d1
    return jnp.stack([speed1, speed2, acceleration1, acceleration2])


def _shown(state: Array) -> jax.Array:
    angle1, angle2, speed1, speed2 = state
    return jnp.stack(
        [jnp.cos(angle1), jnp.sin(angle1), jnp.cos(angle2), jnp.sin(angle2), speed1, speed2]
    )
