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
from seedbed.config.configuration import TrainConfig
from seedbed.config.device_recipes import biped_ppo, joystick_ppo, on_device_ppo, suite_ppo
from seedbed.config.recipes import (
    atari_dqn,
    atari_impala,
    atari_ppo,
    atari_r2d2,
    atari_vmpo,
    images_dqn,
    images_impala,
    images_ppo,
    images_r2d2,
    images_vmpo,
    real_vectors_ppo,
    vectors_apg,
    vectors_ars,
    vectors_awr,
    vectors_dqn,
    vectors_es,
    vectors_impala,
    vectors_ppo,
    vectors_r2d2,
    vectors_sac,
    vectors_vmpo,
)
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.contract import HostEnvConfig, is_on_device, made_once
from seedbed.spaces import ACTION_MASK, without
from seedbed.types import ActionSpec, Box, Environment, EnvSpec, SeedbedError

Maker = Callable[[Any], TrainConfig]
"""A function that makes a configuration for an environment."""


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
        {
            "impala": atari_impala,
            "ppo": atari_ppo,
            "dqn": atari_dqn,
            "r2d2": atari_r2d2,
            "vmpo": atari_vmpo,
        },
    ),
    Row(
        "host",
        "images",
        ("Discrete",),
        {
            "impala": images_impala,
            "ppo": images_ppo,
            "dqn": images_dqn,
            "r2d2": images_r2d2,
            "vmpo": images_vmpo,
        },
    ),
    Row(
        "host",
        "images",
        ("MultiDiscrete",),
        {
            "impala": images_impala,
            "ppo": images_ppo,
            "vmpo": images_vmpo,
        },
    ),
    Row(
        "host",
        "images",
        _REAL,
        {
            "ppo": images_ppo,
            "impala": images_impala,
            "vmpo": images_vmpo,
        },
    ),
    Row(
        "host",
        "vectors",
        ("Discrete",),
        {
            "ppo": vectors_ppo,
            "impala": vectors_impala,
            "dqn": vectors_dqn,
            "r2d2": vectors_r2d2,
            "vmpo": vectors_vmpo,
            "awr": vectors_awr,
        },
    ),
    Row(
        "host",
        "vectors",
        ("MultiDiscrete",),
        {
            "ppo": vectors_ppo,
            "impala": vectors_impala,
            "vmpo": vectors_vmpo,
            "awr": vectors_awr,
        },
    ),
    Row(
        "host",
        "vectors",
        ("bounded Box",),
        {
            "ppo": real_vectors_ppo,
            "sac": vectors_sac,
            "impala": vectors_impala,
            "vmpo": vectors_vmpo,
            "awr": vectors_awr,
        },
    ),
    Row(
        "host",
        "vectors",
        ("unbounded Box",),
        {
            "ppo": real_vectors_ppo,
            "impala": vectors_impala,
            "vmpo": vectors_vmpo,
            "awr": vectors_awr,
        },
    ),
    Row(
        "device",
        "images",
        ("Discrete",),
        {
            "ppo": images_ppo,
            "impala": images_impala,
            "dqn": images_dqn,
            "r2d2": images_r2d2,
            "vmpo": images_vmpo,
        },
    ),
    Row(
        "device",
        "images",
        ("MultiDiscrete", *_REAL),
        {
            "ppo": images_ppo,
            "impala": images_impala,
            "vmpo": images_vmpo,
        },
    ),
    Row(
        "device",
        "vectors",
        ("Discrete",),
        {
            "ppo": on_device_ppo,
            "impala": vectors_impala,
            "dqn": vectors_dqn,
            "r2d2": vectors_r2d2,
            "vmpo": vectors_vmpo,
            "awr": vectors_awr,
            "es": vectors_es,
            "ars": vectors_ars,
        },
    ),
    Row(
        "device",
        "vectors",
        ("bounded Box",),
        {
            "ppo": on_device_ppo,
            "sac": vectors_sac,
            "impala": vectors_impala,
            "vmpo": vectors_vmpo,
            "awr": vectors_awr,
            "apg": vectors_apg,
            "es": vectors_es,
            "ars": vectors_ars,
        },
    ),
    Row(
        "device",
        "vectors",
        ("MultiDiscrete", "unbounded Box"),
        {
            "ppo": on_device_ppo,
            "impala": vectors_impala,
            "vmpo": vectors_vmpo,
            "awr": vectors_awr,
            "es": vectors_es,
            "ars": vectors_ars,
        },
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
        rows = [row.cells() for row in ROWS if agent in row.agents]
        kinds = sorted({f"{action} actions from {seen}" for _, seen, action, *_ in rows})
        if all(row[0] == "device" for row in rows):
            kinds.append("only of tasks on the device, see `seedbed list`")
        raise SeedbedError(
            f"agent {agent} does not fit {name or env}, which takes {task.action} actions from "
            f"{task.observation}: choose {' or '.join(agents)} ({agent} takes {'; '.join(kinds)})"
        )
    made = _of_family(env) if agent == "ppo" else None
    made = made or agents[agent](env)
    return dataclasses.replace(made, name=f"{name}/{agent}" if name else agent)


def _of_family(env: HostEnvConfig | Environment) -> TrainConfig | None:
    """Returns the configuration with PPO of a family of tasks with settings of its own; None for others."""
    if not is_on_device(env):
        return None
    from seedbed.envs.device.robots.joystick import JoystickTask
    from seedbed.envs.device.robots.servoed import ServoedTask
    from seedbed.envs.device.suite.task import SuiteTask
    from seedbed.envs.device.wrappers import innermost

    task = innermost(env)
    if isinstance(task, JoystickTask):
        return joystick_ppo(env, 15_000_000) if len(task.feet) > 2 else biped_ppo(env)
    if isinstance(task, ServoedTask):
        return joystick_ppo(env, 50_000_000)
    return suite_ppo(env) if isinstance(task, SuiteTask) else None


def task_of(env: HostEnvConfig | Environment) -> Task:
    """Returns an environment's kind of task.

    Makes a host environment other than Atari once, to see its spaces; raises SeedbedError if that fails.
    """
    if isinstance(env, AtariEnv):
        return Task("Atari", "images", "Discrete")
    if is_on_device(env):
        return _task("device", env.spec)
    from seedbed.run.stacking import stacked_spec

    return _task("host", stacked_spec(made_once(env).spec, env.frame_stack))


def _task(environment: str, spec: EnvSpec) -> Task:
    from seedbed.nets.torsos import fits_convolutions

    seen = without(spec.observation, ACTION_MASK)
    images = any(fits_convolutions(leaf.shape) for leaf in trees.leaves(seen))
    return Task(environment, "images" if images else "vectors", _action_kind(spec.action))


def _action_kind(action: ActionSpec) -> str:
    if not isinstance(action, Box):
        return type(action).__name__
    bounded = np.isfinite([*action.low, *action.high]).all()
    return "bounded Box" if bounded else "unbounded Box"
