"""The parts that all runtimes share: to start, show and stop a run, and to time its reports and saves."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple, Protocol


class View(Protocol):
    """A display of progress. The runtimes use it from the thread that called `train`.

    Every method returns at once, whatever the terminal does.
    """

    @property
    def report_every_s(self) -> float:
        """Seconds between calls of `update`."""
        ...

    def update(self, metrics: dict[str, Any]) -> None:
        """Shows one line of metrics. The thread that called `train` calls this."""
        ...

    def message(self, text: str) -> None:
        """Shows a message. The thread that called `train` calls this."""
        ...


class Start(NamedTuple):
    """The progress from which a run starts: zeros, or the figures of the checkpoint that it resumes from."""

    env_steps: int = 0  # transitions that count
    wall_s: float = 0.0  # seconds of training
    updates: int = 0  # gradients applied


@contextlib.contextmanager
def after(failure: BaseException, view: View) -> Iterator[None]:
    """Runs the last steps of a run after a failure.

    If the block raises an Exception, its text is shown and added to `failure` as a note; it is not raised.
    """
    try:
        yield
    except Exception as error:
        view.message(str(error))
        failure.add_note(f"and then: {error}")


class Clock:
    """A clock that is due once in a period. Use each from one thread only."""

    def __init__(self, period_s: float) -> None:
        """Starts the first period, at the end of which the clock is due."""
        self._period_s = period_s
        self._next = time.monotonic() + period_s

    def due(self) -> bool:
        """Returns whether the period has ended, and if so, starts the next one. Call from one thread only.

        If the call is late, the next period still ends at its regular time, or at once if that has passed.
        """
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = max(self._next + self._period_s, now)
        return True


class Interruption:
    """The request of a signal to stop the run. `stopping_signals` makes it."""

    def __init__(self, view: View) -> None:
        self._view = view
        # Set by the signal handler, which does nothing else.
        self._signal: int | None = None
        self._told = False

    def requested(self) -> bool:
        """Returns whether a signal has come, and shows a message about it once.

        Call from the thread that called `train` only.
        """
        if self._signal is not None and not self._told:
            self._told = True
            name = signal.Signals(self._signal).name
            self._view.message(f"{name}: stopping and saving; again to give up at once")
        return self._signal is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: notes the first, and raises KeyboardInterrupt at the second.

        Python calls signal handlers in the main thread.
        """
        del frame
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number


class Stopwatch:
    """A sum of stretches of time. Any thread may read it.

    `start` and `stop` must not run at the same time: call them from one thread, or under one lock.
    """

    def __init__(self) -> None:
        # The seconds of past stretches, and the start of the present one (infinity if there is none). They
        # are one value, so that a reader sees both as they were at one moment.
        self._state = (0.0, math.inf)

    def start(self) -> None:
        """Starts a stretch; a stretch that has not been stopped is lost. Call from one thread at a time."""
        self._state = (self._state[0], time.perf_counter())

    def stop(self) -> None:
        """Ends the present stretch, if there is one. Call from one thread at a time."""
        self._state = (self.read(), math.inf)

    def read(self) -> float:
        """Returns the seconds of all stretches, with the present one so far. Any thread may call this."""
        total_s, since = self._state
        return total_s + max(0.0, time.perf_counter() - since)


@contextlib.contextmanager
def stopping_signals(view: View) -> Iterator[Interruption]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to stop, and a second into KeyboardInterrupt.

    SIGHUP stays ignored if the process was started like that, as nohup does. Outside the main thread, no
    signal is handled. The old handlers are restored at the end of the block.
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
