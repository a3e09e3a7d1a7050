"""Options of environments by name: fields of their configuration, and arguments of what makes them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import gymnasium
from gymnasium.envs.registration import load_env_creator

from seedbed import strict_json
from seedbed.arguments import require_fields
from seedbed.envs.factories import load_factory
from seedbed.envs.host.gym import FactoryEnv, GymEnv, require_id
from seedbed.envs.host.pickled import function_of, is_pickled
from seedbed.nearest import did_you_mean, require_options
from seedbed.printable import printable
from seedbed.run.encoding import plain_tuple
from seedbed.types import SeedbedError, UsageError

IDENTITY = ("id", "factory", "game", "kwargs")
"""Fields that identify a host environment. They are not options: the name already has them."""
_Env = TypeVar("_Env")
_OPTION = "--env."
# What `gymnasium.make` itself takes, and a person may want.
_OF_MAKE = (inspect.Parameter("max_episode_steps", inspect.Parameter.KEYWORD_ONLY, annotation=int),)
_TRUTH = {"true": True, "false": False}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


class Words(NamedTuple):
    """The words that follow an option on the command line; there may be none."""

    given: tuple[str, ...]


def with_env_options(env: _Env, given: Mapping[str, Any]) -> _Env:
    """Returns an environment with other options: its own fields, or arguments of what makes it.

    Arguments are those of a Gymnasium environment's class, of a factory, or of EnvPool. A value that is
    `Words` becomes what the argument takes. Fields are left out of these, since the command line has a parser
    for them, but for those of which the defaults depend (`early`). Raises SeedbedError, with the nearest
    name, if there is no such option, or for a value that cannot be.
    """
    made: Any = env
    fields = [f.name for f in dataclasses.fields(made) if f.init and f.name not in IDENTITY]
    changed = {name: plain_tuple(value) for name, value in given.items() if name in fields}
    early = {name: _early(made, name, value) for name, value in changed.items()}
    changed = {name: value for name, value in early.items() if not isinstance(value, Words)}
    others = {name: value for name, value in given.items() if name not in fields}
    if others and not hasattr(made, "kwargs"):
        # The parser of the command line refuses its own, with options of other parts in mind.
        words = [name for name, value in others.items() if not isinstance(value, Words)]
        require_options(type(made).__name__, words, fields)
    elif others:
        known = arguments_of(made)
        named = dict(_named(name, value, known) for name, value in others.items())
        for name, value in named.items():
            _require_known(made, name, value, known, fields)
        values = {name: _value(name, each, known) for name, each in named.items()}
        former = dict(made.kwargs)
        if is_pickled(made):
            former["options"] = {**former.get("options", {}), **values}
        changed["kwargs"] = former if is_pickled(made) else {**former, **values}
    made = dataclasses.replace(made, **changed)
    require_fields(made)
    return made


def arguments_of(env: Any) -> dict[str, inspect.Parameter] | None:
    """Returns the arguments that an environment of the host can be made with; None if any may be.

    Imports what makes it. Raises SeedbedError if that is not there.
    """
    more: Iterable[inspect.Parameter] = ()
    if isinstance(env, GymEnv):
        require_id(env.id)
        entry = gymnasium.spec(env.id.rpartition(":")[2]).entry_point
        # An environment that lacks a package says so when it is made.
        with contextlib.suppress(Exception):
            entry = load_env_creator(entry) if isinstance(entry, str) else entry
        made, more = entry, _OF_MAKE
    elif is_pickled(env):
        made = function_of(**dict(env.kwargs))
    elif isinstance(env, FactoryEnv):
        made = load_factory(env.factory)
    else:
        return None
    parameters = _parameters(made) if callable(made) else None
    if parameters is None:
        return None
    found = {each.name: each for each in (*parameters, *more)}
    open_ = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return _Open(found) if open_ else found


def _parameters(made: Any) -> list[inspect.Parameter] | None:
    """Returns the parameters of a callable, with annotations as types where they can be evaluated."""
    for evaluates in (True, False):
        with contextlib.suppress(Exception):  # annotations may be any text
            return list(inspect.signature(made, eval_str=evaluates).parameters.values())
    return None


class _Open(dict[str, inspect.Parameter]):
    """Arguments besides which others may be."""


def told(env: Any) -> str:
    """Describes the arguments of what makes an environment, a line each, for help; "" if there are none."""
    if not hasattr(env, "kwargs") or is_pickled(env):
        return ""
    head = "  --env.KEY V   is an option of what makes the environment"
    try:
        known = arguments_of(env)
    except Exception:  # help shows the other options all the same
        return head
    names = [
        f"--env.{name.replace('_', '-')}{_usual(each)}"
        for name, each in (known or {}).items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and name != "render_mode"
    ]
    return "\n".join(
        [head + (":" if names else ""), *(f"                {name}" for name in names)]
    )


def words_of(arguments: Iterable[str]) -> dict[str, Any]:
    """Returns the options `--env.KEY VALUE` of a command line, as `Words`."""
    found: dict[str, Any] = {}
    name = None
    for token in arguments:
        if token.startswith("--"):
            name = None
            if token.startswith(_OPTION):
                name = token.removeprefix(_OPTION).replace("-", "_")
                found[name] = Words(())
        elif name is not None:
            found[name] = Words((*found[name].given, token))
    return found


def without_words(arguments: Iterable[str], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """Yields the command line without the options that have become arguments of an environment."""
    skipping = False
    for token in arguments:
        if token.startswith("--"):
            name = token.removeprefix(_OPTION).replace("-", "_")
            plain = name.removeprefix("no_")
            skipping = token.startswith(_OPTION) and (name in kwargs or plain in kwargs)
        if not skipping:
            yield token


def written(kwargs: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command line that give these arguments."""
    words = []
    for name, value in kwargs.items():
        plain = isinstance(value, str) and _guessed(value) == value and not value.startswith("-")
        words += [
            f"{_OPTION}{name.replace('_', '-')}",
            value if plain else strict_json.dumps(value),
        ]
    return words


def _named(name: str, value: Any, known: Mapping[str, inspect.Parameter] | None) -> tuple[str, Any]:
    """Returns the argument that a word is for, and its value: `no_x` is a switch."""
    plain = name.removeprefix("no_")
    off = plain != name and value == Words(())
    if off and (known is None or (name not in known and plain in known)):
        return plain, False
    return name, value


def _require_known(
    env: Any,
    name: str,
    value: Any,
    known: dict[str, inspect.Parameter] | None,
    fields: list[str],
) -> None:
    if known is None or isinstance(known, _Open) or name in known:
        return
    what = getattr(env, "id", "") or getattr(env, "factory", "")
    hint = did_you_mean(name, [*known, *fields], 2, 0.5)
    kind = UsageError if isinstance(value, Words) else SeedbedError
    raise kind(f"{printable(what)} takes no option {name!r}{hint or ': see --help'}")


def _value(name: str, given: Any, known: Mapping[str, inspect.Parameter] | None) -> Any:
    """Returns the value of an argument; `Words` are read as it takes them, by annotation or default."""
    if not isinstance(given, Words):
        return given
    option = f"{_OPTION}{name.replace('_', '-')}"
    kinds = _kinds((known or {}).get(name))
    if len(given.given) > 1:
        raise UsageError(
            f"{option} takes one value, not {printable(' '.join(given.given))}: write a list as JSON, such "
            "as '[1, 2]'"
        )
    if not given.given:
        if kinds and bool in kinds:
            return True
        raise UsageError(f"{option} needs a value")
    return _read(option, given.given[0], kinds)


def _early(env: Any, name: str, given: Any) -> Any:
    """Returns the value of a field that must be known early; what is not, or cannot be read, as it is."""
    if not isinstance(given, Words) or name not in getattr(env, "early", ()):
        return given
    if isinstance(getattr(env, name), tuple):
        return given.given
    number = _number(given.given[0], frozenset({float})) if len(given.given) == 1 else None
    return given if number is None else number


def _read(option: str, text: str, kinds: frozenset[type] | None) -> Any:
    """Reads a text as one of some types, or as JSON if these are not known."""
    if kinds is None:
        return _guessed(text)
    if types.NoneType in kinds and text in ("None", "null"):
        return None
    if bool in kinds and (truth := _TRUTH.get(text.lower())) is not None:
        return truth
    if kinds & {int, float} and (number := _number(text, kinds)) is not None:
        return number
    if str in kinds:
        quoted = _guessed(text) if text.startswith('"') else text
        return quoted if isinstance(quoted, str) else text
    words = [
        word
        for kind, word in _WORDS.items()
        if kind in kinds and not (kind is int and float in kinds)
    ]
    raise UsageError(f"{option} is {printable(text)!r}: give {' or '.join(words)}")


def _number(text: str, kinds: frozenset[type]) -> int | float | None:
    """Returns the number that a text stands for; None if it is none of these types."""
    if int in kinds:
        with contextlib.suppress(ValueError):
            return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    if float in kinds:
        return number
    return int(number) if number.is_integer() else None


def _guessed(text: str) -> Any:
    """Returns what a text is as JSON, or as true or false; else the text."""
    try:
        return strict_json.loads(text)
    except ValueError:
        return _TRUTH.get(text.lower(), text)


def _kinds(parameter: inspect.Parameter | None) -> frozenset[type] | None:
    """Returns which of `_WORDS`, and None, an argument takes, by its annotation or default; None: unknown."""
    if parameter is None:
        return None
    if parameter.annotation is parameter.empty:
        kind = type(parameter.default)
        # A whole number may be meant as any.
        found = {int, float} if kind is int else {kind}
    else:
        found = set(typing.get_args(parameter.annotation) or [parameter.annotation])
    return (
        frozenset(found)
        if found <= {*_WORDS, types.NoneType} and found != {types.NoneType}
        else None
    )


def _usual(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else f" (default: {parameter.default!r})"
