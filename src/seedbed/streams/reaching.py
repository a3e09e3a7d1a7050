"""How a client reaches a server: connecting without waiting, and finding it at one of several addresses."""

from __future__ import annotations

import collections
import enum
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from seedbed.streams.addresses import joined_address
from seedbed.streams.connection import Connection
from seedbed.streams.dns import Names
from seedbed.streams.handshake import LOOK_S, PATIENCE_S, Challenge, Place
from seedbed.streams.messages import ProtocolError, unpack

# Seconds until another address is tried beside those that have not answered yet.
_NEXT_S = 0.25


class Reached(NamedTuple):
    """A stream on which the right server has sent its CHALLENGE."""

    connection: Connection
    host: tuple[str, int]  # the address at which it was reached
    challenge: Challenge


def begin_to_connect(
    found: tuple[Any, ...], context: ssl.SSLContext | None, kinds: type[enum.IntEnum]
) -> Connection:
    """Returns a connection to an address that `getaddrinfo` has found, which is being made; raises OSError.

    `context` None means plaintext, and `kinds` are the kinds of messages besides those of the handshake.
    """
    family, kind, number, _, address = found
    stream = socket.socket(family, kind, number)
    try:
        stream.setblocking(False)
        code = stream.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        return Connection(stream, context, kinds, server=False)
    except OSError:
        stream.close()
        raise


def connect_here(name: str) -> socket.socket:
    """Returns a stream to the socket of a server of this machine; raises OSError."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        stream.connect("\0" + name)
    except OSError:
        stream.close()
        raise
    return stream


def reach(
    place: Place | None,
    hosts: Sequence[tuple[str, int]],
    names: Names,
    context: ssl.SSLContext,
    kinds: type[enum.IntEnum],
    stop: Callable[[], bool],
) -> Reached | None:
    """Connects to a server at whichever of its machine's addresses it answers; returns None if `stop` does.

    `place` is who it has to be, None for whoever answers.

    An address that does not answer, or where something else does, keeps no other one waiting. Raises
    ConnectionError, which says what is wrong at each address, if the server was not found at any.
    """
    waiting = collections.deque(hosts)
    tries: dict[Connection, tuple[str, int]] = {}
    role, number = ("", None) if place is None else place
    errors = [] if hosts else [f"{role or 'the run'} does not listen for other machines"]
    until_s, next_s = time.monotonic() + PATIENCE_S, 0.0
    try:
        while waiting or tries:
            now_s = time.monotonic()
            if stop():
                return None
            if now_s > until_s:
                errors += [f"{joined_address(*host)}: no answer" for host in tries.values()]
                break
            if waiting and (not tries or now_s >= next_s):
                host, next_s = waiting.popleft(), now_s + _NEXT_S
                try:
                    found = names.find(*host)
                    # A name may have several addresses.
                    more = [each[4][:2] for each in found[1:]]
                    waiting.extend(each for each in more if each not in hosts and host != each)
                    tries[begin_to_connect(found[0], context, kinds)] = host
                except OSError as error:
                    errors.append(f"{joined_address(*host)}: {error}")
                continue
            for connection in _ready(tries, next_s - now_s if waiting else LOOK_S):
                try:
                    for kind, body in connection.receive():
                        challenge = Challenge.read(unpack(kind, body), role, number)
                        return Reached(connection, tries.pop(connection), challenge)
                except (ProtocolError, ConnectionError) as error:
                    errors.append(f"{joined_address(*tries.pop(connection))}: {error}")
                    connection.close()
                    next_s = 0.0
    finally:
        for connection in tries:
            connection.close()
    raise ConnectionError("; ".join(errors))


def _ready(tries: Iterable[Connection], timeout_s: float) -> list[Connection]:
    """Returns the connections with news, of which one may come within `timeout_s`."""
    poll, found = select.poll(), {connection.fileno(): connection for connection in tries}
    for fd, connection in found.items():
        poll.register(fd, connection.events)
    return [found[fd] for fd, _ in poll.poll(1000 * max(0.0, min(timeout_s, LOOK_S)))]
