"""`seedbed tune`: trains trials side by side, gives up those that fall behind, and tells what was best."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.settle import settle
from seedbed.exit_status import ExitStatus
from seedbed.files import open_regular
from seedbed.machine import usable_cores
from seedbed.printable import printable
from seedbed.run.bucket import is_address
from seedbed.run.folder import METRICS
from seedbed.run.lines import whole_lines
from seedbed.run.signals import stopping_signals
from seedbed.run.sizes import require_number
from seedbed.streams.supervisor import exit_text, last_line, start_module
from seedbed.tuning.cores import Share, shares, within
from seedbed.tuning.page import write_page
from seedbed.tuning.space import read_space, require_space, start_of
from seedbed.tuning.study import ENDED, Study, Trial, opened, optuna
from seedbed.types import UsageError

DESCRIPTION = """\
Searches the options of a preset or an environment. Every trial is a run of `seedbed train` with the options
that follow NAME; FILE is a JSON object of what varies:

  {"agent.learning_rate": {"low": 1e-5, "high": 1e-2, "log": true},
   "agent.activation": ["tanh", "relu"]}

A trial's score is the mean return of its last evaluation. Trials that fall
behind the others' median at an evaluation are given up. A search that was
stopped or killed goes on with the same command; the same command on another
machine that shares the folder helps."""
_EVALUATIONS = 8
"""Evaluations of a trial, if nothing else is asked for."""
_AGAIN_S = 2.0
"""Seconds until a run is tried again that the process of a killed search still has."""
_PATIENCE_S = 60.0
"""Seconds within which trials save and end if the search fails."""
_TRIES = 30
"""Starts of a trial whose run is not free, or whose disk is full, before it counts as failed."""
_STOPPED = (ExitStatus.STOPPED, ExitStatus.GIVEN_UP, ExitStatus.TRY_AGAIN, -signal.SIGTERM)
"""How the process of a trial ends that was asked to: the last before it has seen to signals."""
_SCORE, _SCORED = "evaluation/episode_return_mean", "evaluation/env_steps"
Tell = Callable[[str], None]


class Options(NamedTuple):
    """The options of `seedbed tune`, checked, with the configuration of its trials."""

    space: Path
    trials: int
    jobs: int
    study: Path
    config: TrainConfig  # what the first trial trains
    plain: TrainConfig  # the same without what was chosen, for a trial's cores and for judging it
    trust: bool  # as `seedbed train` has it


def declare(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of `seedbed tune`; those of `seedbed train` come besides."""
    parser.usage = "seedbed tune NAME --space FILE [OPTIONS] [OPTIONS of seedbed train]"
    parser.add_argument("--space", metavar="FILE", type=Path, required=True, help="what varies")
    parser.add_argument("--trials", metavar="N", type=int, default=50, help="trials (default: 50)")
    jobs = "trials at a time, each with its share of the cores (default: one for each core)"
    parser.add_argument("--jobs", metavar="J", type=int, default=0, help=jobs)
    study = "the search's folder (default: runs/tune-NAME)"
    parser.add_argument("--study", metavar="DIR", help=study)


def options_of(own: argparse.Namespace, rest: Sequence[str]) -> Options:
    """Returns what a search is to do; raises SeedbedError for what cannot be."""
    for name, value in (("--trials", own.trials), ("--jobs", own.jobs or 1)):
        if value < 1:
            raise UsageError(f"{name} is {value}: it must be 1 or more")
    if own.study is not None and is_address(own.study):
        raise UsageError(f"--study is {own.study}: a search needs a folder, not a bucket")
    given = flags.split_train_arguments(rest)
    request = given.request
    if request.what is None and request.file is None:
        raise UsageError("name what to tune first: seedbed tune cartpole/ppo --space FILE")
    if request.run is not None or request.resume or given.cluster is not None:
        raise UsageError("trials have runs of their own: leave out --run, --resume and --cluster")
    optuna()
    jobs = own.jobs or max(1, int(usable_cores()))
    # Sizes that follow from the machine are those of a trial's cores; and several share a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    plain: list[TrainConfig] = []

    def change(found: TrainConfig) -> TrainConfig:
        plain.append(flags.override(found, given.rest, False))
        return plain[-1]

    with within(shares(jobs)[0]):
        config = settle(request, change).config
    require_number(config.runtime, "trials share the machine")
    every = config.runtime.evaluate_every
    told = any("evaluate-every" in word.replace("_", "-") for word in given.rest)
    if request.file is None and not told:
        # Those of a kind of task may be so rare that nothing could be given up.
        every = max(1, config.runtime.steps // _EVALUATIONS)
        every = min(every, config.runtime.until_stale or every)
    # A line of metrics has the newest evaluation only.
    often = min(1.0, config.runtime.log_every_s)
    runtime = dataclasses.replace(config.runtime, evaluate_every=every, log_every_s=often)
    config = dataclasses.replace(config, runtime=runtime)
    name = config.name.replace("/", "-").replace(":", "-") or "study"
    study = Path("runs") / f"tune-{name}" if own.study is None else Path(own.study)
    asked = dataclasses.replace(plain[-1], start=config.start)
    return Options(own.space, own.trials, jobs, study, config, asked, request.trust)


class _Job:
    """A trial and its process."""

    def __init__(self, trial: Trial, share: Share, trust: bool) -> None:
        self.trial, self._share, self._trust = trial, share, trust
        self.log = trial.run.with_suffix(".log")
        self.pruned, self.asked, self.score = False, False, math.nan
        self.step, self._tries = trial.last_step, 0
        # The inode of the metrics, and how many bytes of it are read.
        self._file, self._read = -1, 0
        self.begun = self._tried = time.monotonic()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        what = ["--resume"] if self.trial.begun else ["--config", str(self.trial.file)]
        what += ["--trust-run"] if self._trust else []
        self._tries, self._tried = self._tries + 1, time.monotonic()
        with within(self._share), self.log.open("ab") as log:
            return start_module(
                "seedbed.tuning.trial",
                ["train", *what, "--run", str(self.trial.run)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def look(self) -> list[tuple[int, float]]:
        """Returns steps and scores of evaluations since the last call that no process has reported."""
        found: list[tuple[int, float]] = []
        for line in self._new_lines():
            score, step = line.get(_SCORE), line.get(_SCORED, -1)
            if score is None:
                continue
            # A run that was over when its search was killed evaluates the same step again.
            self.score = float(score)
            if step > self.step:
                self.step = int(step)
                found.append((self.step, self.score))
        return found

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of metrics since the last call."""
        with contextlib.suppress(OSError), open_regular(self.trial.run / METRICS) as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._file:
                # A run that goes on writes its metrics anew, without the lines past its checkpoint.
                self._file, self._read = inode, 0
            file.seek(self._read)
            for _, line in whole_lines(file):
                self._read = file.tell()
                yield line

    def ended(self) -> bool:
        """Returns whether the trial is over; a run that another process still has is tried again."""
        status = self.process.poll()
        if status != ExitStatus.TRY_AGAIN or self.asked or self._tries > _TRIES:
            return status is not None
        if time.monotonic() - self._tried > _AGAIN_S:
            self.process = self._start()
        return False

    def stop(self) -> None:
        """Asks the run, once, to save and end: a second signal would end it at once."""
        if not self.asked:
            self.process.send_signal(signal.SIGTERM)
        self.asked = True


def tune(options: Options, tell: Tell) -> tuple[ExitStatus, str]:
    """Searches until all trials have ended or a signal comes; returns the status and the last message.

    Raises SeedbedError if the space does not fit, or if the first trials all fail.
    """
    space = read_space(options.space)
    free, jobs = shares(options.jobs), dict[int, _Job]()
    with within(free[0]):
        require_space(opened(options.config, options.plain), space)
    study = Study(options.study, options.config, space, options.plain, free[0])
    tell(_begin(study))
    page = options.study / "index.html"
    with stopping_signals(tell) as interruption:
        try:
            while True:
                stopping, over = interruption.requested(), False
                for place, share in enumerate(free):
                    if place in jobs or stopping:
                        continue
                    trial = study.next(options.trials)
                    if over := trial is None:
                        break
                    jobs[place] = _Job(trial, share, options.trust)
                for place, job in list(jobs.items()):
                    _look(study, job)
                    if job.ended():
                        del jobs[place]
                        _look(study, job)
                        if _end(study, job):
                            tell(_line(study, job, options.trials))
                            write_page(study, page)
                    elif stopping:
                        job.stop()
                if not jobs and (stopping or over):
                    break
                time.sleep(0.2)
        except Exception:
            # With what is wrong mended, the same command goes on with the trials that run.
            _save(jobs.values())
            raise
        finally:
            for job in jobs.values():
                job.process.kill()
                job.process.wait()
    if interruption.come():
        return ExitStatus.STOPPED, "stopped and saved; go on with the same command"
    return ExitStatus.FINISHED if study.best() else ExitStatus.FAILED, _best(study, page)


def _save(jobs: Collection[_Job]) -> None:
    """Asks trials to save and end, and waits for `_PATIENCE_S` seconds at most."""
    for job in jobs:
        job.stop()
    until = time.monotonic() + _PATIENCE_S
    while any(job.process.poll() is None for job in jobs) and time.monotonic() < until:
        time.sleep(0.2)


def _look(study: Study, job: _Job) -> None:
    """Reports new evaluations, by their number: trials make them at slightly different steps."""
    runtime = study.config.runtime
    every = runtime.evaluate_every or runtime.steps  # 0 is only the one at the end
    for step, score in job.look():
        behind = study.report(job.trial, round(step / every), score)
        # One that has all its steps is over.
        if behind and not job.asked and step < study.steps_of(job.trial):
            job.pruned = True
            job.stop()


def _end(study: Study, job: _Job) -> bool:
    """Notes how a trial has ended; returns False if it is to go on later."""
    status = job.process.returncode
    if status == ExitStatus.FINISHED and math.isfinite(job.score):
        study.end(job.trial, "COMPLETE", job.score)
    elif job.pruned:
        study.end(job.trial, "PRUNED")
    elif job.asked and status in _STOPPED:
        job.trial.release()
        return False
    else:
        said = last_line(job.log.read_text(errors="replace")) or exit_text(status)
        study.end(job.trial, "FAIL", reason=said)
    return True


def _line(study: Study, job: _Job, most: int) -> str:
    """Returns a line about a trial that has ended."""
    record = study.trials()[job.trial.number]
    state = record.state.name
    what = record.user_attrs.get("reason", "") if state == "FAIL" else f"return {job.score:.2f}"
    what += " (given up)" if state == "PRUNED" else ""
    best = study.best()
    so_far = f" | best {best.value:.2f} (trial {best.number})" if best else ""
    seconds = time.monotonic() - job.begun
    done = f"{len(study.trials(*ENDED))} of {most}"
    return f"trial {job.trial.number} ({done}): {printable(what)}, {seconds:.0f} s{so_far}"


def _best(study: Study, page: Path) -> str:
    best = study.best()
    if best is None:
        return f"no trial has ended with a return; see {printable(page)}"
    command = study.command_of(best)
    return f"best: {best.value:.2f} in trial {best.number}; all in {printable(page)}\n{command}"


def _begin(study: Study) -> str:
    """Returns a line about what the search begins with."""
    done = len(study.trials(*ENDED))
    first = "the first trial is the configuration as it is"
    if start_of(study.config, study.space) is None:
        first = "the configuration as it is does not lie in the space, and is not tried"
    how = f"{done} trials have ended before" if done else first
    return f"searching in {printable(study.folder)}; {how}"


def serve(arguments: Sequence[str], parser: argparse.ArgumentParser, tell: Tell) -> int:
    """Runs the command; returns its exit status."""
    declare(parser)
    own, rest = parser.parse_known_args(arguments)
    flags.reject_near(rest, parser)
    status, text = tune(options_of(own, rest), tell)
    tell(text)
    return status
