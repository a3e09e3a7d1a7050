"""Settings of PPO that suit tasks on the device: the parts of presets and of defaults.

The agent is imported when a function is called, because it imports JAX, which `seedbed list` does not need.
"""

from __future__ import annotations

from typing import Any

from seedbed.config.configuration import TrainConfig
from seedbed.run.options import FusedConfig
from seedbed.types import Environment


def on_device_ppo(
    env: Environment, steps: int = 10_000_000, euler_share: float = 0.0, **options: Any
) -> TrainConfig:
    """An on-device environment with PPO: the settings that most of these tasks share.

    `options` are fields of `Ppo`; they replace the shared settings. These settings were tuned to learn as
    much as possible in a short time on two cores. `least_scale` keeps the noise of the policy from fading:
    without noise, policies of MuJoCo's tasks settle for standing still. `euler_share` is for tasks in which
    RK4 doubles the cost of a step: this share of the run trains with Euler's integrator, and the rest of the
    run is enough to make up for the difference.
    """
    from seedbed.agents.ppo import Ppo

    shared: dict[str, Any] = {
        "unroll": 16,
        "batch": 512,
        "epochs": 3,
        "minibatches": 4,
        "gamma": 0.99,
        "normalise_observations": True,
        "value_sizes": (64, 64),
        "activation": "tanh",
        "reward_scale": 0.1,
        "learning_rate": 2e-3,
        "initial_scale": 0.4,
        "least_scale": 0.2,
    }
    runtime = FusedConfig(steps=steps, euler_share=euler_share)
    return TrainConfig(env, Ppo(**shared | options), runtime)


def joystick_ppo(env: Environment, steps: int, **options: Any) -> TrainConfig:
    """A robot that follows a joystick with PPO, whose networks take more time than the physics.

    `options` are fields of `Ppo`; they replace the settings here.
    """
    shared: dict[str, Any] = {
        "batch": 1024,
        "epochs": 2,
        "minibatches": 32,
        "gamma": 0.98,
        "hidden_sizes": (128, 128),
        "reward_scale": 1.0,
        "learning_rate": 1e-3,
        "least_scale": 0.1,
        "entropy_cost": 0.001,
    }
    return on_device_ppo(env, steps, **shared | options)


def biped_ppo(
    env: Environment, equivariant: bool | None = None, steps: int = 100_000_000, **options: Any
) -> TrainConfig:
    """A robot on two legs that follows a joystick with PPO; `options` as in `joystick_ppo`.

    It needs large minibatches, and noise that does not fade soon: with little, it learned to stand, and fell
    when it was to go. With a least scale of 0.2 it did not learn to turn.

    Networks are equivariant if the task has a mirror, unless `equivariant` says whether: that needs no model.
    """
    shared: dict[str, Any] = {
        "batch": 2048,
        "epochs": 4,
        "minibatches": 8,
        "learning_rate": 1e-3,
        "schedule": "adaptive",
        "target_kl": 0.02,
        "initial_scale": 0.4,
        "least_scale": 0.12,
        "entropy_cost": 0.003,
        "equivariant": env.spec.mirror is not None if equivariant is None else equivariant,
    }
    return joystick_ppo(env, steps, **shared | options)


def suite_ppo(env: Environment, steps: int = 10_000_000, **options: Any) -> TrainConfig:
    """A task of dm_control with PPO: rewards are at most 1, and every episode takes its whole time.

    `options` are fields of `Ppo`; they replace the settings here.
    """
    shared: dict[str, Any] = {
        "unroll": 32,
        "epochs": 2,
        "minibatches": 32,
        "hidden_sizes": (128, 128),
        "value_sizes": (128, 128),
        "activation": "swish",
        "reward_scale": 1.0,
        "learning_rate": 1e-3,
        "initial_scale": 1.0,
        "least_scale": 0.1,
        "entropy_cost": 0.01,
    }
    return on_device_ppo(env, steps, **shared | options)
