"""A client's stream to a role: it finds the role, proves itself, and waits for answers."""

from __future__ import annotations

import os
import random
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from seedbed.actors.connection import Connection
from seedbed.actors.credentials import KEY, ActorKey
from seedbed.actors.names import Names
from seedbed.actors.wire import ProtocolError
from seedbed.paramserver.directory import Address, Directory, this_machine
from seedbed.paramserver.ledger import BookError
from seedbed.paramserver.messages import CONTROL_BYTES, Blocks, Kind, Message, pack, unpack
from seedbed.paramserver.server import SEEDBED, keep_alive
from seedbed.types import SeedbedError

BOOKS = "books"
"""The code of a refusal after which a learner goes on under another number."""
_CONNECT_S = 5.0
# Seconds between two tries, which double up to the second.
_RETRY_S, _LONGEST_RETRY_S = 0.02, 0.5
_LOOK_S = 0.1  # between two looks whether to stop


class Stopped(Exception):
    """Raised where a wait was given up, because this process is to end."""


class Caller:
    """The stream to one role, through all its connections. For one thread.

    After `connect` it is connected; a ConnectionError of any method means that it is not any more, and that
    `connect` is to be called again.
    """

    def __init__(
        self, directory: Directory, credentials: Path, role: str, stop: Callable[[], bool]
    ) -> None:
        """Takes the name of the role, such as `parameters-0`; waits are given up once `stop` returns True."""
        self.role = role
        self._directory, self._stop = directory, stop
        self._key = ActorKey.read(credentials / KEY)
        self._context = self._key.context()
        self._connection: Connection[Kind] | None = None
        self._memory = -1  # the descriptor of the blocks
        self._up_bytes = self._down_bytes = 0
        self.most_bytes = CONTROL_BYTES  # of a message that comes, but for `blocks.down`
        self.blocks = Blocks(0, 0)
        self._names = Names()
        self.last_error = ""  # why the last try to connect failed

    def make_room(self, up_bytes: int, down_bytes: int) -> None:
        """Takes memory for the blocks of both directions. Call it before `connect`."""
        self._memory = os.memfd_create("seedbed-blocks")
        os.ftruncate(self._memory, max(1, up_bytes + down_bytes))
        self._up_bytes, self._down_bytes = up_bytes, down_bytes
        self.blocks = Blocks(up_bytes, down_bytes, self._memory)

    @property
    def connected(self) -> bool:
        """Whether there is a stream."""
        return self._connection is not None

    def connect(self, hello: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Connects, tries again until it has succeeded, and returns the fields of the WELCOME.

        `hello` returns what the HELLO says besides who is the right one: `role` and `number` at least. Raises
        SeedbedError if the role refuses this process, and Stopped.
        """
        self.close()
        retry_s = _RETRY_S
        while True:
            if self._stop():
                raise Stopped
            try:
                address = self._directory.find(self.role)
                if address is None:
                    raise ConnectionError(f"{self.role} has told no address yet")
                return self._greet(self._open(address), address, hello())
            except (ConnectionError, OSError, ProtocolError) as error:
                self.last_error = str(error)
                self.close()
            time.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    def _open(self, address: Address) -> socket.socket:
        local = address.machine == this_machine()
        self.blocks.shared = local and self._memory >= 0
        if not local:
            error: OSError = ConnectionError(f"{self.role} does not listen for other machines")
            for host, port in address.hosts:
                if self._stop():
                    raise Stopped
                try:
                    return self._connected(host, port)
                except OSError as failure:
                    error = failure
            raise error
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.connect("\0" + address.socket)
            socket.send_fds(stream, [b"\0"], [self._memory] if self._memory >= 0 else [])
        except OSError:
            stream.close()
            raise
        return stream

    def _connected(self, host: str, port: int) -> socket.socket:
        """Returns a socket that is connected; raises OSError, also while a name is being looked up."""
        family, kind, number, _, address = self._names.find(host, port)[0]
        stream = socket.socket(family, kind, number)
        try:
            stream.settimeout(_CONNECT_S)
            stream.connect(address)
            keep_alive(stream)
        except OSError:
            stream.close()
            raise
        return stream

    def _greet(
        self, stream: socket.socket, address: Address, hello: dict[str, Any]
    ) -> dict[str, Any]:
        local = stream.family == socket.AF_UNIX
        self._connection = Connection(stream, None if local else self._context, Kind, server=False)
        self._connection.limit = self.most_bytes + self._down_bytes
        until_s = time.monotonic() + _CONNECT_S
        challenge = self._expect(Kind.CHALLENGE, until_s)
        if (challenge["role"], challenge["number"]) != (self.role, address.number):
            raise ConnectionError(f"another process than {self.role} has answered")
        said = {
            "version": SEEDBED,
            "up_bytes": self._up_bytes,
            "down_bytes": self._down_bytes,
            **hello,
        }
        proof = self._key.proof(bytes.fromhex(challenge["nonce"]), address.number, said)
        self.send(Kind.HELLO, **said, proof=proof)
        return self._expect(Kind.WELCOME, until_s)

    def _expect(self, kind: Kind, until_s: float) -> dict[str, Any]:
        message = self.receive(until_s)
        if message is None:
            raise ConnectionError(f"{self.role} does not answer")
        if message.kind is not kind:
            raise ProtocolError(f"{message.kind.name} came instead of {kind.name}")
        return message.fields

    def send(self, kind: Kind, block: np.ndarray | None = None, **fields: Any) -> None:
        """Sends a message, with a block behind it if it is given; raises ConnectionError.

        The connection keeps what the kernel does not take at once, and `receive` sends it.
        """
        connection = self._require()
        try:
            connection.send(pack(kind, fields, None if block is None else block.data))
        except ConnectionError:
            self.close()
            raise

    def send_up(self, kind: Kind, **fields: Any) -> None:
        """Sends a message with `blocks.up`, which only travels if it is not shared; as `send`."""
        self.send(kind, None if self.blocks.shared else self.blocks.up, **fields)

    def receive(self, until_s: float | None = None, wake: int = -1) -> Message | None:
        """Waits for the next message; returns None if none has come at `until_s`, on the monotonic clock.

        It returns None, too, if the eventfd `wake` was written to, which it reads. A block is in
        `blocks.down` if it is no part of the message. Raises ConnectionError if the stream has ended,
        SeedbedError if this process was refused, BookError if only its number was, and Stopped.
        """
        connection = self._require()
        try:
            while True:
                for kind, body in connection.receive():
                    message = unpack(kind, body)
                    if kind is Kind.REFUSE:
                        refusal = BookError if message.fields["code"] == BOOKS else SeedbedError
                        raise refusal(f"{self.role} refuses this process: {message.fields['text']}")
                    return message
                left_s = _LOOK_S if until_s is None else until_s - time.monotonic()
                if left_s <= 0:
                    return None
                if self._stop():
                    raise Stopped
                poll = select.poll()
                poll.register(connection.fileno(), connection.events)
                if wake >= 0:
                    poll.register(wake, select.POLLIN)
                ready = poll.poll(1000 * min(left_s, _LOOK_S))
                connection.flush()
                if any(fd == wake for fd, _ in ready):
                    os.eventfd_read(wake)
                    return None
        except ProtocolError as error:
            raise self._broken(error) from error
        except ConnectionError:
            self.close()
            raise

    def take_block(self, message: Message, size: int) -> np.ndarray:
        """Returns the first `size` bytes of `blocks.down`, where a message's block is, or is put now.

        Raises ConnectionError if it has another size.
        """
        try:
            return self.blocks.take(message, self.blocks.down[:size])
        except ProtocolError as error:
            raise self._broken(error) from error

    def _broken(self, error: ProtocolError) -> ConnectionError:
        """Ends a stream that breaks the protocol, and says so in this process's log."""
        self.close()
        sys.stderr.write(f"{self.role} breaks the protocol: {error}\n")
        return ConnectionError(str(error))

    def _require(self) -> Connection[Kind]:
        if self._connection is None:
            raise ConnectionError(f"there is no stream to {self.role}")
        return self._connection

    def close(self) -> None:
        """Ends the stream. A second call does nothing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
