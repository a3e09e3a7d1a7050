"""What training reports: episode returns, where the time goes, memory, and the files they go to."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from seedbed.types import SeedbedError, Timestep

STAGES = ("environment", "inference", "learning")
SATURATED = 0.12
"""The share of waiting below which the machine counts as fully used."""


class MetricsLog:
    """Appends metrics to `metrics.jsonl` and TensorBoard events, at once and by whole lines.

    A line that a kill left half-written is removed on opening. With `resume_at`, so are the lines past
    that many env steps, which the resumed run goes through again, and TensorBoard drops their events.
    If the disk refuses a line, the line is left out and `warn` is called, once until both files have taken
    a line again. For one thread at a time.
    """

    def __init__(
        self,
        folder: Path,
        resume_at: int | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        # Generated classes appear at run time, where no type checker sees them.
        protos = "tensorboard.compat.proto"
        self._event: Any = importlib.import_module(f"{protos}.event_pb2").Event
        self._summary: Any = importlib.import_module(f"{protos}.summary_pb2").Summary
        self._folder, self._warn, self._refused = folder, warn, False
        path = folder / "metrics.jsonl"
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
                f"metrics cannot be written to {folder} ({error.strerror or error}): make room there, "
                "then go on with --resume"
            ) from error

    def write(self, metrics: dict[str, Any]) -> None:
        """Writes one line; TensorBoard's step is `env_steps`. NaN and infinities become null."""
        plain = {name: plain_value(value) for name, value in metrics.items()}
        event = self._event(wall_time=time.time(), step=int(plain.get("env_steps") or 0))
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in plain.items()
            if isinstance(value, int | float)
        ]
        event.summary.CopyFrom(self._summary(value=values))
        line = json.dumps(plain, allow_nan=False) + "\n"
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

    def close(self) -> None:
        """Closes the files; `write` has reported the failures of the disk."""
        for file in (self._lines, self._events):
            file.close()


class _Appended:
    """A file that grows by whole pieces: if the disk takes only a part of a piece, the part is cut off."""

    def __init__(self, path: Path) -> None:
        """Opens a file, or makes it; raises OSError."""
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
            with contextlib.suppress(OSError):  # the next call tries again
                self._mend()
            raise
        self._size, self._torn = self._size + len(piece), False

    def _mend(self) -> None:
        """Cuts off a part of a piece, which needs no room; raises OSError."""
        if self._torn:
            self._file.truncate(self._size)
            self._torn = False

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):
            self._file.close()


def _record(event: Any) -> bytes:
    """Frames an event as TensorBoard's files have it."""
    # The record writer alone: tensorboard's EventFileWriter keeps a thread of its own and takes
    # TensorFlow for its files where that is installed.
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()


def plain_value(value: Any) -> Any:
    """Turns a number of any kind into one that JSON has; NaN and infinities into None."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, list | tuple):  # one for each seed of a population
        return [plain_value(each) for each in value]
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _repair(path: Path, resume_at: int | None) -> None:
    if not path.exists():
        return
    whole = []
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        try:
            env_steps = json.loads(line).get("env_steps") or 0
        except (ValueError, AttributeError):
            continue
        if line.endswith("\n") and (resume_at is None or env_steps <= resume_at):
            whole.append(line)
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text("".join(whole))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class EpisodeStatistics:
    """Raw returns and lengths of whole episodes in `groups` groups of `n` environments."""

    def __init__(self, groups: int, n: int, window: int = 100) -> None:
        self.episodes = 0
        self._returns = np.zeros((groups, n), np.float64)
        self._lengths = np.zeros((groups, n), np.int64)
        self._recent_returns: collections.deque[float] = collections.deque(maxlen=window)
        self._recent_lengths: collections.deque[int] = collections.deque(maxlen=window)

    def record(self, group: int, timestep: Timestep) -> None:
        """Counts what arrived from a group; arrays of the timestep are `[n]`."""
        returns, lengths = self._returns[group], self._lengths[group]
        returns += timestep.reward
        lengths += 1
        first = timestep.first
        if first.any():
            returns[first] = 0.0
            lengths[first] = 0
        ended = np.logical_or(timestep.terminated, timestep.truncated)
        if ended.any():
            self.episodes += int(ended.sum())
            self._recent_returns.extend(returns[ended].tolist())
            self._recent_lengths.extend(lengths[ended].tolist())

    def reset(self, group: int) -> None:
        """Forgets the running episodes of a group whose actor was restarted."""
        self._returns[group] = 0.0
        self._lengths[group] = 0

    def summary(self) -> dict[str, float]:
        """Returns the count of episodes, and means over the last `window` (NaN before the first)."""
        return {
            "episodes": self.episodes,
            "episode_return_mean": _mean(self._recent_returns),
            "episode_length_mean": _mean(self._recent_lengths),
        }

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON values."""
        return {
            "episodes": self.episodes,
            "returns": list(self._recent_returns),
            "lengths": list(self._recent_lengths),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a `state`; running episodes start anew."""
        self.episodes = int(state["episodes"])
        self._recent_returns.clear()
        self._recent_returns.extend(state["returns"])
        self._recent_lengths.clear()
        self._recent_lengths.extend(state["lengths"])


class RecentEpisodes:
    """Sums over the episodes that ended lately, as they come from a device: counted, not one by one."""

    def __init__(self, window: int = 100) -> None:
        self.episodes = 0
        self._window = window
        self._sums: collections.deque[tuple[int, float, float]] = collections.deque()

    def add(self, count: Any, returns: Any, lengths: Any) -> None:
        """Adds the sums of returns and lengths over `count` episodes."""
        if not count:
            return
        self.episodes += int(count)
        self._sums.append((int(count), float(returns), float(lengths)))
        while sum(each[0] for each in self._sums) - self._sums[0][0] >= self._window:
            self._sums.popleft()

    @staticmethod
    def summary(populations: Sequence[RecentEpisodes]) -> dict[str, float]:
        """Returns the count of episodes of all, and means over at least the last `window` of each."""
        sums = [each for one in populations for each in one._sums]
        count = sum(each[0] for each in sums)
        return {
            "episodes": sum(one.episodes for one in populations),
            "episode_return_mean": sum(each[1] for each in sums) / count if count else math.nan,
            "episode_length_mean": sum(each[2] for each in sums) / count if count else math.nan,
        }

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, as JSON values."""
        return {"episodes": self.episodes, "sums": list(self._sums)}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a `state`."""
        self.episodes = int(state["episodes"])
        self._sums.clear()
        self._sums.extend((int(n), float(r), float(k)) for n, r, k in state["sums"])


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def processes_rss(pids: Iterable[int]) -> float:
    """Sums the resident memory of processes, in MB; those that are gone count 0."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total / 1e6


def usable_cores() -> float:
    """Returns the CPU cores that this process may use, by affinity and by its container's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, int(quota) / int(period))


@dataclasses.dataclass(frozen=True)
class Counters:
    """Seconds since the start of a run, all cumulative."""

    wall: float
    actors_cpu: float  # CPU of all actor processes, also of those that are gone
    learner_cpu: float  # CPU of the learner process
    inference_busy: float  # wall time in which the inference thread had work
    learning_busy: float  # wall time in which the learner thread had work


class MachineShares:
    """Tells where the machine's time went between two calls, and which stage limits the speed."""

    def __init__(self, cores: float, actors: int) -> None:
        self._cores, self._actors = cores, actors
        self._last = Counters(0.0, 0.0, 0.0, 0.0, 0.0)

    def start(self, counters: Counters) -> None:
        """Sets the counters from which the first interval counts."""
        self._last = counters

    def update(self, counters: Counters) -> dict[str, Any]:
        """Returns `time/...` as fractions of cores x wall since the last call, and `bottleneck`.

        The learner process's CPU time is split by the busy times of its two threads. Where the machine
        has nothing left the bottleneck is the largest share; else it is the stage that is always busy.
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
        shares /= max(1.0, float(shares.sum()))  # clocks of processes tick a little apart
        waiting = 1.0 - float(shares.sum())
        activity = (actors_cpu / self._actors, inference_busy, learning_busy)
        decisive = shares if waiting < SATURATED else activity
        return {
            **{f"time/{stage}": float(share) for stage, share in zip(STAGES, shares, strict=True)},
            "time/waiting": max(0.0, waiting),
            "bottleneck": STAGES[int(np.argmax(decisive))],
        }
