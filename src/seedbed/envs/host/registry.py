"""Names of environments, and the configurations of host environments as JSON.

Modules of on-device environments are imported only when used: they import JAX, without which actors start.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium

from seedbed import strict_json
from seedbed.arguments import refusal
from seedbed.envs.host.atari import AtariEnv, games
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.envs.host.doom import PREFIX as DOOM
from seedbed.envs.host.doom import SCENARIOS, DoomEnv
from seedbed.envs.host.gym import (
    MAIN,
    FactoryEnv,
    GymEnv,
    of_package,
    require_id,
)
from seedbed.envs.host.pickled import is_pickled, pickled
from seedbed.envs.host.pooled import FOOTBALL, PREFIX, EnvPoolEnv, football
from seedbed.envs.host.pooled import SCENARIOS as MATCHES
from seedbed.envs.names import ON_DEVICE, SUITE, camel
from seedbed.envs.specs import spec_of
from seedbed.named import import_named
from seedbed.nearest import did_you_mean, require_options
from seedbed.strict_json import NON_FINITE, revived, spells_number
from seedbed.types import Environment, SeedbedError

_KINDS = {kind.__name__: kind for kind in (AtariEnv, GymEnv, FactoryEnv, EnvPoolEnv, DoomEnv)}
"""Classes of host configurations, by the name that JSON has for them."""
_SHORT_NAMED = ("classic_control", "box2d", "toy_text")
"""Parts of Gymnasium whose environments have short names."""
_OWN_CODE = ("gymnasium.envs.", "ale_py.")
"""How the entry points begin of environments that Seedbed depends on."""
_IDENTIFIER = re.compile(r"^[A-Za-z_][\w.]*$")


def resolve(name: str) -> HostEnvConfig | Environment:
    """Returns the environment with a short name or id, or of `module:callable` or `envpool:ID`.

    Ids are Gymnasium's, and `ALE/Game-v5`. A file `*.xml` is a legged robot that follows a joystick.

    If a short name fits both an on-device environment and a host environment, the on-device environment is
    returned. `module:Class` may name an on-device environment, too. Raises SeedbedError if the name is
    unknown.
    """
    if name.startswith(PREFIX):
        return EnvPoolEnv(name.removeprefix(PREFIX))
    if name.endswith(".xml"):
        legged: Any = importlib.import_module("seedbed.envs.device.robots.legged").Legged
        return legged(xml_file=str(Path(name).expanduser().absolute()))
    if name.endswith(".urdf"):
        raise TaskError(
            f"{name} is URDF, which has no floor, free joint or servos: convert it to MJCF and train that "
            "(docs/train-your-robot.md has how)"
        )
    if ":" in name:
        # Gymnasium's own form, module:EnvId-v0, has a dash, which a Python name cannot have.
        target = name.partition(":")[2]
        if not _IDENTIFIER.match(target):
            return GymEnv(name)
        return _on_device(name) or FactoryEnv(name)
    device = {_plain(short): path for short, path in ON_DEVICE.items()}
    if _plain(name) in device:
        found = _on_device(device[_plain(name)])
        assert found is not None, "the table names on-device environments"
        return found
    if name.startswith(FOOTBALL):
        return football(name.removeprefix(FOOTBALL))
    if name.startswith(DOOM):
        return DoomEnv(name.removeprefix(DOOM))
    if name.startswith("ALE/"):
        return _resolve_ale(name)
    short = _short_names()
    if _plain(name) in short:
        return short[_plain(name)]
    if name in gymnasium.registry:
        require_id(name)
        return GymEnv(name)
    if name.startswith(SUITE):
        hint = did_you_mean(name, [x for x in ON_DEVICE if x.startswith(SUITE)], 4, 0.8)
        raise SeedbedError(
            f"{name!r} is none of dm_control's tasks that are simulated{hint}: `seedbed list` has them, "
            "docs/environments.md says which are not"
        )
    known = [*names(), *gymnasium.registry]
    hint = did_you_mean(name, known, 4, 0.6)
    hint = hint or did_you_mean(_plain(name), known, 4, 0.5, "see `seedbed list`")
    raise SeedbedError(f"unknown environment {name!r}{hint}{of_package(name)}")


def configured(value: Any) -> HostEnvConfig | Environment:
    """Returns the configuration of what makes environments: a function, a class, or an environment made.

    Of an environment it takes Gymnasium's spec, since each actor makes environments of its own: what was set
    on it later is not in those. Functions of
    a script or notebook go to actors of this machine by value. Raises SeedbedError for anything else.
    """
    if isinstance(value, gymnasium.Env):
        return _of_spec(value)
    if isinstance(value, type) and dataclasses.is_dataclass(value):
        raise refusal("what", value, f"give an instance, {value.__name__}(...)")
    if not callable(value):
        raise refusal(
            "what",
            value,
            "give a name such as 'pong', 'CartPole-v1' or 'module:Class', a TrainConfig, a function that "
            "makes an environment, or the configuration of one such as GymEnv('CartPole-v1')",
        )
    module = getattr(value, "__module__", MAIN)
    name = getattr(value, "__qualname__", type(value).__name__)
    # A decorated function may have the name of another one.
    found: Any = None if module == MAIN else sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (
        resolve(f"{module}:{name}") if found is value else pickled(value, name.rpartition(".")[2])
    )


def _of_spec(env: gymnasium.Env[Any, Any]) -> GymEnv:
    """Returns the configuration that makes an environment like this; raises SeedbedError if none does."""
    spec = env.spec
    remedy = "give a function that makes it: each actor makes environments of its own"
    if spec is None:
        raise SeedbedError(
            f"{type(env.unwrapped).__name__} was not made by gymnasium.make: {remedy}"
        )
    if spec.additional_wrappers:
        names = ", ".join(each.name for each in spec.additional_wrappers)
        raise SeedbedError(f"{spec.id} is wrapped in {names}: {remedy}, wrapped")
    kwargs = {name: value for name, value in spec.kwargs.items() if name != "render_mode"}
    usual = gymnasium.registry.get(spec.id)
    if usual is None or usual.max_episode_steps != spec.max_episode_steps:
        kwargs["max_episode_steps"] = spec.max_episode_steps or -1  # no limit
    return GymEnv(spec.id, kwargs=kwargs)


def names() -> list[str]:
    """Returns all short names, sorted: Atari games, on-device environments and others of Gymnasium."""
    taken = {_plain(name) for name in (*games(), *ON_DEVICE)}
    others = [name for name in _gymnasium_names() if name not in taken]
    others += [f"{DOOM}{name}" for name in SCENARIOS] + [f"{FOOTBALL}{name}" for name in MATCHES]
    return sorted([*games(), *ON_DEVICE, *others])


def to_json(config: HostEnvConfig) -> dict[str, Any]:
    """Describes a configuration in JSON types; raises SeedbedError if it is of an unknown class."""
    kind = type(config).__name__
    if _KINDS.get(kind) is not type(config):
        raise SeedbedError(
            f"environments of type {kind} cannot be sent to an actor; use {', '.join(_KINDS)}"
        )
    data = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    if "kwargs" in data:
        data["kwargs"] = dict(data["kwargs"])
    if isinstance(config, GymEnv) and (package := _registered_here(config.id)):
        raise SeedbedError(
            f"environment {config.id!r} was registered in this process, and actor processes do not know it: "
            f"name the module that registers it, {package}:{config.id}"
        )
    for key, value in data.get("kwargs", {}).items():
        try:
            strict_json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            remedy = "actors get options as JSON, so give numbers, texts, lists and dicts of them"
            raise refusal(f"{kind}: the keyword argument {key}", value, remedy) from error
    if spells_number(data):
        raise SeedbedError(
            f"an option of {data} is a text that stands for a number in JSON ({', '.join(NON_FINITE)}): give "
            "the number, or another text"
        )
    return {"kind": kind, **data}


def from_json(data: dict[str, Any]) -> HostEnvConfig:
    """Makes the configuration that `to_json` described; raises SeedbedError for unknown fields."""
    fields = revived(data)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise SeedbedError(f"unknown kind of environment {kind!r}; known are {', '.join(_KINDS)}")
    require_options(kind, fields, [field.name for field in dataclasses.fields(_KINDS[kind])])
    return _KINDS[kind](**fields)


def code_of(config: HostEnvConfig | Environment) -> str:
    """Returns the code that making an environment imports or calls, such as `module:factory`.

    Returns "" if that is Gymnasium's, ALE's or EnvPool's own, or an on-device environment's own class;
    imports nothing.
    """
    inside: Any = config
    while hasattr(type(inside), "step") and hasattr(inside, "env"):
        inside = inside.env  # of a wrapper
    config = inside
    if isinstance(config, EnvPoolEnv):
        # A text may name a program, a file, or options of a program, as `vzd_path` and `game_args` do.
        texts = [each for _, value in config.kwargs for each in _texts(value)]
        return f"{PREFIX}{texts[0]}" if texts else ""
    if is_pickled(config):
        name = dict(inside.kwargs).get("name")
        return f"{name!r}, pickled code"
    if not isinstance(config, GymEnv):
        return str(getattr(config, "factory", ""))
    found = None if ":" in config.id else gymnasium.registry.get(config.id)
    if found is not None and str(found.entry_point).startswith(_OWN_CODE):
        return ""
    # An id that is not registered makes no environment.
    return config.id if ":" in config.id or found is not None else ""


def _texts(value: Any) -> list[str]:
    """Returns the texts in a value of JSON."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for each in pair for text in _texts(each)]
    return (
        [text for each in value for text in _texts(each)] if isinstance(value, tuple | list) else []
    )


def _registered_here(env_id: str) -> str:
    """Returns the package of an id that only this process has registered; "" if others know the id."""
    found = None if ":" in env_id else gymnasium.registry.get(env_id)
    if found is None or str(found.entry_point).startswith(_OWN_CODE):
        return ""
    entry: Any = found.entry_point
    module = entry if isinstance(entry, str) else str(getattr(entry, "__module__", MAIN))
    package = module.partition(":")[0].partition(".")[0]
    # Gymnasium imports these packages itself, in every process.
    plugins = importlib.metadata.entry_points(group="gymnasium.envs")
    if package in {"gymnasium"} | {
        plugin.value.partition(":")[0].partition(".")[0] for plugin in plugins
    }:
        return ""
    return "my_module" if package == MAIN else package


class TaskError(SeedbedError):
    """Raised for a task on the device that is there and cannot be used."""


def _on_device(path: str) -> Environment | None:
    """Makes the on-device environment `module:Class`; returns None if the path names none.

    Raises TaskError if it cannot be made, or cannot be on the device.
    """
    module, _, name = path.partition(":")
    try:
        found = getattr(import_named(module), name, None)
    except ModuleNotFoundError:
        # The caller then makes a host environment of the path, which reports the error.
        return None
    except Exception as error:
        raise TaskError(
            f"the module {module} of {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if isinstance(found, type) and hasattr(found, "step_env") and hasattr(found, "default_params"):
        from seedbed.envs.device.functional import Functional

        return Functional(factory=path)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found) and hasattr(found, "step")):
        return None
    for field in dataclasses.fields(found):
        if field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise TaskError(
                f"the task {path}: its field {field.name!r} has no default; give it one"
            )
    try:
        made: Any = found()
    except Exception as error:
        raise TaskError(f"the task {path}: {error} (see docs/write-a-task.md)") from error
    for part in ("spec", "reset", "episode_steps", "frame_skip"):
        if not hasattr(found, part) and part not in vars(made):
            raise TaskError(f"the task {path} has no {part!r}: see docs/write-a-task.md")
    if not module.startswith("seedbed."):
        try:
            spec_of(made)
        except SeedbedError as error:
            raise TaskError(str(error)) from error
    return made


def _plain(name: str) -> str:
    return re.sub(r"[_\- ]", "", name).lower()


def _resolve_ale(name: str) -> HostEnvConfig:
    match = re.fullmatch(r"ALE/(\w+)-v5", name)
    known = {_plain(game): game for game in games()}
    if match is None or _plain(match[1]) not in known:
        ids = [f"ALE/{camel(game)}-v5" for game in games()]
        hint = did_you_mean(name, ids, 3, 0.5, "the form is ALE/Pong-v5")
        raise SeedbedError(f"unknown environment {name!r}{hint}")
    # v5 is the protocol of Machado et al. (2018): sticky actions are the only source of randomness.
    return AtariEnv(known[_plain(match[1])], stickiness=0.25, noop_max=0, fire_reset=False)


def _short_names() -> dict[str, HostEnvConfig]:
    """Maps plain names to configurations; if Gymnasium has the name too (blackjack), Atari's wins."""
    atari: dict[str, HostEnvConfig] = {_plain(game): AtariEnv(game) for game in games()}
    return {name: GymEnv(env_id) for name, env_id in _gymnasium_names().items()} | atari


def _gymnasium_names() -> dict[str, str]:
    """Maps plain names, such as cartpole, to the id of the newest version."""
    newest: dict[str, tuple[int, str]] = {}
    for env_id, spec in gymnasium.registry.items():
        entry = spec.entry_point
        if isinstance(entry, str) and entry.startswith(
            tuple(f"gymnasium.envs.{part}" for part in _SHORT_NAMED)
        ):
            name, version = _plain(spec.name), spec.version or 0
            newest[name] = max(newest.get(name, (-1, "")), (version, env_id))
    return {name: env_id for name, (_, env_id) in newest.items()}
