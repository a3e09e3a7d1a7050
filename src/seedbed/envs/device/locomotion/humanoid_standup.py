"""HumanoidStandup: a lying humanoid is paid for getting up; as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.locomotion.humanoid import HumanoidBody
from seedbed.envs.device.mujoco import TaskState, Verdict, squares
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanoidStandup(HumanoidBody):
    """HumanoidStandup-v5: a lying humanoid that is paid for getting up."""

    gymnasium_id: ClassVar[str] = "HumanoidStandup-v5"
    xml_file: str = "humanoidstandup.xml"
    uph_cost_weight: float = 1.0
    """No effect, as in Gymnasium, which has this option but does not use it."""
    impact_cost_weight: float = 0.5e-6
    """Weight of the squared contact forces, a cost."""
    impact_cost_range: tuple[float, float] = (-float("inf"), 10.0)
    """Bounds to which the cost of contact is clipped."""

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Rewards height; subtracts the costs of control and impact; never terminates.

        The reward of height is the root's z divided by the model's time step. A constant of 1 is added.
        """
        impact = self.impact_cost_weight * squares(now.cfrc_ext)
        terms = {
            "reward_linup": now.qpos[2] / self.physics_model().opt.timestep,
            "reward_quadctrl": -self.ctrl_cost_weight * squares(action),
            "reward_impact": -jnp.clip(impact, *self.impact_cost_range),
        }
        return Verdict(sum(terms.values()) + 1, jnp.bool_(False), terms)
