"""The presets: environments and agents that are known to work well together, with their options.

Functions import agents and on-device environments when they are called, because these import JAX, which
`seedbed list` does not need. `seedbed list` shows the docstring of every function in `PRESETS`: one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from seedbed.config.configuration import TrainConfig
from seedbed.config.recipes import (
    atari_dqn,
    atari_impala,
    atari_r2d2,
    on_device_ppo,
)
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.gym import GymEnv
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig


def _pong(maker: Callable[..., TrainConfig], steps: int, **options: Any) -> TrainConfig:
    config = maker(AtariEnv("pong", stickiness=0.0), **options)
    return dataclasses.replace(
        config, runtime=dataclasses.replace(config.runtime, steps=steps, evaluate_every=500_000)
    )


def _pong_dqn(**options: Any) -> TrainConfig:
    """Atari Pong with DQN, for which steps are few and slow; `options` are fields of `Dqn`."""
    config = _pong(atari_dqn, 2_500_000, **options)
    return dataclasses.replace(
        config, runtime=dataclasses.replace(config.runtime, evaluate_every=25_000)
    )


def pong_impala() -> TrainConfig:
    """Atari Pong with IMPALA (Nature CNN, no sticky actions)."""
    return _pong(atari_impala, 2_500_000)


def pong_impala_deep() -> TrainConfig:
    """Atari Pong with IMPALA and its deep residual network (no sticky actions)."""
    return _pong(atari_impala, 2_500_000, torso="resnet")


def pong_r2d2() -> TrainConfig:
    """Atari Pong with R2D2 (small CNN, LSTM instead of stacked frames, no sticky actions)."""
    return _pong(atari_r2d2, 5_000_000)


def pong_dqn() -> TrainConfig:
    """Atari Pong with double dueling DQN (small CNN, no sticky actions)."""
    return _pong_dqn()


def cartpole_impala() -> TrainConfig:
    """CartPole-v1 with IMPALA (two-layer MLP)."""
    from seedbed.agents.impala import Impala

    agent = Impala(
        unroll=8,
        batch=16,
        entropy_cost=0.001,
        normalise_observations=True,
        # Gradients of values as large as 100 drowned those of the policy: one run in 24 never recovered.
        normalise_returns=True,
        optimizer="adam",
        learning_rate=5e-4,
        max_gradient_norm=64.0,
    )
    return TrainConfig(GymEnv("CartPole-v1"), agent, CentralConfig(steps=600_000, evaluate_every=0))


def ant_ppo() -> TrainConfig:
    """Ant-v5 on our own physics with PPO (observes 27 of 105 numbers: no contact forces)."""
    from seedbed.envs.device.locomotion.ant import Ant

    return on_device_ppo(Ant(include_cfrc_ext_in_observation=False), 8_500_000, euler_share=0.8)


def half_cheetah_ppo() -> TrainConfig:
    """HalfCheetah-v5 on our own physics with PPO."""
    from seedbed.envs.device.locomotion.half_cheetah import HalfCheetah

    return on_device_ppo(HalfCheetah(), 4_000_000)


def hopper_ppo() -> TrainConfig:
    """Hopper-v5 on our own physics with PPO."""
    from seedbed.envs.device.locomotion.hopper import Hopper

    return on_device_ppo(
        Hopper(),
        8_000_000,
        unroll=32,
        minibatches=8,
        gamma=0.995,
        learning_rate=1e-3,
        initial_scale=1.0,
        least_scale=0.3,
    )


def walker2d_ppo() -> TrainConfig:
    """Walker2d-v5 on our own physics with PPO."""
    from seedbed.envs.device.locomotion.walker2d import Walker2d

    return on_device_ppo(Walker2d(), 8_000_000)


def humanoid_ppo() -> TrainConfig:
    """Humanoid-v5 on our own physics with PPO (observes 45 of 348 numbers: joints only)."""
    from seedbed.envs.device.locomotion.humanoid import Humanoid

    env = Humanoid(
        include_cinert_in_observation=False,
        include_cvel_in_observation=False,
        include_qfrc_actuator_in_observation=False,
        include_cfrc_ext_in_observation=False,
    )
    # Scales are shares of an action's bounds, which are 0.4 here and 1 elsewhere.
    return on_device_ppo(env, 12_000_000, euler_share=0.9, initial_scale=1.0, least_scale=0.3)


def reacher_ppo() -> TrainConfig:
    """Reacher-v5 on our own physics with PPO."""
    from seedbed.envs.device.locomotion.reacher import Reacher

    return on_device_ppo(Reacher(), 4_000_000, gamma=0.97, reward_scale=1.0)


def ur5e_ppo() -> TrainConfig:
    """Brax's Ur5e on our own physics with PPO."""
    from seedbed.envs.device.targets.ur5e import Ur5e

    return on_device_ppo(
        Ur5e(), 20_000_000, gamma=0.98, reward_scale=10.0, entropy_cost=0.002, learning_rate=1e-3
    )


def fetch_ppo() -> TrainConfig:
    """Brax's Fetch on our own physics with PPO."""
    from seedbed.envs.device.targets.fetch import Fetch

    return on_device_ppo(
        Fetch(),
        25_000_000,
        unroll=32,
        batch=256,
        gamma=0.995,
        hidden_sizes=(128, 128),
        value_sizes=(128, 128),
        activation="swish",
        reward_scale=5.0,
        learning_rate=1e-3,
        initial_scale=0.6,
    )


def inverted_pendulum_ppo() -> TrainConfig:
    """InvertedPendulum-v5 on our own physics with PPO."""
    from seedbed.envs.device.locomotion.inverted_pendulum import InvertedPendulum

    return on_device_ppo(InvertedPendulum(), 500_000)


def inverted_double_pendulum_ppo() -> TrainConfig:
    """InvertedDoublePendulum-v5 on our own physics with PPO."""
    from seedbed.envs.device.locomotion.inverted_double_pendulum import InvertedDoublePendulum

    return on_device_ppo(InvertedDoublePendulum(), 1_000_000)


def cartpole_ppo() -> TrainConfig:
    """CartPole on the device with PPO."""
    from seedbed.agents.ppo import Ppo
    from seedbed.envs.device.classic.cartpole import CartPole

    agent = Ppo(
        unroll=32,
        batch=64,
        epochs=3,
        minibatches=2,
        normalise_observations=True,
        activation="tanh",
        reward_scale=0.1,
        learning_rate=1e-3,
    )
    return TrainConfig(CartPole(), agent, FusedConfig(steps=300_000))


def cartpole_vmpo() -> TrainConfig:
    """CartPole on the device with V-MPO."""
    from seedbed.agents.vmpo import Vmpo
    from seedbed.envs.device.classic.cartpole import CartPole

    agent = Vmpo(
        unroll=32,
        batch=64,
        epochs=3,
        minibatches=2,
        trace_decay=0.95,
        normalise_observations=True,
        normalise_returns=True,
        activation="tanh",
        kl_bound=0.03,
        learning_rate=1e-3,
    )
    return TrainConfig(CartPole(), agent, FusedConfig(steps=800_000))


def cartpole_dqn() -> TrainConfig:
    """CartPole on the device with double DQN."""
    from seedbed.agents.dqn import Dqn
    from seedbed.envs.device.classic.cartpole import CartPole

    agent = Dqn(
        hidden_sizes=(128, 128),
        activation="tanh",
        batch=256,
        capacity=100_000,
        min_size=1_000,
        ratio=8.0,
        n_step=5,
        error_clip=0.0,
        target_period=250,
        learning_rate=5e-4,
        adam_epsilon=1e-8,
        max_gradient_norm=100.0,
    )
    return TrainConfig(CartPole(), agent, FusedConfig(steps=800_000))


def cartpole_gorila() -> TrainConfig:
    """CartPole with Gorila: two learners, two parameter shards, two replay shards."""
    from seedbed.agents.dqn import Dqn

    agent = Dqn(
        hidden_sizes=(128, 128),
        activation="tanh",
        batch=64,
        capacity=100_000,
        min_size=1_000,
        ratio=4.0,
        n_step=5,
        error_clip=0.0,
        target_period=200,
        learning_rate=2e-3,
        adam_epsilon=1e-8,
        max_gradient_norm=100.0,
    )
    options = ParamServerConfig(
        steps=800_000, envs_per_actor=16, evaluate_every=20_000, evaluate_episodes=16
    )
    return TrainConfig(GymEnv("CartPole-v1"), agent, options)


def pong_gorila() -> TrainConfig:
    """Atari Pong with Gorila: DQN with AdaGrad, and one exploration rate that falls.

    As published, but for shorter schedules: the rate falls over 25,000 updates instead of a million, and
    targets are copied every 1,000 updates instead of 60,000.
    """
    config = _pong_dqn(
        double=False,
        dueling=False,
        n_step=1,
        optimizer="adagrad",
        learning_rate=1e-2,
        epsilon=1.0,
        epsilon_final=0.1,
        epsilon_updates=25_000,
    )
    return _many_learners(config)


def pong_gorila_apex() -> TrainConfig:
    """Atari Pong with Gorila's roles and Ape-X's agent: prioritised, double, dueling DQN."""
    config = _pong_dqn(priority_exponent=0.6, importance_exponent=0.4)
    return _many_learners(config)


def _many_learners(config: TrainConfig) -> TrainConfig:
    """Returns a configuration in the parameter-server runtime; what the central one has, too, stays."""
    central = config.runtime
    assert isinstance(central, CentralConfig)
    options = ParamServerConfig(
        steps=central.steps,
        evaluate_every=central.evaluate_every,
        envs_per_actor=central.envs_per_actor,
    )
    return dataclasses.replace(config, runtime=options)


def pendulum_apg() -> TrainConfig:
    """Pendulum-v1 on the device with APG."""
    from seedbed.agents.apg import Apg
    from seedbed.envs.device.classic.pendulum import Pendulum

    agent = Apg(
        batch=8,
        gamma=0.97,
        entropy_cost=0.01,
        initial_scale=1.5,
        least_scale=0.2,
        learning_rate=5e-3,
        value_learning_rate=5e-3,
    )
    return TrainConfig(Pendulum(), agent, FusedConfig(steps=160_000))


def inverted_double_pendulum_apg() -> TrainConfig:
    """InvertedDoublePendulum-v5 on our own physics with APG."""
    from seedbed.agents.apg import Apg
    from seedbed.envs.device.locomotion.inverted_double_pendulum import InvertedDoublePendulum

    agent = Apg(
        trace_decay=0.9,
        least_scale=0.2,
        epochs=16,
        learning_rate=5e-3,
        value_learning_rate=5e-3,
    )
    return TrainConfig(InvertedDoublePendulum(), agent, FusedConfig(steps=190_000))


def half_cheetah_ars() -> TrainConfig:
    """HalfCheetah-v5 on our own physics with ARS (V2-t, a linear policy)."""
    from seedbed.agents.ars import Ars
    from seedbed.envs.device.locomotion.half_cheetah import HalfCheetah

    return TrainConfig(HalfCheetah(), Ars(batch=32, noise=0.05), FusedConfig(steps=1_700_000))


def half_cheetah_es() -> TrainConfig:
    """HalfCheetah-v5 on our own physics with ES."""
    from seedbed.agents.es import Es
    from seedbed.envs.device.locomotion.half_cheetah import HalfCheetah

    return TrainConfig(HalfCheetah(), Es(), FusedConfig(steps=2_900_000))


def half_cheetah_sac() -> TrainConfig:
    """HalfCheetah-v5 on our own physics with SAC (one update for every two steps)."""
    from seedbed.agents.sac import Sac
    from seedbed.envs.device.locomotion.half_cheetah import HalfCheetah

    return TrainConfig(HalfCheetah(), Sac(ratio=128.0), FusedConfig(steps=250_000))


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "pong/impala": pong_impala,
    "pong/impala-deep": pong_impala_deep,
    "pong/r2d2": pong_r2d2,
    "pong/dqn": pong_dqn,
    "pong/gorila": pong_gorila,
    "pong/gorila-apex": pong_gorila_apex,
    "cartpole/impala": cartpole_impala,
    "cartpole/ppo": cartpole_ppo,
    "cartpole/vmpo": cartpole_vmpo,
    "cartpole/dqn": cartpole_dqn,
    "cartpole/gorila": cartpole_gorila,
    "ant/ppo": ant_ppo,
    "half_cheetah/ppo": half_cheetah_ppo,
    "half_cheetah/sac": half_cheetah_sac,
    "half_cheetah/ars": half_cheetah_ars,
    "half_cheetah/es": half_cheetah_es,
    "hopper/ppo": hopper_ppo,
    "humanoid/ppo": humanoid_ppo,
    "inverted_double_pendulum/ppo": inverted_double_pendulum_ppo,
    "inverted_double_pendulum/apg": inverted_double_pendulum_apg,
    "fetch/ppo": fetch_ppo,
    "inverted_pendulum/ppo": inverted_pendulum_ppo,
    "pendulum/apg": pendulum_apg,
    "reacher/ppo": reacher_ppo,
    "ur5e/ppo": ur5e_ppo,
    "walker2d/ppo": walker2d_ppo,
}


def description(preset: str) -> str:
    """Returns a preset's description, which is the docstring of its function in `PRESETS`."""
    return " ".join((PRESETS[preset].__doc__ or "").split())
