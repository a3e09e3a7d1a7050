"""The fused runtime: environments on the device, acting and learning in one compiled program."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import jax
import numpy as np

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
    after,
    require_finite,
    stopping_signals,
)
from seedbed.runtime.rollout import Carry, Iteration
from seedbed.runtime.run_folder import RunFolder
from seedbed.types import Agent, Environment, SeedbedError


def train(
    *, env: Environment, agent: Agent, config: FusedConfig, run: RunFolder, view: View
) -> dict[str, Any]:
    """Trains until `config.steps` agent steps are done, and returns a summary of the run.

    A folder that holds checkpoints is gone on with, bit for bit. SIGINT, SIGTERM and SIGHUP stop training
    and save; a second one gives up at once. Raises SeedbedError on what the user can mend.
    """
    begun = time.monotonic()
    # The host waits for every iteration anyway. Without effect once JAX has started.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    with contextlib.ExitStack() as stack:
        interruption = stack.enter_context(stopping_signals(view))
        program = Program(env, agent, config)
        carry, start, episodes = _begin(program, run, view)
        log = stack.enter_context(contextlib.closing(MetricsLog(run.path, start.env_steps)))
        writer = stack.enter_context(CheckpointWriter(run.checkpoints, config.keep_checkpoints))
        view.message("compiling")
        program.compile(carry)
        progress = _Progress(program, carry, start, episodes, begun - start.wall_s)
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
        episodes: list[RecentEpisodes],
        zero: float,
    ) -> None:
        """Takes the compiled program and where it begins; `zero` is when the run began."""
        self.program, self.carry, self.start, self.episodes = program, carry, start, episodes
        self.zero = zero
        self.iteration = start.env_steps // program.per_iteration
        self.report: Iteration | None = None
        self.busy_s = np.zeros(3)  # of the stages, in their order

    @property
    def env_steps(self) -> int:
        """Agent steps of each seed."""
        return self.iteration * self.program.per_iteration

    @property
    def updates(self) -> int:
        """Applied gradients of each seed."""
        return int(np.ravel(self.report.updates)[0]) if self.report else self.start.updates

    @property
    def done(self) -> bool:
        return self.iteration >= self.program.iterations

    def advance(self) -> None:
        """Does one iteration; raises TrainingDiverged, and SeedbedError if the environment is to blame."""
        self.carry, report = self.program.run(self.carry)
        before, self.iteration = self.env_steps, self.iteration + 1
        if not np.all(report.finite):
            raise SeedbedError(
                f"{self.program.task} gave an observation or a reward that is not finite between steps "
                f"{before:,} and {self.env_steps:,}: mend the environment, then go on from the last "
                "checkpoint with --resume"
            )
        self.report = report
        require_finite({k: np.sum(v) for k, v in report.metrics.items()}, self.updates)
        self.busy_s = self.busy_s + 1e-6 * np.array([np.max(part) for part in report.busy])
        sums = (np.ravel(x) for x in (report.episodes, report.returns, report.lengths))
        for episodes, ended in zip(self.episodes, zip(*sums, strict=True), strict=True):
            episodes.add(*ended)

    def checkpoint(self) -> tuple[int, Carry, dict[str, Any]]:
        """What a checkpoint holds: step, arrays and metadata."""
        start = Start(self.env_steps, time.monotonic() - self.zero, self.updates)
        episodes = [each.state() for each in self.episodes]
        return self.env_steps, self.carry, {"start": start._asdict(), "episodes": episodes}


def _begin(
    program: Program, run: RunFolder, view: View
) -> tuple[Carry, Start, list[RecentEpisodes]]:
    """Makes the first carry, or restores that of the newest whole checkpoint."""
    episodes = [RecentEpisodes() for _ in range(program.members)]
    if not (run.checkpoints.is_dir() and list_steps(run.checkpoints)):
        if (run.path / "metrics.jsonl").exists():
            view.message("the run has no checkpoint yet: starting from the beginning")
        return program.place(program.first()), Start(), episodes
    step, carry, metadata = restore(run.checkpoints, jax.eval_shape(program.first), view.message)
    start = Start(**metadata["start"])
    for each, state in zip(episodes, metadata["episodes"], strict=True):
        each.load(state)
    if step % program.per_iteration:
        raise SeedbedError(
            f"the run's checkpoint is of step {step:,}, which is no multiple of an iteration's "
            f"{program.per_iteration:,}: go on with the batch and unroll that the run had"
        )
    view.message(f"going on from step {step:,} ({start.updates:,} learner steps)")
    return program.place(carry), start, episodes


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
        begun = (time.monotonic(), progress.env_steps, np.zeros(3))
        self._last = {"log": begun, "view": begun}

    def run(self) -> None:
        """Runs until the steps are done or a signal comes."""
        progress, config = self._progress, self._progress.program.config
        log, show, save = (
            Clock(period)
            for period in (config.log_every_s, self._view.report_every_s, config.checkpoint_every_s)
        )
        self._writer.save(*progress.checkpoint())  # at once: there is always one to go back to
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
                self._writer.save(*progress.checkpoint())

    def finish(self) -> dict[str, Any]:
        """Saves, evaluates unless interrupted, and returns a summary."""
        interrupted = self._interruption.requested() or not self._evaluate()
        if interrupted:
            self._writer.save(*self._progress.checkpoint())
        metrics = self._metrics("log")
        self._log.write(metrics)
        self._view.update(metrics)
        self._writer.wait()
        return metrics | {"interrupted": interrupted}

    def _evaluate(self) -> bool:
        """Evaluates and saves with the score; returns False, and does neither, if a signal came first."""
        progress = self._progress
        config, step = progress.program.config, progress.env_steps
        seed = (config.seed + 1_000_003 * (1 + step)) % (1 << 31)
        begun = time.monotonic()
        try:
            results = progress.program.evaluate(progress.carry, seed, self._interruption.requested)
        except SeedbedError as error:
            with after(error, self._view):
                self._writer.save(*progress.checkpoint())  # what was learned is not lost with it
            raise
        if results is None:
            return False
        spent = time.monotonic() - begun  # does not count in rates and shares
        self._last = {name: (at + spent, *rest) for name, (at, *rest) in self._last.items()}
        scores = [result["episode_return_mean"] for result in results]
        best = int(np.argmax(scores))
        self._evaluated = {f"evaluation/{name}": value for name, value in results[best].items()}
        self._evaluated["evaluation/env_steps"] = step
        text = f"evaluation at {step:,} steps: return "
        if len(results) > 1:
            self._evaluated["evaluation/seeds"] = scores
            chosen = [f"seed {config.member_seeds[best]}"]
            chosen += [f"{name} {value:g}" for name, value in config.variations[best].items()]
            text += (
                f"{np.median(scores):.1f} (median of {len(scores)} runs, {min(scores):.1f} to "
                f"{max(scores):.1f}; best: {', '.join(chosen)})"
            )
        else:
            mean, deviation = scores[0], results[0]["episode_return_std"]
            text += f"{mean:.2f} +- {deviation:.2f} ({results[0]['episodes']} episodes)"
        self._view.message(text)
        at, carry, metadata = progress.checkpoint()
        self._writer.save(at, carry, metadata | {"best_seed": best}, score=scores[best])
        return True

    def _metrics(self, purpose: str) -> dict[str, Any]:
        """One line of metrics; rates are since the last for this purpose."""
        progress, skip = self._progress, self._progress.program.env.frame_skip
        now, steps = time.monotonic(), progress.env_steps
        before, steps_before, busy_before = self._last[purpose]
        self._last[purpose] = (now, steps, progress.busy_s)
        passed = max(now - before, 1e-9)
        rate = (steps - steps_before) * len(progress.episodes) / passed
        report = progress.report
        learned = {} if report is None or not progress.updates else report.metrics
        agent = {k: np.mean(v) for k, v in learned.items()}
        env = {} if report is None else report.env_metrics
        return {
            "wall_s": now - progress.zero,
            "env_steps": steps,
            "frames": steps * skip,
            "env_steps_per_s": rate,
            "frames_per_s": rate * skip,
            "learner_steps": progress.updates,
            **RecentEpisodes.summary(progress.episodes),
            **agent,
            **{f"env/{name}": np.mean(v) for name, v in env.items() if "episode_" not in name},
            "rss_mb": processes_rss([os.getpid()]),
            **_shares((progress.busy_s - busy_before) / passed),
            **self._evaluated,
        }


def _shares(busy: np.ndarray) -> dict[str, Any]:
    """Tells where the time went, as fractions of it; the device did not say where all are 0."""
    if not busy.any():
        return {}
    shares = {f"time/{stage}": float(share) for stage, share in zip(STAGES, busy, strict=True)}
    waiting = max(0.0, 1.0 - float(busy.sum()))
    return {**shares, "time/waiting": waiting, "bottleneck": STAGES[int(np.argmax(busy))]}
