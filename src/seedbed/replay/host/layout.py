"""The contents of a replay's rows, and the sizes of its parts.

All objects here are immutable, and any thread may use them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from seedbed import trees
from seedbed.replay.host.kernel_ir import CHUNK, LEAST_BYTES
from seedbed.types import EnvSpec, Replay, SeedbedError, Timestep, Tree, action_array

SEGMENT_BYTES = 64 << 20
"""The size of a segment, about, in bytes. Small replays have smaller segments."""
# With a multiple of this many rows, leaves of any size fill whole pages (of 4,096 bytes).
_PAGE_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The name, shape and dtype of one array of a record, for one environment."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    compressed: bool = False

    @functools.cached_property
    def num_bytes(self) -> int:
        """Returns the size in bytes in one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize

    @property
    def large(self) -> bool:
        """Returns whether a row has at least `LEAST_BYTES` bytes: worth a kernel call, or compression."""
        return self.num_bytes >= LEAST_BYTES

    def zeros(self, *leading: int) -> np.ndarray:
        """Returns a new array `[*leading, *shape]` of zeros."""
        return np.zeros((*leading, *self.shape), self.dtype)


def _leaves(name: str, tree: Tree) -> list[Leaf]:
    flat = trees.leaves(tree)
    names = [name] if len(flat) == 1 else [f"{name}[{i}]" for i in range(len(flat))]
    return [Leaf(n, tuple(a.shape), str(a.dtype)) for n, a in zip(names, flat, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a replay of `num_groups` groups of `group_size` environments each.

    `spec` describes single frames, before stacking. `extras` and `core` are templates: the arrays that acting
    returns for one environment, without a batch axis (their values do not matter). With `compress`, images
    (large uint8 leaves of the observation) are stored compressed.
    """

    experience: Replay
    spec: EnvSpec
    extras: Tree
    core: Tree
    num_groups: int
    group_size: int
    frame_stack: int = 1
    compress: bool = True

    def __post_init__(self) -> None:
        """Raises SeedbedError if nothing could ever be learned with these settings."""
        experience = self.experience
        for name in ("batch", "sequence", "period", "capacity"):
            if getattr(experience, name) < 1:
                raise SeedbedError(
                    f"a replay of {name} {getattr(experience, name)} does not work; take 1 or more"
                )
        if experience.min_size > experience.capacity:
            raise SeedbedError(
                f"learning would wait for {experience.min_size} items (min_size) in a replay of "
                f"{experience.capacity} (capacity); take a smaller min_size"
            )

    @functools.cached_property
    def timestep(self) -> Timestep:
        """Returns the structure of a timestep, with the number 0 for every leaf."""
        observation = trees.map(lambda _: 0, self.spec.observation)
        return Timestep(observation, 0, 0, 0, 0)

    @functools.cached_property
    def observation_leaves(self) -> list[Leaf]:
        """Returns the leaves of the observation, in the order of `trees.leaves`."""

        def packed(leaf: Leaf) -> Leaf:
            image = leaf.dtype == "uint8" and leaf.large
            return dataclasses.replace(leaf, compressed=self.compress and image)

        return [packed(leaf) for leaf in _leaves("observation", self.spec.observation)]

    @functools.cached_property
    def timestep_leaves(self) -> list[Leaf]:
        """Returns the leaves of a timestep, in the order of `trees.leaves`."""
        flags = [Leaf(name, (), "bool") for name in ("terminated", "truncated", "first")]
        return [*self.observation_leaves, Leaf("reward", (), "float32"), *flags]

    @functools.cached_property
    def leaves(self) -> list[Leaf]:
        """Returns the leaves of a record: those of a timestep, of an action, and of extras."""
        action = _leaves("action", action_array(self.spec.action))
        return [*self.timestep_leaves, *action, *_leaves("extras", self.extras)]

    @functools.cached_property
    def core_leaves(self) -> list[Leaf]:
        """Returns the leaves of the core state that is kept with each item."""
        return _leaves("core", self.core)

    @property
    def context(self) -> int:
        """Returns the rows of an item before its learned part: S - 1 for stacking, then `burn_in`."""
        return self.frame_stack - 1 + self.experience.burn_in

    @property
    def item_rows(self) -> int:
        """Returns the number of rows of an item, S - 1 + `experience.steps` for a frame stack of S."""
        return self.context + self.experience.sequence + 1

    @property
    def item_chunks(self) -> int:
        """Returns the largest number of chunks that the rows of one item can lie in."""
        return -(-(self.item_rows - 1) // CHUNK) + 1

    @property
    def num_envs(self) -> int:
        """Returns the number of environments of all groups."""
        return self.num_groups * self.group_size

    @functools.cached_property
    def segment_rows(self) -> int:
        """Returns the rows of a segment, a multiple of 4,096.

        These are about `SEGMENT_BYTES` of uncompressed leaves and at most an eighth of all rows, but never
        fewer than two sets of chunks of a group.
        """
        bytes_ = sum(leaf.num_bytes for leaf in self.leaves if not leaf.compressed)
        wanted = min(SEGMENT_BYTES // bytes_, self._needed_rows // 8) // _PAGE_ROWS
        fewest = -(-2 * self.group_size * CHUNK // _PAGE_ROWS)
        return max(wanted, fewest) * _PAGE_ROWS

    @functools.cached_property
    def num_segments(self) -> int:
        """Returns the number of segments of rows.

        It is enough for all items, for unfinished items, and for one partly used segment at either end.
        """
        usable = self.segment_rows - self.group_size * CHUNK
        return -(-self._needed_rows // usable) + 2

    @property
    def _needed_rows(self) -> int:
        # An episode of L transitions has L + 1 rows and at least L / period items.
        half = self.num_envs * CHUNK * (self.item_chunks + 4)
        return self.experience.capacity * (self.experience.period + 1) + half

    @functools.cached_property
    def core_rows(self) -> int:
        """Returns the rows of a segment of core states, a multiple of 4,096.

        These are about `SEGMENT_BYTES` and at most an eighth of `capacity`, but never fewer than 4,096.
        """
        bytes_ = max(1, sum(leaf.num_bytes for leaf in self.core_leaves))
        wanted = min(SEGMENT_BYTES // bytes_, self.experience.capacity // 8) // _PAGE_ROWS
        return max(wanted, 1) * _PAGE_ROWS

    @property
    def blob_bytes(self) -> int:
        """Returns the bytes of a segment of compressed chunks, a multiple of 4,096.

        It has room for at least two sets of chunks of the largest leaf, uncompressed.
        """
        sizes = [leaf.num_bytes for leaf in self.leaves if leaf.compressed] or [0]
        wanted = min(SEGMENT_BYTES, self._needed_rows * sum(sizes) // 64)
        wanted = max(wanted, 2 * self.group_size * CHUNK * max(sizes), 1)
        return -(-wanted // _PAGE_ROWS) * _PAGE_ROWS

    def describe(self) -> dict[str, Any]:
        """Returns the properties that a saved replay must share with this one to be restored into it.

        The values are of types that JSON preserves.
        """
        kept = ("capacity", "sequence", "period", "burn_in", "priority_exponent")
        words = {leaf.name: f"{leaf.dtype} {leaf.shape}" for leaf in self.leaves + self.core_leaves}
        return {
            **words,
            **{name.replace("_", " "): getattr(self.experience, name) for name in kept},
            "cross episodes": False,  # as saves have it, though items no longer can
            "frame stack": self.frame_stack,
            "compressed leaves": [leaf.name for leaf in self.leaves if leaf.compressed],
            "groups": f"{self.num_groups} of {self.group_size} environments",
            "segments": [self.num_segments, self.segment_rows, self.core_rows, self.blob_bytes],
        }
