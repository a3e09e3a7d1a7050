"""The fused runtime: one compiled program steps environments on the device, acts and learns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.envs.device.wrappers import STATISTICS
from seedbed.fused.carry import Carry, Iteration
from seedbed.fused.program import Program
from seedbed.ops.noise import PinkNoise
from seedbed.run.callback import Callback, OnMetrics
from seedbed.run.devices import start_jax
from seedbed.run.folder import RunFolder
from seedbed.run.group import Command, Group, whole
from seedbed.run.loaded_weights import LoadedWeights
from seedbed.run.metrics import STAGES, RecentEpisodes
from seedbed.run.options import FusedConfig
from seedbed.run.runtime import Progress, Score, Snapshot, View
from seedbed.run.session import Session
from seedbed.run.update import require_finite
from seedbed.types import Agent, Environment, SeedbedError


def train(
    *,
    env: Environment,
    agent: Agent,
    config: FusedConfig,
    run: RunFolder,
    view: View,
    callback: Callback | OnMetrics | None = None,
    weights: LoadedWeights | None = None,
) -> dict[str, Any]:
    """Trains until every member has made `config.steps` transitions, and returns a summary of the run.

    The summary holds the last metrics and `interrupted` (bool). If the folder `run` holds checkpoints, the
    run continues from the newest whole one, bit for bit as if it had not stopped. This process must hold the
    folder's locks. Call from the main thread: there, SIGINT, SIGTERM and SIGHUP stop training and save, and a
    second signal raises KeyboardInterrupt at once; in other threads no signal is handled. Raises SeedbedError
    if the user can repair the failure.
    """
    if (group := Group.joined) is not None:
        group.meet("settled")
    start_jax()
    with Session(run, view, callback, weights) as session:
        program = Program(env, agent, config)
        fused = _restored(program, session)
        if program.euler_steps:
            some = f" for {program.euler_steps:,} steps, then with the environment's own"
            view.message(f"training with Euler's integrator{some * (config.euler_share < 1)}")
        if group is not None and group.member.of > 1:
            what = "as one learner" if program.members == 1 else f"{program.members} runs"
            view.message(f"training {what}, divided among {group.member.of} processes")
        view.message("compiling")
        program.compile(fused.carry)
        if group is not None:
            group.meet("compiled")
        with contextlib.nullcontext() if group is None else group.leading():
            return session.train(fused)


def _restored(program: Program, session: Session) -> FusedRun:
    """Returns a run that begins, or goes on from the newest whole checkpoint if there are checkpoints.

    Raises SeedbedError if no checkpoint is whole, or if the newest whole one is of another agent.
    """
    template = jax.eval_shape(program.first)
    resumed = session.resume(lambda: template)
    episodes = [RecentEpisodes() for _ in range(program.members)]
    if resumed is None:
        first = program.first()
        learner = session.begun(program.agent, first.learner, program.members)
        return _begun(program, first._replace(learner=learner), [0] * program.members, episodes)
    carry, metadata = resumed
    # Exploration rates come from options, which the user may have changed since. Noise goes on.
    per_env = template.actor.per_env
    if jax.tree.leaves(per_env) and not isinstance(per_env, PinkNoise):
        per_env = jax.jit(lambda: program.first().actor.per_env)()
        carry = carry._replace(actor=carry.actor._replace(per_env=per_env))
    for each, state in zip(episodes, metadata["episodes"], strict=True):
        each.load(state)
    return _begun(program, carry, metadata["transitions"], episodes)


def _begun(
    program: Program, carry: Carry, transitions: list[int], episodes: list[RecentEpisodes]
) -> FusedRun:
    """Returns a run that goes on from here, with all processes of the learner."""
    if program.group is not None:
        carry, _ = program.group.spread((carry, np.array(transitions)))
    updates = np.ravel(jax.device_get(carry.learner.updates))
    return FusedRun(program, program.place(carry), transitions, updates, episodes)


class FusedRun:
    """A run of the fused runtime between iterations: its carry and its counts; a `run.runtime.Runtime`.

    It has no threads and no other processes. For the session's thread only.
    """

    def __init__(
        self,
        program: Program,
        carry: Carry,
        transitions: list[int],
        updates: np.ndarray,
        episodes: list[RecentEpisodes],
    ) -> None:
        """Takes the program, and the carry and counts of each member with which the run begins or goes on."""
        self.program, self.carry, self.episodes = program, carry, episodes
        self.transitions = transitions  # of each member so far
        self.report: Iteration | None = None  # of the last iteration
        # The metrics of the last iteration that made updates, and which members made them.
        self._learned: tuple[dict[str, Any], np.ndarray] = ({}, np.zeros(0, bool))
        self._updates = updates  # of each member
        self.busy_s = np.zeros(3)  # seconds of this process in each of `STAGES`
        self._wanted = False  # whether a snapshot is wanted
        self._intact = True  # false once an iteration has failed

    @property
    def options(self) -> FusedConfig:
        """The options of the run."""
        return self.program.config

    @property
    def frame_skip(self) -> int:
        """The number of simulator frames in a step."""
        return self.program.env.frame_skip

    @property
    def learned(self) -> dict[str, Any]:
        """The agent's metrics: means over the members that learned in the last iteration with updates."""
        metrics, members = self._learned
        return {name: np.mean(np.ravel(value)[members]) for name, value in metrics.items()}

    def progress(self) -> Progress:
        """Returns the counts: those of the member that has the fewest, and the transitions of all."""
        return Progress(min(self.transitions), int(self._updates.min()), sum(self.transitions))

    def start(self) -> None:
        """Does nothing: `advance` does the work."""

    def advance(self) -> bool:
        """Runs one iteration and waits for it, unless all steps are done; returns whether it ran.

        Donates the carry of the iteration before. Raises SeedbedError if an observation or a reward is not
        finite, and TrainingDiverged if one of the agent's metrics is not. Raises SeedbedError if an item was
        given a priority that is not finite or not above 0.
        """
        before = self.progress()
        if before.env_steps >= self.options.steps:
            return False
        group = self.program.group
        if group is not None:
            with group.together():
                group.require_all()
                group.command(Command("step"))
        self._intact = False
        with contextlib.nullcontext() if group is None else group.together():
            self.carry, report = self.program.run(self.carry, self.transitions)
        made = np.ravel(report.transitions).tolist()
        self.transitions = [sum(each) for each in zip(self.transitions, made, strict=True)]
        updates_before, self._updates = self._updates, np.ravel(report.updates)
        self._require_finite(report, before)
        self.report = report
        if (learned := self._updates > updates_before).any():
            self._learned = (report.metrics, learned)
        self.busy_s = self.busy_s + 1e-6 * np.array([np.max(part) for part in report.busy])
        sums = (np.ravel(x) for x in (report.episodes, report.returns, report.lengths))
        for episodes, ended in zip(self.episodes, zip(*sums, strict=True), strict=True):
            episodes.add(*ended)
        if not np.all(report.valid):
            raise SeedbedError(
                "an item was given a priority that is not finite or not above 0 before step "
                f"{self.progress().env_steps:,}: the agent must give finite priorities above 0"
            )
        self._intact = True
        return True

    def _require_finite(self, report: Iteration, before: Progress) -> None:
        """Raises the errors of `advance`, which name the member of a population."""
        if all(np.all(np.isfinite(x)) for x in report.metrics.values()) and np.all(report.finite):
            return
        names = self.options.member_names if self.program.members > 1 else ("",)
        for i, name in enumerate(names):
            if not np.ravel(report.finite)[i]:
                raise SeedbedError(
                    f"{self.program.task} gave{name and f' {name}'} an observation or a reward that is not "
                    f"finite between steps {before.env_steps:,} and {self.progress().env_steps:,}: mend the "
                    "environment, then go on from the last checkpoint with --resume"
                )
            metrics = {each: np.ravel(value)[i] for each, value in report.metrics.items()}
            require_finite(metrics, int(self._updates[i]), name, bool(self.options.sweep))

    def stop(self) -> None:
        """Does nothing: there are no threads."""

    def join(self) -> BaseException | None:
        """Returns None: there are no threads."""
        return None

    def recent_episodes(self) -> dict[str, float]:
        """Returns the count of the member that has the fewest, and means of the recent ones of all."""
        fewest = min(each.episodes for each in self.episodes)
        return RecentEpisodes.summary(self.episodes) | {"episodes": fewest}

    def meter(self) -> FusedMeter:
        """Starts measurements; the first interval begins now."""
        return FusedMeter(self)

    def request_snapshot(self) -> None:
        """Makes `take_snapshot` return one."""
        self._wanted = True

    def take_snapshot(self) -> Snapshot | None:
        """Returns a snapshot if one was asked for. The next `advance` donates its arrays."""
        wanted, self._wanted = self._wanted, False
        return self._snapshot() if wanted else None

    def last_snapshot(self) -> Snapshot | None:
        """Returns a snapshot, or None if the last iteration failed."""
        return self._snapshot() if self._intact else None

    def _snapshot(self) -> Snapshot:
        env_steps, updates, _ = self.progress()
        metadata = {
            "transitions": self.transitions,
            "episodes": [each.state() for each in self.episodes],
        }
        return Snapshot(env_steps, self._whole(), metadata, updates)

    def _whole(self) -> Carry:
        """Returns the carry, with the environments of all processes."""
        if (group := self.program.group) is None:
            return self.carry
        with group.together():
            group.command(Command("show"))
            return whole(self.carry)

    def save_beside(self, step: int, settle: Callable[[], None]) -> None:
        """Does nothing: the carry is the whole of the run."""

    def evaluate(
        self, snapshot: Snapshot, seed: int, give_up: Callable[[], bool]
    ) -> FinishedEvaluation:
        """Evaluates every member at once, while training waits."""
        try:
            results = self.program.evaluate(snapshot.arrays, seed, give_up)
        except SeedbedError as failure:
            return FinishedEvaluation(None, failure)
        return FinishedEvaluation(_score(results, self.options) if results else None, None)

    def take_notices(self) -> list[str]:
        """Returns an empty list."""
        return []

    def pids(self) -> list[int]:
        """Returns an empty list: there are no other processes."""
        return []


class FinishedEvaluation(NamedTuple):
    """An evaluation that is over; `run.runtime.Evaluation` explains the fields."""

    score: Score | None
    failure: Exception | None

    @property
    def done(self) -> bool:
        """Whether it has ended: always true."""
        return True

    def cancel(self) -> None:
        """Does nothing: it is over."""

    def wait(self, give_up: Callable[[], bool]) -> None:
        """Does nothing: it is over."""


class FusedMeter:
    """Measurements of a fused run over intervals. For one thread at a time."""

    def __init__(self, run: FusedRun) -> None:
        self._run, self._busy_s = run, run.busy_s

    def read(self, passed_s: float) -> dict[str, Any]:
        """Returns episodes, the agent's and the environment's metrics, and the shares of the stages."""
        run = self._run
        env = {} if run.report is None else run.report.env_metrics
        busy_s, self._busy_s = run.busy_s - self._busy_s, run.busy_s
        return {
            **RecentEpisodes.summary(run.episodes),
            **run.learned,
            **{f"env/{name}": np.mean(v) for name, v in env.items() if name not in STATISTICS},
            **_shares(busy_s / passed_s),
        }


def _score(results: list[dict[str, Any]], options: FusedConfig) -> Score:
    """Returns the score of an evaluation of every member.

    With several members, each figure is the median over the members, and the best one decides which
    checkpoint is the best. A member whose return is not finite is the best of none.
    """
    scores = [result["episode_return_mean"] for result in results]
    best = int(np.argmax(np.where(np.isfinite(scores), scores, -np.inf)))
    metrics = {name: np.median([result[name] for result in results]) for name in results[0]}
    # This number is the same for all members, and stays an int.
    metrics["episodes"] = results[0]["episodes"]
    mean, deviation = metrics["episode_return_mean"], metrics["episode_return_std"]
    text = f"{mean:.2f} +- {deviation:.2f} ({metrics['episodes']} episodes)"
    if len(results) > 1:
        name = options.member_names[best]
        metrics |= {"seeds": scores, "best_return": scores[best], "best_member": name}
        text = (
            f"{mean:.2f} (median of {len(scores)} members, from {np.min(scores):.2f} to {scores[best]:.2f}; "
            f"the best, {name}, is what seedbed evaluate plays)"
        )
    return Score(scores[best], text, metrics, {"best_seed": best})


def _shares(busy: np.ndarray) -> dict[str, Any]:
    """Returns `time/...`, shares of the wall time, and `bottleneck`, from the shares `[3]` of the stages.

    Returns an empty dict if all are 0, which means that this kind of device does not measure them.
    """
    if not busy.any():
        return {}
    shares = {f"time/{stage}": float(share) for stage, share in zip(STAGES, busy, strict=True)}
    waiting = max(0.0, 1.0 - float(busy.sum()))
    return {**shares, "time/waiting": waiting, "bottleneck": STAGES[int(np.argmax(busy))]}
