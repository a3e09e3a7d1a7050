"""The actor's end of one group's stream: connecting, the handshake, and the timesteps (docs/protocol.md)."""

from __future__ import annotations

import collections
import dataclasses
import enum
import errno
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from seedbed.actors.connection import Connection
from seedbed.actors.credentials import ActorKey
from seedbed.actors.lives import ActorEnd, Begin
from seedbed.actors.names import Names
from seedbed.actors.wire import (
    CONTROL_BYTES,
    Kind,
    ProtocolError,
    StepCodec,
    json_frame,
    read_begin,
    read_json,
)

SILENCE_S = 5.0
"""Seconds without a byte after which a stream is given up."""
RETRY_S = 2.0
"""The most seconds between two tries to connect."""
PATIENCE_S = 15.0
"""Seconds for which a connection may wait for its `CHALLENGE`."""
CONNECT_S = 3.0
"""Seconds for which an address may let a connection wait where there are others to try."""
_FIRST_RETRY_S = 0.1


class Stage(enum.Enum):
    """What a stream waits for."""

    RETRY = enum.auto()  # the time for another try
    CHALLENGE = enum.auto()
    WELCOME = enum.auto()
    SPEC = enum.auto()  # its own environments, which are being made
    BEGIN = enum.auto()
    STEPS = enum.auto()


@dataclasses.dataclass
class Identity:
    """What all streams of a host have in common."""

    key: ActorKey
    context: ssl.SSLContext | None  # None is plaintext
    version: str  # of this package
    instance: str  # 32 hexadecimal digits, drawn when the host starts
    term: int = 0  # the latest of a learner that a stream has met
    reached: tuple[str, int] = ("", 0)  # the address at which a stream has met the learner last
    stopped: str = ""  # what the learner has said last if its run was stopped
    names: Names = dataclasses.field(default_factory=Names)


class Refusal(Exception):
    """Raised if the learner refuses a stream and another try cannot help; the text is the learner's."""


class RunFinished(Exception):
    """Raised if the run has ended; the text is the learner's."""


class Link:
    """One group's stream through all its connections. For one thread.

    `welcomed` is called with the content of each WELCOME, and `acts` with what the group is to do.
    """

    def __init__(
        self,
        identity: Identity,
        number: int,
        addresses: Callable[[], Sequence[tuple[str, int]]],
    ) -> None:
        """`addresses` returns where the learner may be, the likeliest first; `number` is the group's."""
        self.number, self.end = number, ActorEnd()
        self.connection: Connection[Kind] | None = None
        self.stage = Stage.RETRY
        self.codec: StepCodec | None = None
        self.retry_at_s = 0.0
        self.last_error = ""  # where the last try failed, and why; "" after a BEGIN
        self.waits_for_place = False  # the run has no place for the group
        self.begins = 0  # streams that came as far as BEGIN
        self.welcome: dict[str, Any] | None = None  # what the learner wants
        self._identity, self._addresses, self._tries = identity, addresses, 0
        self._address = ("", 0)  # the newest that was tried
        self._others = False  # whether there are other addresses than that
        self._turns: collections.Counter[tuple[str, int]] = collections.Counter()

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which the stream, which there is, is to be given up."""
        if self.stage is not Stage.CHALLENGE:
            return SILENCE_S
        assert self.connection is not None
        return CONNECT_S if self._others and not self.connection.connected else PATIENCE_S

    def connect(self) -> None:
        """Begins to connect to the next address, or to the first one after it that does not fail at once."""
        addresses = self._in_turn()
        self._tries += 1
        # They do not all come back at the same moment.
        delay_s = min(RETRY_S, _FIRST_RETRY_S * 2 ** min(self._tries, 8))
        self.retry_at_s = time.monotonic() + delay_s * random.uniform(0.5, 1.0)
        errors = ["the run's folder names no address"] if not addresses else []
        for self._address in addresses:
            try:
                stream, others = self._begin_to_connect(*self._address)
                self._others = others or len(addresses) > 1
                self.connection = Connection(stream, self._identity.context, Kind, server=False)
                self.connection.limit, self.stage = CONTROL_BYTES, Stage.CHALLENGE
                return
            except (OSError, ConnectionError) as error:
                errors.append(f"{_named(self._address)}: {error}")
        self.last_error = errors[0]

    def _in_turn(self) -> list[tuple[str, int]]:
        """Returns the addresses from the next one on; every other time, the one that was reached is first."""
        addresses, reached = list(self._addresses()), self._identity.reached
        if reached not in addresses:
            turn = self._tries % max(1, len(addresses))
            return addresses[turn:] + addresses[:turn]
        if self._tries % 2 == 0:
            return [reached, *(address for address in addresses if address != reached)]
        turn = self._tries // 2 % len(addresses)
        return addresses[turn:] + addresses[:turn]

    def _begin_to_connect(self, host: str, port: int) -> tuple[socket.socket, bool]:
        """Returns a socket that connects, or has done so, and whether the name has other addresses.

        Raises OSError.
        """
        found = self._identity.names.find(host, port)
        # A name may have several addresses; each has its turn.
        family, kind, number, _, address = found[self._turns[host, port] % len(found)]
        self._turns[host, port] += 1
        stream = socket.socket(family, kind, number)
        stream.setblocking(False)
        code = stream.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            stream.close()
            raise OSError(code, os.strerror(code))
        return stream, len(found) > 1

    def take(self, kind: Kind, body: memoryview) -> Begin | None:
        """Takes a message of the handshake; returns a BEGIN.

        Raises ProtocolError and ConnectionError, for which the stream is to be dropped, Refusal if the
        learner will not have this actor, and RunFinished.
        """
        assert self.connection is not None
        if kind is Kind.REFUSE:
            said = read_json(body, code=str, text=str)
            if said["code"] == "full":
                raise ProtocolError(said["text"], "full")
            raise Refusal(said["text"])
        if kind is Kind.FINISH:
            said = read_json(body, text=str, over=bool)
            if said["over"]:
                raise RunFinished(said["text"])
            self._identity.stopped = said["text"]
            raise ProtocolError(said["text"])
        if kind is Kind.BEAT:
            return None
        if kind is Kind.CHALLENGE and self.stage is Stage.CHALLENGE:
            self._prove(read_json(body, version=str, term=int, nonce=str))
        elif kind is Kind.WELCOME and self.stage is Stage.WELCOME:
            self.welcome = read_json(body, env=dict, num_envs=int, seed=int, timeout_s=float)
            self.stage = Stage.SPEC
        elif kind is Kind.BEGIN and self.stage in (Stage.BEGIN, Stage.STEPS):
            self.stage, self._tries, self.last_error = Stage.STEPS, 0, ""
            self.waits_for_place = False
            self.begins += 1
            self._identity.reached = self._address
            return Begin(*read_begin(body))
        else:
            raise ProtocolError(f"{kind.name} came out of turn")
        return None

    def _prove(self, said: dict[str, Any]) -> None:
        assert self.connection is not None
        identity = self._identity
        if said["term"] < identity.term:
            raise ProtocolError(
                f"the learner is of term {said['term']}, and there is one of term {identity.term}"
            )
        identity.term = said["term"]
        try:
            nonce = bytes.fromhex(said["nonce"])
        except ValueError:
            raise ProtocolError("the learner's nonce is no number") from None
        hello = {
            "version": identity.version,
            "instance": identity.instance,
            "index": self.number,
            "life": self.end.life,
            "step": self.end.step,
        }
        proof = identity.key.proof(nonce, identity.term, hello)
        self.connection.send(json_frame(Kind.HELLO, **hello, proof=proof))
        self.stage = Stage.WELCOME

    def ready(self, codec: StepCodec, spec: dict[str, Any], versions: dict[str, str]) -> None:
        """Tells the learner that the environments are there; raises ConnectionError."""
        assert self.connection is not None and self.stage is Stage.SPEC
        self.codec, self.connection.limit = codec, codec.limit
        self.connection.send(json_frame(Kind.READY, spec=spec, versions=versions))
        self.stage = Stage.BEGIN

    def drop(self, why: str, full: bool = False) -> None:
        """Ends the stream; `retry_at_s` is when to connect again: not at once if the run is `full`."""
        if self.connection is not None:
            self.connection.close()
            if self.stage is Stage.STEPS:
                self.retry_at_s = time.monotonic() + random.uniform(0.0, _FIRST_RETRY_S)
            elif full:
                self.retry_at_s = time.monotonic() + RETRY_S
        self.waits_for_place = full
        self.connection, self.stage = None, Stage.RETRY
        self.last_error = f"{_named(self._address)}: {why}"
        self.end.leave()


def _named(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
