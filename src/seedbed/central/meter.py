"""The parts of a central run, and the lines of metrics that are measured from them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from seedbed.actors.pool import ActorPool
from seedbed.central.loops import InferenceLoop, LearnerLoop, UnrollQueue
from seedbed.central.replaying import ReplayFeed
from seedbed.run.metrics import Counters, MachineShares, processes_rss, usable_cores
from seedbed.run.options import CentralConfig
from seedbed.run.reporting import Start
from seedbed.types import Agent, HostEnvConfig


class Setup(NamedTuple):
    """The parts of a central run, which are made when the spec of the environments is known."""

    agent: Agent  # bound
    env: HostEnvConfig
    config: CentralConfig
    pool: ActorPool
    acting: InferenceLoop
    learning: LearnerLoop
    feed: UnrollQueue | ReplayFeed
    start: Start
    begun: float = 0.0  # monotonic time, in seconds, at which `train` was called

    def wall_s(self, now: float) -> float:
        """Returns the seconds of training until the monotonic time `now`, with those before a resume."""
        return self.start.wall_s + now - self.begun


class Sums(NamedTuple):
    """Cumulative counts of a run. A line of metrics reports the difference of two of these."""

    wall_s: float  # monotonic time
    env_steps: int  # transitions that count
    calls: int  # inference calls
    rows: int  # environments that these calls acted on
    seconds: dict[str, float]  # by name; a line reports their shares of the wall time


class Meter:
    """Measurements of a run over the intervals between calls of `read`. Use each from one thread only."""

    def __init__(self, setup: Setup, others: Callable[[], tuple[list[int], float]]) -> None:
        """Starts the first interval.

        `others` returns the process ids of evaluations and helpers, and the CPU seconds of evaluations.
        """
        self._setup, self._others = setup, others
        self._shares = MachineShares(usable_cores(), setup.config.actors)
        self._shares.start(self._counters())
        self._last = self._sums()

    def read(self) -> dict[str, Any]:
        """Returns one line of metrics. Call from one thread only.

        Rates, shares and `inference_rows_mean` are of the time since the last call; counts are of the whole
        run. `inference_rows_mean` is None if there was no inference call.
        """
        setup = self._setup
        acting, learning = setup.acting, setup.learning
        last, now = self._last, self._sums()
        self._last = now
        passed_s, calls = max(now.wall_s - last.wall_s, 1e-9), now.calls - last.calls
        rate, skip = (now.env_steps - last.env_steps) / passed_s, setup.env.frame_skip
        return {
            "wall_s": setup.wall_s(now.wall_s),
            "env_steps": now.env_steps,
            "frames": now.env_steps * skip,
            "env_steps_per_s": rate,
            "frames_per_s": rate * skip,
            "learner_steps": learning.updates,
            **acting.episodes.summary(),
            **setup.feed.metrics(),
            **learning.metrics,
            **self._shares.update(self._counters()),
            "inference_rows_mean": (now.rows - last.rows) / calls if calls else None,
            **{
                f"{name}_share": max(0.0, seconds - last.seconds[name]) / passed_s
                for name, seconds in now.seconds.items()
            },
            "actor_restarts": setup.pool.restarts,
            "rss_mb": processes_rss([os.getpid(), *setup.pool.pids(), *self._others()[0]]),
        }

    def _sums(self) -> Sums:
        acting, learning, feed = self._setup.acting, self._setup.learning, self._setup.feed
        waits = {"inference_blocked": acting.blocked_s, "learner_waiting": learning.waiting.read()}
        return Sums(
            wall_s=time.monotonic(),
            env_steps=feed.env_steps,
            calls=acting.counters.calls,
            rows=acting.counters.rows,
            seconds=waits | feed.seconds(),
        )

    def _counters(self) -> Counters:
        setup = self._setup
        return Counters(
            wall=time.monotonic(),
            actors_cpu=setup.pool.cpu_seconds() + self._others()[1],
            learner_cpu=time.process_time(),
            inference_busy=setup.acting.counters.busy_s,
            learning_busy=setup.learning.busy.read(),
        )
