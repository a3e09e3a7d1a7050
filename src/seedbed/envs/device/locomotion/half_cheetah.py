"""HalfCheetah: a planar body is paid for running along x (Wawrzynski 2009); as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from seedbed.envs.device.locomotion.task import LocomotionTask
from seedbed.envs.device.mujoco import normal_noise


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfCheetah(LocomotionTask):
    """HalfCheetah-v5: a planar body with two legs that is paid for running along x."""

    gymnasium_id: ClassVar[str] = "HalfCheetah-v5"
    xml_file: str = "half_cheetah.xml"
    frame_skip: int = 5
    ctrl_cost_weight: float = 0.1
    velocity_noise = staticmethod(normal_noise)
