"""What the runtimes share in how a run begins, is shown, saved in time, and stopped."""

from __future__ import annotations

import contextlib
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
    """Where progress is shown."""

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
            "--agent.learning-rate or --agent.max-gradient-norm"
        )


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


@contextlib.contextmanager
def stopping_signals(stop: threading.Event, view: View) -> Iterator[threading.Event]:
    """Turns the first SIGINT or SIGTERM into `stop`, a second one into KeyboardInterrupt."""
    seen = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if seen.is_set():
            raise KeyboardInterrupt
        seen.set()
        stop.set()
        view.message(
            f"{signal.Signals(number).name}: stopping and saving; again to give up at once"
        )

    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield seen
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
