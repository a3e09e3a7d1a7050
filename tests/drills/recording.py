"""An environment that records every timestep before anybody else hears of it, and records of unrolls.

`recording_agent.py` records the unrolls that it learns from, and `accounts.py` compares the two.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

NUM_ACTIONS = 1000
OPENING, STEP, END, RESET = range(4)
"""Kinds of timesteps: the first of an episode, one within it, its last; a reset before the end."""
RECORD = np.dtype(
    [
        ("number", "<i4"),  # of the timestep, from 1
        ("kind", "<i4"),
        ("action", "<i4"),  # that led to it
        ("age", "<i4"),  # steps since the opening of the episode
        ("time", "<f8"),  # monotonic, s
    ]
)
UNROLLS = "learned"
"""The folder of what learners have recorded."""
_RECORDS = Path(os.environ.get("SEEDBED_DRILL_RECORDS", "/srv"))


def reward_of(environment: int, number: int) -> float:
    """Returns the reward of a timestep; single precision holds it exactly."""
    return float(number % 4096) + (environment % 256) / 256


class RecordingEnvironment(gymnasium.Env[np.ndarray, np.int64]):
    """Observes (environment, number of the timestep, age of the episode, last action).

    The environment's number is drawn when it is made. Episodes have 20 to 26 steps.
    """

    def __init__(self, sleep_s: float = 0.02) -> None:
        folder = _RECORDS / socket.gethostname()
        folder.mkdir(exist_ok=True)
        width = folder / "width"
        self._width = int(width.read_text()) if width.exists() else 4
        self.observation_space = spaces.Box(0, np.iinfo(np.int32).max, (self._width,), np.int32)
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        self._environment = 1 + int.from_bytes(os.urandom(3), "little")
        self._file = (folder / f"{self._environment:06x}").open("ab", buffering=0)
        self._sleep_s, self._number, self._age, self._ended = sleep_s, 0, 0, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Opens an episode."""
        kind = OPENING if self._ended else RESET
        self._age, self._ended = 0, False
        return self._observe(kind, 0), {}

    def step(self, action: np.int64) -> Any:
        """Counts a step."""
        time.sleep(self._sleep_s)
        self._age += 1
        self._ended = self._age >= 20 + (self._environment + self._number) % 7
        observation = self._observe(END if self._ended else STEP, int(action))
        reward = reward_of(self._environment, self._number)
        return observation, reward, self._ended, False, {}

    def _observe(self, kind: int, action: int) -> np.ndarray:
        self._number += 1
        record = (self._number, kind, action, self._age, time.monotonic())
        self._file.write(np.array(record, RECORD).tobytes())
        seen = np.zeros(self._width, np.int32)
        seen[:4] = self._environment, self._number, self._age, action
        return seen


def make() -> RecordingEnvironment:
    """Makes an environment."""
    return RecordingEnvironment()


@dataclasses.dataclass
class Unroll:
    """What an agent has learned from, of one environment: T + 1 timesteps and T actions, float64."""

    observation: np.ndarray
    reward: np.ndarray
    first: np.ndarray
    ended: np.ndarray
    action: np.ndarray
    count: np.ndarray  # the agent's memory, which counts steps since an opening timestep


def write_unrolls(path: Path, batch: Unroll) -> None:
    """Adds a batch, `[T + 1, B, ...]` and `[T, B]`, in one piece."""
    leaves = [np.asarray(getattr(batch, f.name), np.float64) for f in dataclasses.fields(Unroll)]
    steps, size = leaves[-1].shape
    header = np.array([steps, size, leaves[0].shape[-1]], np.float64)
    data = b"".join(leaf.tobytes() for leaf in (header, *leaves))
    with path.open("ab", buffering=0) as file:
        file.write(data)


def read_unrolls(path: Path) -> list[Unroll]:
    """Returns the unrolls of a file, without a last piece that was not written to its end."""
    data, at, found = np.frombuffer(path.read_bytes()[: path.stat().st_size // 8 * 8]), 0, []
    while at + 3 <= data.size:
        steps, size, width = data[at : at + 3].astype(int)
        shapes = [(steps + 1, size, width), *[(steps + 1, size)] * 3, *[(steps, size)] * 2]
        counts = [int(np.prod(shape)) for shape in shapes]
        if at + 3 + sum(counts) > data.size:
            break
        pieces = np.split(data[at + 3 : at + 3 + sum(counts)], np.cumsum(counts)[:-1])
        leaves = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        found += [Unroll(*(leaf[:, i] for leaf in leaves)) for i in range(size)]
        at += 3 + sum(counts)
    return found
