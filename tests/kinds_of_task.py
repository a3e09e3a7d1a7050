"""An environment of every kind of task that the table of defaults knows, on the host and on the device."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from seedbed import trees
from seedbed.config.defaults import Task
from seedbed.envs.device.locomotion.ant import Ant
from seedbed.envs.device.locomotion.half_cheetah import HalfCheetah
from seedbed.envs.device.locomotion.hopper import Hopper
from seedbed.envs.device.locomotion.humanoid import Humanoid
from seedbed.envs.device.locomotion.humanoid_standup import HumanoidStandup
from seedbed.envs.device.locomotion.inverted_double_pendulum import InvertedDoublePendulum
from seedbed.envs.device.locomotion.inverted_pendulum import InvertedPendulum
from seedbed.envs.device.locomotion.pusher import Pusher
from seedbed.envs.device.locomotion.reacher import Reacher
from seedbed.envs.device.locomotion.swimmer import Swimmer
from seedbed.envs.device.locomotion.walker2d import Walker2d
from seedbed.envs.host.atari import AtariEnv
from seedbed.envs.host.gym import FactoryEnv
from seedbed.types import ActionSpec, Box, Discrete, EnvSpec, EnvState, MultiDiscrete, Timestep

INF = float("inf")
OBSERVATIONS: dict[str, gymnasium.Space] = {
    "vectors": spaces.Dict({"a": spaces.Box(-1, 1, (7, 7, 3)), "b": spaces.Discrete(3)}),
    "images": spaces.Tuple([spaces.Box(0, 255, (24, 20, 3), np.uint8), spaces.Box(-1, 1, (4,))]),
}
ACTIONS: dict[str, gymnasium.Space] = {
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiBinary(2),
    "bounded Box": spaces.Box(-2.0, 2.0, (2,)),
    "unbounded Box": spaces.Box(np.array([0, -INF], np.float32), np.array([INF, INF], np.float32)),
}
SPECS: dict[str, ActionSpec] = {
    "Discrete": Discrete(3),
    "MultiDiscrete": MultiDiscrete((2, 2)),
    "bounded Box": Box((2,), (-2.0, -2.0), (2.0, 2.0)),
    "unbounded Box": Box((2,), (0.0, -INF), (INF, INF)),
}
LENGTH = 10  # of an episode


class Shown(gymnasium.Env):
    """An environment of a kind of task; it shows noise, and its reward is the number of the step."""

    def __init__(self, observation: str, action: str) -> None:
        self.observation_space, self.action_space = OBSERVATIONS[observation], ACTIONS[action]
        self._t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._t += 1
        return self.observation_space.sample(), float(self._t), self._t == LENGTH, False, {}


@dataclasses.dataclass(frozen=True)
class OnDevice:
    """The same on the device, where images are float32. Its state: a key, and the number of the step."""

    observation: str
    action: str
    episode_steps: int = LENGTH
    frame_skip: int = 1

    @property
    def spec(self) -> EnvSpec:
        host = shown(self.observation, self.action).make(1, 0)
        seen = trees.map(
            lambda leaf: dataclasses.replace(leaf, dtype="float32"), host.spec.observation
        )
        return EnvSpec(seen, SPECS[self.action])

    def reset(self, key: jax.Array) -> EnvState:
        return self._state(key, jnp.float32(0))

    def step(self, state: EnvState, action: jax.Array) -> EnvState:
        key, t = state.inner
        return self._state(jax.random.fold_in(key, 1), t + 1)

    def _state(self, key: jax.Array, t: jax.Array) -> EnvState:
        def noise(leaf: Any) -> jax.Array:
            return jax.random.uniform(key, leaf.shape).astype(leaf.dtype)

        no = jnp.bool_(False)
        seen = trees.map(noise, self.spec.observation)
        return EnvState((key, t), Timestep(seen, t, no, no, t == 0), {})


def shown(observation: str, action: str) -> FactoryEnv:
    """The environment of the host for a kind of task."""
    return FactoryEnv(f"{__name__}:Shown", kwargs={"observation": observation, "action": action})


def example(task: Task) -> Any:
    """An environment of a kind of task."""
    if task.environment == "Atari":
        return AtariEnv("pong")
    make = OnDevice if task.environment == "device" else shown
    return make(task.observation, task.action)


KINDS = [
    *itertools.starmap(Task, itertools.product(("host", "device"), OBSERVATIONS, ACTIONS)),
    Task("Atari", "images", "Discrete"),
]


TASKS: tuple[Any, ...] = (
    Ant,
    HalfCheetah,
    Hopper,
    Walker2d,
    Humanoid,
    HumanoidStandup,
    Swimmer,
    Reacher,
    Pusher,
    InvertedPendulum,
    InvertedDoublePendulum,
)
