"""The session of a run: it reports, saves, evaluates, resumes and stops a run of any runtime.

A runtime trains (`run/runtime.py`). What users see of a run, and what its folder has, passes through it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from seedbed.errors import after
from seedbed.exit_status import TrainingDiverged
from seedbed.ops.keys import evaluation_seed
from seedbed.run.bucket import name_of
from seedbed.run.callback import Callback, Listener, OnMetrics
from seedbed.run.checkpoint import CheckpointWriter
from seedbed.run.checkpoint_helper import list_steps
from seedbed.run.folder import RunFolder, TakenOver
from seedbed.run.history import RunSegment
from seedbed.run.interval import Interval
from seedbed.run.lines import last_wall_s
from seedbed.run.loaded_weights import LoadedWeights
from seedbed.run.measures import Clock
from seedbed.run.metrics import MetricsLog, evaluated, processes_rss
from seedbed.run.restoring import beginning_anew, restore, task_number
from seedbed.run.runtime import Evaluation, Runtime, Score, Snapshot, Start, View
from seedbed.run.signals import stopping_signals
from seedbed.run.stopping import StoppingRules
from seedbed.run.update import require_finite_state
from seedbed.types import Agent, LearnerState, SeedbedError, StorageError, Tree


class Session:
    """The session of one run, as a context manager. For one thread, the one that called `train`.

    While it is open, SIGINT, SIGTERM and SIGHUP ask the run to stop and save, a second signal raises
    KeyboardInterrupt. Outside the main thread no signal is handled.
    """

    def __init__(
        self,
        run: RunFolder,
        view: View,
        callback: Callback | OnMetrics | None = None,
        weights: LoadedWeights | None = None,
    ) -> None:
        """Takes the folder of the run, whose locks this process holds. The time of the run begins now."""
        self.run, self.view, self._listener = run, view, Listener(callback, view.message)
        self._weights = weights  # what a new run begins with
        self.start, self._begun = Start(), time.monotonic()
        self._stack = contextlib.ExitStack()
        self._wanted: set[str] = set()  # what the next snapshot is for: "save", "evaluate"
        self._evaluation: Evaluation | None = None
        self._evaluating: Snapshot | None = None  # the snapshot that is being evaluated
        self._newest: Snapshot | None = None  # that of the newest checkpoint, without its arrays
        self._evaluated: dict[str, Any] = {}  # the metrics of the newest evaluation
        self._judged = (-1, -1)  # its step and updates

    def __enter__(self) -> Session:
        self.interruption = self._stack.enter_context(stopping_signals(self.view.message))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._evaluation is not None:
            # The run has failed or was given up while an evaluation went on.
            self._evaluation.cancel()
            if failure is None or isinstance(failure, Exception):
                self._evaluation.wait(lambda: True)
        self._stack.__exit__(kind, failure, trace)

    def interrupted(self) -> bool:
        """Returns whether a signal has asked the run to stop."""
        return self.interruption.requested()

    def resume(self, template: Callable[[], Tree]) -> tuple[Tree, dict[str, Any]] | None:
        """Reads the newest whole checkpoint, and says where the run goes on; None if there is none.

        Returns its arrays, with the structure of `template()`, and the metadata of the snapshot; sets
        `start`. Raises SeedbedError if none is whole, if they are away, or if it is of another agent.
        """
        folder = self.run.checkpoints
        if not list_steps(folder):
            if told := beginning_anew(self.run):
                self.view.message(told)
            return None
        step, arrays, metadata = restore(folder, template(), self.view.message)
        self.start = Start.read(metadata)
        self._evaluated = evaluated(metadata.get("evaluation"), step)
        self.view.message(f"going on from step {step:,} ({self.start.updates:,} learner steps)")
        return arrays, metadata

    def begun(self, agent: Agent, state: LearnerState, members: int = 1) -> LearnerState:
        """Returns the first learner state: `state`, with the weights that the run begins with, if any."""
        weights = self._weights
        return weights.into(agent, state, members, self.view.message) if weights else state

    def take_over(self, env_steps: int, updates: int) -> None:
        """Goes on with a run whose processes have gone on without a session; sets `start`."""
        wall_s = last_wall_s(self.run.path)
        self.start = Start(env_steps, wall_s, updates, trained_s=wall_s)
        self.view.message(f"going on from step {env_steps:,} ({updates:,} learner steps)")

    def train(self, runtime: Runtime) -> dict[str, Any]:
        """Trains until the runtime is done or a signal comes; returns a summary of the run.

        The summary holds the last metrics and `interrupted` (bool). At the end, the learner state is saved
        and evaluated; after a signal it is only saved. Raises the first failure of the run, after saving
        what was learned before it. Raises StorageError if the last checkpoint cannot be written, TakenOver if
        another learner has the run, and SeedbedError if the last evaluation fails.
        """
        begun = time.time() - (time.monotonic() - self._begun)
        at, warn = self.start.env_steps, self.view.message
        told = self._weights and self._weights.told
        with RunSegment(self.run, begun, at, self.interrupted, warn, told) as segment:
            summary = self._train(runtime)
            segment.reason = self._reason
            return summary

    def _train(self, runtime: Runtime) -> dict[str, Any]:
        self._runtime, self._options = runtime, runtime.options
        log = MetricsLog(self.run.path, self.start.env_steps, self.view.message)
        self._stack.callback(log.close)
        self._log, self._reason = log, ""  # why the run ends before its steps, if no signal ends it
        self._writer = self._stack.enter_context(
            CheckpointWriter(
                self.run.checkpoints,
                self._options.keep_checkpoints,
                lock=self.run.lock,
                claim=self.run.claim,
                task=task_number(self.run),
            )
        )
        failure: BaseException | None = None
        self._rules = StoppingRules(runtime)
        self._tell("on_start", self.run.path)
        runtime.start()
        self._log_line, self._view_line = Interval(runtime), Interval(runtime)
        try:
            self._loop()
        except Exception as error:
            failure = error  # raised when what was learned is saved
        finally:
            runtime.stop()
        ended = runtime.join()  # the threads must have ended in any case
        self._tell_notices()
        if failure := failure or ended:
            # A run could not go on from a state that has diverged.
            if not isinstance(failure, TakenOver | TrainingDiverged):
                with after(failure, self.view.message):
                    self._save_last()
            self._end_evaluation(lambda: True)
            raise failure
        return self._finish()

    def _loop(self) -> None:
        runtime, options = self._runtime, self._options
        self._trained_from = time.monotonic() - self.start.trained_s  # waiting is no training
        periods_s = (options.log_every_s, self.view.report_every_s, options.checkpoint_every_s)
        log, show, save = map(Clock, periods_s)
        next_evaluation = self._next_evaluation()
        # The first checkpoint is made at once, so that there is always one to resume from.
        self._want("save")
        self._serve_snapshot()
        while runtime.advance():
            if self.interrupted():
                break
            log_due, show_due, save_due = (clock.due() for clock in (log, show, save))
            if log_due or show_due or save_due:
                self.run.require_claim()
            if log_due:
                self._record(self._line(self._log_line))
            if show_due:
                self.view.update(self._line(self._view_line))
            self._tell_notices()
            if save_due:
                self._want("save")
            # At the end of the run, `_finish` evaluates in any case.
            env_steps = runtime.progress().env_steps
            if env_steps < options.steps and self._evaluation is None:
                asked = "evaluate" not in self._wanted and self._rules.asks_for_evaluation()
                if asked or next_evaluation <= env_steps:
                    next_evaluation = self._next_evaluation()
                    self._want("evaluate")
            self._serve_snapshot()
            self._collect_evaluation()
            self._tell_checkpoint()
            if reason := self._rules.reason(time.monotonic() - self._trained_from):
                self._reason = reason
                self.view.message(f"ending: {reason}")
                break

    def _finish(self) -> dict[str, Any]:
        """Saves and evaluates at the end of a run that has not failed; returns the summary."""
        self.run.require_claim()
        # The line of a stopped run comes before its checkpoint: wall time goes on behind it.
        metrics = self._line(self._log_line) if self.interrupted() else {}
        confirmed = self._rules.confirmed  # by an evaluation that has ended
        last = self._save_last()
        self._end_evaluation(self.interrupted)
        if not (self._runtime.progress().updates or self._reason or self.interrupted()):
            self.view.message(
                f"nothing was learned: {self._options.steps:,} steps are too few for a batch, or for "
                "replay's min_size: raise --steps, or lower --agent.min-size"
            )
        failure: Exception | None = None
        judged = last is not None and (last.step, last.updates) == self._judged
        if last is not None and not (self.interrupted() or confirmed or judged):
            self.view.message(f"trained; evaluating {self._options.evaluate_episodes} episodes")
            self._begin_evaluation(last)
            failure = self._end_evaluation(self.interrupted)
        metrics = metrics or self._line(self._log_line)
        self.run.require_claim()
        self._record(metrics)
        self.view.update(metrics)
        self._writer.wait()
        if failure is not None:
            raise failure
        self._tell_checkpoint()
        summary = metrics | {"interrupted": self.interrupted(), "run": name_of(self.run.path)}
        self._tell("on_end", summary)
        return summary

    def _record(self, metrics: dict[str, Any]) -> None:
        """Writes a line of metrics to the log, and tells the callback."""
        self._tell("on_metrics", self._log.write(metrics))

    def _tell(self, method: str, *args: Any) -> None:
        """Calls a method of the user's callback, which may end the run."""
        if self._listener.tell(method, *args):
            self._rules.ask(method)

    def _tell_checkpoint(self) -> None:
        """Tells the callback of the newest checkpoint, once it is whole."""
        if (folder := self._writer.take_written()) is not None:
            self._tell("on_checkpoint", int(folder.name), folder)

    def _wall_s(self) -> float:
        return self.start.wall_s + time.monotonic() - self._begun

    def _line(self, interval: Interval) -> dict[str, Any]:
        """Returns one line of metrics; rates and shares are of the time since the last line of `interval`."""
        progress, skip = self._runtime.progress(), self._runtime.frame_skip
        rate, figures = interval.read()
        if progress.updates == self.start.updates and "bottleneck" in figures:
            # Nothing is learned yet: replay is being filled, or programs compile.
            figures["bottleneck"] = None
        helper = self._writer.helper_pid
        pids = [os.getpid(), *self._runtime.pids(), *([helper] if helper else [])]
        return {
            "wall_s": self._wall_s(),
            "env_steps": progress.env_steps,
            "frames": progress.env_steps * skip,
            "env_steps_per_s": rate,
            "frames_per_s": rate * skip,
            "learner_steps": progress.updates,
            **figures,
            "rss_mb": processes_rss(pids),
            **self._evaluated,
        }

    def _tell_notices(self) -> None:
        for notice in self._runtime.take_notices():
            self.view.message(notice)

    def _next_evaluation(self) -> int:
        every = self._options.evaluate_every or self._options.steps + 1
        return (self._runtime.progress().env_steps // every + 1) * every

    def _want(self, purpose: str) -> None:
        self._wanted.add(purpose)
        self._runtime.request_snapshot()

    def _serve_snapshot(self) -> None:
        """Saves a snapshot that has come, and evaluates it if that is wanted."""
        if (snapshot := self._runtime.take_snapshot()) is None:
            return
        if "evaluate" in self._wanted:
            self._begin_evaluation(snapshot)
        self._wanted.clear()
        # An evaluation that has ended already gives its score to the checkpoint at once.
        over = self._evaluating is snapshot and self._evaluation and self._evaluation.done
        self._save(snapshot, self._report_evaluation() if over else None)

    def _save_last(self) -> Snapshot | None:
        """Saves the state at the end, and waits until it is written; returns None if it is not intact."""
        if (snapshot := self._runtime.last_snapshot()) is None:
            return None
        begun = time.monotonic()
        snapshot = self._save(snapshot)
        self._writer.wait()
        self._leave_out(time.monotonic() - begun)
        return snapshot

    def _save(self, snapshot: Snapshot, score: Score | None = None) -> Snapshot:
        """Saves a checkpoint of a snapshot; returns the snapshot with the metadata of the checkpoint.

        Raises TrainingDiverged instead if the learner state is not finite.
        """
        self.run.require_claim()
        require_finite_state(snapshot.learner, snapshot.updates)
        trained_s = time.monotonic() - self._trained_from
        start = Start(snapshot.step, self._wall_s(), snapshot.updates, trained_s)
        saved = snapshot._replace(metadata=snapshot.metadata | {"start": start._asdict()})
        if self._evaluating is snapshot:
            self._evaluating = saved
        try:
            self._runtime.save_beside(snapshot.step, self._settle)
        except SeedbedError:
            # This failure ends the run, but its checkpoint is written first.
            self._write(saved, score)
            raise
        self._tell_notices()
        self._write(saved, score)
        self._newest = saved._replace(arrays=())
        return saved

    def _settle(self) -> None:
        """Waits until the checkpoint before is written or has failed."""
        try:
            self._writer.wait()
        except StorageError as error:
            self.view.message(f"{error}; training goes on")

    def _write(self, snapshot: Snapshot, score: Score | None) -> None:
        metadata = snapshot.metadata | (score.kept if score else {})
        try:
            self._writer.save(snapshot.step, snapshot.arrays, metadata, score and score.value)
        except StorageError as error:
            # This write has been handed over, and only the last one must succeed.
            self.view.message(f"{error}; training goes on")

    def _begin_evaluation(self, snapshot: Snapshot) -> None:
        seed, begun = evaluation_seed(self._options.seed, snapshot.step), time.monotonic()
        self._evaluating = snapshot
        self._evaluation = self._runtime.evaluate(snapshot, seed, self.interrupted)
        self._leave_out(time.monotonic() - begun)

    def _leave_out(self, seconds: float) -> None:
        """Makes rates and shares not count seconds in which training had to wait for the session."""
        for interval in (self._log_line, self._view_line):
            interval.leave_out(seconds)

    def _end_evaluation(self, give_up: Callable[[], bool]) -> Exception | None:
        """Waits for the evaluation, if there is one, and reports it; returns its failure.

        Cancels it if `give_up` returns True.
        """
        if (evaluation := self._evaluation) is None:
            return None
        begun = time.monotonic()
        evaluation.wait(give_up)
        self._leave_out(time.monotonic() - begun)
        self._collect_evaluation()
        return evaluation.failure

    def _collect_evaluation(self) -> None:
        """Reports the evaluation if it has ended, and adds its score to its checkpoint."""
        if self._evaluation is None or not self._evaluation.done:
            return
        snapshot, newest = self._evaluating, self._newest
        score = self._report_evaluation()
        if score is None or snapshot is None or newest is None:
            return
        # The arrays are written already, so this adds the score only. No score is added if learning has gone
        # on at the same step: the newer checkpoint has other arrays under that name.
        if snapshot.metadata is newest.metadata:
            # A run that resumes from this checkpoint has also spent the time of this evaluation.
            start = snapshot.metadata["start"] | {"wall_s": self._wall_s()}
            self._write(snapshot._replace(metadata=snapshot.metadata | {"start": start}), score)
        elif snapshot.step < newest.step:
            self._write(snapshot, score)

    def _report_evaluation(self) -> Score | None:
        """Shows what came of an evaluation that has ended, and returns its score, if there is one."""
        evaluation, snapshot = self._evaluation, self._evaluating
        assert evaluation is not None and snapshot is not None, "an evaluation has begun"
        # The snapshot's arrays are not kept longer than they are needed.
        self._evaluation, self._evaluating = None, None
        at = f"at {snapshot.step:,} steps"
        if evaluation.failure is not None:
            # The figures of an earlier evaluation would look like those of this one.
            self._evaluated = {}
            self.view.message(f"the evaluation {at} failed: {evaluation.failure}")
        score = evaluation.score
        self._rules.take_score(snapshot.step, score)
        if score is not None:
            self._evaluated = evaluated(score.metrics, snapshot.step)
            self._judged = (snapshot.step, snapshot.updates)
            self.view.message(f"evaluation {at}: return {score.text}")
            self._tell("on_evaluation", snapshot.step, dict(score.metrics))
        return score
