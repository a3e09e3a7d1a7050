"""The one way from what a person asks for to the settled configuration of a run.

`seedbed train` and `seedbed.train` both call `settle`, once. They differ in how they change options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gymnasium

from seedbed.arguments import refusal, require, require_fields
from seedbed.config import scaling
from seedbed.config.configuration import RUNTIMES, TrainConfig
from seedbed.config.env_options import IDENTITY, with_env_options
from seedbed.config.resolve import PARTS, train_config
from seedbed.config.saved import (
    ENV_BOUND,
    read_config,
    require_runtime,
    require_seed_of,
    resumed,
    saved_start,
)
from seedbed.envs.host import registry
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.envs.host.pickled import is_pickled
from seedbed.nearest import did_you_mean, require_options
from seedbed.run.bucket import is_address
from seedbed.run.encoding import BOUND, plain_tuple, unimportable
from seedbed.run.options import FusedConfig
from seedbed.run.weights import Weights
from seedbed.types import Environment, SeedbedError, UsageError


class Request(NamedTuple):
    """A request to train, but for the options of the configuration."""

    what: Any  # as in `api.train`; None is what the run to resume trains
    agent: str | None = None
    runtime: str | None = None
    run: Path | None = None  # the run's folder
    resume: bool = False
    trust: bool = False
    start: Weights | None = None  # what a new run begins with
    env: Mapping[str, Any] = MappingProxyType({})  # options of the environment, by name
    file: Path | None = None  # a configuration to take, instead of a name


class Settled(NamedTuple):
    """A configuration in which everything is chosen, and notes for the user about the choice."""

    config: TrainConfig
    notes: tuple[str, ...]


def settle(request: Request, change: Callable[[TrainConfig], TrainConfig]) -> Settled:
    """Returns the configuration of a run; `change` puts the user's options into it.

    A preset or an environment gets the sizes of this host's devices before `change` is called, and the sizes
    that are left open are chosen after it. Imports and makes what the request names, starts JAX for the fused
    runtime, and leaves no trace on the disk. Raises SeedbedError if the request cannot be trained here, and
    UsageError, which is one, if a part of it is missing.
    """
    if request.resume and request.run is None:
        raise UsageError("--resume needs the folder of the run: add --run DIR (in Python run=DIR)")
    if request.resume and request.start is not None:
        raise UsageError(
            "--resume goes on with the run's own weights: leave out --from (in Python start)"
        )
    plain, begun = _begun(request)
    config = fitted(change(begun))
    if request.resume and isinstance(config.runtime, FusedConfig):
        require_seed_of(Path(request.run or ""), config.runtime.seed)
    start = request.start or config.start
    if start is None and request.resume and isinstance(request.what, TrainConfig):
        start = saved_start(Path(request.run or ""))
    if start is not None:
        # A run that is resumed before its first checkpoint may be in another working directory.
        named = str(start.run)
        named = named if is_address(named) else str(Path(named).absolute())
        config = dataclasses.replace(config, start=dataclasses.replace(start, run=named))
    sizes = plain and scaling.note(plain, config)
    config, dtype = scaling.with_compute_dtype(config, request.run if request.resume else None)
    local = unimportable((config.env, config.agent))
    kept = local and (
        f"{local} is defined in a script or notebook, or in a function: other processes cannot open this "
        "run, to evaluate, play or export it; put the class into a module if they are to"
    )
    return Settled(config, tuple(note for note in (sizes, dtype, kept) if note))


def _begun(request: Request) -> tuple[TrainConfig | None, TrainConfig]:
    """Returns the configuration that options change; first that of a CPU, if sizes depend on the device."""
    what = request.what
    if request.file is not None:
        if what is not None or request.agent or request.runtime or request.resume:
            raise UsageError(
                "--config has all of a configuration: leave out the name, --agent, --runtime and --resume"
            )
        what = read_config(request.file, request.trust)
    if isinstance(what, TrainConfig):
        config = _checked(what, request)
        if request.resume:
            require_runtime(Path(request.run or ""), config.runtime.runtime)
        return None, dataclasses.replace(config, env=with_env_options(config.env, request.env))
    if request.resume:
        if request.runtime is not None:
            raise UsageError("a run keeps its runtime: leave out --runtime (in Python runtime)")
        named = what if isinstance(what, str | None) else None
        config = resumed(Path(request.run or ""), named, request.agent, request.trust)
        env = config.env if isinstance(what, str | None) else _again(config.env, what)
        return None, dataclasses.replace(config, env=with_env_options(env, request.env))
    named = what if isinstance(what, str) else env_of(what)
    plain = train_config(named, request.agent, request.env)
    if request.runtime is not None:
        plain = in_runtime(plain, request.runtime)
    return plain, scaling.for_this_device(plain)


def env_of(what: Any) -> Any:
    """Returns the configuration of an environment that is given as one, or as what makes environments."""
    return _require_env("what", what if _is_options(what) else registry.configured(what))


def _again(saved: Any, what: Any) -> Any:
    """Returns the environment of a run that goes on, of which `what` makes another one like it.

    What is no configuration of its own has the run's options. Raises SeedbedError if it is another
    environment.
    """
    given = env_of(what)
    names = [called(env) for env in (saved, given)]
    if type(given) is not type(saved) and names[0] == names[1]:
        names = [type(env).__name__ for env in (saved, given)]
    if type(given) is not type(saved) or (
        names[0] != names[1] and not (is_pickled(saved) and is_pickled(given))
    ):
        raise SeedbedError(
            f"the run trains {names[0]}, not {names[1]}: name no environment to go on with it (in Python "
            "None), or another folder for a new run"
        )
    if _is_options(what) or isinstance(what, gymnasium.Env):
        return given
    kwargs = dict(saved.kwargs)
    if is_pickled(given):  # the function may have been mended since
        kwargs |= dict(given.kwargs)
    return dataclasses.replace(saved, kwargs=kwargs)


def called(env: Any) -> str:
    """Returns what an environment is called: by its id, game or factory, or on the device its task's class.

    The task is what is inside of all wrappers.
    """
    if is_on_device(env):
        from seedbed.envs.device.wrappers import innermost

        return type(innermost(env)).__name__
    if is_pickled(env):
        return str(dict(env.kwargs)["name"])
    return str(getattr(env, dataclasses.fields(env)[0].name))


# Options that mean another thing in each runtime that has them, as actors of a machine or of a learner.
_OWN = ("learners", "actors")


def in_runtime(config: TrainConfig, name: str) -> TrainConfig:
    """Returns a configuration with the runtime of this name; options that the former one has, too, stay.

    Raises SeedbedError if there is no such runtime, or if the environment cannot train in it.
    """
    if name not in RUNTIMES:
        raise SeedbedError(f"no runtime {name!r}{did_you_mean(name, RUNTIMES)}")
    kind, former = RUNTIMES[name], config.runtime
    if isinstance(former, kind):
        return config
    if kind.on_device != is_on_device(config.env):
        where = "on the device" if is_on_device(config.env) else "of the host"
        others = "fused" if is_on_device(config.env) else "central or paramserver"
        raise SeedbedError(
            f"{type(config.env).__name__} is an environment {where}: it trains with --runtime {others}"
        )
    # 0 stands for a choice that only the former runtime makes.
    shared = {
        field.name: getattr(former, field.name)
        for field in dataclasses.fields(kind)
        if (getattr(former, field.name, 0) or field.name in ("seed", "evaluate_every"))
        and field.name not in _OWN
    }
    return dataclasses.replace(config, runtime=kind(**shared))


def with_options(
    config: TrainConfig, given: dict[str, Any], agent: Mapping[str, Any]
) -> TrainConfig:
    """Returns a configuration with other options of the runtime and of the agent, by name.

    Raises SeedbedError, with the part that has it or the nearest name, for an unknown one, and for a value
    that cannot be.
    """
    options: Any = config.agent
    names = [f.name for f in dataclasses.fields(options) if f.init and f.name not in BOUND]
    known = [field.name for field in dataclasses.fields(config.runtime)]
    own = [f.name for f in dataclasses.fields(config.env)]  # type: ignore[arg-type]
    own = [name for name in own if name not in (*IDENTITY, *ENV_BOUND)]
    for part, value, fields in (("agent", options, names), ("env", config.env, own)):
        if found := next((name for name in given if name in fields and name not in known), None):
            raise SeedbedError(
                f"{found} is an option of {type(value).__name__}: give {part}={{{found!r}: ...}}"
            )
    require_options(f"the {config.runtime.runtime} runtime", given, known)
    require_options(type(options).__name__, agent, names)
    lists = {name: plain_tuple(value) for name, value in agent.items()}
    learner = dataclasses.replace(options, **_whole(options, lists))
    require_fields(learner)
    runtime = dataclasses.replace(config.runtime, **_whole(config.runtime, given))
    return dataclasses.replace(config, agent=learner, runtime=runtime)


def _whole(options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values of options, with an int for a float such as 2e6 where it replaces an int."""
    return {
        name: int(value)
        if type(getattr(options, name)) is int and isinstance(value, float) and value.is_integer()
        else value
        for name, value in given.items()
    }


def fitted(config: TrainConfig) -> TrainConfig:
    """Returns a configuration whose sizes are chosen; raises SeedbedError if its parts do not fit."""
    options = config.runtime
    if is_on_device(config.env) != options.on_device:
        raise SeedbedError(
            f"{type(config.env).__name__} with {type(options).__name__}: on-device environments train in the "
            "fused runtime, all others in the central one or with parameter servers"
        )
    options.require_platform()
    elsewhere = getattr(options, "listen", "") or getattr(options, "hosts", 0)
    if elsewhere and is_pickled(config.env):
        raise SeedbedError(
            "the environment is defined in a script or notebook, which other machines cannot import: put it "
            "into a module, such as my_env.py, and give 'my_env:name'"
        )
    return dataclasses.replace(config, runtime=options.fitted(config.agent))


def _checked(config: TrainConfig, request: Request) -> TrainConfig:
    """Returns a configuration that a person has made; raises SeedbedError, with the remedy, if it is none."""
    for name, value in (("agent", request.agent), ("runtime", request.runtime)):
        if value is not None:
            raise SeedbedError(
                f"{name} is {value!r}, but the TrainConfig has one: leave {name} out, or replace the "
                "configuration's"
            )
    _require_env("TrainConfig.env", config.env)
    if type(config.runtime) not in RUNTIMES.values():
        remedy = f"give {' or '.join(each.__name__ for each in RUNTIMES.values())}"
        raise refusal("TrainConfig.runtime", config.runtime, remedy)
    require("TrainConfig.name", config.name, str)
    if not _is_agent(config.agent):
        remedy = "give an agent, such as seedbed.agents.ppo.Ppo()"
        raise refusal("TrainConfig.agent", config.agent, remedy)
    require_fields(config.agent)
    return config


def _is_options(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_agent(value: Any) -> bool:
    """Returns whether a value has all parts of an agent, without reading any."""
    fields = {field.name for field in dataclasses.fields(value)} if _is_options(value) else set()
    return all(part in fields or hasattr(type(value), part) for part in PARTS)


def _require_env(name: str, env: Any) -> HostEnvConfig | Environment:
    """Returns `env`; raises SeedbedError unless it is the configuration of an environment, of any kind."""
    if not (_is_options(env) and (is_on_device(env) or hasattr(env, "make"))):
        remedy = "give the configuration of an environment, such as GymEnv('CartPole-v1')"
        raise refusal(name, env, remedy)
    require_fields(env)
    return env
