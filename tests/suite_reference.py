"""dm_control's tasks, written plainly on MuJoCo's C data: what is seen and paid after a step."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import mujoco
import numpy as np


def tolerance(x, low=0.0, high=0.0, margin=0.0, shape="gaussian", at_margin=0.1):
    """dm_control's `rewards.tolerance`."""
    off = np.maximum(np.maximum(low - x, x - high), 0)
    if not margin:
        return (off == 0).astype(float)
    off = off / margin
    return {
        "gaussian": lambda: np.exp(-0.5 * (off * math.sqrt(-2 * math.log(at_margin))) ** 2),
        "long_tail": lambda: 1 / ((off * math.sqrt(1 / at_margin - 1)) ** 2 + 1),
        "linear": lambda: np.clip(1 - off * (1 - at_margin), 0, 1),
        "quadratic": lambda: np.clip(1 - off**2 * (1 - at_margin), 0, 1),
    }[shape]()


def little(ctrl):
    return (4 + tolerance(ctrl, margin=1, shape="quadratic", at_margin=0).mean()) / 5


def file_text(folder: Path, domain: str, task: str) -> str:
    """The MJCF of a domain, with the poles or links that dm_control adds to its file."""
    tree = ET.parse(folder / f"{domain}.xml").getroot()
    for each in tree.iter("include"):
        each.set("file", str((folder / each.get("file", "")).resolve()))
    if task in ("two_poles", "three_poles"):
        _add_poles(tree, 2 if task == "two_poles" else 3)
    if domain == "swimmer":
        _add_links(tree, int(task.removeprefix("swimmer")))
    return ET.tostring(tree, encoding="unicode")


def _add_poles(tree: Any, count: int) -> None:
    parent = tree.find("./worldbody/body/body")
    for i in range(2, count + 1):
        parent = ET.SubElement(parent, "body", name=f"pole_{i}", pos="0 0 1", childclass="pole")
        ET.SubElement(parent, "joint", name=f"hinge_{i}")
        ET.SubElement(parent, "geom", name=f"pole_{i}")
    tree.find("./worldbody/geom").set("pos", f"0 0 {1 - count - 0.05}")


def _add_links(tree: Any, count: int) -> None:
    parent, motors = tree.find("./worldbody/body"), ET.SubElement(tree, "actuator")
    sensors = tree.find("sensor")
    for i in range(count - 1):
        parent = ET.SubElement(parent, "body", name=f"segment_{i}", pos="0 .1 0")
        for kind in ("visual", "inertial"):
            ET.SubElement(parent, "geom", {"class": kind, "name": f"{kind}_{i}"})
        ET.SubElement(parent, "site", name=f"site_{i}")
        reach = 360 / count
        ET.SubElement(parent, "joint", name=f"joint_{i}", range=f"{-reach} {reach}")
        ET.SubElement(motors, "motor", name=f"motor_{i}", joint=f"joint_{i}")
        for kind in ("velocimeter", "gyro"):
            ET.SubElement(sensors, kind, name=f"{kind}_{i}", site=f"site_{i}")


CONTROL = {
    "acrobot": 0.01,
    "cartpole": 0.01,
    "cheetah": 0.01,
    "finger": 0.02,
    "fish": 0.04,
    "hopper": 0.02,
    "humanoid": 0.025,
    "pendulum": 0.02,
    "point_mass": 0.02,
    "reacher": 0.02,
    "swimmer": 0.03,
    "walker": 0.025,
}
"""Seconds of a step, by domain."""


class Reference:
    """A task of dm_control on MuJoCo's C data."""

    def __init__(self, folder: Path, domain: str, task: str) -> None:
        self.domain, self.task = domain, task
        model: Any = mujoco.MjModel.from_xml_string(file_text(folder, domain, task))
        self.model, self.data = model, mujoco.MjData(model)
        model.opt.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
        model.opt.tolerance = 0
        if domain == "finger":  # as ours
            model.opt.cone = mujoco.mjtCone.mjCONE_PYRAMIDAL
            model.body("spinner").invweight0[0] = model.body("spinner").invweight0[1]
            if task == "spin":
                model.dof_damping[model.joint("hinge").dofadr] = 0.03

    def put(self, target: np.ndarray | None) -> None:
        """Moves the target."""
        if target is None:
            return
        named = self.model.site if self.domain == "finger" else self.model.geom
        named("target").pos[:] = target
        radius = {"easy": 0.05, "hard": 0.015, "turn_easy": 0.07, "turn_hard": 0.03}.get(self.task)
        if radius:
            named("target").size[0] = radius

    def succeed(self) -> None:
        """Puts the body where it is paid: upright, fast along its way, at its target."""
        data, joint = self.data, self.model.joint
        data.qpos[:], data.qvel[:] = self.model.qpos0, 0
        if self.domain in ("cheetah", "hopper", "walker"):
            # Feet that graze the ground touch it or not by a rounding.
            data.joint("rootx").qvel[0], data.joint("rootz").qpos[0] = 4, 0.02
        if self.domain == "humanoid":
            data.qvel[0] = 2
        if self.domain == "finger":
            data.qpos[:2], data.qvel[2] = (-1.6, 1.3), -30 if self.task == "spin" else 0
            way = self.model.site("target").pos - self.model.body("spinner").pos
            data.qpos[joint("hinge").qposadr] = np.arctan2(-way[0], way[2])
        if self.domain == "swimmer":
            mujoco.mj_kinematics(self.model, data)
            data.qpos[:2] = self._way("nose")[:2]
        if self.domain == "reacher":
            reach = np.linalg.norm(self.model.geom("target").pos[:2])
            bend = np.arccos((reach**2 - 2 * 0.12**2) / (2 * 0.12**2))
            way = np.arctan2(*self.model.geom("target").pos[1::-1])
            data.qpos[:] = way - bend / 2, bend

    def step(self, ctrl: np.ndarray) -> tuple[dict[str, np.ndarray], float]:
        """Takes a step as dm_control does: the last part of mj_step's first half is done anew."""
        self.data.ctrl[:] = ctrl
        count = round(CONTROL[self.domain] / self.model.opt.timestep)
        mujoco.mj_step(self.model, self.data, count)
        mujoco.mj_step1(self.model, self.data)
        seen, paid = getattr(self, f"_{self.domain}")(ctrl)
        return {name: np.array(x, float) for name, x in seen.items()}, float(paid)

    def _mat(self, body: str) -> np.ndarray:
        return self.data.body(body).xmat.reshape(3, 3)

    def _read(self, sensor: str) -> np.ndarray:
        return self.data.sensor(sensor).data.copy()

    def _pendulum(self, ctrl):
        mat = self._mat("pole")
        seen = {"orientation": [mat[2, 2], mat[0, 2]], "velocity": self.data.qvel}
        return seen, mat[2, 2] >= math.cos(math.radians(8))

    def _acrobot(self, ctrl):
        mats = [self._mat("upper_arm"), self._mat("lower_arm")]
        points = [m[0, 2] for m in mats] + [m[2, 2] for m in mats]
        tip, target = self.data.site("tip").xpos, self.data.site("target").xpos
        radius = self.model.site("target").size[0]
        margin = 0 if "sparse" in self.task else 1
        paid = tolerance(np.linalg.norm(tip - target), 0, radius, margin)
        return {"orientations": points, "velocity": self.data.qvel}, paid

    def _cartpole(self, ctrl):
        mats = [self._mat(f"pole_{i + 1}") for i in range(self.model.nq - 1)]
        place, up = self.data.qpos[0], np.array([m[2, 2] for m in mats])
        points = np.hstack([[place], *([m[2, 2], m[0, 2]] for m in mats)])
        seen = {"position": points, "velocity": self.data.qvel}
        if "sparse" in self.task:
            return seen, (abs(place) <= 0.25) * (up >= 0.995).all()
        control = (4 + tolerance(ctrl[0], margin=1, shape="quadratic", at_margin=0)) / 5
        slow = (1 + tolerance(self.data.qvel[1:], margin=5).min()) / 2
        return seen, ((up + 1) / 2).mean() * control * slow * (1 + tolerance(place, margin=2)) / 2

    def _cheetah(self, ctrl):
        seen = {"position": self.data.qpos[1:], "velocity": self.data.qvel}
        speed = self._read("torso_subtreelinvel")[0]
        return seen, tolerance(speed, 10, math.inf, 10, "linear", 0)

    def _hopper(self, ctrl):
        touch = np.log1p(np.hstack([self._read("touch_toe"), self._read("touch_heel")]))
        seen = {"position": self.data.qpos[1:], "velocity": self.data.qvel, "touch": touch}
        height = self.data.body("torso").xipos[2] - self.data.body("foot").xipos[2]
        speed = self._read("torso_subtreelinvel")[0]
        hop = tolerance(speed, 2, math.inf, 1, "linear", 0.5)
        return seen, tolerance(height, 0.6, 2) * (hop if self.task == "hop" else little(ctrl))

    def _walker(self, ctrl):
        mats = self.data.xmat[1:].reshape(-1, 3, 3)
        height, velocity = self.data.body("torso").xpos[2], self.data.qvel
        seen = {"orientations": mats[:, 0, ::2].ravel(), "height": height, "velocity": velocity}
        upright = (1 + self._mat("torso")[2, 2]) / 2
        stand = (3 * tolerance(height, 1.2, math.inf, 0.6) + upright) / 4
        goal = {"stand": 0, "walk": 1, "run": 8}[self.task]
        if not goal:
            return seen, stand
        speed = self._read("torso_subtreelinvel")[0]
        move = tolerance(speed, goal, math.inf, goal / 2, "linear", 0.5)
        return seen, stand * (5 * move + 1) / 6

    def _humanoid(self, ctrl):
        data, mat = self.data, self._mat("torso")
        limbs = [f"{side}_{part}" for side in ("left", "right") for part in ("hand", "foot")]
        speed, height = self._read("torso_subtreelinvel"), data.body("head").xpos[2]
        pure = {"position": data.qpos, "velocity": data.qvel}
        seen = {
            "joint_angles": data.qpos[7:],
            "head_height": height,
            "extremities": np.hstack(
                [(data.body(x).xpos - data.body("torso").xpos) @ mat for x in limbs]
            ),
            "torso_vertical": mat[2],
            "com_velocity": speed,
            "velocity": data.qvel,
        }
        standing = tolerance(height, 1.4, math.inf, 0.35)
        paid = little(ctrl) * standing * tolerance(mat[2, 2], 0.9, math.inf, 1.9, "linear", 0)
        goal = {"stand": 0, "walk": 1}.get(self.task, 10)
        if not goal:
            paid *= tolerance(speed[:2], margin=2).mean()
        else:
            move = tolerance(np.linalg.norm(speed[:2]), goal, math.inf, goal, "linear", 0)
            paid *= (5 * move + 1) / 6
        return (pure if self.task == "run_pure_state" else seen), paid

    def _finger(self, ctrl):
        tip = (self._read("tip") - self._read("spinner"))[::2]
        goal = (self._read("target") - self._read("spinner"))[::2]
        joints = np.hstack([self._read("proximal"), self._read("distal")])
        names = ("proximal_velocity", "distal_velocity", "hinge_velocity")
        felt = np.hstack([self._read("touchtop"), self._read("touchbottom")])
        velocity = np.hstack([self._read(name) for name in names])
        seen = {"position": [*joints, *tip], "velocity": velocity, "touch": np.log1p(felt)}
        if self.task == "spin":
            return seen, velocity[2] <= -15
        off = np.linalg.norm(goal - tip) - self.model.site("target").size[0]
        return seen | {"target_position": goal, "dist_to_target": off}, off <= 0

    def _way(self, name: str) -> np.ndarray:
        return self.data.geom("target").xpos - self.data.geom(name).xpos

    def _size(self, name: str) -> float:
        return self.model.geom(name).size[0]

    def _reacher(self, ctrl):
        way = self._way("finger")[:2]
        seen = {"position": self.data.qpos, "to_target": way, "velocity": self.data.qvel}
        return seen, np.linalg.norm(way) <= self._size("target") + self._size("finger")

    def _point_mass(self, ctrl):
        size, off = self._size("target"), np.linalg.norm(self._way("pointmass"))
        seen = {"position": self.data.qpos, "velocity": self.data.qvel}
        return seen, tolerance(off, 0, size, size) * little(ctrl)

    def _fish(self, ctrl):
        up = self._mat("torso")[2, 2]
        seen = {"joint_angles": self.data.qpos[7:], "upright": up, "velocity": self.data.qvel}
        if self.task == "upright":
            return seen, tolerance(up, 1, 1, 1)
        way = self._way("mouth") @ self.data.geom("mouth").xmat.reshape(3, 3)
        radii = self._size("mouth") + self._size("target")
        near = tolerance(np.linalg.norm(way), 0, radii, 2 * radii)
        return seen | {"target": way}, (7 * near + 0.5 * (up + 1)) / 8

    def _swimmer(self, ctrl):
        way = (self._way("nose") @ self._mat("head"))[:2]
        speeds = self.data.sensordata[12:].reshape(-1, 6)[:, [0, 1, 5]].ravel()
        seen = {"joints": self.data.qpos[3:], "to_target": way, "body_velocities": speeds}
        size = self._size("target")
        return seen, tolerance(np.linalg.norm(way), 0, size, 5 * size, "long_tail")
