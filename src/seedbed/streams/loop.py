"""One loop over descriptors: sockets of streams, listeners, and whatever else a process waits for."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable

# Systems without epoll import this, too.
_READABLE = getattr(select, "EPOLLIN", 0)


class EventLoop:
    """An epoll, and what is called for each of its descriptors. For one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[int], None]] = {}
        self._events: dict[int, int] = {}

    def watch(self, fd: int, call: Callable[[int], None], events: int = _READABLE) -> None:
        """Calls a function with the events that a descriptor has, of these.

        A second call for a descriptor may change the events, and nothing else.
        """
        known = self._events.get(fd)
        if known is None:
            self._epoll.register(fd, events)
            self._calls[fd] = call
        elif known != events:
            self._epoll.modify(fd, events)
        self._events[fd] = events

    def forget(self, fd: int) -> None:
        """Watches a descriptor no more, which may have been closed. A second call does nothing."""
        if self._events.pop(fd, None) is not None:
            del self._calls[fd]
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def turn(self, timeout_s: float) -> None:
        """Waits at most so long for events, and calls what they are for."""
        for fd, events in self._epoll.poll(max(0.0, timeout_s)):
            if (call := self._calls.get(fd)) is not None:
                call(events)

    def close(self) -> None:
        """Watches nothing any more."""
        self._epoll.close()
