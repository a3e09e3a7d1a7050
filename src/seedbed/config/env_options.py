"""Options of environments by name: fields of their configuration, and arguments of what makes them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import gymnasium
from gymnasium.envs.registration import load_env_creator

from seedbed import strict_json
from seedbed.arguments import require_fields
from seedbed.envs.factories import load_factory
from seedbed.envs.host.gym import FactoryEnv, GymEnv, require_id
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


class Words(str):
    """The value of an option as it was written on the command line."""


def with_env_options(env: _Env, given: Mapping[str, Any]) -> _Env:
    """Returns an environment with other options: its own fields, or arguments of what makes it.

    Arguments are those of a Gymnasium environment's class, of a factory, or of EnvPool. A value that is
    `Words` becomes what the argument takes; fields are left out of these, since the command line has a parser
    for them. Raises SeedbedError, with the nearest name, if there is no such option, or for a value that
    cannot be.
    """
    made: Any = env
    fields = [f.name for f in dataclasses.fields(made) if f.init and f.name not in IDENTITY]
    changed = {name: plain_tuple(value) for name, value in given.items() if name in fields}
    changed = {name: value for name, value in changed.items() if not isinstance(value, Words)}
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
        changed["kwargs"] = {**dict(made.kwargs), **values}
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
        with contextlib.suppress(
            Exception
        ):  # an environment that lacks a package says so when it is made
            entry = load_env_creator(entry) if isinstance(entry, str) else entry
        made, more = entry, _OF_MAKE
    elif isinstance(env, FactoryEnv):
        made = load_factory(env.factory)
    else:
        return None
    if not callable(made):
        return None
    try:
        parameters = inspect.signature(made, eval_str=True).parameters.values()
    except (TypeError, ValueError, NameError):
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return _Open({each.name: each for each in (*parameters, *more)})
    return {each.name: each for each in (*parameters, *more)}


class _Open(dict[str, inspect.Parameter]):
    """Arguments besides which others may be."""


def told(env: Any) -> str:
    """Describes the arguments of what makes an environment, a line each, for help; "" if there are none."""
    if not hasattr(env, "kwargs"):
        return ""
    try:
        known = arguments_of(env)
    except SeedbedError:
        return ""
    if known is None:
        return "  --env.KEY V   is an option of what makes the environment"
    names = [
        f"--env.{name.replace('_', '-')}{_usual(each)}"
        for name, each in known.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and name != "render_mode"
    ]
    head = "  --env.KEY V   is an option of what makes the environment"
    return "\n".join(
        [head + (":" if names else ""), *(f"                {name}" for name in names)]
    )


def words_of(arguments: Iterable[str]) -> dict[str, Any]:
    """Returns the options `--env.KEY VALUE` of a command line, as `Words`; a switch has the value True."""
    found: dict[str, Any] = {}
    name = None
    for token in arguments:
        if token.startswith("--"):
            name = None
            if token.startswith(_OPTION):
                name = token.removeprefix(_OPTION).replace("-", "_")
                found[name] = Words("")
        elif name is not None and not found[name]:
            found[name] = Words(token)
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
    pairs = (
        (
            f"{_OPTION}{name.replace('_', '-')}",
            value if isinstance(value, str) else strict_json.dumps(value),
        )
        for name, value in kwargs.items()
    )
    return [word for pair in pairs for word in pair]


def _named(name: str, value: Any, known: Mapping[str, inspect.Parameter] | None) -> tuple[str, Any]:
    """Returns the argument that a word is for, and its value: `no_x` is a switch."""
    plain = name.removeprefix("no_")
    off = plain != name and isinstance(value, Words) and not value
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
    if not isinstance(given, Words):
        return given
    parameter = (known or {}).get(name)
    kind = _kind(parameter)
    option = f"{_OPTION}{name.replace('_', '-')}"
    if not given:
        if kind in (bool, None):
            return True
        raise UsageError(f"{option} needs a value")
    if kind is bool:
        if (truth := _TRUTH.get(given.lower())) is None:
            raise UsageError(f"{option} is {printable(given)!r}: give true or false")
        return truth
    if kind in (int, float):
        try:
            number = float(given)
            return int(number) if kind is int and number.is_integer() else kind(given)
        except ValueError:
            raise UsageError(f"{option} is {printable(given)!r}: give a number") from None
    if kind is str:
        return str(given)
    try:
        return strict_json.loads(given)
    except ValueError:
        return str(given)


def _kind(parameter: inspect.Parameter | None) -> type | None:
    """Returns bool, int, float or str if an argument takes that, by its annotation or its default."""
    if parameter is None:
        return None
    if parameter.annotation in (bool, int, float, str):
        return parameter.annotation
    if parameter.annotation is parameter.empty and type(parameter.default) in (
        bool,
        int,
        float,
        str,
    ):
        # A whole number may be meant as any.
        return float if type(parameter.default) is int else type(parameter.default)
    return None


def _usual(parameter: inspect.Parameter) -> str:
    return "" if parameter.default is parameter.empty else f" (default: {parameter.default!r})"
