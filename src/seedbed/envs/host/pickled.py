"""Environments that a script or notebook defines itself, which actor processes get by value. No JAX."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from seedbed.envs.host.gym import FactoryEnv
from seedbed.types import SeedbedError

MAKE = "seedbed.envs.host.pickled:make"
"""The factory of such an environment."""
_MOST = 1_000_000
"""The most bytes of a pickled function."""


def pickled(function: Callable[..., Any], name: str) -> FactoryEnv:
    """Returns the configuration of an environment that a function makes which nobody can import.

    Only actors of this machine can make it. Raises SeedbedError if the function cannot be pickled, or holds
    more than 1 MB of data.
    """
    import cloudpickle

    remedy = f"put it into a module, such as my_env.py, and give 'my_env:{name}'"
    try:
        data = cloudpickle.dumps(function)
    except Exception as error:
        raise SeedbedError(
            f"{name} cannot be sent to actors ({type(error).__name__}: {error}): {remedy}"
        ) from error
    if len(data) > _MOST:
        raise SeedbedError(
            f"{name} holds {len(data):,} bytes of data: {remedy}, or read them there"
        )
    return FactoryEnv(MAKE, kwargs={"name": name, "pickled": base64.b64encode(data).decode()})


def is_pickled(env: Any) -> bool:
    """Returns whether an environment is made by a function that is in its configuration by value."""
    return getattr(env, "factory", "") == MAKE


def without_code(env: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an environment's configuration in JSON without the code of a pickled function: its name stays.

    The same class has other bytes in each process.
    """
    kwargs = env.get("kwargs")
    if env.get("factory") != MAKE or not isinstance(kwargs, dict):
        return dict(env)
    return {**env, "kwargs": {name: x for name, x in kwargs.items() if name != "pickled"}}


def called(env: Mapping[str, Any]) -> str:
    """Returns what the environment of a configuration in JSON is called: a game, an id or a function."""
    kwargs = env.get("kwargs")
    if env.get("factory") == MAKE and isinstance(kwargs, dict):
        return str(kwargs.get("name"))
    names = [env.get(part) for part in ("game", "id", "factory", "class", "kind")]
    return str(next((name for name in names if name), "environment"))


def function_of(
    name: str, pickled: str, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Returns a pickled function, which is code; raises SeedbedError if what it needs is not there."""
    del options
    try:
        return pickle.loads(base64.b64decode(pickled))
    except Exception as error:
        raise SeedbedError(
            f"{name} cannot be read back ({type(error).__name__}: {error}): it needs what its script had"
        ) from error


def make(name: str, pickled: str, options: Mapping[str, Any] | None = None) -> Any:
    """Makes an environment with these options; raises SeedbedError if what it needs is not there."""
    return function_of(name, pickled)(**(options or {}))
