"""The streams of the ingest process once they have proved themselves: who may enter, and what hosts tell."""

from __future__ import annotations

import collections
import dataclasses
import enum
import re
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from seedbed import strict_json
from seedbed.actors.actor import MESSAGE_BYTES
from seedbed.actors.seats import Owner, Seat, Seats
from seedbed.actors.slots import slot_layout, spec_from_json
from seedbed.actors.wire import (
    CONTROL_BYTES,
    LEARNER,
    SILENCE_S,
    Beat,
    Kind,
    StepCodec,
    beat_frame,
    read_beat,
)
from seedbed.envs.host import registry, versions
from seedbed.streams.handshake import Place
from seedbed.streams.messages import ProtocolError, read_fields, require_fields
from seedbed.streams.server import Client, Server
from seedbed.types import EnvSpec

MOST_BYTES = 1 << 28
"""The largest timestep of a group that is taken."""
MOST_NOTES = 16
"""Messages for the learner's user that are kept."""
MOST_WAITING = 64
"""Proved streams that are kept besides two for each seat: that of its owner, and one that replaces it."""
_MOST_MESSAGES = 50  # besides timesteps, of a stream in a second
_MOST_INDEX = 1 << 12
_TELL_S = 10.0
_NOTE_CHARACTERS = 300
_INSTANCE = re.compile(r"[0-9a-f]{32}")
_DTYPES = {"bool", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


@dataclasses.dataclass(eq=False)
class _Visitor:
    """What a stream has told."""

    owner: Owner
    life: int
    step: int
    spec: EnvSpec | None = None  # None before its READY
    seat: Seat | None = None  # None also while the learner does not know its spec
    messages: int = 0  # besides timesteps, since the last beat


@dataclasses.dataclass
class _Host:
    """A host, and how many groups it has."""

    address: str
    groups: int = 0  # that had seats at the last beat
    told: int = 0  # of which the user knows


class Admission:
    """The streams of hosts, and the server through whose door they come. For one thread."""

    def __init__(self, job: dict[str, Any], seats: Seats) -> None:
        """Opens no door yet; raises SeedbedError if the run's key cannot be read."""
        self._job, self._seats = job, seats
        place, folder = Place(LEARNER, job["term"]), Path(job["credentials"])
        most = 2 * len(seats.all) + MOST_WAITING
        self.server = Server(self, place, Kind, folder, most_clients=most, same_numbers=2)
        self._versions = versions.of(registry.from_json(job["env"]))
        self._visitors: dict[Client, _Visitor] = {}
        self._codec: StepCodec | None = None
        self._spec: EnvSpec | None = None  # of the learner; None until it is known
        self._first_spec: dict[str, Any] | None = None
        self._hosts: dict[str, _Host] = {}  # by instance
        self._notes: collections.deque[str] = collections.deque(maxlen=MOST_NOTES)
        self._refused = self._reconnects = 0
        self._told_s: dict[str, float] = {}  # when the user was told of a refusal, by its code
        self._cpu_seconds = 0.0  # of all hosts, while they had seats
        self._past_bytes = [0, 0]  # received and sent, by streams that have ended

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Takes the HELLO of a host's group; returns what environments it has to make."""
        instance, index = said["role"], said["number"]
        if index >= _MOST_INDEX or not _INSTANCE.fullmatch(instance):
            raise ProtocolError("there is no such host or group")
        told = require_fields(said, life=int, step=int)
        self._visitors[client] = _Visitor(Owner(instance, index), told["life"], told["step"])
        client.connection.limit = CONTROL_BYTES
        self._hosts.setdefault(instance, _Host(client.origin))
        job = self._job
        seeds = np.random.SeedSequence([job["seed"], job["term"], int(instance, 16)])
        seed = int(seeds.generate_state(1)[0])
        return {name: job[name] for name in ("env", "num_envs", "timeout_s")} | {"seed": seed}

    def take(self, client: Client, kind: enum.IntEnum, body: memoryview) -> None:
        """Takes a message; raises ProtocolError and ConnectionError."""
        visitor = self._visitors[client]
        seat = visitor.seat
        if kind is Kind.STEP and seat is not None and self._codec is not None:
            seat.arrive(self._codec, body)
            return
        visitor.messages += 1
        if visitor.messages > _MOST_MESSAGES:
            raise ProtocolError(f"more than {_MOST_MESSAGES} messages came in a second")
        if kind is Kind.READY and visitor.spec is None:
            self._ready(client, visitor, body)
        elif kind is Kind.BEAT:
            self._heard(visitor, read_beat(body))
        elif kind is Kind.LEAVE:
            self._let_go(client, read_fields(kind, body, text=str)["text"])
        elif kind is Kind.ANEW and seat is not None and not body:
            client.connection.send(seat.begin(seat.end.begin_anew()))
        else:
            raise ProtocolError(f"{kind.name} came out of turn")

    def _ready(self, client: Client, visitor: _Visitor, body: memoryview) -> None:
        said = read_fields(Kind.READY, body, spec=dict, versions=dict)
        try:
            versions.require_same(self._versions, said["versions"])
        except versions.VersionError as error:
            raise ProtocolError(str(error), "version") from None
        visitor.spec = _checked_spec(said["spec"], self._job["num_envs"])
        if self._codec is not None:
            self._begin(client, visitor)
        elif self._first_spec is None:
            self._first_spec = said["spec"]

    def _let_go(self, client: Client, text: str) -> None:
        """Frees the places of a host that leaves, and ends its streams, this one by ConnectionError."""
        instance = client.role
        many = self._many(self._seats.by_host()[instance])
        self.note(f"actors of {client.origin} have left{many}" + (f": {text}" if text else ""))
        self._hosts.pop(instance, None)
        for other in self._seats.free(instance):
            if other is not client:
                self.server.end(other)
        raise ConnectionError("the host has left")

    def take_first_spec(self) -> dict[str, Any] | None:
        """Returns the first spec that an actor has told, once; None if there is none."""
        spec, self._first_spec = self._first_spec, {} if self._first_spec else self._first_spec
        return spec or None

    def begin_all(self, codec: StepCodec, spec: dict[str, Any]) -> None:
        """Begins the streams that have waited for the learner's spec."""
        self._codec, self._spec = codec, spec_from_json(spec)
        for client, visitor in list(self._visitors.items()):
            if visitor.spec is not None and visitor.seat is None:
                try:
                    self._begin(client, visitor)
                    self.server.watch(client)
                except ProtocolError as error:
                    self.server.refuse(client, error)
                except ConnectionError:
                    self.server.end(client)

    def _begin(self, client: Client, visitor: _Visitor) -> None:
        if visitor.spec != self._spec:
            raise ProtocolError(
                f"the environments have another spec, {visitor.spec}, than the run's, {self._spec}",
                "spec",
            )
        now_s = time.monotonic()
        taken = self._seats.take(visitor.owner, visitor.life, visitor.step, now_s)
        if taken is None:
            raise ProtocolError(
                f"all {len(self._seats.all)} groups of the run have their environments "
                "(--stream-groups is the number of groups)",
                "full",
            )
        visitor.seat, begin = taken
        visitor.seat.client = client
        self._reconnects += visitor.step > 0
        assert self._codec is not None
        client.connection.limit = self._codec.limit
        client.connection.send(visitor.seat.begin(begin))

    def _heard(self, visitor: _Visitor, beat: Beat) -> None:
        if (seat := visitor.seat) is None:
            return
        # The first beat of an owner tells of seconds that another process or seat may have counted.
        if seat.beat is not None:
            self._cpu_seconds += max(0.0, beat.cpu_seconds - seat.beat.cpu_seconds)
        seat.beat = beat

    def leave(self, client: Client, refusal: ProtocolError | None) -> None:
        """Forgets a stream that has ended; a refusal is counted, and told to the learner's user."""
        connection, visitor = client.connection, self._visitors.pop(client, None)
        self._past_bytes[0] += connection.received_bytes
        self._past_bytes[1] += connection.sent_bytes
        if visitor is not None and visitor.seat is not None and visitor.seat.client is client:
            visitor.seat.leave(time.monotonic())
        if refusal is None:
            return
        self._refused += 1
        # A flood of strangers is counted, and told of from time to time.
        now_s, told_s = time.monotonic(), self._told_s.get(refusal.code, -_TELL_S)
        if (client.known and refusal.code != "full") or now_s > told_s + _TELL_S:
            self._told_s[refusal.code] = now_s
            cause = f" ({refusal.__cause__!r})" if refusal.__cause__ is not None else ""
            self.note(f"refused a stream from {client.origin}: {refusal}{cause}")

    def beat(self, now_s: float) -> None:
        """Ends silent streams, tells the others that this process lives, and frees seats that are lost."""
        for client, visitor in list(self._visitors.items()):
            visitor.messages = 0
            if now_s > client.connection.heard_s + SILENCE_S:
                self.server.end(client)
            elif client.connection.idle:
                self.server.send(client, beat_frame())
        self._seats.expire(now_s)
        self._follow_hosts()

    def _follow_hosts(self) -> None:
        """Tells of hosts that have had their groups for two beats, and of those that are gone."""
        counts = self._seats.by_host()
        here = {visitor.owner.instance for visitor in self._visitors.values()}
        for instance, host in list(self._hosts.items()):
            settled, host.groups = counts[instance] == host.groups, counts[instance]
            if settled and host.groups not in (0, host.told):
                host.told = host.groups
                self.note(f"actors of {host.address} are here{self._many(host.told)}")
            if not host.groups and instance not in here:
                del self._hosts[instance]
                if host.told:
                    self.note(f"actors of {host.address} are gone{self._many(host.told)}")

    def _many(self, groups: int) -> str:
        """Returns the numbers of groups and environments in brackets; nothing for no group."""
        return (
            f" ({groups} groups, {groups * self._job['num_envs']} environments)" if groups else ""
        )

    def note(self, text: str) -> None:
        """Keeps a message for the learner's user, whose terminal must not be at a stranger's command."""
        plain = "".join(c if c.isprintable() else " " for c in text)
        self._notes.append(plain[:_NOTE_CHARACTERS])

    def take_notes(self) -> list[str]:
        """Returns the messages for the learner's user, each once."""
        notes, self._notes = list(self._notes), collections.deque(maxlen=self._notes.maxlen)
        return notes

    def report(self) -> dict[str, float]:
        """Returns figures about hosts and streams; counts are since the start of the process."""
        streams = [client.connection for client in self.server.clients.values()]
        seated = [seat for seat in self._seats.all if seat.client is not None]
        beats = [seat.beat or Beat() for seat in seated]
        waits = sorted(self._seats.latencies)
        self._seats.latencies.clear()
        stream_s, waited_s = self._seats.times(time.monotonic())
        return {
            "hosts": len(self._hosts),
            "streams": len(seated),
            "reconnects": self._reconnects,
            "refused": self._refused,
            "steps": sum(seat.published for seat in self._seats.all),
            "received_bytes": self._past_bytes[0] + sum(each.received_bytes for each in streams),
            "sent_bytes": self._past_bytes[1] + sum(each.sent_bytes for each in streams),
            "cpu_seconds": self._cpu_seconds,
            "stream_seconds": stream_s,
            "waited_seconds": waited_s,
            "answer_p50_s": waits[len(waits) // 2] if waits else 0.0,
            "answer_p99_s": waits[int(0.99 * len(waits))] if waits else 0.0,
            "action_p50_s": statistics.median([beat.p50_s for beat in beats] or [0.0]),
            "action_p99_s": max([beat.p99_s for beat in beats], default=0.0),
        }


def _checked_spec(data: dict[str, Any], num_envs: int) -> EnvSpec:
    """Reads a spec that a stranger sent; raises ProtocolError if its arrays cannot be, or are too large."""
    try:
        spec = spec_from_json(data)
        layout = slot_layout(spec, num_envs)
    except Exception as error:
        raise ProtocolError(f"the spec cannot be read: {error}", "spec") from None
    names = {array.dtype for array in layout.arrays}
    if not names <= _DTYPES or any(d < 0 for array in layout.arrays for d in array.shape):
        raise ProtocolError(f"the spec has arrays that cannot be sent: {names - _DTYPES}", "spec")
    if len(strict_json.dumps({"spec": data})) > MESSAGE_BYTES:
        raise ProtocolError("the spec is too long", "spec")
    if layout.size > MOST_BYTES:
        raise ProtocolError(f"a timestep would have {layout.size} bytes", "spec")
    return spec
