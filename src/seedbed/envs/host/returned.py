"""What environments return from `reset` and `step`, held against Gymnasium's contract.

Actors look here only when something is not as it usually is, so that a step costs no more for it.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from seedbed.arguments import shown
from seedbed.types import SeedbedError

_NUMBERS = (float, int, np.floating, np.integer, np.bool_)
"""Types of rewards that need no look."""
_VALUES = {"reset": "observation, info", "step": "observation, reward, terminated, truncated, info"}
_OLD = {
    "reset": "an observation alone is old Gym's form",
    "step": "four values are old Gym's form, with done for terminated or truncated",
}
_RESET = re.compile(r"reset\(\) got an unexpected keyword argument")


class BrokenContract(Exception):
    """Raised for what an environment must not return; the text is without the environment's name."""


def values_of(returned: Any, call: str) -> tuple[Any, ...]:
    """Returns what `call`, reset or step, has returned as a tuple; raises BrokenContract if that fails."""
    wanted = _VALUES[call]
    count = len(wanted.split(", "))
    if isinstance(returned, tuple | list) and len(returned) == count:
        return tuple(returned)
    what = shown(returned)
    if isinstance(returned, tuple | list):
        what = f"{len(returned)} values ({', '.join(type(each).__name__ for each in returned)})"
    raise BrokenContract(f"{call} returned {what}: it must return {wanted} ({_OLD[call]})")


def reward_of(reward: Any) -> float:
    """Returns a reward, also one in an array of one element; raises BrokenContract if it is no number."""
    try:
        if isinstance(reward, _NUMBERS):
            return float(reward)
        array = np.asarray(reward)
        if array.size == 1 and array.dtype.kind in "fiubO":
            return float(array.item())
    except (TypeError, ValueError, OverflowError):
        pass
    raise BrokenContract(f"step returned the reward {shown(reward)}: it must be a finite number")


def flag_of(name: str, value: Any) -> bool:
    """Returns whether `terminated` or `truncated` is set; raises BrokenContract if it is no bool, 0 or 1."""
    if type(value) in (bool, np.bool_):
        return bool(value)
    array = np.asarray(value) if np.isscalar(value) or hasattr(value, "dtype") else None
    if (
        array is not None
        and array.size == 1
        and array.dtype.kind in "biu"
        and array.item() in (0, 1)
    ):
        return bool(array.item())
    raise BrokenContract(f"step returned {shown(value)} as {name}: it must be a bool")


def told(error: Exception) -> str:
    """Returns in one line what an environment has raised, with a remedy where it broke the contract."""
    text = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, BrokenContract):
        return str(error)
    if isinstance(error, TypeError) and _RESET.search(text):
        return f"{text}; it must take both: def reset(self, *, seed=None, options=None)"
    if isinstance(error, NotImplementedError):
        return f"{text.rstrip(': ')}; it must have both reset and step"
    return text


def require_env(env: Any, name: str) -> None:
    """Raises SeedbedError unless what a factory returned is a gymnasium.Env with both spaces."""
    if not isinstance(env, gymnasium.Env):
        raise SeedbedError(
            f"environment {name!r}: the factory returned a {type(env).__name__}, not a gymnasium.Env: return "
            "an instance of a class that is derived from it"
        )
    for part in ("observation_space", "action_space"):
        space = getattr(env, part, None)
        if isinstance(space, spaces.Space):
            continue
        foreign = "" if space is None else f" of {type(space).__module__}"
        raise SeedbedError(
            f"environment {name!r}: its {part} is {shown(space)}{foreign}: set it in __init__ to a space of "
            "gymnasium.spaces"
        )
