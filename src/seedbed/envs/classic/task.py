"""What the classic control tasks share: states, and the fields that every environment has."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from seedbed.types import Array, EnvState, Timestep, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassicTask:
    """A task that has a twin in Gymnasium; options are named as Gymnasium's."""

    gymnasium_id: ClassVar[str]
    episode_steps: int = 500

    @property
    def frame_skip(self) -> int:
        """One."""
        return 1

    def gymnasium_options(self) -> dict[str, Any]:
        """The options that change the observation, for `gymnasium.make`: there are none."""
        return {}


def opened(inner: Tree, observation: Array) -> EnvState:
    """The opening state of an episode."""
    no = jnp.bool_(False)
    return EnvState(inner, Timestep(observation, jnp.float32(0), no, no, jnp.bool_(True)), {})


def stepped(inner: Tree, observation: Array, reward: Array, terminated: Array) -> EnvState:
    """The state after a step."""
    no = jnp.bool_(False)
    reward = jnp.asarray(reward, jnp.float32)
    return EnvState(inner, Timestep(observation, reward, jnp.asarray(terminated), no, no), {})


def wrapped(angle: Array) -> jax.Array:
    """The same angle in [-pi, pi)."""
    return angle - 2 * math.pi * jnp.floor(angle / (2 * math.pi) + 0.5)
