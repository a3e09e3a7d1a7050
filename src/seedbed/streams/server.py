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
from typing import Any, Protocol

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

    def __init__(self, connection: Connection, place: Place, origin: str) -> None:
        self.connection, self.origin = connection, origin
        self.challenge = Challenge.draw(place)
        self.known = False  # whether it has proved that it is of this run
        self.role, self.number = "", 0  # what it is, once it has proved it
        self.blocks: Blocks | None = None
        self.fd, self.events = connection.fileno(), connection.events  # what is waited for
        self.memory = -1  # the descriptor of memory that it shares; the stream's end closes it

    def share(self, up_bytes: int, down_bytes: int) -> None:
        """Makes room for the blocks of this stream; raises ProtocolError if there is less."""
        self.blocks = Blocks(up_bytes, down_bytes, self.memory)
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
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1


class Handler(Protocol):
    """The answers of a process to its streams; the server's thread calls it."""

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


class Server:
    """The doors of a process, and the streams that have come through them. For one thread."""

    def __init__(
        self,
        handler: Handler,
        place: Place,
        kinds: type[enum.IntEnum],
        credentials: Path,
        most_clients: int = 1 << 10,
        same_numbers: int = 3,
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        """Opens no door yet. `kinds` are the kinds of messages besides those of the handshake.

        `credentials` is the run's folder `listen`. At most `most_clients` proved streams are kept;
        their versions agree with this process's in the first `same_numbers`. Errors of the handler end a
        stream, and those that are `fatal` leave `serve`. Raises SeedbedError if the key cannot be read.
        """
        self._handler, self._place, self._kinds = handler, place, kinds
        self._most_clients, self._same_numbers, self._fatal = most_clients, same_numbers, fatal
        self._credentials, self._key = credentials, ActorKey.read(credentials / KEY)
        self._context: ssl.SSLContext | None = None
        self.loop = EventLoop()  # the process may watch other descriptors with it
        self._doors: list[Door] = []
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
                    self.end(self.clients[fd])

    def _arrive(self, stream: socket.socket, origin: str, victim: int | None) -> None:
        if victim is not None:
            self.end(self.clients[victim])
        local = stream.family == socket.AF_UNIX
        try:
            context = None if local else self._context
            connection = Connection(stream, context, self._kinds, server=True)
        except OSError:  # it has gone
            self._forget(stream.fileno())
            stream.close()
            return
        client = self.clients[stream.fileno()] = Client(connection, self._place, origin)
        try:
            if local:
                knocks = functools.partial(self._answer, client, Knock(stream))
                self.loop.watch(client.fd, knocks)
            else:
                self._challenge(client)
        except OSError:
            self.end(client)

    def _answer(self, client: Client, knock: Knock, events: int) -> None:
        """Answers a client of this machine that knocks."""
        del events
        try:
            memory = knock.answer(self._key, self._place)
            if memory is not None:
                client.memory = memory
                self.loop.forget(client.fd)
                self._challenge(client)
        except OSError:  # it has gone, or has not proved itself
            self.end(client)

    def _challenge(self, client: Client) -> None:
        client.connection.send(client.challenge.frame())
        self.loop.watch(client.fd, functools.partial(self._read, client), client.events)

    def _forget(self, fd: int) -> None:
        """Notes that a client is no stranger any more."""
        for door in self._doors:
            door.forget(fd)

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
            if client.known and isinstance(error, self._fatal):
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
        version, role, number = told["version"], told["role"], told["number"]
        if version.split(".")[: self._same_numbers] != SEEDBED.split(".")[: self._same_numbers]:
            text = f"seedbed is {version[:40]} here and {SEEDBED} at {server}"
            raise ProtocolError(f"{text}: install {server}'s version", "version")
        for other in list(self.clients.values()):
            if other.known and (other.role, other.number) == (role, number):
                self.end(other)
        known = sum(other.known for other in self.clients.values())
        if known >= self._most_clients:
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
        for door in self._doors:
            door.close()
        self.loop.close()
