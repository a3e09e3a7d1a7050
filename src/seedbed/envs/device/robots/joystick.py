"""The base of tasks in which a legged robot follows a joystick, after MuJoCo Playground's.

An action moves the targets of the joints' servos about a posture. The agent sees what a robot measures, with
noise, its last action but one and the command; what only a simulator knows is under `privileged`, for
critics. As in Playground, a step is judged by the command that its observation shows, and the next command
may differ: it is seen a step later.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.arguments import require_fields
from seedbed.envs.device.mujoco import Command, TaskState, Verdict, squares
from seedbed.envs.device.robots.mirror import sides_of
from seedbed.envs.device.robots.ride import Feet, Push, Ride, Scales, Seen
from seedbed.envs.device.robots.sensed import SensedRobot
from seedbed.envs.device.robots.servos import Servos, compiled_with, with_servos
from seedbed.envs.device.robots.tiles import Tiles
from seedbed.physics.math import quat_mul
from seedbed.spaces import PRIVILEGED, Mirror, joined
from seedbed.types import Array, EnvState, SeedbedError, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoystickTask(SensedRobot, abc.ABC):
    """A base of the tasks in which a robot follows the velocity of a joystick.

    The model's sensors must have Playground's names.
    """

    kp: float = 0.0
    """Stiffness of the joints' servos in N m/rad; 0 is the file's."""
    kd: float = 0.0
    """Damping of the joints in N m s/rad; 0 is the file's."""
    action_scale: float
    """How far an action of 1 moves a servo's target from its posture, in rad."""
    action_latency: int = 0
    """Steps (0 or 1) until an action reaches the servos."""
    noise_level: float = 1.0
    """Factor of the noise on what is observed; 0 is none."""
    push_speed: float = 0.0
    """Largest speed in m/s of the pushes that come every one to three seconds; 0 is no pushes."""
    command_ranges: tuple[float, float, float]
    """Largest commands: forward and sideways in m/s, turning in rad/s."""
    tracking_sigma: float = 0.25
    """How far off a speed may be, squared, in m^2/s^2 and rad^2/s^2."""
    scales: Scales
    """Weights of the reward's terms."""
    solver_iterations: int = 0
    """Iterations of the solver of contacts in each step of the physics; 0 is until it has converged."""
    lowest_reward: ClassVar[float] = 0.0
    """The least that a step pays."""
    action_moves: ClassVar[Literal["posture", "target"]] = "posture"
    """What an action moves the servos from: the posture, or the target of the step before."""
    critical_servos: ClassVar[bool] = False
    """Whether servos damp critically, by the inertia of each joint in qpos0, and not as the file says."""
    bounded_targets: ClassVar[bool] = False
    """Whether the targets of the servos are held within the servos' range."""
    clearance: ClassVar[float] = 0.1
    """How high a foot should swing, in m."""
    tiles: ClassVar[Tiles | None] = None
    """What the ground is made of, in place of the file's floor."""
    push_seconds: ClassVar[tuple[float, float]] = (0.05, 0.2)
    push_waits: ClassVar[tuple[float, float]] = (1.0, 3.0)

    @abc.abstractmethod
    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns what the robot measures, in parts: each [n] with the size of its noise, or sizes [n]."""

    @abc.abstractmethod
    def privileged(self, now: physics.Data, kept: Ride) -> list[Array]:
        """Returns what only critics see besides the observation; `[]` if they see nothing else."""

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
        if self.action_latency not in (0, 1):
            raise SeedbedError(
                f"{type(self).__name__}.action_latency is {self.action_latency}; give 0 or 1"
            )
        require_fields(self)
        for name in ("noise_level", "push_speed", "kp", "kd", "solver_iterations"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise SeedbedError(f"{type(self).__name__}.{name} is {value}; give 0 or more")
        if not 0 < self.tracking_sigma < math.inf:
            raise SeedbedError(
                f"{type(self).__name__}.tracking_sigma is {self.tracking_sigma}; give more than 0"
            )
        ranges = self.command_ranges
        if len(ranges) != 3 or not all(0 <= x < math.inf for x in ranges):
            raise SeedbedError(
                f"{type(self).__name__}.command_ranges are {ranges}; give three, 0 or more"
            )

    def physics_model(self) -> physics.Model:
        """Returns the model to simulate: `model` if it is given, else the file's with these servos."""
        if self.model is not None:
            return self.model
        return self._model

    @functools.cached_property
    def _model(self) -> physics.Model:
        iterations, path = self.solver_iterations, self.model_path
        return with_servos(path, self.integrator, self.servos, iterations, self.tiles)

    def compiled(self) -> Any:
        """Returns what is simulated as MuJoCo's MjModel, with all that pictures show."""
        return compiled_with(self.model_path, self.servos, self.tiles)

    def mirror(self) -> Mirror | None:
        """Returns the symmetry of the robot and the task; None if the robot or what it sees has none."""
        sides = sides_of(self.compiled(), self.at_home, self.feet)
        if sides is None or not self.sights:
            return None
        parts = [[sides.of(sight) for sight in seen] for seen in (self.sights, self.insights)]
        if None in parts[0] + parts[1]:
            return None
        shown, critics = (joined(filter(None, seen)) for seen in parts)
        return Mirror(
            {"state": shown} | ({PRIVILEGED: critics} if self.insights else {}), sides.servos
        )

    @property
    def servos(self) -> Servos:
        """Returns the gains of the joints."""
        return Servos(self.kp, self.kd, self.critical_servos)

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws a place, a heading and the trunk's speeds, in the posture; consumes the key."""
        place, heading, speeds = jax.random.split(key, 3)
        at = jax.random.uniform(place, (2,), jnp.float32, -0.5, 0.5)
        half = 0.5 * jax.random.uniform(heading, (), jnp.float32, -3.14, 3.14)
        turn = jnp.stack([jnp.cos(half), 0.0, 0.0, jnp.sin(half)])
        turned = quat_mul(turn, self.at_home[3:7])
        qpos = jnp.asarray(self.at_home).at[:2].add(at).at[3:7].set(turned)
        qvel = jax.random.uniform(speeds, (6,), jnp.float32, -0.5, 0.5)
        still = jnp.zeros(self.physics_model().nv - 6, jnp.float32)
        return qpos, jnp.concatenate([qvel, still])

    def action_bounds(self) -> np.ndarray:
        """Returns -1 and 1 for each action, [nu, 2]."""
        return np.tile([-1.0, 1.0], (self.physics_model().nu, 1))

    def control(self, kept: Ride, action: Array) -> Array:
        """Returns the targets of the servos [nu], in rad."""
        sent = kept.action if self.action_latency else action
        targets = self.centre(kept) + self.action_scale * sent
        if not self.bounded_targets:
            return targets
        low, high = np.asarray(self.physics_model().actuator_ctrlrange, np.float32).T
        return jnp.clip(targets, low, high)

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
        noise = jax.random.fold_in(kept.key, 0x6E6F6973 ^ number)
        measured = self._measured(now, noise)
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
        """Pushes the trunk, the first body, at its centre of mass."""
        if not self.push_speed:
            return {}
        forces = jnp.zeros((self.physics_model().nbody, 6), jnp.float32)
        return {"xfrc_applied": forces.at[1, :3].set(self.force(before.kept.push))}

    def force(self, push: Push) -> jax.Array:
        """Returns the force of a push in a step [3], in N: half a sine over its time."""
        if not self.push_speed:
            return jnp.zeros(3, jnp.float32)
        model = self.physics_model()
        mass = np.sum(np.asarray(model.body_mass)) if self.model is None else model.body_mass.sum()
        return push.force(mass, self.dt)

    def observe(self, now: physics.Data) -> Array:
        """Returns what the robot measures, without noise."""
        return jnp.concatenate([part for part, _ in self.measured(now)])

    def shown(self, now: physics.Data, kept: Ride) -> Tree:
        """Returns what the policy sees, under `state`, and what critics see besides."""
        state, unseen = self.state(kept), self.privileged(now, kept)
        shown = {"state": jnp.concatenate(state)}
        return shown | ({PRIVILEGED: jnp.concatenate(unseen)} if unseen else {})

    def _measured(self, now: physics.Data, key: Array) -> jax.Array:
        """Returns what the robot measures with noise [m]; consumes the key."""
        clean = self.observe(now)
        if not self.noise_level:
            return clean
        spread = jax.random.uniform(key, clean.shape, jnp.float32, -1.0, 1.0)
        return clean + self.noise_level * self._sizes * spread

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        """Returns the sizes of the noise on what is measured [m]."""
        model = self.physics_model()
        sizes: list[Any] = []

        def parts(now: physics.Data) -> list[Array]:
            found = self.measured(now)
            sizes[:] = [size for _, size in found]
            return [part for part, _ in found]

        state = physics.init(model, model.qpos0.astype(np.float32))
        shapes = jax.eval_shape(parts, physics.make_data(model, state))
        spread = [
            np.broadcast_to(np.float32(size), part.shape)
            for size, part in zip(sizes, shapes, strict=True)
        ]
        return np.concatenate(spread)

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for following the command as it was shown; an episode ends with a fall."""
        fallen = self.fallen(now)
        terms = {
            name: getattr(self.scales, name) * term
            for name, term in self.terms(before.kept, now, action, fallen).items()
        }
        reward = jnp.maximum(sum(terms.values()) * self.dt, self.lowest_reward)
        metrics = {f"reward_{name}": jnp.float32(term) for name, term in terms.items()}
        return Verdict(reward, fallen, metrics)

    def fallen(self, now: physics.Data) -> Array:
        """Returns whether the robot lies on its back."""
        return self.up(now)[2] < 0

    def usual_terms(self, ride: Ride, now: physics.Data, fallen: Array) -> dict[str, Array]:
        """Returns the terms that quadrupeds share."""
        command, told = ride.command, self.told(ride)
        off = squares(command[:2] - self.velocity(now)[:2])
        off_turning = jnp.square(command[2] - self.turning(now)[2])
        feet, force = self.moved_feet(now, ride.feet), jnp.abs(now.actuator_force)
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
            "energy": (jnp.abs(now.qvel[6:]) * force).sum(),
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
