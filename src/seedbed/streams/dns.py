"""The addresses of names, which are looked up in threads: a slow name server keeps no stream waiting."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

AGAIN_S = 5.0
"""Seconds from the beginning of one look-up of a name to the next, at least."""
# For which a new look-up is waited for. Numbers, and names that this machine knows, need less.
_AT_ONCE_S = 0.05

Addresses = list[tuple[Any, ...]]
"""What `socket.getaddrinfo` returns."""


class Names:
    """The addresses of names, as far as they are known. For one thread."""

    def __init__(self) -> None:
        self._threads: dict[tuple[str, int], threading.Thread] = {}
        self._begun_s: dict[tuple[str, int], float] = {}
        # What the last look-up that has ended has found, or why it has failed; its thread writes it.
        self._found: dict[tuple[str, int], Addresses | str] = {}

    def find(self, host: str, port: int) -> Addresses:
        """Returns what the last look-up of a name has found that did not fail; begins another if it is time.

        Raises OSError if all have failed, or if the first one has not ended.
        """
        name, now_s = (host, port), time.monotonic()
        thread = self._threads.get(name)
        if thread is None or (not thread.is_alive() and now_s > self._begun_s[name] + AGAIN_S):
            thread = threading.Thread(target=self._look_up, args=name, daemon=True)
            self._threads[name], self._begun_s[name] = thread, now_s
            try:
                thread.start()
            except RuntimeError as error:
                raise OSError(f"its address cannot be looked up: {error}") from error
            thread.join(_AT_ONCE_S)
        found = self._found.get(name, "its address is being looked up")
        if isinstance(found, str):
            raise OSError(found)
        return found

    def _look_up(self, host: str, port: int) -> None:
        """Looks a name up, in a thread of its own."""
        try:
            self._found[host, port] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            # A name server that is away does not make forgotten what it has told.
            if not isinstance(self._found.get((host, port)), list):
                self._found[host, port] = str(error)
