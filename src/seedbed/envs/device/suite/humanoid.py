"""dm_control's humanoid, with 21 motors: it stands, walks, or runs."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.suite.task import SuiteTask, small_control, tolerance
from seedbed.types import Array, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanoidStand(SuiteTask):
    """dm_control's humanoid stands up."""

    xml_file: str = "dm_control/humanoid.xml"
    frame_skip: int = 5
    speed: float = 0.0
    """Speed in m/s from which on the reward is whole; 0 is standing."""
    standing_margin: float = 0.35
    """How far below 1.4 m the head is, in m, where a tenth of the reward is left."""
    starts_apart: ClassVar[bool] = True

    def observe(self, now: physics.Data) -> Tree:
        """Returns joints, the head's height, hands and feet from the torso, up, and velocities."""
        torso, axes = now.xpos[self.body("torso")], self.axes(now, "torso")
        limbs = [f"{side}_{limb}" for side in ("left", "right") for limb in ("hand", "foot")]
        return {
            "joint_angles": now.qpos[7:],
            "head_height": now.xpos[self.body("head"), 2],
            "extremities": jnp.concatenate(
                [(now.xpos[self.body(limb)] - torso) @ axes for limb in limbs]
            ),
            "torso_vertical": axes[2],
            "com_velocity": self.read(now, "torso_subtreelinvel"),
            "velocity": now.qvel,
        }

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a head that is high, a torso upright, small control, and for speed or its absence."""
        up, height = self.axes(now, "torso")[2, 2], now.xpos[self.body("head"), 2]
        velocity = self.read(now, "torso_subtreelinvel")[:2]
        terms = {
            "standing": tolerance(height, (1.4, math.inf), self.standing_margin),
            "upright": tolerance(up, (0.9, math.inf), 1.9, "linear", 0.0),
            "small_control": small_control(action),
        }
        if not self.speed:
            return terms | {"still": tolerance(velocity, margin=2).mean()}
        fast = jnp.sqrt(jnp.square(velocity).sum())
        move = tolerance(fast, (self.speed, math.inf), self.speed, "linear", 0.0)
        return terms | {"move": (5 * move + 1) / 6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanoidWalk(HumanoidStand):
    """dm_control's humanoid walks."""

    speed: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanoidRun(HumanoidStand):
    """dm_control's humanoid runs."""

    speed: float = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanoidRunPureState(HumanoidRun):
    """dm_control's humanoid runs, and sees nothing but positions and velocities."""

    def observe(self, now: physics.Data) -> Tree:
        """Returns positions and velocities."""
        return {"position": now.qpos, "velocity": now.qvel}
