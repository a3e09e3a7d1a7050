"""Checks of a save's index: who made the folder may have written anything there, with a valid checksum.

The kernels of replay trust the tables of items and images, so a number out of range would read or write
outside the replay's memory; a file's name would be mapped, and later removed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from seedbed.replay.host.items import Windows
from seedbed.replay.host.layout import CHUNK
from seedbed.replay.host.storage import ReplayStorage

_FIELDS: dict[str, tuple[type, ...]] = {
    "layout": (dict,),
    "inserted": (int,),
    "largest": (int, float),
    "owed": (int, float),
    "state": (dict,),
    "files": (list,),
}
_FILE = re.compile(r"(rows|images|cores)-[0-9]{8,}\.segment")
_Allocated = Mapping[str, np.ndarray]
"""The units handed out in each segment, by kind, with a 0 after the last for places in no segment."""


def require_header(header: dict[str, Any]) -> None:
    """Raises ValueError if a header lacks a field, or names a file that is no segment of the folder."""
    for name, kinds in _FIELDS.items():
        _require(type(header.get(name)) in kinds, name)
    for part in header["files"]:
        kinds = [type(each) for each in part] if isinstance(part, list) else []
        _require(kinds == [str, int, str, int], "files")
        found = _FILE.fullmatch(part[2])
        _require(found is not None and found[1] == part[0], "files")
    _require(len({file for _, _, file, _ in header["files"]}) == len(header["files"]), "files")


def require_sound(
    storage: ReplayStorage, header: dict[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Raises ValueError if the tables of a save with the storage's layout cannot be those of a replay.

    `require_header` must have accepted the header.
    """
    _require(0 <= header["inserted"] < 1 << 62, "inserted")
    _require(1 <= header["largest"] < math.inf, "largest")
    _require(abs(header["owed"]) < math.inf, "owed")
    _require_state(header["state"])
    allocated = _allocated(storage, header["files"])
    _require_shapes(storage, header["files"], arrays)
    _require_items(storage, header["inserted"], arrays, allocated)
    _require_images(storage, header["files"], arrays, allocated)


def _require_state(state: dict[str, Any]) -> None:
    """Checks the state of drawing, which `HostReplay` gives to a save."""
    try:
        np.random.default_rng().bit_generator.state = state["random"]
    except (KeyError, TypeError, ValueError, OverflowError):
        _require(False, "state")
    _require(type(state.get("sampled")) is int, "state")


def _allocated(storage: ReplayStorage, files: list[tuple[str, int, str, int]]) -> _Allocated:
    found = {
        kind: np.zeros(len(segments.opened) + 1, np.int64)
        for kind, segments in storage.segments.items()
    }
    for kind, segment, _, units in files:
        there = kind in found and 0 <= segment < len(found[kind]) - 1
        _require(there and not found[kind][segment], "files")
        _require(0 < units <= storage.segments[kind].units, "files")
        found[kind][segment] = units
    return found


def _require_shapes(
    storage: ReplayStorage,
    files: list[tuple[str, int, str, int]],
    arrays: Mapping[str, np.ndarray],
) -> None:
    items, frames = storage.items, storage.frames
    count = arrays["weights"].size if "weights" in arrays else 0
    tables = items.windows._asdict()
    tables |= {"generation": items.generation, "weights": items.tree.weights}
    expected = {key: (leaf.dtype, (count, *leaf.shape[1:])) for key, leaf in tables.items()}
    chunks = storage.rows.units * sum(kind == "rows" for kind, *_ in files)
    for key, leaf in (("image_offset", frames.offset), ("image_size", frames.size)):
        expected[key] = leaf.dtype, (len(leaf), chunks)
    _require({key: (leaf.dtype, leaf.shape) for key, leaf in arrays.items()} == expected, "tables")


def _require_items(
    storage: ReplayStorage, inserted: int, arrays: Mapping[str, np.ndarray], allocated: _Allocated
) -> None:
    layout, generation, weights = storage.layout, arrays["generation"], arrays["weights"]
    oldest = max(0, inserted - storage.items.capacity)
    _require(((generation >= oldest) & (generation < inserted)).all(), "generation")
    _require((np.diff(generation) > 0).all(), "generation")
    _require((np.isfinite(weights) & (weights > 0)).all(), "weights")
    # Sums of int32 could overflow.
    windows = Windows(*(arrays[key].astype(np.int64) for key in Windows._fields))
    offset, front, length = windows.offset, windows.front, windows.length
    _require(((offset >= 0) & (offset < CHUNK)).all(), "offset")
    _require((front >= 0).all(), "front")
    _require((length >= 2).all(), "length")
    _require((front + length <= layout.item_rows).all(), "length")
    _require((offset + length <= CHUNK * layout.item_chunks).all(), "length")
    _require(((windows.env >= 0) & (windows.env < layout.num_envs)).all(), "env")
    if storage.cores is not None:
        _require(_within(windows.core, 1, storage.cores.units, allocated["cores"]), "core")
    # Streams that move into another replay take whole sets of chunks.
    size = layout.group_size
    _require(_within(_sets(windows, size), size, storage.rows.units, allocated["rows"]), "chunks")


def _require_images(
    storage: ReplayStorage,
    files: list[tuple[str, int, str, int]],
    arrays: Mapping[str, np.ndarray],
    allocated: _Allocated,
) -> None:
    offset, size = (arrays[key].astype(np.int64) for key in ("image_offset", "image_size"))
    segments, stored = storage.frames.segments, offset >= 0
    most = storage.frames.whole_bytes[:, None]
    _require(((offset == -1) | stored & (size > 0) & (size <= most)).all(), "images")
    _require(_within(offset[stored], size[stored], segments.units, allocated["images"]), "images")
    complete = np.zeros(storage.frames.offset.shape[1], bool)
    rows = [segment for kind, segment, *_ in files if kind == "rows"]
    complete[storage.rows.units_of(rows)] = stored.all(0)
    windows = Windows(*(arrays[key].astype(np.int64) for key in Windows._fields))
    firsts = np.unique(_sets(windows, storage.layout.group_size))
    every = firsts[:, None] + np.arange(storage.layout.group_size)
    _require(complete[every].all(), "images")


def _sets(windows: Windows, group_size: int) -> np.ndarray:
    """Returns the first chunks of the sets that items have rows in, `[I, M]`."""
    return windows.chunks - (windows.env % group_size)[:, None]


def _within(first: np.ndarray, count: np.ndarray | int, units: int, allocated: np.ndarray) -> bool:
    """Returns whether runs of `count` units each lie in what was handed out of a segment."""
    segment = np.clip(first // units, -1, len(allocated) - 1)
    return bool((first % units + count <= allocated[segment]).all())


def _require(sound: bool | np.bool_, name: str) -> None:
    if not sound:
        raise ValueError(f"{name} of its index cannot be right")
