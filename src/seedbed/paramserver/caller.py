"""A client's stream to a role: it finds the role, proves itself, and waits for answers."""

from __future__ import annotations

import os
import random
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from seedbed.paramserver.directory import Address, this_machine
from seedbed.paramserver.ledger import BookError
from seedbed.paramserver.messages import Kind
from seedbed.streams.connection import Connection
from seedbed.streams.credentials import KEY, ActorKey
from seedbed.streams.dns import Names
from seedbed.streams.handshake import FAULT, LOOK_S, PATIENCE_S, Challenge, Place, knock
from seedbed.streams.messages import (
    CONTROL_BYTES,
    Blocks,
    Handshake,
    Message,
    ProtocolError,
    pack,
    require_fields,
    unpack,
)
from seedbed.streams.reaching import connect_here, reach
from seedbed.terminal import tell
from seedbed.types import SeedbedError

BOOKS = "books"
"""The code of a refusal after which a learner goes on under another number."""
# Seconds for which a role that has sent its CHALLENGE may let its WELCOME wait.
_WELCOME_S = 5.0
# Seconds between two tries, which double up to the second.
_RETRY_S, _LONGEST_RETRY_S = 0.02, 0.5


class Stopped(Exception):
    """Raised where a wait was given up, because this process is to end."""


class Finder(Protocol):
    """A source of addresses: a directory, or what a user has given."""

    def find(self, role: str) -> Address | None:
        """Returns the address of a role, None if it is not known."""
        ...


class Caller:
    """The stream to one role, through all its connections. For one thread.

    After `connect` it is connected; a ConnectionError of any method means that it is not any more, and that
    `connect` is to be called again.
    """

    def __init__(
        self, directory: Finder, credentials: Path, role: str, stop: Callable[[], bool]
    ) -> None:
        """Takes the name of the role, such as `parameters-0`; waits are given up once `stop` returns True."""
        self.role = role
        self._directory, self._stop = directory, stop
        self._key = ActorKey.read(credentials / KEY)
        self._context = self._key.context()
        self._connection: Connection | None = None
        self._memory = -1  # the descriptor of the blocks
        self._up_bytes = self._down_bytes = 0
        self.most_bytes = CONTROL_BYTES  # of a message that comes, but for `blocks.down`
        self.blocks = Blocks(0, 0)
        self._names = Names()
        self._reached = ("", 0)  # the address of another machine at which the role was reached last
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
                return self._greet(address, hello)
            except (ConnectionError, OSError, ProtocolError) as error:
                self.last_error = str(error)
                self.close()
            time.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    def _greet(self, address: Address, hello: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Connects to a role that has told its address, and returns the fields of its WELCOME."""
        place = Place(self.role, address.number)
        local = address.machine == this_machine()
        self.blocks.shared = local and self._memory >= 0
        if local:
            stream = connect_here(address.socket)
            try:
                # Called now, as the process lives: the caller may end one that lives and does not answer.
                said = hello()
                if not knock(stream, self._key, place, self._memory, self._stop):
                    raise Stopped
                self._take(Connection(stream, None, Kind, server=False))
            except BaseException:
                stream.close()
                raise
            challenge = Challenge.read(self._expect(Handshake.CHALLENGE, PATIENCE_S), *place)
        else:
            hosts = sorted(address.hosts, key=lambda host: host != self._reached)
            reached = reach(place, hosts, self._names, self._context, Kind, self._stop)
            if reached is None:
                raise Stopped
            self._take(reached.connection)
            self._reached, challenge, said = reached.host, reached.challenge, hello()
        sizes = {"up_bytes": self._up_bytes, "down_bytes": self._down_bytes}
        self._send(challenge.answer(self._key, **sizes, **said))
        return self._expect(Handshake.WELCOME, _WELCOME_S).fields

    def _take(self, connection: Connection) -> None:
        self._connection = connection
        connection.limit = self.most_bytes + self._down_bytes

    def _expect(self, kind: Handshake, timeout_s: float) -> Message:
        message = self.receive(time.monotonic() + timeout_s)
        if message is None:
            raise ConnectionError(f"{self.role} does not answer")
        if message.kind is not kind:
            raise ProtocolError(f"{message.kind.name} came instead of {kind.name}")
        return message

    def send(self, kind: Kind, block: np.ndarray | None = None, **fields: Any) -> None:
        """Sends a message, with a block behind it if it is given; raises ConnectionError.

        The connection keeps what the kernel does not take at once, and `receive` sends it.
        """
        self._send(pack(kind, fields, None if block is None else block.data))

    def _send(self, frame: bytes) -> None:
        connection = self._require()
        try:
            connection.send(frame)
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
                    if kind is Handshake.REFUSE:
                        self._refused(**require_fields(message.fields, code=str, text=str))
                    return message
                left_s = LOOK_S if until_s is None else until_s - time.monotonic()
                if left_s <= 0:
                    return None
                if self._stop():
                    raise Stopped
                poll = select.poll()
                poll.register(connection.fileno(), connection.events)
                if wake >= 0:
                    poll.register(wake, select.POLLIN)
                ready = poll.poll(1000 * min(left_s, LOOK_S))
                connection.flush()
                if any(fd == wake for fd, _ in ready):
                    os.eventfd_read(wake)
                    return None
        except ProtocolError as error:
            raise self._broken(error) from error
        except ConnectionError:
            self.close()
            raise

    def _refused(self, code: str, text: str) -> NoReturn:
        if code == FAULT:
            raise ConnectionError(text)
        refusal = BookError if code == BOOKS else SeedbedError
        raise refusal(f"{self.role} refuses this process: {text}")

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
        tell(f"{self.role} breaks the protocol: {error}", sys.stderr)
        return ConnectionError(str(error))

    def _require(self) -> Connection:
        if self._connection is None:
            raise ConnectionError(f"there is no stream to {self.role}")
        return self._connection

    def release(self) -> None:
        """Ends the stream for good, and gives back the memory of the blocks."""
        self.close()
        self.blocks = Blocks(0, 0)
        if self._memory >= 0:
            os.close(self._memory)
        self._memory = -1

    def close(self) -> None:
        """Ends the stream. A second call does nothing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
