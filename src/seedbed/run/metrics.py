"""Metrics of training: returns of episodes, shares of time, memory use, and the files that hold them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from seedbed import strict_json
from seedbed.files import open_regular, sync
from seedbed.printable import printable
from seedbed.run.folder import METRICS
from seedbed.run.lines import whole_lines
from seedbed.types import SeedbedError

STAGES = ("environment", "inference", "learning")
"""The parts of a run whose time is measured, in the order in which arrays hold these times."""
SATURATED = 0.12
"""The share of waiting below which the machine counts as fully used."""


class MetricsLog:
    """A log that appends metrics to `metrics.jsonl` and TensorBoard events, at once and in whole lines.

    Opening it removes a line that a kill left half-written. With `resume_at`, it also removes the lines past
    that many env steps, which the resumed run does again, and TensorBoard drops the events of these lines.
    If the disk refuses a line, the line is left out. `warn` is then called with a message, but not again
    until both files have taken a line. For one thread at a time; `warn` runs in that thread.

    Raises SeedbedError if the files cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        resume_at: int | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        # These generated classes appear at run time only, so type checkers do not see them.
        protos = "tensorboard.compat.proto"
        self._event: Any = importlib.import_module(f"{protos}.event_pb2").Event
        self._summary: Any = importlib.import_module(f"{protos}.summary_pb2").Summary
        self._folder, self._warn, self._refused = folder, warn, False
        path = folder / METRICS
        try:
            _repair(path, resume_at)
            self._lines = _Appended(path)
            self._events = _Appended(
                folder / f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
            )
            version = self._event(wall_time=time.time(), file_version="brain.Event:2")
            self._events.append(_record(version))
            if resume_at is not None:
                # At this event TensorBoard drops the events of its step and of later steps.
                opening = self._event(wall_time=time.time(), step=resume_at + 1)
                opening.session_log.status = opening.session_log.START
                self._events.append(_record(opening))
        except OSError as error:
            raise SeedbedError(
                f"metrics cannot be written to {printable(folder)} ({error.strerror or error}): make "
                "room there, then start again"
            ) from error

    def write(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Writes one line, and returns it as it is written; call from one thread at a time.

        Values are plain numbers, strings and bools; NaN and infinities become None, which is null in JSON.

        TensorBoard gets the numbers only, at step `env_steps`. Failures of the disk are not raised.
        """
        plain = {name: plain_value(value) for name, value in metrics.items()}
        event = self._event(wall_time=time.time(), step=int(plain.get("env_steps") or 0))
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in plain.items()
            if isinstance(value, int | float)
        ]
        event.summary.CopyFrom(self._summary(value=values))
        line = strict_json.dumps(plain) + "\n"
        refused: OSError | None = None
        for file, piece in ((self._lines, line.encode()), (self._events, _record(event))):
            try:
                file.append(piece)
            except OSError as error:
                refused = error
        if refused is not None and not self._refused:
            self._warn(
                f"metrics cannot be written to {self._folder} ({refused.strerror or refused}): they are "
                "left out there until they can; training goes on"
            )
        self._refused = refused is not None
        return plain

    def close(self) -> None:
        """Closes the files; call from the thread that writes. Failures of the disk are not raised."""
        for file in (self._lines, self._events):
            file.close()


class _Appended:
    """A file that grows by whole pieces: if the disk takes only a part of a piece, the part is cut off."""

    def __init__(self, path: Path) -> None:
        """Opens a file, which is made if it is missing; raises OSError."""
        self._file = path.open("ab", buffering=0)
        self._size, self._torn = self._file.tell(), False

    def append(self, piece: bytes) -> None:
        """Adds a piece; raises OSError if the disk does not take all of it."""
        try:
            self._mend()
            self._torn, rest = True, piece
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # the next call tries to mend it again
                self._mend()
            raise
        self._size, self._torn = self._size + len(piece), False

    def _mend(self) -> None:
        """Cuts off a partly written piece, which needs no space on the disk; raises OSError."""
        if self._torn:
            self._file.truncate(self._size)
            self._torn = False

    def close(self) -> None:
        """Closes the file; raises nothing."""
        with contextlib.suppress(OSError):
            self._file.close()


def _record(event: Any) -> bytes:
    """Returns an event in the format of TensorBoard's files."""
    # Only the record writer is used: tensorboard's EventFileWriter keeps its own thread, and writes its files
    # through TensorFlow if that is installed.
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()


def plain_value(value: Any) -> Any:
    """Converts a number to one that JSON has, and NaN and infinities to None.

    Lists and tuples are converted element by element; None, texts and bools are returned as they are.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, list | tuple):  # one element for each member of a population
        return [plain_value(each) for each in value]
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def evaluated(metrics: Mapping[str, Any] | None, step: int) -> dict[str, Any]:
    """Returns the part of a line that tells of an evaluation of this step; {} if there was none."""
    if metrics is None:
        return {}
    return {f"evaluation/{k}": v for k, v in metrics.items()} | {"evaluation/env_steps": step}


def _repair(path: Path, resume_at: int | None) -> None:
    """Removes the lines that are not whole, or past `resume_at` env steps; raises OSError."""
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.new")
    try:
        with open_regular(path) as file, temporary.open("wb") as kept:
            for line, metrics in whole_lines(file):
                if resume_at is None or metrics.get("env_steps", 0) <= resume_at:
                    kept.write(line)
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class RecentEpisodes:
    """Sums over the episodes that ended recently. A device reports only counts and sums of episodes.

    For one thread at a time.
    """

    def __init__(self, window: int = 100) -> None:
        self.episodes = 0
        self._window = window
        self._sums: collections.deque[tuple[int, float, float]] = collections.deque()

    def add(self, count: Any, returns: Any, lengths: Any) -> None:
        """Adds the sums of returns and lengths over `count` episodes. Call from one thread at a time."""
        if not count:
            return
        self.episodes += int(count)
        self._sums.append((int(count), float(returns), float(lengths)))
        while sum(each[0] for each in self._sums) - self._sums[0][0] >= self._window:
            self._sums.popleft()

    @staticmethod
    def summary(populations: Sequence[RecentEpisodes]) -> dict[str, float]:
        """Returns the count of episodes of all members, and means over their recent episodes.

        These are at least the last `window` of each member, or all if there are fewer; the means are NaN if
        there are none. Call from the thread that calls `add`.
        """
        sums = [each for one in populations for each in one._sums]
        count = sum(each[0] for each in sums)
        return {
            "episodes": sum(one.episodes for one in populations),
            "episode_return_mean": sum(each[1] for each in sums) / count if count else math.nan,
            "episode_length_mean": sum(each[2] for each in sums) / count if count else math.nan,
        }

    def state(self) -> dict[str, Any]:
        """Returns the part that a checkpoint keeps, as JSON values. Call from the thread of `add`."""
        return {"episodes": self.episodes, "sums": list(self._sums)}

    def load(self, state: dict[str, Any]) -> None:
        """Restores a `state`; raises SeedbedError if it is none. Call from one thread at a time."""
        try:
            sums = [(int(n), float(r), float(k)) for n, r, k in state["sums"]]
            self.episodes = int(state["episodes"])
        except (KeyError, TypeError, ValueError) as error:
            raise SeedbedError(
                f"the checkpoint's recent episodes cannot be read ({error}): remove that checkpoint, to "
                "resume from the one before"
            ) from error
        self._sums.clear()
        self._sums.extend(sums)


def processes_rss(pids: Iterable[int]) -> float:
    """Returns the resident memory of all these processes, in MB (10^6 bytes).

    A process that is gone, or that this one may not look at, counts 0.
    """
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 1e6


@dataclasses.dataclass(frozen=True)
class Counters:
    """Cumulative seconds. Each may start anywhere, as only differences between two `Counters` are used."""

    wall: float
    actors_cpu: float  # CPU time of all actor processes, including those that are gone
    learner_cpu: float  # CPU time of the learner's process
    inference_busy: float  # wall time in which the inference thread had work
    learning_busy: float  # wall time in which the learner thread had work


class MachineShares:
    """A measure of the stages' shares of the machine's time, and of the stage that limits the speed.

    `cores` is the number of usable cores, `actors` that of actor processes. For one thread at a time.
    """

    def __init__(self, cores: float, actors: int) -> None:
        self._cores, self._actors = cores, actors
        self._last = Counters(0.0, 0.0, 0.0, 0.0, 0.0)

    def start(self, counters: Counters) -> None:
        """Sets the counters at which the first interval starts. Call from one thread at a time."""
        self._last = counters

    def update(self, counters: Counters, away_share: float = 0.0) -> dict[str, Any]:
        """Returns `time/...`, as shares of cores x wall time since the last call, and `bottleneck`.

        The CPU time of the learner's process is divided in proportion to the busy times of its two threads.
        If the share of waiting is below `SATURATED`, the bottleneck is the stage with the largest share;
        otherwise it is the stage that is busy for most of the time. Environments of other machines are busy
        for `away_share` of the time. Call from one thread at a time.
        """
        passed = [
            max(0.0, now - before)
            for now, before in zip(
                dataclasses.astuple(counters), dataclasses.astuple(self._last), strict=True
            )
        ]
        self._last = counters
        wall, actors_cpu, learner_cpu, inference_busy, learning_busy = passed
        wall = max(wall, 1e-9)
        busy = inference_busy + learning_busy
        inference = inference_busy / busy if busy > 0.0 else 0.5
        used = np.array([actors_cpu, learner_cpu * inference, learner_cpu * (1.0 - inference)])
        shares = used / (self._cores * wall)
        shares /= max(1.0, float(shares.sum()))  # the clocks of processes differ a little
        waiting = 1.0 - float(shares.sum())
        environment_busy = max(actors_cpu / self._actors, away_share * wall)
        activity = (environment_busy, inference_busy, learning_busy)
        decisive = shares if waiting < SATURATED else activity
        return {
            **{f"time/{stage}": float(share) for stage, share in zip(STAGES, shares, strict=True)},
            "time/waiting": max(0.0, waiting),
            "bottleneck": STAGES[int(np.argmax(decisive))],
        }
