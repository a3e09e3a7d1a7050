"""MuJoCo Playground's tasks of Go1 without a joystick, written plainly on mjData, one step after another."""

from __future__ import annotations

from typing import Any

import numpy as np

import plain_humanoids
from plain_humanoids import Terms, mujoco

FEET = ("FR", "FL", "RR", "RL")


class Trick(plain_humanoids.Plain):
    """What the three share."""

    substeps, limit = 5, 0.95

    def prepare(self) -> None:
        self.model.dof_damping[6:] = 0.5
        self.model.actuator_gainprm[:, 0], self.model.actuator_biasprm[:, 1] = 35.0, -35.0

    def place(self, qpos: Any, qvel: Any) -> None:
        """Puts the robot somewhere, as if an episode opened there."""
        self.data.qpos[:], self.data.qvel[:] = qpos, 0.0
        self.data.qvel[:6] = qvel
        self.data.ctrl[:] = self.data.qpos[7:]
        self.data.qacc_warmstart[:] = 0.0
        mujoco.mj_forward(self.model, self.data)
        self.action = self.earlier = np.zeros(12)

    def step(self, action: np.ndarray, command: np.ndarray | None = None) -> dict[str, Any]:
        self.data.ctrl[:] = self.targets(action)
        mujoco.mj_step(self.model, self.data, self.substeps)
        seen, fallen = {"state": self.state(), "privileged": self.privileged()}, self.fallen()
        terms = self.terms(action, np.zeros(3), fallen)
        self.earlier, self.action = self.action, action
        return {"seen": seen, "terms": terms, "fallen": fallen}

    def height(self) -> float:  # type: ignore[override]
        return self.data.site("imu").xpos[2]

    def state(self) -> np.ndarray:
        joints = [self.data.qpos[7:] - self.pose, self.data.qvel[6:]]
        return np.hstack([self.read("gyro"), self.gravity(), *joints, self.action])

    def privileged(self) -> np.ndarray:
        body = ["gyro", "accelerometer", "local_linvel", "global_angvel"]
        joints = [self.data.qpos[7:], self.data.qvel[6:], self.data.actuator_force]
        return np.hstack([*map(self.read, body), *joints, self.height()])

    def outside(self) -> float:
        low, high = self.model.jnt_range[1:].T
        middle, reach, joints = (low + high) / 2, high - low, self.data.qpos[7:]
        below, above = middle - 0.5 * reach * self.limit, middle + 0.5 * reach * self.limit
        return np.sum(np.maximum(below - joints, 0) + np.maximum(joints - above, 0))


class Getup(Trick):
    """Go1Getup."""

    scale = 0.5

    def targets(self, action: np.ndarray) -> np.ndarray:
        return self.data.qpos[7:] + self.scale * action

    def fallen(self) -> bool:
        return False

    def terms(self, action: np.ndarray, command: np.ndarray, fallen: bool) -> Terms:
        force, off = self.data.actuator_force, np.sum((np.array([0, 0, -1]) - self.gravity()) ** 2)
        height = min(self.height(), 0.275)
        upright, high = off < 0.01, 0.275 - height < 0.005
        jerk = action - 2 * self.action + self.earlier
        fast = np.maximum(np.abs(self.data.qvel[6:]) - 2 * np.pi, 0)
        return {
            "orientation": np.exp(-2 * off),
            "torso_height": np.exp(height) - 1,
            "posture": upright * np.exp(-0.5 * np.sum((self.data.qpos[7:] - self.pose) ** 2)),
            "stand_still": (upright and high) * np.exp(-0.5 * np.sum(action**2)),
            "action_rate": np.sum((action - self.action) ** 2) + np.sum(jerk**2),
            "dof_pos_limits": self.outside(),
            "torques": np.linalg.norm(force) + np.abs(force).sum(),
            "dof_acc": np.sum(self.data.qacc[6:] ** 2),
            "dof_vel": np.sum(fast**2),
        }


class Handstand(Trick):
    """Go1Handstand."""

    scale, limit, top, nose, lifted = 0.3, 0.9, 0.55, -1, range(6, 12)

    def targets(self, action: np.ndarray) -> np.ndarray:
        return self.data.ctrl + self.scale * action

    def fallen(self) -> bool:
        parts = ("calf1", "calf2", "thigh1", "thigh2", "thigh3", "hip")
        lying = self.found(*(f"{leg}_{part}_floor" for leg in ("fl", "fr") for part in parts))
        return bool(lying or self.read("upvector")[2] < -0.25)

    def state(self) -> np.ndarray:
        return np.hstack([self.read("local_linvel"), super().state()])

    def terms(self, action: np.ndarray, command: np.ndarray, fallen: bool) -> Terms:
        force, speeds = self.data.actuator_force, self.data.qvel
        ahead = self.data.site("imu").xmat.reshape(3, 3) @ [1, 0, 0]
        bent = (self.data.qpos[7:] - self.pose)[list(self.lifted)]
        return {
            "height": np.exp(-(self.top - min(self.height(), self.top))),
            "orientation": (0.5 * (ahead @ [0, 0, self.nose]) + 0.5) ** 2,
            "contact": float(self.found(*(f"{foot}_floor" for foot in FEET))),
            "action_rate": np.sum((action - self.action) ** 2),
            "termination": float(fallen),
            "dof_pos_limits": self.outside(),
            "torques": np.sum(force**2),
            "pose": np.sum(bent**2),
            "stay_still": np.sum(speeds[:2] ** 2) + speeds[5] ** 2,
            "energy": np.sum(np.abs(speeds[6:]) * np.abs(force)),
            "dof_acc": np.sum(self.data.qacc[6:] ** 2),
        }


class Footstand(Handstand):
    """Go1Footstand."""

    top, nose, lifted = 0.53, 1, range(6)
