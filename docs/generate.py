"""The parts of the documentation that the code says itself: options, metrics, presets and the API.

A page has a line `<!-- generated: NAME -->` where `PARTS[NAME]()` goes, as Markdown.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import io
import itertools
import re
import sys
import textwrap
import tokenize
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import seedbed
import seedbed.api
import seedbed.physics
import seedbed.simd
import seedbed.types
from described import SECTIONS
from seedbed import cli
from seedbed.actors import command as actor_command
from seedbed.config import flags, resolve
from seedbed.config.presets import PRESETS, description
from seedbed.config.saved import ENV_BOUND
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.gym import GymEnv
from seedbed.envs.names import ON_DEVICE
from seedbed.launch import joining, key
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig
from seedbed.run.trust import AGENTS
from seedbed.testing import checks, counting, probes, trainers
from seedbed.types import SeedbedError, StorageError, UsageError
from seedbed.viewer import evaluate

PUBLIC = (seedbed, seedbed.physics, seedbed.simd)
"""The modules whose every public name has an entry."""
_MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def filled(text: str) -> str:
    """Returns a page in which every mark is replaced by its part; raises KeyError for an unknown one."""
    return _MARK.sub(lambda found: PARTS[found[1]](), text)


# Options


def sentences(kind: type) -> dict[str, str]:
    """Returns the sentence about each field of a dataclass or NamedTuple, also of inherited fields.

    It is the string below the field or, in a NamedTuple, the comment at the field. A field without one has
    that of the base class.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "seedbed" and "__annotations__" in vars(base):
            source = textwrap.dedent(inspect.getsource(base))
            found |= _strings(source) | _comments(source)
    return found


def _strings(source: str) -> dict[str, str]:
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return found


def _comments(source: str) -> dict[str, str]:
    """Returns the comments in the lines of fields, and in the lines directly above them."""
    comments, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.removeprefix("#").strip()
            if token.line.lstrip().startswith("#"):
                alone.add(token.start[0])
    found = {}
    for field in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(field, ast.AnnAssign):
            continue
        first = field.lineno
        while first - 1 in alone:
            first -= 1
        lines = range(first, (field.end_lineno or first) + 1)
        if text := " ".join(comments[line] for line in lines if line in comments):
            found[ast.unparse(field.target)] = text
    return found


def option_rows(kind: type, left_out: Iterable[str] = ()) -> Iterator[tuple[str, Any, str]]:
    """Yields name, default and sentence of each option of a dataclass; "" if it has none."""
    said = sentences(kind)
    for field in dataclasses.fields(kind):
        if field.init and field.name not in left_out:
            default = field.default
            if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            yield field.name, default, said.get(field.name, "")


def configured() -> dict[str, tuple[type, str, tuple[str, ...]]]:
    """Returns each part of a run's configuration: its dataclass, its prefix and the fields left out."""
    fixed = ("id", "factory", "game", "kwargs")
    parts: dict[str, tuple[type, str, tuple[str, ...]]] = {
        "Central runtime": (CentralConfig, "", ()),
        "Fused runtime": (FusedConfig, "", ()),
        "Parameter servers": (ParamServerConfig, "", ()),
    }
    for name in AGENTS:
        kind = resolve.load_agent_class(name)
        parts[f"Agent {name}"] = (kind, "agent.", ("spec",))
    parts["Atari"] = (AtariEnv, "env.", fixed)
    parts["Gymnasium, and module:factory"] = (GymEnv, "env.", fixed)
    for name in sorted(ON_DEVICE):
        parts[f"Task {name}"] = (type(resolve.resolve_env(f"{ON_DEVICE[name]}")), "env.", ENV_BOUND)
    return parts


def _options(*titles: str) -> Callable[[], str]:
    def part() -> str:
        chosen = {title: entry for title, entry in configured().items() if title.startswith(titles)}
        return "\n\n".join(_option_section(title, *entry) for title, entry in chosen.items())

    return part


def _option_section(title: str, kind: type, prefix: str, left_out: tuple[str, ...]) -> str:
    rows = [
        (f"`--{prefix}{name.replace('_', '-')}`", f"`{_shown(default)}`", sentence)
        for name, default, sentence in option_rows(kind, left_out)
    ]
    place = f"`{kind.__module__}.{kind.__qualname__}`"
    return f"### {title}\n\n{place}\n\n{_table(('option', 'default', 'meaning'), rows)}"


def _shown(value: Any) -> str:
    return "''" if value == "" else str(value)


def presets() -> str:
    """Returns a section for each preset: what it is, and how its options differ from the defaults."""
    sections = []
    for name in PRESETS:
        config = PRESETS[name]()
        changed = [
            f"`--{prefix}{field.replace('_', '-')} {_shown(value)}`"
            for prefix, part in (
                ("env.", config.env),
                ("agent.", config.agent),
                ("", config.runtime),
            )
            for field, value in _changes(part)
        ]
        kinds = " / ".join(
            type(part).__name__ for part in (config.env, config.agent, config.runtime)
        )
        sections.append(f"### {name}\n\n{description(name)} {kinds}.\n\n{', '.join(changed)}")
    return "\n\n".join(sections)


def _changes(part: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        if field.init and field.name != "spec" and value != default:
            yield field.name, value


def commands() -> str:
    """Returns the options of the commands besides `train`."""
    parsers: dict[str, argparse.ArgumentParser] = {}
    of = {"evaluate": evaluate, "actor": actor_command, "host": joining, "key": key}
    for name, module in of.items():
        parsers[name] = cli._Parser(prog=f"seedbed {name}", description=module.DESCRIPTION)
        module.declare(parsers[name])
    return "\n\n".join(_command(name, parser) for name, parser in parsers.items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        words = [*action.option_strings] or [str(action.metavar or action.dest)]
        if action.option_strings and action.nargs != 0:
            words[-1] += f" {action.metavar or action.dest.upper()}"
        if "--help" not in words and action.help != argparse.SUPPRESS:
            rows.append((f"`{', '.join(words)}`", action.help or ""))
    usage = " ".join((parser.description or "").split())
    return f"### seedbed {name}\n\n{usage}\n\n{_table(('option', 'meaning'), rows)}"


def train_help() -> str:
    """Returns the general options of `seedbed train`, as its help shows them."""
    return f"```text\n{flags.HELP}\n```"


def metrics() -> str:
    """Returns a table for each section of the metrics."""
    sections = []
    for title, remark, described in SECTIONS:
        rows = [(f"`{name}`", sentence) for name, sentence in described.items()]
        sections.append(f"## {title}\n\n{remark}\n\n{_table(('metric', 'meaning'), rows)}")
    return "\n\n".join(sections)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


# The API


def api(module: types.ModuleType, more: Iterable[Any] = ()) -> str:
    """Returns entries for the public names of a module, and for other objects that these return."""
    found = [getattr(module, name) for name in public_names(module)]
    entries = [_entry(module.__name__, thing) for thing in [*found, *more] if callable(thing)]
    return f"```{{py:currentmodule}} {module.__name__}\n```\n\n" + "\n\n".join(entries)


def public_names(module: types.ModuleType) -> list[str]:
    """Returns the names in `__all__`, or those that the module defines, without a leading underscore."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, thing in vars(module).items()
            if getattr(thing, "__module__", None) == module.__name__ and name[0] != "_"
        ]
    return [name for name in names if name[0] != "_"]


def _entry(module: str, thing: Any) -> str:
    if not isinstance(thing, type):
        head = f"{{py:function}} {module}.{thing.__name__}{_signature(thing)}"
        return _directive(head, docstring(thing))
    named = (getattr(sys.modules[module], name) for name in public_names(sys.modules[module]))
    public = any(thing is each for each in named)
    place = module if public else thing.__module__
    return _directive(f"{{py:class}} {place}.{thing.__name__}", _class_body(thing))


def _class_body(kind: type) -> str:
    parts = [docstring(kind)]
    fields = list(getattr(kind, "_fields", ())) or [
        field.name for field in getattr(kind, "__dataclass_fields__", {}).values()
    ]
    if fields:
        said = sentences(kind)
        rows = [(f"`{name}`", f"`{_kind(kind, name)}`", said.get(name, "")) for name in fields]
        parts.append(_table(("field", "type", "meaning"), rows))
    for name, member in vars(kind).items():
        if name[0] == "_" or name in fields:
            continue
        if isinstance(member, classmethod | staticmethod | types.FunctionType):
            function = getattr(member, "__func__", member)
            flag = "\n:classmethod:\n" if isinstance(member, classmethod) else ""
            body = flag + docstring(function)
            parts.append(_directive(f"{{py:method}} {name}{_signature(function)}", body, 3))
        elif getter := getattr(member, "fget", None) or getattr(member, "func", None):
            parts.append(_directive(f"{{py:property}} {name}", docstring(getter), 3))
    return "\n\n".join(parts)


def _kind(owner: type, name: str) -> str:
    for base in owner.__mro__:
        if name in vars(base).get("__annotations__", {}):
            found = vars(base)["__annotations__"][name]
            return (
                found if isinstance(found, str) else getattr(found, "__forward_arg__", str(found))
            )
    return ""


def _signature(function: Callable[..., Any]) -> str:
    found = inspect.signature(function)
    parameters = [p for name, p in found.parameters.items() if name not in ("self", "cls")]
    # `warn`'s default would show an address.
    shown = [
        p.replace(default=_Word("...")) if callable(p.default) and p.default is not p.empty else p
        for p in parameters
    ]
    return str(found.replace(parameters=shown)).replace("'", "")


class _Word:
    """A default that is shown as one word."""

    def __init__(self, word: str) -> None:
        self._word = word

    def __repr__(self) -> str:
        return self._word


def docstring(thing: Any) -> str:
    """Returns a docstring as Markdown: its `Raises:` becomes a list."""
    text = inspect.getdoc(thing) or ""
    parts = re.split(r"\nRaises( \([^)]*\))?:\n", text)
    if len(parts) == 1:
        return text
    before, when, listed = parts
    items = re.sub(r"^(\w+):", r"- `\1`:", textwrap.dedent(listed), flags=re.MULTILINE)
    return f"{before}\n**Raises**{when or ''}\n\n{items}"


def _directive(head: str, body: str, fence: int = 4) -> str:
    marks = ":" * fence
    return f"{marks}{head}\n{body}\n{marks}"


PARTS: dict[str, Callable[[], str]] = {
    "train-help": train_help,
    "runtimes": _options("Central", "Fused", "Parameter"),
    "agents": _options("Agent"),
    "host-environments": _options("Atari", "Gymnasium"),
    "tasks": _options("Task"),
    "presets": presets,
    "commands": commands,
    "metrics": metrics,
    "api-seedbed": lambda: api(seedbed, [seedbed.api.Policy]),
    "api-physics": lambda: api(seedbed.physics),
    "api-simd": lambda: api(seedbed.simd),
    "api-testing": lambda: "\n\n".join(
        api(module) for module in (checks, trainers, probes, counting)
    ),
    "api-types": lambda: api(seedbed.types, [SeedbedError, StorageError, UsageError]),
}
"""What each name in a mark stands for."""
