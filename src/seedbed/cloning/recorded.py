"""Recorded episodes: read from npz files and Minari's, and put into the form of an environment's spec."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from seedbed import trees
from seedbed.printable import printable
from seedbed.run.forms import SpaceCodec
from seedbed.types import Array, Box, Discrete, SeedbedError, Tree, action_array

_ENDS = ("terminations", "truncations")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Steps of episodes, one after the other, in the form of the spec; leaves are `[N, ...]`."""

    observation: Tree
    action: Array
    first: Array  # bool: the step opens an episode


def read(path: Path, forms: SpaceCodec) -> Recorded:
    """Reads recorded episodes for an environment.

    `path` is an npz file with `observations`, `actions`, `terminations` and `truncations`, one row a step; an
    observation that is a dict has a part for each key, such as `observations/goal`. Or it is a dataset of
    Minari, its folder or `main_data.hdf5`. Raises SeedbedError if it is neither, or does not fit.
    """
    name = printable(path)
    hdf5 = path / "data" / "main_data.hdf5" if path.is_dir() else path
    if path.is_dir() and not hdf5.exists():
        hdf5 = path / "main_data.hdf5"
    try:
        if hdf5.suffix in (".hdf5", ".h5"):
            observation, action, first = _of_minari(hdf5, name)
        else:
            observation, action, first = _of_npz(path, name)
    except OSError as error:
        raise SeedbedError(f"{name} cannot be read: {error.strerror or error}") from error
    counts = {len(leaf) for leaf in (*trees.leaves(observation), action, first)}
    if len(counts) > 1 or 0 in counts:
        raise SeedbedError(
            f"{name} has parts of {sorted(counts)} steps; all must have one row a step"
        )
    try:
        return Recorded(forms.encode(observation), _encoded(action, forms), first)
    except SeedbedError as error:
        raise SeedbedError(f"{name} does not fit the environment: {error}") from error


def _of_npz(path: Path, name: str) -> tuple[Tree, Array, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            found = dict(file)
    except (ValueError, EOFError) as error:
        raise SeedbedError(f"{name} is no npz file of arrays: {error}") from error
    missing = [each for each in ("actions", *_ENDS) if each not in found]
    observation = _nested({k: v for k, v in found.items() if k.partition("/")[0] == "observations"})
    if missing or not observation:
        lacks = ", ".join(["observations"] * (not observation) + missing)
        raise SeedbedError(f"{name} lacks {lacks}; it has {', '.join(sorted(found))}")
    ended = np.logical_or(*(found[each].astype(bool) for each in _ENDS))
    first = np.concatenate([[True], ended[:-1]]) if ended.size else ended
    return observation["observations"], found["actions"], first


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Turns names such as `observations/goal` into dicts within dicts."""
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *parts, last = name.split("/")
        place = found
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def _of_minari(path: Path, name: str) -> tuple[Tree, Array, Array]:
    if importlib.util.find_spec("h5py") is None:
        raise SeedbedError(
            f"{name} is a file of Minari, which needs the package h5py: pip install h5py"
        )
    with importlib.import_module("h5py").File(path, "r") as file:
        episodes = [file[key] for key in sorted(file, key=lambda key: int(key.rpartition("_")[2]))]
        parts = list(_episodes(episodes))
    if not parts:
        raise SeedbedError(f"{name} has no episodes")
    observations, actions, firsts = zip(*parts, strict=True)
    joined = trees.map(lambda *leaves: np.concatenate(leaves), *observations)
    return joined, np.concatenate(actions), np.concatenate(firsts)


def _episodes(episodes: list[Any]) -> Iterator[tuple[Tree, Array, Array]]:
    for episode in episodes:
        action = np.asarray(episode["actions"])
        # The last observation of an episode has no action.
        observation = _arrays(episode["observations"], len(action))
        first = np.arange(len(action)) == 0
        if len(action):
            yield observation, action, first


def _arrays(node: Any, rows: int) -> Tree:
    if hasattr(node, "keys"):
        return {key: _arrays(node[key], rows) for key in node}
    return np.asarray(node)[:rows]


def _encoded(action: Array, forms: SpaceCodec) -> Array:
    """Turns actions of the environment's space `[N, ...]` into those of the spec."""
    spec = forms.spec.action
    shape = action_array(spec)
    array = np.asarray(action)
    if isinstance(spec, Box):
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
