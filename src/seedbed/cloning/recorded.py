"""Recorded episodes: read from npz files and Minari's, and put into the form of an environment's spec."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.printable import printable
from seedbed.run.forms import SpaceCodec
from seedbed.types import Array, Box, Discrete, SeedbedError, Tree, action_array

_ENDS = ("terminations", "truncations")
_PARTS = ("observations", "actions", "rewards", *_ENDS)
_EPISODE = re.compile(r"episode_\d+")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Steps of episodes, one after the other, in the form of the spec; leaves are `[N, ...]`."""

    observation: Tree
    action: Array
    first: Array  # bool: the step opens an episode
    reward: Array | None = None  # float32: of the action; None if it is not recorded


def read(path: Path, forms: SpaceCodec) -> Recorded:
    """Reads recorded episodes for an environment.

    `path` is an npz file with `observations`, `actions`, `terminations` and `truncations`, and maybe
    `rewards`, one row a step; an observation that is a dict has a part for each key, such as
    `observations/goal`. Or it is a dataset of Minari, its folder or `main_data.hdf5`. Raises SeedbedError if
    it is neither, or does not fit.
    """
    name = printable(path)
    hdf5 = path / "data" / "main_data.hdf5" if path.is_dir() else path
    if path.is_dir() and not hdf5.exists():
        hdf5 = path / "main_data.hdf5"
    minari = hdf5.suffix in (".hdf5", ".h5")
    try:
        found = _of_minari(hdf5, name) if minari else _of_npz(path)
        _require_rows(found, name)
        observation = _nested(found)["observations"]
        ended = found["terminations"].astype(bool) | found["truncations"].astype(bool)
        reward = found["rewards"].astype(np.float32) if "rewards" in found else None
    except SeedbedError:
        raise
    except OSError as error:
        raise SeedbedError(f"{name} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a file of another program may hold anything
        kind = "dataset of Minari" if minari else "npz file of arrays"
        raise SeedbedError(f"{name} is no {kind}: {error}") from error
    if reward is not None and not np.isfinite(reward).all():
        raise SeedbedError(f"{name} has a reward that is not finite")
    first = np.concatenate([[True], ended[:-1]])
    try:
        action = _encoded(found["actions"], forms)
        return Recorded(forms.encode(observation), action, first, reward)
    except SeedbedError as error:
        raise SeedbedError(f"{name} does not fit the environment: {error}") from error


def _require_rows(found: Mapping[str, Any], name: str) -> None:
    """Raises SeedbedError if a part is missing, or if it has not one row a step."""
    missing = {"observations", "actions", *_ENDS} - {_part(key) for key in found}
    if missing:
        has = ", ".join(sorted(found))
        raise SeedbedError(f"{name} lacks {', '.join(sorted(missing))}; it has {has}")
    if parts := [key for key in sorted(found) if "/" in key and _part(key) in _PARTS[1:]]:
        raise SeedbedError(
            f"{name} has {', '.join(parts)}: only observations have parts; let {_part(parts[0])} be one array"
        )
    shapes = {key: np.shape(found[key]) for key in sorted(found) if _part(key) in _PARTS}
    counts = {shape[:1] for shape in shapes.values()}
    if len(counts) > 1 or counts & {(), (0,)}:
        told = ", ".join(f"{key} {shape}" for key, shape in shapes.items())
        raise SeedbedError(f"{name} has arrays {told}; all must have one row a step")
    for key in (*_ENDS, "rewards"):
        if len(shapes.get(key, (0,))) > 1:
            raise SeedbedError(
                f"{name}: {key} has the shape {shapes[key]}, expected {shapes[key][:1]}"
            )


def _part(key: str) -> str:
    return key.partition("/")[0]


def _of_npz(path: Path) -> dict[str, Any]:
    with path.open("rb") as raw, np.lib.npyio.NpzFile(raw, allow_pickle=False) as file:
        return dict(file)


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turns names such as `observations/goal` into dicts within dicts."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *parts, last = name.split("/")
        place = found
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def _of_minari(path: Path, name: str) -> dict[str, Any]:
    """Returns the episodes of a dataset as an npz file would have them."""
    if importlib.util.find_spec("h5py") is None:
        raise SeedbedError(
            f"{name} is a file of Minari, which needs the package h5py: pip install h5py"
        )
    with importlib.import_module("h5py").File(path, "r") as file:
        numbers = sorted(int(key[8:]) for key in file if _EPISODE.fullmatch(key))
        if not numbers:
            raise SeedbedError(
                f"{name} has {', '.join(sorted(file)) or 'nothing'}, and no episode_0, as Minari's datasets "
                f"have: put it into an npz file with observations, actions, {' and '.join(_ENDS)}"
            )
        episodes = [_episode(file[f"episode_{number}"]) for number in numbers]
    return {key: np.concatenate([each[key] for each in episodes]) for key in episodes[0]}


def _episode(group: Any) -> dict[str, Any]:
    found = dict(_arrays(group))
    steps = len(found.get("actions", ()))
    # The last observation of an episode has no action.
    found = {key: value[:steps] for key, value in found.items()}
    return {
        **found,
        "terminations": np.zeros(steps, bool),
        "truncations": np.arange(steps) == steps - 1,
    }


def _arrays(node: Any, above: str = "") -> Iterator[tuple[str, Array]]:
    """Yields the arrays of an episode that are read, by names such as `observations/goal`."""
    for key in node:
        name = above + key
        if _part(name) not in ("observations", "actions", "rewards"):
            continue
        if hasattr(node[key], "keys"):
            yield from _arrays(node[key], f"{name}/")
        else:
            yield name, np.asarray(node[key])


def _encoded(action: Array, forms: SpaceCodec) -> Array:
    """Turns actions of the environment's space `[N, ...]` into those of the spec."""
    spec = forms.spec.action
    shape = action_array(spec)
    array = np.asarray(action)
    if isinstance(spec, Box):
        if array.dtype.kind not in "biuf" or array[0].size != math.prod(shape.shape):
            raise SeedbedError(
                f"actions are {array.dtype} {array.shape}, expected numbers {('N', *shape.shape)}"
            )
        found = array.reshape(len(array), *shape.shape).astype(np.float32)
        if not np.isfinite(found).all():
            raise SeedbedError("an action is not finite")
        return found
    # The space's least values, such as the start of a Discrete, are the choices 0.
    least = np.asarray(forms.decode(np.zeros((1, *shape.shape), np.int32)))
    if array.dtype.kind not in "biu" or array[:1].shape != least.shape:
        raise SeedbedError(
            f"actions are {array.dtype} {array.shape}, expected {least.dtype} {('N', *least.shape[1:])}"
        )
    found = (array.astype(np.int64) - least.astype(np.int64)).reshape(len(array), *shape.shape)
    most = np.array(spec.n if isinstance(spec, Discrete) else spec.nvec)
    if (found < 0).any() or (found >= most).any():
        raise SeedbedError(
            f"an action is outside 0 to {(most - 1).tolist()}, counted from the space's least"
        )
    return found.astype(np.int32)
