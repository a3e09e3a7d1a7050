"""HumanoidStandup: a lying humanoid that is paid for getting up; Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.locomotion.humanoid import HumanoidBody
from seedbed.envs.locomotion.task import Carried, Verdict, squares
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanoidStandup(HumanoidBody):
    """HumanoidStandup-v5."""

    gymnasium_id: ClassVar[str] = "HumanoidStandup-v5"
    xml_file: str = "humanoidstandup.xml"
    uph_cost_weight: float = 1.0  # Gymnasium takes it and does not use it; nor does this
    impact_cost_weight: float = 0.5e-6
    impact_cost_range: tuple[float, float] = (-float("inf"), 10.0)

    def judge(self, before: Carried, now: physics.State, action: Array) -> Verdict:
        """The height of the root over the model's time step, less control and impact; no end."""
        impact = self.impact_cost_weight * squares(now.cfrc_ext)
        terms = {
            "reward_linup": now.qpos[2] / self.physics_model().opt.timestep,
            "reward_quadctrl": -self.ctrl_cost_weight * squares(action),
            "reward_impact": -jnp.clip(impact, *self.impact_cost_range),
        }
        return Verdict(sum(terms.values()) + 1, jnp.bool_(False), terms)
