"""A recording of episodes: positions of bodies over time and rewards, from any simulator."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from seedbed.types import Array, SeedbedError

mujoco: Any = importlib.import_module("mujoco")  # a package without types
MjModel: TypeAlias = Any
"""MuJoCo's compiled model."""
MjData: TypeAlias = Any
"""MuJoCo's state of one simulation."""
FOLLOW_SMOOTHING_S = 0.3
"""Standard deviation, in seconds, of the Gaussian that smooths the path of a following camera."""
_TRACKING = (
    mujoco.mjtCamLight.mjCAMLIGHT_TRACK.value,
    mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM.value,
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_FRAMED = 32
"""The number of frames of an episode from which a camera that stays in place is set up."""


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """One episode: frame t shows `qpos[t]`; step t leads to frame t + 1 and gives `reward[t]`.

    Raises SeedbedError if shapes do not fit, `env_dt` is not positive, or `qpos` is not finite.
    """

    qpos: Array  # [T + 1, nq] MuJoCo's generalised positions
    reward: Array  # [T]
    env_dt: float  # seconds between two frames
    series: Mapping[str, Array] = dataclasses.field(default_factory=dict)  # more scalars, [T] each
    mocap_pos: Array | None = (
        None  # [T + 1, nmocap, 3] m; None: where the model has its mocap bodies
    )
    mocap_quat: Array | None = None  # [T + 1, nmocap, 4] w x y z; None: as the model has them

    def __post_init__(self) -> None:
        """Converts the arrays to float64 and checks them."""
        qpos, reward = np.asarray(self.qpos, np.float64), np.asarray(self.reward, np.float64)
        series = {name: np.asarray(values, np.float64) for name, values in self.series.items()}
        if qpos.ndim != 2 or len(qpos) < 2:
            raise SeedbedError(f"qpos has shape {qpos.shape}: it must be [T + 1, nq] with T >= 1")
        for name, values in {"reward": reward, **series}.items():
            if values.shape != (len(qpos) - 1,):
                raise SeedbedError(
                    f"{name} has shape {values.shape}: {len(qpos)} frames of qpos need "
                    f"({len(qpos) - 1},)"
                )
        if not self.env_dt > 0.0:
            raise SeedbedError(f"env_dt is {self.env_dt}: it must be above 0 seconds")
        if not np.isfinite(qpos).all():
            raise SeedbedError("qpos is not finite everywhere: such an episode cannot be shown")
        object.__setattr__(self, "qpos", qpos)
        object.__setattr__(self, "reward", reward)
        object.__setattr__(self, "series", series)

    @property
    def episode_return(self) -> float:
        """The sum of rewards, undiscounted."""
        return float(self.reward.sum())

    def placements(self, model: MjModel) -> NDArray[np.float64]:
        """Returns what places all bodies of each frame `[T + 1, nq + 7 nmocap]`: qpos, then mocap poses."""
        data, frames = mujoco.MjData(model), len(self.qpos)
        given = (self.mocap_pos, data.mocap_pos), (self.mocap_quat, data.mocap_quat)
        poses = [
            np.broadcast_to(home if pose is None else pose, (frames, *home.shape))
            for pose, home in given
        ]
        return np.concatenate([self.qpos, *(pose.reshape(frames, -1) for pose in poses)], axis=1)


def moves(model: MjModel, body: int) -> bool:
    """Returns whether a body can move: it, or one that carries it, has a joint or is a mocap body."""
    return bool(model.body_weldid[body]) or model.body_mocapid[model.body_rootid[body]] >= 0


def place_bodies(model: MjModel, data: MjData, placement: NDArray[np.float64]) -> None:
    """Places all bodies as a row of `Episode.placements` says."""
    data.qpos[:], mocap = placement[: model.nq], placement[model.nq :]
    data.mocap_pos[:] = mocap[: 3 * model.nmocap].reshape(-1, 3)
    data.mocap_quat[:] = mocap[3 * model.nmocap :].reshape(-1, 4)
    mujoco.mj_kinematics(model, data)


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """At least one episode of one model; `source` is the model or the path of its MJCF file."""

    source: MjModel | str | Path
    episodes: tuple[Episode, ...]
    title: str

    def __post_init__(self) -> None:
        """Raises SeedbedError if there is no episode, or if one has another `nq` than the model."""
        object.__setattr__(self, "episodes", tuple(self.episodes))
        if not self.episodes:
            raise SeedbedError("the recording has no episodes: record at least one")
        for number, episode in enumerate(self.episodes, 1):
            if episode.qpos.shape[1] != self.model.nq:
                raise SeedbedError(
                    f"episode {number} has {episode.qpos.shape[1]} positions a frame, "
                    f"the model has nq = {self.model.nq}"
                )
            poses = ("mocap_pos", episode.mocap_pos, 3), ("mocap_quat", episode.mocap_quat, 4)
            for name, pose, width in poses:
                expected = len(episode.qpos), self.model.nmocap, width
                if pose is not None and np.shape(pose) != expected:
                    raise SeedbedError(
                        f"episode {number}: {name} has shape {np.shape(pose)}, it must be {expected}"
                    )

    @functools.cached_property
    def model(self) -> MjModel:
        """The compiled model; raises SeedbedError if its file cannot be loaded."""
        if isinstance(self.source, mujoco.MjModel):
            return self.source
        try:
            return mujoco.MjModel.from_xml_path(str(self.source))
        except ValueError as error:
            raise SeedbedError(f"cannot load the model {self.source}: {error}") from error


class View(NamedTuple):
    """The position of a camera, in the terms of MuJoCo's free camera."""

    radius: float  # metres around the camera's target that must be visible
    azimuth: float  # degrees
    elevation: float  # degrees; negative if the camera looks down
    body: int  # the camera follows its subtree's centre of mass; -1 if it stays in place
    centre: NDArray[np.float64]  # [3] metres, of the geoms that must be visible


class Poses(NamedTuple):
    """The poses of all bodies in the world's frame, for every frame of an episode."""

    position: NDArray[np.float64]  # [T + 1, nbody, 3] metres
    quaternion: NDArray[np.float64]  # [T + 1, nbody, 4] w x y z
    target: NDArray[np.float64]  # [T + 1, 3] metres: the point that the camera looks at


def find_view(recording: Recording) -> View:
    """Chooses the camera from the first episode: flat scenes are seen from above, tall ones at a low angle.

    A body that is followed, such as a walker's, is seen at a lower angle than a scene that stays in place.
    """
    model = recording.model
    placements = recording.episodes[0].placements(model)
    body = _followed_body(model)
    seen = model.geom_type != mujoco.mjtGeom.mjGEOM_PLANE.value
    if body >= 0:
        seen &= model.body_rootid[model.geom_bodyid] == model.body_rootid[body]
    if not seen.any():
        return View(1.0, 120.0, -20.0, body, np.zeros(3))
    frames = [0] if body >= 0 else np.linspace(0, len(placements) - 1, _FRAMED).astype(int)
    bounds = [_bounds(model, placements[frame], seen) for frame in frames]
    low, high = np.min([b[0] for b in bounds], 0), np.max([b[1] for b in bounds], 0)
    size = high - low
    flatness = float(size[2] / max(size[0], size[1], 1e-9))
    lowest, highest = (14.0, 32.0) if body >= 0 else (14.0, 56.0)
    elevation = -float(np.clip(60.0 * (1.0 - flatness) - 24.0 * (body >= 0), lowest, highest))
    # A scene that stays in place is wider than high, like the picture, so that its width and depth may count
    # for less. A body that is followed may turn in any direction.
    radius = (
        float(np.linalg.norm(size * ([1.0, 1.0, 1.0] if body >= 0 else [0.85, 0.85, 1.0]))) / 2.0
    )
    return View(radius, 120.0, elevation, body, (low + high) / 2.0)


def _bounds(
    model: MjModel, placement: NDArray[np.float64], seen: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the lowest and highest corner `[3]`, in metres, of the box around geoms `seen` `[ngeom]`."""
    data = mujoco.MjData(model)
    place_bodies(model, data, placement)
    rotation, box = data.geom_xmat[seen].reshape(-1, 3, 3), model.geom_aabb[seen]
    centre = data.geom_xpos[seen] + np.einsum("gij,gj->gi", rotation, box[:, :3])
    half = np.einsum("gij,gj->gi", np.abs(rotation), box[:, 3:])
    return (centre - half).min(0), (centre + half).max(0)


def compute_poses(model: MjModel, episode: Episode, view: View) -> Poses:
    """Computes the poses of every frame with MuJoCo's kinematics, and the smoothed path of the target."""
    data, frames = mujoco.MjData(model), len(episode.qpos)
    position, quaternion = np.empty((frames, model.nbody, 3)), np.empty((frames, model.nbody, 4))
    target = np.tile(view.centre, (frames, 1))
    for frame, placement in enumerate(episode.placements(model)):
        place_bodies(model, data, placement)
        position[frame], quaternion[frame] = data.xpos, data.xquat
        if view.body >= 0:
            mujoco.mj_comPos(model, data)
            target[frame] = data.subtree_com[view.body]
    return Poses(position, quaternion, _smooth(target, FOLLOW_SMOOTHING_S / episode.env_dt))


def _followed_body(model: MjModel) -> int:
    """Returns the body that the model's own camera tracks, else the first with a free joint, else -1.

    If there are actuators and none moves what hangs on the free joint, that is an object, and not followed.
    """
    for mode, body in zip(model.cam_mode, model.cam_bodyid, strict=True):
        if mode in _TRACKING and body > 0:
            return int(body)
    joints = model.actuator_trnid[model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT.value, 0]
    moved = model.body_rootid[model.jnt_bodyid[joints]]
    for joint in np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE.value):
        body = int(model.jnt_bodyid[joint])
        if not len(moved) or model.body_rootid[body] in moved:
            return body
    return -1


def _smooth(path: NDArray[np.float64], deviation: float) -> NDArray[np.float64]:
    """Smooths `[T, 3]` along T with a Gaussian of `deviation` frames.

    Beyond each end, the path is continued by point reflection about the end.
    """
    reach = min(int(3.0 * deviation), len(path) - 1)
    if reach < 1:
        return path
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    before = 2.0 * path[0] - path[reach:0:-1]
    after = 2.0 * path[-1] - path[-2 : -reach - 2 : -1]
    padded = np.concatenate([before, path, after])
    columns = [np.convolve(column, kernel / kernel.sum(), "valid") for column in padded.T]
    return np.stack(columns, axis=1)


def require_writable(path: Path, suffix: str) -> None:
    """Raises SeedbedError if `path` does not end in `suffix`, is a folder, or is in none."""
    if path.suffix.lower() != suffix:
        raise SeedbedError(f"cannot write {path}: its name must end in {suffix}")
    if path.is_dir():
        raise SeedbedError(f"cannot write {path}: it is a folder")
    if not path.absolute().parent.is_dir():
        raise SeedbedError(f"cannot write {path}: there is no folder {path.parent}")


@contextlib.contextmanager
def written_whole(path: str | Path, suffix: str) -> Iterator[Path]:
    """Yields a temporary path next to `path`; renames it to `path` on success and removes it otherwise.

    Raises SeedbedError if `path` does not end in `suffix`, is a folder, or cannot be written.
    """
    path = Path(path)
    require_writable(path, suffix)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{suffix}")
    try:
        partial.touch()
    except OSError as error:
        raise SeedbedError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise SeedbedError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
