"""Motions that a robot is to follow: files in the format of BeyondMimic's and mjlab's, and one of our own."""

from __future__ import annotations

import importlib
import math
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from seedbed.types import Array, SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_SECONDS, _RATE = 10.0, 50.0  # of our own motion
_CLOSED = 0.05  # rad and m, within which a motion that ends where it began goes on from there
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
    `body_quat_w` [T, n, 4] (w first), of which the first body is the trunk. Raises SeedbedError if it is
    not.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in _KEYS if key not in file]
            if missing:
                raise SeedbedError(
                    f"the motion {path} has no {', '.join(missing)}: a motion has {', '.join(_KEYS)}"
                )
            fps, bent, places, turns = (np.asarray(file[key], np.float64) for key in _KEYS)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise SeedbedError(f"{path} is no motion (.npz) that can be read: {error}") from error
    rows, joints = len(bent) if bent.ndim else 0, model.nq - 7
    shapes = (
        bent.shape == (rows, joints),
        places.shape[::2] == (rows, 3),
        turns.shape[::2] == (rows, 4),
    )
    if rows < 2 or not all(shapes):
        raise SeedbedError(
            f"the motion {path} has joint_pos {bent.shape}, body_pos_w {places.shape} and body_quat_w "
            f"{turns.shape}; this robot needs [T, {joints}], [T, n, 3] and [T, n, 4], with two rows or more"
        )
    trunk = np.concatenate([places[:, 0], turns[:, 0]], axis=1)
    rate = float(fps.reshape(-1)[0]) if fps.size else 0.0
    lengths = np.linalg.norm(trunk[:, 3:], axis=1)
    sound = np.isfinite(trunk).all() and np.isfinite(bent).all() and lengths.min() > 0.5
    if not (0 < rate < math.inf and sound):
        raise SeedbedError(f"the motion {path} has numbers that are not finite, or fps {rate}")
    trunk[:, 3:] /= lengths[:, None]
    return resampled(model, np.concatenate([trunk, bent], axis=1), rate, dt)


def resampled(model: Any, qpos: np.ndarray, rate: float, dt: float) -> Motion:
    """Makes a motion of an mjModel in steps of `dt` s, of rows [T, nq] that are 1 / `rate` s apart."""
    qpos = qpos.copy()
    for i in range(1, len(qpos)):
        # Of both quaternions of an orientation, the one that is near the row before.
        qpos[i, 3:7] *= 1 if qpos[i, 3:7] @ qpos[i - 1, 3:7] >= 0 else -1
    given = np.arange(len(qpos)) / rate
    closed = bool(np.abs(qpos[-1] - qpos[0]).max() < _CLOSED)
    times = np.arange(0, given[-1] + (0 if closed else 1e-9), dt)
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
