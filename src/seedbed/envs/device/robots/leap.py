"""A LEAP hand that turns a cube, as MuJoCo Playground's LeapCubeRotateZAxis."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import TaskState, Verdict, squares
from seedbed.envs.device.robots.ride import Scales
from seedbed.envs.device.robots.servoed import Effort, Uncommanded
from seedbed.types import Array, Tree

_TIPS = ("th_tip", "if_tip", "mf_tip", "rf_tip")
_CUBE = 7  # numbers of qpos that tell where the cube is, the last ones
_CENTRE = (0.1, 0.0, 0.05)  # m, around which an episode puts the cube
_AWAY = 0.01  # m, by how much at most in each direction
_BENT = 0.1  # rad, deviation of the joints when an episode opens
_LOWEST = -0.05  # m, of a cube that is not dropped
_HIDDEN = -100.0  # m, where the cube is that shows other tasks' goal


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeapScales(Scales):
    """The weights of the reward's terms in 1/s; the names are MuJoCo Playground's."""

    angvel: float = 1.0
    linvel: float = 0.0
    pose: float = 0.0
    torques: float = 0.0
    energy: float = 0.0
    termination: float = -100.0
    action_rate: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeapRotate(Uncommanded):
    """A hand of 16 joints turns a cube on its palm around the vertical, as fast as it can, and keeps it.

    Observation and reward are those of MuJoCo Playground's LeapCubeRotateZAxis, and so are the solver's five
    iterations. The policy sees the joints and its last action but one, not the cube.
    """

    xml_file: str = "playground/manipulation/leap_hand/xmls/scene_mjx_cube.xml"
    frame_skip: int = 5
    episode_steps: int = 500
    solver_iterations: int = 5
    action_scale: float = 0.6
    scales: LeapScales = LeapScales()
    lowest_reward: ClassVar[float] = -math.inf

    @property
    def posture(self) -> np.ndarray:
        """Returns the joints' positions [16] in rad about which actions move them."""
        return np.asarray(self.physics_model().keyframes[0].qpos[:-_CUBE], np.float32)

    def joints(self, qpos: Array) -> Array:
        """Returns the positions of the hand's joints [16], in rad."""
        return qpos[:-_CUBE]

    def centre(self, kept: Effort) -> Array:
        """Returns the posture [16], in rad."""
        return jnp.asarray(self.posture)

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws bent fingers at rest, and a cube above the palm with any attitude; consumes the key."""
        bend, place, turn = jax.random.split(key, 3)
        model = self.physics_model()
        low, high = np.asarray(model.actuator_ctrlrange, np.float32).T
        bent = self.posture + _BENT * jax.random.normal(bend, low.shape, jnp.float32)
        at = jax.random.uniform(place, (3,), jnp.float32, -_AWAY, _AWAY)
        quat = jax.random.normal(turn, (4,), jnp.float32)
        cube = [at + np.array(_CENTRE, np.float32), quat / jnp.sqrt(squares(quat))]
        qpos = jnp.concatenate([jnp.clip(bent, low, high), *cube])
        return qpos, jnp.zeros(model.nv, jnp.float32)

    def mocap(self, kept: Tree) -> dict[str, Array]:
        """Returns that the goal of other tasks with this file is far away."""
        attitude = np.array([[1, 0, 0, 0]], np.float32)
        return {
            "mocap_pos": jnp.full((1, 3), _HIDDEN, jnp.float32),
            "mocap_quat": jnp.asarray(attitude),
        }

    def measured(self, now: physics.Data) -> list[tuple[Array, Any]]:
        """Returns the joints' positions."""
        return [(self.joints(now.qpos), 0.05)]

    def privileged(self, now: physics.Data, kept: Effort) -> list[Array]:
        """Returns joints, forces, fingertips, and where the cube is and how it moves."""
        joints = self.joints(now.qpos)
        return [
            joints,
            now.qvel[: joints.size],
            now.actuator_force,
            *(self.read(now, f"{tip}_position") for tip in _TIPS),
            self.read(now, "palm_position") - self.read(now, "cube_position"),
            *(self.read(now, f"cube_{part}") for part in ("orientation", "angvel", "linvel")),
        ]

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for the cube's angular velocity; an episode ends when the cube is dropped."""
        dropped = self.read(now, "cube_position")[2] < _LOWEST
        joints, force = self.joints(now.qpos), now.actuator_force
        terms = {
            "angvel": self.read(now, "cube_angvel")[2],
            "linvel": jnp.abs(self.read(now, "cube_linvel")).sum(),
            "pose": squares(joints - self.posture),
            "torques": squares(force),
            "energy": jnp.abs(now.qvel[: joints.size] * force).sum(),
            "termination": dropped.astype(jnp.float32),
            "action_rate": squares(action - before.kept.action),
        }
        return self.paid(terms, dropped)
