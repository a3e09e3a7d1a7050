"""Fetch: a toy dog must run to one target after the other; after Brax v1's."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import TaskState, Verdict, noisy_rest
from seedbed.envs.device.targets.task import TargetTask, direction
from seedbed.types import Array

_LEGS = ("front_right", "front_left", "back_right", "back_left")
_FEET = tuple(f"{leg}_lower" for leg in _LEGS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fetch(TargetTask):
    """Brax's Fetch: a toy dog that must run to one target after the other.

    Reward and observation are Brax v1's, but that only the feet's contacts are observed: nothing else
    touches. The friction is 0.6, the square of Brax's constant for each of two bodies.
    """

    xml_file: str = "fetch.xml"
    frame_skip: int = 4
    target_radius: float = 2.0
    target_distances: tuple[float, float] = (2.0, 17.0)
    reset_noise_scale: float = 0.0
    """Size of the noise on positions and velocities at the start of an episode; Brax has none."""
    limbs: ClassVar[tuple[str, ...]] = (
        "shoulders",
        "hips",
        *(f"{leg}_{part}" for leg in _LEGS for part in ("upper", "lower")),
        "torso",
    )
    seeking_body: ClassVar[str] = "torso"

    def height(self, key: Array) -> float:
        """Returns 1 m; does not consume the key."""
        del key
        return 1.0

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Returns the dog on straight legs, at rest but for noise; consumes the key."""
        return noisy_rest(self.physics_model(), key, self.reset_noise_scale)

    def observe(self, now: physics.Data) -> Array:
        """Returns what the torso sees, and for each foot whether it touches the ground."""
        return jnp.concatenate([*self.egocentric(now), self.touched(now, _FEET)])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for a target reached and faced, and little for the way to it, height and being upright."""
        del action
        torso, axes = self.place(now, "torso"), self.axes(now, "torso")
        facing = direction(self.place(now, "target") - torso) @ axes[:, 0]
        hits = self.hit(now)
        terms = {
            "weighted_hits": hits * facing,
            "moving_to_target": 0.1 * self.approach(before.kept, now),
            "torso_is_up": 0.1 * self.dt * axes[2, 2],
            "torso_height": 0.1 * self.dt * torso[2],
        }
        return Verdict(sum(terms.values()), jnp.bool_(False), terms | {"hits": hits})
