"""Unitree's Go1 gets up and stands on two feet: MuJoCo Playground's Go1Getup, Go1Handstand, Go1Footstand."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import TaskState, Verdict, squares
from seedbed.envs.device.robots.go1 import Go1
from seedbed.envs.device.robots.mirror import mirror_of
from seedbed.envs.device.robots.ride import Scales
from seedbed.envs.device.robots.sensed import Sight
from seedbed.envs.device.robots.servoed import Effort, Uncommanded
from seedbed.physics.math import quat_to_mat
from seedbed.spaces import Mirror
from seedbed.types import Array

_DROPPED = 0.6  # share of the episodes of getting up that open with a fall
_FALL = 0.5  # m, from which the trunk falls
_SETTLES = 0.5  # s until what is dropped lies
_FASTEST = 2 * np.pi  # rad/s of a joint without a cost
_UPSIDE_DOWN = -0.25  # of the trunk's own z axis, upward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go1Trick(Go1, Uncommanded):
    """A base of the tasks in which Go1 changes how it lies or stands, without a command."""

    def joints(self, qpos: Array) -> Array:
        """Returns the positions of the joints [12], in rad."""
        return qpos[7:]

    def mirror(self) -> Mirror | None:
        """Returns the symmetry of the robot and the task."""
        return mirror_of(self)

    def privileged(self, now: physics.Data, kept: Effort) -> list[Array]:
        """Returns the same without noise, speeds, accelerations, forces and the height."""
        return [
            *(self.read(now, name) for name in ("gyro", "accelerometer")),
            *(self.read(now, name) for name in ("local_linvel", "global_angvel")),
            self.joints(now.qpos),
            now.qvel[6:],
            now.actuator_force,
            self.height(now)[None],
        ]

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order."""
        joints, body = len(self.posture), ("base_ang_vel", "accelerometer", "base_lin_vel")
        return (
            *(Sight(name, 3) for name in (*body, "global_ang_vel")),
            *(Sight(name, joints) for name in ("joint_angles", "joint_vel", "actuator_force")),
            Sight("height", 1),
        )

    def height(self, now: physics.Data) -> jax.Array:
        """Returns how high the trunk's inertial sensor is, in m."""
        return now.site_xpos[self.numbered("site", "imu"), 2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetupScales(Scales):
    """The weights of the reward's terms in 1/s; the names are MuJoCo Playground's."""

    orientation: float = 1.0
    torso_height: float = 1.0
    posture: float = 1.0
    stand_still: float = 1.0
    action_rate: float = -0.001
    dof_pos_limits: float = -0.1
    torques: float = -1e-5
    dof_acc: float = -2.5e-7
    dof_vel: float = -0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go1Getup(Go1Trick):
    """Go1, a quadruped of 12 joints, stands up from wherever it has fallen, and stays in its posture.

    Observation and reward are those of MuJoCo Playground's Go1Getup, and so is the solver's one iteration.
    All limbs may touch each other but the hips, which cannot. An action moves the servos from where the
    joints are. No episode terminates.
    """

    xml_file: str = "playground/locomotion/go1/xmls/scene_mjx_fullcollisions_flat_terrain.xml"
    episode_steps: int = 300
    action_scale: float = 0.5
    scales: GetupScales = GetupScales()
    base_velocity: bool = False
    action_moves: ClassVar[Literal["posture", "target", "joints"]] = "joints"
    apart: ClassVar[tuple[str, ...]] = ("FR_hip", "FL_hip", "RR_hip", "RL_hip")
    standing_height: ClassVar[float] = 0.275
    """Height in m up to which the trunk's inertial sensor should be."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws how the robot lies after a fall, or stands; consumes the key.

        Six episodes in ten open with a fall from 0.5 m with any attitude and any joints. All open half a
        second after that, in which the servos have held the joints.
        """
        which, turn, bend, speeds = jax.random.split(key, 4)
        model = self.physics_model()
        low, high = np.asarray(model.jnt_range[1:], np.float32).T
        quat = jax.random.normal(turn, (4,), jnp.float32)
        joints = jax.random.uniform(bend, low.shape, jnp.float32, low, high)
        place = jnp.array([0.0, 0.0, _FALL], jnp.float32)
        fallen = jnp.concatenate([place, quat / (jnp.sqrt(squares(quat)) + 1e-6), joints])
        qpos = jnp.where(jax.random.bernoulli(which, _DROPPED), fallen, self.at_home)
        moving = jax.random.uniform(speeds, (6,), jnp.float32, -0.5, 0.5)
        qvel = jnp.concatenate([moving, jnp.zeros(model.nv - 6, jnp.float32)])

        def settle(state: physics.State, _: None) -> Any:
            return physics.step_data(model, state, self.joints(qpos)).state, None

        steps = round(_SETTLES / model.opt.timestep)
        state, _ = jax.lax.scan(settle, physics.init(model, qpos, qvel), None, length=steps)
        return state.qpos, state.qvel

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for standing upright, high, in the posture and still; an episode does not terminate."""
        return self.paid(self.terms(before.kept, now, action), jnp.bool_(False))

    def terms(self, kept: Effort, now: physics.Data, action: Array) -> dict[str, Array]:
        """Returns Playground's terms."""
        off = squares(self.gravity(now) - np.array([0, 0, -1], np.float32))
        height = jnp.minimum(self.height(now), self.standing_height)
        upright, high = off < 0.01, self.standing_height - height < 0.005
        joints, force = self.joints(now.qpos), now.actuator_force
        jerk = action - 2 * kept.action + kept.earlier
        return {
            "orientation": jnp.exp(-2 * off),
            "torso_height": jnp.exp(height) - 1,
            "posture": upright * jnp.exp(-0.5 * squares(joints - self.posture)),
            "stand_still": (upright & high) * jnp.exp(-0.5 * squares(action)),
            "action_rate": squares(action - kept.action) + squares(jerk),
            "torques": jnp.sqrt(squares(force)) + jnp.abs(force).sum(),
            "dof_pos_limits": self.beyond_limits(joints),
            "dof_acc": squares(now.qacc[6:]),
            "dof_vel": squares(jnp.maximum(jnp.abs(now.qvel[6:]) - _FASTEST, 0)),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandstandScales(Scales):
    """The weights of the reward's terms in 1/s; the names are MuJoCo Playground's."""

    height: float = 1.0
    orientation: float = 1.0
    contact: float = -0.1
    action_rate: float = 0.0
    termination: float = 0.0
    dof_pos_limits: float = -0.5
    torques: float = 0.0
    pose: float = -0.1
    stay_still: float = 0.0
    energy: float = 0.0
    dof_acc: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OnTwoFeet(Go1Trick, abc.ABC):
    """A base of the tasks in which Go1 rises onto two feet from its posture.

    An action moves the servos' targets from where they were. An episode ends when the trunk is upside down,
    or a front leg touches the ground with more than its foot.
    """

    xml_file: str = "playground/locomotion/go1/xmls/scene_mjx_flat_terrain.xml"
    episode_steps: int = 500
    action_scale: float = 0.3
    scales: HandstandScales = HandstandScales()
    action_moves: ClassVar[Literal["posture", "target", "joints"]] = "target"
    joint_noise: ClassVar[float] = 0.01
    soft_range: ClassVar[float] = 0.9
    nose: ClassVar[float]
    """Where the trunk's nose should point: 1 is up, -1 is down."""
    top: ClassVar[float]
    """Height in m up to which the trunk's inertial sensor is to rise."""
    lifted: ClassVar[slice]
    """The joints of the legs that are lifted, which are to stay in the posture."""

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for height and for where the nose points; an episode ends with a fall."""
        fallen = self.fallen(now)
        return self.paid(self.terms(before.kept, now, action, fallen), fallen)

    def fallen(self, now: physics.Data) -> Array:
        """Returns whether the trunk is upside down, or a front leg lies on the ground."""
        parts = ("calf1", "calf2", "thigh1", "thigh2", "thigh3", "hip")
        lying = self.any_found(
            now, [f"{leg}_{part}_floor" for leg in ("fl", "fr") for part in parts]
        )
        return (self.up(now)[2] < _UPSIDE_DOWN) | lying

    def terms(
        self, kept: Effort, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns Playground's terms; as there, a contact of any foot costs."""
        forward = quat_to_mat(self.read(now, self.attitude))[:, 0]
        below = self.top - jnp.minimum(self.height(now), self.top)
        joints, force = self.joints(now.qpos), now.actuator_force
        return {
            "height": jnp.exp(-below),
            "orientation": jnp.square(0.5 * self.nose * forward[2] + 0.5),
            "contact": self.contacts(now).any().astype(jnp.float32),
            "action_rate": squares(action - kept.action),
            "termination": fallen.astype(jnp.float32),
            "dof_pos_limits": self.beyond_limits(joints),
            "torques": squares(force),
            "pose": squares((joints - self.posture)[self.lifted]),
            "stay_still": squares(now.qvel[:2]) + jnp.square(now.qvel[5]),
            "energy": jnp.abs(self.powers(now)).sum(),
            "dof_acc": squares(now.qacc[6:]),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go1Handstand(_OnTwoFeet):
    """Go1, a quadruped of 12 joints, rises onto its front feet, nose down.

    Observation and reward are those of MuJoCo Playground's Go1Handstand, and so is the solver's one
    iteration.
    """

    nose: ClassVar[float] = -1.0
    top: ClassVar[float] = 0.55
    lifted: ClassVar[slice] = slice(6, 12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Go1Footstand(_OnTwoFeet):
    """Go1, a quadruped of 12 joints, rises onto its rear feet, nose up.

    Observation and reward are those of MuJoCo Playground's Go1Footstand, and so is the solver's one
    iteration; as there, the legs that must not lie on the ground are the front ones, too.
    """

    nose: ClassVar[float] = 1.0
    top: ClassVar[float] = 0.53
    lifted: ClassVar[slice] = slice(0, 6)
