"""The parts that the classic control tasks share: their common fields, and angles."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from seedbed.types import Array


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


def wrapped(angle: Array) -> jax.Array:
    """Returns the same angle in [-pi, pi), in rad."""
    return angle - 2 * math.pi * jnp.floor(angle / (2 * math.pi) + 0.5)
