"""On-device environments as the vector environments of Stable-Baselines3 and SBX."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from seedbed import trees
from seedbed.envs.device import wrappers
from seedbed.envs.device.gymnasium_api import (
    Batch,
    action_space_of,
    checked_action,
    chosen,
    space_of,
)
from seedbed.types import Environment, SeedbedError

_BASE = "stable_baselines3.common.vec_env"


def make_sb3(env: Environment, num_envs: int, seed: int | None = None) -> Any:
    """Makes `num_envs` environments as one of Stable-Baselines3's `VecEnv`, on the default device.

    An environment whose episode has ended resets itself in the same step. Its dict in `infos` then has
    `terminal_observation`, `TimeLimit.truncated`, and the return and length under `episode`, as Monitor
    writes them. Single numbers among the observations are arrays of one, which the package's networks need.
    The first reset uses `seed`. Raises SeedbedError if the package is missing, or if
    `num_envs` is below 1.
    """
    if importlib.util.find_spec("stable_baselines3") is None:
        raise SeedbedError(
            "make_sb3 needs the package stable_baselines3: pip install stable-baselines3"
        )
    if num_envs < 1:
        raise SeedbedError(f"make_sb3: num_envs is {num_envs}; give at least 1")
    base = importlib.import_module(_BASE).VecEnv
    # The base class is known only now, because the package is not ours to install.
    return type("SeedbedVecEnv", (_SameStep, base), {})(env, num_envs, seed)


class _SameStep:
    """The methods of a `VecEnv`; attributes of environments are those of the task."""

    num_envs: int

    def __init__(self, env: Environment, num_envs: int, seed: int | None) -> None:
        self.env, self.render_mode = env, None
        self._batch = Batch(env, num_envs, wrappers.training)
        self._rng, self._seeded = np.random.default_rng(seed), True
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        seen = trees.map(
            lambda leaf: dataclasses.replace(leaf, shape=leaf.shape or (1,)), env.spec.observation
        )
        spaces = space_of(seen), action_space_of(env.spec.action)
        super().__init__(num_envs, *spaces)  # type: ignore[call-arg]

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Sets the seed of the next reset; returns it once for each environment."""
        self._rng, self._seeded = np.random.default_rng(seed), True
        return [seed] * self.num_envs

    def reset(self) -> Any:
        """Opens an episode in every environment; returns observations `[num_envs, ...]`."""
        self._returns[:], self._lengths[:] = 0.0, 0
        seeded, self._seeded = self._seeded, False
        return _shown(self._batch.reset(self._rng, seeded=seeded).timestep.observation)

    def step_async(self, actions: np.ndarray) -> None:
        """Takes actions `[num_envs, ...]`, which `step_wait` carries out."""
        self._actions = checked_action(actions, self.env.spec.action, (self.num_envs,))

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Returns observations, rewards float32, whether episodes have ended, and a dict for each."""
        now = self._batch.step(self._actions).timestep
        now = now._replace(observation=_shown(now.observation))
        self._returns += now.reward
        self._lengths += 1
        ended = np.logical_or(now.terminated, now.truncated)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if not ended.any():
            return now.observation, now.reward, ended, infos
        for i in np.flatnonzero(ended):
            infos[i] = {
                "terminal_observation": trees.map(lambda leaf, i=i: leaf[i], now.observation),
                "TimeLimit.truncated": bool(now.truncated[i] and not now.terminated[i]),
                "episode": {"r": float(self._returns[i]), "l": int(self._lengths[i]), "t": 0.0},
            }
        self._returns[ended], self._lengths[ended] = 0.0, 0
        # The step after an end opens an episode. The others stay where they are.
        opened = self._batch.amended(
            lambda state, step: chosen(ended, step(state, self._actions), state)
        )
        return _shown(opened.timestep.observation), now.reward, ended, infos

    def close(self) -> None:
        """Does nothing: there is nothing to free."""

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Returns no pictures: nothing is rendered."""
        return [None] * self.num_envs

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Returns an attribute of the task, once for each environment; raises AttributeError."""
        own = self.render_mode if attr_name == "render_mode" else getattr(self.env, attr_name)
        return [own for _ in self._indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Raises SeedbedError: a task's options are given when it is made."""
        raise SeedbedError(
            f"{attr_name!r} cannot be set: give options of the task to seedbed.make_sb3"
        )

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Raises AttributeError: the environments are one program, and have no methods of their own."""
        raise AttributeError(f"environments on the device have no method {method_name!r}")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """Returns that no environment is wrapped."""
        del wrapper_class
        return [False for _ in self._indices(indices)]

    def _indices(self, indices: Any) -> Sequence[int]:
        return self._get_indices(indices)  # type: ignore[attr-defined, no-any-return]


def _shown(observation: Any) -> Any:
    """Returns observations `[num_envs, ...]` in which single numbers are arrays of one."""
    return trees.map(lambda leaf: leaf[:, None] if leaf.ndim == 1 else leaf, observation)
