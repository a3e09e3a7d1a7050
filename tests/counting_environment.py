"""Counting environments (`seedbed.testing.counting`) that fail, are slow, or never come to be, and others."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from seedbed.testing.counting import CountingEnvironment, episode_length


class FaultyEnvironment(CountingEnvironment):
    """A counting environment with a fault.

    It happens at the environment's `fault_at`-th call of `step`, in the environment `fault_env` or, if that
    is -1, in all.
    """

    def __init__(
        self, fault: str = "", fault_at: int = 5, fault_env: int = -1, **options: Any
    ) -> None:
        super().__init__(**options)
        self._fault, self._fault_at, self._fault_env = fault, fault_at, fault_env
        self._calls = 0

    def step(self, action: int) -> Any:
        observation, reward, *rest = super().step(action)
        self._calls += 1
        faulty = self._fault_env in (-1, self._env)
        if self._fault and faulty and self._calls == self._fault_at:
            observation, reward = self._break(observation, reward)
        return observation, reward, *rest

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


def timestep_number(env: int, episode: int, step: int, length: int) -> int:
    """Counts the timesteps of an environment's life up to this one; the first opening one is 1."""
    return 1 + step + sum(1 + episode_length(env, e, length) for e in range(episode))


def environment_number(seed: int, actor: int, group: int, index: int) -> int:
    """Finds the number of an environment in the first life of an actor of a pool with this seed."""
    host = int(np.random.SeedSequence(seed, spawn_key=(actor, group)).generate_state(1)[0])
    return int(np.random.SeedSequence(host).generate_state(index + 1)[index]) & 0x7FFFFFFF


def make(**options: Any) -> FaultyEnvironment:
    """Makes a counting environment, which may have a fault."""
    return FaultyEnvironment(**options)


class _Talking(CountingEnvironment):
    def step(self, action: int) -> Any:
        print("a step")
        return super().step(action)


def make_talking() -> CountingEnvironment:
    """Makes one that prints a line in each step."""
    return _Talking()


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
