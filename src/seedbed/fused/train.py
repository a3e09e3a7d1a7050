"""The fused runtime: one compiled program steps environments on the device, acts and learns."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import jax
import numpy as np

from seedbed.fused.program import Program
from seedbed.fused.rollout import Carry, Iteration
from seedbed.run.checkpoint import CheckpointWriter, restore
from seedbed.run.checkpoint_helper import list_steps
from seedbed.run.folder import RunFolder
from seedbed.run.keys import derived_seed
from seedbed.run.metrics import STAGES, MetricsLog, RecentEpisodes, processes_rss
from seedbed.run.options import FusedConfig
from seedbed.run.reporting import (
    Clock,
    Interruption,
    Start,
    View,
    stopping_signals,
)
from seedbed.run.update import require_finite
from seedbed.types import Agent, Environment, SeedbedError, StorageError


def train(
    *, env: Environment, agent: Agent, config: FusedConfig, run: RunFolder, view: View
) -> dict[str, Any]:
    """Trains until every member has made `config.steps` transitions, and returns a summary of the run.

    The summary holds the last metrics and `interrupted` (bool). If the folder `run` holds checkpoints, the
    run continues from the newest whole one, bit for bit as if it had not stopped. This process must hold the
    folder's locks. Call from the main thread: there, SIGINT, SIGTERM and SIGHUP stop training and save, and a
    second signal raises KeyboardInterrupt at once; in other threads no signal is handled. Raises SeedbedError
    if the user can repair the failure.
    """
    begun = time.monotonic()
    # The host waits for every iteration anyway. This has no effect once JAX has started.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with contextlib.ExitStack() as stack:
        interruption = stack.enter_context(stopping_signals(view))
        program = Program(env, agent, config)
        carry, start, transitions, episodes = _begin(program, run, view)
        log = MetricsLog(run.path, start.env_steps, view.message)
        stack.callback(log.close)
        writer = CheckpointWriter(run.checkpoints, config.keep_checkpoints, lock=run.lock)
        stack.enter_context(writer)
        if program.euler_steps:
            view.message(
                f"training with Euler's integrator for {program.euler_steps:,} steps, then with the "
                "environment's own"
            )
        view.message("compiling")
        program.compile(carry)
        progress = _Progress(program, carry, start, transitions, episodes, begun - start.wall_s)
        driver = _Driver(progress, log, writer, view, interruption)
        driver.run()
        return driver.finish()


class _Progress:
    """The state of a run between iterations: its carry and its counts. For the thread of `train` only."""

    def __init__(
        self,
        program: Program,
        carry: Carry,
        start: Start,
        transitions: list[int],
        episodes: list[RecentEpisodes],
        zero: float,
    ) -> None:
        """Takes a compiled program, and the carry and counts with which the run starts or continues.

        `zero` is a monotonic time: the seconds since then are those that the run has trained, including those
        before a resume.
        """
        self.program, self.carry, self.start, self.episodes = program, carry, start, episodes
        self.transitions = transitions  # of each member so far
        self.zero = zero
        self.report: Iteration | None = None
        # The metrics of the last iteration that made updates, and which members made them.
        self._learned: tuple[dict[str, Any], np.ndarray] = ({}, np.zeros(0, bool))
        self._updates = np.ravel(jax.device_get(carry.learner.updates))  # of each member
        self.busy_s = np.zeros(3)  # seconds of this process in each of `STAGES`

    @property
    def env_steps(self) -> int:
        """The transitions of the member that has the fewest."""
        return min(self.transitions)

    @property
    def learned(self) -> dict[str, Any]:
        """The agent's metrics: means over the members that learned in the last iteration with updates."""
        metrics, members = self._learned
        return {name: np.mean(np.ravel(value)[members]) for name, value in metrics.items()}

    @property
    def updates(self) -> int:
        """The applied gradients of the member that has the fewest."""
        return int(self._updates.min())

    @property
    def done(self) -> bool:
        return self.env_steps >= self.program.config.steps

    def advance(self) -> None:
        """Runs one iteration and waits for it; donates the carry of the iteration before.

        Raises SeedbedError if an observation or a reward is not finite, and TrainingDiverged if one of the
        agent's metrics is not.
        """
        self.carry, report = self.program.run(self.carry, self.transitions)
        before, made = self.env_steps, np.ravel(report.transitions).tolist()
        self.transitions = [sum(each) for each in zip(self.transitions, made, strict=True)]
        if not np.all(report.finite):
            raise SeedbedError(
                f"{self.program.task} gave an observation or a reward that is not finite between steps "
                f"{before:,} and {self.env_steps:,}: mend the environment, then go on from the last "
                "checkpoint with --resume"
            )
        before_updates, self._updates = self._updates, np.ravel(report.updates)
        self.report = report
        require_finite({k: np.sum(v) for k, v in report.metrics.items()}, self.updates)
        if (learned := self._updates > before_updates).any():
            self._learned = (report.metrics, learned)
        self.busy_s = self.busy_s + 1e-6 * np.array([np.max(part) for part in report.busy])
        sums = (np.ravel(x) for x in (report.episodes, report.returns, report.lengths))
        for episodes, ended in zip(self.episodes, zip(*sums, strict=True), strict=True):
            episodes.add(*ended)

    def checkpoint(self) -> tuple[int, Carry, dict[str, Any]]:
        """Returns the contents of a checkpoint: step, arrays and metadata. `advance` donates the arrays."""
        start = Start(self.env_steps, time.monotonic() - self.zero, self.updates)
        metadata = {
            "start": start._asdict(),
            "transitions": self.transitions,
            "episodes": [each.state() for each in self.episodes],
        }
        return self.env_steps, self.carry, metadata


def _begin(
    program: Program, run: RunFolder, view: View
) -> tuple[Carry, Start, list[int], list[RecentEpisodes]]:
    """Returns the carry, the start, and the transitions and recent episodes of each member.

    They are new ones, or those of the newest whole checkpoint if there are checkpoints. Raises SeedbedError
    if no checkpoint is whole, or if the newest whole one is of another agent.
    """
    episodes = [RecentEpisodes() for _ in range(program.members)]
    if not (run.checkpoints.is_dir() and list_steps(run.checkpoints)):
        if (run.path / "metrics.jsonl").exists():
            view.message("the run has no checkpoint yet: starting from the beginning")
        return program.place(program.first()), Start(), [0] * program.members, episodes
    template = jax.eval_shape(program.first)
    step, carry, metadata = restore(run.checkpoints, template, view.message)
    # Exploration rates come from options, which the user may have changed since.
    if jax.tree.leaves(template.actor.per_env):
        per_env = jax.jit(lambda: program.first().actor.per_env)()
        carry = carry._replace(actor=carry.actor._replace(per_env=per_env))
    start = Start(**metadata["start"])
    for each, state in zip(episodes, metadata["episodes"], strict=True):
        each.load(state)
    view.message(f"going on from step {step:,} ({start.updates:,} learner steps)")
    return program.place(carry), start, metadata["transitions"], episodes


class _Driver:
    """The loop of a run: iterations, and between them reports, checkpoints and evaluations.

    For the thread of `train` only.
    """

    def __init__(
        self,
        progress: _Progress,
        log: MetricsLog,
        writer: CheckpointWriter,
        view: View,
        interruption: Interruption,
    ) -> None:
        self._progress, self._log, self._writer, self._view = progress, log, writer, view
        self._interruption = interruption
        self._evaluated: dict[str, Any] = {}
        begun = (time.monotonic(), sum(progress.transitions), np.zeros(3))
        self._last = {"log": begun, "view": begun}

    def run(self) -> None:
        """Runs iterations until the steps are done or a signal asks the run to stop."""
        progress, config = self._progress, self._progress.program.config
        log, show, save = (
            Clock(period)
            for period in (config.log_every_s, self._view.report_every_s, config.checkpoint_every_s)
        )
        # Save at once, so that there is always a checkpoint to go back to.
        self._save(*progress.checkpoint())
        every = config.evaluate_every or config.steps + 1
        next_evaluation = (progress.env_steps // every + 1) * every
        while not progress.done and not self._interruption.requested():
            progress.advance()
            if log.due():
                self._log.write(self._metrics("log"))
            if show.due():
                self._view.update(self._metrics("view"))
            if progress.env_steps >= next_evaluation and not progress.done:
                next_evaluation = (progress.env_steps // every + 1) * every
                self._evaluate()
            elif save.due():
                self._save(*progress.checkpoint())

    def finish(self) -> dict[str, Any]:
        """Evaluates and saves, or only saves if a signal asks the run to stop; returns a summary.

        The summary holds the last metrics and `interrupted`. Raises StorageError if the last checkpoint could
        not be written.
        """
        interrupted = self._interruption.requested() or not self._evaluate()
        if interrupted:
            self._save(*self._progress.checkpoint())
        metrics = self._metrics("log")
        self._log.write(metrics)
        self._view.update(metrics)
        self._writer.wait()
        return metrics | {"interrupted": interrupted}

    def _evaluate(self) -> bool:
        """Evaluates, saves a checkpoint with the score, and returns True.

        If a signal comes before the evaluation ends, this returns False and saves nothing. If the evaluation
        raises SeedbedError, this saves a checkpoint without a score and raises the error again.
        """
        progress = self._progress
        config, step = progress.program.config, progress.env_steps
        seed = derived_seed(config.seed, step)
        begun = time.monotonic()
        try:
            results = progress.program.evaluate(progress.carry, seed, self._interruption.requested)
        except SeedbedError:
            # The failed evaluation must not lose the training before it.
            self._save(*progress.checkpoint())
            raise
        if results is None:
            return False
        # Rates and shares must not count the time of the evaluation.
        spent = time.monotonic() - begun
        self._last = {name: (at + spent, *rest) for name, (at, *rest) in self._last.items()}
        scores = [result["episode_return_mean"] for result in results]
        best = int(np.argmax(scores))
        name = config.member_names[best]
        self._evaluated, text = _evaluated(results, scores, name)
        self._evaluated["evaluation/env_steps"] = step
        self._view.message(f"evaluation at {step:,} steps: return {text}")
        at, carry, metadata = progress.checkpoint()
        self._save(at, carry, metadata | {"best_seed": best}, scores[best])
        return True

    def _save(
        self, step: int, carry: Carry, metadata: dict[str, Any], score: float | None = None
    ) -> None:
        """Saves a checkpoint, with its score if given. Shows a message if an earlier one failed."""
        try:
            self._writer.save(step, carry, metadata, score)
        except StorageError as error:
            self._view.message(f"{error}; training goes on")

    def _metrics(self, purpose: str) -> dict[str, Any]:
        """Returns one line of metrics. Rates and shares are since the last line for `purpose`.

        `purpose` is "log" or "view". Counts are those of the member that has the fewest transitions or
        updates, but rates are sums over all members.
        """
        progress, skip = self._progress, self._progress.program.env.frame_skip
        now, every = time.monotonic(), sum(progress.transitions)
        before, every_before, busy_before = self._last[purpose]
        self._last[purpose] = (now, every, progress.busy_s)
        passed = max(now - before, 1e-9)
        rate = (every - every_before) / passed
        env = {} if progress.report is None else progress.report.env_metrics
        return {
            "wall_s": now - progress.zero,
            "env_steps": progress.env_steps,
            "frames": progress.env_steps * skip,
            "env_steps_per_s": rate,
            "frames_per_s": rate * skip,
            "learner_steps": progress.updates,
            **RecentEpisodes.summary(progress.episodes),
            **progress.learned,
            **{f"env/{name}": np.mean(v) for name, v in env.items() if "episode_" not in name},
            "rss_mb": processes_rss([os.getpid()]),
            **_shares((progress.busy_s - busy_before) / passed),
            **self._evaluated,
        }


def _evaluated(
    results: list[dict[str, Any]], scores: list[float], best: str
) -> tuple[dict[str, Any], str]:
    """Returns the metrics of an evaluation of every member, and a text that describes them.

    With several members, each figure is the median over the members. `scores` are the members' mean returns,
    and `best` is the name of the member that has the largest one.
    """
    medians = {name: np.median([result[name] for result in results]) for name in results[0]}
    # This number is the same for all members, and stays an int.
    medians["episodes"] = results[0]["episodes"]
    metrics = {f"evaluation/{name}": value for name, value in medians.items()}
    mean, deviation = medians["episode_return_mean"], medians["episode_return_std"]
    if len(results) == 1:
        return metrics, f"{mean:.2f} +- {deviation:.2f} ({medians['episodes']} episodes)"
    metrics["evaluation/seeds"] = scores
    metrics["evaluation/best_return"], metrics["evaluation/best_member"] = max(scores), best
    return metrics, (
        f"{mean:.2f} (median of {len(scores)} members, from {min(scores):.2f} to {max(scores):.2f}; the "
        f"best, {best}, is what seedbed evaluate plays)"
    )


def _shares(busy: np.ndarray) -> dict[str, Any]:
    """Returns `time/...`, shares of the wall time, and `bottleneck`, from the shares `[3]` of the stages.

    Returns an empty dict if all are 0, which means that this kind of device does not measure them.
    """
    if not busy.any():
        return {}
    shares = {f"time/{stage}": float(share) for stage, share in zip(STAGES, busy, strict=True)}
    waiting = max(0.0, 1.0 - float(busy.sum()))
    return {**shares, "time/waiting": waiting, "bottleneck": STAGES[int(np.argmax(busy))]}
