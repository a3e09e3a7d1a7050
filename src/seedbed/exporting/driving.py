"""Drives a robot in MuJoCo's C code with an exported policy, of which it reads only the file.

This is the check that the file says all that a robot's own program needs: neither the run nor the task are
asked, and the loop keeps the policy's rate in real time.
"""

from __future__ import annotations

import collections
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

from seedbed.printable import printable
from seedbed.types import SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

SECONDS = 20.0
SHARES = ((0.0, 0.0, 0.0), (0.6, 0.0, 0.0), (0.0, 0.6, 0.0), (0.0, 0.0, 0.6), (0.6, 0.0, -0.6))
"""Commands that the robot gets one after another, as shares of the largest."""
_SETTLES = 1.0  # s after a new command, which do not count
_FALLEN = 0.5  # of upright
_STILL = 0.01  # norm of a command up to which a gait may rest


class Drive(NamedTuple):
    """How a robot has followed its commands, and how fast the policy was."""

    seconds: float  # until it fell, or all
    fell: bool
    velocity_error: float  # m/s, root mean square, forward and sideways
    turning_error: float  # rad/s, root mean square
    latency_ms: tuple[float, float]  # of a step of the policy: the median, and 99 of 100
    late: int  # steps that were not done when the next was due


class Robot:
    """A robot in MuJoCo's C code, whose servos and senses are as an exported policy says."""

    def __init__(self, path: Path, told: dict[str, str]) -> None:
        """Loads the scene and sets the servos; raises SeedbedError if it cannot, or a part is missing."""
        try:
            self.model = mujoco.MjModel.from_xml_path(str(path))
        except ValueError as error:
            raise SeedbedError(
                f"{printable(path)} is no scene that MuJoCo loads: {error}"
            ) from error
        self.data = mujoco.MjData(self.model)
        self.terms: list[dict[str, Any]] = json.loads(told["observation_terms"])
        self.rest, self.scale = (
            _numbers(told[key]) for key in ("default_joint_pos", "action_scale")
        )
        self.delay = int(told["action_delay"])
        self.moves_target = told.get("action_moves") == "target"
        self.winds_up = told.get("last_target") == "wanted"
        self.gait: dict[str, Any] = json.loads(told.get("gait", "{}"))
        self.period = 1.0 / float(told["rate_hz"])
        names = told["joint_names"].split(",")
        lacking = [name for name in names if self._number("JOINT", name) < 0]
        lacking += [
            sensor
            for term in self.terms
            for sensor in term["sensors"]
            if self._number("SENSOR", sensor) < 0
        ]
        if lacking:
            raise SeedbedError(
                f"{printable(path)} lacks {', '.join(map(printable, lacking[:4]))}, which the policy needs: "
                "name the scene that it was trained in"
            )
        joints = [self.model.joint(name) for name in names]
        self.places = np.array([joint.qposadr[0] for joint in joints])
        self.dofs = np.array([joint.dofadr[0] for joint in joints])
        damping = _numbers(told["joint_damping"])
        within = _numbers(told["servo_damping"]) if "servo_damping" in told else 0.0 * damping
        self.servos = self._servos_of(joints, path)
        self._set_servos(_numbers(told["joint_stiffness"]), damping - within, within)
        self.target_bounds = _bounds(told["target_ranges"])
        self._set_ranges(joints, self.target_bounds, _bounds(told["torque_ranges"]))
        none, oldest = np.zeros(len(names)), 3 + max(term["delay"] for term in self.terms)
        self.actions = collections.deque([none] * oldest, maxlen=oldest)  # the newest first
        self.past: collections.deque[dict[str, np.ndarray]] = collections.deque(maxlen=oldest)
        self.phase = self.shown_phase = np.array(self.gait.get("start", ()))  # rad, of each foot
        longest = max(term["history"] for term in self.terms)
        self.errors = collections.deque([none] * longest, maxlen=longest)  # the newest first
        # Before the first action, as in training.
        self.target = _numbers(told["initial_target"]) if "initial_target" in told else none
        self.is_told = False
        self._stand(_numbers(told["opening_qpos"]), path)

    def _number(self, kind: str, name: str) -> int:
        return mujoco.mj_name2id(self.model, getattr(mujoco.mjtObj, f"mjOBJ_{kind}"), name)

    def _servos_of(self, joints: list[Any], path: Path) -> np.ndarray:
        """Returns the actuators of joints; raises SeedbedError if one is no servo of a position."""
        model = self.model
        servos = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
        servos &= model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE
        servos &= model.actuator_dyntype == mujoco.mjtDyn.mjDYN_NONE
        servos &= model.actuator_gear[:, 0] == 1
        driving = {int(model.actuator_trnid[servo, 0]): servo for servo in np.flatnonzero(servos)}
        if bare := [joint.name for joint in joints if joint.id not in driving]:
            raise SeedbedError(
                f"{printable(path)} has no servo for {', '.join(map(printable, bare[:4]))}, which the policy "
                "drives: give each joint a <position> with the gear 1, or name the scene of the training"
            )
        return np.array([driving[joint.id] for joint in joints])

    def _set_servos(self, stiffness: np.ndarray, damping: np.ndarray, within: np.ndarray) -> None:
        """Sets the gains; `damping` is the joints', and `within` is that of the servos themselves."""
        self.model.actuator_gainprm[self.servos, 0] = stiffness
        self.model.actuator_biasprm[self.servos, 1] = -stiffness
        self.model.actuator_biasprm[self.servos, 2] = -within
        self.model.dof_damping[self.dofs] = damping

    def _set_ranges(self, joints: list[Any], targets: np.ndarray, torques: np.ndarray) -> None:
        """Sets the bounds [n, 2] of targets and torques, which may be infinite, in place of the scene's."""
        model, servos = self.model, self.servos
        for bounds, limited, ranges in (
            (targets, model.actuator_ctrllimited, model.actuator_ctrlrange),
            (torques, model.actuator_forcelimited, model.actuator_forcerange),
        ):
            limited[servos] = np.isfinite(bounds).all(axis=1)
            ranges[servos] = np.where(np.isfinite(bounds), bounds, 0.0)
        model.jnt_actfrclimited[[joint.id for joint in joints]] = 0

    def _stand(self, opening: np.ndarray, path: Path) -> None:
        if self.model.nq != len(opening):
            raise SeedbedError(
                f"{printable(path)} has {self.model.nq} positions, and the policy begins in {len(opening)}: "
                "name the scene that it was trained in"
            )
        self.data.qpos[:], self.data.ctrl[self.servos] = opening, self.rest
        mujoco.mj_forward(self.model, self.data)

    def see(self, command: np.ndarray) -> np.ndarray:
        """Returns the observation, of what is measured now."""
        joints = self.data.qpos[self.places]
        self.errors.appendleft(joints - self.target)
        self.is_told = np.linalg.norm(command) > _STILL
        self.past.appendleft(
            {term["name"]: np.array(self._now(term, command)) for term in self.terms}
        )
        return np.concatenate([self._term(term) for term in self.terms], dtype=np.float32)

    def _term(self, term: dict[str, Any]) -> np.ndarray:
        """Returns a part of the observation, as late as the policy is used to."""
        name, delay = term["name"], term["delay"]
        if name == "actions":
            return term["scale"] * self.actions[delay]
        if name == "gait_phase":
            return term["scale"] * self.past[0][name]
        if delay < len(self.past):
            return term["scale"] * self.past[delay][name]
        return np.zeros(term["size"])

    def _now(self, term: dict[str, Any], command: np.ndarray) -> np.ndarray:
        turned = self._axes()
        read = [self.data.sensor(name).data for name in term["sensors"]]
        found: dict[str, Callable[[], np.ndarray]] = {
            "base_lin_vel": lambda: read[0] if read else turned.T @ self.data.qvel[:3],
            "base_ang_vel": lambda: read[0] if read else self.data.qvel[3:6],
            "projected_gravity": lambda: -_matrix(read[0])[2] if read else -turned[2],
            "joint_pos": lambda: self.data.qpos[self.places] - self.rest,
            "joint_vel": lambda: self.data.qvel[self.dofs],
            "actions": lambda: self.actions[0],
            "command": lambda: command,
            "servo_error": lambda: np.concatenate([*self.errors][: term["history"]]),
            "ones": lambda: np.ones(term["size"]),
            "gait_phase": lambda: np.hstack([np.cos(self.shown_phase), np.sin(self.shown_phase)]),
            "gait_frequency": lambda: np.array([self.gait["hertz"]]),
            "gait_kind": lambda: np.zeros(1),
            "gait_height": lambda: np.array([self.gait["height"]]),
        }
        return found.get(term["name"], lambda: np.concatenate(read))()

    def _axes(self) -> np.ndarray:
        """Returns the trunk's axes in the world, one in each column, [3, 3]."""
        return _matrix(self.data.qpos[3:7])

    def act(self, action: np.ndarray, seconds: float) -> None:
        """Sends an action to the servos and lets time pass."""
        self.actions.appendleft(action)
        centre = self.target if self.moves_target else self.rest
        wanted = centre + self.scale * self.actions[self.delay]
        sent = np.clip(wanted, *self.target_bounds.T)
        self.target = wanted if self.winds_up else sent
        self.data.ctrl[self.servos] = sent
        for _ in range(round(seconds / self.model.opt.timestep)):
            mujoco.mj_step(self.model, self.data)
        self._stride()

    def _stride(self) -> None:
        """Moves the gait on by a step; the phase that a step had is seen after it."""
        self.shown_phase = self.phase
        if not self.gait:
            return
        ahead = self.phase + 2 * np.pi * self.gait["hertz"] * self.period
        self.phase = np.fmod(ahead + np.pi, 2 * np.pi) - np.pi
        if self.gait["rest"] is not None and not self.is_told:
            self.phase = np.full_like(self.phase, self.gait["rest"])

    def speeds(self) -> np.ndarray:
        """Returns forward, left and turning left, of the trunk [3], in m/s and rad/s."""
        return np.array([*(self._axes().T @ self.data.qvel[:3])[:2], self.data.qvel[5]])

    def is_up(self) -> bool:
        """Returns whether the trunk is upright."""
        return bool(self._axes()[2, 2] > _FALLEN)


def drive(policy: Path, scene: Path, tell: Callable[[str], None] = lambda text: None) -> Drive:
    """Lets the policy of an ONNX file walk through SHARES in a scene, in real time.

    Calls `tell` with what the robot is told. Raises SeedbedError if the file does not say how it drives a
    robot, or the scene lacks what it needs.
    """
    session = onnxruntime.InferenceSession(policy.read_bytes(), providers=["CPUExecutionProvider"])
    told = session.get_modelmeta().custom_metadata_map
    if "observation_terms" not in told:
        raise SeedbedError(f"{printable(policy)} does not say how it drives a robot")
    if len(session.get_inputs()) > 1:
        raise SeedbedError(
            f"{printable(policy)} has a memory: only policies without one are driven"
        )
    robot, period = Robot(scene, told), 1.0 / float(told["rate_hz"])
    largest = np.array([high for _, high in json.loads(told["command_ranges"])])
    names = told["command_names"].split(",")
    steps = round(SECONDS / period / len(SHARES))
    errors, latencies, late, done = [], [], 0, 0
    due = time.perf_counter()
    for share in SHARES:
        command = largest * share
        parts = [f"{name} {x:.2f}" for name, x in zip(names, command, strict=True)]
        tell("told: " + ", ".join(parts))
        for step in range(steps):
            begin = time.perf_counter()
            given = {session.get_inputs()[0].name: robot.see(command)[None]}
            (action,) = session.run(["action"], given)
            latencies.append(1e3 * (time.perf_counter() - begin))
            robot.act(np.asarray(action)[0], period)
            done += 1
            if step * period >= _SETTLES:
                errors.append(robot.speeds() - command)
            if not robot.is_up():
                break
            due += period
            late += time.perf_counter() > due
            time.sleep(max(0.0, due - time.perf_counter()))
        if not robot.is_up():
            break
    off = np.sqrt(np.square(np.array(errors or [[np.nan] * 3])).mean(axis=0))
    middle, most = np.percentile(latencies, [50, 99])
    return Drive(
        seconds=done * period,
        fell=not robot.is_up(),
        velocity_error=float(np.hypot(off[0], off[1])),
        turning_error=float(off[2]),
        latency_ms=(float(middle), float(most)),
        late=late,
    )


def _numbers(text: str) -> np.ndarray:
    return np.array([float(part) for part in text.split(",")])


def _bounds(text: str) -> np.ndarray:
    """Returns ranges [n, 2], which are infinite where the text has null."""
    return np.array([each or (-np.inf, np.inf) for each in json.loads(text)], float)


def _matrix(quaternion: np.ndarray) -> np.ndarray:
    found = np.empty(9)
    mujoco.mju_quat2Mat(found, quaternion)
    return found.reshape(3, 3)
