"""The base of tasks in which a legged robot follows a joystick, after MuJoCo Playground's.

An action moves the targets of the joints' servos about a posture. The agent sees what a robot measures, with
noise, its last action but one and the command; what only a simulator knows is under `privileged`, for
critics. As in Playground, a step is judged by the command that its observation shows, and the next command
may differ: it is seen a step later.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import Command, TaskState, Verdict, squares
from seedbed.envs.device.robots.mirror import mirror_of
from seedbed.envs.device.robots.ride import Feet, Push, Ride, Seen
from seedbed.envs.device.robots.sensed import SensedRobot, Sight
from seedbed.spaces import Mirror
from seedbed.types import Array, EnvState, SeedbedError, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoystickTask(SensedRobot, abc.ABC):
    """A base of the tasks in which a robot follows the velocity of a joystick.

    The model's sensors must have Playground's names.
    """

    action_latency: int = 0
    """Steps (0 or 1) until an action reaches the servos."""
    push_speed: float = 0.0
    """Largest speed in m/s of the pushes that come every one to three seconds; 0 is no pushes."""
    command_ranges: tuple[float, float, float]
    """Largest commands: forward and sideways in m/s, turning in rad/s."""
    tracking_sigma: float = 0.25
    """How far off a speed may be, squared, in m^2/s^2 and rad^2/s^2."""
    clearance: ClassVar[float] = 0.1
    """How high a foot should swing, in m."""
    push_seconds: ClassVar[tuple[float, float]] = (0.05, 0.2)
    push_waits: ClassVar[tuple[float, float]] = (1.0, 3.0)

    @abc.abstractmethod
    def next_command(self, key: Array, last: Array) -> Array:
        """Draws the command after `last` [3]; consumes the key."""

    @abc.abstractmethod
    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns the terms of the reward by name, unweighted; `ride` is what was kept before the step."""

    def remembered(
        self, kept: Ride, now: physics.Data, measured: Array, targets: Array | None
    ) -> Tree:
        """Returns the memory after a step, whose noisy measurement is `measured` [m].

        `kept` is what was kept before the step, and `targets` [nu] are the servos' of the step, in rad; None
        when an episode opens.
        """
        return kept.memory

    def state(self, kept: Ride) -> list[Array]:
        """Returns the parts of the observation of the policy."""
        return [kept.seen.measured, kept.seen.action, kept.seen.command]

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be."""
        super().__post_init__()
        self.require_no_less("push_speed")
        if self.action_latency not in (0, 1):
            raise SeedbedError(
                f"{type(self).__name__}.action_latency is {self.action_latency}; give 0 or 1"
            )
        if not 0 < self.tracking_sigma < math.inf:
            raise SeedbedError(
                f"{type(self).__name__}.tracking_sigma is {self.tracking_sigma}; give more than 0"
            )
        ranges = self.command_ranges
        if len(ranges) != 3 or not all(0 <= x < math.inf for x in ranges):
            raise SeedbedError(
                f"{type(self).__name__}.command_ranges are {ranges}; give three, 0 or more"
            )

    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns what the policy sees, and how trunk, joints and feet move, without noise."""
        return [
            *self.state(kept),
            self.velocity(now),
            self.turning(now),
            self.up(now),
            now.qvel[6:],
            now.qpos[2:3],
            self.heights(now),
            self.foot_velocities(now).ravel(),
        ]

    @property
    def insights(self) -> tuple[Sight, ...]:
        """Returns the parts of what only critics see, in order; `()` if the task tells of no sights."""
        if not self.sights:
            return ()
        feet = len(self.feet)
        return (
            *self.sights,
            *(Sight(name, 3) for name in ("base_lin_vel", "base_ang_vel", "upvector")),
            Sight("joint_vel", len(self.posture)),
            Sight("height", 1),
            Sight("feet_height", feet),
            Sight("feet_vel", 3 * feet),
        )

    def mirror(self) -> Mirror | None:
        """Returns the symmetry of the robot and the task; None if the robot or what it sees has none."""
        return mirror_of(self)

    @property
    def delay(self) -> int:
        """Returns the steps until an action reaches the servos."""
        return self.action_latency

    def control(self, kept: Ride, action: Array) -> Array:
        """Returns the targets of the servos [nu], in rad."""
        return super().control(kept, kept.action if self.action_latency else action)

    def centre(self, kept: Ride) -> Array:
        """Returns the targets [nu] in rad about which an action moves the servos."""
        return self.rest

    def begin(self, key: Array) -> Ride:
        """Draws the first command and the first push; consumes the key."""
        memory = self.first_memory(jax.random.fold_in(key, 0x6D656D6F))
        key, command, until, *pushes = jax.random.split(key, 6)
        feet, nu = len(self.feet), self.physics_model().nu
        still, no = jnp.zeros(feet, jnp.float32), jnp.zeros(feet, bool)
        idle, count = jnp.zeros(nu, jnp.float32), jnp.int32(0)
        first, nothing = self.first_command(command), jnp.zeros(3, jnp.float32)
        push = self.first_push(pushes)
        blank = jnp.zeros(self._sizes.size, jnp.float32)
        seen = Seen(blank, first, idle, no, still, nothing, jnp.bool_(False))
        feet_now, until = Feet(no, still, still), self.lasting(until)
        return Ride(key, count, first, until, idle, idle, feet_now, push, seen, memory)

    def first_memory(self, key: Array) -> Tree:
        """Draws the memory before the first measurement; consumes the key."""
        return ()

    def first_push(self, keys: list[Array]) -> Push:
        """Draws when an episode's pushes come, how long they last and how fast they are; consumes 3 keys."""
        ranges = (self.push_waits, self.push_seconds, (0.0, self.push_speed))
        waits, seconds, speeds = (
            jax.random.uniform(drawn, (), jnp.float32, *bounds)
            for drawn, bounds in zip(keys, ranges, strict=True)
        )
        count, nothing = jnp.int32(0), jnp.zeros(3, jnp.float32)
        return Push(
            self._steps(waits), self._steps(seconds), seconds, speeds, count, count, nothing
        )

    def next_push(self, push: Push, key: Array) -> Push:
        """Returns the push of the next step; consumes the key."""
        return push.later(key)

    def first_command(self, key: Array) -> Array:
        """Draws the command [3] that opens an episode; consumes the key."""
        largest = jnp.asarray(self.command_ranges, jnp.float32)
        return largest * jax.random.uniform(key, (3,), jnp.float32, -1.0, 1.0)

    def keep(self, now: physics.Data, kept: Ride, action: Array | None = None) -> Ride:
        """Returns what is kept after a step: where the feet have been, and perhaps another command."""
        number = kept.step if action is None else kept.step + 1
        measured = self.noisy(now, kept.key, number)
        if action is None:
            memory = self.remembered(kept, now, measured, None)
            return kept._replace(seen=kept.seen._replace(measured=measured), memory=memory)
        feet = self.moved_feet(now, kept.feet)
        key = jax.random.fold_in(kept.key, kept.step)
        drawn, until_key, turn = jax.random.split(key, 3)
        until = kept.until - 1
        over = until <= 0
        push = self.next_push(kept.push, turn) if self.push_speed else kept.push
        return Ride(
            key=kept.key,
            step=kept.step + 1,
            command=jnp.where(over, self.next_command(drawn, kept.command), kept.command),
            until=jnp.where(over, self.lasting(until_key), until),
            action=action,
            earlier=kept.action,
            feet=Feet(
                feet.contact,
                jnp.where(feet.contact, 0.0, feet.air_time),
                jnp.where(feet.contact, 0.0, feet.peak),
            ),
            push=push,
            seen=Seen(
                measured=measured,
                command=kept.command,
                action=kept.action,
                contact=kept.feet.contact,
                air_time=feet.air_time,
                push=self.force(kept.push),
                pushed=push.since >= push.wait,
            ),
            memory=self.remembered(kept, now, measured, self.control(kept, action)),
            ground=kept.ground,
        )

    @property
    def commands(self) -> tuple[Command, ...]:
        """Returns the speeds of the joystick."""
        units = ("forward", "m/s"), ("left", "m/s"), ("turn left", "rad/s")
        return tuple(
            Command(*each, -x, x) for each, x in zip(units, self.command_ranges, strict=True)
        )

    def command_of(self, state: EnvState) -> Array:
        """Returns the command [3] by which the next step is judged."""
        return state.inner.kept.command

    def commanded(self, state: EnvState, command: Array) -> EnvState:
        """Returns the state in which the joystick is at `command` [3] for a step, as the policy sees it."""
        ride = state.inner.kept
        seen = ride.seen._replace(command=command)
        ride = ride._replace(command=command, until=jnp.int32(1), seen=seen)
        policy = {"state": jnp.concatenate(self.state(ride))}
        return state._replace(
            inner=state.inner._replace(kept=ride),
            timestep=state.timestep._replace(observation=state.timestep.observation | policy),
        )

    def moved_feet(self, now: physics.Data, before: Feet) -> Feet:
        """Returns what is known of the feet at the end of a step, before a landing has reset it."""
        contact, peak = self.contacts(now), jnp.maximum(before.peak, self.heights(now))
        return Feet(contact, before.air_time + self.dt, peak)

    def applied(self, before: TaskState, action: Array) -> dict[str, Array]:
        """Pushes the trunk at its centre of mass."""
        if not self.push_speed:
            return {}
        forces = jnp.zeros((self.physics_model().nbody, 6), jnp.float32)
        return {"xfrc_applied": forces.at[self.trunk, :3].set(self.force(before.kept.push))}

    def force(self, push: Push) -> jax.Array:
        """Returns the force of a push in a step [3], in N: half a sine over its time."""
        if not self.push_speed:
            return jnp.zeros(3, jnp.float32)
        model = self.physics_model()
        own = model.body_rootid == model.body_rootid[self.trunk]
        mass = np.asarray(model.body_mass) if self.model is None else model.body_mass
        return push.force((mass * own).sum(), self.dt)

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for following the command as it was shown; an episode ends with a fall."""
        fallen = self.fallen(now)
        return self.paid(self.terms(before.kept, now, action, fallen), fallen)

    def fallen(self, now: physics.Data) -> Array:
        """Returns whether the robot lies on its back."""
        return self.up(now)[2] < 0

    def usual_terms(self, ride: Ride, now: physics.Data, fallen: Array) -> dict[str, Array]:
        """Returns the terms that quadrupeds share."""
        command, told = ride.command, self.told(ride)
        off = squares(command[:2] - self.velocity(now)[:2])
        off_turning = jnp.square(command[2] - self.turning(now)[2])
        feet, force = self.moved_feet(now, ride.feet), jnp.abs(self.forces(now))
        landed = self.landed(ride, feet)
        along = jnp.square(self.foot_velocities(now)[:, :2]).sum(axis=1)
        off_height = jnp.abs(self.heights(now) - self.clearance)
        peaks = jnp.square(feet.peak / self.clearance - 1)
        return {
            "tracking_lin_vel": jnp.exp(-off / self.tracking_sigma),
            "tracking_ang_vel": jnp.exp(-off_turning / self.tracking_sigma),
            "lin_vel_z": jnp.square(self.in_world(now)[0][2]),
            "ang_vel_xy": squares(self.in_world(now)[1][:2]),
            "orientation": squares(self.up(now)[:2]),
            "termination": fallen.astype(jnp.float32),
            "torques": jnp.sqrt(squares(force)) + force.sum(),
            "energy": jnp.abs(self.powers(now)).sum(),
            "feet_clearance": (off_height * jnp.sqrt(jnp.sqrt(along))).sum(),
            "feet_height": (peaks * landed).sum() * told,
            "feet_slip": (along * feet.contact).sum(),
            "feet_air_time": ((feet.air_time - 0.1) * landed).sum() * told,
        }

    def landed(self, ride: Ride, feet: Feet) -> jax.Array:
        """Returns which feet, that were in the air before the step, are or were on the ground [n]."""
        return (ride.feet.air_time > 0) & (feet.contact | ride.feet.contact)

    def told(self, ride: Ride) -> jax.Array:
        """Returns whether the robot is to move."""
        return jnp.sqrt(squares(ride.command)) > 0.01

    def _steps(self, seconds: Array) -> Array:
        return jnp.round(seconds / self.dt).astype(jnp.int32)

    def lasting(self, key: Array) -> Array:
        """Draws how many steps a command lasts, five seconds in the mean; consumes the key."""
        return self._steps(5.0 * jax.random.exponential(key, (), jnp.float32))
