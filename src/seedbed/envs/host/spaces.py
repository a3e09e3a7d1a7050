"""Translation of Gymnasium's spaces: observations into arrays, and actions into specs and back.

Float64, and integers that are too wide for int32, become float32. All other types are translated without
loss. A space that cannot be translated raises a SeedbedError that names the space and a remedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from seedbed import trees
from seedbed.arguments import shown
from seedbed.types import (
    ActionSpec,
    Array,
    ArraySpec,
    Box,
    Discrete,
    MultiDiscrete,
    SeedbedError,
    Tree,
)

LARGEST_ONE_HOT = 4096
"""Largest size of a one-hot observation: of a Discrete space, or of a whole MultiDiscrete space."""
MOST_VALUES = 256
"""Largest number of values of each integer in an action Box; each value becomes a choice."""
_NO_BOUND = float(np.finfo(np.float32).max) / 4
"""Size from which a bound counts as infinite: the width between such bounds may overflow float32."""
_KINDS = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}
"""Kinds of dtypes that an array of each kind takes."""
_ROUNDING = 1e-6
"""Relative error at a bound that actions may have, because float32 rounds them."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of an observation, and the function that fills it from a value of its space."""

    path: str
    """Expression for the array in an observation, for error messages."""
    ndim: int
    """Number of axes of a value of the space."""
    spec: ArraySpec
    write: Callable[[np.ndarray, Any], str | None]
    """Writes a value into a row, which must be zeros, or returns the reason why it does not fit."""


def observation_leaves(space: spaces.Space, name: str, path: str = "observation") -> Tree:
    """Translates the observation space of environment `name` into a tree of `Leaf`.

    Discrete and MultiDiscrete become one-hot float32 vectors. Raises SeedbedError if the space is empty,
    has no array form, or needs a one-hot vector longer than `LARGEST_ONE_HOT`.
    """

    def refuse(problem: str) -> SeedbedError:
        return SeedbedError(f"environment {name!r}: {path} {problem}")

    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _branches(space, name, path, refuse)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        if 0 in space.shape:
            raise refuse(f"has shape {space.shape}, which holds nothing; leave it out in a wrapper")
        dtype = _box_dtype(space) if isinstance(space, spaces.Box) else "float32"
        return Leaf(path, len(space.shape), ArraySpec(space.shape, dtype), _write_array)
    if isinstance(space, spaces.Discrete):
        counts, starts = np.array([space.n], np.int64), np.array([space.start], np.int64)
    elif isinstance(space, spaces.MultiDiscrete):
        counts, starts = space.nvec.ravel().astype(np.int64), space.start.ravel().astype(np.int64)
    else:
        raise refuse(
            f"is a {type(space).__name__} space, which has no array form; wrap it into Box, Discrete, "
            "MultiDiscrete, MultiBinary, Dict or Tuple"
        )
    total = int(counts.sum())
    if total > LARGEST_ONE_HOT:
        raise refuse(
            f"is {space}, which would be {total:,} ones and zeros (at most {LARGEST_ONE_HOT:,}); wrap it "
            "into a Box of numbers, or into MultiDiscrete digits"
        )
    shape = () if isinstance(space, spaces.Discrete) else space.nvec.shape
    one_hot = _one_hot_writer(shape, counts, starts)
    return Leaf(path, len(shape), ArraySpec((total,), "float32"), one_hot)


def _branches(
    space: spaces.Dict | spaces.Tuple, name: str, path: str, refuse: Callable[[str], SeedbedError]
) -> Tree:
    children = space.spaces
    if not children:
        raise refuse("is an empty space; leave it out in a wrapper")
    if isinstance(children, dict):
        if not all(isinstance(key, str) for key in children):
            raise refuse(f"has the keys {list(children)}; make them strings in a wrapper")
        return {
            key: observation_leaves(child, name, f"{path}[{key!r}]")
            for key, child in sorted(children.items())
        }
    return tuple(
        observation_leaves(child, name, f"{path}[{i}]") for i, child in enumerate(children)
    )


def _box_dtype(space: spaces.Box) -> str:
    """Chooses a dtype for arrays of a Box.

    Floats and bools become float32. Integers of up to 16 bits and int32 keep their dtype; wider ones become
    int32 if the bounds fit, else float32.
    """
    if space.dtype.kind in "fb":
        return "float32"
    if space.dtype.itemsize <= 2 or space.dtype == np.int32:
        return space.dtype.name
    limit = np.iinfo(np.int32)
    fits = (space.low >= limit.min).all() and (space.high <= limit.max).all()
    return "int32" if fits else "float32"


def spec_leaves(spec: Tree, path: str = "observation") -> Tree:
    """Returns a tree of `Leaf` for observations in the form of a spec, as those of the device are."""
    if isinstance(spec, dict):
        return {key: spec_leaves(child, f"{path}[{key!r}]") for key, child in spec.items()}
    if isinstance(spec, tuple | list):
        children = [spec_leaves(child, f"{path}[{i}]") for i, child in enumerate(spec)]
        return _like(spec, children)
    return Leaf(path, len(spec.shape), spec, _write_array)


def mask_leaf(choices: int, path: str) -> Leaf:
    """Returns the leaf of a mask of actions: an array, or one for each set of choices."""
    return Leaf(path, 1, ArraySpec((choices,), "uint8"), _write_mask)


def _write_mask(row: np.ndarray, value: Any) -> str | None:
    parts = value if isinstance(value, tuple | list) else (value,)
    try:
        mask = np.concatenate([np.ravel(np.asarray(part)) for part in parts])
    except ValueError:
        mask = np.empty(0, object)
    if mask.shape != row.shape or mask.dtype.kind not in "biuf":
        return f"is {shown(value)}, expected {row.size} bools or numbers, one for each choice"
    row[:] = mask != 0
    return None


def batched(leaves: Tree, values: Sequence[Any], where: Callable[[int], str]) -> Tree:
    """Collects observations of n environments into arrays `[n, ...]`.

    Raises SeedbedError if an observation does not fit its leaves or is not finite. The text begins with
    `where(i)`, for the i-th observation.
    """
    if isinstance(leaves, Leaf):
        batch = np.zeros((len(values), *leaves.spec.shape), leaves.spec.dtype)
        for i, value in enumerate(values):
            problem = leaves.write(batch[i, ...], value)
            if problem:
                raise SeedbedError(f"{where(i)}{leaves.path} {problem}")
        if batch.dtype.kind == "f" and not np.isfinite(batch).all():
            i, *place = np.argwhere(~np.isfinite(batch))[0].tolist()
            raise SeedbedError(
                f"{where(i)}{leaves.path} is not finite: {batch[(i, *place)]} at {place}"
            )
        return batch
    is_dict = isinstance(leaves, dict)
    parts = []
    for key in leaves if is_dict else range(len(leaves)):
        column = []
        for i, value in enumerate(values):
            try:
                column.append(value[key])
            except (KeyError, IndexError, TypeError) as error:
                wanted = f"a dict with {list(leaves)}" if is_dict else f"{len(leaves)} parts"
                raise SeedbedError(
                    f"{where(i)}observation lacks a part of its space: it is {shown(value)}, expected "
                    f"{wanted}"
                ) from error
        parts.append(batched(leaves[key], column, where))
    return dict(zip(leaves, parts, strict=True)) if is_dict else _like(leaves, parts)


def encoded(leaves: Tree, observation: Any) -> Tree:
    """Turns an observation, or a batch of them as vector environments give it, into arrays, `[n, ...]`.

    Entries of dicts that the leaves have not are left out. Raises SeedbedError as `batched` does.
    """
    flat, observation = trees.leaves(leaves), _pruned(leaves, observation)

    def size(leaf: Leaf, value: Any) -> int:
        return len(value) if np.ndim(value) > leaf.ndim else -1

    def rows(i: int) -> Any:
        return trees.map(lambda _, value: value[i], leaves, observation)

    def of_batch(leaf: Leaf) -> Leaf:
        return dataclasses.replace(leaf, spec=ArraySpec((n, *leaf.spec.shape), leaf.spec.dtype))

    try:
        sizes = set(trees.leaves(trees.map(size, leaves, observation)))
    except ValueError:
        sizes = {-1}  # ragged, or of another structure: told below
    n = min(sizes, default=-1)
    if n == 0 or (n > 0 and len(sizes) > 1):
        raise SeedbedError(f"observation is a batch of {sorted(sizes)}, which is empty or uneven")
    if n > 0 and not all(leaf.write is _write_array for leaf in flat):
        return batched(leaves, [rows(i) for i in range(n)], lambda i: f"in row {i}, ")
    whole = trees.map(of_batch, leaves) if n > 0 else leaves
    return trees.map(lambda leaf: leaf[0, ...], batched(whole, [observation], lambda i: ""))


def _pruned(leaves: Tree, observation: Any) -> Any:
    """Returns an observation without the entries of dicts that its leaves have not."""
    if isinstance(leaves, dict) and isinstance(observation, dict):
        shared = leaves.keys() & observation.keys()
        return {key: _pruned(leaves[key], observation[key]) for key in shared}
    if not isinstance(leaves, tuple | list) or not isinstance(observation, tuple | list):
        return observation
    if len(leaves) != len(observation):
        return observation
    return _like(leaves, [_pruned(*pair) for pair in zip(leaves, observation, strict=True)])


def _like(tree: Tree, children: list[Any]) -> Tree:
    """Returns a sequence of the type of a node of a tree."""
    return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)


def _write_array(row: np.ndarray, value: Any) -> str | None:
    try:
        array = np.asarray(value)
    except ValueError:
        return f"is {shown(value)}, expected an array of {row.dtype} of shape {row.shape}"
    if array.shape != row.shape or array.dtype.kind not in _KINDS[row.dtype.kind]:
        return _misfit(row, value, array)
    row[...] = array
    if row.dtype.kind != "f" and row.dtype != array.dtype and (row != array).any():
        return f"holds {array[row != array][0]}, which does not fit into {row.dtype}"
    return None


def _misfit(row: np.ndarray, value: Any, array: np.ndarray) -> str:
    if array.dtype.kind not in "biufc":
        return f"is {shown(value)}, expected an array of {row.dtype} of shape {row.shape}"
    if array.shape != row.shape:
        return f"has shape {array.shape}, expected {row.shape}"
    return f"is {array.dtype}, expected {row.dtype}"


def _one_hot_writer(
    shape: tuple[int, ...], counts: np.ndarray, starts: np.ndarray
) -> Callable[[np.ndarray, Any], str | None]:
    offsets = np.cumsum(counts) - counts

    def write(row: np.ndarray, value: Any) -> str | None:
        try:
            array = np.asarray(value)
        except ValueError:
            array = np.empty(0, object)
        if array.shape != shape or array.dtype.kind not in "iu":
            return f"is {shown(value)}, expected integers of shape {shape}"
        choice = array.ravel() - starts
        if (choice < 0).any() or (choice >= counts).any():
            most = starts + counts - 1
            return f"is {value!r}, which lies outside its space, {starts} to {most}"
        row[offsets + choice] = 1
        return None

    return write


class Actions(NamedTuple):
    """The action spec of an environment, and the way back to its action space."""

    spec: ActionSpec
    decode: Callable[[Array], Any]
    """Turns an action in the spec's form, or a batch `[B, ...]`, into the space's dtype and shape.

    Raises SeedbedError if a real action is outside the bounds by more than rounding.
    """


def actions_of(space: spaces.Space, name: str) -> Actions:
    """Translates the action space of environment `name`.

    Discrete, MultiDiscrete and Boxes of floats keep their kind. MultiBinary and Boxes of integers become
    MultiDiscrete: each element is a choice among all its values. Raises SeedbedError for any other space,
    for an empty Box, for integers with more than `MOST_VALUES` values and for bounds without room between.
    """
    if isinstance(space, spaces.Discrete):
        start, dtype = int(space.start), space.dtype
        # [()] turns a single action into a scalar, as the space itself draws it.
        return Actions(
            Discrete(int(space.n)),
            lambda action: (np.asarray(action, np.int64) + start).astype(dtype)[()],
        )
    if isinstance(space, spaces.MultiDiscrete):
        return _choices(space.nvec, space.start, space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return _choices(np.full(space.shape, 2), np.zeros(space.shape, np.int64), space.dtype)
    if isinstance(space, spaces.Box) and 0 in space.shape:
        raise SeedbedError(f"environment {name!r}: actions of {space} hold nothing to choose")
    if isinstance(space, spaces.Box):
        return _real(space, name) if space.dtype.kind == "f" else _integers(space, name)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        remedy = (
            "flatten them into one Box or one MultiDiscrete with gymnasium.wrappers.TransformAction"
        )
    else:
        remedy = "wrap them into Discrete, MultiDiscrete, MultiBinary or a Box"
    raise SeedbedError(
        f"environment {name!r}: actions of a {type(space).__name__} space are not supported; {remedy}"
    )


def _choices(counts: np.ndarray, least: np.ndarray, dtype: Any) -> Actions:
    """Returns actions that choose each element among `counts` values, which begin at `least`.

    `counts` and `least` have the space's shape.
    """
    offset = np.asarray(least).astype(np.int64)

    def decode(action: Array) -> np.ndarray:
        given = np.asarray(action, np.int64)
        values = given.reshape((*given.shape[:-1], *offset.shape)) + offset
        return np.asarray(values.astype(dtype))

    return Actions(MultiDiscrete(tuple(int(n) for n in np.ravel(counts))), decode)


def _integers(space: spaces.Box, name: str) -> Actions:
    """Translates a Box of integers or of bools: each element becomes a choice."""
    # The width between two int64 may not fit into an int64. Python's integers have no limit.
    low, high = (bound.astype(object).ravel() for bound in (space.low, space.high))
    most = max(int(b) - int(a) + 1 for a, b in zip(low, high, strict=True))
    if most > MOST_VALUES:
        raise SeedbedError(
            f"environment {name!r}: actions of {space} have integers of {most:,} values each (at most "
            f"{MOST_VALUES}); wrap them into a Box of floats that are rounded, or into fewer choices"
        )
    counts = space.high.astype(np.int64) - space.low.astype(np.int64) + 1
    return _choices(counts, space.low, space.dtype)


def _real(space: spaces.Box, name: str) -> Actions:
    """Translates a Box of floats; its bounds may be infinite."""
    low, high = (bound.astype(np.float64) for bound in (space.low, space.high))
    low = np.where(low <= -_NO_BOUND, -np.inf, low)
    high = np.where(high >= _NO_BOUND, np.inf, high)
    with np.errstate(over="ignore"):
        room = low.astype(np.float32) < high.astype(np.float32)
    if not room.all():
        raise SeedbedError(
            f"environment {name!r}: actions of {space} have numbers without room for a float32 between "
            "low and high; leave those out in a wrapper"
        )
    least, most = low - _ROUNDING * np.abs(low), high + _ROUNDING * np.abs(high)

    def decode(action: Array) -> np.ndarray:
        given = np.asarray(action, np.float32)
        if not ((given >= least) & (given <= most)).all():
            raise SeedbedError(
                f"environment {name!r}: action {given.tolist()} is not in {space}; the agent must keep "
                "its actions between the bounds of its spec"
            )
        # Float32 may round a bound outwards, so clip to the space's own bounds.
        return np.asarray(np.clip(given.astype(space.dtype), space.low, space.high))

    spec = Box(space.shape, tuple(low.ravel().tolist()), tuple(high.ravel().tolist()))
    return Actions(spec, decode)
