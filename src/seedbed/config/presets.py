"""The presets: environments and agents that are known to work well together, with their options.

Functions import agents and on-device environments when they are called, because these import JAX, which
`seedbed list` does not need. `seedbed list` shows the docstring of every function in `PRESETS`: one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from seedbed.config.configuration import TrainConfig
from seedbed.config.device_presets import (
    ant_apg,
    ant_ppo,
    cartpole_dqn,
    cartpole_ppo,
    cartpole_vmpo,
    dm_cartpole_swingup_ppo,
    dm_cheetah_run_ppo,
    dm_finger_spin_sac,
    dm_humanoid_walk_ppo,
    dm_walker_run_ppo,
    dm_walker_walk_ppo,
    fetch_ppo,
    grasp_ppo,
    half_cheetah_ars,
    half_cheetah_es,
    half_cheetah_ppo,
    half_cheetah_sac,
    hopper_ppo,
    humanoid_ppo,
    inverted_double_pendulum_apg,
    inverted_double_pendulum_ppo,
    inverted_pendulum_ppo,
    pendulum_apg,
    reacher_ppo,
    ur5e_ppo,
    walker2d_ppo,
)
from seedbed.config.recipes import (
    atari_dqn,
    atari_impala,
    atari_r2d2,
    atari_vmpo,
)
from seedbed.config.robot_presets import (
    apollo_joystick_ppo,
    berkeley_joystick_ppo,
    g1_joystick_ppo,
    g1_motion_ppo,
    g1_rough_ppo,
    go1_footstand_ppo,
    go1_getup_ppo,
    go1_handstand_ppo,
    go1_joystick_ppo,
    go1_rough_ppo,
    h1_joystick_ppo,
    leap_rotate_ppo,
    op3_joystick_ppo,
    spot_joystick_ppo,
    t1_joystick_ppo,
)
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.doom import DoomEnv
from seedbed.envs.host.gym import GymEnv
from seedbed.run.options import CentralConfig, ParamServerConfig


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


def pong_vmpo() -> TrainConfig:
    """Atari Pong with V-MPO (small CNN, no sticky actions)."""
    return _pong(atari_vmpo, 2_500_000)


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


def doom_health_gathering_supreme_ppo() -> TrainConfig:
    """Doom's health gathering supreme from pixels with PPO and a memory, at Sample Factory's step size."""
    from seedbed.agents.ppo import Ppo

    agent = Ppo(
        unroll=32,
        batch=32,
        epochs=2,
        minibatches=4,
        trace_decay=0.95,
        entropy_cost=0.001,
        normalise_observations=True,
        normalise_returns=True,
        recurrent=True,
        # Inputs of a layer of 3,840 are all positive: with 3e-4 most of its units died in 50 updates.
        learning_rate=1e-4,
        schedule="constant",
    )
    options = CentralConfig(steps=1_000_000, evaluate_every=250_000, evaluate_episodes=20)
    return TrainConfig(DoomEnv("health_gathering_supreme"), agent, options)


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


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "pong/impala": pong_impala,
    "pong/impala-deep": pong_impala_deep,
    "pong/r2d2": pong_r2d2,
    "pong/vmpo": pong_vmpo,
    "pong/dqn": pong_dqn,
    "pong/gorila": pong_gorila,
    "pong/gorila-apex": pong_gorila_apex,
    "cartpole/ppo": cartpole_ppo,
    "cartpole/impala": cartpole_impala,
    "cartpole/vmpo": cartpole_vmpo,
    "cartpole/dqn": cartpole_dqn,
    "cartpole/gorila": cartpole_gorila,
    "doom/health_gathering_supreme/ppo": doom_health_gathering_supreme_ppo,
    "ant/ppo": ant_ppo,
    "ant/apg": ant_apg,
    "half_cheetah/ppo": half_cheetah_ppo,
    "half_cheetah/sac": half_cheetah_sac,
    "fetch/ppo": fetch_ppo,
    "dm/finger-spin/sac": dm_finger_spin_sac,
    "dm/cartpole-swingup/ppo": dm_cartpole_swingup_ppo,
    "dm/cheetah-run/ppo": dm_cheetah_run_ppo,
    "dm/humanoid-walk/ppo": dm_humanoid_walk_ppo,
    "dm/walker-run/ppo": dm_walker_run_ppo,
    "dm/walker-walk/ppo": dm_walker_walk_ppo,
    "go1/joystick/ppo": go1_joystick_ppo,
    "go1/rough/ppo": go1_rough_ppo,
    "go1/getup/ppo": go1_getup_ppo,
    "go1/handstand/ppo": go1_handstand_ppo,
    "go1/footstand/ppo": go1_footstand_ppo,
    "g1/motion/ppo": g1_motion_ppo,
    "g1/joystick/ppo": g1_joystick_ppo,
    "g1/rough/ppo": g1_rough_ppo,
    "apollo/joystick/ppo": apollo_joystick_ppo,
    "berkeley/joystick/ppo": berkeley_joystick_ppo,
    "op3/joystick/ppo": op3_joystick_ppo,
    "h1/joystick/ppo": h1_joystick_ppo,
    "leap/rotate/ppo": leap_rotate_ppo,
    "spot/joystick/ppo": spot_joystick_ppo,
    "t1/joystick/ppo": t1_joystick_ppo,
    "grasp/ppo": grasp_ppo,
    "half_cheetah/ars": half_cheetah_ars,
    "half_cheetah/es": half_cheetah_es,
    "hopper/ppo": hopper_ppo,
    "humanoid/ppo": humanoid_ppo,
    "inverted_double_pendulum/ppo": inverted_double_pendulum_ppo,
    "inverted_double_pendulum/apg": inverted_double_pendulum_apg,
    "inverted_pendulum/ppo": inverted_pendulum_ppo,
    "pendulum/apg": pendulum_apg,
    "reacher/ppo": reacher_ppo,
    "ur5e/ppo": ur5e_ppo,
    "walker2d/ppo": walker2d_ppo,
}


def description(preset: str) -> str:
    """Returns a preset's description, which is the docstring of its function in `PRESETS`."""
    return " ".join((PRESETS[preset].__doc__ or "").split())
