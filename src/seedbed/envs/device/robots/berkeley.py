"""Berkeley Humanoid with a joystick, as MuJoCo Playground's BerkeleyHumanoidJoystickFlatTerrain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from seedbed.envs.device.robots.commands import RestingCommands
from seedbed.envs.device.robots.humanoid import HumanoidScales, UsualHumanoid

_NOISE = {"KFE": 0.05, "FFE": 0.08}  # rad, by endings of joints' names; of the others 0.03


@dataclasses.dataclass(frozen=True, kw_only=True)
class BerkeleyScales(HumanoidScales):
    """The weights of the reward's terms in 1/s; the names are MuJoCo Playground's."""

    torques: float = -2.5e-5
    action_rate: float = -0.01
    termination: float = -1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BerkeleyJoystick(UsualHumanoid, RestingCommands):
    """Berkeley Humanoid, which has 12 joints and no arms, follows a joystick on flat ground.

    Observation, reward, commands and kicks are those of MuJoCo Playground's
    BerkeleyHumanoidJoystickFlatTerrain, and so is the solver's number of iterations.
    """

    xml_file: str = (
        "playground/locomotion/berkeley_humanoid/xmls/scene_mjx_feetonly_flat_terrain.xml"
    )
    command_ranges: tuple[float, float, float] = (1.0, 1.0, 1.0)
    tracking_sigma: float = 0.5
    scales: BerkeleyScales = BerkeleyScales()
    feet: ClassVar[tuple[str, ...]] = ("l_foot", "r_foot")
    soles: ClassVar[tuple[str, ...]] = ("{}1",)
    hips: ClassVar[tuple[str, ...]] = ("HR", "HAA")
    knees: ClassVar[tuple[str, ...]] = ("KFE",)
    pose_weights: ClassVar[Mapping[str, float]] = {"HFE": 0.01, "KFE": 0.01}

    @property
    def joint_noise(self) -> np.ndarray:
        """Returns the sizes of the noise on the joints' positions [12], in rad."""
        return self.per_joint(_NOISE, 0.03)
