"""What a robot measures and where it stands, by the names that MuJoCo Playground gives to its sensors."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask
from seedbed.physics.math import quat_to_mat
from seedbed.types import Array, SeedbedError


class Sight(NamedTuple):
    """A part of an observation, for programs that feed the policy outside of Seedbed.

    Names are those that mjlab's policies have, where it has the part: `base_lin_vel`, `base_ang_vel`,
    `projected_gravity`, `joint_pos` (from the posture), `joint_vel`, `actions` and `command`. Ours are
    `upvector`, `feet_pos`, and `servo_error`, how far joints were from their targets.
    """

    name: str
    size: int  # of one step
    sensors: tuple[str, ...] = ()  # of the model, that measure it; (): the trunk's state does
    history: int = 1  # steps that are seen, the newest first
    delay: int = 0  # steps by which it is late


@dataclasses.dataclass(frozen=True, kw_only=True)
class SensedRobot(MujocoTask, abc.ABC):
    """A base of tasks of legged robots whose first body, the trunk, has a free joint."""

    home: ClassVar[str] = "home"
    """Keyframe with the posture."""
    feet: ClassVar[tuple[str, ...]]
    """Sites of the feet; each has sensors `NAME_global_linvel` and `NAME_floor_found`."""

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order; `()` if the task does not tell."""
        return ()

    @property
    def at_home(self) -> np.ndarray:
        """Returns qpos [nq] of the posture."""
        found = [each for each in self.physics_model().keyframes if each.name == self.home]
        if not found:
            raise SeedbedError(f"{self.xml_file} has no keyframe {self.home!r}, the posture")
        return np.asarray(found[0].qpos, np.float32)

    @property
    def posture(self) -> np.ndarray:
        """Returns the joints' positions [nq - 7] in rad."""
        return self.at_home[7:]

    @property
    def rest(self) -> np.ndarray:
        """Returns the targets [nu] of the servos in rad about which actions move them."""
        return self.posture

    def read(self, now: physics.Data, sensor: str) -> jax.Array:
        """Returns the value of a sensor of the model, by its name."""
        return physics.sensor(self.physics_model(), now, sensor)

    def velocity(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's velocity in its own frame [3], in m/s."""
        return self.read(now, "local_linvel")

    def turning(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's angular velocity in its own frame [3], in rad/s."""
        return self.read(now, "gyro")

    def in_world(self, now: physics.Data) -> tuple[Array, Array]:
        """Returns the trunk's velocity and angular velocity in the world, [3] each, in m/s and rad/s."""
        return self.read(now, "global_linvel"), self.read(now, "global_angvel")

    def up(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's own z axis in the world [3]."""
        return self.read(now, "upvector")

    def contacts(self, now: physics.Data) -> jax.Array:
        """Returns which feet are on the ground [n]."""
        return jnp.stack([self.read(now, f"{foot}_floor_found")[0] > 0 for foot in self.feet])

    def gravity(self, now: physics.Data) -> jax.Array:
        """Returns the direction of gravity [3] in the frame of the robot's inertial sensor."""
        return -quat_to_mat(self.read(now, "orientation"))[2]

    def heights(self, now: physics.Data) -> jax.Array:
        """Returns how high the feet are [n], in m."""
        sites = self.physics_model().names.site
        return jnp.stack([now.site_xpos[sites.index(foot), 2] for foot in self.feet])

    def foot_velocities(self, now: physics.Data) -> jax.Array:
        """Returns the velocities of the feet [n, 3] in the world, in m/s."""
        return jnp.stack([self.read(now, f"{foot}_global_linvel") for foot in self.feet])
