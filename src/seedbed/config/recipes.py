"""Settings of agents that suit a kind of environment: the parts of presets and of defaults.

Agents are imported when a function is called, because they import JAX, which `seedbed list` does not need.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from seedbed.config.configuration import TrainConfig
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.contract import HostEnvConfig, is_on_device
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.types import Agent, Environment


def atari_impala(env: AtariEnv, **options: Any) -> TrainConfig:
    """Atari with IMPALA for a workstation: small batches, and normalised pixels, without which Pong fails.

    `options` are fields of `Impala`; they replace the settings here.
    """
    from seedbed.agents.impala import Impala

    shared: dict[str, Any] = {
        "batch": 16,
        "reward_clip": 1.0,
        "trace_decay": 0.95,
        "entropy_cost": 0.002,
        "normalise_observations": True,
        "optimizer": "adam",
        "learning_rate": 3e-4,
        "max_gradient_norm": 160.0,
    }
    return TrainConfig(env, Impala(**shared | options), CentralConfig(steps=20_000_000))


def atari_vmpo(env: AtariEnv) -> TrainConfig:
    """Atari with V-MPO for a workstation: a small network, and batches large enough for two passes.

    The better half is imitated at full strength however little better it is, so chance would soon end all
    exploration: the entropy counts ten times as much as for IMPALA.
    """
    from seedbed.agents.vmpo import Vmpo

    agent = Vmpo(
        unroll=32,
        batch=64,
        epochs=2,
        minibatches=4,
        torso="small",
        reward_clip=1.0,
        trace_decay=0.95,
        entropy_cost=0.02,
        normalise_observations=True,
        normalise_returns=True,
        learning_rate=5e-4,
    )
    return TrainConfig(env, agent, CentralConfig(steps=20_000_000))


def atari_ppo(env: AtariEnv) -> TrainConfig:
    """Atari with PPO for a workstation."""
    from seedbed.agents.ppo import Ppo

    agent = Ppo(
        unroll=32,
        batch=32,
        epochs=2,
        minibatches=4,
        reward_clip=1.0,
        normalise_observations=True,
        entropy_cost=0.005,
        learning_rate=5e-4,
    )
    return TrainConfig(env, agent, CentralConfig(steps=20_000_000))


def atari_dqn(env: AtariEnv, **options: Any) -> TrainConfig:
    """Atari with double dueling DQN for a workstation: a small network, and replay that fits a laptop.

    `options` are fields of `Dqn`; they replace the settings here.
    """
    from seedbed.agents.dqn import Dqn

    shared: dict[str, Any] = {
        "reward_clip": 1.0,
        "normalise_observations": True,
        "torso": "small",
        "head_size": 256,
        "dueling": True,
        "n_step": 3,
        "capacity": 400_000,
        "min_size": 20_000,
        "ratio": 4.0,
        "learning_rate": 2.5e-4,
        "target_period": 1000,
    }
    central = CentralConfig(steps=20_000_000, envs_per_actor=16)
    return TrainConfig(env, Dqn(**shared | options), central)


def atari_r2d2(env: AtariEnv) -> TrainConfig:
    """Atari with R2D2 for two cores: single frames, a small network and short sequences."""
    from seedbed.agents.r2d2 import R2d2

    agent = R2d2(
        normalise_observations=True,
        torso="small",
        lstm_size=256,
        head_size=256,
        batch=16,
        sequence=20,
        burn_in=10,
        capacity=40_000,
        min_size=1_000,
        ratio=4.0,
        gamma=0.99,
        learning_rate=5e-4,
        target_period=100,
    )
    central = CentralConfig(steps=20_000_000, envs_per_actor=16)
    return TrainConfig(dataclasses.replace(env, frame_stack=1), agent, central)


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


def vectors_vmpo(env: HostEnvConfig | Environment) -> TrainConfig:
    """V-MPO for vectors: four passes over each batch."""
    from seedbed.agents.vmpo import Vmpo

    agent = Vmpo(
        unroll=16,
        batch=64,
        epochs=4,
        minibatches=4,
        trace_decay=0.95,
        normalise_observations=True,
        normalise_returns=True,
        value_sizes=(64, 64),
        activation="tanh",
        kl_bound=0.03,
        learning_rate=1e-3,
    )
    return _config(env, agent, 5_000_000)


def vectors_awr(env: HostEnvConfig | Environment) -> TrainConfig:
    """AWR for vectors, with noise of real actions that does not fade."""
    from seedbed.agents.awr import Awr

    agent = Awr(value_sizes=(64, 64), activation="tanh", least_scale=0.2, learning_rate=1e-3)
    return _config(env, agent, 1_000_000, envs_per_actor=8)


def vectors_apg(env: Environment) -> TrainConfig:
    """APG for vectors, with noise that does not fade."""
    from seedbed.agents.apg import Apg

    return _config(env, Apg(least_scale=0.2), 1_000_000)


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


def vectors_es(env: Environment) -> TrainConfig:
    """ES for vectors: a small network, and 64 episodes a generation."""
    from seedbed.agents.es import Es

    return _config(env, Es(), 3_000_000)


def vectors_ars(env: Environment) -> TrainConfig:
    """ARS for vectors: a linear policy, and 64 episodes a generation."""
    from seedbed.agents.ars import Ars

    return _config(env, Ars(), 3_000_000)


def images_impala(env: HostEnvConfig | Environment) -> TrainConfig:
    """IMPALA for images: as for Atari, but rewards are not clipped and returns are normalised."""
    config = atari_impala(env)  # type: ignore[arg-type]
    agent = dataclasses.replace(config.agent, reward_clip=0.0, normalise_returns=True)  # type: ignore[type-var]
    return _config(env, agent, 10_000_000, envs_per_actor=16)


def images_vmpo(env: HostEnvConfig | Environment) -> TrainConfig:
    """V-MPO for images: as for Atari, but rewards are not clipped, and the network is the usual one."""
    config = atari_vmpo(env)  # type: ignore[arg-type]
    agent = dataclasses.replace(config.agent, reward_clip=0.0, torso="auto")  # type: ignore[type-var, call-arg]
    return _config(env, agent, 10_000_000)


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
