"""The fused runtime: environments on the device, acting and learning in one compiled program."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import jax
import numpy as np

from seedbed.ops.counts import derived_seed
from seedbed.runtime.checkpoint import CheckpointWriter, restore
from seedbed.runtime.checkpoint_writer import list_steps
from seedbed.runtime.config import FusedConfig
from seedbed.runtime.metrics import STAGES, MetricsLog, RecentEpisodes, processes_rss
from seedbed.runtime.program import Program
from seedbed.runtime.reporting import (
    Clock,
    Interruption,
    Start,
    View,
    require_finite,
    stopping_signals,
)
from seedbed.runtime.rollout import Carry, Iteration
from seedbed.runtime.run_folder import RunFolder
from seedbed.types import Agent, Environment, SeedbedError, StorageError


def train(
    *, env: Environment, agent: Agent, config: FusedConfig, run: RunFolder, view: View
) -> dict[str, Any]:
    """Trains until every member made `config.steps` transitions, and returns a summary of the run.

    A folder that holds checkpoints is gone on with, bit for bit. SIGINT, SIGTERM and SIGHUP stop training
    and save; a second one gives up at once. Raises SeedbedError on what the user can mend.
    """
    begun = time.monotonic()
    # The host waits for every iteration anyway. Without effect once JAX has started.
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
    """A run on its way."""

    def __init__(
        self,
        program: Program,
        carry: Carry,
        start: Start,
        transitions: list[int],
        episodes: list[RecentEpisodes],
        zero: float,
    ) -> None:
        """Takes the compiled program and where it begins; `zero` is when the run began."""
        self.program, self.carry, self.start, self.episodes = program, carry, start, episodes
        self.transitions = transitions  # of each seed so far
        self.zero = zero
        self.report: Iteration | None = None
        self.learned: dict[str, Any] = {}  # metrics of the last iteration that made updates
        self._updates = np.ravel(jax.device_get(carry.learner.updates))  # of each seed
        self.busy_s = np.zeros(3)  # of the stages, in their order

    @property
    def env_steps(self) -> int:
        """Transitions of the seed that has the fewest."""
        return min(self.transitions)

    @property
    def updates(self) -> int:
        """Applied gradients of the seed that has the fewest."""
        return int(self._updates.min())

    @property
    def done(self) -> bool:
        return self.env_steps >= self.program.config.steps

    def advance(self) -> None:
        """Does one iteration; raises TrainingDiverged, and SeedbedError if the environment is to blame."""
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
        if (now := self._updates > before_updates).any():
            self.learned = {k: np.mean(np.ravel(v)[now]) for k, v in report.metrics.items()}
        self.busy_s = self.busy_s + 1e-6 * np.array([np.max(part) for part in report.busy])
        sums = (np.ravel(x) for x in (report.episodes, report.returns, report.lengths))
        for episodes, ended in zip(self.episodes, zip(*sums, strict=True), strict=True):
            episodes.add(*ended)

    def checkpoint(self) -> tuple[int, Carry, dict[str, Any]]:
        """What a checkpoint holds: step, arrays and metadata."""
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
    """Makes the first carry and counts, or restores those of the newest whole checkpoint."""
    episodes = [RecentEpisodes() for _ in range(program.members)]
    if not (run.checkpoints.is_dir() and list_steps(run.checkpoints)):
        if (run.path / "metrics.jsonl").exists():
            view.message("the run has no checkpoint yet: starting from the beginning")
        return program.place(program.first()), Start(), [0] * program.members, episodes
    template = jax.eval_shape(program.first)
    step, carry, metadata = restore(run.checkpoints, template, view.message)
    if jax.tree.leaves(template.actor.per_env):  # exploration rates are options, which may be new
        per_env = jax.jit(lambda: program.first().actor.per_env)()
        carry = carry._replace(actor=carry.actor._replace(per_env=per_env))
    start = Start(**metadata["start"])
    for each, state in zip(episodes, metadata["episodes"], strict=True):
        each.load(state)
    view.message(f"going on from step {step:,} ({start.updates:,} learner steps)")
    return program.place(carry), start, metadata["transitions"], episodes


class _Driver:
    """Runs iterations, and between them reports, saves and evaluates."""

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
        """Runs until the steps are done or a signal comes."""
        progress, config = self._progress, self._progress.program.config
        log, show, save = (
            Clock(period)
            for period in (config.log_every_s, self._view.report_every_s, config.checkpoint_every_s)
        )
        self._save(*progress.checkpoint())  # at once: there is always one to go back to
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
        """Saves, evaluates unless interrupted, and returns a summary."""
        interrupted = self._interruption.requested() or not self._evaluate()
        if interrupted:
            self._save(*self._progress.checkpoint())
        metrics = self._metrics("log")
        self._log.write(metrics)
        self._view.update(metrics)
        self._writer.wait()
        return metrics | {"interrupted": interrupted}

    def _evaluate(self) -> bool:
        """Evaluates and saves with the score; returns False, and does neither, if a signal came first."""
        progress = self._progress
        config, step = progress.program.config, progress.env_steps
        seed = derived_seed(config.seed, step)
        begun = time.monotonic()
        try:
            results = progress.program.evaluate(progress.carry, seed, self._interruption.requested)
        except SeedbedError:
            self._save(*progress.checkpoint())  # what was learned is not lost with it
            raise
        if results is None:
            return False
        spent = time.monotonic() - begun  # does not count in rates and shares
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
        """Saves a checkpoint; shows a message if an earlier one could not be written."""
        try:
            self._writer.save(step, carry, metadata, score)
        except StorageError as error:
            self._view.message(f"{error}; training goes on")

    def _metrics(self, purpose: str) -> dict[str, Any]:
        """One line of metrics; rates are since the last for this purpose."""
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
    """Returns the metrics of an evaluation of every member, and the same in words.

    The result of several members is the median of each figure. `best` names the member with the largest of
    the `scores`, which are the mean returns.
    """
    medians = {name: np.median([result[name] for result in results]) for name in results[0]}
    medians["episodes"] = results[0]["episodes"]  # the same for all, and a whole number
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
    """Tells where the time went, as fractions of it; the device did not say where all are 0."""
    if not busy.any():
        return {}
    shares = {f"time/{stage}": float(share) for stage, share in zip(STAGES, busy, strict=True)}
    waiting = max(0.0, 1.0 - float(busy.sum()))
    return {**shares, "time/waiting": waiting, "bottleneck": STAGES[int(np.argmax(busy))]}
