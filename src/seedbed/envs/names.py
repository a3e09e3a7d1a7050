"""Names of the tasks on the device. The module imports none of them, and so no JAX."""

from __future__ import annotations

from string import capwords


def camel(name: str) -> str:
    """Returns a name such as `half_cheetah` as that of a class."""
    return capwords(name, "_").replace("_", "")


_LOCOMOTION_NAMES = [
    "ant",
    "half_cheetah",
    "hopper",
    "humanoid",
    "humanoid_standup",
    "inverted_pendulum",
    "inverted_double_pendulum",
    "pusher",
    "reacher",
    "swimmer",
    "walker2d",
]
_LOCOMOTION = {
    name: f"seedbed.envs.device.locomotion.{name}:{camel(name)}" for name in _LOCOMOTION_NAMES
}
SUITE = "dm/"
"""How names of dm_control's tasks begin."""
_SUITE_NAMES = {
    "finger": {"finger": ("spin", "turn_easy", "turn_hard")},
    "humanoid": {"humanoid": ("stand", "walk", "run", "run_pure_state")},
    "planar": {"cheetah": ("run",), "hopper": ("stand", "hop"), "walker": ("stand", "walk", "run")},
    "poles": {
        "acrobot": ("swingup", "swingup_sparse"),
        "cartpole": (
            "balance",
            "balance_sparse",
            "swingup",
            "swingup_sparse",
            "two_poles",
            "three_poles",
        ),
        "pendulum": ("swingup",),
    },
    "reaching": {
        "fish": ("upright", "swim"),
        "point_mass": ("easy",),
        "reacher": ("easy", "hard"),
        "swimmer": ("swimmer6", "swimmer15"),
    },
}
"""The tasks of dm_control's domains, by the module that has them."""
_SUITE = {
    f"{SUITE}{domain}-{task}": f"seedbed.envs.device.suite.{module}:{camel(f'{domain}_{task}')}"
    for module, domains in _SUITE_NAMES.items()
    for domain, tasks in domains.items()
    for task in tasks
}
ON_DEVICE = {
    **_LOCOMOTION,
    **_SUITE,
    "fetch": "seedbed.envs.device.targets.fetch:Fetch",
    **{
        f"{robot}/joystick": f"seedbed.envs.device.robots.{robot}:{robot.capitalize()}Joystick"
        for robot in ("go1", "spot", "t1", "g1", "h1", "berkeley", "apollo", "op3")
    },
    **{
        f"go1/{trick}": f"seedbed.envs.device.robots.go1_tricks:Go1{trick.capitalize()}"
        for trick in ("getup", "handstand", "footstand")
    },
    "go1/rough": "seedbed.envs.device.robots.rough:Go1Rough",
    "g1/rough": "seedbed.envs.device.robots.rough:G1Rough",
    "g1/motion": "seedbed.envs.device.robots.g1_motion:G1Motion",
    "leap/rotate": "seedbed.envs.device.robots.leap:LeapRotate",
    "grasp": "seedbed.envs.device.targets.grasp:Grasp",
    "reacher_angle": "seedbed.envs.device.targets.reacher_angle:ReacherAngle",
    "ur5e": "seedbed.envs.device.targets.ur5e:Ur5e",
    "acrobot": "seedbed.envs.device.classic.acrobot:Acrobot",
    "cartpole": "seedbed.envs.device.classic.cartpole:CartPole",
    "mountain_car": "seedbed.envs.device.classic.mountain_car:MountainCar",
    "pendulum": "seedbed.envs.device.classic.pendulum:Pendulum",
}
"""Paths `module:Class` of on-device environments, by short name."""
