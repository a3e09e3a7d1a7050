"""Swimmer: three links in a viscous medium are paid for moving along x (Coulom 2002); as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from seedbed.envs.device.locomotion.task import LocomotionTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swimmer(LocomotionTask):
    """Swimmer-v5: three links in a viscous medium that are paid for moving along x."""

    gymnasium_id: ClassVar[str] = "Swimmer-v5"
    xml_file: str = "swimmer.xml"
    frame_skip: int = 4
    ctrl_cost_weight: float = 1e-4
    coordinates: ClassVar[int] = 2
