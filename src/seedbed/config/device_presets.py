"""The presets of tasks on the device; `presets.PRESETS` names them.

Functions import agents and environments when they are called, because these import JAX, which `seedbed list`
does not need. `seedbed list` shows their docstrings: one line each.
"""

from __future__ import annotations

from seedbed.config.configuration import TrainConfig
from seedbed.config.device_recipes import on_device_ppo, suite_ppo
from seedbed.run.options import FusedConfig


def ant_ppo() -> TrainConfig:
    """Ant-v5 on our own physics with PPO (observes 27 of 105 numbers: no contact forces)."""
    from seedbed.envs.device.locomotion.ant import Ant

    return on_device_ppo(Ant(include_cfrc_ext_in_observation=False), 8_500_000, euler_share=0.8)


def ant_apg() -> TrainConfig:
    """Ant-v5 on our own physics with APG (observes 27 of 105 numbers: no contact forces)."""
    from seedbed.agents.apg import Apg
    from seedbed.envs.device.locomotion.ant import Ant

    agent = Apg(
        unroll=4,
        batch=512,
        entropy_cost=0.0,
        initial_scale=0.4,
        least_scale=0.2,
        epochs=4,
        minibatches=4,
        learning_rate=1e-3,
        value_learning_rate=1e-3,
        max_action_slope=0.3,
    )
    env = Ant(include_cfrc_ext_in_observation=False)
    return TrainConfig(env, agent, FusedConfig(steps=5_000_000, euler_share=1.0))


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


def fetch_ppo() -> TrainConfig:
    """Brax's Fetch on our own physics with PPO."""
    from seedbed.envs.device.targets.fetch import Fetch

    return on_device_ppo(
        Fetch(),
        75_000_000,
        unroll=32,
        # Small minibatches of a large batch: eight times the size learned much less in the same time.
        batch=512,
        minibatches=64,
        gamma=0.995,
        trace_decay=0.98,
        hidden_sizes=(128, 128),
        value_sizes=(128, 128),
        activation="swish",
        reward_scale=5.0,
        learning_rate=3e-4,
        initial_scale=0.6,
        least_scale=0.1,
    )


def dm_cartpole_swingup_ppo() -> TrainConfig:
    """dm_control's cart swings its pole up on our own physics with PPO."""
    from seedbed.envs.device.suite.poles import CartpoleSwingup

    small = (64, 64)
    # Noise that does not fade: without it, policies swing the pole and never stop it.
    return suite_ppo(
        CartpoleSwingup(),
        epochs=4,
        hidden_sizes=small,
        value_sizes=small,
        least_scale=0.3,
        entropy_cost=0.005,
    )


def dm_cheetah_run_ppo() -> TrainConfig:
    """dm_control's cheetah runs on our own physics with PPO."""
    from seedbed.envs.device.suite.planar import CheetahRun

    return suite_ppo(CheetahRun(), 20_000_000, hidden_sizes=(256, 128), least_scale=0.2)


def dm_finger_spin_sac() -> TrainConfig:
    """dm_control's finger spins a body on our own physics with SAC: PPO settles for half of the reward."""
    from seedbed.agents.sac import Sac
    from seedbed.envs.device.suite.finger import FingerSpin

    return TrainConfig(FingerSpin(), Sac(ratio=128.0), FusedConfig(steps=250_000))


def dm_humanoid_walk_ppo() -> TrainConfig:
    """dm_control's humanoid gets up and walks on our own physics with PPO."""
    from seedbed.envs.device.suite.humanoid import HumanoidWalk

    # With the margin of the task, a humanoid on the ground is paid nothing for getting up, until it stands.
    return suite_ppo(HumanoidWalk(standing_margin=1.2), 20_000_000)


def dm_walker_walk_ppo() -> TrainConfig:
    """dm_control's walker walks on our own physics with PPO."""
    from seedbed.envs.device.suite.planar import WalkerWalk

    return suite_ppo(WalkerWalk(), 6_000_000)


def dm_walker_run_ppo() -> TrainConfig:
    """dm_control's walker runs on our own physics with PPO."""
    from seedbed.envs.device.suite.planar import WalkerRun

    return suite_ppo(WalkerRun())


def grasp_ppo() -> TrainConfig:
    """Brax's Grasp on our own physics with PPO."""
    from seedbed.envs.device.targets.grasp import Grasp

    return on_device_ppo(
        Grasp(),
        30_000_000,
        unroll=32,
        batch=512,
        minibatches=64,
        hidden_sizes=(128, 128),
        value_sizes=(128, 128),
        activation="swish",
        reward_scale=1.0,
        learning_rate=3e-4,
        least_scale=0.1,
    )


def ur5e_ppo() -> TrainConfig:
    """Brax's Ur5e on our own physics with PPO."""
    from seedbed.envs.device.targets.ur5e import Ur5e

    return on_device_ppo(
        Ur5e(), 20_000_000, gamma=0.98, reward_scale=10.0, entropy_cost=0.002, learning_rate=1e-3
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


def pendulum_apg() -> TrainConfig:
    """Pendulum-v1 on the device with APG."""
    from seedbed.agents.apg import Apg
    from seedbed.envs.device.classic.pendulum import Pendulum

    agent = Apg(
        batch=4,
        gamma=0.97,
        entropy_cost=0.01,
        initial_scale=1.5,
        least_scale=0.2,
        learning_rate=1e-2,
        value_learning_rate=5e-3,
    )
    return TrainConfig(Pendulum(), agent, FusedConfig(steps=80_000))


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
