"""Lines for a terminal, or a file in its place, that may be gone, full or blocked."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import threading
from typing import TextIO

from seedbed.printable import printable

PATIENCE_S = 2.0
"""Seconds for which a line, or the end of a run, waits for a terminal that accepts no more text."""
LAYOUT = "\n\t"
"""What a text may have that is not seen."""


class TerminalGone(OSError):
    """Raised when a pipe has no reader left. Rich would end the process after a BrokenPipeError."""


class Descriptor(io.TextIOBase):
    """A text stream that writes directly to another stream's file descriptor.

    A thread that is blocked here holds no lock of `sys.stdout`, which the interpreter needs to flush at exit.
    """

    def __init__(self, stream: TextIO) -> None:
        self._fd, self._encoding = stream.fileno(), stream.encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return self._encoding

    def write(self, text: str) -> int:
        """Writes all of a text and waits for the terminal to take it; raises OSError if that is gone."""
        data = text.encode(self._encoding, "replace")
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BrokenPipeError as error:
                raise TerminalGone("nobody reads it any more") from error
            except BlockingIOError:
                # Another process has made the terminal non-blocking.
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
        return len(text)

    def fileno(self) -> int:
        """Returns the file descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Returns whether the descriptor is a terminal."""
        return os.isatty(self._fd)


def unbuffered(stream: TextIO) -> TextIO:
    """Returns a stream that writes directly to the descriptor of the process's own stdout or stderr.

    Any other stream, such as a notebook's replacement for stdout, is returned unchanged.
    """
    if stream is None or stream not in (sys.__stdout__, sys.__stderr__):
        return stream
    stream.flush()
    return Descriptor(stream)  # type: ignore[return-value]


def tell(text: str, stream: TextIO | None) -> None:
    """Writes a line; gives up if the terminal is gone, or blocks for longer than `PATIENCE_S`.

    The process may have been started without a stream: it is None then, and nothing is written.
    """
    if stream is None:
        return

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):
            out = unbuffered(stream)
            out.write(f"{printable(text, keep=LAYOUT)}\n")
            out.flush()

    thread = threading.Thread(target=write, name="last line", daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
