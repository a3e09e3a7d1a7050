"""What the runtimes share in how a run begins, is shown, saved in time, and stopped."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from seedbed.runtime.inference import Device
from seedbed.types import SeedbedError


class View(Protocol):
    """Where progress is shown. Every method returns at once, whatever the terminal does."""

    @property
    def report_every_s(self) -> float:
        """Seconds between updates."""
        ...

    def update(self, metrics: dict[str, Any]) -> None:
        """Shows one line of metrics."""
        ...

    def message(self, text: str) -> None:
        """Shows a message."""
        ...


class Start(NamedTuple):
    """Where a run begins: nothing done, or what its last checkpoint says."""

    env_steps: int = 0
    wall_s: float = 0.0
    updates: int = 0


class TrainingDiverged(SeedbedError):
    """A loss or gradient stopped being finite."""


def require_finite(metrics: dict[str, Any], update: int) -> None:
    """Raises TrainingDiverged if a metric of this update is not finite."""
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        raise TrainingDiverged(
            f"{bad[0]} is {metrics[bad[0]]} at learner step {update}: training stopped before these "
            "parameters were used. Go on from the last checkpoint with --resume and a lower "
            "--agent.learning-rate"
        )


@contextlib.contextmanager
def after(failure: BaseException, view: View) -> Iterator[None]:
    """Does what is still to be done after a failure: what fails of it is told and noted, not raised."""
    try:
        yield
    except Exception as error:
        view.message(str(error))
        failure.add_note(f"and then: {error}")


class Clock:
    """Comes due once a period."""

    def __init__(self, period_s: float) -> None:
        """Comes due first when a period has passed."""
        self._period_s = period_s
        self._next = time.monotonic() + period_s

    def due(self) -> bool:
        """Whether it is time; then the next period begins."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = max(self._next + self._period_s, now)
        return True


class Interruption:
    """Whether a signal has asked the run to stop."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._signal: int | None = None  # set by the signal handler, which does nothing else
        self._told = False

    def requested(self) -> bool:
        """Returns whether a signal has come, and tells the view of it once. Call from the main thread."""
        if self._signal is not None and not self._told:
            self._told = True
            name = signal.Signals(self._signal).name
            self._view.message(f"{name}: stopping and saving; again to give up at once")
        return self._signal is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: notes the first; raises KeyboardInterrupt at the second."""
        del frame
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number


class Stopwatch:
    """Adds up stretches of time. One thread starts and stops it; any thread may read it."""

    def __init__(self) -> None:
        # Seconds of past stretches, and when the present one began: one value, so that a reader sees both.
        self._state = (0.0, math.inf)

    def start(self) -> None:
        """Begins a stretch."""
        self._state = (self._state[0], time.perf_counter())

    def stop(self) -> None:
        """Ends the stretch, if there is one."""
        self._state = (self.read(), math.inf)

    def read(self) -> float:
        """Returns seconds so far, those of the present stretch among them."""
        total_s, since = self._state
        return total_s + max(0.0, time.perf_counter() - since)


@contextlib.contextmanager
def stopping_signals(view: View) -> Iterator[Interruption]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to stop, a second into KeyboardInterrupt.

    SIGHUP stays ignored where the process was started so, as by nohup. Outside the main thread no signal
    is handled.
    """
    interruption = Interruption(view)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interruption.handle) for number in numbers}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def choose_devices(indices: tuple[int, ...], option: str) -> list[Device]:
    """Finds devices of this host by their indices; raises SeedbedError, which names the option."""
    devices = jax.local_devices()
    for index in indices:
        if index >= len(devices):
            raise SeedbedError(
                f"{option} names device {index}: this host has {len(devices)} ({devices[0].platform}), "
                f"numbered from 0 to {len(devices) - 1}"
            )
    return [devices[index] for index in indices]
