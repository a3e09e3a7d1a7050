"""Writes a recording as one HTML file that replays it in three dimensions and loads nothing else."""

from __future__ import annotations

import base64
import gzip
import html
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seedbed import strict_json
from seedbed.viewer.recording import (
    Episode,
    MjModel,
    Recording,
    View,
    compute_poses,
    find_view,
    moves,
    mujoco,
    written_whole,
)
from seedbed.viewer.surfaces import Surface, describe_surface, read_surface, surface_of

WEB = Path(__file__).parent / "web"
"""The folder of the pages and their scripts. `make web` makes `replay.js` and `report.js`."""
SHAPES = {
    mujoco.mjtGeom.mjGEOM_PLANE: "plane",
    mujoco.mjtGeom.mjGEOM_SPHERE: "sphere",
    mujoco.mjtGeom.mjGEOM_CAPSULE: "capsule",
    mujoco.mjtGeom.mjGEOM_ELLIPSOID: "ellipsoid",
    mujoco.mjtGeom.mjGEOM_CYLINDER: "cylinder",
    mujoco.mjtGeom.mjGEOM_BOX: "box",
}
SHOWN_GROUPS = 3
"""The number of geom groups that are shown: 0, 1 and 2, as in MuJoCo's own viewer."""
QUATERNION_SCALE = 32767
"""The int16 number that stands for 1 in a stored quaternion."""
# MuJoCo takes the material's colour if a geom has this one, its default.
_UNSET_RGBA = np.array([0.5, 0.5, 0.5, 1.0], np.float32)


def write_html(recording: Recording, path: str | Path) -> None:
    """Writes the replay page to `path`, which must end in .html.

    Raises SeedbedError if the file cannot be written.
    """
    replay = describe(recording)
    parts = {"title": html.escape(recording.title), "data": json_in_page(replay)}
    page = fill(replay_page(), parts)
    with written_whole(path, ".html") as partial:
        partial.write_text(page, encoding="utf-8")


def replay_page() -> str:
    """Returns the page without its recording: `title` and `data` are to be filled in."""
    left = {name: f"{{{{{name}}}}}" for name in ("title", "data")}
    texts = {"style": WEB / "style.css", "script": WEB / "replay.js"}
    return fill(
        (WEB / "page.html").read_text(encoding="utf-8"),
        left | {name: at.read_text(encoding="utf-8") for name, at in texts.items()},
    )


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Puts texts where a page has their names in double braces."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def json_in_page(value: Any) -> str:
    """Returns JSON for a script element of a page."""
    # Only a `<` in the data could end the script element that contains it.
    return strict_json.dumps(value, compact=True).replace("<", "\\u003c")


def describe(recording: Recording) -> dict[str, Any]:
    """Returns what the page shows, as JSON values."""
    view = find_view(recording)
    scene = describe_scene(recording.model, view)
    packed = [_encode(recording.model, each, view, scene["bodies"]) for each in recording.episodes]
    return {"title": recording.title, "scene": scene, "episodes": packed}


def describe_scene(
    model: MjModel,
    view: View,
    drawn: Callable[[list[Surface], list[int]], list[Surface]] = lambda surfaces, used: surfaces,
) -> dict[str, Any]:
    """Returns the bodies of a model and a camera, as JSON values.

    `bodies` in it are the numbers of those that move, and are seen or followed. `drawn` takes surfaces, and
    how many geoms have each; it returns those to draw in their place.
    """
    surfaces: dict[tuple[int, int], int] = {}
    geoms = _describe_geoms(model, surfaces)
    used = [sum(geom.get("surface") == number for geom in geoms) for number in surfaces.values()]
    shown = drawn([read_surface(model, each) for each in surfaces], used)
    followed = {view.body} if view.body > 0 and moves(model, view.body) else set()
    return {
        "bodies": sorted({geom["body"] for geom in geoms if geom["body"] > 0} | followed),
        "geoms": geoms,
        "surfaces": list(map(describe_surface, shown)),
        "follows": view.body >= 0,
        "radius": view.radius,
        "azimuth": view.azimuth,
        "elevation": view.elevation,
    }


def _describe_geoms(model: MjModel, surfaces: dict[tuple[int, int], int]) -> list[dict[str, Any]]:
    """Returns shape, sizes, colour, body and place in that body of every geom that MuJoCo would show.

    A geom of a body that never moves is placed in the world, body 0. Those with a surface have its number;
    numbers are added to `surfaces`.
    """
    described = []
    for index in range(model.ngeom):
        rgba = _colour(model, index)
        if model.geom_group[index] >= SHOWN_GROUPS or rgba[3] == 0.0:
            continue
        surface = surface_of(model, index)
        shape: dict[str, Any] = {"shape": "surface"}
        if surface is None:
            shape["shape"] = SHAPES[mujoco.mjtGeom(model.geom_type[index])]
        else:
            shape["surface"] = surfaces.setdefault(surface, len(surfaces))
        body = int(model.geom_bodyid[index])
        described.append(
            {
                **shape,
                "body": body if moves(model, body) else 0,
                "size": _rounded(model.geom_size[index]),
                "rgba": _rounded(rgba),
                **_place(model, index, body),
            }
        )
    return described


def _place(model: MjModel, index: int, body: int) -> dict[str, list[float]]:
    """Returns a geom's position and quaternion in its body, or in the world if the body never moves."""
    position, quaternion = model.geom_pos[index], model.geom_quat[index]
    if not moves(model, body):
        data = mujoco.MjData(model)
        mujoco.mj_kinematics(model, data)
        position, quaternion = data.geom_xpos[index], np.empty(4)
        mujoco.mju_mat2Quat(quaternion, data.geom_xmat[index])
    return {"position": _rounded(position), "quaternion": _rounded(quaternion)}


def _colour(model: MjModel, index: int) -> NDArray[np.float32]:
    """Returns a geom's RGBA `[4]`: its own or its material's, as in MuJoCo, times the mean of its texture."""
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
    """Packs an episode; `data` is base64 of gzip, and `web/src/data.js` unpacks it.

    The data are float32 sequences one after another: positions of `bodies` (x, y, z of each) and the target
    `[T + 1]`, the reward and each of `episode.series` `[T]`. After them come int16 sequences `[T + 1]`: the
    quaternions of `bodies` (w, x, y, z of each).
    """
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
        # Without a time stamp, equal recordings give equal files.
        "data": base64.b64encode(gzip.compress(packed, 9, mtime=0)).decode(),
    }


def _continuous(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns quaternions `[T, body, 4]` with signs such that none jumps to its negative between two frames.

    Such a jump is no rotation, but compresses badly.
    """
    turned = (quaternion[1:] * quaternion[:-1]).sum(-1, keepdims=True) < 0.0
    signs = np.cumprod(np.where(turned, -1.0, 1.0), axis=0)
    return np.concatenate([quaternion[:1], quaternion[1:] * signs])


def _rounded(values: NDArray[Any]) -> list[float]:
    return [round(float(value), 6) for value in values]
