"""Motions that a robot is to follow: files in the format of BeyondMimic's and mjlab's, and one of our own."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from seedbed.types import Array, SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_SECONDS, _RATE = 10.0, 50.0  # of our own motion
_CLOSED = 0.005  # rad and m, within which a motion that ends where it began goes on from there
_SLOWEST, _FASTEST, _LONGEST_S = 1.0, 10_000.0, 3600.0  # rows a second, and s
_LARGEST = 1e4  # m and rad
_LOOKED_AT, _APART = 5, 0.1  # rows, and m, by which bodies may be elsewhere
_KEYS = ("fps", "joint_pos", "body_pos_w", "body_quat_w")


class Motion(NamedTuple):
    """A motion of a robot with a free trunk, one row for each step of a task."""

    qpos: np.ndarray  # [T, nq] float32
    qvel: np.ndarray  # [T, nv] float32, as MuJoCo has it: the trunk turns in its own frame
    closed: bool  # the first row follows the last; else the robot holds the last one

    def at(self, frame: Array) -> tuple[Array, Array]:
        """Returns qpos [nq] and qvel [nv] of a frame, int32 from 0 on, which may be after the end."""
        count = len(self.qpos)
        if self.closed:
            row = frame % count
            return jnp.asarray(self.qpos)[row], jnp.asarray(self.qvel)[row]
        row = jnp.minimum(frame, count - 1)
        moving = jnp.where(frame < count - 1, 1.0, 0.0)
        return jnp.asarray(self.qpos)[row], moving * jnp.asarray(self.qvel)[row]


def read_motion(path: Path, model: Any, dt: float) -> Motion:
    """Reads a motion of a robot, an mjModel, and resamples it to steps of `dt` s.

    The file is a .npz with `fps`, `joint_pos` [T, nq - 7] in the model's order, `body_pos_w` [T, n, 3] and
    `body_quat_w` [T, n, 4] (w first), of which the first body is the trunk. Where the other bodies are tells
    whether the joints are in the model's order. Raises SeedbedError if the file is not such a motion.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in _KEYS if key not in file]
            if missing:
                raise SeedbedError(
                    f"the motion {path} has no {', '.join(missing)}: a motion has {', '.join(_KEYS)}"
                )
            fps, bent, places, turns = (_real(file[key]) for key in _KEYS)
    except SeedbedError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise a dozen kinds, and MemoryError
        raise SeedbedError(f"{path} is no motion (.npz) that can be read: {error}") from error
    rows, joints = len(bent) if bent.ndim else 0, model.nq - 7
    bodies = places.shape[1] if places.ndim == 3 else 0
    shapes = (bent.shape, places.shape, turns.shape)
    if min(rows - 1, bodies) < 1 or shapes != (
        (rows, joints),
        (rows, bodies, 3),
        (rows, bodies, 4),
    ):
        raise SeedbedError(
            f"the motion {path} has joint_pos {bent.shape}, body_pos_w {places.shape} and body_quat_w "
            f"{turns.shape}; this robot needs [T, {joints}], [T, n, 3] and [T, n, 4], with two rows or more"
        )
    rate = float(fps.reshape(-1)[0]) if fps.size else 0.0
    if not (_SLOWEST <= rate <= _FASTEST and rows / rate <= _LONGEST_S):
        raise SeedbedError(
            f"the motion {path} has {rows} rows and fps {rate:g}: fps must be from {_SLOWEST:g} to "
            f"{_FASTEST:g}, and a motion is at most {_LONGEST_S:g} s long"
        )
    qpos = np.concatenate([places[:, 0], turns[:, 0], bent], axis=1)
    lengths = np.linalg.norm(qpos[:, 3:7], axis=1, keepdims=True)
    if not (np.abs(qpos).max() < _LARGEST and lengths.min() > 0.5):
        raise SeedbedError(
            f"the motion {path} has numbers that are not finite, or too large: places are in m, joints in "
            "rad, and quaternions have the length 1"
        )
    qpos[:, 3:7] /= lengths
    _require_order(path, model, qpos, places)
    return resampled(model, qpos, rate, dt)


def _real(array: np.ndarray) -> np.ndarray:
    """Returns real numbers in float64; raises ValueError for others."""
    if array.dtype.kind not in "fiu":
        raise ValueError(f"it has numbers of the type {array.dtype}")
    return np.asarray(array, np.float64)


def _require_order(path: Path, model: Any, qpos: np.ndarray, places: np.ndarray) -> None:
    """Raises SeedbedError if rows [T, nq] put a robot's bodies elsewhere than a file says [T, n, 3]."""
    data = mujoco.MjData(model)
    for i in np.linspace(0, len(qpos) - 1, _LOOKED_AT).astype(int):
        data.qpos[:] = qpos[i]
        mujoco.mj_kinematics(model, data)
        # Files have bodies in orders of their own, and not all of them.
        apart = np.linalg.norm(places[i][:, None] - data.xpos[1:], axis=-1).min(axis=1).max()
        if not apart < _APART:
            raise SeedbedError(
                f"the motion {path} has a body {apart:.2f} m from where its joints put any in row {i}: its "
                "joint_pos must be in the order of this robot's model (Isaac Lab has another one)"
            )


def resampled(model: Any, qpos: np.ndarray, rate: float, dt: float) -> Motion:
    """Makes a motion of an mjModel in steps of `dt` s, of rows [T, nq] that are 1 / `rate` s apart.

    One that ends where it began is closed, and takes a whole number of steps.
    """
    qpos = qpos.copy()
    for i in range(1, len(qpos)):
        # Of both quaternions of an orientation, the one that is near the row before.
        qpos[i, 3:7] *= 1 if qpos[i, 3:7] @ qpos[i - 1, 3:7] >= 0 else -1
    given = np.arange(len(qpos)) / rate
    ends = qpos[-1].copy()
    ends[3:7] *= (
        1 if ends[3:7] @ qpos[0, 3:7] >= 0 else -1
    )  # after a whole turn it is the other one
    closed = bool(np.abs(ends - qpos[0]).max() < _CLOSED)
    count = max(1, round(given[-1] / dt)) if closed else math.floor(given[-1] / dt + 1e-6) + 1
    times = np.arange(count) * (given[-1] / count if closed else dt)
    rows = np.stack([np.interp(times, given, column) for column in qpos.T], axis=1)
    rows[:, 3:7] /= np.linalg.norm(rows[:, 3:7], axis=1, keepdims=True)
    speeds = np.zeros((len(rows), model.nv))
    for i, row in enumerate(rows):
        after = rows[(i + 1) % len(rows)] if closed else rows[min(i + 1, len(rows) - 1)]
        mujoco.mj_differentiatePos(model, speeds[i], dt, row, after)
    return Motion(rows.astype(np.float32), speeds.astype(np.float32), closed)


def exercises(model: Any, posture: np.ndarray, foot: str) -> np.ndarray:
    """Makes our own motion of a humanoid: it squats, sways, turns its trunk and swings its arms.

    The soles stay flat where they are. After ten seconds it is where it began.

    Args:
        model: mujoco.MjModel with Unitree G1's names of joints.
        posture: qpos [nq] to begin with.
        foot: site of the left foot, which stands still.

    Returns:
        qpos [T, nq], 50 rows a second; raises SeedbedError if the model lacks a joint.
    """
    time = np.arange(0, _SECONDS + 1e-9, 1 / _RATE)
    turn = 2 * math.pi * time / _SECONDS
    squat = 0.5 - 0.5 * np.cos(2 * turn)
    lift = 0.5 - 0.5 * np.cos(4 * turn)
    both = {
        "hip_pitch": -0.5 * squat,
        "knee": 1.0 * squat,
        "ankle_pitch": -0.5 * squat,
        "shoulder_pitch": -0.9 * squat,
        "elbow": -0.4 * lift,
    }
    sway, raised = 0.07 * np.sin(turn), 0.5 * lift * np.sin(turn / 2) ** 2
    sides = {
        "hip_roll": (sway, sway),
        "ankle_roll": (-sway, -sway),
        "shoulder_roll": (raised, -raised),
        **{name: (change, change) for name, change in both.items()},
    }
    changes = {
        f"{side}_{name}_joint": change
        for name, pair in sides.items()
        for side, change in zip(("left", "right"), pair, strict=True)
    }
    changes["waist_yaw_joint"] = 0.4 * np.sin(2 * turn)
    rows = np.tile(np.asarray(posture, np.float64), (len(time), 1))
    for name, change in changes.items():
        joint = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_JOINT, name)
        if joint < 0:
            raise SeedbedError(
                f"our own motion is for G1, and this robot has no {name}: give a motion of its own"
            )
        rows[:, model.jnt_qposadr[joint]] += change
    data, stood = mujoco.MjData(model), None
    for row in rows:
        data.qpos[:] = row
        mujoco.mj_kinematics(model, data)
        place = data.site(foot).xpos.copy()
        stood = place if stood is None else stood
        row[:3] += stood - place
    return rows
