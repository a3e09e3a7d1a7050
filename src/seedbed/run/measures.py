"""Measurements of a run: periods that come due, sums of stretches of time, and returns of episodes."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from seedbed.actors.slots import SUCCEEDED, UNTOLD
from seedbed.types import Array, Timestep


class Clock:
    """A clock that is due once in a period. Use each from one thread only."""

    def __init__(self, period_s: float) -> None:
        """Starts the first period, at the end of which the clock is due."""
        self._period_s = period_s
        self._next = time.monotonic() + period_s

    def due(self) -> bool:
        """Returns whether the period has ended, and if so, starts the next one. Call from one thread only.

        If the call is late, the next period still ends at its regular time, or at once if that has passed.
        """
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = max(self._next + self._period_s, now)
        return True


class Stopwatch:
    """A sum of stretches of time. Any thread may read it.

    `start` and `stop` must not run at the same time: call them from one thread, or under one lock.
    """

    def __init__(self) -> None:
        # The seconds of past stretches, and the start of the present one (infinity if there is none). They
        # are one value, so that a reader sees both as they were at one moment.
        self._state = (0.0, math.inf)

    def start(self) -> None:
        """Starts a stretch; a stretch that has not been stopped is lost. Call from one thread at a time."""
        self._state = (self._state[0], time.perf_counter())

    def stop(self) -> None:
        """Ends the present stretch, if there is one. Call from one thread at a time."""
        self._state = (self.read(), math.inf)

    def read(self) -> float:
        """Returns the seconds of all stretches, with the present one so far. Any thread may call this."""
        total_s, since = self._state
        return total_s + max(0.0, time.perf_counter() - since)


class EpisodeStatistics:
    """Statistics of episodes (raw returns and lengths) in `groups` groups of `n` environments.

    The inference thread records; any thread may call `summary` and `state`.
    """

    def __init__(self, groups: int, n: int, window: int = 100) -> None:
        self.episodes = 0
        self._returns = np.zeros((groups, n), np.float64)
        self._lengths = np.zeros((groups, n), np.int64)
        self._recent_returns: collections.deque[float] = collections.deque(maxlen=window)
        self._recent_lengths: collections.deque[int] = collections.deque(maxlen=window)
        self._recent_successes: collections.deque[float] = collections.deque(maxlen=window)

    def record(self, group: int, timestep: Timestep, success: Array | int = UNTOLD) -> None:
        """Adds a timestep of a group, whose reward and flags are `[n]`. Call from the inference thread.

        `success` is that of the group's slot.
        """
        returns, lengths = self._returns[group], self._lengths[group]
        returns += timestep.reward
        lengths += 1
        first = timestep.first
        if first.any():
            returns[first] = 0.0
            lengths[first] = 0
        ended = np.logical_or(timestep.terminated, timestep.truncated)
        if ended.any():
            self.episodes += int(ended.sum())
            self._recent_returns.extend(returns[ended].tolist())
            self._recent_lengths.extend(lengths[ended].tolist())
            self._recent_successes.extend(successes(np.broadcast_to(success, ended.shape)[ended]))

    def reset(self, group: int) -> None:
        """Drops the unfinished episodes of a group whose actor was restarted.

        Call from the inference thread.
        """
        self._returns[group] = 0.0
        self._lengths[group] = 0

    def summary(self) -> dict[str, float]:
        """Returns the count of ended episodes, and means over the last `window` (NaN if there are none).

        That of successes is there only if environments tell of them.
        """
        told = self._recent_successes
        return ({"episode_success_mean": _mean(told)} if told else {}) | {
            "episodes": self.episodes,
            "episode_return_mean": _mean(self._recent_returns),
            "episode_length_mean": _mean(self._recent_lengths),
        }

    def state(self) -> dict[str, Any]:
        """Returns the part that a checkpoint keeps, as JSON values. Any thread may call it."""
        return {
            "episodes": self.episodes,
            "returns": list(self._recent_returns),
            "lengths": list(self._recent_lengths),
            "successes": list(self._recent_successes),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restores a `state`, which has no unfinished episodes. Call before the first `record`."""
        self.episodes = int(state["episodes"])
        self._recent_returns.clear()
        self._recent_returns.extend(state["returns"])
        self._recent_lengths.clear()
        self._recent_lengths.extend(state["lengths"])
        self._recent_successes.extend(state.get("successes", ()))


def successes(told: Array) -> list[float]:
    """Returns 1 for each success and 0 for each failure among what a slot tells of ended episodes."""
    return (told[told != UNTOLD] == SUCCEEDED).astype(float).tolist()


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else math.nan
