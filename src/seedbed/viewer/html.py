"""Writes a recording as one HTML file that replays it in three dimensions and fetches nothing."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seedbed.types import SeedbedError
from seedbed.viewer.recording import (
    Episode,
    MjModel,
    Recording,
    View,
    compute_poses,
    find_view,
    mujoco,
    written_whole,
)

WEB = Path(__file__).parent / "web"
"""The page and its script; `npm install && npm run build` there makes `replay.js`."""
SHAPES = {
    mujoco.mjtGeom.mjGEOM_PLANE: "plane",
    mujoco.mjtGeom.mjGEOM_SPHERE: "sphere",
    mujoco.mjtGeom.mjGEOM_CAPSULE: "capsule",
    mujoco.mjtGeom.mjGEOM_ELLIPSOID: "ellipsoid",
    mujoco.mjtGeom.mjGEOM_CYLINDER: "cylinder",
    mujoco.mjtGeom.mjGEOM_BOX: "box",
}
SHOWN_GROUPS = 3
"""MuJoCo shows the geoms of groups 0, 1 and 2."""
QUATERNION_SCALE = 32767
"""Quaternions are stored as int16: 1 is this."""
_UNSET_RGBA = np.array([0.5, 0.5, 0.5, 1.0], np.float32)  # where MuJoCo takes the material's colour


def write_html(recording: Recording, path: str | Path) -> None:
    """Writes the replay; refuses what it cannot draw by name."""
    view = find_view(recording)
    geoms = _describe_geoms(recording.model)
    bodies = sorted({geom["body"] for geom in geoms if geom["body"] > 0})
    episodes = [_encode(recording.model, episode, view, bodies) for episode in recording.episodes]
    replay = {
        "title": recording.title,
        "bodies": bodies,
        "geoms": geoms,
        "follows": view.body >= 0,
        "radius": view.radius,
        "azimuth": view.azimuth,
        "elevation": view.elevation,
        "episodes": episodes,
    }
    parts = {
        "title": html.escape(recording.title),
        "style": (WEB / "style.css").read_text(),
        "script": (WEB / "replay.js").read_text(),
        # Inside a script element only `<` could end it.
        "data": json.dumps(replay, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = (WEB / "page.html").read_text()
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
    with written_whole(path, ".html") as partial:
        partial.write_text(page, encoding="utf-8")


def _describe_geoms(model: MjModel) -> list[dict[str, Any]]:
    """Lists the geoms that MuJoCo would show: shape, sizes, colour and place in their body."""
    described = []
    for index in range(model.ngeom):
        rgba = _colour(model, index)
        if model.geom_group[index] >= SHOWN_GROUPS or rgba[3] == 0.0:
            continue
        kind = mujoco.mjtGeom(model.geom_type[index])
        if kind not in SHAPES:
            name = model.geom(index).name or f"number {index}"
            raise SeedbedError(
                f"geom {name} has the shape {kind.name.removeprefix('mjGEOM_').lower()}, which a replay "
                f"cannot draw; it draws {', '.join(SHAPES.values())} (a video draws all)"
            )
        body = int(model.geom_bodyid[index])
        described.append(
            {
                "shape": SHAPES[kind],
                "body": body if model.body_weldid[body] else 0,
                "size": _rounded(model.geom_size[index]),
                "rgba": _rounded(rgba),
                **_place(model, index, body),
            }
        )
    return described


def _place(model: MjModel, index: int, body: int) -> dict[str, list[float]]:
    """Places a geom in its body, or in the world if the body never moves."""
    position, quaternion = model.geom_pos[index], model.geom_quat[index]
    if not model.body_weldid[body]:
        data = mujoco.MjData(model)
        mujoco.mj_kinematics(model, data)
        position, quaternion = data.geom_xpos[index], np.empty(4)
        mujoco.mju_mat2Quat(quaternion, data.geom_xmat[index])
    return {"position": _rounded(position), "quaternion": _rounded(quaternion)}


def _colour(model: MjModel, index: int) -> NDArray[np.float32]:
    """Finds a geom's RGBA as MuJoCo does: its own or its material's, times the texture's mean."""
    rgba, material = model.geom_rgba[index].copy(), int(model.geom_matid[index])
    if material < 0:
        return rgba
    if np.array_equal(rgba, _UNSET_RGBA):
        rgba = model.mat_rgba[material].copy()
    texture = int(model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB])
    if texture >= 0:
        start, channels = int(model.tex_adr[texture]), int(model.tex_nchannel[texture])
        pixels = int(model.tex_height[texture] * model.tex_width[texture])
        data = model.tex_data[start : start + pixels * channels].reshape(pixels, channels)
        rgba[:3] *= data[:, :3].mean(0) / 255.0 if channels >= 3 else data[:, :1].mean() / 255.0
    return rgba


def _encode(model: MjModel, episode: Episode, view: View, bodies: list[int]) -> dict[str, Any]:
    """Packs an episode: float32 `[T + 1]` or `[T]` sequences one after another, then int16 ones."""
    poses = compute_poses(model, episode, view)
    sequences = [
        *poses.position[:, bodies].reshape(len(episode.qpos), -1).T,
        *poses.target.T,
        episode.reward,
        *episode.series.values(),
    ]
    quaternion = _continuous(poses.quaternion[:, bodies]).reshape(len(episode.qpos), -1).T
    scaled = np.round(quaternion * QUATERNION_SCALE)
    packed = b"".join(sequence.astype("<f4").tobytes() for sequence in sequences)
    packed += scaled.astype("<i2").tobytes()
    return {
        "steps": len(episode.reward),
        "env_dt": episode.env_dt,
        "return": episode.episode_return,
        "series": list(episode.series),
        # No time stamp: equal recordings give equal files.
        "data": base64.b64encode(gzip.compress(packed, 9, mtime=0)).decode(),
    }


def _continuous(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chooses signs `[T, body]` such that a quaternion never jumps to its negative, which packs badly."""
    turned = (quaternion[1:] * quaternion[:-1]).sum(-1, keepdims=True) < 0.0
    signs = np.cumprod(np.where(turned, -1.0, 1.0), axis=0)
    return np.concatenate([quaternion[:1], quaternion[1:] * signs])


def _rounded(values: NDArray[Any]) -> list[float]:
    return [round(float(value), 6) for value in values]
