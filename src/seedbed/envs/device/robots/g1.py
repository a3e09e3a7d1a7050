"""Unitree's G1 with a joystick on flat ground, as MuJoCo Playground's G1JoystickFlatTerrain."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import squares
from seedbed.envs.device.robots.commands import RestingCommands
from seedbed.envs.device.robots.humanoid import HumanoidScales, UsualHumanoid
from seedbed.envs.device.robots.ride import Ride
from seedbed.types import Array

_UP = np.array([0.073, 0.0, 1.0], np.float32)  # where the torso's z axis should point
_HEAVIEST = 500.0  # N on a foot without a cost
_STUMBLES = ("right_foot_left_foot", "left_foot_right_shin", "right_foot_left_shin")
_COLLISIONS = ("left_hand_left_thigh", "right_hand_right_thigh")


@dataclasses.dataclass(frozen=True, kw_only=True)
class G1Scales(HumanoidScales):
    """The weights of the reward's terms in 1/s; the names are MuJoCo Playground's."""

    tracking_ang_vel: float = 0.75
    orientation: float = -2.0
    stand_still: float = -1.0
    termination: float = -100.0
    pose: float = -0.1
    dof_acc: float = 0.0
    collision: float = -0.1
    contact_force: float = -0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class G1Joystick(UsualHumanoid, RestingCommands):
    """G1, a humanoid of 29 joints, follows a joystick on flat ground.

    Observation, reward, commands and kicks are those of MuJoCo Playground's G1JoystickFlatTerrain, and so is
    the solver's number of iterations. A reward may be less than 0.
    """

    xml_file: str = "playground/locomotion/g1/xmls/scene_mjx_feetonly_flat_terrain.xml"
    command_ranges: tuple[float, float, float] = (1.0, 0.5, 1.0)
    scales: G1Scales = G1Scales()
    home: ClassVar[str] = "knees_bent"
    frame: ClassVar[str] = "_pelvis"
    lowest_reward: ClassVar[float] = -math.inf
    clearance: ClassVar[float] = 0.15
    hips: ClassVar[tuple[str, ...]] = ("hip_roll", "hip_yaw")
    knees: ClassVar[tuple[str, ...]] = ("knee",)

    def up(self, now: physics.Data) -> Array:
        """Returns the torso's z axis in the world [3]; the other numbers of the trunk are the pelvis's."""
        return self.read(now, "upvector_torso")

    def fallen(self, now: physics.Data) -> Array:
        """Returns whether the torso points down, or a foot touches the other or its shin."""
        return super().fallen(now) | self.any_found(now, _STUMBLES)

    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns Playground's terms."""
        terms, bent = super().terms(ride, now, action, fallen), now.qpos[7:] - self.posture
        linear, angular = self.in_world(now)
        moves = (jnp.sqrt(squares(linear[:2])) > 0.1) | (jnp.abs(angular[2]) > 0.1)
        torso = self.read(now, "global_linvel_torso")
        loads = jnp.stack([self.read(now, f"{foot}_force")[2] for foot in self.feet])
        return terms | {
            "lin_vel_z": jnp.square(torso[2]) + jnp.square(linear[2]),
            "ang_vel_xy": squares(self.read(now, "global_angvel_torso")[:2]),
            "orientation": squares(self.up(now) - _UP),
            "dof_acc": squares(now.qacc[6:]),
            "feet_air_time": self.paid_air_time(ride, now),
            "feet_phase": terms["feet_phase"] * (moves | self.told(ride)),
            "stand_still": jnp.where(
                jnp.sqrt(squares(ride.command)) < 0.01, jnp.abs(bent).sum(), 0.0
            ),
            # Playground multiplies each of the four hip joints by the sum of their four weights.
            "joint_deviation_hip": self.bending(bent, self.hips)
            * jnp.where(ride.command[1] > 0.1, 2.0, 4.0),
            "pose": squares(bent),
            "collision": self.any_found(now, _COLLISIONS).astype(jnp.float32),
            "contact_force": jnp.maximum(jnp.abs(loads) - _HEAVIEST, 0.0).sum(),
        }
