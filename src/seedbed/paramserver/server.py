"""How a role serves others: streams from its own machine and, if it listens, from others.

A stream begins as that of an actor does (docs/protocol.md): the server sends a nonce, and the client proves
that it knows the run's secret. From elsewhere it comes over TLS, which proves who the server is. From this
machine it comes through a Unix socket, whose name anybody may take once its role has died: there both ends
prove themselves first (`knock_proofs`), and then the client shares its memory.
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
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seedbed import strict_json
from seedbed.actors.admission import Complaints, Door
from seedbed.actors.connection import Connection
from seedbed.actors.credentials import KEY, ActorKey, learner_context
from seedbed.actors.wire import ProtocolError, require_fields
from seedbed.envs.host.versions import package_version
from seedbed.paramserver.directory import Address, this_machine
from seedbed.paramserver.messages import CONTROL_BYTES, Blocks, Kind, Message, pack, unpack
from seedbed.types import SeedbedError

SEEDBED = package_version("seedbed") or "unknown"
"""The version of this package, which both ends tell."""
_MOST_CLIENTS = 1 << 10  # that have proved themselves
NONCE_BYTES = PROOF_BYTES = 32
"""The bytes of a nonce, and of a proof, before the frames of a stream within a machine."""


class Broken(Exception):
    """Raised by a handler whose state is lost: the process ends, and another one takes its place."""


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


class _Knock:
    """A client of this machine, before its frames. For the server's thread."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.expected = b""  # what the client has to send to prove itself, once the server has


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
        self._name = f"seedbed-{secrets.token_hex(16)}"
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.bind("\0" + self._name)
        doors, self.port = [Door(local, self._epoll)], 0
        if host is not None:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            remote = socket.socket(family, kind, protocol)
            remote.bind(address)
            doors.append(Door(remote, self._epoll))
            self.port = doors[-1].port
        self._doors = {door.fileno(): door for door in doors}
        self._knocks: dict[int, _Knock] = {}  # by descriptor
        self.clients: dict[int, Client] = {}  # by descriptor; strangers are among them
        self._events: dict[int, int] = {}
        self._complaints = Complaints()

    def address(self, hosts: tuple[tuple[str, int], ...]) -> Address:
        """Returns the address to announce; `hosts` are those for other machines."""
        return Address(self._number, os.getpid(), this_machine(), self._name, hosts)

    def serve(self, handler: Handler, timeout_s: float) -> None:
        """Waits at most so long for messages, and gives those that have come to the handler."""
        now_s = time.monotonic()
        shut_s = min(door.tend(now_s) for door in self._doors.values())
        for fd, events in self._epoll.poll(min(timeout_s, shut_s)):
            if fd in self._doors:
                self._accept(handler, self._doors[fd])
            elif fd in self._knocks:
                self._answer_knock(handler, fd)
            elif fd in self.clients:
                self._read(handler, self.clients[fd], events)
        now_s = time.monotonic()
        for door in self._doors.values():
            for fd in door.late(now_s):
                self._end_stranger(handler, fd)

    def _accept(self, handler: Handler, door: Door) -> None:
        if (taken := door.accept()) is None:
            return
        stream, victim = taken
        if victim is not None:
            self._end_stranger(handler, victim)
        fd = stream.fileno()
        try:
            if stream.family == socket.AF_UNIX:
                stream.setblocking(False)
                self._epoll.register(fd, select.EPOLLIN)
                self._knocks[fd] = _Knock(stream)
            else:
                keep_alive(stream)
                self._meet(Client(stream, self._context, -1))
        except OSError:  # it has gone
            self._forget(fd)
            stream.close()

    def _answer_knock(self, handler: Handler, fd: int) -> None:
        """Proves to a client of this machine who this is, and takes its memory once it has done the same."""
        knock = self._knocks[fd]
        stream = knock.stream
        try:
            if not knock.expected:
                nonce = stream.recv(NONCE_BYTES)
                if len(nonce) == NONCE_BYTES:
                    proof, knock.expected = knock_proofs(self._key, self._role, self._number, nonce)
                    stream.send(proof)
                    return
            # Its memory is not touched before it has proved itself.
            elif hmac.compare_digest(stream.recv(PROOF_BYTES, socket.MSG_PEEK), knock.expected):
                _, fds, _, _ = socket.recv_fds(stream, PROOF_BYTES, 1)
                self._drop_knock(fd)
                self._meet(Client(stream, None, fds[0] if fds else -1))
                return
        except OSError:  # it has gone
            pass
        self._end_stranger(handler, fd)

    def _drop_knock(self, fd: int) -> None:
        del self._knocks[fd]
        self._epoll.unregister(fd)

    def _end_stranger(self, handler: Handler, fd: int) -> None:
        self._forget(fd)
        if fd in self._knocks:
            stream = self._knocks[fd].stream
            self._drop_knock(fd)
            stream.close()
        elif fd in self.clients:
            self.end(handler, self.clients[fd])

    def _forget(self, fd: int) -> None:
        """Notes that a client is no stranger any more."""
        for door in self._doors.values():
            door.forget(fd)

    def _meet(self, client: Client) -> None:
        fd = client.connection.fileno()
        try:
            client.send(
                Kind.CHALLENGE,
                version=SEEDBED,
                role=self._role,
                number=self._number,
                nonce=client.nonce,
            )
            self._epoll.register(fd, client.connection.events)
        except OSError:
            self._forget(fd)
            client.close()
            return
        self.clients[fd], self._events[fd] = client, client.connection.events

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
        except Exception as error:
            # A failure of the role's own, such as a full disk, ends the role. A stranger can cause none.
            if client.known and isinstance(error, Broken | SeedbedError | OSError):
                raise
            self._complaints.tell()
            self.end(handler, client)

    def _hello(self, handler: Handler, client: Client, message: Message) -> None:
        said = dict(message.fields)
        if message.kind is not Kind.HELLO:
            raise ProtocolError(f"{message.kind.name} came instead of HELLO")
        told = require_fields(said, version=str, role=str, number=int, proof=str)
        proof = said.pop("proof")
        right = self._key.proof(bytes.fromhex(client.nonce), self._number, said)
        if not (proof.isascii() and hmac.compare_digest(proof, right)):
            raise ProtocolError("the key is not this run's", "key")
        if told["version"] != SEEDBED:
            raise ProtocolError(
                f"seedbed is {told['version']} there and {SEEDBED} here: install the same version",
                "version",
            )
        for other in list(self.clients.values()):
            if (other.role, other.number) == (told["role"], told["number"]):
                self.end(handler, other)
        known = sum(other.known for other in self.clients.values())
        if known >= _MOST_CLIENTS:
            raise ProtocolError(f"{self._role} has {known} clients, and takes no more", "full")
        self._forget(client.connection.fileno())
        client.connection.limit = CONTROL_BYTES
        fields = handler.greet(client, said)
        client.role, client.number = told["role"], told["number"]
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
            self._forget(fd)
            self._epoll.unregister(fd)
            if client.known:
                handler.leave(client)
        client.close()

    def close(self) -> None:
        """Ends all streams, and listens no more."""
        for client in self.clients.values():
            client.close()
        for knock in self._knocks.values():
            knock.stream.close()
        for door in self._doors.values():
            door.close()
        self._epoll.close()


def knock_proofs(key: ActorKey, role: str, number: int, nonce: bytes) -> tuple[bytes, bytes]:
    """Returns the proofs within a machine: the server's for a client's nonce, and then the client's."""
    mine = key.sign(b"seedbed role", strict_json.dumps([role, number, nonce.hex()]).encode())
    return mine, key.sign(b"seedbed client", mine)


def keep_alive(stream: socket.socket) -> None:
    """Lets the kernel end a stream whose other machine has not answered for about five seconds."""
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)
