"""Any legged robot with position servos and a free trunk, from its MJCF file alone, with a joystick."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mjcf_files import Version
from seedbed.envs.device.mujoco import squares
from seedbed.envs.device.robots.edits import Edits, compiled_with
from seedbed.envs.device.robots.joystick import JoystickTask
from seedbed.envs.device.robots.ride import QuadrupedScales, Ride
from seedbed.envs.device.robots.sensed import Sight
from seedbed.physics.math import quat_to_mat
from seedbed.types import Array, SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_SETTLES = 1.0  # s
_CLEARANCE = 0.27  # of the height at which the trunk stands


class Standing(NamedTuple):
    """How a robot stands on its feet."""

    qpos: np.ndarray  # [nq] the posture, and the trunk where it comes to rest in it
    settled: np.ndarray  # [nq] the same, with the joints as its weight bends them
    servos: np.ndarray  # [nu] where in qpos each actuator's joint is
    dofs: np.ndarray  # [nu] and where in qvel
    feet: tuple[int, ...]  # bodies
    ground: float  # m, the mean height of where they touch it
    soles: np.ndarray  # [n, 3] where in its body's frame each foot touches the ground, m
    timestep: float  # s, of the physics


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
    reward is Go1's but for its weights, heights of the feet count from where they stand, and an episode ends
    when the trunk leans by 60 degrees or sinks to half its height.
    """

    frame_skip: int = 0
    """Simulation steps in one environment step; 0 is as many as 0.02 s have."""
    least_frame_skip: ClassVar[int] = 0
    action_scale: float = 0.5
    command_ranges: tuple[float, float, float] = (1.0, 0.5, 1.0)
    tracking_sigma: float = 0.5
    push_speed: float = 1.0
    scales: LeggedScales = LeggedScales()

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be, or a robot that cannot stand."""
        super().__post_init__()
        stands = self._stands
        if not self.frame_skip:
            steps = max(1, round(0.02 / stands.timestep))
            object.__setattr__(self, "frame_skip", steps)

    @functools.cached_property
    def _stands(self) -> Standing:
        return _standing(Version.of(self.model_path), self.edits)

    @property
    def feet(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns the names of the bodies on which the robot stands."""
        return tuple(self.physics_model().names.body[i] for i in self._stands.feet)

    @property
    def clearance(self) -> float:  # type: ignore[override]
        """Returns how high a foot should swing, in m."""
        return float(_CLEARANCE * self._height(self._stands.qpos[2]))

    @property
    def home(self) -> str:  # type: ignore[override]
        """Returns the name of the file's first keyframe, which has the posture; "" without one."""
        keyframes = self.physics_model().keyframes
        return keyframes[0].name if keyframes else ""

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
            (self.velocity(now), 0.1),
            (self.turning(now), 0.2),
            (-self._axes(now)[2], 0.05),
            (self._bent(now), 0.03),
            (jnp.stack([now.qvel[dof] for dof in self._stands.dofs]), 0.5),
        ]

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order."""
        servos = len(self._stands.servos)
        body = (Sight(name, 3) for name in ("base_lin_vel", "base_ang_vel", "projected_gravity"))
        return (
            *body,
            Sight("joint_pos", servos),
            Sight("joint_vel", servos),
            Sight("actions", servos, delay=1),
            Sight("command", 3),
        )

    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns the same without noise, the height, forces, the feet and pushes."""
        seen = kept.seen
        return [
            self.observe(now),
            self._height(now.qpos[2:3]),
            now.actuator_force,
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
            *self.sights[:5],
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
        """Returns which feet are touched [n]."""
        return jnp.stack([squares(now.cfrc_ext[body]) > 0 for body in self._stands.feet])

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


@functools.cache
def _standing(file: Version, edits: Edits) -> Standing:
    """Lets a robot stand for a second in MuJoCo's C code; raises SeedbedError if it cannot."""
    path, model = file.path, compiled_with(file.path, edits)
    free = model.njnt and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
    if not free or model.nq - 7 != model.nv - 6 or model.nv == 6:
        raise SeedbedError(
            f"{path} is no robot that walks: its first body needs a free joint, all others hinges or slides"
        )
    data = mujoco.MjData(model)
    if model.nkey:
        mujoco.mj_resetDataKeyframe(model, data, 0)
    driven = _servos(model, path)
    servos, dofs = model.jnt_qposadr[driven], model.jnt_dofadr[driven]
    pose = data.qpos.copy()
    mujoco.mj_forward(model, data)
    # A posture that begins in the ground would be thrown out of it.
    data.qpos[2] -= min([0.0, *(contact.dist for contact in data.contact)])
    data.qvel[:], data.ctrl[:] = 0, pose[servos]
    height = float(data.qpos[2])
    for _ in range(round(_SETTLES / model.opt.timestep)):
        mujoco.mj_step(model, data)
    trunk, points = int(model.jnt_bodyid[0]), _touched(model, data)
    up = data.xmat[trunk].reshape(3, 3)[2, 2]
    for foot in points:
        if not model.body(foot).name:
            parent = model.body(model.body_parentid[foot]).name
            raise SeedbedError(
                f"{path}: body {foot}, a foot, which {parent or 'another without a name'} carries, has no "
                "name: give it one"
            )
    ground = float(np.mean([at[2] for at in points.values()] or [0.0]))
    sinks = data.qpos[2] - ground < 0.7 * (height - ground)
    if up < 0.8 or sinks or len(points) < 2 or trunk in model.body_weldid[[*points]]:
        how = f"it touches the ground with {len(points)} bodies, or with its trunk"
        if sinks:
            how = f"its trunk sinks from {height - ground:.2f} to {data.qpos[2] - ground:.2f} m"
        if up < 0.8:
            how = f"it leans ({up:.2f} of upright)"
        raise SeedbedError(
            f"{path}: the robot does not stand in its posture for a second: {how}; give the file a first "
            "keyframe in which it stands, or stiffer servos (--env.kp)"
        )
    settled = np.array([0.0, 0.0, *data.qpos[2:]])
    standing = np.array([*settled[:7], *pose[7:]])
    soles = np.array(
        [data.xmat[i].reshape(3, 3).T @ (at - data.xpos[i]) for i, at in points.items()]
    )
    timestep = float(model.opt.timestep)
    return Standing(standing, settled, servos, dofs, tuple(points), ground, soles, timestep)


def _servos(model: Any, path: Path) -> np.ndarray:
    """Returns the joint of each actuator [nu]; raises SeedbedError if one is no servo."""
    joints = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    affine = model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE
    servos = joints & affine & (model.actuator_gainprm[:, 0] > 0)
    servos &= np.isclose(model.actuator_gainprm[:, 0], -model.actuator_biasprm[:, 1])
    servos &= model.actuator_dyntype == mujoco.mjtDyn.mjDYN_NONE
    if not model.nu or not servos.all():
        names = [model.actuator(i).name or str(i) for i in np.flatnonzero(~servos)]
        raise SeedbedError(
            f"{path}: the actuators {', '.join(names[:4]) or 'are missing, which'} are no position servos of "
            "joints, without an activation (timeconst, <intvelocity>): give each joint a <position>, or "
            "write a task (docs/train-your-robot.md)"
        )
    for i in np.flatnonzero(model.actuator_gear[:, 0] != 1):
        raise SeedbedError(
            f"{path}: the servo {model.actuator(i).name or i} has the gear {model.actuator_gear[i, 0]:g}, by "
            "which its targets are no positions of its joint: give it the gear 1, kp and kv times the gear "
            "squared, and where the gear is negative turn the joint's axis around"
        )
    return np.asarray(model.actuator_trnid[:, 0])


def _touched(model: Any, data: Any) -> dict[int, np.ndarray]:
    """Returns the bodies that touch what is fixed, with the mean place of their contacts."""
    found: dict[int, list[np.ndarray]] = {}
    for contact in data.contact:
        bodies = [int(model.geom_bodyid[geom]) for geom in contact.geom]
        moving = [body for body in bodies if model.body_weldid[body]]
        if len(moving) == 1:
            found.setdefault(moving[0], []).append(contact.pos.copy())
    return {body: np.mean(places, axis=0) for body, places in sorted(found.items())}
