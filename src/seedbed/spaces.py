"""What environments show and take: shapes, dtypes and ranges, without a batch axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, TypeAlias

from seedbed.errors import SeedbedError

Array: TypeAlias = Any
"""A numpy or JAX array. The contract is the same for both."""
Tree: TypeAlias = Any
"""A pytree: nested tuples, NamedTuples, lists and dicts of arrays."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The shape and dtype of one environment's array."""

    shape: tuple[int, ...]  # without a batch axis
    dtype: str  # numpy's name, such as float32


@dataclasses.dataclass(frozen=True)
class Discrete:
    """A choice of one of `n` actions: an int32 scalar from 0 to n - 1."""

    n: int  # choices


@dataclasses.dataclass(frozen=True)
class MultiDiscrete:
    """A choice from each of several sets, of `nvec[i]` elements: int32 `[len(nvec)]`."""

    nvec: tuple[int, ...]  # choices of each set


@dataclasses.dataclass(frozen=True)
class Box:
    """A real array: float32 of `shape`. Bounds are per element, flattened, and may be infinite."""

    shape: tuple[int, ...]  # without a batch axis
    low: tuple[float, ...]  # least values, or -inf
    high: tuple[float, ...]  # largest values, or inf

    def __post_init__(self) -> None:
        """Raises SeedbedError unless there is a range for each element; lists become tuples."""
        for name in ("low", "high"):
            if isinstance(bounds := getattr(self, name), list):
                object.__setattr__(self, name, tuple(bounds))
        if not isinstance(self.shape, tuple):
            raise SeedbedError(f"Box: shape is {self.shape!r}; give a tuple, such as (1,)")
        size = math.prod(self.shape)
        for name, bounds in (("low", self.low), ("high", self.high)):
            if not isinstance(bounds, tuple) or len(bounds) != size:
                raise SeedbedError(
                    f"Box of shape {self.shape}: {name} is {bounds!r}; give a tuple of {size} numbers"
                )
        for low, high in zip(self.low, self.high, strict=True):
            if isinstance(low, str) or isinstance(high, str) or not low <= high:
                raise SeedbedError(
                    f"Box of shape {self.shape}: from {low!r} to {high!r} is no range of numbers"
                )


ActionSpec = Discrete | MultiDiscrete | Box


@dataclasses.dataclass(frozen=True)
class Reflection:
    """The image of a vector in a mirror: number i becomes `signs[i]` times number `order[i]`."""

    order: tuple[int, ...]
    signs: tuple[int, ...]  # 1 or -1

    def __post_init__(self) -> None:
        """Raises SeedbedError unless a second mirror undoes the first."""
        size, signs = len(self.order), self.signs
        fits = len(signs) == size and sorted(self.order) == list(range(size))
        if not fits or not all(
            self.order[j] == i and signs[i] in (-1, 1) and signs[i] == signs[j]
            for i, j in enumerate(self.order)
        ):
            raise SeedbedError(
                f"Reflection: with order {self.order} and signs {signs}, a second mirror does not undo the "
                "first: exchange numbers in pairs, with one sign of 1 or -1 for both"
            )


def joined(parts: Iterable[Reflection]) -> Reflection:
    """Returns the reflection of some vectors, one after the other."""
    order: list[int] = []
    signs: list[int] = []
    for part in parts:
        order += [len(signs) + i for i in part.order]
        signs += part.signs
    return Reflection(tuple(order), tuple(signs))


@dataclasses.dataclass(frozen=True)
class Mirror:
    """The symmetry of an environment: reflected actions do to reflected states what actions do to states."""

    observation: Tree  # of Reflection, in the form of the observation, whose leaves are vectors
    action: Reflection  # of a Box


ACTION_MASK = "action_mask"
"""Key of an observation's entry with a number for each choice of the action; 0 forbids the choice."""
PRIVILEGED = "privileged"
"""Key of an observation's entry that only critics see, in training."""


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """The observations (a tree of `ArraySpec`) and actions of an environment, without a batch axis.

    Two keys of an observation that is a dict have a meaning. Under `action_mask` is a number for each choice
    of the action (for each set of a MultiDiscrete in turn), where 0 forbids the choice: an array, or a tree
    of arrays. What is under `privileged` is for critics only: evaluations and exports do not have it.
    """

    observation: Tree  # of ArraySpec
    action: ActionSpec  # Discrete, MultiDiscrete or Box
    mirror: Mirror | None = None  # the symmetry that agents may use; None: none is known

    def __post_init__(self) -> None:
        """Raises SeedbedError if a mask or a mirror does not fit, or there is nothing else to see."""
        if self.mirror is not None:
            _require_mirror(self.mirror, self.observation, self.action)
        if not isinstance(self.observation, dict):
            return
        if not without(self.observation, ACTION_MASK, PRIVILEGED):
            raise SeedbedError(
                f"an observation shows only {', '.join(sorted(self.observation))}; add an entry, such as "
                "'observation', that a policy sees"
            )
        if ACTION_MASK not in self.observation:
            return
        size, choices = _size(self.observation[ACTION_MASK]), num_choices(self.action)
        if size != choices:
            raise SeedbedError(
                f"an observation's {ACTION_MASK} has {size} numbers but the action {self.action} has "
                f"{choices} choices; give one number for each choice, or rename the entry in a wrapper"
            )


def policy_spec(spec: EnvSpec) -> EnvSpec:
    """Returns the spec of what a trained policy sees: without the privileged part."""
    mirror = spec.mirror
    if mirror is not None:
        mirror = Mirror(without(mirror.observation, PRIVILEGED), mirror.action)
    return EnvSpec(without(spec.observation, PRIVILEGED), spec.action, mirror)


def _require_mirror(mirror: Mirror, observation: Tree, action: ActionSpec) -> None:
    """Raises SeedbedError unless a mirror is one of these observations and actions."""

    def fits(reflection: Tree, leaf: Tree) -> bool:
        if isinstance(leaf, dict):
            same = isinstance(reflection, dict) and reflection.keys() == leaf.keys()
            return same and all(fits(reflection[key], leaf[key]) for key in leaf)
        if not isinstance(leaf, ArraySpec):
            same = isinstance(reflection, tuple) and len(reflection) == len(leaf)
            return same and all(map(fits, reflection, leaf))
        return isinstance(reflection, Reflection) and (len(reflection.order),) == leaf.shape

    if not fits(mirror.observation, observation):
        raise SeedbedError(
            "an environment's mirror does not fit its observation: give a Reflection of as many numbers for "
            "each vector, in the observation's own form"
        )
    turned = mirror.action
    if not isinstance(action, Box) or (len(turned.order),) != action.shape:
        raise SeedbedError(f"a mirror of {len(turned.order)} numbers does not fit {action}")
    for i, (j, sign) in enumerate(zip(turned.order, turned.signs, strict=True)):
        bounds = (action.low[j], action.high[j]) if sign > 0 else (-action.high[j], -action.low[j])
        if bounds != (action.low[i], action.high[i]):
            raise SeedbedError(
                f"a mirror makes actions from {bounds[0]} to {bounds[1]} of number {i}, whose bounds are "
                f"{action.low[i]} and {action.high[i]}: they must be the same"
            )


def num_choices(action: ActionSpec) -> int:
    """Returns the number of choices of an action, of all its sets together; a Box has none."""
    if isinstance(action, Discrete):
        return action.n
    return sum(action.nvec) if isinstance(action, MultiDiscrete) else 0


def without(observation: Tree, *keys: str) -> Tree:
    """Returns an observation, or a tree of that form, without the entries of these keys."""
    if not isinstance(observation, dict) or not any(key in observation for key in keys):
        return observation
    return {key: entry for key, entry in observation.items() if key not in keys}


def entry(observation: Tree, key: str) -> Tree:
    """Returns the entry of a key of an observation, or of a tree of that form; None if it has none."""
    return observation.get(key) if isinstance(observation, dict) else None


def _size(tree: Tree) -> int:
    """Returns how many numbers the arrays of a tree of `ArraySpec` have."""
    if isinstance(tree, ArraySpec):
        return math.prod(tree.shape)
    return sum(_size(child) for child in (tree.values() if isinstance(tree, dict) else tree))


def action_array(action: ActionSpec) -> ArraySpec:
    """Returns the shape and dtype of one action."""
    if isinstance(action, Discrete):
        return ArraySpec((), "int32")
    if isinstance(action, MultiDiscrete):
        return ArraySpec((len(action.nvec),), "int32")
    return ArraySpec(action.shape, "float32")
