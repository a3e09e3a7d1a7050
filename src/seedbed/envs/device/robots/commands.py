"""How the commands of joystick tasks change, in the ways of MuJoCo Playground.

Name these bases last: a dataclass takes the defaults of its fields from the bases before them.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed.envs.device.robots.joystick import JoystickTask
from seedbed.types import Array

_SHARE = (0.9, 0.25, 0.5)  # how often a new command is not 0, for each of its numbers
_STILL = 0.1  # how often a command is 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecemealCommands(JoystickTask):
    """A base of the tasks whose commands change number by number, five seconds apart in the mean."""

    def next_command(self, key: Array, last: Array) -> Array:
        """Draws each number anew with probability 1/2; it is then 0 more often than not."""
        drawn, kept, other = jax.random.split(key, 3)
        new = self.first_command(drawn) * jax.random.bernoulli(kept, jnp.asarray(_SHARE), (3,))
        return jnp.where(jax.random.bernoulli(other, 0.5, (3,)), new, last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SteadyCommands(JoystickTask):
    """A base of the tasks whose commands change as a whole, after equal times."""

    command_steps: ClassVar[int] = 501
    """Steps that a command lasts."""

    def next_command(self, key: Array, last: Array) -> Array:
        """Draws as at the start; consumes the key."""
        del last
        return self.first_command(key)

    def lasting(self, key: Array) -> Array:
        """Returns the same number of steps for each command; does not consume the key."""
        del key
        return jnp.int32(self.command_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestingCommands(SteadyCommands):
    """A base of the tasks whose commands change as a whole, and are 0 once in ten times."""

    def first_command(self, key: Array) -> Array:
        """Draws any command, or 0; consumes the key."""
        drawn, still = jax.random.split(key)
        command = super().first_command(drawn)
        return jnp.where(jax.random.bernoulli(still, _STILL), 0.0, command)
