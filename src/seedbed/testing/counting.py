"""An environment that counts: any lost, repeated or misdirected step shows as unequal integers."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from seedbed.types import Array

ENV, EPISODE, STEP, ACTION = range(4)
"""The places of the numbers in an observation."""
NUM_ACTIONS = 1000


class CountingEnvironment(gymnasium.Env[Any, Any]):
    """Observes int32 (environment, episode, step, last action); the reward is `reward_of`.

    The number of the environment is its seed. Episode e of environment s lasts
    `episode_length(s, e, length, spread)` steps; odd episodes are truncated if `truncate`, all others
    terminate. `seedbed train seedbed.testing.counting:CountingEnvironment` trains in it.
    """

    def __init__(
        self, length: int = 7, spread: int = 5, truncate: bool = True, sleep_s: float = 0.0
    ) -> None:
        """Makes an environment; each step takes `sleep_s` seconds, in which another process may work."""
        self.observation_space = spaces.Box(0, np.iinfo(np.int32).max, (4,), np.int32)
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self._length, self._spread, self._truncate = length, spread, truncate
        self._sleep_s = sleep_s
        self._env, self._episode, self._step = 0, -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Opens the next episode; a seed becomes the number of the environment."""
        del options
        if seed is not None:
            self._env = seed & 0x7FFFFFFF
        self._episode += 1
        self._step = 0
        return self._observe(0), {}

    def step(self, action: int) -> Any:
        """Counts a step."""
        self._step += 1
        if self._sleep_s:
            time.sleep(self._sleep_s)
        length = episode_length(self._env, self._episode, self._length, self._spread)
        end = self._step == length
        truncated = end and is_truncated(self._episode, self._truncate)
        reward = float(reward_of(self._episode, self._step))
        return self._observe(action), reward, end and not truncated, truncated, {}

    def _observe(self, action: int) -> np.ndarray:
        return np.array([self._env, self._episode, self._step, action], np.int32)


class CountingChecker:
    """Follows one counting environment and compares every timestep with what must come."""

    def __init__(self, length: int = 7, truncate: bool = True) -> None:
        """Takes the environment's `length` and `truncate`; `spread` must be 5."""
        self._length, self._truncate = length, truncate
        self._env: int | None = None
        self._episode, self._step, self._ended, self._action = 0, 0, False, 0
        self.opened = 0  # episodes so far

    def arrive(
        self, observation: Array, reward: float, terminated: bool, truncated: bool, first: bool
    ) -> None:
        """Checks the next timestep; raises AssertionError if it is another one than must come."""
        opening = self._env is None or self._ended
        if self._env is None:
            # An environment that is reset in the middle of a stream counts its episodes on.
            self._env, self._episode = int(observation[ENV]), int(observation[EPISODE])
        elif opening:
            self._episode, self._step = self._episode + 1, 0
        else:
            self._step += 1
        action = 0 if opening else self._action
        assert observation.tolist() == [self._env, self._episode, self._step, action]
        assert reward == (0 if opening else reward_of(self._episode, self._step))
        assert first == opening
        end = not opening and self._step == episode_length(self._env, self._episode, self._length)
        cut = is_truncated(self._episode, self._truncate)
        assert (terminated, truncated) == (end and not cut, end and cut)
        self._ended = end
        self.opened += opening

    def act(self, action: int) -> None:
        """Notes the action that is sent next."""
        self._action = action


def reward_of(episode: int, step: int) -> int:
    """Returns 1000 * episode + step, of which float32, as timesteps have it, has all digits."""
    return (1000 * episode + step) % (1 << 20)


def episode_length(env: int, episode: int, length: int, spread: int = 5) -> int:
    """Returns the steps of an episode: from `length` on, `spread` different numbers."""
    return length + (env + episode) % spread


def is_truncated(episode: int, truncate: bool) -> bool:
    """Returns whether an episode ends by truncation."""
    return truncate and episode % 2 == 1
