"""What a robot measures and where it stands, by the names that MuJoCo Playground gives to its sensors."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.robots.edits import limits
from seedbed.envs.device.robots.servoed import ServoedTask
from seedbed.physics import tendons
from seedbed.physics.math import quat_mul, quat_to_mat
from seedbed.types import Array, SeedbedError


class Sight(NamedTuple):
    """A part of an observation, for programs that feed the policy outside of Seedbed.

    Names are those that mjlab's policies have, where it has the part: `base_lin_vel`, `base_ang_vel`,
    `projected_gravity`, `joint_pos` (from the posture), `joint_vel`, `actions` and `command`. Ours are
    `upvector`, `feet_pos`, `servo_error`, how far joints were from their targets, `ones`, and those of a gait
    (`Rhythm`): `gait_phase`, the cosines of the feet's phases, then the sines, `gait_frequency`, `gait_kind`
    (0, a walk) and `gait_height`. Critics also see `accelerometer`, `global_ang_vel`, `position`,
    `orientation`, `height`, `joint_angles` (from 0), `actuator_force`, `feet_contact`, `feet_vel`,
    `feet_air_time`, `feet_height`, `push` and `pushed`.
    """

    name: str
    size: int  # of one step
    sensors: tuple[str, ...] = ()  # of the model, that measure it; (): the trunk's state does
    history: int = 1  # steps that are seen, the newest first
    delay: int = (
        0  # steps by which it is late; what is older than the episode is 0, or a gait's start
    )


class Rhythm(NamedTuple):
    """The gait that a policy sees as `gait_phase`, for programs that feed it outside of Seedbed."""

    hertz: float  # strides per second
    start: tuple[float, ...]  # rad, the phase of each foot when an episode opens
    rest: float | None = None  # rad, the phase of all feet while the command is 0; None: they go on
    height: float | None = None  # m, to which feet swing, if the policy sees that


def require_ungeared(gears: np.ndarray, names: Sequence[str], file: object) -> None:
    """Raises SeedbedError, which names the servo and its file, unless all `gears` [nu] are 1."""
    for i in np.flatnonzero(gears != 1):
        raise SeedbedError(
            f"{file}: the servo {names[int(i)] or i} has the gear {gears[i]:g}, by which its targets are no "
            "positions of its joint: give it the gear 1, kp and kv times the gear squared, and where the "
            "gear is negative turn the joint's axis around"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SensedRobot(ServoedTask, abc.ABC):
    """A base of tasks of legged robots whose first body, the trunk, has a free joint."""

    home: ClassVar[str] = "home"
    """Keyframe with the posture."""
    frame: ClassVar[str] = ""
    """Ending of the names of the sensors that measure the trunk."""

    soft_range: ClassVar[float] = 0.95
    """Share of a joint's range that it may use without a cost."""
    feet: ClassVar[tuple[str, ...]]
    """Sites of the feet; each has a sensor `NAME_global_linvel`."""
    soles: ClassVar[tuple[str, ...]] = ("{}",)
    """Parts of a foot that may touch the ground; sensors `PART_floor_found` tell. {} is the foot's name."""

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order; `()` if the task does not tell."""
        return ()

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order; `()` if the task does not tell."""
        return ()

    @property
    def attitude(self) -> str:
        """Returns the name of the sensor of the trunk's orientation."""
        return f"orientation{self.frame}"

    @property
    def rhythm(self) -> Rhythm | None:
        """Returns the gait of which the policy sees the phase; None if it sees none."""
        return None

    @property
    def at_home(self) -> np.ndarray:
        """Returns qpos [nq] of the posture; raises SeedbedError if not each of its joints has its servo."""
        self._require_order()
        found = [each for each in self.physics_model().keyframes if each.name == self.home]
        if not found:
            raise SeedbedError(f"{self.xml_file} has no keyframe {self.home!r}, the posture")
        return np.asarray(found[0].qpos, np.float32)

    def _require_order(self) -> None:
        """Raises SeedbedError unless servos drive the joints in order, which is that of what is seen."""
        model = self.physics_model()
        driven = [int(model.dof_jntid[row.argmax()]) for row in model.actuator_moment]
        for joint, (servo, other) in enumerate(
            itertools.zip_longest(driven, range(1, model.njnt)), start=1
        ):
            if servo != other:
                one, two = (
                    "none" if each is None else model.names.joint[each] or str(each)
                    for each in (servo, other)
                )
                raise SeedbedError(
                    f"{self.xml_file}: the joint of actuator {joint - 1} is {one}, and not {two}: give each "
                    "joint but the trunk's one actuator, in the order of the joints, or train the robot "
                    "from its file (seedbed train FILE.xml)"
                )
        # The file's: those of a given model may be drawn anew in each episode.
        gears = self._model.actuator_gear[:, 0] * model.actuator_moment.sum(axis=1)
        require_ungeared(np.asarray(gears), model.names.actuator, self.xml_file)

    @property
    def posture(self) -> np.ndarray:
        """Returns the joints' positions [nq - 7] in rad."""
        return self.at_home[7:]

    @property
    def rest(self) -> np.ndarray:
        """Returns the targets [nu] of the servos in rad about which actions move them."""
        return self.posture

    @property
    def first_targets(self) -> np.ndarray:
        """Returns the targets [nu] in rad from which the first action of an episode moves the servos."""
        return self.rest

    @property
    def opening(self) -> np.ndarray:
        """Returns qpos [nq] about which episodes open."""
        return self.at_home

    def at_rest(self) -> tuple[Array, Array]:
        """Returns qpos [nq] of the posture, and qvel [nv] at rest."""
        return jnp.asarray(self.at_home), jnp.zeros(self.physics_model().nv, jnp.float32)

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws a place, a heading and the trunk's speeds, in the posture; consumes the key."""
        place, heading, speeds = jax.random.split(key, 3)
        at = jax.random.uniform(place, (2,), jnp.float32, -0.5, 0.5)
        half = 0.5 * jax.random.uniform(heading, (), jnp.float32, -3.14, 3.14)
        turn = jnp.stack([jnp.cos(half), 0.0, 0.0, jnp.sin(half)])
        turned = quat_mul(turn, self.opening[3:7])
        qpos = jnp.asarray(self.opening).at[:2].add(at).at[3:7].set(turned)
        qvel = jax.random.uniform(speeds, (6,), jnp.float32, -0.5, 0.5)
        still = jnp.zeros(self.physics_model().nv - 6, jnp.float32)
        return qpos, jnp.concatenate([qvel, still])

    def per_joint(self, numbers: Mapping[str, float], other: float) -> np.ndarray:
        """Returns a number for each joint [nq - 7]: by the first ending that its name has, else `other`."""
        names = [name.removesuffix("_joint") for name in self.physics_model().names.joint[1:]]
        found = [
            next((number for end, number in numbers.items() if name.endswith(end)), other)
            for name in names
        ]
        return np.array(found, np.float32)

    def beyond_limits(self, joints: Array) -> jax.Array:
        """Returns how far joints [nq - 7] are outside of `soft_range` of their ranges, in rad in all."""
        model = self.physics_model()
        ranges = model.jnt_range[1:]
        spared = (1 - self.soft_range) / 2 * np.diff(ranges, axis=1) * [1, -1]
        low, high = limits(model.jnt_limited[1:], ranges + spared).astype(np.float32).T
        return jnp.maximum(jnp.maximum(low - joints, joints - high), 0.0).sum()

    @property
    def trunk(self) -> int:
        """Returns the number of the trunk's body, which is that of the first joint."""
        return int(self.physics_model().jnt_bodyid[0])

    def powers(self, now: physics.Data) -> jax.Array:
        """Returns the powers of the actuators [nu], in W: their speeds times their forces."""
        model = self.physics_model()
        speeds = jnp.stack(tendons.speeds(model.actuator_moment, now.qvel))
        return model.actuator_gear[:, 0] * speeds * self.forces(now)

    def forces(self, now: physics.Data) -> Array:
        """Returns the forces [nu] of the actuators of which the reward has the cost, in N or N m."""
        return now.actuator_force

    def velocity(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's velocity in its own frame [3], in m/s."""
        return self.read(now, f"local_linvel{self.frame}")

    def turning(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's angular velocity in its own frame [3], in rad/s."""
        return self.read(now, f"gyro{self.frame}")

    def in_world(self, now: physics.Data) -> tuple[Array, Array]:
        """Returns the trunk's velocity and angular velocity in the world, [3] each, in m/s and rad/s."""
        velocity = self.read(now, f"global_linvel{self.frame}")
        return velocity, self.read(now, f"global_angvel{self.frame}")

    def up(self, now: physics.Data) -> jax.Array:
        """Returns the trunk's own z axis in the world [3]."""
        return self.read(now, f"upvector{self.frame}")

    def contacts(self, now: physics.Data) -> jax.Array:
        """Returns which feet are on the ground [n]."""
        parts = [[f"{part.format(foot)}_floor" for part in self.soles] for foot in self.feet]
        return jnp.stack([self.any_found(now, pairs) for pairs in parts])

    def any_found(self, now: physics.Data, pairs: Sequence[str]) -> jax.Array:
        """Returns whether one of some sensors `PAIR_found` has found a contact."""
        return functools.reduce(jnp.logical_or, [self.found(now, pair) for pair in pairs])

    def found(self, now: physics.Data, pair: str) -> jax.Array:
        """Returns whether a sensor `PAIR_found` has found a contact."""
        return self.read(now, f"{pair}_found")[0] > 0

    def gravity(self, now: physics.Data) -> jax.Array:
        """Returns the direction of gravity [3] in the frame of the robot's inertial sensor."""
        return -quat_to_mat(self.read(now, self.attitude))[2]

    def heights(self, now: physics.Data) -> jax.Array:
        """Returns how high the feet are [n], in m."""
        return self.sites(now)[:, 2]

    def sites(self, now: physics.Data) -> jax.Array:
        """Returns where the feet are in the world [n, 3], in m."""
        sites = self.physics_model().names.site
        return jnp.stack([now.site_xpos[sites.index(foot)] for foot in self.feet])

    def foot_velocities(self, now: physics.Data) -> jax.Array:
        """Returns the velocities of the feet [n, 3] in the world, in m/s."""
        return jnp.stack([self.read(now, f"{foot}_global_linvel") for foot in self.feet])
