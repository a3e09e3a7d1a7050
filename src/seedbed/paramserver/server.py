"""How a role serves others: streams from its own machine and, if it listens, from others.

A stream begins as that of an actor does (docs/protocol.md): the server sends a nonce, and the client proves
that it knows the run's secret. From this machine it comes through a Unix socket, and its first byte carries
the descriptor of the memory that both share; from elsewhere it comes over TLS.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import ssl
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seedbed.actors.connection import Connection
from seedbed.actors.credentials import KEY, ActorKey, learner_context
from seedbed.actors.wire import HELLO_BYTES, ProtocolError
from seedbed.envs.host.versions import package_version
from seedbed.paramserver.directory import Address, this_machine
from seedbed.paramserver.messages import CONTROL_BYTES, Blocks, Kind, Message, pack, unpack

SEEDBED = package_version("seedbed") or "unknown"
"""The version of this package, which both ends tell."""
_HELLO_S = 10.0
_MOST_CLIENTS = 1 << 10
_BACKLOG = 128


class Client:
    """A stream of another role. For the server's thread."""

    def __init__(self, stream: socket.socket, context: ssl.SSLContext | None, memory: int) -> None:
        self.connection = Connection(stream, context, Kind, server=True)
        self.role, self.number = "", 0  # what it is, once it has proved it
        self.blocks: Blocks | None = None
        self._memory = memory  # a descriptor, -1 if there is none
        self.nonce = secrets.token_hex(32)

    @property
    def known(self) -> bool:
        """Whether it has proved that it is of this run."""
        return bool(self.role)

    def share(self, up_bytes: int, down_bytes: int) -> None:
        """Makes room for the blocks of this stream; raises ProtocolError if there is less."""
        self.blocks = Blocks(up_bytes, down_bytes, self._memory)
        self.connection.limit = CONTROL_BYTES + up_bytes

    def send(self, kind: Kind, block: np.ndarray | None = None, **fields: Any) -> None:
        """Sends a message, with a block behind it if it is given; raises ConnectionError."""
        self.connection.send(pack(kind, fields, None if block is None else block.data))

    def send_down(self, kind: Kind, size: int, **fields: Any) -> None:
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
    """What a role does with messages; the server's thread calls it."""

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Takes a client's HELLO, which is proved; returns the fields of its WELCOME.

        Raises ProtocolError to refuse it.
        """
        ...

    def take(self, client: Client, message: Message) -> None:
        """Takes a message; raises ProtocolError and ConnectionError, which end the stream."""
        ...

    def leave(self, client: Client) -> None:
        """Forgets a client whose stream has ended."""
        ...


class Server:
    """The sockets of a role. For one thread."""

    def __init__(self, role: str, number: int, credentials: Path, host: str | None) -> None:
        """Listens on this machine and, if `host` is not None, at a free port there.

        `number` is that of this start of the role. `credentials` is the run's folder `listen`. Raises
        SeedbedError if a key cannot be read, OSError if the address cannot be taken.
        """
        self._role, self._number = role, number
        self._key = ActorKey.read(credentials / KEY)
        self._context = learner_context(credentials) if host is not None else None
        self._epoll = select.epoll()
        name = f"seedbed-{secrets.token_hex(16)}"
        self._local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._local.bind("\0" + name)
        self._listeners = {self._local.fileno(): self._local}
        port = 0
        if host is not None:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            remote = socket.socket(family, kind, protocol)
            remote.bind(address)
            port = remote.getsockname()[1]
            self._listeners[remote.fileno()] = remote
        for fd, listener in self._listeners.items():
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            self._epoll.register(fd, select.EPOLLIN)
        self.port = port
        self._name = name
        # Local streams whose first byte has not come yet, with the time when they began.
        self._fresh: dict[int, tuple[socket.socket, float]] = {}
        self.clients: dict[int, Client] = {}  # by descriptor
        self._events: dict[int, int] = {}

    def address(self, hosts: tuple[tuple[str, int], ...]) -> Address:
        """Returns the address to announce; `hosts` are those for other machines."""
        return Address(self._number, os.getpid(), this_machine(), self._name, hosts)

    def serve(self, handler: Handler, timeout_s: float) -> None:
        """Waits at most so long for messages, and gives those that have come to the handler."""
        for fd, events in self._epoll.poll(timeout_s):
            if fd in self._listeners:
                self._accept(self._listeners[fd])
            elif fd in self._fresh:
                self._meet_local(fd)
            elif fd in self.clients:
                self._read(handler, self.clients[fd], events)
        now_s = time.monotonic()
        for fd, (stream, since_s) in list(self._fresh.items()):
            if now_s > since_s + _HELLO_S:
                del self._fresh[fd]
                stream.close()
        for client in list(self.clients.values()):
            if not client.known and now_s > client.connection.since_s + _HELLO_S:
                self.end(handler, client)

    def _accept(self, listener: socket.socket) -> None:
        try:
            stream, _ = listener.accept()
        except OSError:
            return
        if len(self.clients) + len(self._fresh) >= _MOST_CLIENTS:
            stream.close()
        elif listener is self._local:
            stream.setblocking(False)
            self._fresh[stream.fileno()] = stream, time.monotonic()
            self._epoll.register(stream.fileno(), select.EPOLLIN)
        else:
            keep_alive(stream)
            self._meet(Client(stream, self._context, -1))

    def _meet_local(self, fd: int) -> None:
        """Takes the first byte of a stream of this machine, and the memory that comes with it."""
        stream, _ = self._fresh.pop(fd)
        self._epoll.unregister(fd)
        try:
            data, fds, _, _ = socket.recv_fds(stream, 1, 1)
        except OSError:
            data, fds = b"", []
        if data:
            self._meet(Client(stream, None, fds[0] if fds else -1))
        else:
            stream.close()

    def _meet(self, client: Client) -> None:
        fd = client.connection.fileno()
        client.connection.limit = HELLO_BYTES
        try:
            client.send(
                Kind.CHALLENGE,
                version=SEEDBED,
                role=self._role,
                number=self._number,
                nonce=client.nonce,
            )
        except ConnectionError:
            client.close()
            return
        self.clients[fd], self._events[fd] = client, client.connection.events
        self._epoll.register(fd, client.connection.events)

    def _read(self, handler: Handler, client: Client, events: int) -> None:
        """Reads and writes what a stream is ready for; a stream that breaks the protocol ends."""
        try:
            if events & select.EPOLLOUT:
                client.connection.flush()
            for kind, body in client.connection.receive():
                message = unpack(kind, body)
                if client.known:
                    handler.take(client, message)
                else:
                    self._hello(handler, client, message)
            self.watch(client)
        except ProtocolError as error:
            with contextlib.suppress(ConnectionError):
                client.send(Kind.REFUSE, text=str(error), code=error.code)
            self.end(handler, client)
        except ConnectionError:
            self.end(handler, client)
        except (KeyError, TypeError, ValueError, IndexError):
            # Whatever a client sends must end no stream but its own.
            traceback.print_exc()
            self.end(handler, client)

    def _hello(self, handler: Handler, client: Client, message: Message) -> None:
        said = dict(message.fields)
        if message.kind is not Kind.HELLO:
            raise ProtocolError(f"{message.kind.name} came instead of HELLO")
        proof = str(said.pop("proof", ""))
        right = self._key.proof(bytes.fromhex(client.nonce), self._number, said)
        if not (proof.isascii() and hmac.compare_digest(proof, right)):
            raise ProtocolError("the key is not this run's", "key")
        if said["version"] != SEEDBED:
            raise ProtocolError(
                f"seedbed is {said['version']} there and {SEEDBED} here: install the same version",
                "version",
            )
        client.connection.limit = CONTROL_BYTES
        for other in list(self.clients.values()):
            if (other.role, other.number) == (said["role"], said["number"]):
                self.end(handler, other)
        fields = handler.greet(client, said)
        client.role, client.number = str(said["role"]), int(said["number"])
        client.send(Kind.WELCOME, **fields)

    def watch(self, client: Client) -> None:
        """Waits for what a stream is to do next; call it after sending outside of a handler's `take`."""
        fd, events = client.connection.fileno(), client.connection.events
        if fd in self.clients and self._events[fd] != events:
            self._events[fd] = events
            self._epoll.modify(fd, events)

    def end(self, handler: Handler, client: Client) -> None:
        """Ends a stream."""
        fd = client.connection.fileno()
        if self.clients.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            if client.known:
                handler.leave(client)
        client.close()

    def close(self) -> None:
        """Ends all streams, and listens no more."""
        for client in self.clients.values():
            client.close()
        for stream, _ in self._fresh.values():
            stream.close()
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()


def keep_alive(stream: socket.socket) -> None:
    """Lets the kernel end a stream whose other machine has not answered for about five seconds."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
