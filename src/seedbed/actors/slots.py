"""The memory that one actor group shares with the learner: a header, a timestep and an action.

The side that was rung last owns a slot. The actor writes the timestep and rings the learner; the learner
writes the action and rings the actor. There are no locks: the system call that rings a doorbell orders the
writes before it.

A timestep is known by (life, step). A life belongs to a slot: its number grows whenever the stream of the
slot's timesteps starts anew, and steps count from 1 in each life. The learner answers by writing the
timestep's (life, step) beside the action.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from seedbed import trees
from seedbed.spaces import Mirror, Reflection
from seedbed.strict_json import revived
from seedbed.types import (
    ActionSpec,
    Array,
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

ALIGNMENT = 64
"""Bytes of a cache line. The two sides never write to the same line."""
PAGE = 4096
"""Bytes of a page of memory."""
# Positions of the actor's 8-byte words in the header.
_LIFE, _STEP, _PUBLISHED_NS, _CPU = range(4)
# Positions of the learner's words, which have a cache line of their own.
_ANSWERED_LIFE, _ANSWERED_STEP = ALIGNMENT // 8, ALIGNMENT // 8 + 1
_HEADER_BYTES = 2 * ALIGNMENT
UNTOLD, FAILED, SUCCEEDED = range(3)
"""What `Slot.success` says of an environment's episode, at its last timestep."""


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """The places of the arrays of `num_envs` environments in a slot; offsets and size are in bytes."""

    spec: EnvSpec
    num_envs: int
    # Observation leaves, then reward, terminated, truncated, first and action; all `[num_envs, ...]`.
    arrays: tuple[ArraySpec, ...]
    offsets: tuple[int, ...]
    success_at: int  # the offset of `Slot.success`, which does not leave the machine
    size: int  # a multiple of `PAGE`


def slot_layout(spec: EnvSpec, num_envs: int) -> SlotLayout:
    """Returns the layout of a slot; both sides compute the same layout from the same spec."""
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
    return SlotLayout(
        spec=spec,
        num_envs=num_envs,
        arrays=tuple(arrays),
        offsets=tuple(offsets),
        success_at=end,
        size=_round_up(end + num_envs, PAGE),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _num_bytes(array: ArraySpec) -> int:
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


class Slot:
    """Views of one slot: the leaves of `timestep`, and `action`, are arrays `[n, ...]` in shared memory.

    `success`, uint8 `[n]`, says how an episode has ended, where the environment tells.
    Each side uses a slot from one thread: the actor from its main thread, the learner from the pool's.
    """

    def __init__(self, layout: SlotLayout, memory: Any, offset: int = 0) -> None:
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
        self.success = np.frombuffer(memory, np.uint8, layout.num_envs, offset + layout.success_at)
        header = memoryview(memory)[offset : offset + _HEADER_BYTES]
        # These are memoryviews because reading an item of one takes a third of the time that numpy takes.
        self._integers, self._floats = header.cast("q"), header.cast("d")

    @property
    def life(self) -> int:
        """Returns the number of the slot's life, from 0; -1 in a blank slot. Any thread may read it."""
        return self._integers[_LIFE]

    @property
    def step(self) -> int:
        """Returns how many timesteps were published in this life; the first opening observation is 1.

        Any thread may read it.
        """
        return self._integers[_STEP]

    @property
    def published_ns(self) -> int:
        """Returns when the timestep was published, in ns of the monotonic clock. Any thread may read it."""
        return self._integers[_PUBLISHED_NS]

    @property
    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of the actor process up to this timestep. Any thread may read it."""
        return self._floats[_CPU]

    @property
    def answered(self) -> bool:
        """Returns whether the action answers the timestep. Call from the actor's main thread only."""
        words = self._integers
        return words[_ANSWERED_STEP] == words[_STEP] and words[_ANSWERED_LIFE] == words[_LIFE]

    @property
    def life_due(self) -> int | None:
        """Returns the later life that is to begin instead of an answer, or None.

        Call from the actor's main thread only.
        """
        words = self._integers
        due = words[_ANSWERED_STEP] == 0 and words[_ANSWERED_LIFE] > words[_LIFE]
        return words[_ANSWERED_LIFE] if due else None

    def open(self, life: int) -> None:
        """Begins a life: the timestep that is published next is its first.

        Call before the slot is shared, or from the side that publishes while it owns the slot.
        """
        # The step comes first, so that the new life never shows with a step of the old one.
        self._integers[_STEP] = 0
        self._integers[_LIFE] = life

    def fits(self, leaves: list[Any]) -> bool:
        """Returns whether a timestep's leaves are arrays of the slot's shapes and dtypes, with finite floats.

        Any thread may call this.
        """
        return len(leaves) == len(self._arrays) and all(
            isinstance(leaf, np.ndarray)
            and leaf.shape == view.shape
            and leaf.dtype == view.dtype
            and (leaf.dtype.kind != "f" or np.isfinite(leaf).all())
            for view, leaf in zip(self._arrays, leaves, strict=True)
        )

    def publish(self, leaves: list[Any], success: Array | int = UNTOLD) -> None:
        """Copies a timestep's leaves, which must fit, and `success` into the slot; increments `step` last.

        Call from the actor's main thread only, and ring the learner after it.
        """
        for view, leaf in zip(self._arrays, leaves, strict=True):
            view[...] = leaf
        self.success[...] = success
        self._floats[_CPU] = time.process_time()
        self._integers[_PUBLISHED_NS] = time.monotonic_ns()
        self._integers[_STEP] += 1

    def answer(self, life: int, step: int) -> None:
        """Marks the action as the answer to the timestep `step` of the life `life`.

        Step 0 of a later life asks for the environments to be reset and to begin it. Call from the thread
        that uses the pool only, and ring the actor after it.
        """
        self._integers[_ANSWERED_LIFE] = life
        self._integers[_ANSWERED_STEP] = step


def _views(layout: SlotLayout, memory: Any, offset: int) -> Iterator[np.ndarray]:
    for array, start in zip(layout.arrays, layout.offsets, strict=True):
        count = int(np.prod(array.shape, dtype=np.int64))
        flat = np.frombuffer(memory, np.dtype(array.dtype), count, offset + start)
        yield flat.reshape(array.shape)


def blank_slot(layout: SlotLayout) -> Slot:
    """Returns a slot in private memory that no actor writes to: life -1, and zeros."""
    slot = Slot(layout, bytearray(layout.size))
    slot.open(-1)
    return slot


def spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    """Returns a spec in JSON types.

    Raises SeedbedError if the observation has other things than dicts, tuples and ArraySpecs.
    """
    kind = type(spec.action).__name__
    data = {
        "observation": _tree_to_json(spec.observation),
        "action": {"kind": kind, **dataclasses.asdict(spec.action)},
    }
    if spec.mirror is None:
        return data
    mirror = {
        "observation": _tree_to_json(spec.mirror.observation),
        "action": _tree_to_json(spec.mirror.action),
    }
    return {**data, "mirror": mirror}


def spec_from_json(data: dict[str, Any]) -> EnvSpec:
    """Returns the spec that `spec_to_json` turned into `data`."""
    observation, action = _tree_from_json(data["observation"]), _action_from_json(data["action"])
    if "mirror" not in data:
        return EnvSpec(observation, action)
    mirror = {key: _tree_from_json(tree) for key, tree in data["mirror"].items()}
    return EnvSpec(observation, action, Mirror(**mirror))


def _tree_to_json(tree: Tree) -> dict[str, Any]:
    if isinstance(tree, ArraySpec):
        return {"shape": list(tree.shape), "dtype": tree.dtype}
    if isinstance(tree, Reflection):
        return {"order": list(tree.order), "signs": list(tree.signs)}
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
    if "order" in data:
        return Reflection(tuple(data["order"]), tuple(data["signs"]))
    return ArraySpec(tuple(data["shape"]), data["dtype"])


def _action_from_json(data: dict[str, Any]) -> ActionSpec:
    if data["kind"] == "Discrete":
        return Discrete(data["n"])
    if data["kind"] == "MultiDiscrete":
        return MultiDiscrete(tuple(data["nvec"]))
    low, high = (tuple(revived(data[name])) for name in ("low", "high"))
    return Box(tuple(data["shape"]), low, high)
