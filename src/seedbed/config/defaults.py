"""The defaults: the agents that fit each kind of task, and the settings that each agent starts with.

`ROWS` is the whole table; `seedbed list` and docs/environments.md print it. Functions import agents when
they are called, because agents import JAX, which `seedbed list` does not need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from seedbed import trees
from seedbed.config.presets import (
    TrainConfig,
    atari_dqn,
    atari_impala,
    atari_ppo,
    atari_r2d2,
    on_device_ppo,
)
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.types import ActionSpec, Agent, Box, Environment, EnvSpec, SeedbedError

Maker = Callable[[Any], TrainConfig]
"""A function that makes a configuration for an environment."""


def _config(
    env: HostEnvConfig | Environment, agent: Agent, steps: int, envs_per_actor: int = 0
) -> TrainConfig:
    """Returns a configuration with the runtime that the environment needs.

    `envs_per_actor` is for host environments only. Their evaluations are a tenth of the run apart, but at
    least 50,000 steps.
    """
    if is_on_device(env):
        return TrainConfig(env, agent, FusedConfig(steps=steps))
    central = CentralConfig(
        steps=steps, envs_per_actor=envs_per_actor, evaluate_every=max(steps // 10, 50_000)
    )
    return TrainConfig(env, agent, central)


def vectors_ppo(env: HostEnvConfig, **options: Any) -> TrainConfig:
    """PPO for vectors and discrete actions: Schulman et al. (2017), with more environments and larger steps.

    `options` are fields of `Ppo`; they replace the settings here.
    """
    from seedbed.agents.ppo import Ppo

    shared: dict[str, Any] = {
        "unroll": 128,
        "batch": 32,
        "epochs": 10,
        "minibatches": 8,
        "normalise_observations": True,
        "normalise_returns": True,
        "value_sizes": (64, 64),
        "activation": "tanh",
        "learning_rate": 1e-3,
    }
    return _config(env, Ppo(**shared | options), 1_000_000)


def real_vectors_ppo(env: HostEnvConfig) -> TrainConfig:
    """PPO for vectors and real actions, with action noise that is large at first and does not fade."""
    return vectors_ppo(env, initial_scale=1.5, least_scale=0.3)


def vectors_impala(env: HostEnvConfig | Environment) -> TrainConfig:
    """IMPALA for vectors."""
    from seedbed.agents.impala import Impala

    agent = Impala(
        batch=16,
        entropy_cost=0.002,
        normalise_observations=True,
        normalise_returns=True,
        activation="tanh",
        optimizer="adam",
        learning_rate=5e-4,
        max_gradient_norm=64.0,
    )
    return _config(env, agent, 5_000_000, envs_per_actor=8)


def vectors_dqn(env: HostEnvConfig | Environment) -> TrainConfig:
    """Double DQN for vectors, with one update for every four steps."""
    from seedbed.agents.dqn import Dqn

    agent = Dqn(
        normalise_observations=True,
        hidden_sizes=(128, 128),
        batch=128,
        capacity=100_000,
        min_size=1_000,
        ratio=32.0,
        n_step=3,
        target_period=250,
        learning_rate=5e-4,
        adam_epsilon=1e-8,
    )
    return _config(env, agent, 500_000, envs_per_actor=8)


def vectors_r2d2(env: HostEnvConfig | Environment) -> TrainConfig:
    """R2D2 for vectors: a small memory and short sequences."""
    from seedbed.agents.r2d2 import R2d2

    agent = R2d2(
        normalise_observations=True,
        lstm_size=64,
        head_size=64,
        batch=32,
        sequence=16,
        burn_in=8,
        capacity=10_000,
        min_size=200,
        ratio=4.0,
        gamma=0.99,
        n_step=3,
        learning_rate=5e-4,
        target_period=100,
    )
    return _config(env, agent, 1_000_000, envs_per_actor=8)


def vectors_sac(env: HostEnvConfig | Environment) -> TrainConfig:
    """SAC for vectors, as published, with one update for every step after the first 1,000 transitions."""
    from seedbed.agents.sac import Sac

    return _config(env, Sac(min_size=1_000), 500_000, envs_per_actor=8)


def images_impala(env: HostEnvConfig | Environment) -> TrainConfig:
    """IMPALA for images: as for Atari, but rewards are not clipped and returns are normalised."""
    config = atari_impala(env)  # type: ignore[arg-type]
    agent = dataclasses.replace(config.agent, reward_clip=0.0, normalise_returns=True)  # type: ignore[type-var]
    return _config(env, agent, 10_000_000, envs_per_actor=16)


def images_ppo(env: HostEnvConfig) -> TrainConfig:
    """PPO for images."""
    from seedbed.agents.ppo import Ppo

    agent = Ppo(
        unroll=64,
        batch=16,
        epochs=4,
        minibatches=8,
        normalise_observations=True,
        normalise_returns=True,
        entropy_cost=0.002,
        learning_rate=3e-4,
    )
    return _config(env, agent, 5_000_000)


def images_dqn(env: HostEnvConfig | Environment) -> TrainConfig:
    """Double dueling DQN for images, with replay that fits a laptop even if the images are large."""
    from seedbed.agents.dqn import Dqn

    agent = Dqn(
        normalise_observations=True,
        head_size=256,
        dueling=True,
        capacity=50_000,
        min_size=5_000,
        ratio=4.0,
        n_step=3,
        target_period=1_000,
        learning_rate=2.5e-4,
    )
    return _config(env, agent, 5_000_000, envs_per_actor=16)


def images_r2d2(env: HostEnvConfig | Environment) -> TrainConfig:
    """R2D2 for images."""
    from seedbed.agents.r2d2 import R2d2

    agent = R2d2(
        normalise_observations=True,
        lstm_size=256,
        head_size=256,
        batch=16,
        sequence=16,
        burn_in=8,
        capacity=3_000,
        min_size=300,
        ratio=2.0,
        gamma=0.99,
        learning_rate=5e-4,
        target_period=100,
    )
    return _config(env, agent, 5_000_000, envs_per_actor=16)


class Task(NamedTuple):
    """A kind of task: the properties of an environment that its defaults depend on."""

    environment: str  # Atari, host (any other host environment) or device
    observation: str  # images if an array of it is large enough for convolutions, else vectors
    action: str  # Discrete, MultiDiscrete, bounded Box or unbounded Box


class Row(NamedTuple):
    """The agents for some kinds of task, with the default agent first."""

    environment: str
    observation: str
    actions: tuple[str, ...]
    agents: dict[str, Maker]

    def takes(self, task: Task) -> bool:
        """Returns whether the row is for a kind of task."""
        kind = (task.environment, task.observation)
        return kind == (self.environment, self.observation) and task.action in self.actions

    def cells(self) -> tuple[str, ...]:
        """Returns the row as text, in the order of `COLUMNS`."""
        default, *others = self.agents
        actions = ", ".join(self.actions)
        return self.environment, self.observation, actions, default, ", ".join(others)


COLUMNS = ("environment", "observation", "action", "default agent", "other agents")
_REAL = ("bounded Box", "unbounded Box")
ROWS = (
    Row(
        "Atari",
        "images",
        ("Discrete",),
        {"impala": atari_impala, "ppo": atari_ppo, "dqn": atari_dqn, "r2d2": atari_r2d2},
    ),
    Row(
        "host",
        "images",
        ("Discrete",),
        {"impala": images_impala, "ppo": images_ppo, "dqn": images_dqn, "r2d2": images_r2d2},
    ),
    Row("host", "images", ("MultiDiscrete",), {"impala": images_impala, "ppo": images_ppo}),
    Row("host", "images", _REAL, {"ppo": images_ppo, "impala": images_impala}),
    Row(
        "host",
        "vectors",
        ("Discrete",),
        {"ppo": vectors_ppo, "impala": vectors_impala, "dqn": vectors_dqn, "r2d2": vectors_r2d2},
    ),
    Row("host", "vectors", ("MultiDiscrete",), {"ppo": vectors_ppo, "impala": vectors_impala}),
    Row(
        "host",
        "vectors",
        ("bounded Box",),
        {"ppo": real_vectors_ppo, "sac": vectors_sac, "impala": vectors_impala},
    ),
    Row(
        "host",
        "vectors",
        ("unbounded Box",),
        {"ppo": real_vectors_ppo, "impala": vectors_impala},
    ),
    Row(
        "device",
        "images",
        ("Discrete",),
        {"ppo": images_ppo, "impala": images_impala, "dqn": images_dqn, "r2d2": images_r2d2},
    ),
    Row(
        "device",
        "images",
        ("MultiDiscrete", *_REAL),
        {"ppo": images_ppo, "impala": images_impala},
    ),
    Row(
        "device",
        "vectors",
        ("Discrete",),
        {"ppo": on_device_ppo, "impala": vectors_impala, "dqn": vectors_dqn, "r2d2": vectors_r2d2},
    ),
    Row(
        "device",
        "vectors",
        ("bounded Box",),
        {"ppo": on_device_ppo, "sac": vectors_sac, "impala": vectors_impala},
    ),
    Row(
        "device",
        "vectors",
        ("MultiDiscrete", "unbounded Box"),
        {"ppo": on_device_ppo, "impala": vectors_impala},
    ),
)
"""The table. Every kind of task is in exactly one row."""


def configure(
    env: HostEnvConfig | Environment, agent: str | None = None, name: str = ""
) -> TrainConfig:
    """Returns the configuration for an environment, with the settings for its kind of task.

    `agent` is a name in the table; None takes the default agent. `name` is the run's name for the
    environment. A host environment is made once, to see its spaces. Raises SeedbedError if the environment
    cannot be made, or if the agent does not fit it.
    """
    task = task_of(env)
    agents = next(row.agents for row in ROWS if row.takes(task))
    agent = agent or next(iter(agents))
    if agent not in agents:
        kinds = [row.cells() for row in ROWS if agent in row.agents]
        kinds = sorted({f"{action} actions from {seen}" for _, seen, action, *_ in kinds})
        raise SeedbedError(
            f"agent {agent} does not fit {name or env}, which takes {task.action} actions from "
            f"{task.observation}: choose {' or '.join(agents)} ({agent} takes {'; '.join(kinds)})"
        )
    return dataclasses.replace(agents[agent](env), name=f"{name}/{agent}" if name else agent)


def task_of(env: HostEnvConfig | Environment) -> Task:
    """Returns an environment's kind of task.

    Makes a host environment other than Atari once, to see its spaces; raises SeedbedError if that fails.
    """
    if isinstance(env, AtariEnv):
        return Task("Atari", "images", "Discrete")
    if is_on_device(env):
        return _task("device", env.spec)
    from seedbed.run.stacking import stacked_spec

    host = env.make(1, 0)  # type: ignore[union-attr]
    host.close()
    return _task("host", stacked_spec(host.spec, env.frame_stack))  # type: ignore[union-attr]


def _task(environment: str, spec: EnvSpec) -> Task:
    from seedbed.nets.torsos import fits_convolutions

    images = any(fits_convolutions(leaf.shape) for leaf in trees.leaves(spec.observation))
    return Task(environment, "images" if images else "vectors", _action_kind(spec.action))


def _action_kind(action: ActionSpec) -> str:
    if not isinstance(action, Box):
        return type(action).__name__
    bounded = np.isfinite([*action.low, *action.high]).all()
    return "bounded Box" if bounded else "unbounded Box"
