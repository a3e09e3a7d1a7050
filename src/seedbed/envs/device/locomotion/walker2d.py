"""Walker2d: a planar body with two legs is paid for walking along x; as Gymnasium's v5."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from seedbed.envs.device.locomotion.hopper import PlanarLegs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walker2d(PlanarLegs):
    """Walker2d-v5: a planar body with two legs that is paid for walking along x."""

    gymnasium_id: ClassVar[str] = "Walker2d-v5"
    xml_file: str = "walker2d_v5.xml"
    healthy_z_range: tuple[float, float] = (0.8, 2.0)
    healthy_angle_range: tuple[float, float] = (-1.0, 1.0)
