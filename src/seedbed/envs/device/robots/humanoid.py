"""The base of Playground's humanoids: their feet swing in a gait, and kicks change the trunk's velocity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import TaskState, squares
from seedbed.envs.device.robots.joystick import JoystickTask
from seedbed.envs.device.robots.ride import Push, Ride, Scales
from seedbed.envs.device.robots.sensed import Rhythm, Sight
from seedbed.types import Array, Tree

_SHORTEST, _LONGEST = 0.2, 0.5  # s in the air from which and up to which a foot is paid
_MOVING = 0.1  # a command's norm above which the robot is to walk
_SHARPNESS = 0.01  # how far off the heights of the feet may be, squared, in m^2
_SLOWEST_KICK = 0.1  # m/s


class Gait(NamedTuple):
    """The places of both feet in their swing, left first, in rad from -pi to pi: up before 0, down after."""

    phase: Array  # [2] by which the next step is judged
    shown: Array  # [2] in the observation
    advance: Array  # in a step

    @classmethod
    def starting(cls, hertz: Array, dt: float) -> Gait:
        """Returns a walk of `hertz` strides per second, in steps of `dt` s; the left foot is at its top."""
        phase = jnp.array([0.0, math.pi], jnp.float32)
        return cls(phase, phase, 2 * math.pi * dt * hertz)

    def later(self) -> Gait:
        """Returns the gait after a step, whose phase is then seen."""
        ahead = self.phase + self.advance
        turned = jnp.where(ahead >= math.pi, ahead - 2 * math.pi, ahead)
        return Gait(turned, self.phase, self.advance)

    def seen(self) -> jax.Array:
        """Returns the phases as the observation shows them, [4]: the cosines, then the sines."""
        return jnp.concatenate([jnp.cos(self.shown), jnp.sin(self.shown)])

    def heights(self, top: Array | float) -> jax.Array:
        """Returns how high the feet should be [2], in m, if they swing up to `top`."""
        turn = (self.phase + math.pi) / math.pi
        up = turn <= 1
        part = jnp.where(up, turn, turn - 1)
        smooth = part * part * (3 - 2 * part)
        return top * jnp.where(up, smooth, 1 - smooth)

    def kept_by(self, heights: Array, top: Array | float) -> jax.Array:
        """Returns how well feet at `heights` [2] keep the gait, from 0 to 1."""
        return jnp.exp(-squares(heights - self.heights(top)) / _SHARPNESS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Humanoid(JoystickTask):
    """A base of the tasks of a humanoid that walks in a gait and is kicked now and then.

    A push is a kick: it changes the trunk's velocity along the ground at once, by 0.1 m/s to `push_speed`.
    """

    frame_skip: int = 10
    solver_iterations: int = 3
    push_speed: float = 2.0
    """Largest speed in m/s that a kick adds to the trunk along the ground, every 5 to 10 s; 0: none."""
    action_scale: float = 0.5
    feet: ClassVar[tuple[str, ...]] = ("left_foot", "right_foot")
    push_waits: ClassVar[tuple[float, float]] = (5.0, 10.0)
    strides: ClassVar[tuple[float, float]] = (1.25, 1.5)
    """Fewest and most strides per second."""
    stands: ClassVar[bool] = False
    """Whether the gait rests, with both feet on the ground, while the command is 0."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws place, heading, speeds, and the joints from half to 3/2 of the posture; consumes the key."""
        body, joints = jax.random.split(key)
        qpos, qvel = super().initial(body)
        bent = self.posture * jax.random.uniform(joints, self.posture.shape, jnp.float32, 0.5, 1.5)
        return jnp.concatenate([qpos[:7], bent]), qvel

    def first_memory(self, key: Array) -> Gait:
        """Draws the gait of the episode; consumes the key."""
        return Gait.starting(jax.random.uniform(key, (), jnp.float32, *self.strides), self.dt)

    def remembered(
        self, kept: Ride, now: physics.Data, measured: Array, targets: Array | None
    ) -> Tree:
        """Returns the gait of the next step."""
        if targets is None:
            return kept.memory
        gait = kept.memory.later()
        if not self.stands:
            return gait
        return gait._replace(phase=jnp.where(self.told(kept), gait.phase, math.pi))

    def first_push(self, keys: list[Array]) -> Push:
        """Draws how many steps the kicks are apart; consumes the first key."""
        drawn = jax.random.uniform(keys[0], (), jnp.float32, *self.push_waits)
        count, none = jnp.int32(0), jnp.float32(0)
        # The step of a kick is not waited for, and lasts no longer.
        wait, nowhere = self._steps(drawn) - 1, jnp.zeros(3, jnp.float32)
        return Push(wait, count, none, none, count, count, nowhere)

    def next_push(self, push: Push, key: Array) -> Push:
        """Returns the kick of the next step, with a speed of its own; consumes the key."""
        turn, speed = jax.random.split(key)
        low = min(_SLOWEST_KICK, self.push_speed)
        speed = jax.random.uniform(speed, (), jnp.float32, low, self.push_speed)
        return push.later(turn)._replace(speed=speed)

    def velocities(self, before: TaskState) -> Array:
        """Returns the velocities [nv] with which a step begins, after a kick if there is one."""
        if not self.push_speed:
            return before.qvel
        push = before.kept.push
        kick = jnp.where(push.since >= push.wait, push.speed, 0.0) * push.direction[:2]
        return jnp.concatenate([before.qvel[:2] + kick, before.qvel[2:]])

    def applied(self, before: TaskState, action: Array) -> dict[str, Array]:
        """Returns that no force acts: a kick is none."""
        return {}

    def force(self, push: Push) -> jax.Array:
        """Returns zeros [3]: a kick is no force."""
        return jnp.zeros(3, jnp.float32)

    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns velocity, turning, gravity, and the joints' positions and velocities."""
        return [
            (self.velocity(now), 0.1),
            (self.turning(now), 0.2),
            (self.gravity(now), 0.05),
            (now.qpos[7:] - self.posture, self.joint_noise),
            (now.qvel[6:], 1.5),
        ]

    @property
    def joint_noise(self) -> Any:
        """Returns the size of the noise on the joints' positions in rad, or sizes [nq - 7]."""
        return 0.03

    def state(self, kept: Ride) -> list[Array]:
        """Returns what is measured, with the command before the joints, then the action and the gait."""
        body, joints = jnp.split(kept.seen.measured, [9])
        return [body, kept.seen.command, joints, kept.seen.action, kept.memory.seen()]

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order."""
        joints = len(self.posture)
        return (
            Sight("base_lin_vel", 3, (f"local_linvel{self.frame}",)),
            Sight("base_ang_vel", 3, (f"gyro{self.frame}",)),
            Sight("projected_gravity", 3, (self.attitude,)),
            Sight("command", 3),
            Sight("joint_pos", joints),
            Sight("joint_vel", joints),
            Sight("actions", joints, delay=1),
            Sight("gait_phase", 4, delay=1),
        )

    @property
    def rhythm(self) -> Rhythm:
        """Returns the gait of which the observation tells, at its mean frequency."""
        return Rhythm(sum(self.strides) / 2, (0.0, math.pi), math.pi if self.stands else None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HumanoidScales(Scales):
    """The weights of the reward's terms in 1/s; names and numbers are MuJoCo Playground's."""

    tracking_lin_vel: float = 1.0
    tracking_ang_vel: float = 0.5
    lin_vel_z: float = 0.0
    ang_vel_xy: float = -0.15
    orientation: float = -1.0
    base_height: float = 0.0
    torques: float = 0.0
    action_rate: float = 0.0
    energy: float = 0.0
    feet_clearance: float = 0.0
    feet_air_time: float = 2.0
    feet_slip: float = -0.25
    feet_height: float = 0.0
    feet_phase: float = 1.0
    stand_still: float = 0.0
    alive: float = 0.0
    termination: float = 0.0
    joint_deviation_knee: float = -0.1
    joint_deviation_hip: float = -0.25
    dof_pos_limits: float = -1.0
    pose: float = -1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class UsualHumanoid(Humanoid):
    """A base of the humanoids whose critics see the same and whose rewards are alike: T1, G1, Berkeley's."""

    standing_height: ClassVar[float] = 0.5
    """Height in m at which the trunk should be."""
    hips: ClassVar[tuple[str, ...]]
    """Endings of the names of the hips' joints that cost while they are not as in the posture."""
    knees: ClassVar[tuple[str, ...]]
    """Endings of the names of the knees' joints, likewise."""
    pose_weights: ClassVar[Mapping[str, float]] = {}
    """Weights of the joints in the cost of the pose, by endings of their names; the others' are 1."""

    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns the state, the same without noise, accelerations, forces and the feet."""
        return [
            *self.state(kept),
            self.turning(now),
            self.read(now, f"accelerometer{self.frame}"),
            self.gravity(now),
            self.velocity(now),
            self.in_world(now)[1],
            now.qpos[7:] - self.posture,
            now.qvel[6:],
            now.qpos[2:3],
            now.actuator_force,
            self.contacts(now).astype(jnp.float32),
            self.foot_velocities(now).ravel(),
            kept.seen.air_time,
        ]

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order."""
        joints, feet = len(self.posture), len(self.feet)
        return (
            *self.sights,
            *(Sight(name, 3) for name in ("base_ang_vel", "accelerometer", "projected_gravity")),
            *(Sight(name, 3) for name in ("base_lin_vel", "global_ang_vel")),
            *(Sight(name, joints) for name in ("joint_pos", "joint_vel")),
            Sight("height", 1),
            Sight("actuator_force", joints),
            Sight("feet_contact", feet),
            Sight("feet_vel", 3 * feet),
            Sight("feet_air_time", feet),
        )

    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns the terms that these robots share."""
        command, moving = ride.command, jnp.sqrt(squares(ride.command)) > _MOVING
        bent, force = now.qpos[7:] - self.posture, now.actuator_force
        linear, angular = self.in_world(now)
        feet, heights = self.moved_feet(now, ride.feet), self.heights(now)
        along = jnp.sqrt(jnp.square(self.foot_velocities(now)[:, :2]).sum(axis=1))
        off = squares(command[:2] - self.velocity(now)[:2])
        off_turning = jnp.square(command[2] - self.turning(now)[2])
        peaks = jnp.square(feet.peak / self.clearance - 1)
        return {
            "tracking_lin_vel": jnp.exp(-off / self.tracking_sigma),
            "tracking_ang_vel": jnp.exp(-off_turning / self.tracking_sigma),
            "lin_vel_z": jnp.square(linear[2]),
            "ang_vel_xy": squares(angular[:2]),
            "orientation": squares(self.up(now)[:2]),
            "base_height": jnp.square(now.qpos[2] - self.standing_height),
            "torques": jnp.abs(force).sum(),
            "action_rate": squares(action - ride.action),
            "energy": jnp.abs(self.powers(now)).sum(),
            "feet_clearance": (jnp.abs(heights - self.clearance) * jnp.sqrt(along)).sum(),
            "feet_air_time": self.paid_air_time(ride, now) * moving,
            "feet_slip": jnp.sqrt(squares(linear[:2])) * feet.contact.sum(),
            "feet_height": (peaks * self.landed(ride, feet)).sum(),
            "feet_phase": ride.memory.kept_by(heights, self.clearance),
            "stand_still": jnp.abs(bent).sum() * (jnp.sqrt(squares(command)) < _MOVING),
            "alive": jnp.float32(1),
            "termination": fallen.astype(jnp.float32),
            "joint_deviation_knee": self.bending(bent, self.knees),
            "joint_deviation_hip": self.bending(bent, self.hips) * (jnp.abs(command[1]) > 0.1),
            "dof_pos_limits": self.beyond_limits(now.qpos[7:]),
            "pose": (jnp.square(bent) * self.per_joint(self.pose_weights, 1.0)).sum(),
        }

    def paid_air_time(self, ride: Ride, now: physics.Data) -> jax.Array:
        """Returns for how long feet that land have been in the air, in s, from 0.2 s and up to 0.5 s each."""
        feet = self.moved_feet(now, ride.feet)
        late = (feet.air_time - _SHORTEST) * self.landed(ride, feet)
        return jnp.minimum(late, _LONGEST - _SHORTEST).sum()

    def bending(self, bent: Array, names: tuple[str, ...]) -> jax.Array:
        """Returns how far joints of some endings are from the posture in all, in rad; `bent` is of each."""
        return (jnp.abs(bent) * self.per_joint(dict.fromkeys(names, 1.0), 0.0)).sum()
