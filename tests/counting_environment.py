"""An environment that counts: any lost, repeated or misdirected step shows as unequal integers."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ENV, EPISODE, STEP, ACTION = range(4)
NUM_ACTIONS = 1000


class CountingEnvironment(gymnasium.Env):
    """Observes (environment, episode, step, last action); the reward is 1000 * episode + step.

    The environment number is its seed. Episode e of environment s lasts
    `episode_length(s, e, length, spread)` steps; odd episodes are truncated if `truncate`, all others
    terminate. `fault` happens at the environment's `fault_at`-th call of `step`, in the environment
    `fault_env` or, if that is -1, in all.
    """

    def __init__(
        self,
        length: int = 7,
        spread: int = 5,
        truncate: bool = True,
        fault: str = "",
        fault_at: int = 5,
        fault_env: int = -1,
        sleep_s: float = 0.0,
    ) -> None:
        self.observation_space = spaces.Box(0, np.iinfo(np.int32).max, (4,), np.int32)
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self._length, self._spread, self._truncate = length, spread, truncate
        self._fault, self._fault_at, self._fault_env = fault, fault_at, fault_env
        self._sleep_s = sleep_s
        self._env, self._episode, self._step, self._calls = 0, -1, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Opens the next episode."""
        if seed is not None:
            self._env = seed & 0x7FFFFFFF
        self._episode += 1
        self._step = 0
        return self._observe(0), {}

    def step(self, action: int) -> Any:
        """Counts a step."""
        self._step += 1
        self._calls += 1
        if self._sleep_s:
            time.sleep(self._sleep_s)
        observation, reward = self._observe(action), 1000.0 * self._episode + self._step
        faulty = self._fault_env in (-1, self._env)
        if self._fault and faulty and self._calls == self._fault_at:
            observation, reward = self._break(observation, reward)
        length = episode_length(self._env, self._episode, self._length, self._spread)
        end = self._step == length
        truncated = end and is_truncated(self._episode, self._truncate)
        return observation, reward, end and not truncated, truncated, {}

    def _observe(self, action: int) -> np.ndarray:
        return np.array([self._env, self._episode, self._step, action], np.int32)

    def _break(self, observation: np.ndarray, reward: float) -> tuple[np.ndarray, float]:
        if self._fault == "print and raise":
            print("last words", flush=True)
        if self._fault.endswith("raise"):
            raise RuntimeError("the counter broke")
        if self._fault == "exit":
            print("last words of the counter", flush=True)
            os._exit(3)
        if self._fault == "orphan" and os.fork():
            os._exit(4)  # the child holds all that its parent held
        if self._fault == "orphan":
            time.sleep(8)
            os._exit(0)
        if self._fault == "hang":
            time.sleep(1e6)
        if self._fault == "shape":
            return observation[:3], reward
        if self._fault == "dtype":
            return observation.astype(np.float64), reward
        return observation, float("nan")


def episode_length(env: int, episode: int, length: int, spread: int = 5) -> int:
    """Steps of an episode: from `length`, `spread` different numbers."""
    return length + (env + episode) % spread


def timestep_number(env: int, episode: int, step: int, length: int) -> int:
    """Counts the timesteps of an environment's life up to this one; the first opening one is 1."""
    return 1 + step + sum(1 + episode_length(env, e, length) for e in range(episode))


def environment_number(seed: int, actor: int, group: int, index: int) -> int:
    """Finds the number of an environment in the first life of an actor of a pool with this seed."""
    host = int(np.random.SeedSequence(seed, spawn_key=(actor, group)).generate_state(1)[0])
    return int(np.random.SeedSequence(host).generate_state(index + 1)[index]) & 0x7FFFFFFF


def is_truncated(episode: int, truncate: bool) -> bool:
    """Whether an episode ends by truncation."""
    return truncate and episode % 2 == 1


def make(**options: Any) -> CountingEnvironment:
    """Makes a counting environment."""
    return CountingEnvironment(**options)


def make_slow() -> CountingEnvironment:
    """Makes one that leaves the cores to whoever waits for something else."""
    return CountingEnvironment(sleep_s=0.005)


def make_never(hang: bool = False) -> CountingEnvironment:
    """Ends the process instead of making an environment, or hangs."""
    if hang:
        time.sleep(1e6)
    print("no such device", flush=True)
    os._exit(3)


def make_float(**options: Any) -> gymnasium.Env:
    """Makes an environment whose observation becomes NaN at its fifth step."""
    return _Nan()


class _Nan(gymnasium.Env):
    observation_space = spaces.Dict(
        {"b": spaces.Box(-1, 1, (2,), np.float64), "a": spaces.Discrete(3)}
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)
    _steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return {"b": np.zeros(2), "a": 1}, {}

    def step(self, action: np.ndarray) -> Any:
        self._steps += 1
        value = np.nan if self._steps == 5 else 0.0
        return {"b": np.array([0.0, value]), "a": 1}, 0.0, False, False, {}


class Matching(gymnasium.Env):
    """Shows a bit, and rewards the same bit as action; 8 steps. Guessing returns 4 on average."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    _step, _bit = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self._show(), {}

    def step(self, action: int) -> Any:
        reward = float(action == self._bit)
        self._step += 1
        return self._show(), reward, self._step == 8, False, {}

    def _show(self) -> np.ndarray:
        self._bit = int(self.np_random.integers(2))
        return np.full(1, self._bit, np.float32)


class Checker:
    """Follows one environment of a group and compares every timestep with what must come."""

    def __init__(self, length: int = 7, truncate: bool = True) -> None:
        self._length, self._truncate = length, truncate
        self._env: int | None = None
        self._episode, self._step, self._ended, self._action = 0, 0, False, 0
        self.opened = 0

    def arrive(
        self, observation: np.ndarray, reward: float, terminated: bool, truncated: bool, first: bool
    ) -> None:
        """Checks a timestep."""
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
        assert reward == (0 if opening else 1000 * self._episode + self._step)
        assert first == opening
        end = not opening and self._step == episode_length(self._env, self._episode, self._length)
        cut = is_truncated(self._episode, self._truncate)
        assert (terminated, truncated) == (end and not cut, end and cut)
        self._ended = end
        self.opened += opening

    def act(self, action: int) -> None:
        """Notes the action that is sent."""
        self._action = action
