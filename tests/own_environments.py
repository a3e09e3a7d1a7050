"""Environments that are registered with Gymnasium as packages of users do."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.mujoco.inverted_pendulum_v5 import InvertedPendulumEnv


class OwnPendulum(InvertedPendulumEnv):
    """Truncates an episode after `own_limit` steps."""

    def __init__(self, own_limit: int = 1000, **options: Any) -> None:
        super().__init__(**options)
        self.own_limit, self.count = own_limit, 0

    def reset(self, **options: Any) -> Any:
        self.count = 0
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self.count += 1
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self.count >= self.own_limit, info


class Choosing(gymnasium.Env):
    """Takes only actions of its space, in the space's own type, whose first choice is not 0."""

    SPACES: ClassVar[dict[str, spaces.Space]] = {
        "one": spaces.Discrete(2, start=5),
        "grid": spaces.Box(np.int8([[-3, 2]]), np.int8([[-1, 4]]), dtype=np.int8),
    }

    def __init__(self, kind: str) -> None:
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,)), self.SPACES[kind]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.count += 1
        return np.full(2, 0.1 * self.count, np.float32), 1.0, self.count == 4, False, {}


class Parted(gymnasium.ObservationWrapper):
    """Shows a dict within a dict."""

    def __init__(self) -> None:
        super().__init__(Choosing("one"))
        part = self.env.observation_space
        self.observation_space = spaces.Dict({"at": part, "deep": spaces.Dict({"goal": part})})

    def observation(self, observation: Any) -> Any:
        return {"at": observation, "deep": {"goal": observation}}


gymnasium.register("OwnPendulum-v0", entry_point=OwnPendulum)
gymnasium.register("Choosing-v0", entry_point=Choosing)
gymnasium.register("Parted-v0", entry_point=Parted)
