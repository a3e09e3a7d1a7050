"""The memory that one actor group shares with the learner: a header, a timestep and an action.

A slot belongs to whoever was rung last: the actor writes the timestep and rings, the learner writes
the action and rings. Nothing is locked; the doorbell's system call orders the writes before it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from seedbed import trees
from seedbed.types import (
    ActionSpec,
    ArraySpec,
    Box,
    Discrete,
    EnvSpec,
    MultiDiscrete,
    SeedbedError,
    Timestep,
    Tree,
    action_array,
)

ALIGNMENT = 64  # a cache line: the two sides never write to the same one
PAGE = 4096
_INCARNATION, _STEP, _PUBLISHED_NS, _CPU = range(4)  # 8-byte words of the header
_ANSWERED_WORD = ALIGNMENT // 8  # the learner's word has a cache line of its own
_HEADER_BYTES = 2 * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of `num_envs` environments lie in a slot; offsets and size in bytes."""

    spec: EnvSpec
    num_envs: int
    arrays: tuple[
        ArraySpec, ...
    ]  # observation leaves, then reward, terminated, truncated, first, action
    offsets: tuple[int, ...]
    size: int  # whole pages


def make_layout(spec: EnvSpec, num_envs: int) -> Layout:
    """Lays out a slot; both sides compute the same layout from the same spec."""
    flag = ArraySpec((), "bool")
    single = [*trees.leaves(spec.observation), ArraySpec((), "float32"), flag, flag, flag]
    arrays = [
        ArraySpec((num_envs, *array.shape), array.dtype)
        for array in [*single, action_array(spec.action)]
    ]
    offsets, end = [], _HEADER_BYTES
    for array in arrays:
        offsets.append(end)
        end = _round_up(end + _num_bytes(array), ALIGNMENT)
    return Layout(spec, num_envs, tuple(arrays), tuple(offsets), _round_up(end, PAGE))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _num_bytes(array: ArraySpec) -> int:
    return int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize


class Slot:
    """Views of one slot: `timestep` leaves and `action` are `[n, ...]`, all in shared memory."""

    def __init__(self, layout: Layout, memory: Any, offset: int = 0) -> None:
        self.layout = layout
        views = list(_views(layout, memory, offset))
        *observation, reward, terminated, truncated, first, self.action = views
        self.timestep = Timestep(
            trees.unflatten(layout.spec.observation, observation),
            reward,
            terminated,
            truncated,
            first,
        )
        self._arrays = views[:-1]
        header = memoryview(memory)[offset : offset + _HEADER_BYTES]
        # memoryviews, as reading an item of one costs a third of what it costs with numpy
        self._integers, self._floats = header.cast("q"), header.cast("d")

    @property
    def incarnation(self) -> int:
        """Which life of the actor wrote this; -1 before the first."""
        return self._integers[_INCARNATION]

    @property
    def step(self) -> int:
        """Timesteps published in this life: 1 is the first opening observation."""
        return self._integers[_STEP]

    @property
    def published_ns(self) -> int:
        """When the timestep was published, on the monotonic clock."""
        return self._integers[_PUBLISHED_NS]

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the actor process up to this timestep."""
        return self._floats[_CPU]

    @property
    def answered(self) -> bool:
        """Whether the action belongs to the timestep."""
        return self._integers[_ANSWERED_WORD] == self._integers[_STEP]

    def open(self, incarnation: int) -> None:
        """Claims the slot for a life of the actor."""
        self._integers[_INCARNATION] = incarnation

    def fits(self, leaves: list[Any]) -> bool:
        """Whether a timestep's leaves are arrays of the slot's shapes and dtypes, and finite."""
        return len(leaves) == len(self._arrays) and all(
            isinstance(leaf, np.ndarray)
            and leaf.shape == view.shape
            and leaf.dtype == view.dtype
            and (leaf.dtype.kind != "f" or np.isfinite(leaf).all())
            for view, leaf in zip(self._arrays, leaves, strict=True)
        )

    def publish(self, leaves: list[Any]) -> None:
        """Copies a timestep's leaves, which fit, into the slot; the caller rings."""
        for view, leaf in zip(self._arrays, leaves, strict=True):
            view[...] = leaf
        self._floats[_CPU] = time.process_time()
        self._integers[_PUBLISHED_NS] = time.monotonic_ns()
        self._integers[_STEP] += 1

    def answer(self) -> None:
        """Marks the action as the answer to the timestep; the caller rings."""
        self._integers[_ANSWERED_WORD] = self._integers[_STEP]


def _views(layout: Layout, memory: Any, offset: int) -> Iterator[np.ndarray]:
    for array, start in zip(layout.arrays, layout.offsets, strict=True):
        count = int(np.prod(array.shape, dtype=np.int64))
        flat = np.frombuffer(memory, np.dtype(array.dtype), count, offset + start)
        yield flat.reshape(array.shape)


def blank_slot(layout: Layout) -> Slot:
    """Makes a slot in private memory that no actor has written: incarnation -1, zeros."""
    slot = Slot(layout, bytearray(layout.size))
    slot.open(-1)
    return slot


def spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    """Describes a spec in JSON types."""
    kind = type(spec.action).__name__
    return {
        "observation": _tree_to_json(spec.observation),
        "action": {"kind": kind, **dataclasses.asdict(spec.action)},
    }


def spec_from_json(data: dict[str, Any]) -> EnvSpec:
    """Inverts `spec_to_json`."""
    return EnvSpec(_tree_from_json(data["observation"]), _action_from_json(data["action"]))


def _tree_to_json(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, ArraySpec):
        return {"shape": list(tree.shape), "dtype": tree.dtype}
    if isinstance(tree, dict):
        return {"dict": {key: _tree_to_json(child) for key, child in tree.items()}}
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return {"tuple": [_tree_to_json(child) for child in tree]}
    raise SeedbedError(
        f"an observation spec holds a {type(tree).__name__}; use dicts, tuples and ArraySpec only"
    )


def _tree_from_json(data: dict[str, Any]) -> Tree:
    if "dict" in data:
        return {key: _tree_from_json(child) for key, child in data["dict"].items()}
    if "tuple" in data:
        return tuple(_tree_from_json(child) for child in data["tuple"])
    return ArraySpec(tuple(data["shape"]), data["dtype"])


def _action_from_json(data: dict[str, Any]) -> ActionSpec:
    if data["kind"] == "Discrete":
        return Discrete(data["n"])
    if data["kind"] == "MultiDiscrete":
        return MultiDiscrete(tuple(data["nvec"]))
    return Box(tuple(data["shape"]), tuple(data["low"]), tuple(data["high"]))
