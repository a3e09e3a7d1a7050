"""Streams from hosts into a pool, with a counting environment at one end and its checker at the other."""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from actor_pools import counting
from checkpoint_files import stopped
from hosts import Net, Proxy, progress
from seedbed.actors import child
from seedbed.actors.ingest import Ingest
from seedbed.actors.link import CONNECT_S, Identity, Link, Refusal
from seedbed.actors.seats import Seat
from seedbed.actors.slots import Slot, slot_layout
from seedbed.actors.wire import LEARNER, Kind, StepCodec
from seedbed.envs.host.gym import FactoryEnv
from seedbed.exit_status import ExitStatus
from seedbed.streams import credentials
from seedbed.streams.addresses import bind_listener, listening_ports, split_address
from seedbed.streams.connection import Connection
from seedbed.streams.dns import Names
from seedbed.streams.door import Door, _network
from seedbed.streams.handshake import PATIENCE_S, Challenge
from seedbed.streams.loop import EventLoop
from seedbed.streams.messages import HEADER_BYTES, Handshake, ProtocolError, pack
from seedbed.types import ArraySpec, Discrete, EnvSpec, SeedbedError


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Callable[..., Net]]:
    """Starts a learner that listens; it and its hosts are ended after the test."""
    started: list[Net] = []

    def start(env: FactoryEnv | None = None, **options: object) -> Net:
        started.append(Net(tmp_path, env or counting(), **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.close()


TESTS = Path(__file__).parent


def test_steps_of_hosts_arrive_once_in_order_and_in_their_groups(net) -> None:
    one = net()
    for _ in range(2):
        one.start_host()
    progress(one, range(4), 100)
    assert one.pool.members == (0, 1, 2, 3)
    checkers = [checker for group in one.learner.checkers for checker in group]
    assert len({checker._env for checker in checkers}) == one.pool.num_envs
    # Ingest processes report one after another.
    wanted = {"hosts": 2, "streams": 4}
    one.learner.run(lambda: wanted.items() <= one.remote.report().items())
    one.learner.run(lambda: one.remote.report()["steps"] >= 400)
    report = one.remote.report()
    assert (report["refused"], report["reconnects"]) == (0, 0)
    one.learner.run(lambda: one.remote.report()["cpu_seconds"] > 0)
    one.remote.finish("the run has ended", over=True)
    one.learner.run(lambda: all(host.poll() == 0 for host in one.hosts))
    assert "ended: the run has ended" in one.said()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_s", "learner_s", "least", "most"), [(0.02, 0, 0.8, 1), (0, 0.02, 0, 0.4)]
)
def test_what_limits_a_run_is_known(net, env_s, learner_s, least, most) -> None:
    one = net(counting(sleep_s=env_s), groups=2)
    one.start_host()
    progress(one, range(2))

    def turn_for(seconds: float) -> dict[str, float]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            one.learner.turn()
            time.sleep(learner_s)
        return one.remote.report()

    # The beats of before tell of the start.
    before, after = turn_for(2.0), turn_for(2.0)
    stream_s, waited_s = (
        after[name] - before[name] for name in ("stream_seconds", "waited_seconds")
    )
    assert least <= 1 - waited_s / stream_s <= most and stream_s > 1


def test_a_killed_host_loses_its_lives_and_nothing_else(net) -> None:
    one = net()
    one.start_host()
    one.start_host()
    progress(one, range(4))
    before, steps = dict(one.learner.lives), list(one.learner.steps)
    one.hosts[0].kill()
    one.learner.run(lambda: one.remote.report().get("streams") == 2)
    one.learner.run(lambda: sum(np.subtract(one.learner.steps, steps) > 50) >= 2)
    survivors = [g for g in range(4) if one.learner.steps[g] > steps[g] + 50]
    assert len(survivors) == 2
    assert {g: one.learner.lives[g] for g in survivors} == {g: before[g] for g in survivors}
    # The other seats are kept for 30 s; until then a new host waits.
    one.start_host()
    one.learner.run(lambda: one.remote.report()["refused"] > 0)
    assert one.remote.report()["streams"] == 2
    assert one.hosts[2].poll() is None


@pytest.mark.slow
def test_a_broken_stream_resumes_its_life(net) -> None:
    one = net(groups=2)
    port = one.port()
    with Proxy(port) as proxy:
        one.start_host(proxy.port)
        progress(one, range(2))
        lives = dict(one.learner.lives)
        for _ in range(5):
            steps = list(one.learner.steps)
            proxy.cut()
            progress(one, range(2), max(steps) + 30)
        assert one.learner.lives == lives
        one.learner.run(lambda: one.remote.report()["reconnects"] == 10)


@pytest.mark.slow
def test_a_silent_link_is_given_up_and_comes_back(net) -> None:
    one = net(groups=2)
    with Proxy(one.port()) as proxy:
        one.start_host(proxy.port)
        progress(one, range(2))
        lives = dict(one.learner.lives)
        proxy.stall()
        started = time.monotonic()
        deadline = started + 7
        while time.monotonic() < deadline:
            one.learner.turn()
        proxy.heal()
        steps = list(one.learner.steps)
        progress(one, range(2), max(steps) + 10)
        assert time.monotonic() - deadline < 10
        assert one.learner.lives == lives


def test_an_actor_serves_on_when_nobody_reads_what_it_says(net) -> None:
    """The learner's timeout is a whole number, as a user may give it in Python."""
    one = net(groups=2, timeout_s=300)
    ours, theirs = os.pipe()
    os.close(ours)
    command = f"actor 127.0.0.1:{one.port()} --processes 1 --allow counting_environment --key"
    actor = subprocess.Popen(
        [sys.executable, "-m", "seedbed", *command.split(), one.folder / credentials.KEY],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    one.hosts.append(actor)
    os.close(theirs)
    progress(one, range(2))
    one.remote.finish("the run has ended", over=True)
    one.learner.run(lambda: actor.poll() is not None)
    assert actor.returncode == ExitStatus.FINISHED


@pytest.mark.slow
def test_environments_that_die_get_another_life(net) -> None:
    one = net(counting(fault="exit", fault_at=150), groups=2)
    one.start_host()
    progress(one, range(2))
    lives = dict(one.learner.lives)
    one.learner.run(lambda: all(one.learner.lives[g] > lives[g] + 1 for g in range(2)))


@pytest.mark.slow
def test_a_killed_ingest_process_comes_back_at_its_port(net) -> None:
    one = net()
    one.start_host()
    one.start_host()
    progress(one, range(4))
    port, pid, lives = one.ports[-1], one.pool.pids()[0], dict(one.learner.lives)
    one.ports.clear()
    os.kill(pid, signal.SIGKILL)
    one.learner.run(lambda: bool(one.ports))
    assert set(one.ports) == {port} and one.pool.pids()[0] != pid
    one.learner.run(lambda: all(one.learner.lives[g] > lives[g] for g in range(4)))
    progress(one, range(4), 50)
    assert any("started again" in note for note in one.pool.take_notices())


@pytest.mark.slow
def test_a_stopped_ingest_process_is_replaced(net, pool_clock) -> None:
    one = net(groups=2)
    one.start_host()
    progress(one, range(2))
    pid, lives = one.pool.pids()[0], dict(one.learner.lives)
    os.kill(pid, signal.SIGSTOP)
    for _ in range(30):
        pool_clock(1.0)
        one.learner.turn(0.05)
    one.learner.run(lambda: one.pool.pids()[0] not in (0, pid))
    one.learner.run(lambda: all(one.learner.lives[g] > lives[g] for g in range(2)))
    progress(one, range(2))


@pytest.mark.slow
def test_a_signal_to_a_host_and_its_actors_ends_them_without_a_word(net) -> None:
    """As from `timeout`, a service manager or a batch system."""
    one = net(groups=8)
    one.start_host(processes=4)
    progress(one, range(8))
    # The host is the last to see the signal.
    with stopped(psutil.Process(one.hosts[0].pid)):
        os.killpg(one.hosts[0].pid, signal.SIGTERM)
        time.sleep(0.5)
    one.learner.run(lambda: one.hosts[0].poll() == 0)
    assert one.said().splitlines()[-1] == "ended: stopped" and "SIGTERM" not in one.said()


def test_an_ingest_process_that_never_listens_ends_the_run(net, pool_clock) -> None:
    """Each is killed after its silence; no other one would do better."""
    one = net(groups=2)
    with pytest.raises(SeedbedError, match="5 times in a row.*gave no sign for 10 s"):
        for _ in range(200):
            os.kill(one.pool.pids()[0], signal.SIGSTOP)
            pool_clock(1.0)
            one.learner.turn(0.01)
    again = "the ingest process was killed, as it gave no sign for 10 s; started again; actors will come back"
    assert one.pool.take_notices().count(again) == 4


@pytest.mark.slow
def test_a_learner_that_reads_nothing_keeps_no_stream_waiting(net, monkeypatch) -> None:
    """As one that is stopped; with a small buffer, a few messages are too many."""
    pair = socket.socketpair

    def narrow(*kind: int) -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair(*kind)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return ours, theirs

    monkeypatch.setattr(child.socket, "socketpair", narrow)
    one = net(groups=2)
    one.start_host()
    progress(one, range(2))
    lives, before = dict(one.learner.lives), one.remote.report()["received_bytes"]
    process = one.remote._process
    listen, fd = process.descriptors, process.connection.fileno()
    process.descriptors = {**listen, fd: lambda: None}
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline:
        one.learner.turn()
    progress(one, range(2), max(one.learner.steps) + 20)
    process.descriptors = listen
    assert one.learner.lives == lives
    one.learner.run(lambda: one.remote.report()["received_bytes"] > before + 1000)


@pytest.mark.slow
def test_hosts_hear_of_the_end_from_a_learner_that_has_read_nothing_for_long(net) -> None:
    """As while it evaluates at the end of the run."""
    one = net(groups=2)
    one.start_host()
    progress(one, range(2))
    time.sleep(3)
    os.kill(one.pool.pids()[0], signal.SIGSTOP)
    one.remote.finish("the run has ended", over=True)
    threading.Timer(0.5, os.kill, (one.pool.pids()[0], signal.SIGCONT)).start()
    one.pool.close()
    assert one.hosts[0].wait(10) == 0
    assert "ended: the run has ended" in one.said()


@pytest.mark.slow
def test_local_actors_and_hosts_serve_one_pool(net) -> None:
    one = net(actors=1, groups=2)
    one.start_host()
    progress(one, range(4))
    assert one.pool.members == (0, 1, 2, 3)


def test_a_connection_that_takes_time_is_waited_for(tmp_path) -> None:
    """As over any real network; on loopback only a full backlog makes one wait."""
    key = credentials.ensure_credentials(tmp_path / "listen")
    context = credentials.learner_context(tmp_path / "listen")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        filling = [socket.create_connection(address)]
        identity = Identity(key=key, context=key.context(), instance="a" * 32)
        link = Link(identity, 0, lambda: [address])
        link.connect()
        assert link.connection is not None, link.last_error
        assert list(link.connection.receive()) == []
        listener.accept()[0].close()
        deadline = time.monotonic() + 10
        listener.settimeout(10)
        server = Connection(listener.accept()[0], context, Kind, server=True)
        server.send(Challenge(LEARNER, 1, "ab").frame())
        found: list[Handshake] = []
        while not found and time.monotonic() < deadline:
            list(server.receive())
            found += [kind for kind, _ in link.connection.receive()]
        assert found == [Handshake.CHALLENGE]
        link.connection.close()
        server.close()
        for each in filling:
            each.close()


def test_a_learner_that_has_failed_at_a_message_is_asked_again(tmp_path) -> None:
    key = credentials.ensure_credentials(tmp_path / "listen")
    link = Link(Identity(key=key, context=None, instance="a" * 32), 0, list)
    link.connection = types.SimpleNamespace()  # type: ignore[assignment]

    def refuse(code: str) -> None:
        kind, body = Handshake.REFUSE, pack(Handshake.REFUSE, {"code": code, "text": "why"})
        link.take(kind, memoryview(body)[HEADER_BYTES:])

    for code, error in (("fault", ConnectionError), ("full", ProtocolError), ("version", Refusal)):
        with pytest.raises(error, match="why"):
            refuse(code)


def test_an_address_that_does_not_answer_is_given_up_soon_if_there_are_others(tmp_path) -> None:
    key = credentials.ensure_credentials(tmp_path / "listen")
    identity = Identity(key=key, context=None, instance="a" * 32)
    with socket.socket() as full, socket.create_server(("127.0.0.1", 0)) as other:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        where = [full.getsockname(), other.getsockname()]
        with socket.create_connection(where[0]):
            alone, among = (
                Link(identity, 0, lambda given=given: given) for given in (where[:1], where)
            )
            for link in (alone, among):
                link.connect()
                assert link.connection is not None and list(link.connection.receive()) == []
            assert (alone.patience_s, among.patience_s) == (PATIENCE_S, CONNECT_S)
            # What has answered may have many others to answer, too.
            among.drop("no answer")
            among.connect()
            assert among.connection is not None and list(among.connection.receive()) == []
            assert among.patience_s == PATIENCE_S
            for link in (alone, among):
                link.drop("")


def test_a_name_server_that_is_slow_keeps_no_stream_waiting(tmp_path, monkeypatch) -> None:
    key, look_up, asked = credentials.ensure_credentials(tmp_path / "listen"), threading.Event(), []

    def slowly(host: str, port: int, **options: object) -> list:
        asked.append(host)
        assert look_up.wait(20)
        return getaddrinfo("127.0.0.1", port, **options)

    getaddrinfo = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        identity = Identity(key=key, context=key.context(), instance="a" * 32)
        addresses = [("learner.example", listener.getsockname()[1])]
        links = [Link(identity, number, lambda: addresses) for number in range(2)]
        for link in links * 5:
            link.connect()
            assert link.connection is None and "is being looked up" in link.last_error
        assert len(asked) == 1
        look_up.set()
        deadline = time.monotonic() + 10
        for link in links:
            while link.connection is None:
                assert time.monotonic() < deadline
                link.connect()
            link.drop("")
        assert len(asked) == 1
    monkeypatch.undo()
    with pytest.raises(OSError, match="too long"):
        Names().find("a" * 64 + ".example", 1)


def test_addresses_that_fail_at_once_take_no_turn_and_the_one_that_was_reached_has_more(
    tmp_path,
) -> None:
    key = credentials.ensure_credentials(tmp_path / "listen")
    identity = Identity(key=key, context=key.context(), instance="a" * 32)
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        servers = [server.getsockname() for server in (one, two)]
        nowhere = [("255.255.255.255", port) for port in (1, 2, 3)]

        def tried(addresses: list[tuple[str, int]], times: int) -> list[tuple[str, int]]:
            link, found = Link(identity, 0, lambda: addresses), []
            for _ in range(times):
                link.connect()
                found.append(link._address)
                assert (link.connection is None) == (link._address in nowhere)
                link.drop("")
            return found

        assert tried(nowhere, 2) == nowhere[-1:] + nowhere[:1]
        assert tried([*nowhere, servers[0]], 5) == servers[:1] * 5
        assert tried([*servers], 4) == servers * 2
        identity.reached = servers[1]
        assert tried([*servers], 4) == [servers[1], servers[0], servers[1], servers[1]]
        identity.reached = ("127.0.0.1", 1)
        assert tried([*servers], 2) == servers


def test_every_address_of_a_name_has_its_turn_and_is_not_forgotten(tmp_path, monkeypatch) -> None:
    key = credentials.ensure_credentials(tmp_path / "listen")
    identity = Identity(key=key, context=key.context(), instance="a" * 32)
    asked, seen = [], []

    def look_up(host: str, port: int, **options: object) -> list:
        asked.append(host)
        if len(asked) > 2:
            raise OSError("the name server is away")
        return [(2, 1, 6, "", (f"127.0.0.{number}", port)) for number in (1, 2)]

    def connect(self: socket.socket, address: tuple[str, int]) -> int:
        seen.append(address[0])
        return errno.EINPROGRESS

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket.socket, "connect_ex", connect)
    monkeypatch.setattr("seedbed.streams.dns.AGAIN_S", -1.0)
    addresses = [("office", 7), ("vpn", 7)]
    identity.reached = addresses[0]
    link = Link(identity, 0, lambda: addresses)
    for _ in range(8):
        link.connect()
        link.drop("")
    assert len(asked) > 4
    assert sorted(seen) == ["127.0.0.1"] * 4 + ["127.0.0.2"] * 4


def test_a_timestep_that_waits_for_the_slot_outlives_its_stream() -> None:
    layout = slot_layout(EnvSpec(ArraySpec((2,), "float32"), Discrete(2)), 1)
    codec, seat = StepCodec(layout), Seat(0, 0)
    memory, bell = bytearray(layout.size), os.eventfd(0)
    slot = Slot(layout, memory)
    seat.attach(slot, bell)

    def send(life: int, step: int, value: float) -> None:
        leaves = [np.full(array.shape, value, array.dtype) for array in layout.arrays[:-1]]
        seat.arrive(codec, memoryview(codec.step(life, step, leaves))[HEADER_BYTES:])

    seat.begin(seat.end.begin_anew())
    send(1, 1, 0.0)
    seat.begin(seat.end.begin_anew())
    send(2, 1, 1.0)
    seat.leave(0.0)
    begin = seat.end.enter(2, 1, 1.0)
    assert begin == (2, 1)
    seat.begin(begin)
    send(2, 1, 1.0)
    assert (slot.life, slot.step) == (1, 1)
    slot.answer(1, 1)
    seat.answered(codec, collections.deque())
    assert (slot.life, slot.step) == (2, 1) and slot.timestep.observation[0, 0] == 1.0
    os.close(bell)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0.0.0.0", ("0.0.0.0", range(1))),
        ("[::]", ("::", range(1))),
        ("0.0.0.0:47000-47099", ("0.0.0.0", range(47000, 47100))),
        ("[fd00::1]:7-7", ("fd00::1", range(7, 8))),
        ("", ("", range(1))),
    ],
)
def test_where_processes_with_a_port_each_listen(text, found):
    assert listening_ports(text) == found


@pytest.mark.parametrize("text", ["0.0.0.0:4711", "x:2-1", "x:0-5", "x:1-70000", "x:1-", "a b"])
def test_where_processes_with_a_port_each_cannot_listen(text):
    with pytest.raises(SeedbedError, match=re.escape(repr(text))):
        listening_ports(text)


@pytest.mark.parametrize("text", ["2001:db8::5", "::", "fd00::1:4711", "a:b:80"])
def test_an_address_of_ipv6_without_brackets_is_refused(text):
    with pytest.raises(SeedbedError, match="put an IPv6 address in brackets"):
        split_address(text)


@pytest.mark.parametrize("host", ["", "::"])
@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_every_address_is_of_both_versions_and_a_client_of_ipv4_is_known_by_that(host):
    with contextlib.ExitStack() as stack:
        loop, origins = EventLoop(), []
        listener = stack.enter_context(bind_listener(host, 0, 0))
        door = Door(listener, loop, lambda stream, origin, _: origins.append((stream, origin)))
        for number in ("127.0.0.1", "::1"):
            stack.enter_context(socket.create_connection((number, door.port)))
            door._accept(0)
    for stream, _ in origins:
        stream.close()
    assert [origin for _, origin in origins] == ["127.0.0.1", "::1"]


def test_a_machine_without_ipv6_listens_at_every_address_of_ipv4(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with bind_listener("", 0, 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_strangers_of_ipv6_count_by_their_network():
    one, other = _network("2001:db8:1:2::5"), _network("2001:db8:1:2:ffff::6")
    assert one == other != _network("2001:db8:1:3::5")
    assert _network("fe80::1%eth0") == "fe80::/64"
    for origin in ("10.1.2.3", "user 1000"):
        assert _network(origin) == origin


def test_what_a_learner_has_not_taken_yet_is_told_with_what_is_new():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.setblocking(False)
        ingest, told = Ingest.__new__(Ingest), iter([["a"], ["b"], []])
        ingest._learner, ingest._untold, ingest._next_beat_s = theirs, {}, 0.0
        ingest._admission = types.SimpleNamespace(
            beat=lambda now_s: None, report=dict, take_notes=lambda: next(told)
        )
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                sent += theirs.send(b"x")
        ingest._beat(0.0)
        ingest._beat(1.0)
        for _ in range(sent):
            ours.recv(1)
        ingest._beat(2.0)
        assert [ours.recv(100) for _ in range(2)] == [b'{"beat": {}}', b'{"notes": ["a", "b"]}']
