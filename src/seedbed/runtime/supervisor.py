"""The main thread of central inference: reports, saves, evaluates and notices failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from seedbed.ops.counts import derived_seed
from seedbed.runtime.checkpoint import CheckpointWriter
from seedbed.runtime.evaluation import (
    Play,
    Player,
    compile_play,
    empty_carry,
    evaluation_envs,
    evaluation_pool,
    play_episodes,
)
from seedbed.runtime.meter import Meter, Setup
from seedbed.runtime.metrics import MetricsLog
from seedbed.runtime.replaying import ReplayFeed
from seedbed.runtime.reporting import Clock, Interruption, Start, View, after
from seedbed.transport.pool import ActorPool
from seedbed.types import LearnerState, SeedbedError, StorageError


class Snapshot(NamedTuple):
    """A learner state on the host, and what its checkpoint says of the run at that moment."""

    step: int
    state: LearnerState
    metadata: dict[str, Any]


class Evaluation:
    """One evaluation of a snapshot, in a thread and an actor process of its own."""

    def __init__(self, setup: Setup, play: Play, snapshot: Snapshot) -> None:
        """Starts at once."""
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
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of its actor so far."""
        return self._pool.cpu_seconds() if self._pool else 0.0

    @property
    def pids(self) -> list[int]:
        """Process ids of its actor."""
        return self._pool.pids() if self._pool and not self.done else []

    def take_notices(self) -> list[str]:
        """Returns, once each, what happened to its actor."""
        return self._pool.take_notices() if self._pool else []

    def wait(self, give_up: Callable[[], bool]) -> None:
        """Waits for the end, which `give_up` brings on early."""
        while not self.done:
            if give_up():
                self._cancel.set()
            self._thread.join(0.2)


class Supervisor:
    """Runs both loops in threads and looks after them from the main thread."""

    def __init__(
        self,
        setup: Setup,
        log: MetricsLog,
        writer: CheckpointWriter,
        view: View,
        interruption: Interruption,
    ) -> None:
        """Takes what it looks after."""
        self._setup, self._log, self._writer, self._view = setup, log, writer, view
        self._interruption = interruption
        self._stop = threading.Event()  # tells the loops to end
        self._failures: list[BaseException] = []
        self._play = compile_play(setup.agent, setup.env.frame_stack)
        self._evaluation: Evaluation | None = None
        self._evaluated: dict[str, Any] = {}
        self._evaluations_cpu = 0.0
        self._wanted: set[str] = set()

    def run(self) -> None:
        """Runs until the steps are done, a signal comes or something fails."""
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
        except Exception as failure:  # save first
            self._failures.append(failure)
        finally:
            self.stop()
        for thread in threads:
            thread.join()
        self._tell_notices()

    def stop(self) -> None:
        """Tells the loops to end, whatever they wait for."""
        self._stop.set()
        self._setup.feed.close()

    def _watch(self) -> None:
        config, feed = self._setup.config, self._setup.feed
        next_evaluation = self._next_evaluation()
        log, show, save = (
            Clock(period)
            for period in (config.log_every_s, self._view.report_every_s, config.checkpoint_every_s)
        )
        self._want("save")  # a first checkpoint at once: there is always one to go back to
        while not self._stop.wait(0.1) and not self._interruption.requested():
            if log.due():
                self._write_log()
            if show.due():
                self._view.update(self._view_meter.read() | self._evaluated)
            self._tell_notices()
            if save.due():
                self._want("save")
            # At the end there is one anyway.
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
        """Tells process ids and CPU seconds of evaluations and of the checkpoints' helper."""
        evaluation, helper = self._evaluation, self._writer.helper_pid
        pids = [helper] if helper else []
        if evaluation is None:
            return pids, self._evaluations_cpu
        return pids + evaluation.pids, self._evaluations_cpu + evaluation.cpu_seconds

    def _next_evaluation(self) -> int:
        every = self._setup.config.evaluate_every or self._setup.config.steps + 1
        return (self._setup.feed.env_steps // every + 1) * every

    def finish(self) -> dict[str, Any]:
        """Saves, evaluates unless interrupted, and returns a summary; raises what ended the run early."""
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
        """Waits for an evaluation that runs, or cuts it short where there is no time."""
        if self._evaluation is not None:
            self._evaluation.wait(self._give_up)
            self._collect_evaluation()

    def _give_up(self) -> bool:
        """Whether there is no time for an evaluation."""
        return bool(self._failures) or self._interruption.requested()

    def _learn(self, stop: threading.Event) -> None:
        """Learns; when there is nothing more to learn from, the run is done."""
        self._setup.learning.run(stop)
        self.stop()

    def _guard(self, loop: Callable[[threading.Event], None]) -> None:
        """Runs a loop; what it raises ends the run and is raised again in the main thread."""
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
            # A checkpoint is never without its replay: that comes first, and only when the checkpoint before
            # is whole or has failed, as the replay of the newest whole one stays.
            try:
                self._writer.wait()
            except StorageError as error:
                self._tell(error)
            try:
                setup.feed.save(start.env_steps)
            except SeedbedError:  # an invalid priority ends the run, but not before this checkpoint
                self._write(snapshot)
                raise
            self._tell_notices()
        self._write(snapshot)
        self._newest = snapshot
        return snapshot

    def _write(self, snapshot: Snapshot, score: float | None = None) -> None:
        try:
            self._writer.save(*snapshot, score=score)
        except StorageError as error:  # of the one before
            self._tell(error)

    def _tell(self, error: StorageError) -> None:
        """Tells of a checkpoint that could not be written: the next may be; at the end it stops the run."""
        self._view.message(f"{error}; training goes on")

    def _collect_evaluation(self) -> None:
        evaluation = self._evaluation
        if evaluation is None or not evaluation.done:
            return
        self._evaluation = None
        self._evaluations_cpu += evaluation.cpu_seconds
        result, snapshot = evaluation.result, evaluation.snapshot
        if evaluation.failure is not None:
            self._evaluated = {}  # those of an earlier one would pass for this one's
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
        # The arrays are there, so that this adds the score only; unless learning went on at the same step.
        if (
            snapshot is self._newest
        ):  # a run that goes on from here has spent the time of this evaluation too
            start = snapshot.metadata["start"] | {"wall_s": self._setup.wall_s(time.monotonic())}
            snapshot = snapshot._replace(metadata=snapshot.metadata | {"start": start})
            self._write(snapshot, score=mean)
        elif snapshot.step < self._newest.step:
            self._write(snapshot, score=mean)
