"""The parts of a central run, and the metrics that are measured from them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from seedbed.actors.pool import ActorPool
from seedbed.actors.remote import RemoteActors
from seedbed.central.acting import InferenceLoop
from seedbed.central.experience import SavedSource
from seedbed.central.gate import Gate
from seedbed.central.learning import LearnerLoop
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.machine import usable_cores
from seedbed.run.group import Group
from seedbed.run.metrics import Counters, MachineShares
from seedbed.run.options import CentralConfig
from seedbed.types import Agent


class Setup(NamedTuple):
    """The parts of a central run, which are made when the spec of the environments is known."""

    agent: Agent  # bound
    env: HostEnvConfig
    config: CentralConfig
    pool: ActorPool
    acting: InferenceLoop
    learning: LearnerLoop
    source: SavedSource
    remote: RemoteActors | None  # of a run that listens
    gate: Gate | None = None  # of the accelerators that act and learn
    group: Group | None = None  # of the processes that train as one learner


class Totals(NamedTuple):
    """Cumulative counts of a run. Metrics report the difference of two of these."""

    calls: int  # inference calls
    rows: int  # environments that these calls acted on
    seconds: dict[str, float]  # by name; metrics are their shares of the time that has passed


class CentralMeter:
    """Measurements of a central run over intervals. Use each from one thread only."""

    def __init__(self, setup: Setup, evaluations_cpu: Callable[[], float]) -> None:
        """Starts the first interval. `evaluations_cpu` returns the CPU seconds of evaluations' actors."""
        self._setup, self._evaluations_cpu = setup, evaluations_cpu
        # A run whose actors are all elsewhere has an ingest process here.
        self._shares = MachineShares(usable_cores(), max(1, setup.config.local_actors))
        self._shares.start(self._counters())
        self._last = self._totals()
        # Seconds of streams so far, and those in which they waited for this machine; the share of the others.
        self._stream_times, self._away_share = (0.0, 0.0), 0.0

    def read(self, passed_s: float) -> dict[str, Any]:
        """Returns metrics of the run; shares and `inference_rows_mean` are of the last `passed_s` seconds.

        `inference_rows_mean` is None if there was no inference call. Call from one thread only.
        """
        acting, learning = self._setup.acting, self._setup.learning
        last, now = self._last, self._totals()
        self._last, calls = now, now.calls - last.calls
        streams = self._streams()
        return {
            **acting.episodes.summary(),
            **self._setup.source.metrics(),
            **learning.metrics,
            **self._shares.update(self._counters(), streams.get("streams/away_share", 0.0)),
            "inference_rows_mean": (now.rows - last.rows) / calls if calls else None,
            **{
                f"{name}_share": max(0.0, seconds - last.seconds[name]) / passed_s
                for name, seconds in now.seconds.items()
            },
            "actor_restarts": self._setup.pool.restarts,
            **streams,
            **self._programs(),
        }

    def _programs(self) -> dict[str, Any]:
        """Returns how long the learner's longest program takes, if actions may have to wait for it."""
        gate = self._setup.gate
        return {} if gate is None else {"learner_program_ms": 1e3 * gate.program_s}

    def _streams(self) -> dict[str, float]:
        """Returns figures about actors of other machines, whose CPU time is not this machine's."""
        if self._setup.remote is None:
            return {}
        report = self._setup.remote.report()
        stream_s, waited_s = (report.pop(f"{name}_seconds", 0.0) for name in ("stream", "waited"))
        before_s, waited_before_s = self._stream_times
        self._stream_times = (stream_s, waited_s)
        if stream_s > before_s:
            self._away_share = 1.0 - (waited_s - waited_before_s) / (stream_s - before_s)
        if not report.get("streams"):
            # Whoever is missing keeps a run waiting that has no actors of its own.
            self._away_share = float(not self._setup.config.local_actors)
        found = report | {"away_share": self._away_share}
        return {f"streams/{name}": value for name, value in found.items()}

    def _totals(self) -> Totals:
        acting, learning, source = self._setup.acting, self._setup.learning, self._setup.source
        waits = {"inference_blocked": acting.blocked_s, "learner_waiting": learning.waiting.read()}
        if self._setup.gate is not None:
            waits["inference_behind"] = self._setup.gate.waited.read()
        return Totals(acting.counters.calls, acting.counters.rows, waits | source.seconds())

    def _counters(self) -> Counters:
        setup = self._setup
        return Counters(
            wall=time.monotonic(),
            actors_cpu=setup.pool.cpu_seconds() + self._evaluations_cpu(),
            learner_cpu=time.process_time(),
            inference_busy=setup.acting.counters.busy_s,
            learning_busy=setup.learning.busy.read(),
        )
