"""Booster's T1 with a joystick on flat ground, as MuJoCo Playground's T1JoystickFlatTerrain."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import squares
from seedbed.envs.device.robots.commands import RestingCommands
from seedbed.envs.device.robots.humanoid import HumanoidScales, UsualHumanoid
from seedbed.envs.device.robots.ride import Ride
from seedbed.physics.math import quat_to_mat
from seedbed.types import Array

_APART = (
    0.2  # m between the feet, across the robot, below which there is a cost of at most half of it
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T1Scales(HumanoidScales):
    """The weights of the reward's terms in 1/s; the names are MuJoCo Playground's."""

    alive: float = 0.25
    joint_deviation_hip: float = -0.1
    dof_acc: float = 0.0
    dof_vel: float = 0.0
    feet_distance: float = -1.0
    collision: float = -1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class T1Joystick(UsualHumanoid, RestingCommands):
    """T1, a humanoid of 23 joints, follows a joystick on flat ground.

    Observation, reward, commands and kicks are those of MuJoCo Playground's T1JoystickFlatTerrain, and so is
    the solver's number of iterations.
    """

    xml_file: str = "playground/locomotion/t1/xmls/scene_mjx_feetonly_flat_terrain.xml"
    action_scale: float = 1.0
    push_speed: float = 1.0
    """Largest speed in m/s that a kick adds to the trunk along the ground, every 5 to 10 s; 0: none."""
    command_ranges: tuple[float, float, float] = (1.0, 0.8, 1.0)
    scales: T1Scales = T1Scales()
    soles: ClassVar[tuple[str, ...]] = ("{}_1", "{}_2", "{}_3", "{}_4")
    clearance: ClassVar[float] = 0.12
    standing_height: ClassVar[float] = 0.665
    strides: ClassVar[tuple[float, float]] = (1.25, 1.75)
    stands: ClassVar[bool] = True
    hips: ClassVar[tuple[str, ...]] = ("Hip_Roll", "Hip_Yaw")
    knees: ClassVar[tuple[str, ...]] = ("Knee_Pitch",)
    pose_weights: ClassVar[Mapping[str, float]] = {
        "Shoulder_Pitch": 0.1,
        "Hip_Pitch": 0.01,
        "Knee_Pitch": 0.01,
    }

    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns Playground's terms."""
        return super().terms(ride, now, action, fallen) | {
            "lin_vel_z": jnp.square(self.velocity(now)[2]),
            "ang_vel_xy": squares(self.turning(now)[:2]),
            "dof_acc": squares(now.qacc[6:]),
            "dof_vel": squares(now.qvel[6:]),
            "feet_distance": jnp.clip(_APART - self._feet_apart(now), 0.0, _APART / 2),
            "collision": self.found(now, "left_foot_right_foot").astype(jnp.float32),
        }

    def _feet_apart(self, now: physics.Data) -> jax.Array:
        """Returns how far apart the feet are across the trunk's heading, in m."""
        forward = quat_to_mat(self.read(now, self.attitude))[:2, 0]
        left, right = self.sites(now)
        way = (left - right)[:2]
        across = forward[0] * way[1] - forward[1] * way[0]
        return jnp.abs(across) / jnp.sqrt(squares(forward))
