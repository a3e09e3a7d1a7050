"""What the package `envpool` offers, over counting environments, with the faults that a test asks for."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from gymnasium import spaces

from seedbed import cache
from seedbed.testing.counting import CountingEnvironment

IDS = ["Counting-v0", "Image-v0", "Dict-v0", "Duel-v0", "Engine-v0"]
TINY = np.finfo(np.float64).tiny
IMAGE = spaces.Box(0, 255, (3, 8, 16), np.uint8)
DICT = spaces.Dict(
    {"direction": spaces.Discrete(4), "image": spaces.Box(0, 255, (7, 7, 3), np.uint8)}
)
INFO = {
    "info:HEALTH": ((-1,), np.float64),
    "info:score": ((2,), np.int32),
    "info:env_id": ((), np.int32),
}


def list_all_envs() -> list[str]:
    """Lists the ids, as EnvPool does."""
    return IDS


def make_spec(task_id: str) -> types.SimpleNamespace:
    """Returns what EnvPool knows of an environment before it is made."""
    engine = {"vzd_path": "/nowhere/vizdoom"} if task_id == "Engine-v0" else {}
    return types.SimpleNamespace(config=types.SimpleNamespace(**engine))


def make(
    task_id: str,
    env_type: str,
    num_envs: int,
    num_threads: int,
    env_seed: list[int],
    fault: str = "",
    max_num_players: int = 1,
    vzd_path: str = "",
) -> Pool:
    """Makes a pool, as EnvPool does."""
    assert (task_id == "Engine-v0") == vzd_path.startswith(str(cache.directory("doom")))
    assert env_type == "gymnasium" and num_threads >= 1
    assert all(0 <= seed < 1 << 31 for seed in env_seed) and len(env_seed) == num_envs
    return Pool(task_id, env_seed, fault, 2 if task_id == "Duel-v0" else max_num_players)


class Pool:
    """A pool of counting environments with next-step auto-reset; `fault` says what it does wrong."""

    def __init__(self, task_id: str, seeds: list[int], fault: str, players: int) -> None:
        self.observation_space: spaces.Space = CountingEnvironment().observation_space
        if task_id == "Image-v0":
            self.observation_space = IMAGE
        if task_id == "Dict-v0":
            self.observation_space = DICT
        self.action_space: spaces.Space = CountingEnvironment().action_space
        if task_id == "Image-v0":
            self.action_space = spaces.Box(TINY, np.finfo(np.float64).max, (2,), np.float64)
        arrays = {
            name: types.SimpleNamespace(shape=shape, dtype=dtype)
            for name, (shape, dtype) in INFO.items()
        }
        self.spec = types.SimpleNamespace(state_array_spec=arrays)
        self.config = {"max_num_players": players}
        self.closed, self.given = False, np.zeros(0)
        self._envs = [CountingEnvironment() for _ in seeds]
        self._seeds: list[int | None] = list(seeds)
        self._fault, self._steps = fault, np.zeros(len(seeds), np.int32)
        self._ended = np.zeros(len(seeds), bool)

    def reset(self) -> Any:
        """Opens an episode everywhere."""
        rows = [env.reset(seed=seed)[0] for env, seed in zip(self._envs, self._seeds, strict=True)]
        self._seeds = [None] * len(rows)
        self._steps[:], self._ended[:] = 0, False
        return self._observe(rows), self._info()

    def step(self, action: np.ndarray) -> Any:
        """Steps every environment, or opens the next episode of one that has ended."""
        self.given = action
        if self._fault == "raises":
            raise RuntimeError("the game\ncrashed")
        count = len(self._envs)
        rows, reward = [], np.zeros(count, np.float32)
        terminated, truncated = np.zeros(count, bool), np.zeros(count, bool)
        for i, env in enumerate(self._envs):
            if self._ended[i]:
                rows.append(env.reset()[0])
                self._steps[i] = 0
                # EnvPool's games may have gone on before the picture is taken.
                reward[i] = 7.0 if self._fault == "dirty" else 0.0
                continue
            row, reward[i], terminated[i], truncated[i], _ = env.step(int(action[i]))
            self._steps[i] += 1
            if self._fault == "same step" and (terminated[i] or truncated[i]):
                row, self._steps[i] = env.reset()[0], 0
            rows.append(row)
        self._ended = (terminated | truncated) & (self._fault != "same step")
        if self._fault == "reward":
            reward[-1] = np.nan
        return self._observe(rows), reward, terminated, truncated, self._info()

    def close(self) -> None:
        """Notes that it is closed."""
        self.closed = True

    def _info(self) -> dict[str, Any]:
        order = np.arange(len(self._envs), dtype=np.int32)
        health = np.full(len(order), np.inf if self._fault == "health" else 100.0)
        score = np.stack([order, -order], 1)
        order = order[::-1] if self._fault == "order" else order
        return {
            "env_id": order,
            "elapsed_step": self._steps.copy(),
            "HEALTH": health,
            "score": score,
        }

    def _observe(self, rows: list[np.ndarray]) -> Any:
        count = len(rows)
        if self.observation_space is IMAGE:
            image = np.arange(3 * 8 * 16, dtype=np.uint8).reshape(1, 3, 8, 16)
            return np.repeat(image, count, 0)
        if self.observation_space is DICT:
            images = np.zeros((count, 7, 7, 3), np.uint8)
            return {"direction": np.full(count, 2, np.int32), "image": images}
        return np.stack(rows)
