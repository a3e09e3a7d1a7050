"""Robotis' OP3 with a joystick on flat ground, as MuJoCo Playground's Op3Joystick."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import Command, squares
from seedbed.envs.device.robots.commands import RestingCommands
from seedbed.envs.device.robots.ride import Ride, Scales
from seedbed.envs.device.robots.sensed import Sight
from seedbed.types import Array, SeedbedError

_HISTORY = 3  # steps
_NOISE = 0.05  # of each number that is seen
_BODY = 6  # numbers of turning and of where up is
_LOWEST = 0.21  # m, of the trunk


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op3Scales(Scales):
    """The weights of the reward's terms in 1/s; names and numbers are MuJoCo Playground's."""

    tracking_lin_vel: float = 1.5
    tracking_ang_vel: float = 0.8
    lin_vel_z: float = -2.0
    ang_vel_xy: float = -0.05
    orientation: float = -5.0
    torques: float = -0.0002
    action_rate: float = -0.01
    zero_cmd: float = -0.5
    termination: float = -1.0
    feet_slip: float = -0.1
    feet_clearance: float = 0.0
    energy: float = -0.0001


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op3Joystick(RestingCommands):
    """OP3, a small humanoid of 20 joints, follows a joystick on flat ground, without seeing its own speed.

    Observation, reward and commands are those of MuJoCo Playground's Op3Joystick, and so is the solver's one
    iteration. The policy sees three steps, with noise on all numbers; critics, which see the same there,
    here see how the robot moves, too.
    """

    xml_file: str = "playground/locomotion/op3/xmls/scene_mjx_feetonly.xml"
    frame_skip: int = 5
    solver_iterations: int = 1
    kp: float = 21.1
    kd: float = 1.084
    action_scale: float = 0.3
    command_ranges: tuple[float, float, float] = (1.5, 0.8, 0.7)
    backward: float = 0.6
    """Largest command backward, in m/s."""
    scales: Op3Scales = Op3Scales()
    home: ClassVar[str] = "stand_bent_knees"
    feet: ClassVar[tuple[str, ...]] = ("left_foot", "right_foot")
    soles: ClassVar[tuple[str, ...]] = ("{0[0]}_foot1", "{0[0]}_foot2")  # of left_foot: l_foot1
    bounded_targets: ClassVar[bool] = True
    clearance: ClassVar[float] = 0.07

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be."""
        super().__post_init__()
        if not 0 <= self.backward < np.inf:
            raise SeedbedError(f"Op3Joystick.backward is {self.backward}; give 0 or more")

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Returns the home posture at rest; does not consume the key."""
        del key
        return self.at_rest()

    def first_command(self, key: Array) -> Array:
        """Draws any command, or 0; consumes the key."""
        command = super().first_command(jax.random.fold_in(key, 0x74757263))
        forward = jax.random.uniform(key, (), jnp.float32, -self.backward, self.command_ranges[0])
        still = (command == 0).all()
        return jnp.where(still, 0.0, command.at[0].set(forward))

    @property
    def commands(self) -> tuple[Command, ...]:
        """Returns the speeds of the joystick."""
        forward, *others = super().commands
        return forward._replace(low=-self.backward), *others

    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns turning, where up is, and the joints' positions."""
        return [
            (self.turning(now), _NOISE),
            (self.up(now), _NOISE),
            (now.qpos[7:] - self.posture, _NOISE),
        ]

    def first_memory(self, key: Array) -> Array:
        """Returns zeros for three steps, [147]; does not consume the key."""
        del key
        return jnp.zeros(_HISTORY * self._seen, jnp.float32)

    @property
    def _seen(self) -> int:
        """Numbers of a step that are seen."""
        return _BODY + 3 + len(self.posture) + self.physics_model().nu

    def remembered(
        self, kept: Ride, now: physics.Data, measured: Array, targets: Array | None
    ) -> Array:
        """Returns the last steps, the newest first, in which the noise stands for the command."""
        opens = targets is None
        earlier = kept.memory if opens else jnp.concatenate(self.state(kept))
        key = jax.random.fold_in(kept.key, 0x6F703300)
        key = jax.random.fold_in(key, kept.step if opens else kept.step + 1)
        size = 3 + self.physics_model().nu
        spread = _NOISE * self.noise_level * jax.random.uniform(key, (size,), jnp.float32, -1, 1)
        body, joints = jnp.split(measured, [_BODY])
        action = spread[3:] if opens else kept.action + spread[3:]
        return jnp.concatenate([body, spread[:3], joints, action, earlier[: -self._seen]])

    def state(self, kept: Ride) -> list[Array]:
        """Returns the last steps, the newest first, with the command in its place."""
        body, command, others = jnp.split(kept.memory, [_BODY, _BODY + 3])
        return [body, command + kept.seen.command, others]

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order."""
        joints = len(self.posture)
        return tuple(
            sight
            for age in range(_HISTORY)
            for sight in (
                Sight("base_ang_vel", 3, ("gyro",), delay=age),
                Sight("upvector", 3, ("upvector",), delay=age),
                Sight("command", 3, delay=age),
                Sight("joint_pos", joints, delay=age),
                Sight("actions", joints, delay=age + 1),
            )
        )

    def fallen(self, now: physics.Data) -> Array:
        """Returns whether the trunk leans, by about 32 degrees, or is low, or a joint is out of its range."""
        low, high = self.target_bounds.T
        joints = now.qpos[7:]
        out = (joints < low).any() | (joints > high).any()
        return out | (self.up(now)[2] < 0.85) | (now.xpos[self.trunk, 2] < _LOWEST)

    def terms(
        self, ride: Ride, now: physics.Data, action: Array, fallen: Array
    ) -> dict[str, Array]:
        """Returns Playground's terms; a fall in the last step of a command costs nothing."""
        usual = self.usual_terms(ride, now, fallen)
        still = jnp.sqrt(squares(ride.command)) < 0.1
        jerk = action - 2 * ride.action + ride.earlier
        speeds = jnp.sqrt(jnp.square(self.foot_velocities(now)[:, :2]).sum(axis=1))
        off_height = jnp.square(self.heights(now) - self.clearance)
        own = {
            "action_rate": squares(action - ride.action) + squares(jerk),
            "zero_cmd": squares(action) * still,
            "termination": usual["termination"] * (ride.until > 1),
            "feet_clearance": (off_height * jnp.sqrt(speeds)).sum(),
        }
        fields = dataclasses.fields(self.scales)
        return {field.name: (usual | own)[field.name] for field in fields}
