"""Signals that stop a run: the first one asks it to save, the second one ends it at once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from seedbed.exit_status import StoppedEarly
from seedbed.scheduler import gives_up

ANSWER_S = 0.7
"""Seconds after which a first signal is answered if the main thread has not seen it: it may be compiling."""
GIVE_UP_S = 1.5
"""Seconds after which a second signal ends the program if the main thread does not do so."""
_program_status: int | None = None


def end_program_with(status: int) -> None:
    """Lets a second signal end the process with this status, if the main thread is busy outside of Python.

    Only a program may ask for that: a script that calls `train` has its own things to end.
    """
    global _program_status
    _program_status = status


class Interruption:
    """The request of a signal to stop the run. `stopping_signals` makes it."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        # Set by the signal handler, which does nothing else.
        self._signal: int | None = None
        self._told = False
        self._seen = threading.Event()
        self.arrived = threading.Event()  # set by the thread that watches for signals
        self.given_up = False  # whether a second signal has come
        self.ending: list[Callable[[], None]] = []
        """What is to be called before a second signal ends the process, in any thread: it must not wait."""

    def requested(self) -> bool:
        """Returns whether a signal has come, and shows a message about it once.

        Call from the thread that called `train` only.
        """
        if self._signal is not None and not self._told:
            self._told = True
            self._seen.set()
            name = signal.Signals(self._signal).name
            self._tell(f"{name}: stopping and saving; again to give up at once")
        return self._signal is not None

    def come(self) -> bool:
        """Returns whether a signal has come, seen by the main thread or not. Any thread may call this."""
        return self._signal is not None or self.arrived.is_set()

    def wait_until_seen(self, timeout_s: float) -> bool:
        """Returns whether the calling thread of `train` has seen a signal, within so many seconds."""
        return self._seen.wait(timeout_s)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: notes the first, and raises KeyboardInterrupt at the second.

        Python calls signal handlers in the main thread.
        """
        del frame
        if self._signal is None:
            self._signal = number
        elif gives_up(number):
            self.given_up = True
            raise KeyboardInterrupt


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
    numbers = _stopping()
    before = {number: signal.signal(number, interruption.handle) for number in numbers}
    try:
        with _watched(interruption, numbers):
            yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stopping_early() -> Iterator[None]:
    """Raises StoppedEarly in a block that has nothing to save, at SIGINT, SIGTERM or SIGHUP.

    SIGHUP stays ignored as in `stopping_signals`, and so do all of them outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    restore = stop_early()
    try:
        yield
    finally:
        restore()


def stop_early() -> Callable[[], None]:
    """Has signals raise StoppedEarly as in `stopping_early`; returns what ends that. For the main thread.

    Python ignores what is raised in a callback, as of its collector: such a signal comes once more.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise StoppedEarly

    def again(ignored: sys.UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, StoppedEarly):
            # Raised here, it would be ignored again.
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            hook(ignored)

    def restore() -> None:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)

    hook = sys.unraisablehook
    before = {number: signal.signal(number, stop) for number in _stopping()}
    sys.unraisablehook = again
    return restore


def _stopping() -> list[int]:
    hung_up = [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN)
    return [signal.SIGINT, signal.SIGTERM, *hung_up]


@contextlib.contextmanager
def _watched(interruption: Interruption, numbers: Sequence[int]) -> Iterator[None]:
    """Lets a thread answer signals while the main thread is outside of Python, as when XLA compiles.

    Python's own handlers wait until it is back, and an exception that is raised in a callback from C++ there
    can crash the process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_watch, args=(reader, interruption, frozenset(numbers)), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)
        if interruption.given_up and _program_status is not None:
            # What is ended after this may wait for threads that compile.
            arguments = (_program_status, interruption, GIVE_UP_S)
            threading.Thread(target=_leave, args=arguments, daemon=True).start()


def _leave(status: int, interruption: Interruption, after_s: float) -> None:
    """Ends the process, unless it has ended by itself by then."""
    time.sleep(after_s)
    _answer("interrupted")
    for end in interruption.ending:
        with contextlib.suppress(Exception):
            end()
    os._exit(status)


def _watch(reader: int, interruption: Interruption, numbers: frozenset[int]) -> None:
    """Reads the numbers of signals until the pipe is closed."""
    come = 0
    while arrived := os.read(reader, 1):
        if arrived[0] not in numbers or (come and not gives_up(arrived[0])):
            continue
        come += 1
        interruption.arrived.set()
        if come == 1:
            if not interruption.wait_until_seen(ANSWER_S) and not _is_closed(reader, 0):
                _answer(
                    f"{signal.Signals(arrived[0]).name}: stopping and saving when what is under way has"
                    " ended, which is compiling at the start; again to give up at once"
                )
        elif _program_status is not None and not _is_closed(reader, GIVE_UP_S):
            _leave(_program_status, interruption, 0.0)


def _is_closed(reader: int, timeout_s: float) -> bool:
    """Returns whether the other end of a pipe is closed, or is within so many seconds."""
    poll = select.poll()
    poll.register(reader, 0)  # only the end is waited for
    return bool(poll.poll(1000 * timeout_s))


def _answer(text: str) -> None:
    """Writes a line to stderr, past whatever the main thread holds."""
    with contextlib.suppress(OSError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\nseedbed: {text}\n".encode())
