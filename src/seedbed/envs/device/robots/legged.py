"""Any legged robot with position servos and a free trunk, from its MJCF file alone, with a joystick."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mjcf_files import Version
from seedbed.envs.device.mujoco import squares
from seedbed.envs.device.robots.edits import limits
from seedbed.envs.device.robots.joystick import JoystickTask
from seedbed.envs.device.robots.ride import QuadrupedScales, Ride
from seedbed.envs.device.robots.sensed import Sight
from seedbed.envs.device.robots.standing import Standing, standing, timestep_of
from seedbed.envs.device.robots.touch import touches, with_touch
from seedbed.physics.math import quat_to_mat
from seedbed.types import Array

_CLEARANCE = 0.27  # of the height at which the trunk stands


_kept = functools.cache(with_touch)
"""The same for models that are kept, too; not for those of an episode, which are traced."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeggedScales(QuadrupedScales):
    """The weights of the reward's terms in 1/s."""

    tracking_lin_vel: float = 4.0
    tracking_ang_vel: float = 2.0
    pose: float = 0.5
    stand_still: float = -1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Legged(JoystickTask):
    """A legged robot, of which only its MJCF file is known, follows a joystick.

    Its feet are the bodies on which it stands in the posture of the file's first keyframe, or of qpos0. The
    ground must be flat: heights of the trunk and of the feet count from where the feet stand, and an episode
    ends when the trunk leans by 60 degrees or sinks to half its height. The reward is Go1's but for its
    weights. The trunk's x axis is forward, y left and z up. The policy sees the trunk's velocity, which a
    robot without an estimator of it does not know, unless `base_velocity` is False.
    """

    base_velocity: bool = True
    """Whether the observation has the trunk's velocity, which a real robot does not measure."""
    foot_bodies: tuple[str, ...] = ()
    """Bodies that are the feet of a robot that need not stand by itself; () are those on which it stands."""
    frame_skip: int = 0
    """Simulation steps in one environment step; 0 is as many as 0.02 s have."""
    least_frame_skip: ClassVar[int] = 0
    early: ClassVar[tuple[str, ...]] = ("kp", "kd", "foot_bodies")
    """Options that say how the robot stands: its defaults are chosen after they are known."""
    action_scale: float = 0.5
    command_ranges: tuple[float, float, float] = (1.0, 0.5, 1.0)
    tracking_sigma: float = 0.5
    push_speed: float = 1.0
    scales: LeggedScales = LeggedScales()

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be, or a file that is no model."""
        super().__post_init__()
        timestep = timestep_of(Version.of(self.model_path))
        if not self.frame_skip:
            steps = max(1, round(0.02 / timestep))
            object.__setattr__(self, "frame_skip", steps)

    @functools.cached_property
    def _stands(self) -> Standing:
        """How the robot stands; raises SeedbedError if it cannot, with the options that it has by now."""
        return standing(Version.of(self.model_path), self.edits, self.foot_bodies)

    def described(self) -> str:
        """Returns what has been found in the file, a line for a person who trains the robot."""
        return self._stands.told()

    def physics_model(self) -> physics.Model:
        """Returns the model to simulate, in which sensors tell what the feet touch."""
        return with_touch(super().physics_model(), self._stands.feet)

    @functools.cached_property
    def _model(self) -> physics.Model:
        return _kept(super()._model, self._stands.feet)

    @property
    def feet(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns the names of the bodies on which the robot stands."""
        return self._stands.names

    @property
    def clearance(self) -> float:  # type: ignore[override]
        """Returns how high a foot should swing, in m."""
        return float(_CLEARANCE * self._height(self._stands.qpos[2]))

    @property
    def home(self) -> str:  # type: ignore[override]
        """Returns the name of the file's first keyframe, which has the posture; "" without one."""
        return self._stands.home or ""

    @property
    def at_home(self) -> np.ndarray:
        """Returns qpos [nq] in which the robot stands."""
        return self._stands.qpos.astype(np.float32)

    @property
    def opening(self) -> np.ndarray:
        """Returns qpos [nq] in which it has come to rest: in the posture its feet are in the ground."""
        return self._stands.settled.astype(np.float32)

    @property
    def rest(self) -> np.ndarray:
        """Returns the targets [nu] of the servos in rad about which actions move them."""
        return self.at_home[self._stands.servos]

    def next_command(self, key: Array, last: Array) -> Array:
        """Draws any command, or 0 once in ten times; consumes the key."""
        del last
        drawn, still = jax.random.split(key)
        command = self.first_command(drawn)
        return jnp.where(jax.random.bernoulli(still, 0.1), 0.0, command)

    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns velocity, turning, gravity, and positions and velocities of the servos' joints."""
        return [
            *([(self.velocity(now), 0.1)] if self.base_velocity else []),
            (self.turning(now), 0.2),
            (-self._axes(now)[2], 0.05),
            (self._bent(now), 0.03),
            (jnp.stack([now.qvel[dof] for dof in self._stands.dofs]), 0.5),
        ]

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order."""
        servos = len(self._stands.servos)
        return (
            *([Sight("base_lin_vel", 3)] if self.base_velocity else []),
            Sight("base_ang_vel", 3),
            Sight("projected_gravity", 3),
            Sight("joint_pos", servos),
            Sight("joint_vel", servos),
            Sight("actions", servos, delay=1),
            Sight("command", 3),
        )

    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns the same without noise, the velocity in any case, the height, forces, feet and pushes."""
        seen = kept.seen
        return [
            self.observe(now),
            *([] if self.base_velocity else [self.velocity(now)]),
            self._height(now.qpos[2:3]),
            self.forces(now),
            seen.contact.astype(jnp.float32),
            self.foot_velocities(now).ravel(),
            seen.air_time,
            seen.push,
        ]

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order."""
        servos, feet = len(self._stands.servos), len(self.feet)
        return (
            *self.sights[:-2],
            *([] if self.base_velocity else [Sight("base_lin_vel", 3)]),
            Sight("height", 1),
            Sight("actuator_force", servos),
            Sight("feet_contact", feet),
            Sight("feet_vel", 3 * feet),
            Sight("feet_air_time", feet),
            Sight("push", 3),
        )

    def fallen(self, now: physics.Data) -> Array:
        """Returns whether the trunk leans by 60 degrees or is at half its height."""
        low = self._height(now.qpos[2]) < 0.5 * self._height(self._stands.qpos[2])
        return (self.up(now)[2] < 0.5) | low

    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns Go1's terms, without that of the joints' limits."""
        bent, told = self._bent(now), self.told(ride)
        return self.usual_terms(ride, now, fallen) | {
            "pose": jnp.exp(-squares(bent)),
            "stand_still": jnp.where(told, 0.0, jnp.abs(bent).sum()),
            "action_rate": squares(action - ride.action),
        }

    def velocity(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's velocity in its own frame [3], in m/s."""
        return now.qvel[:3] @ self._axes(now)

    def turning(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's angular velocity in its own frame [3], in rad/s."""
        return jnp.asarray(now.qvel[3:6])

    def in_world(self, now: physics.Data) -> tuple[Array, Array]:
        """Returns the trunk's velocity and angular velocity in the world, [3] each, in m/s and rad/s."""
        return now.qvel[:3], self._axes(now) @ now.qvel[3:6]

    def up(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's own z axis in the world [3]."""
        return self._axes(now)[:, 2]

    def contacts(self, now: physics.Data) -> jax.Array:
        """Returns which feet are on the ground, or on what else is fixed, [n]."""
        model = self.physics_model()
        pairs = [touches(model, foot) for foot in self._stands.feet]
        return jnp.stack([self.any_found(now, names) for names in pairs])

    def forces(self, now: physics.Data) -> jax.Array:
        """Returns the forces of the servos [nu], within what their joints let through."""
        model = self.physics_model()
        driven = model.dof_jntid[self._stands.dofs]
        limited = model.jnt_actfrclimited[driven]
        if not limited.any():
            return now.actuator_force
        return jnp.clip(
            now.actuator_force, *limits(limited, model.jnt_actfrcrange[driven]).astype(np.float32).T
        )

    def heights(self, now: physics.Data) -> jax.Array:
        """Returns how high the feet are above where they stand [n], in m."""
        return self._height(self._places(now)[:, 2])

    def foot_velocities(self, now: physics.Data) -> jax.Array:
        """Returns the velocities of the feet [n, 3] in the world, in m/s."""
        spins = now.cvel[jnp.array(self._stands.feet)]
        from_centre = (
            self._places(now) - now.subtree_com[self.physics_model().body_rootid[self.trunk]][None]
        )
        return spins[:, 3:] + jnp.cross(spins[:, :3], from_centre)

    def _height(self, z: Any) -> Any:
        """Returns how high places are above the ground on which the robot stands, in m."""
        return z - self._stands.ground

    def _bent(self, now: physics.Data) -> jax.Array:
        """Returns how far the servos' joints, in the order of actions, are from the posture [nu], in rad."""
        return jnp.stack([now.qpos[i] for i in self._stands.servos]) - self.rest

    def _places(self, now: physics.Data) -> jax.Array:
        """Returns where the soles are [n, 3], in m."""
        found = zip(self._stands.feet, self._stands.soles.astype(np.float32), strict=True)
        return jnp.stack([now.xpos[i] + quat_to_mat(now.xquat[i]) @ at for i, at in found])

    def _axes(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's axes in the world, one in each column, [3, 3]."""
        return quat_to_mat(now.qpos[3:7])
