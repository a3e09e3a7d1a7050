"""Apptronik's Apollo with a joystick on flat ground, as MuJoCo Playground's ApolloJoystickFlatTerrain."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import squares
from seedbed.envs.device.robots.commands import PiecemealCommands
from seedbed.envs.device.robots.humanoid import Humanoid
from seedbed.envs.device.robots.ride import Ride, Scales
from seedbed.envs.device.robots.sensed import Sight
from seedbed.types import Array

_WEIGHTS = {"shoulder_fe": 0.1, "hip_fe": 0.01, "knee_fe": 0.01, "hip_aa": 0.0}
_TORSO = dict.fromkeys(("torso_yaw", "torso_roll", "torso_pitch"), 5.0)
_COLLISIONS = (
    "collision_l_hand_plate_collision_capsule_body_l_thigh",
    "collision_r_hand_plate_collision_capsule_body_r_thigh",
    "collision_l_sole_collision_r_sole",
    "collision_capsule_body_l_shin_collision_capsule_body_r_shin",
    "collision_capsule_body_l_thigh_collision_capsule_body_r_thigh",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApolloScales(Scales):
    """The weights of the reward's terms in 1/s; names and numbers are MuJoCo Playground's."""

    tracking: float = 1.0
    lin_vel_z: float = 0.0
    ang_vel_xy: float = -0.15
    orientation: float = -1.0
    torques: float = 0.0
    action_rate: float = 0.0
    energy: float = 0.0
    feet_phase: float = 1.0
    alive: float = 0.0
    termination: float = 0.0
    pose: float = -1.0
    collision: float = -1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApolloJoystick(Humanoid, PiecemealCommands):
    """Apollo, a humanoid of 32 joints, follows a joystick on flat ground.

    Observation, reward, commands and kicks are those of MuJoCo Playground's ApolloJoystickFlatTerrain, and so
    is the solver's number of iterations. A reward may be less than 0.
    """

    xml_file: str = "playground/locomotion/apollo/xmls/scene_mjx_feetonly_flat_terrain.xml"
    frame_skip: int = 4
    command_ranges: tuple[float, float, float] = (1.5, 0.8, 1.5)
    scales: ApolloScales = ApolloScales()
    home: ClassVar[str] = "knees_bent"
    feet: ClassVar[tuple[str, ...]] = ("l_foot", "r_foot")
    soles: ClassVar[tuple[str, ...]] = ("collision_{0[0]}_sole",)  # of l_foot: collision_l_sole
    lowest_reward: ClassVar[float] = -math.inf
    clearance: ClassVar[float] = 0.12
    strides: ClassVar[tuple[float, float]] = (1.25, 1.75)
    stands: ClassVar[bool] = True

    @property
    def attitude(self) -> str:
        """Returns the name of the sensor of the trunk's orientation."""
        return "orientation_torso"

    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns the state, the same without noise, forces, and the trunk's place and orientation."""
        return [
            *self.state(kept),
            self.turning(now),
            self.gravity(now),
            self.velocity(now),
            now.qpos[7:] - self.posture,
            now.qvel[6:],
            now.actuator_force,
            now.qpos[:7],
        ]

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order."""
        joints = len(self.posture)
        return (
            *self.sights,
            *(Sight(name, 3) for name in ("base_ang_vel", "projected_gravity", "base_lin_vel")),
            *(Sight(name, joints) for name in ("joint_pos", "joint_vel", "actuator_force")),
            Sight("position", 3),
            Sight("orientation", 4),
        )

    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns Playground's terms."""
        velocity, turning = self.velocity(now), self.turning(now)
        off = squares(ride.command[:2] - velocity[:2])
        off_turning = jnp.square(ride.command[2] - turning[2])
        force, down = now.actuator_force, fallen.astype(jnp.float32)
        strongest = np.asarray(self.physics_model().jnt_actfrcrange[1:, 1], np.float32)
        strongest = np.where(strongest > 0, strongest, np.inf)  # 0: the file sets no bound
        follows = jnp.exp(-off / self.tracking_sigma)
        return {
            "tracking": follows + 0.5 * jnp.exp(-off_turning / self.tracking_sigma),
            "lin_vel_z": jnp.square(velocity[2]),
            "ang_vel_xy": squares(turning[:2]),
            "orientation": squares(self.up(now)[:2]),
            "torques": jnp.abs(force).sum(),
            "action_rate": squares(action - ride.action),
            "energy": jnp.abs(self.powers(now) / strongest).sum(),
            "feet_phase": ride.memory.kept_by(self.heights(now), self.clearance),
            "alive": 1.0 - down,
            "termination": down,
            "pose": self._off_pose(now.qpos[7:], ride),
            "collision": self.any_found(now, _COLLISIONS).astype(jnp.float32),
        }

    def _off_pose(self, joints: Array, ride: Ride) -> jax.Array:
        """Returns the cost of joints [nq - 7] that are not as in the posture, in rad^2."""
        bent = jnp.square(joints - self.posture)
        rolls = self.per_joint({"hip_aa": 1.0}, 0.0)
        walking, standing = self.per_joint(_WEIGHTS | _TORSO, 1.0), 1.0 - rolls
        weights = jnp.where(self.told(ride), walking, standing)
        # The legs may spread while the robot goes sideways.
        rolling = jnp.where(jnp.abs(ride.command[1]) > 0.3, 0.01, 1.0)
        return (bent * (weights + rolling * rolls)).sum()
