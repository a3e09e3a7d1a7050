"""Signals that stop a run: the first one asks it to save, the second one ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


class Interruption:
    """The request of a signal to stop the run. `stopping_signals` makes it."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
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
            self._tell(f"{name}: stopping and saving; again to give up at once")
        return self._signal is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: notes the first, and raises KeyboardInterrupt at the second.

        Python calls signal handlers in the main thread.
        """
        del frame
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number


@contextlib.contextmanager
def stopping_signals(tell: Callable[[str], None]) -> Iterator[Interruption]:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to stop, and a second into KeyboardInterrupt.

    SIGHUP stays ignored if the process was started like that, as nohup does. Outside the main thread, no
    signal is handled. The old handlers are restored at the end of the block.
    """
    interruption = Interruption(tell)
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
