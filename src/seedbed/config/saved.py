"""A run's configuration as JSON, and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from seedbed.config.configuration import RUNTIMES, TrainConfig
from seedbed.config.scenes import use_copy
from seedbed.envs.host import registry
from seedbed.envs.host.contract import is_on_device
from seedbed.nearest import require_options
from seedbed.printable import printable
from seedbed.run.encoding import BOUND, construct, decode, encode, plain_tuple
from seedbed.run.folder import SCENE, RunFolder
from seedbed.run.trust import Trust
from seedbed.run.weights import Weights
from seedbed.strict_json import revived
from seedbed.types import SeedbedError

FORMER: dict[str, str] = {"remote_learners": "hosts"}
"""Options that have another name now, by the one that older runs have saved."""
ENV_BOUND = ("model",)
"""Fields of on-device environments that wrappers fill. They are not options, and a run cannot save them."""


def to_json(config: TrainConfig) -> dict[str, Any]:
    """Returns a configuration as JSON types; raises SeedbedError if an option cannot be saved."""
    env, start = config.env, config.start
    if is_on_device(env):
        _require_unbound(env)
    begun = {} if start is None else {"start": dataclasses.asdict(start) | {"run": str(start.run)}}
    return {
        **begun,
        "name": config.name,
        "env": encode(env, ENV_BOUND) if is_on_device(env) else registry.to_json(env),
        "agent": encode(config.agent, BOUND),
        config.runtime.runtime: dataclasses.asdict(config.runtime),
    }


def _require_unbound(env: Any) -> None:
    """Raises SeedbedError if a task, inside of all wrappers, has a model that is no option of it."""
    while hasattr(env, "env") and is_on_device(env.env):
        env = env.env
    if any(getattr(env, name, None) is not None for name in ENV_BOUND):
        raise SeedbedError(
            f"{type(env).__name__} has a model of its own, which cannot be saved with the run: name an MJCF "
            "file that has the changes (xml_file), or make the model in physics_model() of a subclass"
        )


def from_json(data: dict[str, Any], trust: Trust) -> TrainConfig:
    """Makes a configuration from the result of `to_json`, which `trust` tells the file of.

    An MJCF file is the run's copy of it, if there is one. Imports the classes of the agent and of an
    on-device environment. Raises SeedbedError if that fails, or if a part is missing or has an option that
    is unknown or cannot be.
    """
    data = revived(data)
    try:
        use_copy(data, trust.run)
        kind = next(name for name in [*RUNTIMES, "runtime"] if name in data or name == "runtime")
        options = {
            FORMER.get(str(name), str(name)): plain_tuple(value)
            for name, value in data[kind].items()
        }
        described = data["env"]
        env = decode(described, trust) if "class" in described else registry.from_json(described)
        trust.require_env(env)
        trust.require_agent(data["agent"])
        return TrainConfig(
            env,
            decode(data["agent"], trust),
            construct(RUNTIMES[kind], options),
            str(data.get("name", "")),
            _start(data),
        )
    except SeedbedError:
        raise
    # Options are given to the classes as they are, and these may refuse them in any way.
    except Exception as error:
        raise SeedbedError(
            f"{printable(trust.file)} is damaged or incomplete ({type(error).__name__}: {error}): "
            "restore it, or start a new run"
        ) from error


def _start(data: dict[str, Any]) -> Weights | None:
    return construct(Weights, data["start"]) if "start" in data else None


def saved_start(run: Path) -> Weights | None:
    """Returns what the run in a folder has begun with; None is random weights."""
    return _start(RunFolder.read(run).read_config())


def require_runtime(run: Path, runtime: str) -> None:
    """Raises SeedbedError if the run in a folder has another runtime than the one of this name."""
    saved = next((name for name in RUNTIMES if name in RunFolder.read(run).read_config()), runtime)
    if saved != runtime:
        raise SeedbedError(
            f"a run keeps its runtime, which is {saved}: let TrainConfig.runtime be a "
            f"{RUNTIMES[saved].__name__}, not a {RUNTIMES[runtime].__name__}, or name another folder"
        )


def require_seed_of(run: Path, seed: int) -> None:
    """Raises SeedbedError if the fused run in a folder has begun with another seed."""
    begun = RunFolder.read(run).read_config().get("fused", {}).get("seed", seed)
    if seed != begun:
        raise SeedbedError(
            f"seed is {seed}: the run goes on with the random numbers that it began with, of seed {begun}; "
            "give that one, or leave out --seed"
        )


def read_config(file: Path, trust: bool = False) -> TrainConfig:
    """Returns the configuration in a file, such as a run's config.json; `trust` is that of `saved_config`.

    Raises SeedbedError if the file cannot be read, or has a part or an option that is unknown or missing.
    """
    try:
        data, whose = Trust.reading(file.parent, file, trust)
    except (OSError, ValueError) as error:
        raise SeedbedError(f"{printable(file)} cannot be read ({error}): check the path") from error
    if not isinstance(data, dict):
        raise SeedbedError(
            f"{printable(file)} is not a JSON object: `seedbed config --json` writes one"
        )
    known = ["name", "env", "agent", "start", SCENE, *RUNTIMES]
    require_options(printable(file), data, known)
    return from_json(data, whose)


def saved_config(folder: RunFolder, trust: bool = False) -> TrainConfig:
    """Returns the configuration that a run's folder holds.

    Raises Untrusted if it names code of users, and others could have written it, unless the user has said
    `trust`; SeedbedError as `from_json` does.
    """
    found: list[Trust] = []

    def read(file: Path) -> Any:
        content, whose = Trust.reading(folder.path, file, trust)
        found.append(whose)
        return content

    return from_json(folder.read_config(read), found[0])


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
            "no preset to go on with it, or another folder for a new run"
        )
    return saved
