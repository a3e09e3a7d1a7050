"""Writes a page that plays robots: each with its task and its policy as a WebAssembly module."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seedbed import physics, simd
from seedbed.envs.device.mujoco import MujocoTask
from seedbed.play.meshes import coarse
from seedbed.play.plain import Plain
from seedbed.play.programs import Played, actuator_names, played
from seedbed.run.deployed import Policy
from seedbed.simd.ir.program import Unsupported
from seedbed.simd.wasm.module import compile_module
from seedbed.types import Box, SeedbedError
from seedbed.viewer.html import WEB, describe_scene, fill, json_in_page
from seedbed.viewer.recording import Episode, Recording, find_view, written_whole


@dataclasses.dataclass(frozen=True)
class Player:
    """A robot of a page: a task, and the policy that acts in it, or None if a person moves the actuators."""

    env: MujocoTask
    policy: Policy | None
    title: str


def write_page(
    players: Sequence[Player], path: Path, tell: Callable[[str], None] = lambda text: None
) -> None:
    """Writes the page of one or more robots to `path`, which must end in .html.

    Calls `tell` with what is being done. Raises SeedbedError if a task or policy cannot be compiled, the
    package that makes fine meshes coarser is not installed, or the file cannot be written.
    """
    with written_whole(path, ".html") as partial:
        described = [describe(player, tell)[0] for player in players]
        partial.write_text(page_of(described), encoding="utf-8")


def page_of(described: Sequence[dict[str, Any]], *, watched: bool = False) -> str:
    """Returns the page of robots that `describe` has described.

    If it is `watched`, it asks the server that it came from for newer policies; otherwise it asks nobody.
    """
    texts = {
        name: (WEB / name).read_text(encoding="utf-8")
        for name in ("style.css", "play.css", "replay.js")
    }
    parts = {
        "title": html.escape(", ".join(each["title"] for each in described)),
        "connect": "connect-src 'self'" if watched else "connect-src 'none'",
        "style": texts["style.css"] + texts["play.css"],
        "script": texts["replay.js"],
        "data": json_in_page({"players": described, "watched": watched}),
    }
    return fill((WEB / "play.html").read_text(encoding="utf-8"), parts)


def describe(player: Player, tell: Callable[[str], None]) -> tuple[dict[str, Any], Played]:
    """Compiles a robot; returns what the page needs of it, as JSON values, and what was compiled.

    Calls `tell` with what is being done. Raises SeedbedError as `write_page` does.
    """
    env = player.env
    opened = simd.vectorize(env.reset)(jax.random.key(0)[None])
    qpos = np.asarray(opened.inner.qpos[0], np.float64)
    still = Episode(np.stack([qpos, qpos]), np.zeros(1), env.dt)
    recording = Recording(env.compiled(), (still,), player.title)
    view = find_view(recording)
    scene = describe_scene(recording.model, view, coarse)
    try:
        game = played(env, player.policy, scene["bodies"], view.body)
    except Unsupported as error:
        raise SeedbedError(f"{player.title} has no page: {error}") from error
    tell(f"{player.title}: compiling {', '.join(game.parts)}")
    code = compile_module({name: part.program for name, part in game.parts.items()})
    described = {
        "title": player.title,
        "scene": scene,
        "followed": scene["bodies"].index(view.body) if view.body in scene["bodies"] else -1,
        "centre": [round(float(x), 6) for x in view.centre],
        "dt": env.dt,
        # A robot that is steered goes on.
        "limit": 0 if env.commands else env.episode_steps,
        "masses": tree_masses(env.physics_model()).tolist(),
        "commands": [each._asdict() for each in env.commands],
        "controls": [] if player.policy else _controls(env),
        "nbody": env.physics_model().nbody,
        "layout": game.layout,
        "memory": game.memory.tolist(),
        "module": _packed(code),
        "parts": {
            name: {
                "reads": part.reads,
                "writes": part.writes,
                "shared": [array.nbytes for array in part.shared],
                "data": packed(part.shared),
            }
            for name, part in game.parts.items()
        },
    }
    return described, game


def packed(arrays: Sequence[np.ndarray]) -> str:
    """Packs arrays one after another, each up to a whole word; `web/src/machine.js` unpacks them."""
    return _packed(b"".join(array.tobytes() + bytes(-array.nbytes % 4) for array in arrays))


def tree_masses(model: physics.Model) -> np.ndarray:
    """Returns the mass [nbody] in kg of all that moves and has the same root as each body."""
    root, moves = np.asarray(model.body_rootid), model.body_weldid > 0
    return np.bincount(root, np.asarray(model.body_mass) * moves, len(root))[root]


def _controls(env: MujocoTask) -> list[dict[str, Any]]:
    """Returns the sliders of the actuators: those without limits go from -1 to 1, or as far as they begin."""
    action = env.spec.action
    assert isinstance(action, Box)
    names = actuator_names(env)
    starts = np.asarray(env.begins.ctrl) if isinstance(env, Plain) else np.zeros(action.shape[0])
    return [
        {
            "name": name,
            "low": min(start, -1.0) if np.isinf(low) else low,
            "high": max(start, 1.0) if np.isinf(high) else high,
            "start": start,
        }
        for name, low, high, start in zip(
            names, action.low, action.high, starts.tolist(), strict=True
        )
    ]


def _packed(data: bytes) -> str:
    # Without a time stamp, equal robots give equal files.
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
