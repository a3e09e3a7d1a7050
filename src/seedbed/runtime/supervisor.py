"""The main thread of central inference: reports, saves, evaluates and notices failures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from seedbed.runtime.checkpoint import CheckpointWriter
from seedbed.runtime.config import CentralConfig
from seedbed.runtime.evaluation import evaluate
from seedbed.runtime.loops import InferenceLoop, LearnerLoop, TrainingDiverged, UnrollQueue
from seedbed.runtime.metrics import (
    Counters,
    MachineShares,
    MetricsLog,
    processes_rss,
    usable_cores,
)
from seedbed.transport.pool import ActorPool
from seedbed.types import Agent, HostEnvConfig, LearnerState, SeedbedError


class View(Protocol):
    """Where progress is shown."""

    @property
    def report_every_s(self) -> float:
        """Seconds between updates."""
        ...

    def update(self, metrics: dict[str, Any]) -> None:
        """Shows one line of metrics."""
        ...

    def message(self, text: str) -> None:
        """Shows a message."""
        ...


class Start(NamedTuple):
    """Where a run begins: nothing done, or what its last checkpoint says."""

    env_steps: int = 0
    wall_s: float = 0.0
    updates: int = 0


class Setup(NamedTuple):
    """All that a run is made of, once environments have said what they are."""

    agent: Agent
    env: HostEnvConfig
    config: CentralConfig
    pool: ActorPool
    acting: InferenceLoop
    learning: LearnerLoop
    queue: UnrollQueue
    start: Start
    begun: float  # the monotonic time at which this process began


class Evaluation:
    """One evaluation in a thread of its own, of a snapshot that is saved with its score."""

    def __init__(self, setup: Setup, snapshot: LearnerState, metadata: dict[str, Any]) -> None:
        """Starts at once."""
        self.snapshot, self.metadata = snapshot, metadata
        self.result: dict[str, Any] | None = None
        self.failure: Exception | None = None
        self._setup = setup
        self._cancel = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        setup, config = self._setup, self._setup.config
        seed = config.seed + 1_000_003 * (1 + self.metadata["start"]["env_steps"])
        try:
            self.result = evaluate(
                env=setup.env,
                agent=setup.agent,
                params=self.snapshot.params,
                episodes=config.evaluate_episodes,
                seed=seed % (1 << 31),
                stop=self._cancel,
            )
        except Exception as failure:
            self.failure = failure

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, give_up: Callable[[], bool]) -> None:
        """Waits for the end, which `give_up` brings on early."""
        while not self.done:
            if give_up():
                self._cancel.set()
            self._thread.join(0.2)


class Meter:
    """Measures a run from one call to the next."""

    def __init__(self, setup: Setup, helper_pid: Callable[[], int | None]) -> None:
        """Starts measuring; `helper_pid` names the checkpoints' helper while one runs."""
        self._setup, self._helper_pid = setup, helper_pid
        self._shares = MachineShares(usable_cores(), setup.config.num_actors)
        self._shares.start(self._counters())
        self._last = (time.monotonic(), 0)

    def read(self) -> dict[str, Any]:
        """Returns one line of metrics; rates are since the last call."""
        setup = self._setup
        acting, learning = setup.acting, setup.learning
        now, steps = time.monotonic(), acting.counters.env_steps
        before, steps_before = self._last
        self._last = (now, steps)
        rate = (steps - steps_before) / max(now - before, 1e-9)
        total, skip = setup.start.env_steps + steps, setup.env.frame_skip
        helper = self._helper_pid()
        return {
            "wall_s": setup.start.wall_s + now - setup.begun,
            "env_steps": total,
            "frames": total * skip,
            "env_steps_per_s": rate,
            "frames_per_s": rate * skip,
            "learner_steps": learning.updates,
            **acting.episodes.summary(),
            "lag_mean": None,
            "lag_max": None,
            **learning.metrics,
            **self._shares.update(self._counters()),
            "inference_rows_mean": acting.counters.rows / max(acting.counters.calls, 1),
            "inference_blocked_s": acting.counters.blocked_s,
            "learner_waiting_s": learning.counters.waiting_s,
            "queued_unrolls": len(setup.queue),
            "actor_restarts": setup.pool.restarts,
            "rss_mb": processes_rss(
                [os.getpid(), *setup.pool.pids(), *([helper] if helper else [])]
            ),
        }

    def _counters(self) -> Counters:
        setup = self._setup
        return Counters(
            wall=time.monotonic(),
            actors_cpu=setup.pool.cpu_seconds(),
            learner_cpu=time.process_time(),
            inference_busy=setup.acting.counters.busy_s,
            learning_busy=setup.learning.counters.busy_s,
        )


class Supervisor:
    """Runs both loops in threads and looks after them from the main thread."""

    def __init__(
        self,
        setup: Setup,
        log: MetricsLog,
        writer: CheckpointWriter,
        view: View,
        stop: threading.Event,
    ) -> None:
        """Takes what it looks after; `stop` ends the run."""
        self._setup, self._log, self._writer, self._view = setup, log, writer, view
        self._stop = stop
        self._failures: list[BaseException] = []
        self._evaluation: Evaluation | None = None
        self._evaluated: dict[str, Any] = {}
        self._wanted: set[str] = set()

    @property
    def env_steps(self) -> int:
        """Agent steps of the whole run."""
        return self._setup.start.env_steps + self._setup.acting.counters.env_steps

    def run(self) -> None:
        """Runs until the steps are done, `stop` is set or something fails."""
        setup = self._setup
        threads = [
            threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
            for name, loop in (("inference", setup.acting.run), ("learner", setup.learning.run))
        ]
        for thread in threads:
            thread.start()
        self._log_meter, self._view_meter = (
            Meter(setup, lambda: self._writer.helper_pid) for _ in range(2)
        )
        try:
            self._watch()
        except SeedbedError as failure:
            self._failures.append(failure)
        self._stop.set()
        setup.queue.close()
        for thread in threads:
            thread.join()

    def _watch(self) -> None:
        config = self._setup.config
        next_evaluation = self._next_evaluation()
        log, show, save = (
            _Clock(period)
            for period in (config.log_every_s, self._view.report_every_s, config.checkpoint_every_s)
        )
        while not self._stop.wait(0.1):
            if log.due():
                self._write_log()
            if show.due():
                self._view.update(self._view_meter.read() | self._evaluated)
            if save.due():
                self._want("save")
            if self.env_steps >= next_evaluation and self._evaluation is None:
                next_evaluation = self._next_evaluation()
                self._want("evaluate")
            self._serve_snapshot()
            self._collect_evaluation()

    def _next_evaluation(self) -> int:
        every = self._setup.config.evaluate_every or self._setup.config.steps + 1
        return (self.env_steps // every + 1) * every

    def finish(self, interrupted: threading.Event) -> dict[str, Any]:
        """Saves, evaluates unless interrupted, and returns a summary; raises what stopped the run."""
        diverged = any(isinstance(failure, TrainingDiverged) for failure in self._failures)
        if self._evaluation is not None:
            self._evaluation.wait(lambda: bool(self._failures) or interrupted.is_set())
            self._collect_evaluation()
        if not diverged:
            state = jax.device_get(self._setup.learning.state)
            metadata = self._metadata(state)
            step = metadata["start"]["env_steps"]
            self._writer.save(step, state, metadata)
            self._writer.wait()
            if not self._failures and not interrupted.is_set():
                episodes = self._setup.config.evaluate_episodes
                self._view.message(f"trained; evaluating {episodes} episodes")
                self._evaluation = Evaluation(self._setup, state, metadata)
                self._evaluation.wait(interrupted.is_set)
                self._collect_evaluation()
        self._write_log()
        self._view.update(self._view_meter.read() | self._evaluated)
        self._writer.wait()
        if self._failures:
            raise self._failures[0]
        return self._log_meter.read() | self._evaluated | {"interrupted": interrupted.is_set()}

    def _guard(self, loop: Callable[[threading.Event], None]) -> None:
        """Runs a loop; what it raises ends the run and is raised again in the main thread."""
        try:
            loop(self._stop)
        except BaseException as failure:
            self._failures.append(failure)
        finally:
            self._stop.set()
            self._setup.queue.close()

    def _write_log(self) -> None:
        self._log.write(self._log_meter.read() | self._evaluated)

    def _want(self, purpose: str) -> None:
        self._wanted.add(purpose)
        self._setup.learning.request_snapshot()

    def _serve_snapshot(self) -> None:
        snapshot = self._setup.learning.take_snapshot()
        if snapshot is None:
            return
        metadata = self._metadata(snapshot)
        if "evaluate" in self._wanted:  # saved when its score is known
            self._evaluation = Evaluation(self._setup, snapshot, metadata)
        else:
            self._writer.save(metadata["start"]["env_steps"], snapshot, metadata)
        self._wanted.clear()

    def _collect_evaluation(self) -> None:
        evaluation = self._evaluation
        if evaluation is None or not evaluation.done:
            return
        self._evaluation = None
        if evaluation.failure is not None:
            raise evaluation.failure
        if evaluation.result is None:
            return
        result, step = evaluation.result, evaluation.metadata["start"]["env_steps"]
        self._evaluated = {f"evaluation/{name}": value for name, value in result.items()}
        self._evaluated["evaluation/env_steps"] = step
        mean, deviation = result["episode_return_mean"], result["episode_return_std"]
        self._view.message(
            f"evaluation at {step:,} steps: return {mean:.2f} +- {deviation:.2f} "
            f"({result['episodes']} episodes)"
        )
        self._writer.save(step, evaluation.snapshot, evaluation.metadata, score=mean)

    def _metadata(self, state: LearnerState) -> dict[str, Any]:
        setup = self._setup
        wall_s = setup.start.wall_s + time.monotonic() - setup.begun
        start = Start(self.env_steps, wall_s, int(state.updates))
        return {"start": start._asdict(), "episodes": setup.acting.episodes.state()}


class _Clock:
    """Comes due once a period."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._next = time.monotonic() + period_s

    def due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = max(self._next + self._period_s, now)
        return True
