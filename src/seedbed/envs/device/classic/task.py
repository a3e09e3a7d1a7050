"""The parts that the classic control tasks share: their common fields and the states they return."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from seedbed.types import Array, EnvState, Timestep, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassicTask:
    """A base for tasks that Gymnasium has too. Options have Gymnasium's names."""

    gymnasium_id: ClassVar[str]
    """Gymnasium's id of the same task."""
    episode_steps: int = 500
    """Steps after which an episode is truncated; 0 is never."""

    @property
    def frame_skip(self) -> int:
        """Returns 1: each step is one step of the simulation."""
        return 1

    def gymnasium_options(self) -> dict[str, Any]:
        """Returns an empty dict: no option for `gymnasium.make` changes the observation."""
        return {}


def opened(inner: Tree, observation: Array) -> EnvState:
    """Returns the opening state of an episode: reward 0, `first` set, no metrics."""
    no = jnp.bool_(False)
    return EnvState(inner, Timestep(observation, jnp.float32(0), no, no, jnp.bool_(True)), {})


def stepped(inner: Tree, observation: Array, reward: Array, terminated: Array) -> EnvState:
    """Returns the state after a step; it is never truncated, because a wrapper adds the time limit."""
    no = jnp.bool_(False)
    reward = jnp.asarray(reward, jnp.float32)
    return EnvState(inner, Timestep(observation, reward, jnp.asarray(terminated), no, no), {})


def wrapped(angle: Array) -> jax.Array:
    """Returns the same angle in [-pi, pi), in rad."""
    return angle - 2 * math.pi * jnp.floor(angle / (2 * math.pi) + 0.5)
