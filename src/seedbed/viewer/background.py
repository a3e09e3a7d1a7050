"""Shows a run on a terminal that may block: a thread draws, and bounded queues hand it what to show."""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from seedbed.printable import printable
from seedbed.terminal import LAYOUT, PATIENCE_S

MAX_TEXTS = 200
"""The most messages and printed lines that wait for the terminal. Beyond it, the oldest are dropped."""


class Screen(Protocol):
    """A view that draws on a terminal. A method may block, and may raise OSError or ValueError."""

    report_every_s: float

    @property
    def printed(self) -> Callable[[str], None] | None:
        """A function that shows a line which other code in the process printed, or None.

        None means that other code may print to stdout and stderr directly.
        """
        ...

    def __enter__(self) -> Any:
        """Starts drawing."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Ends drawing."""
        ...

    def update(self, metrics: dict[str, Any]) -> None:
        """Shows one line of metrics."""
        ...

    def message(self, text: str, at: float) -> None:
        """Shows a message that was sent at the time `at`, in seconds since the epoch."""
        ...

    def tick(self) -> None:
        """Shows that time passes; called if there was nothing else to show for `report_every_s`."""
        ...


class BackgroundView:
    """A view that draws a screen in its own thread, so that a blocked terminal blocks nothing else.

    `update` and `message` return at once and may be called from any thread. Only the newest metrics are
    kept until they are drawn, and the newest `MAX_TEXTS` texts. After an error of the terminal, nothing is
    written to it any more, and the run continues; a full disk loses only what it refuses. Leaving the context
    waits for the terminal for at most `patience_s` seconds.
    """

    def __init__(self, screen: Screen, patience_s: float = PATIENCE_S) -> None:
        self.report_every_s = screen.report_every_s
        self._screen, self._patience_s = screen, patience_s
        # No locks: a KeyboardInterrupt may come at any point of the calling thread, also while it holds one.
        self._metrics: collections.deque[dict[str, Any]] = collections.deque(maxlen=1)
        self._texts: collections.deque[Callable[[], None]] = collections.deque(maxlen=MAX_TEXTS)
        self._dropped = 0
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended = False
        self._thread = threading.Thread(target=self._draw, name="view", daemon=True)
        self._prints = contextlib.ExitStack()

    def __enter__(self) -> BackgroundView:
        printed = self._screen.printed
        if printed is not None:

            def take(line: str) -> None:
                self._hand_over(lambda: printed(line))

            out, err = _Prints(sys.stdout, take), _Prints(sys.stderr, take)
            self._prints.enter_context(contextlib.redirect_stdout(out))
            self._prints.enter_context(contextlib.redirect_stderr(err))
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._prints.close()
        self._ended = True
        self._notify()
        self._thread.join(self._patience_s)

    def update(self, metrics: dict[str, Any]) -> None:
        """Hands over one line of metrics; it replaces one that has not been drawn yet."""
        self._metrics.append(metrics)
        self._notify()

    def message(self, text: str) -> None:
        """Hands over a message with the present time."""
        now, shown = time.time(), printable(text, keep=LAYOUT)
        self._hand_over(lambda: self._screen.message(shown, now))

    def _hand_over(self, show: Callable[[], None]) -> None:
        self._dropped += len(self._texts) == MAX_TEXTS
        self._texts.append(show)
        self._notify()

    def _notify(self) -> None:
        if self._wake.empty():
            self._wake.put(None)

    def _draw(self) -> None:
        # If the terminal is closed or gone, there is nowhere to report the error.
        with contextlib.suppress(OSError, ValueError), self._screen:
            ended = False
            while not ended:
                try:
                    self._wake.get(timeout=self.report_every_s)
                except queue.Empty:
                    self._show(self._screen.tick)
                    continue
                ended = self._ended
                if self._dropped:
                    dropped, self._dropped = self._dropped, 0
                    text = f"{dropped} messages were not shown"
                    self._show(self._screen.message, text, time.time())
                while self._texts:
                    self._show(self._texts.popleft())
                if self._metrics:
                    self._show(self._screen.update, self._metrics.pop())

    def _show(self, show: Callable[..., None], *what: Any) -> None:
        """Shows one thing, or leaves it out if the output is a file whose disk is full."""
        try:
            show(*what)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


class _Prints(io.TextIOBase):
    """A replacement for `sys.stdout` or `sys.stderr` that hands printed text to `take`, line by line."""

    def __init__(self, stream: TextIO, take: Callable[[str], None]) -> None:
        self._stream, self._take = stream, take
        # Reentrant: garbage collection may run code that prints while this thread holds the lock.
        self._lock = threading.RLock()
        self._line = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._take(line)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            line, self._line = self._line, ""
        if line:
            self._take(line)

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()
