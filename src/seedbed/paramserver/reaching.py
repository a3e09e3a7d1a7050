"""How a client reaches a role on another machine, of whose addresses one may be right."""

from __future__ import annotations

import collections
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from seedbed.actors.connection import Connection
from seedbed.actors.names import Names
from seedbed.actors.wire import ProtocolError, require_fields
from seedbed.paramserver.messages import Kind, unpack
from seedbed.paramserver.server import keep_alive

PATIENCE_S = 15.0
"""Seconds for which a role may let a client wait for its CHALLENGE: others may be in the queue before it."""
# Seconds until another address is tried beside those that have not answered yet.
_NEXT_S = 0.25
_LOOK_S = 0.1  # between two looks whether to stop


class Place(NamedTuple):
    """A role to reach: what its CHALLENGE says."""

    role: str
    number: int  # of its start


class Reached(NamedTuple):
    """A stream on which the right role has sent its CHALLENGE."""

    connection: Connection[Kind]
    host: tuple[str, int]  # the address at which it was reached
    challenge: dict[str, Any]


def reach(
    place: Place,
    hosts: Sequence[tuple[str, int]],
    names: Names,
    context: ssl.SSLContext,
    stop: Callable[[], bool],
) -> Reached | None:
    """Connects to a role at whichever of its machine's addresses it answers; returns None if `stop` does.

    An address that does not answer, or where something else does, keeps no other one waiting. Raises
    ConnectionError, which says what is wrong at each address, if the role was not found at any.
    """
    waiting = collections.deque(hosts)
    tries: dict[Connection[Kind], tuple[str, int]] = {}
    errors = [] if hosts else [f"{place.role} does not listen for other machines"]
    until_s, next_s = time.monotonic() + PATIENCE_S, 0.0
    try:
        while waiting or tries:
            now_s = time.monotonic()
            if stop():
                return None
            if now_s > until_s:
                errors += [f"{_named(host)}: no answer" for host in tries.values()]
                break
            if waiting and (not tries or now_s >= next_s):
                host, next_s = waiting.popleft(), now_s + _NEXT_S
                try:
                    found = names.find(*host)
                    # A name may have several addresses.
                    more = [each[4][:2] for each in found[1:]]
                    waiting.extend(each for each in more if each not in hosts and host != each)
                    tries[_begin(found[0], context)] = host
                except OSError as error:
                    errors.append(f"{_named(host)}: {error}")
                continue
            for connection in _ready(tries, next_s - now_s if waiting else _LOOK_S):
                try:
                    challenge = _challenge(connection, place)
                except (ProtocolError, ConnectionError) as error:
                    errors.append(f"{_named(tries.pop(connection))}: {error}")
                    connection.close()
                    next_s = 0.0
                    continue
                if challenge is not None:
                    return Reached(connection, tries.pop(connection), challenge)
    finally:
        for connection in tries:
            connection.close()
    raise ConnectionError("; ".join(errors))


def _begin(found: tuple[Any, ...], context: ssl.SSLContext) -> Connection[Kind]:
    """Begins to connect to an address that `getaddrinfo` has found; raises OSError."""
    family, kind, number, _, address = found
    stream = socket.socket(family, kind, number)
    try:
        stream.setblocking(False)
        code = stream.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        keep_alive(stream)
        return Connection(stream, context, Kind, server=False)
    except OSError:
        stream.close()
        raise


def _ready(tries: Iterable[Connection[Kind]], timeout_s: float) -> list[Connection[Kind]]:
    """Returns the connections with news, of which one may come within `timeout_s`."""
    poll, found = select.poll(), {connection.fileno(): connection for connection in tries}
    for fd, connection in found.items():
        poll.register(fd, connection.events)
    return [found[fd] for fd, _ in poll.poll(1000 * max(0.0, min(timeout_s, _LOOK_S)))]


def _challenge(connection: Connection[Kind], place: Place) -> dict[str, Any] | None:
    """Returns the fields of the CHALLENGE, None if it has not come; raises what ends the stream."""
    for kind, body in connection.receive():
        message = unpack(kind, body)
        if kind is not Kind.CHALLENGE:
            raise ProtocolError(f"{kind.name} came instead of CHALLENGE")
        return require_challenge(message.fields, place)
    return None


def require_challenge(fields: dict[str, Any], place: Place) -> dict[str, Any]:
    """Returns the fields of a CHALLENGE; raises ProtocolError if another process has sent it."""
    said = require_fields(fields, role=str, number=int, nonce=str)
    if (said["role"], said["number"]) != place:
        raise ProtocolError(f"another process than {place.role} has answered")
    return said


def _named(host: tuple[str, int]) -> str:
    name, port = host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
