"""Clients that no honest actor would be: each ends its own stream, and nobody else's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import lz4.block
import numpy as np
import psutil
import pytest

from seedbed import trees
from seedbed.actors import credentials, reception, wire
from seedbed.actors.credentials import ActorKey
from seedbed.actors.slots import slot_layout, spec_to_json
from seedbed.actors.wire import Kind, StepCodec
from seedbed.envs.host import versions
from test_streams import Net, progress
from test_transport import counting


class Refused(Exception):
    """The learner has said no, or has closed the door."""


class Client:
    """One end of a stream that does what a test tells it; every call waits."""

    def __init__(self, one: Net, key: ActorKey | None = None, tls: bool = True) -> None:
        self.one, self.key = one, key or ActorKey.read(one.folder / credentials.KEY)
        self.socket = socket.create_connection(("127.0.0.1", one.port()), timeout=10)
        if tls:
            self.socket = self.key.context().wrap_socket(self.socket, server_hostname="seedbed")

    def send(self, frame: bytes) -> None:
        self.socket.sendall(frame)

    def read(self) -> tuple[Kind, bytes]:
        """Reads the next message but heartbeats, while the learner works; raises ConnectionError."""
        while True:
            header = wire.read_header(self._exactly(wire.HEADER_BYTES), 1 << 30, wire.Kind)
            body = self._exactly(header.length)
            if header.kind is not Kind.BEAT:
                return header.kind, body

    def _exactly(self, count: int) -> bytes:
        self.socket.settimeout(0.02)
        data, deadline = b"", time.monotonic() + 20
        while len(data) < count:
            assert time.monotonic() < deadline
            with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
                got = self.socket.recv(count - len(data))
                if not got:
                    raise ConnectionResetError
                data += got
            self.one.learner.turn(0.0)
        return data

    def hello(self, instance: str = "", index: int = 0, **changes: object) -> bytes:
        """Answers the challenge; returns the frame of the HELLO."""
        kind, body = self.read()
        assert kind is Kind.CHALLENGE
        said = json.loads(body)
        fields = {
            "version": said["version"],
            "instance": instance or secrets.token_hex(16),
            "index": index,
            "life": 0,
            "step": 0,
            **changes,
        }
        proof = self.key.proof(bytes.fromhex(said["nonce"]), said["term"], fields)
        frame = wire.json_frame(Kind.HELLO, **fields, proof=proof)
        self.send(frame)
        return frame

    def enter(self, **hello: object) -> tuple[int, StepCodec]:
        """Goes as far as BEGIN; returns the life."""
        self.hello(**hello)  # type: ignore[arg-type]
        kind, _ = self.read()
        assert kind is Kind.WELCOME
        spec = self.one.pool.spec if self.one.pool.layout else None
        assert spec is not None, "an honest host is there first"
        self.send(wire.json_frame(Kind.READY, spec=spec_to_json(spec), versions={}))
        kind, body = self.read()
        if kind is Kind.REFUSE:
            raise Refused(body)
        assert kind is Kind.BEGIN, body
        return wire.read_begin(memoryview(body))[0], StepCodec(slot_layout(spec, 2))

    def refused(self) -> tuple[str, str]:
        """Reads the refusal that ends the stream; returns its code and text."""
        kind, body = self.read()
        assert kind is Kind.REFUSE, (kind, body)
        said = json.loads(body)
        with pytest.raises(ConnectionError):
            self.read()
        return said["code"], said["text"]

    def ended(self) -> bool:
        """Whether the stream ends without a word."""
        try:
            self.read()
        except (ConnectionError, ssl.SSLError, OSError):
            return True
        return False


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    """A learner with an honest host, and places for others."""
    one = Net(tmp_path_factory.mktemp("net"), counting(), groups=64)
    try:
        one.start_host()
        progress(one, range(2))
        yield one
    finally:
        one.close()


@pytest.fixture(autouse=True)
def the_honest_host_goes_on(request: pytest.FixtureRequest):
    """After each test the honest host is in its lives and goes on, in an ingest process of its size."""
    one: Net | None = request.getfixturevalue("busy") if "busy" in request.fixturenames else None
    if one is None:
        yield
        return
    lives, pid = {g: one.learner.lives[g] for g in range(2)}, one.pool.pids()[0]
    size = psutil.Process(pid).memory_info().rss
    yield
    steps = list(one.learner.steps)
    progress(one, range(2), max(steps) + 20)
    assert {g: one.learner.lives[g] for g in range(2)} == lives
    assert one.pool.pids()[0] == pid
    assert psutil.Process(pid).memory_info().rss < size + 20e6


def other_key(one: Net, certificate: bool) -> ActorKey:
    """A key with another secret, and with another certificate or the run's own."""
    folder = one.folder / "other"
    made = credentials.ensure_credentials(folder)
    return (
        made
        if certificate
        else ActorKey(ActorKey.read(one.folder / credentials.KEY).certificate, made.secret)
    )


def test_a_wrong_key_is_refused(busy: Net) -> None:
    client = Client(busy, other_key(busy, certificate=False))
    client.hello()
    assert client.refused() == ("key", "the key is not this run's")
    with pytest.raises(ssl.SSLCertVerificationError):
        Client(busy, other_key(busy, certificate=True))


def test_no_key_and_no_tls_get_nothing(busy: Net) -> None:
    client = Client(busy)
    assert client.read()[0] is Kind.CHALLENGE
    client.send(wire.json_frame(Kind.READY, spec={}, versions={}))
    assert client.refused()[0] == "protocol"
    plain = Client(busy, tls=False)
    plain.send(wire.json_frame(Kind.HELLO, proof=""))
    assert plain.ended()
    http = Client(busy, tls=False)
    http.send(b"GET / HTTP/1.1\r\n\r\n")
    assert http.ended()


def test_a_handshake_cannot_be_used_again(busy: Net) -> None:
    recorded = Client(busy).hello()
    client = Client(busy)
    assert client.read()[0] is Kind.CHALLENGE
    client.send(recorded)
    assert client.refused()[0] == "key"


def test_a_stream_speaks_for_its_own_group_only(busy: Net) -> None:
    client = Client(busy)
    life, codec = client.enter()
    zeros = [np.zeros_like(leaf) for leaf in trees.leaves(busy.pool.slots[0].timestep)]
    client.send(codec.step(life + 1, 1, zeros))
    code, text = client.refused()
    assert code == "protocol" and "timestep 1 of life" in text
    # Nor can it take a place: instances are the hosts' secrets, and an unknown one gets a place of its own.
    other = Client(busy)
    assert other.enter(life=busy.learner.lives[0], step=busy.learner.steps[0])[0] >= 1


def test_timesteps_that_nobody_asked_for_are_refused(busy: Net) -> None:
    client = Client(busy)
    life, codec = client.enter()
    zeros = [np.zeros_like(leaf) for leaf in trees.leaves(busy.pool.slots[0].timestep)]
    client.send(codec.step(life, 2, zeros))
    assert client.refused()[0] == "protocol"


def bodies(codec: StepCodec, life: int) -> dict[str, bytes]:
    head = struct.Struct("<qq?")
    bomb = lz4.block.compress(bytes(1 << 24), store_size=False)
    return {
        "bomb": wire.frame(Kind.STEP, head.pack(life, 1, True), bomb),
        "too short": wire.frame(Kind.STEP, head.pack(life, 1, False), b"x"),
        "too long": struct.pack("<2sBBII", b"Sb", wire.VERSION, Kind.STEP, (1 << 32) - 1, 0),
        "other version": struct.pack("<2sBBII", b"Sb", wire.VERSION + 1, Kind.STEP, 10, 0),
        "unknown kind": struct.pack("<2sBBII", b"Sb", wire.VERSION, 99, 10, 0),
        "another's message": wire.json_frame(Kind.WELCOME),
        "damaged": wire.frame(Kind.STEP, head.pack(life, 1, False), b"x" * 100)[:-1] + b"y",
        "beat": wire.frame(Kind.BEAT, struct.pack("<qddd", -1, 0, 0, 0)),
        "flood of beats": wire.beat_frame() * 60,
    }


@pytest.mark.parametrize("name", list(bodies(StepCodec.__new__(StepCodec), 1)))
def test_broken_messages_end_their_stream(busy: Net, name: str) -> None:
    client = Client(busy)
    life, codec = client.enter()
    client.send(bodies(codec, life)[name])
    assert client.refused()[0] == "protocol"


@pytest.mark.parametrize("length", [wire.HELLO_BYTES + 1, (1 << 32) - 1])
def test_a_stranger_gets_no_memory(busy: Net, length: int) -> None:
    client = Client(busy)
    client.send(struct.pack("<2sBBII", b"Sb", wire.VERSION, Kind.HELLO, length, 0) + b"x" * 100)
    kind, _ = client.read()
    assert kind is Kind.CHALLENGE
    assert "at most 4096" in client.refused()[1]


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {
            "observation": {"shape": [1 << 40], "dtype": "uint8"},
            "action": {"kind": "Discrete", "n": 2},
        },
        {"observation": {"shape": [2], "dtype": "object"}, "action": {"kind": "Discrete", "n": 2}},
        {"observation": {"shape": [-2], "dtype": "uint8"}, "action": {"kind": "Discrete", "n": 2}},
        {"observation": {"shape": [2], "dtype": "uint8"}, "action": {"kind": "Discrete", "n": 2}},
        {"observation": {"shape": ["a"], "dtype": 3}, "action": {"kind": "Box"}},
        {"observation": {"dict": [1]}, "action": {"kind": "Discrete", "n": 2}},
        {
            "observation": {"shape": [1 << 32, 1 << 32], "dtype": "uint8"},
            "action": {"kind": "Discrete", "n": 2},
        },
    ],
)
def test_another_spec_is_refused(busy: Net, spec: dict) -> None:
    client = Client(busy)
    client.hello()
    assert client.read()[0] is Kind.WELCOME
    client.send(wire.json_frame(Kind.READY, spec=spec, versions={}))
    assert client.refused()[0] == "spec"


@pytest.mark.parametrize("proof", ["\ud800", "é" * 64, "", "0" * 64])
def test_a_proof_that_is_none_is_refused(busy: Net, proof: str) -> None:
    client = Client(busy)
    assert client.read()[0] is Kind.CHALLENGE
    fields = {"version": "1", "instance": "a" * 32, "index": 0, "life": 0, "step": 0}
    client.send(wire.json_frame(Kind.HELLO, **fields, proof=proof))
    assert client.refused()[0] == "key"


def test_what_a_host_says_does_not_command_the_terminal(busy: Net) -> None:
    busy.pool.take_notices()
    client = Client(busy)
    client.enter()
    client.send(wire.json_frame(Kind.LEAVE, text="\x1b[2J\nforged line " + "é" * 20_000))
    assert client.ended()
    found: list[str] = []

    def told() -> bool:
        found.extend(busy.pool.take_notices())
        return any("have left" in each for each in found)

    busy.learner.run(told)
    (note,) = [each for each in found if "have left" in each]
    assert note.isprintable() and "forged line" in note and len(note) <= 300


def test_a_host_that_leaves_frees_its_places(busy: Net) -> None:
    before, instance = len(busy.pool.members), secrets.token_hex(16)
    clients = [Client(busy) for _ in range(20)]
    for index, client in enumerate(clients):
        client.enter(instance=instance, index=index)
    busy.learner.run(lambda: len(busy.pool.members) > before + 10)
    clients[0].send(wire.json_frame(Kind.LEAVE, text=""))
    assert all(client.ended() for client in clients)
    # At once, and not when the seats of lost streams are given up; other tests' seats are, meanwhile.
    busy.learner.run(lambda: len(busy.pool.members) <= before)


def test_seconds_of_before_a_seat_are_not_counted_again(busy: Net) -> None:
    """As those of a host that comes back to another ingest process, or after its seat was given up."""
    before = busy.remote.report()["cpu_seconds"]
    client = Client(busy)
    client.enter()
    for seconds in (1000.0, 1300.0):
        client.send(wire.beat_frame(wire.Beat(cpu_seconds=seconds)))
    busy.learner.run(lambda: busy.remote.report()["cpu_seconds"] >= before + 300)
    assert busy.remote.report()["cpu_seconds"] < before + 400


def test_no_more_streams_are_kept_than_have_a_use(tmp_path: Path) -> None:
    one = Net(tmp_path, counting(), groups=2)
    most, clients = 2 * 2 + reception.MOST_WAITING, []
    try:
        one.start_host()
        progress(one, range(2))
        # Two are the host's.
        for _ in range(most - 2):
            clients.append(Client(one))
            clients[-1].hello()
            assert clients[-1].read()[0] is Kind.WELCOME
        late = Client(one)
        late.hello()
        assert late.refused() == ("full", f"the run has {most} streams, and takes no more")
        clients.pop().socket.close()
        progress(one, range(2), max(one.learner.steps) + 20)
        late = Client(one)
        late.hello()
        assert late.read()[0] is Kind.WELCOME
    finally:
        one.close()


def test_other_versions_are_refused_by_name(busy: Net) -> None:
    client = Client(busy)
    client.hello(version="9.9.9")
    code, text = client.refused()
    assert code == "version" and "seedbed is 9.9.9 here and 0.1.0 at the learner" in text
    name = Path(__file__).parent / "counting_environment.py"
    digest = hashlib.sha256(name.read_bytes()).hexdigest()
    for told, ours in (
        ({"gymnasium": "0.1.2"}, "gymnasium is 0.1.2"),
        ({"file counting_environment": "ab"}, digest[:12]),
    ):
        client = Client(busy)
        client.hello()
        assert client.read()[0] is Kind.WELCOME
        client.send(wire.json_frame(Kind.READY, spec={}, versions=told))
        code, text = client.refused()
        assert code == "version" and ours in text


def test_only_third_numbers_may_differ() -> None:
    versions.require_same({"a": "1.2.3", "b": "1"}, {"a": "1.2.9", "c": "7"})
    with pytest.raises(versions.VersionError, match="a is 1.3.3 here and 1.2.3 at the learner"):
        versions.require_same({"a": "1.2.3"}, {"a": "1.3.3"})
    with pytest.raises(versions.VersionError, match="ROM pong differs"):
        versions.require_same({"ROM pong": "x"}, {"ROM pong": "y"})


def test_a_client_that_says_nothing_is_ended(busy: Net) -> None:
    started = time.monotonic()
    silent, slow = Client(busy), Client(busy, tls=False)
    slow.send(b"\x16\x03\x01")  # the first bytes of TLS
    assert silent.read()[0] is Kind.CHALLENGE
    assert silent.ended() and slow.ended()
    assert 8 < time.monotonic() - started < 16


def test_a_flood_of_connections_leaves_the_streams_alone(busy: Net) -> None:
    flood = []
    steps = list(busy.learner.steps)
    with contextlib.suppress(OSError):
        for _ in range(400):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", busy.port()))
            flood.append(each)
            if len(flood) % 20 == 0:
                busy.learner.turn(0.01)
    progress(busy, range(2), max(steps) + 200)
    for each in flood:
        each.close()
    assert np.subtract(busy.learner.steps, steps)[:2].min() > 150
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ConnectionError, Refused):
            assert Client(busy).enter()[0]
            return
    raise AssertionError("nobody can enter any more")
