"""Unitree's Go1, and its task with a joystick on flat ground, MuJoCo Playground's Go1JoystickFlatTerrain."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import squares
from seedbed.envs.device.robots.commands import PiecemealCommands
from seedbed.envs.device.robots.edits import limits
from seedbed.envs.device.robots.ride import QuadrupedScales, Ride
from seedbed.envs.device.robots.sensed import SensedRobot, Sight
from seedbed.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go1Scales(QuadrupedScales):
    """The weights of the reward's terms in 1/s; the names are MuJoCo Playground's."""

    dof_pos_limits: float = -1.0
    pose: float = 0.5
    stand_still: float = -1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go1(SensedRobot):
    """A base of the tasks of Go1: its servos, and what it measures."""

    frame_skip: int = 5
    solver_iterations: int = 1
    kp: float = 35.0
    kd: float = 0.5
    base_velocity: bool = True
    """Whether the observation has the trunk's velocity, which a real robot does not measure."""
    feet: ClassVar[tuple[str, ...]] = ("FR", "FL", "RR", "RL")
    joint_noise: ClassVar[float] = 0.03
    """Size of the noise on the joints' positions, in rad."""

    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns velocity, turning, gravity, and the joints' positions and velocities."""
        return [
            *([(self.read(now, "local_linvel"), 0.1)] if self.base_velocity else []),
            (self.read(now, "gyro"), 0.2),
            (self.gravity(now), 0.05),
            (now.qpos[7:] - self.posture, self.joint_noise),
            (now.qvel[6:], 1.5),
        ]

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order."""
        joints = len(self.posture)
        return (
            *([Sight("base_lin_vel", 3, ("local_linvel",))] if self.base_velocity else []),
            Sight("base_ang_vel", 3, ("gyro",)),
            Sight("projected_gravity", 3, ("orientation",)),
            Sight("joint_pos", joints),
            Sight("joint_vel", joints),
            Sight("actions", joints, delay=1),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go1Joystick(Go1, PiecemealCommands):
    """Go1, a quadruped of 12 joints, follows a joystick on flat ground.

    Observation, reward and commands are those of MuJoCo Playground's Go1JoystickFlatTerrain, and so is the
    solver's one iteration: contacts then give way more than those of a solver that has converged.
    """

    xml_file: str = "playground/locomotion/go1/xmls/scene_mjx_feetonly_flat_terrain.xml"
    action_scale: float = 0.5
    command_ranges: tuple[float, float, float] = (1.5, 0.8, 1.2)
    scales: Go1Scales = Go1Scales()

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order."""
        return (*super().sights, Sight("command", 3))

    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns the same without noise, accelerations, forces, the feet and pushes."""
        seen = kept.seen
        return [
            self.read(now, "gyro"),
            self.read(now, "accelerometer"),
            self.gravity(now),
            self.read(now, "local_linvel"),
            self.read(now, "global_angvel"),
            now.qpos[7:] - self.posture,
            now.qvel[6:],
            now.actuator_force,
            seen.contact.astype(jnp.float32),
            self.foot_velocities(now).ravel(),
            seen.air_time,
            seen.push,
            seen.pushed.astype(jnp.float32)[None],
        ]

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order."""
        joints, feet = len(self.posture), len(self.feet)
        return (
            *(Sight(name, 3) for name in ("base_ang_vel", "accelerometer", "projected_gravity")),
            *(Sight(name, 3) for name in ("base_lin_vel", "global_ang_vel")),
            *(Sight(name, joints) for name in ("joint_pos", "joint_vel", "actuator_force")),
            Sight("feet_contact", feet),
            Sight("feet_vel", 3 * feet),
            Sight("feet_air_time", feet),
            Sight("push", 3),
            Sight("pushed", 1),
        )

    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns Playground's terms."""
        terms, joints = self.usual_terms(ride, now, fallen), now.qpos[7:]
        bent = jnp.square(joints - self.posture) * np.tile([1.0, 1.0, 0.1], 4).astype(np.float32)
        model = self.physics_model()
        low, high = 0.95 * limits(model.jnt_limited[1:], model.jnt_range[1:]).astype(np.float32).T
        beyond = jnp.maximum(low - joints, 0) + jnp.maximum(joints - high, 0)
        told = self.told(ride)
        return terms | {
            "feet_slip": terms["feet_slip"] * told,
            "dof_pos_limits": beyond.sum(),
            "pose": jnp.exp(-bent.sum()),
            "stand_still": jnp.where(told, 0.0, jnp.abs(joints - self.posture).sum()),
            "action_rate": squares(action - ride.action),
        }
