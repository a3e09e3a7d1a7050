"""The main thread of central inference, which reports, saves, evaluates and notices failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from seedbed.actors.pool import ActorPool
from seedbed.central.meter import Meter, Setup
from seedbed.central.replaying import ReplayFeed
from seedbed.run.checkpoint import CheckpointWriter
from seedbed.run.evaluation import (
    Play,
    Player,
    compile_play,
    empty_carry,
    evaluation_envs,
    evaluation_pool,
    play_episodes,
)
from seedbed.run.keys import derived_seed
from seedbed.run.metrics import MetricsLog
from seedbed.run.reporting import Clock, Interruption, Start, View, after
from seedbed.types import LearnerState, SeedbedError, StorageError


class Snapshot(NamedTuple):
    """A learner state on the host, and the metadata that its checkpoint stores about the run."""

    step: int  # transitions of the run that count
    state: LearnerState
    metadata: dict[str, Any]


class Evaluation:
    """An evaluation of a snapshot, in a thread and an actor process of its own.

    When `done` is true, `result` has the figures, or is None if the evaluation was cancelled or failed;
    `failure` has the exception if it failed.
    """

    def __init__(self, setup: Setup, play: Play, snapshot: Snapshot) -> None:
        """Starts the thread at once."""
        self.snapshot = snapshot
        self.result: dict[str, Any] | None = None
        self.failure: Exception | None = None
        self._setup, self._play = setup, play
        self._pool: ActorPool | None = None
        self._cancel = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        setup, episodes = self._setup, self._setup.config.evaluate_episodes
        seed = derived_seed(setup.config.seed, self.snapshot.step)
        envs = evaluation_envs(episodes)
        try:
            pool = evaluation_pool(setup.env, envs, seed, setup.config.actor_timeout_s)
            self._pool = pool
            with pool:
                spec = pool.wait_spec(self._cancel.is_set)
                if spec is None:
                    return
                carry = empty_carry(setup.agent, spec, setup.env.frame_stack, envs)
                player = Player(self._play, self.snapshot.state.params, carry, seed)
                self.result = play_episodes(pool, player, episodes, self._cancel)
        except Exception as failure:
            self.failure = failure

    @property
    def done(self) -> bool:
        """Whether the evaluation has ended, with or without a result. Any thread may read it."""
        return not self._thread.is_alive()

    @property
    def cpu_seconds(self) -> float:
        """The CPU seconds of the actor so far. Any thread may read it."""
        return self._pool.cpu_seconds() if self._pool else 0.0

    @property
    def pids(self) -> list[int]:
        """The process id of the actor, or an empty list if it has not started or the evaluation has ended.

        Any thread may read it.
        """
        return self._pool.pids() if self._pool and not self.done else []

    def take_notices(self) -> list[str]:
        """Returns messages about the actor's death or silence, each once. Call from one thread at a time."""
        return self._pool.take_notices() if self._pool else []

    def wait(self, give_up: Callable[[], bool]) -> None:
        """Waits for the end of the evaluation; cancels it if `give_up` returns True.

        `give_up` is called by the waiting thread, about every 0.2 s. Any thread may call this.
        """
        while not self.done:
            if give_up():
                self._cancel.set()
            self._thread.join(0.2)


class Supervisor:
    """A central run: it runs the loops in threads, and reports, saves and evaluates from the main thread.

    The main thread calls `run` and then `finish`.
    """

    def __init__(
        self,
        setup: Setup,
        log: MetricsLog,
        writer: CheckpointWriter,
        view: View,
        interruption: Interruption,
    ) -> None:
        """Keeps its arguments and prepares evaluations; starts no thread."""
        self._setup, self._log, self._writer, self._view = setup, log, writer, view
        self._interruption = interruption
        # Tells the loops to end.
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._play = compile_play(setup.agent, setup.env.frame_stack)
        self._evaluation: Evaluation | None = None
        self._evaluated: dict[str, Any] = {}
        self._evaluations_cpu = 0.0
        self._wanted: set[str] = set()

    def run(self) -> None:
        """Runs the loops until the steps are done, a signal comes or something fails.

        Returns when all loops have ended. Failures are kept, and `finish` raises the first one. Call from the
        main thread only.
        """
        setup = self._setup
        loops = {"inference": setup.acting.run, "learner": self._learn}
        if isinstance(setup.feed, ReplayFeed):
            loops["replay"] = setup.feed.run
        threads = [
            threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
            for name, loop in loops.items()
        ]
        for thread in threads:
            thread.start()
        self._log_meter, self._view_meter = Meter(setup, self._others), Meter(setup, self._others)
        try:
            self._watch()
        except Exception as failure:
            # `finish` saves before it raises this.
            self._failures.append(failure)
        finally:
            self.stop()
        for thread in threads:
            thread.join()
        self._tell_notices()

    def stop(self) -> None:
        """Tells the loops to end, and closes the feed so that they stop waiting. Any thread may call this."""
        self._stop.set()
        self._setup.feed.close()

    def _watch(self) -> None:
        config, feed = self._setup.config, self._setup.feed
        next_evaluation = self._next_evaluation()
        log, show, save = (
            Clock(period)
            for period in (config.log_every_s, self._view.report_every_s, config.checkpoint_every_s)
        )
        # The first checkpoint is made at once, so that there is always one to resume from.
        self._want("save")
        while not self._stop.wait(0.1) and not self._interruption.requested():
            if log.due():
                self._write_log()
            if show.due():
                self._view.update(self._view_meter.read() | self._evaluated)
            self._tell_notices()
            if save.due():
                self._want("save")
            # At the end of the run, `finish` evaluates in any case.
            if next_evaluation <= feed.env_steps < config.steps and self._evaluation is None:
                next_evaluation = self._next_evaluation()
                self._want("evaluate")
            self._serve_snapshot()
            self._collect_evaluation()

    def _tell_notices(self) -> None:
        for notice in (*self._setup.pool.take_notices(), *self._setup.feed.take_notices()):
            self._view.message(notice)
        for notice in self._evaluation.take_notices() if self._evaluation else ():
            self._view.message(f"evaluation: {notice}")

    def _others(self) -> tuple[list[int], float]:
        """Returns the process ids of evaluation and checkpoint helper, and the evaluations' CPU seconds."""
        evaluation, helper = self._evaluation, self._writer.helper_pid
        pids = [helper] if helper else []
        if evaluation is None:
            return pids, self._evaluations_cpu
        return pids + evaluation.pids, self._evaluations_cpu + evaluation.cpu_seconds

    def _next_evaluation(self) -> int:
        every = self._setup.config.evaluate_every or self._setup.config.steps + 1
        return (self._setup.feed.env_steps // every + 1) * every

    def finish(self) -> dict[str, Any]:
        """Saves, evaluates unless a signal came, and returns a summary: the last metrics and `interrupted`.

        If `run` failed, this saves the learner state if it is intact, and raises the first failure. Raises
        StorageError if the last checkpoint cannot be written. Call from the main thread only, after `run`.
        """
        if self._failures:
            with after(self._failures[0], self._view):
                if self._setup.learning.intact:
                    self._save_last()
            self._end_evaluation()
            raise self._failures[0]
        last = self._save_last()
        self._end_evaluation()
        if not self._give_up():
            episodes = self._setup.config.evaluate_episodes
            self._view.message(f"trained; evaluating {episodes} episodes")
            self._evaluation = Evaluation(self._setup, self._play, last)
            self._end_evaluation()
        summary = self._write_log()
        self._view.update(self._view_meter.read() | self._evaluated)
        self._writer.wait()
        return summary | {"interrupted": self._interruption.requested()}

    def _save_last(self) -> Snapshot:
        snapshot = self._save(*self._setup.learning.snapshot())
        self._writer.wait()
        return snapshot

    def _end_evaluation(self) -> None:
        """Waits for the running evaluation, if there is one, and reports it; cancels it if `_give_up`."""
        if self._evaluation is not None:
            self._evaluation.wait(self._give_up)
            self._collect_evaluation()

    def _give_up(self) -> bool:
        """Returns whether to skip evaluations, because the run has failed or a signal came."""
        return bool(self._failures) or self._interruption.requested()

    def _learn(self, stop: threading.Event) -> None:
        """Runs the learner loop, and then stops the run: there is nothing more to learn from."""
        self._setup.learning.run(stop)
        self.stop()

    def _guard(self, loop: Callable[[threading.Event], None]) -> None:
        """Runs a loop. An exception stops the run, and `finish` raises it in the main thread."""
        try:
            loop(self._stop)
        except BaseException as failure:
            self._failures.append(failure)
            self.stop()

    def _write_log(self) -> dict[str, Any]:
        metrics = self._log_meter.read() | self._evaluated
        self._log.write(metrics)
        return metrics

    def _want(self, purpose: str) -> None:
        self._wanted.add(purpose)
        self._setup.learning.request_snapshot()

    def _serve_snapshot(self) -> None:
        taken = self._setup.learning.take_snapshot()
        if taken is None:
            return
        snapshot = self._save(*taken)
        if "evaluate" in self._wanted:
            self._evaluation = Evaluation(self._setup, self._play, snapshot)
        self._wanted.clear()

    def _save(self, state: LearnerState, env_steps: int) -> Snapshot:
        setup = self._setup
        start = Start(env_steps, self._setup.wall_s(time.monotonic()), int(state.updates))
        metadata = {"start": start._asdict(), "episodes": setup.acting.episodes.state()}
        snapshot = Snapshot(start.env_steps, state, metadata)
        if isinstance(setup.feed, ReplayFeed):
            # Replay is saved before its checkpoint, so that no checkpoint lacks its replay. The checkpoint
            # before must be whole or have failed by then, because the newest whole one keeps its replay.
            try:
                self._writer.wait()
            except StorageError as error:
                self._tell(error)
            try:
                setup.feed.save(start.env_steps)
            except SeedbedError:
                # An invalid priority ends the run, but this checkpoint is written first.
                self._write(snapshot)
                raise
            self._tell_notices()
        self._write(snapshot)
        self._newest = snapshot
        return snapshot

    def _write(self, snapshot: Snapshot, score: float | None = None) -> None:
        try:
            self._writer.save(*snapshot, score=score)
        except StorageError as error:
            # An earlier write failed; this one has been handed over.
            self._tell(error)

    def _tell(self, error: StorageError) -> None:
        """Shows that a checkpoint could not be written; only the last one of a run must succeed."""
        self._view.message(f"{error}; training goes on")

    def _collect_evaluation(self) -> None:
        evaluation = self._evaluation
        if evaluation is None or not evaluation.done:
            return
        self._evaluation = None
        self._evaluations_cpu += evaluation.cpu_seconds
        result, snapshot = evaluation.result, evaluation.snapshot
        if evaluation.failure is not None:
            # The figures of an earlier evaluation would look like those of this one.
            self._evaluated = {}
            self._view.message(
                f"the evaluation at {snapshot.step:,} steps failed: {evaluation.failure}"
            )
        if result is None:
            return
        self._evaluated = {f"evaluation/{name}": value for name, value in result.items()}
        self._evaluated["evaluation/env_steps"] = snapshot.step
        mean, deviation = result["episode_return_mean"], result["episode_return_std"]
        self._view.message(
            f"evaluation at {snapshot.step:,} steps: return {mean:.2f} +- {deviation:.2f} "
            f"({result['episodes']} episodes)"
        )
        # The arrays of the checkpoint are written already, so this adds the score only. No score is added if
        # learning has gone on at the same step: the newer checkpoint has other arrays under that name.
        if snapshot is self._newest:
            # A run that resumes from this checkpoint has also spent the time of this evaluation.
            start = snapshot.metadata["start"] | {"wall_s": self._setup.wall_s(time.monotonic())}
            snapshot = snapshot._replace(metadata=snapshot.metadata | {"start": start})
            self._write(snapshot, score=mean)
        elif snapshot.step < self._newest.step:
            self._write(snapshot, score=mean)
