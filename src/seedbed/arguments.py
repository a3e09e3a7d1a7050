"""Checks of what users give to public functions and options, by the annotations. It imports no JAX."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import reprlib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, Union

import numpy as np

from seedbed.errors import SeedbedError
from seedbed.printable import printable

_P = ParamSpec("_P")
_R = TypeVar("_R")
_WORDS = {type(None): "None", Any: "anything", float: "a number", Callable: "a function"}
_LONGEST = 60
"""The most characters of a value that a message shows."""


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns the function with a check: it raises SeedbedError for an argument that is not as annotated.

    Protocols and type variables are not checked, and so are arrays, which are `Any`.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # which says what is missing, with its name
        hints = _hints(function)
        for name, value in given.items():
            if name in hints and signature.parameters[name].kind not in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            ):
                require(f"{function.__name__}: {name}", value, hints[name])
        return function(*args, **kwargs)

    return call


def require(name: str, value: Any, hint: Any) -> None:
    """Raises SeedbedError, with the argument's name, unless a value is of an annotated type."""
    if not _fits(value, hint):
        raise refusal(name, value, f"give {_words(hint)}")


def require_fields(options: Any) -> None:
    """Raises SeedbedError if a field of options is not as annotated, or is a number that JSON lacks.

    Users may annotate their own dataclasses as they like: only Seedbed's are checked.
    """
    if not type(options).__module__.startswith("seedbed."):
        return
    hints = _hints(type(options))
    for field in dataclasses.fields(options):
        if not field.init or field.name not in hints:
            continue
        value, hint = getattr(options, field.name), hints[field.name]
        plain = isinstance(value, float) or not isinstance(value, np.generic)
        if not plain or not _fits(value, hint):
            raise refusal(field.name, value, f"give {_words(hint)}")


def require_ranges(options: Any) -> None:
    """Raises SeedbedError for a pair that falls, in fields named `..._range` or `..._distances`."""
    for field in dataclasses.fields(options):
        pair, named = getattr(options, field.name), field.name.endswith(("_range", "_distances"))
        if named and isinstance(pair, tuple) and len(pair) == 2 and not pair[0] <= pair[1]:
            raise refusal(
                f"{type(options).__name__}.{field.name}", pair, "give the smaller number first"
            )


def refusal(name: str, value: Any, remedy: str) -> SeedbedError:
    """Returns the error for a value that cannot be, with its type and the remedy."""
    return SeedbedError(f"{name} is {shown(value)}: {remedy}")


def at_least(field: str, value: float, least: float) -> None:
    """Raises SeedbedError if an option is less than `least`, or not a number."""
    if not value >= least:
        raise SeedbedError(f"{field} is {value}: it must be {least} or more")


def require_seed(seed: int) -> None:
    """Raises SeedbedError unless a seed is from 0 to 2**63 - 1, as JAX's keys take it."""
    if not 0 <= seed < 1 << 63:
        raise SeedbedError(f"seed is {seed}: it must be from 0 to {(1 << 63) - 1:,}")


def shown(value: Any) -> str:
    """Returns a value in one line, cut short, and its type, such as `'x', a str`; it never raises."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, type):
        return f"the class {printable(value.__qualname__)}"
    kind = _article(type(value).__name__)
    try:
        if hasattr(value, "dtype") and np.ndim(value):
            return f"{value.dtype}{list(np.shape(value))}, {kind}"
        text = _Short().repr(value)
    except Exception:  # whatever it is, this is about its type
        return kind
    text = " ".join(printable(text).split())
    return kind if " at 0x" in text or text.startswith("<") else f"{text}, {kind}"


class _Short(reprlib.Repr):
    """Texts of values, each of a bounded length."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _LONGEST


@functools.lru_cache(maxsize=256)
def _hints(annotated: Any) -> dict[str, Any]:
    """Returns the annotations of a function or class; none if they name what only a type checker imports."""
    try:
        return typing.get_type_hints(annotated)
    except NameError:
        return {}


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is tuple:
        return _fits_tuple(value, inner)
    if hint in (int, float):
        number = np.integer if hint is int else np.integer | np.floating
        plain = int if hint is int else int | float
        return isinstance(value, plain | number) and not isinstance(value, bool)
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint is Path:
        return isinstance(value, os.PathLike)
    if origin is Callable or hint is Callable:
        return callable(value)
    kind = origin or hint
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _fits_tuple(value: Any, inner: tuple[Any, ...]) -> bool:
    if not isinstance(value, tuple | list):
        return False
    if inner[1:] == (...,):
        return all(_fits(each, inner[0]) for each in value)
    return len(value) == len(inner) and all(map(_fits, value, inner))


def _words(hint: Any) -> str:
    """Returns a type as people say it, such as `a str, a Path or None`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        *others, last = dict.fromkeys(map(_words, inner))
        return f"{', '.join(others)} or {last}" if others else last
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        return f"a tuple of {' and '.join(_words(each) for each in inner if each is not ...)}"
    if (origin or hint) in _WORDS:
        return _WORDS[origin or hint]
    return _article(getattr(origin or hint, "__name__", str(hint)))


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {printable(name)}"
