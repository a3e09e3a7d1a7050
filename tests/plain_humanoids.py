"""MuJoCo Playground's humanoids with a joystick, written plainly on mjData, one step after another."""

from __future__ import annotations

from typing import Any, ClassVar

import mujoco
import numpy as np

Terms = dict[str, float]


def swing(phase: float, top: float) -> float:
    """How high a foot should be: up along a cubic from -pi to 0, then down along the same."""
    x = (phase + np.pi) / (2 * np.pi)

    def cubic(start: float, end: float, t: float) -> float:
        return start + (end - start) * (t**3 + 3 * t**2 * (1 - t))

    return cubic(0, top, 2 * x) if x <= 0.5 else cubic(top, 0, 2 * x - 1)


class Plain:
    """What the humanoids share; the command of each step is given, and nothing is noisy."""

    home, substeps, scale, sigma, clearance = "home", 10, 0.5, 0.25, 0.1
    feet: tuple[str, ...] = ("left_foot", "right_foot")
    parts: tuple[str, ...] = ("{}",)
    hertz, stands, frame, attitude = 1.4, False, "", "imu"

    def __init__(self, robot: str, iterations: int = 0) -> None:
        """Loads the model, with this many iterations of the solver; 0 is until it has converged."""
        self.model = mujoco.MjModel.from_xml_path(robot)
        self.prepare()
        if iterations:
            self.model.opt.iterations = iterations
        else:
            self.model.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
            self.model.opt.tolerance, self.model.opt.iterations = 0, 100
            self.model.opt.ls_iterations = 50
        self.data = mujoco.MjData(self.model)
        mujoco.mj_resetDataKeyframe(self.model, self.data, self.model.key(self.home).id)
        self.pose = self.model.key(self.home).qpos[7:].copy()
        self.action = self.earlier = np.zeros(self.model.nu)
        self.air, self.contact, self.peak = np.zeros(2), np.zeros(2, bool), np.zeros(2)
        self.phase = np.array([0.0, np.pi])
        self.names = [self.model.joint(i).name for i in range(1, self.model.njnt)]

    def prepare(self) -> None:
        """Changes the model."""

    def read(self, name: str) -> np.ndarray:
        return self.data.sensor(name).data.copy()

    def found(self, *pairs: str) -> bool:
        return any(self.read(f"{pair}_found")[0] > 0 for pair in pairs)

    def touching(self) -> np.ndarray:
        soles = [[f"{part.format(foot)}_floor" for part in self.parts] for foot in self.feet]
        return np.array([self.found(*each) for each in soles])

    def gravity(self) -> np.ndarray:
        return self.data.site(self.attitude).xmat.reshape(3, 3).T @ [0, 0, -1]

    def speeds(self) -> np.ndarray:
        return np.array([self.read(f"{foot}_global_linvel") for foot in self.feet])

    def moves(self) -> list[Any]:
        """What critics of H1 and OP3 see, too: in Playground they see what the policy does."""
        trunk = [self.read(name) for name in ("local_linvel", "gyro", "upvector")]
        return [*trunk, self.data.qvel[6:], self.data.qpos[2], self.height, self.speeds().ravel()]

    def targets(self, action: np.ndarray) -> np.ndarray:
        return self.pose + self.scale * action

    def step(self, action: np.ndarray, command: np.ndarray) -> dict[str, Any]:
        self.data.ctrl[:] = self.targets(action)
        mujoco.mj_step(self.model, self.data, self.substeps)
        contact = self.touching()
        self.first = (self.air > 0) & (contact | self.contact)
        self.air = self.air + self.substeps * self.model.opt.timestep
        self.height = np.array([self.data.site(foot).xpos[2] for foot in self.feet])
        self.peak = np.maximum(self.peak, self.height)
        self.now = contact
        seen = self.seen(command)
        fallen = self.fallen()
        terms = self.terms(action, command, fallen)
        self.earlier, self.action = self.action, action
        self.air, self.contact, self.peak = self.air * ~contact, contact, self.peak * ~contact
        ahead = self.phase + 2 * np.pi * 0.02 * self.hertz
        self.phase = np.fmod(ahead + np.pi, 2 * np.pi) - np.pi
        if self.stands and np.linalg.norm(command) <= 0.01:
            self.phase = np.array([np.pi, np.pi])
        return {"seen": seen, "terms": terms, "fallen": fallen}

    def fallen(self) -> bool:
        return self.read("upvector")[2] < 0

    def waves(self) -> np.ndarray:
        return np.hstack([np.cos(self.phase), np.sin(self.phase)])

    def swings(self, top: float) -> float:
        off = [z - swing(phase, top) for z, phase in zip(self.height, self.phase, strict=True)]
        return np.exp(-np.sum(np.square(off)) / 0.01)

    def off_pose(self, *ends: str) -> float:
        bent = self.data.qpos[7:] - self.pose
        return sum(
            abs(x)
            for x, name in zip(bent, self.names, strict=True)
            if name.removesuffix("_joint").endswith(ends)
        )

    def seen(self, command: np.ndarray) -> dict[str, np.ndarray]:
        f = self.frame
        body = [self.read(f"local_linvel{f}"), self.read(f"gyro{f}"), self.gravity()]
        joints = [self.data.qpos[7:] - self.pose, self.data.qvel[6:]]
        state = np.hstack([*body, command, *joints, self.action, self.waves()])
        return {"state": state, "privileged": np.hstack([state, *self.unseen()])}

    def unseen(self) -> list[Any]:
        f = self.frame
        return [
            *(self.read(f"gyro{f}"), self.read(f"accelerometer{f}"), self.gravity()),
            *(self.read(f"local_linvel{f}"), self.read(f"global_angvel{f}")),
            *(self.data.qpos[7:] - self.pose, self.data.qvel[6:], self.data.qpos[2]),
            *(self.data.actuator_force, self.now, self.speeds().ravel(), self.air),
        ]

    weights: ClassVar[dict[str, float]] = {}
    hips: tuple[str, ...] = ()
    knees: tuple[str, ...] = ()
    target_height = 0.5

    def terms(self, action: np.ndarray, command: np.ndarray, fallen: bool) -> Terms:
        f, joints, force = self.frame, self.data.qpos[7:], self.data.actuator_force
        bent, speed = joints - self.pose, np.linalg.norm(self.speeds()[:, :2], axis=1)
        low, high = self.model.jnt_range[1:].T
        middle, reach = (low + high) / 2, high - low
        soft_low, soft_high = middle - 0.5 * reach * 0.95, middle + 0.5 * reach * 0.95
        off = np.sum((command[:2] - self.read(f"local_linvel{f}")[:2]) ** 2)
        off_turning = (command[2] - self.read(f"gyro{f}")[2]) ** 2
        out = np.sum(np.maximum(soft_low - joints, 0) + np.maximum(joints - soft_high, 0))
        weights = [
            next((w for end, w in self.weights.items() if name.endswith(end)), 1.0)
            for name in self.names
        ]
        norm = np.linalg.norm(command)
        return {
            "tracking_lin_vel": np.exp(-off / self.sigma),
            "tracking_ang_vel": np.exp(-off_turning / self.sigma),
            "lin_vel_z": self.read(f"global_linvel{f}")[2] ** 2,
            "ang_vel_xy": np.sum(self.read(f"global_angvel{f}")[:2] ** 2),
            "orientation": np.sum(self.read("upvector" if not f else "upvector_torso")[:2] ** 2),
            "base_height": (self.data.qpos[2] - self.target_height) ** 2,
            "torques": np.sum(np.abs(force)),
            "action_rate": np.sum((action - self.action) ** 2),
            "energy": np.sum(np.abs(self.data.qvel[6:] * force)),
            "feet_clearance": np.sum(np.abs(self.height - self.clearance) * np.sqrt(speed)),
            "feet_air_time": np.sum(np.minimum((self.air - 0.2) * self.first, 0.3)) * (norm > 0.1),
            "feet_slip": np.sum(np.linalg.norm(self.read(f"global_linvel{f}")[:2]) * self.now),
            "feet_height": np.sum((self.peak / self.clearance - 1) ** 2 * self.first),
            "feet_phase": self.swings(self.clearance),
            "stand_still": np.sum(np.abs(bent)) * (norm < 0.1),
            "alive": 1.0,
            "termination": float(fallen),
            "joint_deviation_knee": self.off_pose(*self.knees),
            "joint_deviation_hip": self.off_pose(*self.hips) * (abs(command[1]) > 0.1),
            "dof_pos_limits": out,
            "pose": np.sum(bent**2 * weights),
        }


class PlainBerkeley(Plain):
    """BerkeleyHumanoidJoystickFlatTerrain."""

    sigma, feet, parts = 0.5, ("l_foot", "r_foot"), ("{}1",)
    reach = (1.0, 1.0, 1.0)
    hips, knees = ("_HR", "_HAA"), ("_KFE",)
    weights: ClassVar[dict[str, float]] = {"HFE": 0.01, "KFE": 0.01}


class PlainT1(Plain):
    """T1JoystickFlatTerrain."""

    scale, clearance, target_height, stands = 1.0, 0.12, 0.665, True
    parts = tuple(f"{{}}_{i}" for i in range(1, 5))
    reach = (1.0, 0.8, 1.0)
    hips, knees = ("Hip_Roll", "Hip_Yaw"), ("Knee_Pitch",)
    weights: ClassVar[dict[str, float]] = {
        "Shoulder_Pitch": 0.1,
        "Hip_Pitch": 0.01,
        "Knee_Pitch": 0.01,
    }

    def terms(self, action: np.ndarray, command: np.ndarray, fallen: bool) -> Terms:
        left, right = (self.data.site(foot).xpos for foot in self.feet)
        axes = self.data.site("imu").xmat.reshape(3, 3)
        yaw = np.arctan2(axes[1, 0], axes[0, 0])
        apart = np.cos(yaw) * (left[1] - right[1]) - np.sin(yaw) * (left[0] - right[0])
        return super().terms(action, command, fallen) | {
            "lin_vel_z": self.read("local_linvel")[2] ** 2,
            "ang_vel_xy": np.sum(self.read("gyro")[:2] ** 2),
            "dof_acc": np.sum(self.data.qacc[6:] ** 2),
            "dof_vel": np.sum(self.data.qvel[6:] ** 2),
            "feet_distance": np.clip(0.2 - abs(apart), 0, 0.1),
            "collision": float(self.found("left_foot_right_foot")),
        }


class PlainG1(Plain):
    """G1JoystickFlatTerrain."""

    home, clearance, frame, attitude = "knees_bent", 0.15, "_pelvis", "imu_in_pelvis"
    reach = (1.0, 0.5, 1.0)
    hips, knees = ("hip_roll", "hip_yaw"), ("knee",)

    def fallen(self) -> bool:
        feet = self.found("right_foot_left_foot", "left_foot_right_shin", "right_foot_left_shin")
        return feet or self.read("upvector_torso")[2] < 0

    def terms(self, action: np.ndarray, command: np.ndarray, fallen: bool) -> Terms:
        terms, bent = super().terms(action, command, fallen), self.data.qpos[7:] - self.pose
        torso, pelvis = self.read("global_linvel_torso"), self.read("global_linvel_pelvis")
        norm, turning = np.linalg.norm(command), self.read("global_angvel_pelvis")[2]
        moves = np.linalg.norm(pelvis[:2]) > 0.1 or abs(turning) > 0.1 or norm > 0.01
        loads = [abs(self.read(f"{foot}_force")[2]) for foot in self.feet]
        weights = [0.0, 1.0, 0.0, 1.0] if command[1] > 0.1 else [1.0, 1.0, 1.0, 1.0]
        # There, [4, 1] deviations and [4] weights make [4, 4] products, of which the sum is taken.
        hips = sum(weights) * self.off_pose("hip_yaw", "hip_roll")
        off_up = self.read("upvector_torso") - [0.073, 0, 1]
        late = np.sum(np.minimum((self.air - 0.2) * self.first, 0.3))
        return terms | {
            "lin_vel_z": torso[2] ** 2 + pelvis[2] ** 2,
            "ang_vel_xy": np.sum(self.read("global_angvel_torso")[:2] ** 2),
            "orientation": np.sum(off_up**2),
            "dof_acc": np.sum(self.data.qacc[6:] ** 2),
            "feet_air_time": late,
            "feet_phase": terms["feet_phase"] * moves,
            "stand_still": np.sum(np.abs(bent)) * (norm < 0.01),
            "joint_deviation_hip": hips,
            "pose": np.sum(bent**2),
            "collision": float(self.found("left_hand_left_thigh", "right_hand_right_thigh")),
            "contact_force": sum(max(load - 500, 0) for load in loads),
        }


class PlainApollo(Plain):
    """ApolloJoystickFlatTerrain."""

    home, substeps, clearance, stands = "knees_bent", 4, 0.12, True
    feet, reach = ("l_foot", "r_foot"), (1.5, 0.8, 1.5)
    pairs = (
        "collision_l_hand_plate_collision_capsule_body_l_thigh",
        "collision_r_hand_plate_collision_capsule_body_r_thigh",
        "collision_l_sole_collision_r_sole",
        "collision_capsule_body_l_shin_collision_capsule_body_r_shin",
        "collision_capsule_body_l_thigh_collision_capsule_body_r_thigh",
    )

    def touching(self) -> np.ndarray:
        return np.array([self.found(f"collision_{side}_sole_floor") for side in "lr"])

    def unseen(self) -> list[Any]:
        body = [self.read("gyro"), self.gravity(), self.read("local_linvel")]
        joints = [self.data.qpos[7:] - self.pose, self.data.qvel[6:]]
        return [*body, *joints, self.data.actuator_force, self.data.qpos[:7]]

    def terms(self, action: np.ndarray, command: np.ndarray, fallen: bool) -> Terms:
        velocity, gyro, force = (
            self.read("local_linvel"),
            self.read("gyro"),
            self.data.actuator_force,
        )
        off = np.sum((command[:2] - velocity[:2]) ** 2)
        off_turning = (command[2] - gyro[2]) ** 2
        special = {"torso_yaw": 5.0, "torso_roll": 5.0, "torso_pitch": 5.0}
        special |= {"shoulder_fe": 0.1, "hip_fe": 0.01, "knee_fe": 0.01}
        pose = 0.0
        for name, bent in zip(self.names, self.data.qpos[7:] - self.pose, strict=True):
            weight = next((w for end, w in special.items() if name.endswith(end)), 1.0)
            if np.linalg.norm(command) < 0.01:
                weight = 1.0
            if name.endswith("hip_aa"):
                weight = 0.01 if abs(command[1]) > 0.3 else 1.0
            pose += weight * bent**2
        return {
            "tracking": np.exp(-off / 0.25) + 0.5 * np.exp(-off_turning / 0.25),
            "lin_vel_z": velocity[2] ** 2,
            "ang_vel_xy": np.sum(gyro[:2] ** 2),
            "orientation": np.sum(self.read("upvector")[:2] ** 2),
            "torques": np.sum(np.abs(force)),
            "action_rate": np.sum((action - self.action) ** 2),
            "energy": np.sum(
                np.abs(self.data.qvel[6:] * force / self.model.jnt_actfrcrange[1:, 1])
            ),
            "feet_phase": self.swings(0.12),
            "alive": 1.0 - fallen,
            "termination": float(fallen),
            "pose": pose,
            "collision": float(self.found(*self.pairs)),
        }


class PlainH1(Plain):
    """H1JoystickGaitTracking."""

    substeps, scale, sigma, hertz, top = 5, 0.3, 0.5, 1.1, 0.2
    reach = (1.5, 0.5, 1.0)
    heavy: ClassVar[dict[str, float]] = {
        "hip_yaw": 5.0,
        "hip_roll": 5.0,
        "ankle": 5.0,
        "torso": 2.0,
    }

    def prepare(self) -> None:
        stiffness = self.model.actuator_gainprm[:, 0]
        self.model.actuator_biasprm[:, 2] = -2 * np.sqrt(stiffness * self.model.dof_M0[6:])

    def touching(self) -> np.ndarray:
        return np.ones(2, bool)  # there, other sensors are read, which are more than 0

    def targets(self, action: np.ndarray) -> np.ndarray:
        low, high = self.model.actuator_ctrlrange.T
        return np.clip(self.data.ctrl + self.scale * action, low, high)

    def fallen(self) -> bool:
        joints, (low, high) = self.data.qpos[7:], self.model.actuator_ctrlrange.T
        return bool(
            self.read("upvector")[2] < 0.85 or (joints < low).any() or (joints > high).any()
        )

    def seen(self, command: np.ndarray) -> dict[str, np.ndarray]:
        joints, speeds = self.data.qpos[7:], self.data.qvel[6:]
        body = [self.read("gyro"), self.read("upvector"), joints - self.pose, speeds]
        servos = [speeds, joints - self.data.ctrl]
        gait = [self.now, self.waves(), self.hertz, 0.0, self.top]
        state = np.hstack([*body, self.action, command, *servos, *gait])
        return {"state": state, "privileged": np.hstack([state, *self.moves()])}

    def terms(self, action: np.ndarray, command: np.ndarray, fallen: bool) -> Terms:
        pose = 0.0
        for name, bent in zip(self.names, self.data.qpos[7:] - self.pose, strict=True):
            if not name.endswith(("hip_pitch", "knee")):
                pose += bent**2 * next((w for e, w in self.heavy.items() if name.endswith(e)), 1.0)
        off = np.sum((command[:2] - self.read("local_linvel")[:2]) ** 2)
        walks = np.linalg.norm(command[:2]) > 0.05
        jerk = self.action - 2 * self.earlier + action
        return {
            "feet_phase": self.swings(self.top),
            "tracking_lin_vel": np.exp(-off / self.sigma),
            "tracking_ang_vel": np.exp(-((command[2] - self.read("gyro")[2]) ** 2) / self.sigma),
            "feet_air_time": np.sum((self.air - 0.1) * self.first) * walks,
            "ang_vel_xy": np.sum(self.read("global_angvel")[:2] ** 2),
            "pose": pose,
            "foot_slip": np.sum(np.sum(self.speeds()[:, :2] ** 2, axis=1) * self.now),
            "action_rate": np.sum((self.action - self.earlier) ** 2) + np.sum(jerk**2),
        }


class PlainOp3(Plain):
    """Op3Joystick."""

    home, substeps, scale, clearance = "stand_bent_knees", 5, 0.3, 0.07
    reach, until = (0.6, 0.8, 0.7), 9

    def prepare(self) -> None:
        self.model.dof_damping[6:] = 1.084
        self.model.actuator_gainprm[:, 0], self.model.actuator_biasprm[:, 1] = 21.1, -21.1
        self.history = np.zeros(3 * (9 + self.model.nq - 7 + self.model.nu))

    def touching(self) -> np.ndarray:
        soles = [[f"{side}_foot{i}_floor" for i in (1, 2)] for side in "lr"]
        return np.array([self.found(*each) for each in soles])

    def targets(self, action: np.ndarray) -> np.ndarray:
        return np.clip(self.pose + self.scale * action, *self.model.actuator_ctrlrange.T)

    def fallen(self) -> bool:
        joints, (low, high) = self.data.qpos[7:], self.model.actuator_ctrlrange.T
        leans = self.read("upvector")[2] < 0.85 or self.data.xpos[1, 2] < 0.21
        return bool(leans or (joints < low).any() or (joints > high).any())

    def seen(self, command: np.ndarray) -> dict[str, np.ndarray]:
        joints = self.data.qpos[7:] - self.pose
        frame = np.hstack([self.read("gyro"), self.read("upvector"), command, joints, self.action])
        self.history = np.hstack([frame, self.history[: -frame.size]])
        return {"state": self.history, "privileged": np.hstack([self.history, *self.moves()])}

    def terms(self, action: np.ndarray, command: np.ndarray, fallen: bool) -> Terms:
        force, speed = self.data.actuator_force, np.linalg.norm(self.speeds()[:, :2], axis=1)
        off = np.sum((command[:2] - self.read("local_linvel")[:2]) ** 2)
        jerk = action - 2 * self.action + self.earlier
        return {
            "tracking_lin_vel": np.exp(-off / 0.25),
            "tracking_ang_vel": np.exp(-((command[2] - self.read("gyro")[2]) ** 2) / 0.25),
            "lin_vel_z": self.read("global_linvel")[2] ** 2,
            "ang_vel_xy": np.sum(self.read("global_angvel")[:2] ** 2),
            "orientation": np.sum(self.read("upvector")[:2] ** 2),
            "torques": np.linalg.norm(force) + np.abs(force).sum(),
            "action_rate": np.sum((action - self.action) ** 2) + np.sum(jerk**2),
            "zero_cmd": np.sum(action**2) * (np.linalg.norm(command) < 0.1),
            "termination": float(fallen),
            "feet_slip": np.sum(speed**2 * self.now),
            "feet_clearance": np.sum((self.height - 0.07) ** 2 * np.sqrt(speed)),
            "energy": np.sum(np.abs(self.data.qvel[6:]) * np.abs(force)),
        }
