"""What Python programs call: train an agent, load a trained one, evaluate it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from seedbed import presets
from seedbed.presets import TrainConfig
from seedbed.runtime import central, evaluation
from seedbed.runtime.checkpoint import restore_best
from seedbed.runtime.run_folder import RunFolder, default_path
from seedbed.runtime.stacking import stacked_spec
from seedbed.types import Agent, Array, HostEnv, HostEnvConfig, SeedbedError, Tree, bind
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

    `runtime_options` are fields of `CentralConfig`, such as `steps=1_000_000`. With `resume` the run in
    the folder `run` goes on with the configuration that it has, unless `what` is another.
    """
    if resume and run is None:
        raise SeedbedError("resume needs the folder of the run: name it with run")
    if not isinstance(what, str):
        config = what
    elif resume and run is not None:
        config = presets.resumed(Path(run), what, agent)
    else:
        config = presets.resolve(what, agent)
    known = {field.name for field in dataclasses.fields(config.central)}
    for name in runtime_options.keys() - known:
        raise SeedbedError(f"unknown option {name!r}; known are {', '.join(sorted(known))}")
    options = dataclasses.replace(config.central, **runtime_options)
    config = dataclasses.replace(config, central=options)
    encoded = presets.to_json(config)  # before the folder is made, for what cannot be saved
    path = default_path(config.name or "run") if run is None else Path(run)
    folder = RunFolder.resume(path) if resume else RunFolder.create(path)
    with folder.training(encoded), make_view(config.central.steps, config.name, str(path)) as view:
        summary = central.train(
            env=config.env, agent=config.agent, config=config.central, run=folder, view=view
        )
    return {**summary, "run": str(path)}


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run has learned."""

    env: HostEnvConfig
    host: HostEnv  # closed: for its spec and forms
    agent: Agent  # bound
    params: Tree
    step: int  # of the checkpoint: agent steps


def restore(run: str | Path, warn: Callable[[str], None] = lambda text: None) -> Trained:
    """Restores the checkpoint of a run that evaluated best, or else its newest."""
    folder = RunFolder.read(Path(run))
    config = presets.from_json(folder.read_config())
    host = _closed_host(config.env)
    agent = bind(config.agent, stacked_spec(host.spec, config.env.frame_stack), 1)
    template = jax.eval_shape(agent.init, jax.random.key(0))
    step, state, _ = restore_best(folder.checkpoints, template, warn)
    return Trained(config.env, host, agent, state.params, step)


class Policy:
    """A trained policy for people's own loops: takes the environment's observations, gives its actions."""

    def __init__(self, trained: Trained, seed: int = 0) -> None:
        self._host = trained.host
        self._policy = evaluation.Policy(
            trained.agent, trained.host.spec, trained.env.frame_stack, trained.params, seed
        )

    def reset(self) -> None:
        """Forgets the past: the next observation opens an episode."""
        self._policy.reset()

    def act(self, observation: Any, first: Array | None = None) -> Any:
        """Chooses the action for one observation, or actions for a batch as vector environments give it.

        `first` (a bool, or bools `[B]`) marks observations that open an episode; without it only the one
        after construction or `reset` does.
        """
        return self._host.decode(self._policy.act(self._host.encode(observation), first))


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
    """Plays whole episodes with a run's best policy, in its own or another environment of its shape."""
    if episodes < 1:
        raise SeedbedError(f"episodes is {episodes}: it must be 1 or more")
    trained = restore(run, warn)
    config = trained.env
    if env is not None:
        config = presets.resolve_env(env)
        found = _closed_host(config).spec
        if found != trained.host.spec or config.frame_stack != trained.env.frame_stack:
            raise SeedbedError(
                f"environment {env!r} does not fit the policy of {run}: it has {found} with frame stack "
                f"{config.frame_stack}, trained was {trained.host.spec} with {trained.env.frame_stack}"
            )
    result = evaluation.evaluate(
        env=config, agent=trained.agent, params=trained.params, episodes=episodes, seed=seed
    )
    return {**(result or {}), "env_steps": trained.step}


def _closed_host(env: HostEnvConfig) -> HostEnv:
    """Makes one environment to learn its observations and actions."""
    host = env.make(1, 0)
    host.close()
    return host
