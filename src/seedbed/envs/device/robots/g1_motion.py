"""Unitree's G1 follows a motion, after BeyondMimic (Liao et al., 2025); actions move what the motion says."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import TaskState, Verdict, key_of_kept, squares
from seedbed.envs.device.robots.edits import torque_ranges
from seedbed.envs.device.robots.motion import Motion, exercises, read_motion, resampled
from seedbed.envs.device.robots.ride import Scales
from seedbed.envs.device.robots.sensed import SensedRobot, Sight
from seedbed.physics.math import quat_mul, quat_to_mat
from seedbed.types import Array, SeedbedError

# m, m and rad that the trunk may be off before an episode ends
_LOW, _ASIDE, _LEANS = 0.25, 0.5, 0.8
_CARELESS = (0.02, 0.1, 0.1)  # m, rad and m/s by which an episode's opening is off at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class MotionScales(Scales):
    """The weights of the reward's terms in 1/s."""

    place: float = 1.0
    orientation: float = 1.0
    joint_pos: float = 2.0
    joint_vel: float = 0.5
    velocity: float = 0.5
    action_rate: float = -0.02
    dof_pos_limits: float = -1.0


class Following(NamedTuple):
    """The state of an episode besides the physics."""

    key: Array
    step: Array  # int32
    start: Array  # int32, frame of the motion with which the episode opened
    action: Array  # [nu] of the last step
    measured: Array  # [m] with noise

    @property
    def frame(self) -> Array:
        """Returns the frame of the motion that belongs to the state, int32."""
        return self.start + self.step


@dataclasses.dataclass(frozen=True, kw_only=True)
class G1Motion(SensedRobot):
    """G1, a humanoid of 29 joints, follows a motion.

    An action moves the targets of the servos about the motion's next joints. Servos are not as stiff as the
    file says, but as they would be to swing at 10 Hz with their motors alone, as in BeyondMimic. The policy
    sees what the robot measures, with noise, its last action, the motion's next joints and their speeds, and
    how far the trunk leans and turns away from the motion; critics see where it is, too. Episodes open
    anywhere in the motion, and end when the trunk is 0.25 m lower or higher than the motion's, 0.5 m aside,
    or turned by 0.8 rad.
    """

    xml_file: str = "playground/locomotion/g1/xmls/scene_mjx_feetonly_flat_terrain.xml"
    motion: str = ""
    """File (.npz) with `fps`, `joint_pos`, `body_pos_w` and `body_quat_w`, as mjlab and BeyondMimic have
    them, the trunk first; "" is a motion of ten seconds that Seedbed makes: exercises on the spot."""
    frame_skip: int = 10
    solver_iterations: int = 3
    action_scale: float = 0.5
    """How far an action of 1 moves a servo's target, as a share of what the strongest torque needs."""
    scales: MotionScales = MotionScales()
    action_moves: ClassVar[Literal["posture", "target", "joints", "motion"]] = "motion"
    motor_hz: ClassVar[float] = 10.0
    home: ClassVar[str] = "knees_bent"
    frame: ClassVar[str] = "_pelvis"
    feet: ClassVar[tuple[str, ...]] = ("left_foot", "right_foot")

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be, or a motion that is not this robot's."""
        super().__post_init__()
        if self.motion:
            # A run's folder may be evaluated from elsewhere.
            object.__setattr__(self, "motion", str(Path(self.motion).expanduser().absolute()))
            _ = self.followed

    @functools.cached_property
    def followed(self) -> Motion:
        """Returns the motion, in steps of the task."""
        model = self.compiled()
        if self.motion:
            return read_motion(Path(self.motion), model, self.dt)
        rows = exercises(model, self.at_home, self.feet[0])
        return resampled(model, rows, (len(rows) - 1) / 10.0, self.dt)

    def begin(self, key: Array) -> Following:
        """Draws the frame with which an episode opens; the key is kept."""
        nu, drawn = self.physics_model().nu, jax.random.fold_in(key, 0)
        last = len(self.followed.qpos) - 1
        start = jax.random.randint(drawn, (), 0, last, jnp.int32)
        still, blank = jnp.zeros(nu, jnp.float32), jnp.zeros(self._sizes.size, jnp.float32)
        return Following(key, jnp.int32(0), start, still, blank)

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws a state near the motion's; consumes the key."""
        begun = self.begin(key_of_kept(key))
        qpos, qvel = self.followed.at(begun.frame)
        off, fast = jax.random.split(key)
        aside, bent, speed = _CARELESS
        sizes = np.repeat(np.array([aside, 0.0, bent], np.float32), [3, 4, len(self.posture)])
        qpos += sizes * jax.random.uniform(off, sizes.shape, jnp.float32, -1.0, 1.0)
        qvel += speed * jax.random.uniform(fast, qvel.shape, jnp.float32, -1.0, 1.0)
        return qpos, qvel

    @functools.cached_property
    def reach(self) -> np.ndarray:
        """Returns how far an action of 1 moves each target [nu], in rad."""
        model = self.compiled()
        strongest = torque_ranges(model)[:, 1]
        for servo in np.flatnonzero(~np.isfinite(strongest)):
            raise SeedbedError(
                f"{self.xml_file}: the torque of servo {model.actuator(int(servo)).name or servo} has no "
                "bound, of which an action is a share: give it a forcerange, or its joint an "
                "actuatorfrcrange"
            )
        return np.asarray(self.action_scale * strongest / model.actuator_gainprm[:, 0], np.float32)

    def control(self, kept: Following, action: Array) -> Array:
        """Returns the targets of the servos [nu], in rad."""
        return self.centre(kept) + self.reach * action

    def centre(self, kept: Following) -> Array:
        """Returns the joints of the motion's next frame [nu], in rad."""
        return self.followed.at(kept.frame + 1)[0][7:]

    def keep(self, now: physics.Data, kept: Following, action: Array | None = None) -> Following:
        """Returns what is kept after a step."""
        if action is None:
            return kept._replace(measured=self.noisy(now, kept.key, kept.step))
        measured = self.noisy(now, kept.key, kept.step + 1)
        return kept._replace(step=kept.step + 1, action=action, measured=measured)

    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns turning, the trunk's axes, and the joints' positions and velocities."""
        axes = quat_to_mat(self.read(now, self.attitude))
        return [
            (self.turning(now), 0.2),
            (axes.ravel(), 0.02),
            (now.qpos[7:], 0.01),
            (now.qvel[6:], 0.5),
        ]

    def state(self, kept: Following) -> list[Array]:
        """Returns what is measured from the motion's frame on, the action, and the motion's next joints."""
        qpos, qvel = self.followed.at(kept.frame)
        later, speeds = self.followed.at(kept.frame + 1)
        turning, axes, joints, moving = jnp.split(kept.measured, [3, 12, 12 + len(self.posture)])
        axes = axes.reshape(3, 3)
        wanted = quat_to_mat(qpos[3:7])
        return [
            turning,
            axes[2],  # where up is
            (axes.T @ wanted)[:, :2].T.ravel(),
            joints - qpos[7:],
            moving - qvel[6:],
            kept.action,
            later[7:] - self.posture,
            speeds[6:],
        ]

    @property
    def sights(self) -> tuple[Sight, ...]:
        """Returns the parts of what the policy sees, in order."""
        joints = len(self.posture)
        return (
            Sight("base_ang_vel", 3, (f"gyro{self.frame}",)),
            Sight("upvector", 3, (self.attitude,)),
            Sight("motion_orientation", 6, (self.attitude,)),
            Sight("motion_error", joints),
            Sight("motion_velocity_error", joints),
            Sight("actions", joints),
            Sight("motion_pos", joints),
            Sight("motion_vel", joints),
        )

    def privileged(self, now: physics.Data, kept: Following) -> list[Array]:
        """Returns where the trunk is from the motion's, its velocity, forces and the feet."""
        qpos, qvel = self.followed.at(kept.frame)
        axes = quat_to_mat(now.qpos[3:7])
        return [
            axes.T @ (now.qpos[:3] - qpos[:3]),
            axes.T @ (now.qvel[:3] - qvel[:3]),
            now.qpos[2:3],
            now.qpos[7:] - qpos[7:],
            now.qvel[6:],
            now.actuator_force,
            self.contacts(now).astype(jnp.float32),
        ]

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for being where the motion is after the step; an episode ends far from it."""
        kept = before.kept
        qpos, qvel = self.followed.at(kept.frame + 1)
        aside = now.qpos[:3] - qpos[:3]
        leans = self._apart(now.qpos[3:7], qpos[3:7])
        joints = len(self.posture)
        terms = {
            "place": jnp.exp(-squares(aside) / 0.3**2),
            "orientation": jnp.exp(-jnp.square(leans) / 0.4**2),
            "joint_pos": jnp.exp(-squares(now.qpos[7:] - qpos[7:]) / (joints * 0.2**2)),
            "joint_vel": jnp.exp(-squares(now.qvel[6:] - qvel[6:]) / (joints * 1.0**2)),
            "velocity": jnp.exp(-squares(now.qvel[:3] - qvel[:3]) / 0.5**2),
            "action_rate": squares(action - kept.action),
            "dof_pos_limits": self.beyond_limits(now.qpos[7:]),
        }
        far = (jnp.abs(aside[2]) > _LOW) | (squares(aside[:2]) > _ASIDE**2) | (leans > _LEANS)
        return self.paid(terms, far)

    def _apart(self, a: Array, b: Array) -> Array:
        """Returns the angle between two orientations, in rad."""
        turn = quat_mul(a * jnp.array([1.0, -1.0, -1.0, -1.0]), b)
        return 2 * jnp.arctan2(jnp.sqrt(squares(turn[1:])), jnp.abs(turn[0]))
