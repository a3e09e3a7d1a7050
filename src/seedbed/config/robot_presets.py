"""The presets of robots on the device; `presets.PRESETS` names them. As in `device_presets`."""

from __future__ import annotations

from typing import Any

from seedbed.config.configuration import TrainConfig
from seedbed.config.device_recipes import biped_ppo, joystick_ppo

_GAIT = {
    "tracking_lin_vel": 6.0,
    "tracking_ang_vel": 6.0,
    "feet_phase": 16.0,
    "feet_air_time": 4.0,
}
"""Weights of a reward for a gait first, and for the command within it."""
_HALF_ACTIONS: dict[str, Any] = {
    "equivariant": True,
    "epochs": 2,
    "initial_scale": 0.8,
    "least_scale": 0.24,
}
"""Settings for robots whose servos an action of 1 moves by 0.5 rad."""


def go1_joystick_ppo() -> TrainConfig:
    """Unitree's Go1 follows a joystick on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.go1 import Go1Joystick, Go1Scales

    # With the weights that the task is judged by, standing still is learned first, and walking much later.
    scales = Go1Scales(tracking_lin_vel=4.0, tracking_ang_vel=2.0)
    return joystick_ppo(Go1Joystick(scales=scales, tracking_sigma=0.5, push_speed=1.0), 25_000_000)


def go1_rough_ppo() -> TrainConfig:
    """Unitree's Go1 follows a joystick over tiles and stairs on our own physics with PPO."""
    from seedbed.envs.device.robots.go1 import Go1Scales
    from seedbed.envs.device.robots.rough import Go1Rough

    scales = Go1Scales(tracking_lin_vel=4.0, tracking_ang_vel=2.0)
    env = Go1Rough(scales=scales, tracking_sigma=0.5, push_speed=1.0)
    return joystick_ppo(env, 20_000_000, equivariant=True, learning_rate=2e-3)


def go1_getup_ppo() -> TrainConfig:
    """Unitree's Go1 stands up from a fall on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.go1_tricks import GetupScales, Go1Getup

    # An action is a step from where the joints are: with little noise it never turned over. With Playground's
    # weight of the height it forgot, after 15 million steps, how to stand: lying costs less.
    return joystick_ppo(
        Go1Getup(scales=GetupScales(torso_height=6.0)),
        40_000_000,
        equivariant=True,
        initial_scale=0.5,
        entropy_cost=0.002,
    )


def leap_rotate_ppo() -> TrainConfig:
    """A LEAP hand turns a cube unseen, on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.leap import LeapRotate

    return joystick_ppo(LeapRotate(), 50_000_000, initial_scale=0.5)


def go1_handstand_ppo() -> TrainConfig:
    """Unitree's Go1 rises onto its front feet on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.go1_tricks import Go1Handstand

    return joystick_ppo(Go1Handstand(), 10_000_000, equivariant=True)


def go1_footstand_ppo() -> TrainConfig:
    """Unitree's Go1 rises onto its rear feet on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.go1_tricks import Go1Footstand

    return joystick_ppo(Go1Footstand(), 10_000_000, equivariant=True)


def g1_motion_ppo() -> TrainConfig:
    """Unitree's G1 follows a motion on our own physics with PPO (after BeyondMimic)."""
    from seedbed.envs.device.robots.g1_motion import G1Motion

    return joystick_ppo(
        G1Motion(),
        4_000_000,
        hidden_sizes=(256, 128),
        value_sizes=(128, 128),
        learning_rate=5e-4,
        initial_scale=0.3,
    )


def t1_joystick_ppo() -> TrainConfig:
    """Booster's T1, a humanoid, follows a joystick on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.t1 import T1Joystick, T1Scales

    # The gait is what takes longest: with the weights that the task is judged by, nothing but standing is
    # learned in this time. Kicks are stronger than the judge's, 1 m/s, which it then stands more often.
    scales = T1Scales(
        tracking_lin_vel=6.0, tracking_ang_vel=4.0, feet_phase=16.0, feet_air_time=4.0
    )
    return biped_ppo(
        T1Joystick(scales=scales, tracking_sigma=0.5, push_speed=1.5), equivariant=True
    )


def g1_joystick_ppo() -> TrainConfig:
    """Unitree's G1, a humanoid, follows a joystick on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.g1 import G1Joystick, G1Scales

    # As T1's. An action moves the servos half as far: with less noise the gait came later. The
    # judge kicks with up to 2 m/s: with kicks of 1.5 m/s in training 47 of 64 robots were upright.
    env = G1Joystick(scales=G1Scales(**_GAIT), tracking_sigma=0.5, push_speed=2.5)
    return biped_ppo(env, steps=80_000_000, **_HALF_ACTIONS)


def g1_rough_ppo() -> TrainConfig:
    """Unitree's G1 follows a joystick over tiles and stairs on our own physics with PPO."""
    from seedbed.envs.device.robots.g1 import G1Scales
    from seedbed.envs.device.robots.rough import G1Rough

    env = G1Rough(scales=G1Scales(**_GAIT), tracking_sigma=0.5, push_speed=2.5)
    return biped_ppo(env, steps=60_000_000, **_HALF_ACTIONS)


def apollo_joystick_ppo() -> TrainConfig:
    """Apptronik's Apollo, a humanoid, follows a joystick on our own physics with PPO (Playground's task)."""
    from seedbed.envs.device.robots.apollo import ApolloJoystick, ApolloScales

    # The more noise, the sooner it stood: with half of this, not within ten million steps.
    scales = ApolloScales(tracking=8.0, feet_phase=16.0)
    env = ApolloJoystick(scales=scales, tracking_sigma=0.5, push_speed=2.5)
    options: dict[str, Any] = _HALF_ACTIONS | {"initial_scale": 1.8, "least_scale": 0.5}
    return biped_ppo(env, steps=80_000_000, **options)


def berkeley_joystick_ppo() -> TrainConfig:
    """Berkeley Humanoid follows a joystick on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.berkeley import BerkeleyJoystick, BerkeleyScales

    env = BerkeleyJoystick(scales=BerkeleyScales(**_GAIT), push_speed=2.5)
    return biped_ppo(env, steps=60_000_000, **_HALF_ACTIONS)


def op3_joystick_ppo() -> TrainConfig:
    """Robotis' OP3, a small humanoid, follows a joystick on our own physics with PPO (Playground's task)."""
    from seedbed.envs.device.robots.op3 import Op3Joystick, Op3Scales

    # No gait is paid for. With half these weights on the command, a sigma of 0.5 and less noise it only stood
    # for the first six million steps.
    scales = Op3Scales(tracking_lin_vel=8.0, tracking_ang_vel=3.0)
    return biped_ppo(
        Op3Joystick(scales=scales, tracking_sigma=1.0),
        equivariant=True,
        steps=60_000_000,
        epochs=2,
        initial_scale=1.2,
        least_scale=0.36,
    )


def h1_joystick_ppo() -> TrainConfig:
    """Unitree's H1, a humanoid, follows a joystick on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.h1 import H1Joystick, H1Scales

    # With the weights that the task is judged by, it learns to walk in its gait, but not where it is told to.
    scales = H1Scales(feet_phase=12.0, tracking_lin_vel=8.0, tracking_ang_vel=3.0)
    return biped_ppo(
        H1Joystick(scales=scales),
        equivariant=True,
        steps=80_000_000,
        epochs=2,
        initial_scale=0.3,
        least_scale=0.08,
    )


def spot_joystick_ppo() -> TrainConfig:
    """Boston Dynamics' Spot follows a joystick on our own physics with PPO (MuJoCo Playground's task)."""
    from seedbed.envs.device.robots.spot import SpotJoystick, SpotScales

    scales = SpotScales(tracking_lin_vel=4.0, tracking_ang_vel=2.0)
    return joystick_ppo(SpotJoystick(scales=scales, tracking_sigma=0.5, push_speed=1.0), 32_000_000)
