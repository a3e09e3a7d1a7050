"""Boston Dynamics' Spot with a joystick on flat ground, as MuJoCo Playground's SpotFlatTerrainJoystick."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import squares
from seedbed.envs.device.robots.commands import RestingCommands
from seedbed.envs.device.robots.ride import QuadrupedScales, Ride
from seedbed.envs.device.robots.sensed import Sight
from seedbed.types import Array

_HISTORY = 3  # steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpotScales(QuadrupedScales):
    """The weights of the reward's terms in 1/s; the names are MuJoCo Playground's."""

    tracking_lin_vel: float = 1.5
    tracking_ang_vel: float = 0.8
    lin_vel_z: float = -2.0
    posture: float = 1.0
    feet_height: float = -0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpotJoystick(RestingCommands):
    """Spot, a quadruped of 12 joints, follows a joystick on flat ground, without seeing its own speed.

    Observation, reward and commands are those of MuJoCo Playground's SpotFlatTerrainJoystick, and so is the
    solver's number of iterations.
    """

    xml_file: str = "playground/locomotion/spot/xmls/scene_mjx_feetonly_flat_terrain.xml"
    frame_skip: int = 5
    solver_iterations: int = 1
    kp: float = 300.0
    kd: float = 1.0
    action_scale: float = 0.3
    command_ranges: tuple[float, float, float] = (1.0, 0.8, 1.0)
    scales: SpotScales = SpotScales()
    feet: ClassVar[tuple[str, ...]] = ("FL", "FR", "HL", "HR")
    clearance: ClassVar[float] = 0.12
    bounded_targets: ClassVar[bool] = True
    command_steps: ClassVar[int] = 201

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Returns the home posture at rest; does not consume the key."""
        del key
        return self.at_rest()

    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns turning, where up is, the joints' positions, and where the feet are in the body's frame."""
        feet = jnp.concatenate([self.read(now, f"{foot}_pos") for foot in self.feet])
        return [
            (self.read(now, "gyro"), 0.1),
            (self.read(now, "upvector"), 0.03),
            (now.qpos[7:], 0.05),
            (feet, np.tile([0.01, 0.005, 0.02], len(self.feet))),
        ]

    def first_memory(self, key: Array) -> Array:
        """Returns zeros for the errors of the servos, [36]; does not consume the key."""
        del key
        return jnp.zeros(_HISTORY * self.physics_model().nu, jnp.float32)

    def remembered(
        self, kept: Ride, now: physics.Data, measured: Array, targets: Array | None
    ) -> Array:
        """Returns how far the joints were from their targets, the newest step first."""
        if targets is None:
            targets = jnp.zeros_like(kept.action)
        error = measured[6 : 6 + targets.shape[0]] - targets
        return jnp.concatenate([error, kept.memory[: -targets.shape[0]]])

    def state(self, kept: Ride) -> list[Array]:
        """Returns what is measured, with the errors of the servos after the joints, action and command."""
        seen, end = kept.seen, 6 + len(self.posture)
        body, joints, feet = jnp.split(seen.measured, [6, end])
        return [body, joints - self.posture, kept.memory, feet, seen.action, seen.command]

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order."""
        joints, feet = len(self.posture), tuple(f"{foot}_pos" for foot in self.feet)
        return (
            Sight("base_ang_vel", 3, ("gyro",)),
            Sight("upvector", 3, ("upvector",)),
            Sight("joint_pos", joints),
            Sight("servo_error", joints, history=_HISTORY),
            Sight("feet_pos", 3 * len(feet), feet),
            Sight("actions", joints, delay=1),
            Sight("command", 3),
        )

    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns the same without noise, speeds, accelerations, forces, the feet and pushes."""
        seen = kept.seen
        return [
            *(self.read(now, name) for name in ("gyro", "accelerometer", "upvector")),
            *(self.read(now, name) for name in ("local_linvel", "global_angvel")),
            now.qpos[7:] - self.posture,
            *(self.read(now, f"{foot}_pos") for foot in self.feet),
            now.qvel[6:],
            now.actuator_force,
            seen.contact.astype(jnp.float32),
            self.foot_velocities(now).ravel(),
            seen.air_time,
            seen.push,
        ]

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order."""
        joints, feet = len(self.posture), len(self.feet)
        return (
            *(Sight(name, 3) for name in ("base_ang_vel", "accelerometer", "upvector")),
            *(Sight(name, 3) for name in ("base_lin_vel", "global_ang_vel")),
            Sight("joint_pos", joints),
            Sight("feet_pos", 3 * feet),
            *(Sight(name, joints) for name in ("joint_vel", "actuator_force")),
            Sight("feet_contact", feet),
            Sight("feet_vel", 3 * feet),
            Sight("feet_air_time", feet),
            Sight("push", 3),
        )

    def fallen(self, now: physics.Data) -> Array:
        """Returns whether the body leans by more than about 32 degrees."""
        return self.up(now)[2] < 0.85

    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns Playground's terms."""
        bent = squares(now.qpos[7:] - self.posture)
        jerk = action - 2 * ride.action + ride.earlier
        return self.usual_terms(ride, now, fallen) | {
            "posture": jnp.exp(jnp.where(self.told(ride), 0.0, -10.0) * bent),
            "action_rate": squares(action - ride.action) + squares(jerk),
        }
