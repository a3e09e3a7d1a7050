"""The space of a search: which options vary, within which bounds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from seedbed import strict_json
from seedbed.config.configuration import TrainConfig
from seedbed.config.env_options import with_env_options
from seedbed.config.settle import fitted, with_options
from seedbed.nearest import require_options
from seedbed.printable import printable
from seedbed.run.sizes import require_number
from seedbed.types import SeedbedError

_FORMS = '{"low": 1e-5, "high": 1e-2, "log": true} or a list of values'


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers between two bounds, both included; whole ones if both bounds are."""

    low: float
    high: float
    log: bool = False  # whether their logarithm is uniform

    def __post_init__(self) -> None:
        """Raises SeedbedError unless there are numbers between the bounds."""
        numbers = all(
            isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
            for x in (self.low, self.high)
        )
        if not numbers or not self.low < self.high or not isinstance(self.log, bool):
            raise SeedbedError(f"from {self.low!r} to {self.high!r} is no range of numbers")
        if self.log and self.low <= 0:
            raise SeedbedError(f"log needs a low bound above 0, and this one is {self.low!r}")

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]


Space: TypeAlias = dict[str, Range | Choice]
"""The options that vary: `agent.NAME`, `env.NAME`, or the name of an option of the runtime."""


def read_space(path: Path) -> Space:
    """Reads a space from a JSON file. Raises SeedbedError, in one line, if it is none."""
    try:
        data = strict_json.loads(path.read_text())
    except OSError as error:
        raise SeedbedError(f"{printable(path)} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SeedbedError(f"{printable(path)} is not JSON: {error}") from error
    if not isinstance(data, dict) or not data:
        raise SeedbedError(
            f"{printable(path)} names no options: it must be an object, such as "
            '{"agent.learning_rate": {"low": 1e-5, "high": 1e-2, "log": true}}'
        )
    return {name.replace("-", "_"): _dimension(path, name, each) for name, each in data.items()}


def _dimension(path: Path, name: str, given: Any) -> Range | Choice:
    where = f"{printable(path)}: {name}"
    if isinstance(given, list) and len(given) > 1:
        return Choice(tuple(given))
    if not isinstance(given, dict) or not {"low", "high"} <= set(given):
        raise SeedbedError(f"{where} is {printable(json.dumps(given))}: give {_FORMS}")
    try:
        require_options("a range", given, [field.name for field in dataclasses.fields(Range)])
        return Range(**given)
    except SeedbedError as error:
        raise SeedbedError(f"{where}: {error}") from None


def describe(space: Space) -> dict[str, Any]:
    """Returns a space as plain values, by which two are compared."""
    return json.loads(json.dumps({name: dataclasses.asdict(each) for name, each in space.items()}))


def chosen(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration of a trial, with its sizes chosen; raises SeedbedError as `applied` does."""
    return fitted(applied(config, values))


def applied(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Returns a configuration with the values of a point of a space.

    Raises SeedbedError for an unknown option, with the nearest name, and for a value that cannot be.
    """
    parts: dict[str, dict[str, Any]] = {"agent": {}, "env": {}, "": {}}
    for name, value in values.items():
        part, option = _place(name)
        parts[part][option] = value
    env, agent = (_joined(getattr(config, part), parts[part]) for part in ("env", "agent"))
    config = dataclasses.replace(config, env=with_env_options(config.env, env))
    return with_options(config, parts[""], agent)


def _place(name: str) -> tuple[str, str]:
    """Returns the part of a configuration that has an option, "" for the runtime, and its name there."""
    part, _, option = name.partition(".")
    return (part, option) if part in ("agent", "env") else ("", name)


def _joined(holder: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options in which those of an option, such as `scales.lin_vel`, are joined to its value."""
    joined: dict[str, Any] = {}
    for name, value in options.items():
        outer, _, inner = name.partition(".")
        held = joined.get(outer, getattr(holder, outer, None))
        if inner and dataclasses.is_dataclass(held) and not isinstance(held, type):
            names = [field.name for field in dataclasses.fields(held)]
            require_options(type(held).__name__, [inner], names)
            joined[outer] = dataclasses.replace(held, **{inner: value})
        else:
            joined[name] = value
    return joined


def require_space(config: TrainConfig, space: Space) -> None:
    """Raises SeedbedError if an option is unknown, or cannot have one of its bounds or values."""
    runtime = {field.name for field in dataclasses.fields(config.runtime)}
    for name, dimension in space.items():
        if "." not in name and name not in runtime and hasattr(config.agent, name):
            raise SeedbedError(f"the space names {name!r}; did you mean agent.{name}?")
        ends = (
            dimension.values if isinstance(dimension, Choice) else (dimension.low, dimension.high)
        )
        wrong: list[str] = []
        for value in ends:
            try:
                found = chosen(config, {name: value})
            except SeedbedError as error:
                wrong.append(f"{name}={value!r} of the space: {error}")
            else:
                require_number(found.runtime, "trials share the machine")
        # A value may fit others that vary, as minibatches do that divide the batch; not if none is possible.
        if wrong and (len(wrong) == len(ends) or len(space) == 1):
            raise SeedbedError(wrong[0])
        own = _value(config, name)
        if not isinstance(dimension, Range) or isinstance(own, bool):
            continue
        if isinstance(own, float) and dimension.whole:
            low, high = map(float, ends)
            raise SeedbedError(
                f"the space gives whole numbers to {name}, which is {own}: write {low} and {high}, or a list"
            )
        if isinstance(own, int) and not dimension.whole:
            raise SeedbedError(
                f"the space gives real numbers to {name}, which is {own}: write bounds without a point, or a "
                "list"
            )


def _value(config: TrainConfig, name: str) -> Any:
    """Returns the value that a configuration has for an option of a space; None if it is not known."""
    part, option = _place(name)
    outer, _, inner = option.partition(".")
    holder = {"agent": config.agent, "env": config.env}.get(part, config.runtime)
    value = getattr(holder, outer, dict(getattr(holder, "kwargs", ())).get(option))
    return getattr(value, inner, None) if inner else value


def start_of(config: TrainConfig, space: Space) -> dict[str, Any] | None:
    """Returns the configuration's own point of a space; None if it is not in it."""
    found: dict[str, Any] = {}
    for name, dimension in space.items():
        value = _value(config, name)
        if isinstance(dimension, Choice):
            plain = json.loads(json.dumps(value))
            equal = [each for each in dimension.values if each == plain]
            if not equal:
                return None
            found[name] = json.dumps(equal[0])
        elif isinstance(value, int | float) and dimension.low <= value <= dimension.high:
            found[name] = value
        else:
            return None
    return found


def suggested(trial: Any, space: Space) -> Iterator[tuple[str, Any]]:
    """Yields the name and the value of each option, as an Optuna trial suggests them."""
    for name, dimension in space.items():
        if isinstance(dimension, Choice):
            # Optuna's choices are plain: lists go through it as JSON.
            values = [json.dumps(each) for each in dimension.values]
            found: Any = trial.suggest_categorical(name, values)
        else:
            suggest = trial.suggest_int if dimension.whole else trial.suggest_float
            found = suggest(name, dimension.low, dimension.high, log=dimension.log)
        yield name, value_of(dimension, found)


def value_of(dimension: Range | Choice, stored: Any) -> Any:
    """Returns the value of an option for what Optuna has stored.

    Numbers that are not whole have four digits, of themselves or of the width of their range if that is less:
    more would say what nobody has measured.
    """
    if isinstance(dimension, Choice):
        return json.loads(stored)
    if dimension.whole:
        return int(stored)
    width = dimension.high - dimension.low
    digits = 3 - math.floor(math.log10(min(width, abs(stored) or width)))
    return float(min(max(round(stored, digits), dimension.low), dimension.high))
