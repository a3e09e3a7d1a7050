"""Unitree's H1 with a joystick and a gait on flat ground, as MuJoCo Playground's H1JoystickGaitTracking."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import squares
from seedbed.envs.device.robots.commands import SteadyCommands
from seedbed.envs.device.robots.humanoid import Gait
from seedbed.envs.device.robots.ride import Ride, Scales
from seedbed.envs.device.robots.sensed import Rhythm, Sight
from seedbed.types import Array

_FAINTEST = 0.1  # m/s and rad/s, below which a number of a command becomes 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class H1Scales(Scales):
    """The weights of the reward's terms in 1/s; names and numbers are MuJoCo Playground's."""

    feet_phase: float = 5.0
    tracking_lin_vel: float = 3.5
    tracking_ang_vel: float = 0.75
    feet_air_time: float = 0.0
    ang_vel_xy: float = 0.0
    pose: float = -2.5
    foot_slip: float = 0.0
    action_rate: float = -0.01


class H1Memory(NamedTuple):
    """The memory of an episode of H1, besides its last actions."""

    gait: Gait
    hertz: Array  # strides per second
    top: Array  # m, how high the feet are to swing
    targets: Array  # [nu] rad, of the servos in the last step
    speeds: Array  # [nu] rad/s of the joints, without noise
    errors: Array  # [nu] rad, how far the joints were from the targets


@dataclasses.dataclass(frozen=True, kw_only=True)
class H1Joystick(SteadyCommands):
    """H1, a humanoid of 19 joints, follows a joystick in a gait whose frequency and height it is told.

    Observation, reward and commands are those of MuJoCo Playground's H1JoystickGaitTracking, and so is the
    solver's one iteration. An action moves the targets of the servos from where they were, which is 0 when an
    episode opens. The gait is a walk. Critics see how the robot moves, which Playground's do not. As there,
    both feet count as on the ground: it reads other numbers in the place of the contacts, which are always
    more than 0.
    """

    xml_file: str = "playground/locomotion/h1/xmls/scene_mjx_feetonly.xml"
    frame_skip: int = 5
    solver_iterations: int = 1
    action_scale: float = 0.3
    noise_level: float = 0.6
    command_ranges: tuple[float, float, float] = (1.5, 0.5, 1.0)
    tracking_sigma: float = 0.5
    scales: H1Scales = H1Scales()
    feet: ClassVar[tuple[str, ...]] = ("left_foot", "right_foot")
    action_moves: ClassVar[Literal["posture", "target"]] = "target"
    critical_servos: ClassVar[bool] = True
    bounded_targets: ClassVar[bool] = True
    strides: ClassVar[tuple[float, float]] = (0.5, 2.0)
    """Fewest and most strides per second."""
    tops: ClassVar[tuple[float, float]] = (0.08, 0.4)
    """Least and greatest heights in m to which the feet are to swing."""
    pose_weights: ClassVar[Mapping[str, float]] = {
        "hip_yaw": 5.0,
        "hip_roll": 5.0,
        "ankle": 5.0,
        "torso": 2.0,
        "hip_pitch": 0.0,
        "knee": 0.0,
    }

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Returns the home posture at rest; does not consume the key."""
        del key
        return self.at_rest()

    def first_command(self, key: Array) -> Array:
        """Draws any command, whose small numbers become 0; consumes the key."""
        command = super().first_command(key)
        return jnp.where(jnp.abs(command) < _FAINTEST, 0.0, command)

    def first_memory(self, key: Array) -> H1Memory:
        """Draws frequency and height of the gait; consumes the key."""
        hertz, top = jax.random.split(key)
        frequency = jax.random.uniform(hertz, (), jnp.float32, *self.strides)
        none = jnp.zeros(self.physics_model().nu, jnp.float32)
        return H1Memory(
            gait=Gait.starting(frequency, self.dt),
            hertz=frequency,
            top=jax.random.uniform(top, (), jnp.float32, *self.tops),
            targets=none,
            speeds=none,
            errors=none,
        )

    def remembered(
        self, kept: Ride, now: physics.Data, measured: Array, targets: Array | None
    ) -> H1Memory:
        """Returns the gait of the next step, and how the joints followed the servos in this one."""
        memory, opens = kept.memory, targets is None
        told = memory.targets if targets is None else targets
        return memory._replace(
            gait=memory.gait if opens else memory.gait.later(),
            targets=told,
            speeds=now.qvel[6:],
            errors=now.qpos[7:] - told,
        )

    def contacts(self, now: physics.Data) -> Array:
        """Returns that each foot is on the ground [2]."""
        return jnp.ones(len(self.feet), bool)

    @property
    def first_targets(self) -> np.ndarray:
        """Returns zeros [nu]."""
        return np.zeros(self.physics_model().nu, np.float32)

    def centre(self, kept: Ride) -> Array:
        """Returns the targets of the step before [nu], in rad."""
        return kept.memory.targets

    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns turning, where up is, and the joints' positions and velocities."""
        return [
            (self.turning(now), 0.2),
            (self.up(now), 0.05),
            (now.qpos[7:] - self.posture, 0.01),
            (now.qvel[6:], 1.5),
        ]

    def state(self, kept: Ride) -> list[Array]:
        """Returns what is measured, action and command, then how the servos are followed, and the gait."""
        memory = kept.memory
        return [
            kept.seen.measured,
            kept.seen.action,
            kept.seen.command,
            memory.speeds,
            memory.errors,
            jnp.ones(len(self.feet), jnp.float32),
            memory.gait.seen(),
            jnp.stack([memory.hertz, jnp.zeros_like(memory.hertz), memory.top]),
        ]

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order."""
        joints = len(self.posture)
        return (
            Sight("base_ang_vel", 3, ("gyro",)),
            Sight("upvector", 3, ("upvector",)),
            Sight("joint_pos", joints),
            Sight("joint_vel", joints),
            Sight("actions", joints, delay=1),
            Sight("command", 3),
            Sight("joint_vel", joints),
            Sight("servo_error", joints),
            Sight("ones", len(self.feet)),
            Sight("gait_phase", 4, delay=1),
            Sight("gait_frequency", 1),
            Sight("gait_kind", 1),
            Sight("gait_height", 1),
        )

    @property
    def rhythm(self) -> Rhythm:
        """Returns the middle of the gaits of which the observation tells."""
        return Rhythm(sum(self.strides) / 2, (0.0, np.pi), height=sum(self.tops) / 2)

    def fallen(self, now: physics.Data) -> Array:
        """Returns whether the trunk leans by more than about 32 degrees, or a joint is out of its range."""
        low, high = self.target_bounds.T
        joints = now.qpos[7:]
        return (self.up(now)[2] < 0.85) | (joints < low).any() | (joints > high).any()

    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns Playground's terms; as there, the cost of changing actions mixes two steps."""
        usual, memory = self.usual_terms(ride, now, fallen), ride.memory
        feet, walks = self.moved_feet(now, ride.feet), jnp.sqrt(squares(ride.command[:2])) > 0.05
        late = (feet.air_time - 0.1) * self.landed(ride, feet)
        weights = self.per_joint(self.pose_weights, 1.0)
        jerk = ride.action - 2 * ride.earlier + action
        return {
            "feet_phase": memory.gait.kept_by(self.heights(now), memory.top),
            **{name: usual[name] for name in ("tracking_lin_vel", "tracking_ang_vel")},
            "feet_air_time": late.sum() * walks,
            "ang_vel_xy": usual["ang_vel_xy"],
            "pose": (jnp.square(now.qpos[7:] - self.posture) * weights).sum(),
            "foot_slip": usual["feet_slip"],
            "action_rate": squares(ride.action - ride.earlier) + squares(jerk),
        }
