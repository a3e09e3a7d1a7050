"""Turns names into presets, agents and environments, and a run's configuration into JSON and back.

Agents are imported only when they are used, because they import JAX, which `seedbed list` does not need.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any

from seedbed import defaults
from seedbed.arguments import refusal, require, require_fields
from seedbed.envs.host import registry
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.envs.host.gym import of_package
from seedbed.machine import require_linux
from seedbed.named import import_named
from seedbed.paramserver.options import ParamServerConfig
from seedbed.presets import PRESETS, TrainConfig
from seedbed.printable import printable
from seedbed.run.encoding import BOUND, construct, decode, encode, plain_tuple
from seedbed.run.folder import CONFIG, RunFolder
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.run.trust import AGENTS, Trust
from seedbed.strict_json import revived
from seedbed.types import Agent, Environment, SeedbedError

ENV_BOUND = ("model",)
"""Fields of on-device environments that wrappers fill. They are not options and are not saved either."""
_PARTS = [name for name in vars(Agent) if not name.startswith("_")]
"""What every agent has: the methods and properties of the contract."""
RUNTIMES = {"central": CentralConfig, "fused": FusedConfig, "paramserver": ParamServerConfig}
"""The options class of each runtime, by the key under which a saved configuration has them."""


def description(preset: str) -> str:
    """Returns a preset's description, which is the docstring of its function in `PRESETS`."""
    return " ".join((PRESETS[preset].__doc__ or "").split())


def require_trainable(what: Any, agent: str | None) -> None:
    """Raises SeedbedError, which says what to write instead, unless `api.train` can train `what`.

    That is a name, a whole TrainConfig, or the configuration of an environment. Imports and makes nothing.
    """
    if isinstance(what, TrainConfig):
        if agent is not None:
            raise SeedbedError(
                f"agent is {agent!r}, but the TrainConfig has one: leave agent out, or replace the "
                "configuration's"
            )
        _require_env("TrainConfig.env", what.env)
        require(
            "TrainConfig.runtime", what.runtime, CentralConfig | FusedConfig | ParamServerConfig
        )
        require("TrainConfig.name", what.name, str)
        if not _is_agent(what.agent):
            remedy = "give an agent, such as seedbed.agents.ppo.Ppo()"
            raise refusal("TrainConfig.agent", what.agent, remedy)
        require_fields(what.agent)
    elif not isinstance(what, str):
        _require_env("what", what)


def _is_options(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_agent(value: Any) -> bool:
    """Returns whether a value has all parts of an agent, without reading any."""
    fields = {field.name for field in dataclasses.fields(value)} if _is_options(value) else set()
    return all(part in fields or hasattr(type(value), part) for part in _PARTS)


def _require_env(name: str, env: Any) -> None:
    """Raises SeedbedError unless `env` is the configuration of an environment, of any kind."""
    if not (_is_options(env) and (is_on_device(env) or hasattr(env, "make"))):
        raise refusal(name, env, registry.advice(env))
    require_fields(env)


def train_config(
    target: str | HostEnvConfig | Environment, agent: str | None = None
) -> TrainConfig:
    """Returns the configuration for the name of a preset or of an environment, or for an environment.

    `pong/impala` is a preset, and `pong` means the first preset of that environment. `agent` is a name of
    `AGENTS` or `module:Class`; `pong/dqn` means `pong` with agent `dqn`. If there is no such preset, an
    agent of `AGENTS` gets its settings from the table `defaults.ROWS`. A class keeps its own defaults; it
    trains for as many steps as the environment's usual agent and is evaluated as often (to find that agent,
    an environment of the host is made and closed).

    Raises SeedbedError for unknown names, and if the preset has another agent than `agent`.
    """
    if not isinstance(agent, str | None):
        raise SeedbedError(
            f"agent is {agent!r}; give its name, such as ppo or my_module:MyAgent, or train a TrainConfig"
        )
    if not isinstance(target, str):
        return _configured(target, agent, "")
    if target in PRESETS:
        if agent is not None and not target.endswith(f"/{agent}"):
            raise SeedbedError(
                f"preset {target} has an agent of its own: leave out --agent {agent}, or name the "
                f"environment, {target.partition('/')[0]}"
            )
        return dataclasses.replace(PRESETS[target](), name=target)
    head, _, tail = target.rpartition("/")
    if agent is None and tail in AGENTS and _is_environment(head):
        return train_config(head, tail)
    same_env = [name for name in PRESETS if name.partition("/")[0] == target]
    name = f"{target}/{agent}" if agent else next(iter(same_env), None)
    if name in PRESETS:
        return dataclasses.replace(PRESETS[name](), name=name)
    preset = PRESETS[same_env[0]]() if same_env else None
    return _configured(preset.env if preset else resolve_env(target), agent, target, preset)


def _configured(
    env: HostEnvConfig | Environment,
    agent: str | None,
    name: str,
    preset: TrainConfig | None = None,
) -> TrainConfig:
    """Returns the configuration of an environment; a preset of it says how long an agent of users trains."""
    if agent is None or agent in AGENTS:
        return defaults.configure(env, agent, name)
    made = _made(agent)
    usual = (preset or defaults.configure(env)).runtime
    options = FusedConfig if is_on_device(env) else CentralConfig
    runtime = options(steps=usual.steps, evaluate_every=usual.evaluate_every)
    return TrainConfig(env, made, runtime, f"{name}/{agent}".lstrip("/"))


def in_runtime(config: TrainConfig, name: str) -> TrainConfig:
    """Returns a configuration with the runtime of this name; options that both runtimes have are kept.

    Raises SeedbedError if there is no such runtime, or if the environment cannot train in it.
    """
    if name not in RUNTIMES:
        near = difflib.get_close_matches(name, RUNTIMES, n=1, cutoff=0.0)
        raise SeedbedError(f"no runtime {name!r}; did you mean {near[0]}?")
    kind, former = RUNTIMES[name], config.runtime
    if isinstance(former, kind):
        return config
    if (kind is FusedConfig) != is_on_device(config.env):
        where = "on the device" if is_on_device(config.env) else "of the host"
        others = "fused" if is_on_device(config.env) else "central or paramserver"
        raise SeedbedError(
            f"{type(config.env).__name__} is an environment {where}: it trains with --runtime {others}"
        )
    # 0 stands for a choice that only the former runtime makes.
    shared = {
        field.name: getattr(former, field.name)
        for field in dataclasses.fields(kind)
        if getattr(former, field.name, 0) or field.name in ("seed", "evaluate_every")
    }
    return dataclasses.replace(config, runtime=kind(**shared))


def require_platform(options: Any) -> None:
    """Raises SeedbedError if the runtime of these options needs Linux, and this is another system."""
    if not isinstance(options, FusedConfig):
        kind = "paramserver" if isinstance(options, ParamServerConfig) else "central"
        require_linux(
            f"the {kind} runtime",
            "train an environment of the device here, in the fused runtime (see `seedbed list`), or this "
            "one on Linux",
        )


def resumed(run: Path, target: str | None, agent: str | None, trust: bool = False) -> TrainConfig:
    """Returns the configuration of the run in a folder; `trust` is that of `saved_config`.

    Raises SeedbedError if a target or an agent is given that is not the run's own.
    """
    saved = saved_config(RunFolder.read(run), trust)
    env, _, own_agent = saved.name.rpartition("/")
    if target not in (None, env, saved.name) or agent not in (None, own_agent):
        asked = " ".join(part for part in (target, agent and f"--agent {agent}") if part)
        raise SeedbedError(
            f"the run in {printable(run)} trains {saved.name or 'what has no name'}, not {asked}: name "
            "no preset to "
            "go on with it, or another folder for a new run"
        )
    return saved


def resolve_env(target: str) -> HostEnvConfig | Environment:
    """Makes the configuration of an environment from a short name, a Gymnasium id or `module:factory`.

    Raises SeedbedError, with similar names, if there is no such environment.
    """
    try:
        return registry.resolve(target)
    except registry.TaskError:
        raise
    except SeedbedError as error:
        head, _, tail = target.rpartition("/")
        near = difflib.get_close_matches(target, PRESETS, n=3, cutoff=0.7)
        near += [name for name in _near_envs(head, tail) if name not in near]
        if not near or ":" in target:
            raise
        raise SeedbedError(
            f"no preset or environment {target!r}; did you mean {', '.join(near[:4])}?"
            f"{of_package(target)}"
        ) from error


def _is_environment(name: str) -> bool:
    if any(preset.partition("/")[0] == name for preset in PRESETS):
        return True
    try:
        registry.resolve(name)
    except registry.TaskError:
        # It is there; whoever makes it says what is wrong.
        return True
    except SeedbedError:
        return False
    return True


def _near_envs(head: str, tail: str) -> list[str]:
    """Returns known environments whose names are close to `head`, or to `tail` if `head` is empty."""
    known = [*registry.names(), *(preset.partition("/")[0] for preset in PRESETS)]
    names = difflib.get_close_matches(head or tail, known, n=3, cutoff=0.7)
    return list(dict.fromkeys(names))


def load_agent_class(name: str) -> type:
    """Imports an agent's class, named in `AGENTS` or as `module:Class`.

    Raises SeedbedError if it cannot be found, is not a dataclass, or lacks a part of `types.Agent`.
    """
    path = AGENTS.get(name, name)
    module_name, separator, class_name = path.partition(":")
    if not separator:
        near = difflib.get_close_matches(name, AGENTS, n=2, cutoff=0.5) or list(AGENTS)
        raise SeedbedError(
            f"unknown agent {name!r}; did you mean {', '.join(near)}? Your own is named module:Class"
        )
    try:
        module = import_named(module_name)
    except ModuleNotFoundError as error:
        raise SeedbedError(
            f"agent {name!r}: no module {error.name!r}; install it or start in its folder"
        ) from error
    except Exception as error:
        raise SeedbedError(
            f"agent {name!r}: {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if found is None:
        near = difflib.get_close_matches(class_name, dir(module), n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise SeedbedError(f"agent {name!r}: {module_name} has no {class_name!r}{hint}")
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise SeedbedError(f"agent {name!r} is not a dataclass: see seedbed.types.Agent")
    fields = {field.name for field in dataclasses.fields(found)}
    missing = [part for part in _PARTS if part not in fields and not hasattr(found, part)]
    if missing:
        raise SeedbedError(f"agent {name!r} has no {missing[0]!r}: see seedbed.types.Agent")
    if "spec" not in fields:
        raise SeedbedError(
            f"agent {name!r}: its `spec` is no field; declare it as `spec: EnvSpec | None = None`"
        )
    return found


def _made(name: str) -> Any:
    """Makes an agent named `module:Class` with its defaults; raises SeedbedError if a field has none."""
    kind = load_agent_class(name)
    for field in dataclasses.fields(kind):
        none = field.default is field.default_factory is dataclasses.MISSING
        if none and field.init:
            raise SeedbedError(
                f"agent {name!r}: its field {field.name!r} has no default; give it one"
            )
    try:
        return kind()
    except SeedbedError:
        raise
    except Exception as error:
        raise SeedbedError(
            f"agent {name!r} cannot be made with its defaults: {type(error).__name__}: {error}"
        ) from error


def to_json(config: TrainConfig) -> dict[str, Any]:
    """Returns a configuration as JSON types; raises SeedbedError if an option cannot be saved."""
    env = config.env
    env = encode(env, ENV_BOUND) if is_on_device(env) else registry.to_json(env)
    (kind,) = (name for name, found in RUNTIMES.items() if type(config.runtime) is found)
    return {
        "name": config.name,
        "env": env,
        "agent": encode(config.agent, BOUND),
        kind: dataclasses.asdict(config.runtime),
    }


def saved_config(folder: RunFolder, trust: bool = False) -> TrainConfig:
    """Returns the configuration that a run's folder holds.

    Raises Untrusted if it names code of users, and others could have written it, unless the user has said
    `trust`; SeedbedError as `from_json` does.
    """
    file = folder.path / CONFIG
    return from_json(folder.read_config(), Trust(folder.path, file, trust))


def from_json(data: dict[str, Any], trust: Trust) -> TrainConfig:
    """Makes a configuration from the result of `to_json`, which `trust` tells the file of.

    Imports the classes of the agent and of an on-device environment. Raises SeedbedError if that fails, or
    if a part is missing or has an option that is unknown or cannot be.
    """
    data = revived(data)
    try:
        kind = next(name for name in [*RUNTIMES, "runtime"] if name in data or name == "runtime")
        options = {name: plain_tuple(value) for name, value in data[kind].items()}
        env = data["env"]
        return TrainConfig(
            decode(env, trust) if "class" in env else _host_env(env, trust),
            decode(data["agent"], trust),
            construct(RUNTIMES[kind], options),
            str(data.get("name", "")),
        )
    except SeedbedError:
        raise
    # Options are given to the classes as they are, and these may refuse them in any way.
    except Exception as error:
        raise SeedbedError(
            f"{printable(trust.file)} is damaged or incomplete ({type(error).__name__}: {error}): "
            "restore it, or "
            "start a new run"
        ) from error


def _host_env(data: dict[str, Any], trust: Trust) -> HostEnvConfig:
    env = registry.from_json(data)
    trust.require_env(env)
    return env
