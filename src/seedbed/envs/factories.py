"""Environments from callables that a person has named, and their keyword arguments. It imports no JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from seedbed.named import import_named
from seedbed.nearest import did_you_mean
from seedbed.types import SeedbedError

Options = tuple[tuple[str, Any], ...] | Mapping[str, Any]
"""Keyword arguments; a configuration keeps them as sorted pairs, so that it can be hashed."""


def options_of(kwargs: Options) -> tuple[tuple[str, Any], ...]:
    """Returns keyword arguments as sorted pairs."""
    pairs = kwargs.items() if isinstance(kwargs, Mapping) else kwargs
    return tuple(sorted((str(key), value) for key, value in pairs))


def import_for(module: str, name: str) -> Any:
    """Imports a module for the environment `name`; raises SeedbedError if a module is missing."""
    try:
        return import_named(module)
    except ModuleNotFoundError as error:
        raise SeedbedError(
            f"environment {name!r}: no module {error.name!r}; install it or start in its folder"
        ) from error


def load_factory(factory: str) -> Callable[..., Any]:
    """Imports the callable `module:callable`; raises SeedbedError if there is none."""
    module_name, separator, path = factory.partition(":")
    if not separator or not module_name or not path:
        raise SeedbedError(f"environment factory {factory!r} is not of the form module:callable")
    found: Any = import_for(module_name, factory)
    for part in path.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, dir(found), 3, 0.5)
            raise SeedbedError(f"environment factory {factory!r}: no {part!r} in it{hint}")
        found = getattr(found, part)
        if isinstance(found, ModuleType):
            raise SeedbedError(
                f"environment factory {factory!r}: {part} is a module; name it before the colon, as in "
                f"{found.__name__}:callable"
            )
    if not callable(found):
        raise SeedbedError(
            f"environment factory {factory!r} is a {type(found).__name__}, not callable"
        )
    return found


def require_defined(factory: str, modules: Sequence[str]) -> None:
    """Raises SeedbedError unless the callable is defined in one of these modules, or below one.

    A module also has what it imports, such as `subprocess.Popen`.
    """
    home = str(getattr(load_factory(factory), "__module__", None))
    if not any(f"{home}.".startswith(f"{module}.") for module in modules):
        raise SeedbedError(
            f"environment factory {factory!r} is defined in {home}, which --allow does not name: give a "
            "function or class that its own module defines"
        )
