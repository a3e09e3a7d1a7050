"""Strangers at every port that the program opens: each ends its own stream, and nobody else's."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import lz4.block
import numpy as np
import pytest

from actor_pools import counting
from attackers import ROLES, Client, DoorPort, IngestPort, Refused, RolePort, header, hello
from hosts import Net, progress
from parameter_shards import Shards as ParameterShards
from parameter_shards import StubLearner, job_of
from replay_shards import Shards as ReplayShards
from seedbed import trees
from seedbed.actors import wire
from seedbed.actors.wire import Kind, StepCodec
from seedbed.agents.dqn import Dqn
from seedbed.envs.host import versions
from seedbed.envs.host.gym import FactoryEnv, GymEnv
from seedbed.paramserver import hosting
from seedbed.paramserver.placement import KINDS
from seedbed.paramserver.registration import Registrar
from seedbed.paramserver.role import Role
from seedbed.streams import credentials, door
from seedbed.streams.addresses import Listening
from seedbed.streams.credentials import ActorKey
from seedbed.streams.handshake import SEEDBED
from seedbed.streams.messages import HELLO_BYTES, VERSION, Handshake, frame, pack


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


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, int]]]:
    """By role, a run in which it is served in a thread, and the bytes that it sends its coordinator."""
    run, other = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("other")
    job = job_of(Dqn(hidden_sizes=(4,)), 1, host="127.0.0.1")
    shards, replay = ParameterShards(run, job), ReplayShards(other, listen="127.0.0.1")
    learner = StubLearner(shards, 0)
    host = Role(run, "host-1", 1)
    work = hosting.Hosting(host, run, hosting.facts(KINDS), ())
    thread = threading.Thread(target=host.serve, args=(work, Listening("127.0.0.1")))
    thread.start()
    sizes = (run, job.plan.state_layout(0).size), (other, 0), (run, 0), (run, 0)
    yield dict(zip(ROLES, sizes, strict=True))
    host.finish()
    thread.join()
    learner.end()
    replay.close()
    shards.close()


@pytest.fixture
def ingest(busy: Net) -> Iterator[IngestPort]:
    """The port of the learner; after each test the honest host goes on."""
    port = IngestPort(busy)
    yield port
    port.goes_on()


@pytest.fixture(scope="module")
def door_of_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorPort]:
    """The door of a coordinator."""
    run = tmp_path_factory.mktemp("door")
    credentials.ensure_credentials(run / credentials.FOLDER)
    registrar = Registrar(run, "127.0.0.1", 1, lambda name: None)
    yield DoorPort(run, registrar)
    registrar.close()


PORTS = ["ingest", "door", *(f"{role} {how}" for role in ROLES for how in ("TCP", "Unix"))]


@pytest.fixture(params=PORTS)
def port(
    request: pytest.FixtureRequest,
    busy: Net,
    roles: dict[str, tuple[Path, int]],
    door_of_hosts: DoorPort,
) -> Iterator[IngestPort | DoorPort | RolePort]:
    """Each port of the program; after each test its honest client goes on."""
    name, _, how = request.param.partition(" ")
    if name == "door":
        made = door_of_hosts
    else:
        made = IngestPort(busy) if name == "ingest" else RolePort(name, *roles[name], how == "Unix")
    yield made
    made.goes_on()


def rest_of(stream: socket.socket) -> bytes:
    """Reads what comes until the stream ends."""
    stream.settimeout(20)
    with contextlib.suppress(ConnectionError):
        return b"".join(iter(lambda: stream.recv(64), b""))
    return b""


def other_key(folder: Path, certificate: bool) -> ActorKey:
    """A key with another secret, and with another certificate or the run's own."""
    made = credentials.ensure_credentials(folder / "other")
    mine = ActorKey.read(folder / credentials.KEY)
    return made if certificate else ActorKey(mine.certificate, made.secret)


def noises(port: IngestPort | DoorPort | RolePort) -> dict[str, bytes]:
    """What no honest client says first, by what is wrong with it."""
    said = {"version": SEEDBED, **port.said()}
    nested = {n: b'{"x":' + b"[" * n + b"]" * n + b"}" for n in (33, 940, 985, 1900)}
    return {
        **{f"nested {depth} times": hello(text) for depth, text in nested.items()},
        "no text": hello(b"\xff\xfe"),
        "no object": hello(b"[]"),
        "nothing": hello(b"{}"),
        "cut short": frame(Handshake.HELLO, b"{}"),
        "longer than it is": frame(Handshake.HELLO, struct.pack("<I", 99), b"{}"),
        "out of turn": pack(port.kinds(7), {}),
        "the server's": pack(Handshake.WELCOME, said),
        "a list for text": pack(
            Handshake.HELLO, {"version": [], "role": {}, "number": 1, "proof": [], "x": None}
        ),
        **{
            f"the proof {proof}": pack(Handshake.HELLO, {**said, "proof": proof})
            for proof in ("\ud800", "é" * 64, "", "0" * 64)
        },
        "too long": header(Handshake.HELLO, HELLO_BYTES + 1) + b"x" * 100,
        "far too long": header(Handshake.HELLO, (1 << 32) - 1) + b"x" * 100,
        "another version": header(Handshake.HELLO, 10, VERSION + 1),
        "an unknown kind": header(99, 10),
        "no protocol": b"GET / HTTP/1.1\r\n\r\n",
    }


def test_what_a_stranger_says_ends_its_own_stream(port) -> None:
    for name, noise in noises(port).items():
        client = Client(port)
        client.challenged()
        client.send(noise)
        assert client.refused()[0] == ("key" if "proof" in name else "protocol"), name


# What JSON knows as a number, or Python takes for one, and is no count.
NUMBERS = ("Infinity", "-Infinity", "NaN", "1e999", "-1", "9" * 400, "true", "null", "1.5", '"1"')


def test_numbers_that_cannot_be_end_their_stream_also_with_the_key(port) -> None:
    for number in NUMBERS:
        client = Client(port)
        challenge = client.challenged()
        said = {"version": SEEDBED, **port.said(), "number": 0}
        text = json.dumps(said).replace('"number": 0', f'"number": {number}')
        with contextlib.suppress(ValueError):
            said = json.loads(text)
        proof = client.key.proof(bytes.fromhex(challenge.nonce), challenge.number, said)
        client.send(hello(text.replace("}", f', "proof": "{proof}"}}').encode()))
        assert client.refused()[0] == "protocol", number


def test_a_wrong_key_is_refused(port) -> None:
    with contextlib.ExitStack() as stack:
        if port.local:
            stack.enter_context(pytest.raises(ConnectionError, match="lacks the run's key"))
        client = Client(port, other_key(port.folder, certificate=False))
        client.hello()
        assert client.refused() == ("key", "the key is not this run's")
    if not port.local:
        with pytest.raises(ssl.SSLCertVerificationError):
            Client(port, other_key(port.folder, certificate=True))


def test_who_does_not_prove_itself_is_told_nothing(port) -> None:
    """Without TLS, or within the machine without a proof."""
    for said in (pack(Handshake.HELLO, {"proof": ""}), b"GET / HTTP/1.1\r\n\r\n"):
        plain = port.plain()
        plain.sendall(said.ljust(32)[: 32 if port.local else None])
        if port.local:
            assert len(plain.recv(64)) == 32, "the server proves itself first"
            plain.sendall(bytes(32))
        assert b"Sb" not in rest_of(plain)


def test_a_handshake_cannot_be_used_again(port) -> None:
    recorded = Client(port).hello()
    client = Client(port)
    client.challenged()
    client.send(recorded)
    assert client.refused()[0] == "key"


def test_another_release_is_refused_by_name(port) -> None:
    client = Client(port)
    challenge = client.challenged()
    said = {**port.said(), "version": "9.9.9"}
    proof = client.key.proof(bytes.fromhex(challenge.nonce), challenge.number, said)
    client.send(pack(Handshake.HELLO, {**said, "proof": proof}))
    text = f"seedbed is 9.9.9 here and {SEEDBED} at {port.place.role}: install "
    assert client.refused() == ("version", f"{text}{port.place.role}'s version")


# Other ports are the same door; the learner's is in a process of its own and takes its 10 s.
@pytest.mark.quick("door", "parameters-0 Unix")
def test_a_client_that_says_nothing_is_ended(port, monkeypatch) -> None:
    monkeypatch.setattr(door, "HELLO_S", 0.3)  # but in the ingest process
    started = time.monotonic()
    silent, slow = Client(port), port.plain()
    slow.sendall(b"\x16\x03\x01")  # the first bytes of TLS
    silent.challenged()
    assert silent.ended()
    rest_of(slow)
    assert (8 if isinstance(port, IngestPort) else 0.3) < time.monotonic() - started


# At the port of a learner that listens.


def test_a_stream_speaks_for_its_own_group_only(ingest: IngestPort) -> None:
    zeros = [np.zeros_like(leaf) for leaf in trees.leaves(ingest.one.pool.slots[0].timestep)]
    for more, step in ((1, 1), (0, 2)):  # another's life, and a timestep that nobody has asked for
        client = Client(ingest)
        life, codec = client.enter()
        client.send(codec.step(life + more, step, zeros))
        code, text = client.refused()
        assert code == "protocol" and f"timestep {step} of life" in text
    # Nor can it take a place: instances are the hosts' secrets, and an unknown one gets a place of its own.
    other = Client(ingest)
    assert other.enter(life=ingest.one.learner.lives[0], step=ingest.one.learner.steps[0])[0] >= 1


def bodies(codec: StepCodec, life: int) -> dict[str, bytes]:
    head = struct.Struct("<qq?")
    bomb = lz4.block.compress(bytes(1 << 24), store_size=False)
    return {
        "bomb": frame(Kind.STEP, head.pack(life, 1, True), bomb),
        "too short": frame(Kind.STEP, head.pack(life, 1, False), b"x"),
        "too long": header(Kind.STEP, (1 << 32) - 1),
        "another's message": pack(Handshake.WELCOME, {}),
        "damaged": frame(Kind.STEP, head.pack(life, 1, False), b"x" * 100)[:-1] + b"y",
        "beat": frame(Kind.BEAT, struct.pack("<qddd", -1, 0, 0, 0)),
        "flood of beats": wire.beat_frame() * 60,
    }


@pytest.mark.parametrize("name", list(bodies(StepCodec.__new__(StepCodec), 1)))
def test_broken_messages_end_their_stream(ingest: IngestPort, name: str) -> None:
    client = Client(ingest)
    life, codec = client.enter()
    client.send(bodies(codec, life)[name])
    assert client.refused()[0] == "protocol"


SPECS = [
    {"shape": [1 << 40], "dtype": "uint8"},
    {"shape": [2], "dtype": "object"},
    {"shape": [-2], "dtype": "uint8"},
    {"shape": [2], "dtype": "uint8"},
    {"shape": ["a"], "dtype": 3},
    {"dict": [1]},
    {"shape": [1 << 32, 1 << 32], "dtype": "uint8"},
]


@pytest.mark.parametrize(
    "spec", [{}, *({"observation": o, "action": {"kind": "Discrete", "n": 2}} for o in SPECS)]
)
def test_another_spec_is_refused(ingest: IngestPort, spec: dict) -> None:
    client = Client(ingest)
    client.hello()
    assert client.read()[0] is Handshake.WELCOME
    files = versions.of_module("counting_environment")
    client.send(pack(Kind.READY, {"spec": spec, "versions": files}))
    assert client.refused()[0] == "spec"


def test_what_a_host_says_does_not_command_the_terminal(ingest: IngestPort) -> None:
    ingest.one.pool.take_notices()
    client = Client(ingest)
    client.enter()
    client.send(pack(Kind.LEAVE, {"text": "\x1b[2J\nforged line " + "é" * 20_000}))
    assert client.ended()
    found: list[str] = []

    def told() -> bool:
        found.extend(ingest.one.pool.take_notices())
        return any("have left" in each for each in found)

    ingest.one.learner.run(told)
    (note,) = [each for each in found if "have left" in each]
    assert note.isprintable() and "forged line" in note and len(note) <= 300


def test_a_host_that_leaves_frees_its_places(ingest: IngestPort) -> None:
    before, instance = len(ingest.one.pool.members), secrets.token_hex(16)
    clients = [Client(ingest) for _ in range(20)]
    for index, client in enumerate(clients):
        client.enter(role=instance, number=index)
    ingest.one.learner.run(lambda: len(ingest.one.pool.members) > before + 10)
    clients[0].send(pack(Kind.LEAVE, {"text": ""}))
    assert all(client.ended() for client in clients)
    # At once, and not when the seats of lost streams are given up; other tests' seats are, meanwhile.
    ingest.one.learner.run(lambda: len(ingest.one.pool.members) <= before)


def test_seconds_of_before_a_seat_are_not_counted_again(ingest: IngestPort) -> None:
    """As those of a host that comes back to another ingest process, or after its seat was given up."""
    before = ingest.one.remote.report()["cpu_seconds"]
    client = Client(ingest)
    client.enter()
    for seconds in (1000.0, 1300.0):
        client.send(wire.beat_frame(wire.Beat(cpu_seconds=seconds)))
    ingest.one.learner.run(lambda: ingest.one.remote.report()["cpu_seconds"] >= before + 300)
    assert ingest.one.remote.report()["cpu_seconds"] < before + 400


def test_other_versions_of_an_environment_are_refused_by_name(ingest: IngestPort) -> None:
    name = Path(__file__).parent / "counting_environment.py"
    digest = hashlib.sha256(name.read_bytes()).hexdigest()
    for told, ours in (
        ({"gymnasium": "0.1.2"}, "gymnasium is 0.1.2"),
        ({"file counting_environment": "ab"}, digest[:12]),
        ({}, "file counting_environment is at the learner and not here"),
    ):
        client = Client(ingest)
        client.hello()
        assert client.read()[0] is Handshake.WELCOME
        client.send(pack(Kind.READY, {"spec": {}, "versions": told}))
        code, text = client.refused()
        assert code == "version" and ours in text


def test_only_third_numbers_may_differ() -> None:
    versions.require_same({"a": "1.2.3", "b": "1"}, {"a": "1.2.9", "c": "7"})
    with pytest.raises(versions.VersionError, match="a is 1.3.3 here and 1.2.3 at the learner"):
        versions.require_same({"a": "1.2.3"}, {"a": "1.3.3"})
    with pytest.raises(versions.VersionError, match="ROM pong differs"):
        versions.require_same({"ROM pong": "x"}, {"ROM pong": "y"})


@pytest.mark.parametrize("env", [FactoryEnv("own_maze:make"), GymEnv("own_maze:Maze-v0")])
def test_a_file_of_the_current_folder_has_a_digest(tmp_path, monkeypatch, env) -> None:
    """As an installed command has it, whose path lacks that folder."""
    source = tmp_path / "own_maze.py"
    source.write_text("SIZE = 5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    versions.of_module.cache_clear()
    assert versions.of(env)["file own_maze"] == hashlib.sha256(source.read_bytes()).hexdigest()


@pytest.mark.slow
def test_a_flood_of_connections_leaves_the_streams_alone(ingest: IngestPort) -> None:
    flood = []
    steps = list(ingest.one.learner.steps)
    with contextlib.suppress(OSError):
        for _ in range(400):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", ingest.one.port()))
            flood.append(each)
            if len(flood) % 20 == 0:
                ingest.one.learner.turn(0.01)
    progress(ingest.one, range(2), max(steps) + 200)
    for each in flood:
        each.close()
    assert np.subtract(ingest.one.learner.steps, steps)[:2].min() > 150
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ConnectionError, Refused):
            assert Client(ingest).enter()[0]
            return
    raise AssertionError("nobody can enter any more")
