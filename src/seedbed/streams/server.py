"""The one server of streams: what comes through the doors of a process proves itself, and is served.

The ingest process of a learner that listens and every role of a Gorila run have one; what they do with the
messages is their handler's.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import secrets
import select
import socket
import ssl
import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from seedbed.streams.addresses import bind_listener
from seedbed.streams.connection import Connection
from seedbed.streams.credentials import KEY, ActorKey, learner_context
from seedbed.streams.door import Complaints, Door
from seedbed.streams.handshake import FAULT, SEEDBED, Challenge, Knock, Place
from seedbed.streams.loop import EventLoop
from seedbed.streams.messages import (
    CONTROL_BYTES,
    Blocks,
    Handshake,
    ProtocolError,
    pack,
    require_fields,
    unpack,
)

_LOOK_S = 1.0  # between two looks for strangers that have had their time


class Client:
    """A stream that has come through a door. For the server's thread."""

    def __init__(self, connection: Connection, place: Place, origin: str, memory: int) -> None:
        """Takes over the descriptor of memory that the client shares, which is -1 if it does not."""
        self.connection, self.origin = connection, origin
        self.challenge = Challenge.draw(place)
        self.known = False  # whether it has proved that it is of this run
        self.role, self.number = "", 0  # what it is, once it has proved it
        self.blocks: Blocks | None = None
        self.fd, self.events = connection.fileno(), connection.events  # what is waited for
        self._memory = memory

    def share(self, up_bytes: int, down_bytes: int) -> None:
        """Makes room for the blocks of this stream; raises ProtocolError if there is less."""
        self.blocks = Blocks(up_bytes, down_bytes, self._memory)
        self.connection.limit = CONTROL_BYTES + up_bytes

    def send(self, kind: enum.IntEnum, block: np.ndarray | None = None, **fields: Any) -> None:
        """Sends a message, with a block behind it if it is given; raises ConnectionError."""
        self.connection.send(pack(kind, fields, None if block is None else block.data))

    def send_down(self, kind: enum.IntEnum, size: int, **fields: Any) -> None:
        """Sends a message with the first `size` bytes of `blocks.down`, which only travel if not shared."""
        blocks = self.blocks
        assert blocks is not None
        self.send(kind, None if blocks.shared else blocks.down[:size], **fields)

    def close(self) -> None:
        """Ends the stream. A second call does nothing."""
        self.connection.close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


class Handler(Protocol):
    """What a process does with its streams; the server's thread calls it."""

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Takes a client's HELLO, which is proved; returns the fields of its WELCOME.

        Raises ProtocolError to refuse it.
        """
        ...

    def take(self, client: Client, kind: enum.IntEnum, body: memoryview) -> None:
        """Takes a message; raises ProtocolError and ConnectionError, which end the stream.

        The body is valid until it returns.
        """
        ...

    def leave(self, client: Client, refusal: ProtocolError | None) -> None:
        """Forgets a client whose stream has ended, also one that was never greeted.

        `refusal` is why the server has ended it, None if it has ended otherwise.
        """
        ...


class Rules(NamedTuple):
    """What differs between the servers of this program."""

    most_clients: int = 1 << 10  # that have proved themselves
    same_numbers: int = 3  # of the version, from the first, in which both ends must agree
    fatal: tuple[type[Exception], ...] = ()  # errors of the handler that end the process


class Server:
    """The doors of a process, and the streams that have come through them. For one thread."""

    def __init__(
        self,
        handler: Handler,
        place: Place,
        kinds: type[enum.IntEnum],
        credentials: Path,
        rules: Rules = Rules(),  # noqa: B008
    ) -> None:
        """Opens no door yet. `kinds` are the kinds of messages besides those of the handshake.

        `credentials` is the run's folder `listen`. Raises SeedbedError if the key cannot be read.
        """
        self._handler, self._place, self._kinds, self._rules = handler, place, kinds, rules
        self._credentials, self._key = credentials, ActorKey.read(credentials / KEY)
        self._context: ssl.SSLContext | None = None
        self.loop = EventLoop()  # the process may watch other descriptors with it
        self._doors: list[Door] = []
        self._knocks: dict[int, Knock] = {}  # by descriptor
        self.clients: dict[int, Client] = {}  # by descriptor; strangers are among them
        self._complaints = Complaints()
        self._look_s = 0.0

    def listen_here(self) -> str:
        """Opens a door for clients of this machine; returns the name of its socket, an abstract one."""
        name = f"seedbed-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        self._open(listener)
        return name

    def listen(self, host: str, port: int = 0, former_port: int = 0, tls: bool = True) -> int:
        """Opens the door for clients of other machines; returns the port.

        Port 0 is one that the kernel chooses, if `former_port` is taken or 0. Raises OSError if the address
        cannot be had.
        """
        self._context = learner_context(self._credentials) if tls else None
        return self._open(bind_listener(host, port, former_port)).port

    def _open(self, listener: socket.socket) -> Door:
        self._doors.append(Door(listener, self.loop, self._arrive))
        return self._doors[-1]

    def serve(self, timeout_s: float) -> None:
        """Waits at most so long for messages and other news, and handles what has come."""
        now_s = time.monotonic()
        for door in self._doors:
            timeout_s = min(timeout_s, door.tend(now_s))
        self.loop.turn(timeout_s)
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            for door in self._doors:
                for fd in door.late(now_s):
                    self._end_stranger(fd)

    def _arrive(self, stream: socket.socket, origin: str, victim: int | None) -> None:
        if victim is not None:
            self._end_stranger(victim)
        fd = stream.fileno()
        try:
            if stream.family == socket.AF_UNIX:
                stream.setblocking(False)
                self.loop.watch(fd, functools.partial(self._answer, fd))
                self._knocks[fd] = Knock(stream, origin)
            else:
                self._meet(Connection(stream, self._context, self._kinds, server=True), origin)
        except OSError:  # it has gone
            self._forget(fd)
            stream.close()

    def _answer(self, fd: int, events: int) -> None:
        """Answers a client of this machine that knocks."""
        del events
        knock = self._knocks[fd]
        try:
            memory = knock.answer(self._key, self._place)
        except OSError:  # it has gone, or has not proved itself
            self._end_stranger(fd)
            return
        if memory is not None:
            del self._knocks[fd]
            self.loop.forget(fd)
            connection = Connection(knock.stream, None, self._kinds, server=True)
            self._meet(connection, knock.origin, memory)

    def _end_stranger(self, fd: int) -> None:
        self._forget(fd)
        if (knock := self._knocks.pop(fd, None)) is not None:
            self.loop.forget(fd)
            knock.stream.close()
        elif (client := self.clients.get(fd)) is not None:
            self.end(client)

    def _forget(self, fd: int) -> None:
        """Notes that a client is no stranger any more."""
        for door in self._doors:
            door.forget(fd)

    def _meet(self, connection: Connection, origin: str, memory: int = -1) -> None:
        """Begins the handshake with a stranger."""
        client = Client(connection, self._place, origin, memory)
        try:
            connection.send(client.challenge.frame())
            self.loop.watch(client.fd, functools.partial(self._read, client), client.events)
        except OSError:  # it has gone
            self._forget(client.fd)
            client.close()
            return
        self.clients[client.fd] = client

    def _read(self, client: Client, events: int) -> None:
        """Reads and writes what a stream is ready for; a stream that breaks the protocol ends."""
        try:
            if events & select.EPOLLOUT:
                client.connection.flush()
            for kind, body in client.connection.receive():
                if client.known and not isinstance(kind, Handshake):
                    self._handler.take(client, kind, body)
                else:
                    self._greet(client, kind, body)
            self.watch(client)
        except ProtocolError as error:
            self.refuse(client, error)
        except ConnectionError:
            self.end(client)
        except Exception as error:
            # A stranger can cause none of the errors that end the process.
            if client.known and isinstance(error, self._rules.fatal):
                raise
            self._complaints.tell()
            refusal = ProtocolError(f"{self._place.role} could not handle this", FAULT)
            refusal.__cause__ = error
            self.refuse(client, refusal)

    def _greet(self, client: Client, kind: enum.IntEnum, body: memoryview) -> None:
        """Takes what has to be the HELLO of a stranger."""
        if client.known:
            raise ProtocolError(f"{kind.name} came out of turn")
        if kind is not Handshake.HELLO:
            raise ProtocolError(f"{kind.name} came instead of HELLO")
        said, server = unpack(kind, body).fields, self._place.role
        told = require_fields(said, version=str, role=str, number=int, proof=str)
        proof = said.pop("proof")
        client.challenge.require_proof(self._key, said, proof)
        _require_version(told["version"], server, self._rules.same_numbers)
        role, number = told["role"], told["number"]
        for other in list(self.clients.values()):
            if other.known and (other.role, other.number) == (role, number):
                self.end(other)
        known = sum(other.known for other in self.clients.values())
        if known >= self._rules.most_clients:
            raise ProtocolError(f"{server} has {known} streams, and takes no more", "full")
        self._forget(client.fd)
        client.connection.limit = CONTROL_BYTES
        fields = self._handler.greet(client, said)
        client.known, client.role, client.number = True, role, number
        client.send(Handshake.WELCOME, **fields)

    def watch(self, client: Client) -> None:
        """Waits for what a stream is to do next; call it after sending outside of a handler's `take`."""
        events = client.connection.events
        if events != client.events and self.clients.get(client.fd) is client:
            client.events = events
            self.loop.watch(client.fd, functools.partial(self._read, client), events)

    def send(self, client: Client, frame: bytes) -> None:
        """Sends a frame outside of a handler's `take`; a stream that has gone is ended."""
        try:
            client.connection.send(frame)
            self.watch(client)
        except ConnectionError:
            self.end(client)

    def refuse(self, client: Client, refusal: ProtocolError) -> None:
        """Tells a client why its stream has to end, and ends it."""
        with contextlib.suppress(ConnectionError):
            client.send(Handshake.REFUSE, text=str(refusal), code=refusal.code)
        self.end(client, refusal)

    def end(self, client: Client, refusal: ProtocolError | None = None) -> None:
        """Ends a stream, which a client may have been refused. A second call does nothing."""
        if self.clients.get(client.fd) is not client:
            return
        del self.clients[client.fd]
        self._forget(client.fd)
        self.loop.forget(client.fd)
        client.close()
        self._handler.leave(client, refusal)

    def close(self) -> None:
        """Ends all streams without telling the handler, and listens no more."""
        for client in self.clients.values():
            client.close()
        for knock in self._knocks.values():
            knock.stream.close()
        for door in self._doors:
            door.close()
        self.loop.close()


def _require_version(theirs: str, role: str, numbers: int) -> None:
    """Raises ProtocolError unless the first numbers of a client's version are those of this package."""
    if theirs.split(".")[:numbers] != SEEDBED.split(".")[:numbers]:
        raise ProtocolError(
            f"seedbed is {theirs[:40]} here and {SEEDBED} at {role}: install {role}'s version",
            "version",
        )
