"""The Python interface: trains an agent, loads a trained one and evaluates it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode

from seedbed import starting
from seedbed.arguments import checked, require, require_fields, require_seed
from seedbed.config.configuration import TrainConfig
from seedbed.config.resolve import resolve_env
from seedbed.config.saved import to_json
from seedbed.config.scenes import with_copy
from seedbed.config.settle import Request, Settled, settle, with_options
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.envs.names import ON_DEVICE
from seedbed.exporting import loading as exported
from seedbed.nearest import require_options
from seedbed.policy import Policy, evaluate, policy_of, restore
from seedbed.printable import printable
from seedbed.run import evaluation
from seedbed.run.bucket import kept, name_of, run_path
from seedbed.run.callback import Callback, OnMetrics, require_callback
from seedbed.run.checkpoint_helper import list_steps
from seedbed.run.folder import CHECKPOINTS, RunFolder, new_folder
from seedbed.run.programs import keep_programs
from seedbed.run.restoring import warn_of_other_task
from seedbed.run.signals import stopping_early
from seedbed.run.sizes import AUTO
from seedbed.run.weights import Weights
from seedbed.terminal import tell
from seedbed.types import Environment, SeedbedError
from seedbed.viewer.background import BackgroundView
from seedbed.viewer.live import make_view

__all__ = [
    "Callback",
    "Weights",
    "evaluate",
    "export",
    "load",
    "make_gymnasium",
    "make_sb3",
    "report",
    "train",
    "train_settled",
]


@checked
def train(
    what: str | TrainConfig | HostEnvConfig | Environment | gymnasium.Env | Callable[..., Any],
    *,
    agent: str | dict[str, Any] | None = None,
    env: dict[str, Any] | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    trust: bool = False,
    start: str | Path | Weights | None = None,
    callback: Callback | OnMetrics | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains a preset, an environment or a configuration, and returns a summary of the run.

    `what` is a name, as in `seedbed train`, a `TrainConfig`, or the configuration of an environment, such as
    `GymEnv("CartPole-v1")`. It may also be a function or class that makes a Gymnasium environment (one of a
    script or notebook goes to actors of this machine only), or an environment that `gymnasium.make` has made:
    others are made like it.

    `agent` names another agent, such as ppo or `module:Class`, or has options of the agent, with or without
    its name, such as `{"name": "sac", "learning_rate": 1e-3}`, and `env` has those of the environment. `run`
    is the folder of the run; by default a new one below runs/. `options` are fields of the runtime's
    configuration, such as `steps=1_000_000` (transitions), and `runtime`, the name of another one, such as
    paramserver. On a GPU, a preset or an environment has the sizes of `config.scaling`. The summary holds
    the last metrics, `interrupted` (bool) and `run` (the folder).

    `callback` is a `seedbed.Callback`, or a function that is called with each line of metrics as
    `metrics.jsonl` gets it, a dict of names and plain values, every `log_every_s` seconds and once at the
    end. If it returns True, the run is saved, evaluated and ended. If it raises an Exception, a message says
    so and training goes on.

    A new run begins with the weights `start`, if given: the folder of another run, whose best checkpoint it
    takes, or of an exported policy, with the same spaces; `seedbed.Weights` has options for it.

    With `resume`, the run in the folder `run` continues, and keeps its saved configuration but for what is
    given here. `what` may be None then; a name or an environment must be the run's own, a function may have
    changed. A TrainConfig replaces the saved one.
    `trust` is that of `load`. Raises SeedbedError if the user can repair the failure.
    """
    if "on_metrics" in options:
        raise SeedbedError("train: on_metrics is called callback now")
    require_callback(callback)
    folder = None if run is None else run_path(str(run))
    weights = start if isinstance(start, Weights | None) else Weights(start)
    changed = dict(agent) if isinstance(agent, dict) else {"name": agent}
    named = changed.pop("name", None)
    runtime = options.pop("runtime", None)
    require("train: runtime", runtime, str | None)
    request = Request(what, named, runtime, folder, resume, trust, weights, env or {})
    settled = settle(request, lambda config: with_options(config, options, changed))
    return train_settled(request, settled, callback)


def train_settled(
    request: Request, settled: Settled, callback: Callback | OnMetrics | None = None
) -> dict[str, Any]:
    """Trains what was settled for a request, and returns a summary; see `train`."""
    config = settled.config
    for note in settled.notes:
        _tell(note)
    if described := getattr(config.env, "described", None):
        _tell(f"{config.name}: {described()}")
    # What is refused must leave no folder behind: also an option that cannot be saved.
    encoded, files = with_copy(to_json(config))
    # A run that was killed before its first checkpoint begins again, with the same weights.
    checkpoints = (request.run or Path()) / CHECKPOINTS
    begun = request.resume and checkpoints.is_dir() and list_steps(checkpoints)
    weights = None if begun else starting.loaded(config, request.trust, _tell)
    path = request.run or new_folder(config.name or "run")
    folder = (RunFolder.resume if request.resume else RunFolder.create)(path, _tell)
    folder.trusted = request.trust
    # A start that the bucket refuses must not keep the folder locked.
    with contextlib.closing(folder), kept(path, _tell), folder.training(encoded, files):
        keep_programs()
        module = importlib.import_module(f"seedbed.{config.runtime.runtime}.train")
        screen = make_view(config.runtime.steps, config.name, name_of(path))
        if getattr(config.runtime, "actors", 0) == AUTO:
            config = _sized(config)
            folder.write_config(to_json(config))
        warn_of_other_task(folder, _tell)
        with BackgroundView(screen) as view:
            return module.train(
                env=config.env,
                agent=config.agent,
                config=config.runtime,
                run=folder,
                view=view,
                callback=callback,
                weights=weights,
            )


def _sized(config: TrainConfig) -> TrainConfig:
    """Returns a configuration with the number of actors that a plan finds best; raises StoppedEarly, too."""
    from seedbed.plan.sizing import sized

    with stopping_early():
        chosen = sized(config, None, False, lambda part: _tell(f"measuring {part} ..."))
    _tell(chosen.note)
    return chosen.config


def _tell(text: str) -> None:
    """Prints a message to stderr while the run starts, when the view does not exist yet."""
    tell(text, sys.stderr)


@checked
def make_gymnasium(
    name: str,
    num_envs: int | None = None,
    seed: int | None = None,
    autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    **options: Any,
) -> gymnasium.Env | gymnasium.vector.VectorEnv:
    """Makes a Gymnasium environment from an on-device one, or a vector environment if `num_envs` is given.

    `name` is a short name such as ant, or `module:Class`. `options` are fields of the environment. `seed` is
    that of the first reset that is given none. Observations and actions have the shapes of Gymnasium's
    spaces; those of a vector environment are `[num_envs, ...]`, and an ended environment resets itself in the
    next step, or with `autoreset_mode` DISABLED where `reset(options={"reset_mask": mask})` says. Raises
    SeedbedError for host environments and unknown options.
    """
    from seedbed.envs.device.gymnasium_api import make_gymnasium as make

    env = _task("gymnasium.make", name, options)
    if seed is not None:
        require_seed(seed)
    return make(env, num_envs, seed, autoreset_mode)


@checked
def make_sb3(name: str, num_envs: int, seed: int | None = None, **options: Any) -> Any:
    """Makes a vector environment of Stable-Baselines3 and SBX from an on-device one.

    `name`, `options` and `seed` are as in `make_gymnasium`. Observations are `[num_envs, ...]`, and an ended
    environment resets itself in the same step, whose dict has `terminal_observation`. Raises SeedbedError for
    host environments, for unknown options, and if Stable-Baselines3 is not installed.
    """
    from seedbed.envs.device.sb3 import make_sb3 as make

    env = _task("Stable-Baselines3's make_vec_env", name, options)
    if seed is not None:
        require_seed(seed)
    return make(env, num_envs, seed)


def _task(instead: str, name: str, options: dict[str, Any]) -> Environment:
    """Makes an on-device environment; raises SeedbedError if it is none, or for an unknown option."""
    env = resolve_env(name)
    if not is_on_device(env):
        raise SeedbedError(
            f"{name!r} is an environment of the host: make it with {instead}; on the device are "
            f"{', '.join(sorted(ON_DEVICE))}"
        )
    require_options(name, options, [field.name for field in dataclasses.fields(env)])  # type: ignore[arg-type]
    env = dataclasses.replace(env, **options)  # type: ignore[type-var]
    require_fields(env)
    return env


@checked
def load(run: str | Path, seed: int = 0, newest: bool = False, trust: bool = False) -> Policy:
    """Loads a run's best policy, or its newest; use it as `seedbed.load(run).act(observation)`.

    `run` is the folder of a run. `seed` is that of the actions, where they are drawn. With `newest` it takes
    the newest checkpoint instead of the one with the best evaluation. Observations and actions are those of
    the environment, one or a batch `[B, ...]`.

    An agent or an environment of users is imported only if the folder, and the file that names it, belong to
    this user and nobody else can write them, or with `trust`.

    `run` may also be a folder that `seedbed export` has written, of one of Seedbed's own agents. Such a
    policy takes observations as the folder's contract describes them. Raises SeedbedError if the folder is
    neither, or is damaged.
    """
    require_seed(seed)
    run = run_path(str(run))
    if not exported.is_exported(run):
        return policy_of(restore(run, newest=newest, trust=trust), seed)
    if newest:
        raise SeedbedError(
            f"{printable(run)} is an exported policy, and has no newer one: leave out newest"
        )
    agent, forms, frame_stack, params, _ = exported.read(run)
    return Policy(forms, evaluation.SpecPolicy(agent, forms.spec, frame_stack, params, seed))


@checked
def report(runs: list[str | Path], output: str | Path) -> None:
    """Writes one page with curves, settings and episodes of runs, as `seedbed report` does.

    `runs` are folders, and `output` is a path that ends in .html. The best run of each environment plays
    episodes. Prints notices to stderr. Raises SeedbedError if no folder is that of a run, or if the page
    cannot be written.
    """
    from seedbed.viewer.report import write_report

    write_report([run_path(str(run)) for run in runs], Path(output), _tell)


@checked
def export(
    run: str | Path, folder: str | Path, newest: bool = False, trust: bool = False
) -> dict[str, Any]:
    """Writes a run's best policy, or its newest, as ONNX into a new folder; returns the contract.

    The contract describes observations, actions and files (docs/export.md). `trust` is that of `load`. Needs
    `seedbed[export]`. Raises SeedbedError if that is missing, if the folder is not empty, or if a part of the
    agent has no form in ONNX.
    """
    from seedbed.exporting import extra

    extra.require(*extra.EXTRA)
    from seedbed.exporting import command

    return command.export(run_path(str(run)), Path(folder), newest, _tell, trust)
