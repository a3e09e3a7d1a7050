"""Explains a configuration: every option, its value and where that comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.presets import PRESETS
from seedbed.config.resolve import train_config
from seedbed.config.saved import to_json
from seedbed.config.settle import in_runtime, settle
from seedbed.printable import printable

DESCRIPTION = """Shows what `seedbed train` would run with the same words: every option, its value, and where
that comes from. --json prints the configuration itself, which `seedbed train --config FILE` takes."""
_LONGEST = 60
"""The most characters of a value that are shown."""


class Row(NamedTuple):
    """An option of a settled configuration."""

    option: str  # as on the command line
    value: str
    source: str


def explained(
    given: flags.TrainArguments, more: Callable[[TrainConfig], list[str]] | None = None
) -> tuple[dict[str, Any], list[Row]]:
    """Returns the configuration of a command line of `seedbed train` as JSON, and its options.

    `more` tells what the command adds to its options. Settles it as `train` does, which may make an
    environment of the host; trains nothing and writes nothing. Raises SeedbedError as `settle` does.
    """
    seen: list[TrainConfig] = []

    def change(config: TrainConfig) -> TrainConfig:
        seen.append(config)
        added = more(config) if more is not None else []
        seen.append(flags.override(config, [*given.rest, *added], False))
        return seen[-1]

    config = settle(given.request, change).config
    return to_json(config), list(_rows(given, seen[0], seen[1], config))


def table(rows: list[Row]) -> str:
    """Returns the options as text, a line each, in columns."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"{option:{widths[0]}}  {value:{min(widths[1], 24)}}  {source}".rstrip()
        for option, value, source in rows
    )


def _rows(
    given: flags.TrainArguments, begun: TrainConfig, changed: TrainConfig, config: TrainConfig
) -> Iterator[Row]:
    """Yields the rows: `begun` is before the command line's options, `changed` after them."""
    request = given.request
    usual, mine, named = _usual(given), "this command line", "a default of this kind of task"
    if config.name in PRESETS:
        named = f"the preset {config.name}"
    if request.file or request.resume:
        named = "the file" if request.file else "the run"
    for part in ("env", "agent", "runtime"):
        yield Row(part, type(getattr(config, part)).__name__, "")
    stages = [(usual, named), (begun, "the size of this device"), (changed, mine)]
    if usual is None:
        stages = [(begun, named), (changed, mine)]
    options = [(dict(flags.options_of(stage)), source) for stage, source in stages if stage]
    classes = dict(flags.options_of(_plain(config)))
    for option, value in flags.options_of(config):
        # What makes an environment, such as a robot's file, has taken its options before.
        name = option.removeprefix("--env.").replace("-", "_")
        inside, dot, last = name.rpartition(".")
        switched = f"{inside}{dot}no_{last}"
        made = option.startswith("--env.") and bool(request.env.keys() & {name, switched})
        source, before = mine if made else "", classes.get(option)
        for values, each in options:
            if option in values and values[option] != before:
                source, before = source if made else each, values[option]
        if value != before:
            source = "chosen for this machine"
        yield Row(option, _text(value), source)
    for name, value in dict(getattr(config.env, "kwargs", ())).items():
        source = mine if request.env.keys() & {name, f"no_{name}"} else named
        yield Row(f"--env.{name.replace('_', '-')}", _text(value), source)
    if config.start is not None:
        yield Row("--from", _text(config.start.run), mine if request.start else named)


def _usual(given: flags.TrainArguments) -> TrainConfig | None:
    """Returns the configuration that the name stands for, on a CPU; None for that of a file or a run."""
    request = given.request
    if request.file is not None or request.resume or not isinstance(request.what, str):
        return None
    config = train_config(request.what, request.agent, request.env)
    return config if request.runtime is None else in_runtime(config, request.runtime)


def _plain(config: TrainConfig) -> TrainConfig:
    """Returns a configuration of the same classes with their own defaults, where they have them."""
    agent: Any = type(config.agent)
    env: Any = config.env
    usual = {
        field.name: field.default
        for field in dataclasses.fields(env)
        if field.init and field.default is not dataclasses.MISSING and field.name != "kwargs"
    }
    return dataclasses.replace(
        config, env=dataclasses.replace(env, **usual), agent=agent(), runtime=type(config.runtime)()
    )


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "()"
    text = printable(value)
    return f"{text[:_LONGEST]}..." if len(text) > _LONGEST else text or "''"
