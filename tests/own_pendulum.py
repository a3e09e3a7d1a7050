"""A pendulum of Gymnasium that ends its own episodes, registered as packages of users do."""

from __future__ import annotations

from typing import Any

import gymnasium
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


gymnasium.register("OwnPendulum-v0", entry_point=OwnPendulum)
