"""Turns names into presets, agents and environments.

Agents are imported only when they are used, because they import JAX, which `seedbed list` does not need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from seedbed.config import defaults
from seedbed.config.configuration import TrainConfig
from seedbed.config.env_options import with_env_options
from seedbed.config.presets import PRESETS
from seedbed.envs.host import registry
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.envs.host.gym import of_package
from seedbed.named import import_named
from seedbed.nearest import did_you_mean, nearest
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.run.trust import AGENTS
from seedbed.types import Agent, Environment, SeedbedError

PARTS = [name for name in vars(Agent) if not name.startswith("_")]
"""What every agent has: the methods and properties of the contract."""


def train_config(
    target: str | HostEnvConfig | Environment,
    agent: str | None = None,
    env: Mapping[str, Any] = MappingProxyType({}),
) -> TrainConfig:
    """Returns the configuration for the name of a preset or of an environment, or for an environment.

    `pong/impala` is a preset, and `pong` means the first preset of that environment. `agent` is a name of
    `AGENTS` or `module:Class`; `pong/dqn` means `pong` with agent `dqn`. If there is no such preset, an
    agent of `AGENTS` gets its settings from the table `defaults.ROWS`. A class keeps its own defaults; it
    trains for as many steps as the environment's usual agent and is evaluated as often (to find that agent,
    an environment of the host is made and closed). `env` has options of the environment, by name.

    Raises SeedbedError for unknown names, and if the preset has another agent than `agent`.
    """
    if not isinstance(agent, str | None):
        raise SeedbedError(
            f"agent is {agent!r}; give its name, such as ppo or my_module:MyAgent, or train a TrainConfig"
        )
    if not isinstance(target, str):
        return _configured(with_env_options(target, env), agent, "")
    if target in PRESETS:
        if agent is not None and not target.endswith(f"/{agent}"):
            raise SeedbedError(
                f"preset {target} has an agent of its own: leave out --agent {agent}, or name the "
                f"environment, {target.rpartition('/')[0]}"
            )
        return _preset(target, env)
    head, _, tail = target.rpartition("/")
    if agent is None and tail in AGENTS and _is_environment(head):
        return train_config(head, tail, env)
    same_env = [name for name in PRESETS if name.rpartition("/")[0] == target]
    name = f"{target}/{agent}" if agent else next(iter(same_env), None)
    if name in PRESETS:
        return _preset(name, env)
    preset = _preset(same_env[0], env) if same_env else None
    made = preset.env if preset else with_env_options(resolve_env(target), env)
    return _configured(made, agent, target, preset)


def _preset(name: str, env: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration of a preset, with other options of its environment."""
    config = PRESETS[name]()
    return dataclasses.replace(config, name=name, env=with_env_options(config.env, env))


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
        near = nearest(target, PRESETS, 3, 0.7)
        near += [name for name in _near_envs(head, tail) if name not in near]
        if not near or ":" in target:
            raise
        raise SeedbedError(
            f"no preset or environment {target!r}; did you mean {', '.join(near[:4])}?"
            f"{of_package(target)}"
        ) from error


def _is_environment(name: str) -> bool:
    if any(preset.rpartition("/")[0] == name for preset in PRESETS):
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
    known = [*registry.names(), *(preset.rpartition("/")[0] for preset in PRESETS)]
    return list(dict.fromkeys(nearest(head or tail, known, 3, 0.7)))


def load_agent_class(name: str) -> type:
    """Imports an agent's class, named in `AGENTS` or as `module:Class`.

    Raises SeedbedError if it cannot be found, is not a dataclass, or lacks a part of `types.Agent`.
    """
    path = AGENTS.get(name, name)
    module_name, separator, class_name = path.partition(":")
    if not separator:
        hint = did_you_mean(name, AGENTS, 2, 0.5, f"did you mean {', '.join(AGENTS)}?")
        raise SeedbedError(f"unknown agent {name!r}{hint} Your own is named module:Class")
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
        hint = did_you_mean(class_name, dir(module), 3, 0.5)
        raise SeedbedError(f"agent {name!r}: {module_name} has no {class_name!r}{hint}")
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise SeedbedError(f"agent {name!r} is not a dataclass: see seedbed.types.Agent")
    fields = {field.name for field in dataclasses.fields(found)}
    missing = [part for part in PARTS if part not in fields and not hasattr(found, part)]
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
