"""A Gymnasium environment that tells masks of actions in `info`; a forbidden choice is an error."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Masked(gymnasium.Env):
    """A Gymnasium environment that tells its masks in `info`; a forbidden choice is an error."""

    def __init__(self, sets: int = 0, forgets: bool = False) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,))
        self.action_space = (
            spaces.MultiDiscrete([3] * sets) if sets else spaces.Discrete(3, start=5)
        )
        self._sets, self._forgets, self.resets = sets, forgets, 0

    def _told(self) -> dict[str, Any]:
        masks = [self.np_random.integers(0, 2, 3).astype(np.int8) for _ in range(self._sets or 1)]
        for mask in masks:
            mask[self.np_random.integers(3)] = 1
        self._masks, self._t = masks, self._t + 1
        if self._forgets and self._t > 2:
            return {}
        return {"action_mask": tuple(masks) if self._sets else masks[0]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._t, self.resets = 0, self.resets + 1
        return self.observation_space.sample(), self._told()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        chosen = action if self._sets else [action - 5]
        assert all(mask[choice] for mask, choice in zip(self._masks, chosen, strict=True))
        return self.observation_space.sample(), 1.0, self._t == 6, False, self._told()
