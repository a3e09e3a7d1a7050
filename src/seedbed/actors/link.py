"""The actor's end of one group's stream: connecting, the handshake, and the timesteps (docs/protocol.md)."""

from __future__ import annotations

import collections
import dataclasses
import enum
import random
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from seedbed.actors.lives import ActorEnd, Begin
from seedbed.actors.wire import CONTROL_BYTES, LEARNER, SILENCE_S, Kind, StepCodec, read_begin
from seedbed.streams.addresses import joined_address
from seedbed.streams.connection import Connection
from seedbed.streams.credentials import ActorKey
from seedbed.streams.dns import Names
from seedbed.streams.handshake import FAULT, PATIENCE_S, Challenge
from seedbed.streams.messages import Handshake, ProtocolError, pack, read_fields, unpack
from seedbed.streams.reaching import begin_to_connect

RETRY_S = 2.0
"""The most seconds between two tries to connect."""
CONNECT_S = 3.0
"""Seconds for which an address may let a connection wait where there are others to try."""
_FIRST_RETRY_S = 0.1


class Stage(enum.Enum):
    """The message or event that a stream waits for."""

    RETRY = enum.auto()  # the time for another try
    CHALLENGE = enum.auto()
    WELCOME = enum.auto()
    SPEC = enum.auto()  # its own environments, which are being made
    BEGIN = enum.auto()
    STEPS = enum.auto()


@dataclasses.dataclass
class Identity:
    """The parts that all streams of a host share."""

    key: ActorKey
    context: ssl.SSLContext | None  # None is plaintext
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
    """One group's stream through all its connections. It never waits. For one thread."""

    def __init__(
        self,
        identity: Identity,
        number: int,
        addresses: Callable[[], Sequence[tuple[str, int]]],
    ) -> None:
        """`addresses` returns where the learner may be, the likeliest first; `number` is the group's."""
        self.number, self.end = number, ActorEnd()
        self.connection: Connection | None = None
        self.stage = Stage.RETRY
        self.codec: StepCodec | None = None
        self.retry_at_s = 0.0
        self.last_error = ""  # where the last try failed, and why; "" after a BEGIN
        self.waits_for_place = False  # the run has no place for the group
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
                found = self._identity.names.find(*self._address)
                # A name may have several addresses; each has its turn.
                turn = self._turns[self._address] % len(found)
                self._turns[self._address] += 1
                self.connection = begin_to_connect(found[turn], self._identity.context, Kind)
                self.connection.limit, self.stage = CONTROL_BYTES, Stage.CHALLENGE
                self._others = len(found) > 1 or len(addresses) > 1
                return
            except OSError as error:
                errors.append(f"{joined_address(*self._address)}: {error}")
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

    def take(self, kind: enum.IntEnum, body: memoryview) -> Begin | None:
        """Takes a message of the handshake; returns a BEGIN.

        Raises ProtocolError and ConnectionError, for which the stream is to be dropped, Refusal if the
        learner will not have this actor, and RunFinished.
        """
        assert self.connection is not None
        if kind is Handshake.REFUSE:
            said = read_fields(kind, body, code=str, text=str)
            if said["code"] == "full":
                raise ProtocolError(said["text"], "full")
            if said["code"] == FAULT:
                raise ConnectionError(said["text"])
            raise Refusal(said["text"])
        if kind is Kind.FINISH:
            said = read_fields(kind, body, text=str, over=bool)
            if said["over"]:
                raise RunFinished(said["text"])
            self._identity.stopped = said["text"]
            raise ProtocolError(said["text"])
        if kind is Kind.BEAT:
            return None
        if self.stage is Stage.CHALLENGE:
            self._prove(Challenge.read(unpack(kind, body), LEARNER))
        elif kind is Handshake.WELCOME and self.stage is Stage.WELCOME:
            wanted = {"env": dict, "num_envs": int, "seed": int, "timeout_s": float}
            self.welcome = read_fields(kind, body, **wanted)
            self.stage = Stage.SPEC
        elif kind is Kind.BEGIN and self.stage in (Stage.BEGIN, Stage.STEPS):
            self.stage, self._tries, self.last_error = Stage.STEPS, 0, ""
            self.waits_for_place = False
            self._identity.reached = self._address
            return Begin(*read_begin(body))
        else:
            raise ProtocolError(f"{kind.name} came out of turn")
        return None

    def _prove(self, challenge: Challenge) -> None:
        assert self.connection is not None
        identity = self._identity
        if challenge.number < identity.term:
            raise ProtocolError(
                f"the learner is of term {challenge.number}, and there is one of term {identity.term}"
            )
        identity.term = challenge.number
        hello = {"role": identity.instance, "number": self.number}
        hello |= {"life": self.end.life, "step": self.end.step}
        self.connection.send(challenge.answer(identity.key, **hello))
        self.stage = Stage.WELCOME

    def ready(self, codec: StepCodec, spec: dict[str, Any], versions: dict[str, str]) -> None:
        """Tells the learner that the environments are there; raises ConnectionError."""
        assert self.connection is not None and self.stage is Stage.SPEC
        self.codec, self.connection.limit = codec, codec.limit
        self.connection.send(pack(Kind.READY, {"spec": spec, "versions": versions}))
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
        self.last_error = f"{joined_address(*self._address)}: {why}"
        self.end.leave()
