"""The door of every listener: what a client may cost that has not proved to know the run's secret."""

from __future__ import annotations

import collections
import ipaddress
import math
import resource
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable

from seedbed.streams.loop import EventLoop
from seedbed.terminal import tell

MOST_STRANGERS = 64
"""Clients of a door that have not proved themselves, at most."""
NEW_A_SECOND = 200.0
"""Clients that a door lets in each second, at most."""
HELLO_S = 10.0
"""Seconds that a client has to prove itself."""
SPARE_DESCRIPTORS = 64
"""Descriptors that no client gets: saves, logs and look-ups of names need some."""
_BACKLOG = 1024
_TELL_S = 10.0
_PEER = struct.Struct("3i")  # process, user and group at the other end of a Unix socket


class Door:
    """A listener, and its clients that have not proved themselves: the strangers. For one thread.

    A stranger costs one of `MOST_STRANGERS` places for `HELLO_S` seconds, and nothing else. If places or
    descriptors run out, the address with the most strangers loses its oldest one, so that a flood from one
    machine shuts no other machine out. Addresses of IPv6 count by their first 64 bits: a machine may take
    any of the rest. A stranger is known by its descriptor.
    """

    def __init__(
        self,
        listener: socket.socket,
        loop: EventLoop,
        arrived: Callable[[socket.socket, str, int | None], None],
    ) -> None:
        """Listens at a socket that is bound; raises OSError if it cannot.

        The owner's loop calls `arrived` with each client, a stranger until `forget`, with its address or, on
        this machine, its user, and with the stranger that has to end for it, if there is one.
        """
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listener, self._loop, self._arrived = listener, loop, arrived
        self._open = False
        self._allowance, self._allowed_s = NEW_A_SECOND, time.monotonic()
        # In the order of their coming, the network and when its stranger came, by descriptor.
        self._strangers: dict[int, tuple[str, float]] = {}
        self._first_spare = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_DESCRIPTORS

    @property
    def port(self) -> int:
        """The port of a listener of TCP."""
        return self._listener.getsockname()[1]

    def tend(self, now_s: float) -> float:
        """Opens or shuts the door; returns the seconds until it is to be tended again.

        Handshakes must leave time for the streams of those who have proved themselves.
        """
        earned = (now_s - self._allowed_s) * NEW_A_SECOND
        self._allowance = min(NEW_A_SECOND, self._allowance + earned)
        self._allowed_s = now_s
        room = self._allowance >= 1
        if room and not self._open:
            self._loop.watch(self._listener.fileno(), self._accept)
        elif self._open and not room:
            self._loop.forget(self._listener.fileno())
        self._open = room
        return math.inf if room else (1 - self._allowance) / NEW_A_SECOND

    def _accept(self, events: int) -> None:
        """Takes the next client, if there is one, and room."""
        del events
        self._allowance -= 1
        try:
            stream, address = self._listener.accept()
        except OSError:  # the client has gone, or there are too many descriptors
            return
        fd = stream.fileno()
        spare = fd >= self._first_spare
        if spare and not self._strangers:
            stream.close()
            return
        crowded = spare or len(self._strangers) >= MOST_STRANGERS
        victim = self._greediest() if crowded else None
        origin = _origin(stream, address)
        self._strangers[fd] = _network(origin), time.monotonic()
        self._arrived(stream, origin, victim)

    def _greediest(self) -> int:
        """Returns the oldest stranger of the address that has the most; there is one."""
        counts = collections.Counter(origin for origin, _ in self._strangers.values())
        most = max(counts.values())
        return next(fd for fd, (origin, _) in self._strangers.items() if counts[origin] == most)

    def forget(self, fd: int) -> None:
        """Notes that a stranger has proved itself, or has ended. A second call does nothing."""
        self._strangers.pop(fd, None)

    def late(self, now_s: float) -> list[int]:
        """Returns the strangers that have had their time."""
        return [fd for fd, (_, since_s) in self._strangers.items() if now_s > since_s + HELLO_S]

    def close(self) -> None:
        """Listens no more."""
        self._listener.close()


def _origin(stream: socket.socket, address: object) -> str:
    """Returns a client's address, as IPv4 also if it came as IPv6; or, on this machine, its user."""
    if stream.family != socket.AF_UNIX:
        host = str(address[0]) if isinstance(address, tuple) else ""
        if stream.family == socket.AF_INET6 and host:
            return str(ipaddress.IPv6Address(host).ipv4_mapped or host)
        return host
    peer = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return f"user {_PEER.unpack(peer)[1]}"


def _network(origin: str) -> str:
    """Returns what strangers are counted by: the first 64 bits of an IPv6 address, any other origin whole."""
    try:
        address = ipaddress.IPv6Address(origin)
    except ValueError:
        return origin
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


class Complaints:
    """The tracebacks of what could not be handled, in this process's log. For one thread.

    A flood of them must not fill the disk.
    """

    def __init__(self) -> None:
        self._told_s, self._left_out = -_TELL_S, 0

    def tell(self) -> None:
        """Writes the traceback of the exception that is being handled, unless one came lately."""
        now_s = time.monotonic()
        if now_s < self._told_s + _TELL_S:
            self._left_out += 1
            return
        if self._left_out:
            tell(f"{self._left_out} tracebacks like the last one were left out", sys.stderr)
        self._told_s, self._left_out = now_s, 0
        tell(traceback.format_exc().rstrip(), sys.stderr)
