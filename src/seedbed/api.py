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
from seedbed.types import Agent, EnvSpec, HostEnvConfig, SeedbedError, Tree, bind
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
    the folder `run` goes on.
    """
    config = presets.resolve(what, agent) if isinstance(what, str) else what
    known = {field.name for field in dataclasses.fields(config.central)}
    for name in runtime_options.keys() - known:
        raise SeedbedError(f"unknown option {name!r}; known are {', '.join(sorted(known))}")
    options = dataclasses.replace(config.central, **runtime_options)
    config = dataclasses.replace(config, central=options)
    encoded = presets.to_json(config)  # before the folder is made, for what cannot be saved
    if resume and run is None:
        raise SeedbedError("resume needs the folder of the run: name it with --run")
    path = default_path(config.name or "run") if run is None else Path(run)
    folder = RunFolder.resume(path) if resume else RunFolder.create(path)
    try:
        folder.write_config(encoded)
        with make_view(config.central.steps, config.name, str(path)) as view:
            summary = central.train(
                env=config.env, agent=config.agent, config=config.central, run=folder, view=view
            )
    except BaseException:
        if not resume:
            folder.discard_untrained()
        raise
    finally:
        folder.close()
    return {**summary, "run": str(path)}


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run has learned."""

    env: HostEnvConfig
    agent: Agent  # bound
    spec: EnvSpec  # of single frames
    params: Tree
    step: int  # of the checkpoint: agent steps
    seed: int


def restore(run: str | Path, warn: Callable[[str], None] = lambda text: None) -> Trained:
    """Restores the checkpoint of a run that evaluated best, or else its newest."""
    folder = RunFolder.read(Path(run))
    config = presets.from_json(folder.read_config())
    spec = host_spec(config.env)
    agent = bind(config.agent, stacked_spec(spec, config.env.frame_stack), 1)
    template = jax.eval_shape(agent.init, jax.random.key(0))
    step, state, _ = restore_best(folder.checkpoints, template, warn)
    return Trained(config.env, agent, spec, state.params, step, config.central.seed)


def load(run: str | Path, seed: int = 0) -> evaluation.Policy:
    """Loads a trained policy: `seedbed.load(run).act(observation)`."""
    trained = restore(run)
    return evaluation.Policy(
        trained.agent, trained.spec, trained.env.frame_stack, trained.params, seed
    )


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
        found = host_spec(config)
        if found != trained.spec or config.frame_stack != trained.env.frame_stack:
            raise SeedbedError(
                f"environment {env!r} does not fit the policy of {run}: it has {found} with frame stack "
                f"{config.frame_stack}, trained was {trained.spec} with {trained.env.frame_stack}"
            )
    result = evaluation.evaluate(
        env=config, agent=trained.agent, params=trained.params, episodes=episodes, seed=seed
    )
    return {**(result or {}), "env_steps": trained.step}


def host_spec(env: HostEnvConfig) -> EnvSpec:
    """Makes one environment to learn its observations and actions."""
    host = env.make(1, 0)
    try:
        return host.spec
    finally:
        host.close()
