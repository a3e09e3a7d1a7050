"""What Python programs call: train an agent, load a trained one, evaluate it."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import gymnasium
import jax
import numpy as np

from seedbed import presets, trees
from seedbed.envs.gym import GymEnv
from seedbed.envs.registry import ON_DEVICE
from seedbed.launch.programs import keep_programs
from seedbed.presets import TrainConfig
from seedbed.runtime import evaluation
from seedbed.runtime.checkpoint import restore_best
from seedbed.runtime.config import CentralConfig, FusedConfig
from seedbed.runtime.reporting import View
from seedbed.runtime.run_folder import RunFolder, default_path
from seedbed.runtime.stacking import stacked_spec
from seedbed.types import (
    Agent,
    Array,
    Environment,
    EnvSpec,
    HostEnvConfig,
    SeedbedError,
    Tree,
    bind,
    is_on_device,
)
from seedbed.viewer.background import BackgroundView, tell
from seedbed.viewer.live import make_view


def train(
    what: str | TrainConfig,
    *,
    agent: str | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    **runtime_options: Any,
) -> dict[str, Any]:
    """Trains a preset, an environment or a configuration, and returns a summary of the run.

    `runtime_options` are fields of `CentralConfig` or `FusedConfig`, such as `steps=1_000_000`. With
    `resume` the run in the folder `run` goes on with the configuration that it has, unless `what` is
    another.
    """
    if resume and run is None:
        raise SeedbedError("resume needs the folder of the run: name it with run")
    if not isinstance(what, str):
        config = what
    elif resume and run is not None:
        config = presets.resumed(Path(run), what, agent)
    else:
        config = presets.resolve(what, agent)
    known = {field.name for field in dataclasses.fields(config.runtime)}
    for name in runtime_options.keys() - known:
        raise SeedbedError(f"unknown option {name!r}; known are {', '.join(sorted(known))}")
    options = dataclasses.replace(config.runtime, **runtime_options)
    if isinstance(options, CentralConfig):
        options = options.resolved(config.agent)
    config = dataclasses.replace(config, runtime=options)
    encoded = presets.to_json(config)  # before the folder is made, for what cannot be saved
    path = default_path(config.name or "run") if run is None else Path(run)
    folder = RunFolder.resume(path, _tell) if resume else RunFolder.create(path, _tell)
    screen = make_view(options.steps, config.name, str(path))
    with folder.training(encoded), BackgroundView(screen) as view:
        summary = _train(config, folder, view)
    return {**summary, "run": str(path)}


def _tell(text: str) -> None:
    """Prints a message of the run's start: the view does not exist yet."""
    tell(text, sys.stderr)


def _train(config: TrainConfig, folder: RunFolder, view: View) -> dict[str, Any]:
    """Trains in the runtime whose options the configuration has; it must be that of the environment."""
    env, agent, options = config.env, config.agent, config.runtime
    if is_on_device(env) != isinstance(options, FusedConfig):
        raise SeedbedError(
            f"{type(env).__name__} with {type(options).__name__}: on-device environments train in the "
            "fused runtime, all others in the central one"
        )
    keep_programs()
    if is_on_device(env) and isinstance(options, FusedConfig):
        from seedbed.runtime import fused

        return fused.train(env=env, agent=agent, config=options, run=folder, view=view)
    from seedbed.runtime import central

    return central.train(env=env, agent=agent, config=options, run=folder, view=view)  # type: ignore[arg-type]


class Forms(Protocol):
    """How an environment's observations and actions look; a closed `HostEnv` tells."""

    @property
    def spec(self) -> EnvSpec:
        """Shapes and types."""
        ...

    def encode(self, observation: Any) -> Tree:
        """Turns an observation as the environment gives it, or a batch of them, into the spec's form."""
        ...

    def decode(self, action: Array) -> Any:
        """Turns an action in the spec's form, or a batch of them, into one that the environment takes."""
        ...


@dataclasses.dataclass(frozen=True)
class _PlainForms:
    """Of an on-device environment: arrays as they are."""

    spec: EnvSpec

    def encode(self, observation: Any) -> Tree:
        return trees.map(
            lambda leaf, x: np.asarray(x, leaf.dtype), self.spec.observation, observation
        )

    def decode(self, action: Array) -> Any:
        return np.asarray(action)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run has learned."""

    env: HostEnvConfig | Environment
    forms: Forms
    agent: Agent  # bound
    params: Tree
    step: int  # of the checkpoint: transitions
    member: str = ""  # of a population, the best, such as `seed 3`
    actor_timeout_s: float = CentralConfig.actor_timeout_s


def restore(run: str | Path, warn: Callable[[str], None] = lambda text: None) -> Trained:
    """Restores the checkpoint of a run that evaluated best, or else its newest."""
    folder = RunFolder.read(Path(run))
    config = presets.from_json(folder.read_config())
    forms = _forms(config.env)
    agent = bind(config.agent, stacked_spec(forms.spec, _frame_stack(config.env)))
    template = jax.eval_shape(agent.init, jax.random.key(0))
    if not isinstance(config.runtime, FusedConfig):
        step, state, _ = restore_best(folder.checkpoints, template, warn)
        patience_s = config.runtime.actor_timeout_s
        return Trained(config.env, forms, agent, state.params, step, actor_timeout_s=patience_s)
    members = len(config.runtime.variations)
    if members > 1:
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((members, *x.shape), x.dtype), template
        )
    step, state, metadata = restore_best(folder.checkpoints, template, warn, part="learner")
    if members == 1:
        return Trained(config.env, forms, agent, state.params, step)
    best = metadata.get("best_seed", 0)
    member = config.runtime.member_names[best]
    if "best_seed" not in metadata:
        warn(f"no member of the population was evaluated yet: taking the first, {member}")
    params = jax.tree.map(lambda x: x[best], state.params)
    return Trained(config.env, forms, agent, params, step, member)


def make_gymnasium(
    name: str, num_envs: int | None = None, seed: int | None = None, **options: Any
) -> gymnasium.Env | gymnasium.vector.VectorEnv:
    """Makes an on-device environment into one of Gymnasium's, or a vector environment of `num_envs`.

    `name` is a short name such as ant, or `module:Class`; `options` are fields of the environment.
    """
    from seedbed.envs.gymnasium_api import make_gymnasium as make

    env = presets.resolve_env(name)
    if not is_on_device(env):
        raise SeedbedError(
            f"{name!r} is an environment of the host: make it with gymnasium.make; on the device are "
            f"{', '.join(sorted(ON_DEVICE))}"
        )
    known = [field.name for field in dataclasses.fields(env)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.0)
            raise SeedbedError(f"{name} has no option {option!r}; did you mean {near[0]!r}?")
    return make(dataclasses.replace(env, **options), num_envs, seed)  # type: ignore[type-var]


class Policy:
    """A trained policy for people's own loops: takes the environment's observations, gives its actions."""

    def __init__(self, trained: Trained, seed: int = 0) -> None:
        self._forms = trained.forms
        self._policy = evaluation.Policy(
            trained.agent, trained.forms.spec, _frame_stack(trained.env), trained.params, seed
        )

    def reset(self) -> None:
        """Forgets the past: the next observation opens an episode."""
        self._policy.reset()

    def act(self, observation: Any, first: Array | None = None, reward: Array | None = None) -> Any:
        """Chooses the action for one observation, or actions for a batch as vector environments give it.

        `first` (a bool, or bools `[B]`) marks observations that open an episode; without it only the one
        after construction or `reset` does. An agent with a memory wants the `reward` (a number, or `[B]`)
        of the last action too.
        """
        return self._forms.decode(self._policy.act(self._forms.encode(observation), first, reward))


def load(run: str | Path, seed: int = 0) -> Policy:
    """Loads a trained policy: `seedbed.load(run).act(observation)`."""
    return Policy(restore(run), seed)


def evaluate(
    run: str | Path,
    *,
    episodes: int = 100,
    env: str | None = None,
    seed: int = 0,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Plays whole episodes with a run's best policy, in its own or another environment of its shape.

    Of a population it plays the member that its evaluation found best, or the first if there was none, and
    names it in `member`.

    An on-device environment's Gymnasium task, such as Ant-v5, is made with the observation options that
    the policy was trained with; all else is Gymnasium's default, and so is the return.
    """
    if episodes < 1:
        raise SeedbedError(f"episodes is {episodes}: it must be 1 or more")
    trained = restore(run, warn)
    config = trained.env if env is None else other_environment(trained, env, run)
    if is_on_device(config):
        from seedbed.runtime import program

        result = program.evaluate(
            env=config, agent=trained.agent, params=trained.params, episodes=episodes, seed=seed
        )
    else:
        result = evaluation.evaluate(
            env=config,
            agent=trained.agent,
            params=trained.params,
            episodes=episodes,
            seed=seed,
            actor_timeout_s=trained.actor_timeout_s,
        )
    played = {"member": trained.member} if trained.member else {}
    return {**result, "env_steps": trained.step, **played}


def other_environment(trained: Trained, name: str, run: str | Path) -> HostEnvConfig | Environment:
    """Finds an environment that fits what was trained; raises SeedbedError if it does not."""
    if is_on_device(trained.env) and getattr(trained.env, "gymnasium_id", None) == name:
        config: HostEnvConfig | Environment = GymEnv(name, kwargs=trained.env.gymnasium_options())  # type: ignore[attr-defined]
    else:
        config = presets.resolve_env(name)
    found, stack = _forms(config).spec, _frame_stack(config)
    if found != trained.forms.spec or stack != _frame_stack(trained.env):
        raise SeedbedError(
            f"environment {name!r} does not fit the policy of {run}: it has {found} with frame stack "
            f"{stack}, trained was {trained.forms.spec} with {_frame_stack(trained.env)}"
        )
    return config


def _forms(env: HostEnvConfig | Environment) -> Forms:
    """Learns an environment's observations and actions; of the host, by making one."""
    if is_on_device(env):
        return _PlainForms(env.spec)
    host = env.make(1, 0)  # type: ignore[union-attr]
    host.close()
    return host


def _frame_stack(env: HostEnvConfig | Environment) -> int:
    return getattr(env, "frame_stack", 1)
