"""Ur5e: an industrial arm must touch one target after the other; after Brax v1's."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import TaskState, Verdict, noisy_rest
from seedbed.envs.device.targets.task import TargetTask
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ur5e(TargetTask):
    """Brax's Ur5e: an arm with the joints of a UR5e that must touch one target after the other.

    Reward and observation are Brax v1's, but that the joints' angles are observed, too: a joint at its limit
    of 360 degrees looks like one at 0, and a policy that cannot tell is stuck there. The links are as far
    beside one another that the last one is always 0.135 m from the axis of the base. Targets are not nearer
    than that: a fifth of Brax's are out of reach, and an episode never gets beyond the first of these.
    Nothing collides, there as here.
    """

    xml_file: str = "ur5e.xml"
    frame_skip: int = 8
    target_radius: float = 0.02
    target_distances: tuple[float, float] = (0.135, 0.52)
    limbs: ClassVar[tuple[str, ...]] = (
        "shoulder_link",
        "upper_arm_link",
        "forearm_link",
        "wrist_1_link",
        "wrist_2_link",
        "wrist_3_link",
    )
    seeking_body: ClassVar[str] = "wrist_3_link"

    def height(self, key: Array) -> float:
        """Returns 0.5 m; does not consume the key."""
        del key
        return 0.5

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Returns the arm straight up and at rest; does not consume the key."""
        return noisy_rest(self.physics_model(), key, 0.0)

    def observe(self, now: physics.Data) -> Array:
        """Returns what the last link sees, and the angles of the joints in rad."""
        return jnp.concatenate([*self.egocentric(now), now.qpos])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for a target reached, and little for the way to it."""
        del action
        hits = self.hit(now)
        moving = 0.1 * self.approach(before.kept, now)
        return Verdict(hits + moving, jnp.bool_(False), {"hits": hits, "moving_to_target": moving})
