"""The trials of a search, in a folder that survives it: Optuna's journal, and a run for each trial.

Several searches may share a folder, also on several machines. Files are locked with flock, so that the trials
of one that was killed are free at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seedbed.config import flags
from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import to_json
from seedbed.files import write_json
from seedbed.named import require_packages
from seedbed.printable import printable
from seedbed.run.folder import CONFIG, METRICS
from seedbed.run.lines import read_last_line
from seedbed.tuning.cores import WHOLE, Share, within
from seedbed.tuning.space import Space, applied, chosen, describe, start_of, suggested, value_of
from seedbed.types import SeedbedError, StorageError

JOURNAL = "journal.log"
ENDED = ("COMPLETE", "PRUNED", "FAIL")
"""States of trials that count among those that were asked for, besides the ones that run."""
_SEARCHED = "searched"


def optuna() -> Any:
    """Imports Optuna; raises SeedbedError if it is not installed."""
    require_packages("a search", "tune", "optuna")
    return importlib.import_module("optuna")


def opened(config: TrainConfig, plain: TrainConfig) -> TrainConfig:
    """Returns a settled configuration in which the sizes of the machine are open again.

    They are those of `plain`, the same without what was chosen: each trial's follow from its own options.
    """
    kept = {name: getattr(config.runtime, name) for name in ("evaluate_every", "log_every_s")}
    return dataclasses.replace(config, runtime=dataclasses.replace(plain.runtime, **kept))


class Trial:
    """A trial that this search runs, and its lock."""

    def __init__(self, trial: Any, folder: Path, lock: int) -> None:
        self.trial, self.run, self._lock = trial, folder, lock
        self.number: int = trial.number

    @property
    def file(self) -> Path:
        """The configuration of a run that has not begun."""
        return self.run.with_suffix(".json")

    @property
    def last_step(self) -> int:
        """The step of the last line of metrics that an earlier process of the trial has written, or -1."""
        return int(read_last_line(self.run / METRICS).get("env_steps", -1))

    @property
    def begun(self) -> bool:
        """Whether the run has been begun, so that it is resumed."""
        return (self.run / CONFIG).is_file()

    def release(self) -> None:
        """Lets other searches have the trial."""
        os.close(self._lock)


def _backend(path: str, lock: Any) -> Any:
    """Returns Optuna's journal in a file, without a line that a full disk has left half written.

    Optuna would add the next line to it, and never read the journal again.
    """

    def refused(error: OSError) -> StorageError:
        return StorageError(
            f"{printable(path)} cannot be written ({error.strerror}): make room there, or let it be written, "
            "then give the same command"
        )

    class Journal(optuna().storages.journal.JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            try:
                super().append_logs(logs)
            except OSError as error:
                with contextlib.suppress(OSError):
                    _cut(path, lock)
                raise refused(error) from error

    try:
        _cut(path, lock)
    except OSError as error:
        raise refused(error) from error
    return Journal(path, lock)


def _cut(path: str, lock: Any) -> None:
    """Removes what follows the last whole line of a journal; raises OSError."""
    lock.acquire()
    try:
        with contextlib.suppress(FileNotFoundError), Path(path).open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    finally:
        lock.release()


class Study:
    """The trials of a search. For one thread."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        space: Space,
        plain: TrainConfig | None = None,
        share: Share = WHOLE,
    ) -> None:
        """Opens the study in a folder, or begins one.

        `plain` is the configuration without what was chosen for this machine: by it commands are told and
        studies compared. The sizes of trials are for a `share` of the cores. Raises SeedbedError if the study
        there is of another space or configuration, and StorageError if the folder cannot be written.
        """
        self.folder, self.config, self.space = folder, config, space
        self._plain, self._share = plain or config, share
        self._optuna = optuna()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._mine: set[int] = set()
        try:
            # Others must not be able to write what a trial would import: run/trust.py.
            folder.mkdir(0o755, parents=True, exist_ok=True)
            (folder / "trials").mkdir(0o755, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{printable(folder)} cannot be made: {error.strerror}") from error
        journal = self._optuna.storages.journal
        path = str(folder / JOURNAL)
        # Its other lock needs links, which not all mounts have.
        backend = _backend(path, journal.JournalFileOpenLock(path))
        searched = json.loads(
            json.dumps({"space": describe(space), "config": to_json(self._plain)})
        )
        with self._locked():
            self._study = self._optuna.create_study(
                storage=self._optuna.storages.JournalStorage(backend),
                study_name="seedbed",
                direction="maximize",
                load_if_exists=True,
            )
            self._study.pruner = self._optuna.pruners.MedianPruner(n_startup_trials=5)
            former = self._study.user_attrs.get(_SEARCHED)
            if former is None:
                self._study.set_user_attr(_SEARCHED, searched)
                start = start_of(config, space)
                if start is not None:
                    self._study.enqueue_trial(start)
            elif former != searched:
                changed = " and ".join(
                    part for part in searched if former.get(part) != searched[part]
                )
                raise SeedbedError(
                    f"{printable(folder)} has a search of another {changed}: give what it was begun with, "
                    "or another folder with --study"
                )

    def trials(self, *states: str) -> list[Any]:
        """Returns Optuna's records of all trials, or of those in states such as COMPLETE."""
        kinds = [self._optuna.trial.TrialState[state] for state in states]
        return self._study.get_trials(deepcopy=False, states=kinds or None)

    def next(self, most: int) -> Trial | None:
        """Returns a trial that nobody runs, or a new one, unless there are `most`; None if there is none.

        A point whose options do not go together is a trial that failed. Raises SeedbedError as `end` does.
        """
        with self._locked():
            for record in self.trials("RUNNING"):
                if record.number in self._mine:
                    continue
                # The storage's own id of a trial is what makes it again.
                again = self._optuna.trial.Trial(self._study, record._trial_id)
                if taken := self._take(again):
                    return taken
            while len(self.trials("RUNNING", *ENDED)) < most:
                if taken := self._take(self._ask()):
                    return taken
            return None

    def _ask(self) -> Any:
        """Returns a new trial of Optuna's, drawn with a seed that no other of the search has."""
        seed = self.config.runtime.seed + len(self.trials())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            # Trials that run count as bad ones, so that the next is drawn elsewhere.
            self._study.sampler = self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        return self._study.ask()

    def _take(self, trial: Any) -> Trial | None:
        """Locks a trial and writes its configuration; None if another search has it, or if it is over."""
        run = self.folder / "trials" / f"{trial.number:04d}"
        lock = os.open(run.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if all(record.number != trial.number for record in self.trials("RUNNING")):
            os.close(lock)  # it has ended since it was listed
            return None
        self._mine.add(trial.number)
        taken = Trial(trial, run, lock)
        if not taken.begun:
            try:
                with within(self._share):
                    point = dict(suggested(trial, self.space))
                    config = chosen(opened(self.config, self._plain), point)
            except SeedbedError as error:
                # Such as minibatches that do not divide the batch.
                self.end(taken, "FAIL", reason=str(error))
                return None
            write_json(taken.file, to_json(config))
        return taken

    def report(self, trial: Trial, step: int, score: float) -> bool:
        """Notes a trial's evaluation; returns whether the trial is not worth going on with."""
        trial.trial.report(score, step)
        return bool(trial.trial.should_prune())

    def steps_of(self, trial: Trial) -> int:
        """Returns the steps of a trial, which may be what varies."""
        return int(self.values_of(trial.trial).get("steps", self.config.runtime.steps))

    def end(self, trial: Trial, state: str, score: float | None = None, reason: str = "") -> None:
        """Ends a trial with a state, such as COMPLETE, and its score or the reason of its failure.

        Raises SeedbedError if all trials that have ended failed, the first three among them: then something
        else is wrong. Points that cannot be end at once, and say nothing of a first trial that still runs.
        """
        if reason:
            trial.trial.set_user_attr("reason", reason)
        value = score if state == "COMPLETE" else None
        self._study.tell(trial.trial, value, state=self._optuna.trial.TrialState[state])
        self._mine.discard(trial.number)
        trial.release()
        ended = self.trials(*ENDED)
        failed = {record.number for record in ended if record.state.name == "FAIL"}
        if len(failed) == len(ended) and {0, 1, 2} <= failed:
            raise SeedbedError(
                f"the first {len(ended)} trials failed, the last with: "
                f"{ended[-1].user_attrs.get('reason')} (more in {printable(self.folder)}/trials)"
            )

    def best(self) -> Any | None:
        """Returns Optuna's record of the trial with the best score; None if none has ended with one."""
        return max(self.trials("COMPLETE"), key=lambda record: record.value, default=None)

    def values_of(self, record: Any) -> dict[str, Any]:
        """Returns the values of a trial's options, by name."""
        return {name: value_of(self.space[name], x) for name, x in record.params.items()}

    def command_of(self, record: Any) -> str:
        """Returns the command that trains a trial's options; "" if there is none."""
        return flags.command(applied(self._plain, self.values_of(record)))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets one search at a time begin and take trials."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
