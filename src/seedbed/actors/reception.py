"""The learner's end of streams before and beside their timesteps: who may enter, and what hosts tell."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import hmac
import re
import secrets
import statistics
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from seedbed import strict_json
from seedbed.actors.actor import MESSAGE_BYTES
from seedbed.actors.admission import Door
from seedbed.actors.connection import Connection
from seedbed.actors.credentials import ActorKey
from seedbed.actors.seats import Owner, Seat, Seats
from seedbed.actors.slots import slot_layout, spec_from_json
from seedbed.actors.wire import (
    CONTROL_BYTES,
    Beat,
    Kind,
    ProtocolError,
    StepCodec,
    beat_frame,
    json_frame,
    read_beat,
    read_json,
)
from seedbed.envs.host import registry, versions
from seedbed.types import EnvSpec

SILENCE_S = 5.0
"""Seconds without a byte after which a stream is given up."""
MOST_BYTES = 1 << 28
"""The largest timestep of a group that is taken."""
MOST_NOTES = 16
"""Messages for the learner's user that are kept."""
SEEDBED = versions.package_version("seedbed") or "unknown"
"""The version of this package, which both ends tell."""
MOST_WAITING = 64
"""Proved streams that are kept besides two for each seat: that of its owner, and one that replaces it."""
_MOST_MESSAGES = 50  # besides timesteps, of a stream in a second
_MOST_INDEX = 1 << 12
_TELL_S = 10.0
_NOTE_CHARACTERS = 300
_INSTANCE = re.compile(r"[0-9a-f]{32}")
_NONCE_BYTES = 32
_DTYPES = {"bool", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


class Stage(enum.Enum):
    """What a stream has to send next."""

    HELLO = enum.auto()
    READY = enum.auto()
    NOTHING = enum.auto()  # it waits until the learner knows the spec
    STEPS = enum.auto()


@dataclasses.dataclass(eq=False)
class _Visitor:
    """A stream, and what it has told."""

    connection: Connection[Kind]
    address: str
    nonce: bytes
    stage: Stage = Stage.HELLO
    owner: Owner = dataclasses.field(default_factory=lambda: Owner("", 0))
    life: int = 0
    step: int = 0
    spec: EnvSpec | None = None
    seat: Seat | None = None
    messages: int = 0  # besides timesteps, since the last beat


@dataclasses.dataclass
class _Host:
    """A host, and how many groups it has."""

    address: str
    groups: int = 0  # that had seats at the last beat
    told: int = 0  # of which the user knows


class Reception:
    """All streams by connection, from the first byte on. For one thread."""

    def __init__(self, job: dict[str, Any], key: ActorKey, seats: Seats, door: Door) -> None:
        """Takes the door through which new clients come."""
        self._job, self._key, self._seats, self._door = job, key, seats, door
        self._versions = versions.of(registry.from_json(job["env"]))
        self._visitors: dict[Connection[Kind], _Visitor] = {}
        self._codec: StepCodec | None = None
        self._spec: EnvSpec | None = None  # of the learner; None until it is known
        self._first_spec: dict[str, Any] | None = None
        self._hosts: dict[str, _Host] = {}  # by instance
        self._ended: list[Connection[Kind]] = []
        self._notes: collections.deque[str] = collections.deque(maxlen=MOST_NOTES)
        self.refused = self._reconnects = 0
        self._told_s: dict[str, float] = {}  # when the user was told of a refusal, by its code
        self._cpu_seconds = 0.0  # of all hosts, while they had seats
        self._past_bytes = [0, 0]  # received and sent, by streams that have ended

    def meet(self, connection: Connection[Kind], address: str) -> None:
        """Begins with a new client; raises ConnectionError if it has gone."""
        visitor = _Visitor(connection, address, secrets.token_bytes(_NONCE_BYTES))
        self._visitors[connection] = visitor
        connection.send(
            json_frame(
                Kind.CHALLENGE,
                version=SEEDBED,
                term=self._job["term"],
                nonce=visitor.nonce.hex(),
            )
        )

    def seat_of(self, connection: Connection[Kind]) -> Seat:
        """Returns the seat of a stream; raises ProtocolError if it has none yet."""
        seat = self._visitors[connection].seat
        if seat is None:
            raise ProtocolError("a timestep came before BEGIN")
        return seat

    def take(self, connection: Connection[Kind], kind: Kind, body: memoryview) -> None:
        """Takes any message but a timestep; raises ProtocolError and ConnectionError."""
        visitor = self._visitors[connection]
        visitor.messages += 1
        if visitor.messages > _MOST_MESSAGES:
            raise ProtocolError(f"more than {_MOST_MESSAGES} messages came in a second")
        if visitor.stage is Stage.HELLO:
            if kind is not Kind.HELLO:
                raise ProtocolError(f"{kind.name} came instead of HELLO")
            self._hello(visitor, body)
        elif kind is Kind.READY and visitor.stage is Stage.READY:
            self._ready(visitor, body)
        elif kind is Kind.BEAT:
            self._heard(visitor, read_beat(body))
        elif kind is Kind.LEAVE:
            text = read_json(body, text=str)["text"]
            many = self._many(self._seats.by_host()[visitor.owner.instance])
            self.note(
                f"actors of {visitor.address} have left{many}" + (f": {text}" if text else "")
            )
            self._hosts.pop(visitor.owner.instance, None)
            self._ended += [connection, *self._seats.free(visitor.owner.instance)]
        elif kind is Kind.ANEW and visitor.seat is not None and not body:
            connection.send(visitor.seat.begin(visitor.seat.end.begin_anew()))
        else:
            raise ProtocolError(f"{kind.name} came out of turn")

    def _hello(self, visitor: _Visitor, body: memoryview) -> None:
        said = read_json(body, version=str, instance=str, index=int, life=int, step=int, proof=str)
        proof = said.pop("proof")
        right = self._key.proof(visitor.nonce, self._job["term"], said)
        if not (proof.isascii() and hmac.compare_digest(proof, right)):
            raise ProtocolError("the key is not this run's", "key")
        if said["index"] >= _MOST_INDEX or not _INSTANCE.fullmatch(said["instance"]):
            raise ProtocolError("there is no such host or group")
        with _versions_agree():
            versions.require_same_release("seedbed", SEEDBED, said["version"])
        most = 2 * len(self._seats.all) + MOST_WAITING
        if len(self._visitors) - self._door.strangers >= most:
            raise ProtocolError(f"the run has {most} streams, and takes no more", "full")
        self._door.forget(visitor.connection.fileno())
        visitor.owner = Owner(said["instance"], said["index"])
        visitor.life, visitor.step = said["life"], said["step"]
        visitor.stage, visitor.connection.limit = Stage.READY, CONTROL_BYTES
        self._hosts.setdefault(visitor.owner.instance, _Host(visitor.address))
        job = self._job
        seeds = np.random.SeedSequence([job["seed"], job["term"], int(said["instance"], 16)])
        visitor.connection.send(
            json_frame(
                Kind.WELCOME,
                env=job["env"],
                num_envs=job["num_envs"],
                seed=int(seeds.generate_state(1)[0]),
                timeout_s=job["timeout_s"],
            )
        )

    def _ready(self, visitor: _Visitor, body: memoryview) -> None:
        said = read_json(body, spec=dict, versions=dict)
        with _versions_agree():
            versions.require_same(self._versions, said["versions"])
        visitor.spec = _checked_spec(said["spec"], self._job["num_envs"])
        visitor.stage = Stage.NOTHING
        if self._codec is not None:
            self._begin(visitor)
        elif self._first_spec is None:
            self._first_spec = said["spec"]

    def take_first_spec(self) -> dict[str, Any] | None:
        """Returns the first spec that an actor has told, once; None if there is none."""
        spec, self._first_spec = self._first_spec, {} if self._first_spec else self._first_spec
        return spec or None

    def begin_all(self, codec: StepCodec, spec: dict[str, Any]) -> Iterable[Connection[Kind]]:
        """Begins the streams that have waited for the learner's spec, and yields them."""
        self._codec, self._spec = codec, spec_from_json(spec)
        for visitor in list(self._visitors.values()):
            if visitor.stage is Stage.NOTHING:
                try:
                    self._begin(visitor)
                except ProtocolError as error:
                    self.refuse(visitor.connection, error)
                except ConnectionError:
                    self._ended.append(visitor.connection)
                yield visitor.connection

    def _begin(self, visitor: _Visitor) -> None:
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
        seat, begin = taken
        former, seat.connection = seat.connection, visitor.connection
        if former is not None:
            self._visitors[former].seat = None
            self._ended.append(former)
        self._reconnects += visitor.step > 0
        assert self._codec is not None
        visitor.seat, visitor.stage = seat, Stage.STEPS
        visitor.connection.limit = self._codec.limit
        visitor.connection.send(seat.begin(begin))

    def _heard(self, visitor: _Visitor, beat: Beat) -> None:
        if (seat := visitor.seat) is None:
            return
        # The first beat of an owner tells of seconds that another process or seat may have counted.
        if seat.beat is not None:
            self._cpu_seconds += max(0.0, beat.cpu_seconds - seat.beat.cpu_seconds)
        seat.beat = beat

    def refuse(self, connection: Connection[Kind], error: ProtocolError) -> None:
        """Tells a stream why it has to end, counts it, and ends it."""
        self.refused += 1
        visitor, now_s = self._visitors[connection], time.monotonic()
        # A flood of strangers is counted, and told of from time to time.
        known = visitor.stage is not Stage.HELLO
        told_s = self._told_s.get(error.code, -_TELL_S)
        if (known and error.code != "full") or now_s > told_s + _TELL_S:
            self._told_s[error.code] = now_s
            self.note(f"refused a stream from {visitor.address}: {error}")
        with contextlib.suppress(ConnectionError):
            connection.send(json_frame(Kind.REFUSE, code=error.code, text=str(error)))
        self._ended.append(connection)

    def leave(self, connection: Connection[Kind]) -> None:
        """Forgets a stream that has ended."""
        visitor = self._visitors.pop(connection, None)
        if visitor is None:
            return
        self._past_bytes[0] += connection.received_bytes
        self._past_bytes[1] += connection.sent_bytes
        if visitor.seat is not None and visitor.seat.connection is connection:
            visitor.seat.leave(time.monotonic())

    def take_ended(self) -> list[Connection[Kind]]:
        """Returns the streams that have to end now, each once."""
        ended, self._ended = self._ended, []
        return ended

    def silent(self, now_s: float) -> list[Connection[Kind]]:
        """Returns the streams that were silent for too long, or took too long to say who they are."""
        late = set(self._door.late(now_s))
        return [
            connection
            for connection, visitor in self._visitors.items()
            if (
                connection.fileno() in late
                if visitor.stage is Stage.HELLO
                else now_s > connection.heard_s + SILENCE_S
            )
        ]

    def beat(self) -> list[Connection[Kind]]:
        """Sends a heartbeat to every stream that takes one, and returns these streams."""
        beating = []
        for connection, visitor in self._visitors.items():
            visitor.messages = 0
            if visitor.stage is not Stage.HELLO and connection.idle:
                try:
                    connection.send(beat_frame())
                except ConnectionError:
                    self._ended.append(connection)
                beating.append(connection)
        self._follow_hosts()
        return beating

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

    def report(self, streams: Collection[Connection[Kind]]) -> dict[str, float]:
        """Returns figures about hosts and streams; counts are since the start of the process."""
        seated = [seat for seat in self._seats.all if seat.connection is not None]
        beats = [seat.beat or Beat() for seat in seated]
        waits = sorted(self._seats.latencies)
        self._seats.latencies.clear()
        stream_s, waited_s = self._seats.times(time.monotonic())
        return {
            "hosts": len(self._hosts),
            "streams": len(seated),
            "reconnects": self._reconnects,
            "refused": self.refused,
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


@contextlib.contextmanager
def _versions_agree() -> Iterator[None]:
    """Raises ProtocolError for a VersionError of the `with` block."""
    try:
        yield
    except versions.VersionError as error:
        raise ProtocolError(str(error), "version") from None


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
