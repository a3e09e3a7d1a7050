"""Roles of the parameter server and their clients: faults, floods, and who is taken for the role."""

from __future__ import annotations

import contextlib
import enum
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seedbed.paramserver.caller import Caller, Stopped
from seedbed.paramserver.directory import Address, Directory, this_machine
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.role import FATAL
from seedbed.streams import reaching
from seedbed.streams.credentials import (
    FOLDER,
    KEY,
    PRIVATE,
    ensure_credentials,
    learner_context,
)
from seedbed.streams.door import MOST_STRANGERS
from seedbed.streams.handshake import Place
from seedbed.streams.messages import ProtocolError, unpack
from seedbed.streams.reaching import begin_to_connect
from seedbed.streams.server import Client, Server
from seedbed.types import SeedbedError

ROLE = "parameters-0"


class Handler:
    """A role that answers everything with its own message, and fails at `PAUSE`."""

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        return {}

    def take(self, client: Client, kind: enum.IntEnum, body: memoryview) -> None:
        if kind is Kind.PAUSE:
            raise ZeroDivisionError("a bug of the role's own")
        if kind is Kind.RESUME:
            raise SeedbedError("the disk is full")
        client.send(kind, **unpack(kind, body).fields)

    def leave(self, client: Client, refusal: ProtocolError | None) -> None: ...


class Run:
    """A role with a server, reached within the machine or as from another one."""

    def __init__(self, folder: Path, most_clients: int = 9) -> None:
        self.folder, self.directory = folder, Directory(folder)
        ensure_credentials(folder / FOLDER)
        self.number = self.directory.take_number(ROLE)
        place = Place(ROLE, self.number)
        self.server = Server(Handler(), place, Kind, folder / FOLDER, most_clients, fatal=FATAL)
        self.socket, self.port = self.server.listen_here(), self.server.listen("127.0.0.1")
        self.failure: BaseException | None = None
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.announce(("127.0.0.1", self.port))

    def _serve(self) -> None:
        try:
            while not self._ended.is_set():
                self.server.serve(0.02)
        except BaseException as failure:
            self.failure = failure

    def announce(self, *hosts: tuple[str, int], machine: str = "") -> None:
        process = self.number, os.getpid(), machine or this_machine()
        self.directory.announce(ROLE, Address(*process, self.socket, hosts))

    def caller(self, patience_s: float = 20.0) -> Caller:
        until_s = time.monotonic() + patience_s
        places = self.directory, self.folder / FOLDER, ROLE
        return Caller(*places, lambda: time.monotonic() > until_s)

    def close(self) -> None:
        self._ended.set()
        self.thread.join()
        self.server.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    made.thread.start()
    yield made
    made.close()
    assert made.failure is None


def hello(number: int = 7) -> Callable[[], dict[str, Any]]:
    return lambda: {"role": "learner", "number": number}


def test_a_fault_of_the_roles_own_ends_one_stream_and_is_told(run: Run, capfd, monkeypatch) -> None:
    others = run.caller(), run.caller()
    for number, each in enumerate(others):
        each.connect(hello(number))
    for left in (3, 2, 1, 0):
        if not left:
            monkeypatch.setattr("seedbed.streams.door._TELL_S", 0.0)
        others[0].send(Kind.PAUSE)
        with pytest.raises(ConnectionError):
            others[0].receive(time.monotonic() + 10)
        others[0].connect(hello(0))
    others[1].send(Kind.REPORT)
    assert others[1].receive(time.monotonic() + 10) is not None
    told = capfd.readouterr().err
    assert told.count("ZeroDivisionError: a bug") == 2
    assert "2 tracebacks like the last one were left out" in told
    for each in others:
        each.close()


def test_what_the_role_lacks_itself_ends_it(run: Run) -> None:
    caller = run.caller()
    caller.connect(hello())
    caller.send(Kind.RESUME)
    run.thread.join(10)
    assert isinstance(run.failure, SeedbedError)
    run.failure = None


# A role whose descriptors are few; it says so, and ends, if one is missing for its save.
FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (110, 110))
from pathlib import Path
from test_admission import Run
run = Run(Path(sys.argv[1]))
while True:
    run.server.serve(0.02)
    files = [open(run.folder / "save", "w") for _ in range(40)]
    for file in files:
        file.close()
"""


@pytest.mark.quick("True")
@pytest.mark.parametrize("local", [True, False])
def test_a_flood_of_silent_strangers_shuts_nobody_out(tmp_path: Path, local: bool) -> None:
    directory = Directory(tmp_path)
    role = subprocess.Popen(
        [sys.executable, "-c", FEW, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    flood: list[socket.socket] = []
    try:
        deadline = time.monotonic() + 60
        while (address := directory.find(ROLE)) is None:
            assert time.monotonic() < deadline and role.poll() is None
            time.sleep(0.01)
        where = ("\0" + address.socket) if local else address.hosts[0]
        if not local:
            directory.announce(ROLE, address._replace(machine="another"))
        for _ in range(3 * MOST_STRANGERS):
            stranger = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                stranger.connect(where)
            flood.append(stranger)
        caller = Caller(directory, tmp_path / FOLDER, ROLE, lambda: time.monotonic() > deadline)
        caller.connect(hello())
        caller.send(Kind.REPORT, text="here")
        answer = caller.receive(deadline)
        assert answer is not None and answer.fields == {"text": "here"}
        caller.close()
        assert role.poll() is None
    finally:
        for stranger in flood:
            stranger.close()
        role.kill()
        role.wait()


def test_strangers_do_not_count_among_clients(tmp_path: Path) -> None:
    run = Run(tmp_path, most_clients=1)
    run.thread.start()
    strangers = [socket.create_connection(("127.0.0.1", run.port)) for _ in range(3)]
    first, second, again = run.caller(), run.caller(), run.caller()
    first.connect(hello(1))
    with pytest.raises(SeedbedError, match="takes no more"):
        second.connect(hello(2))
    # Who comes back takes its own place.
    again.connect(hello(1))
    for each in (first, second, again, *strangers):
        each.close()
    run.close()


def test_a_key_that_was_given_to_other_machines_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    ensure_credentials(folder)
    key, private = ((folder / name).read_text() for name in (KEY, PRIVATE))
    (folder / PRIVATE).write_text(private[: len(private) // 2])
    with pytest.raises(SeedbedError, match="private.pem cannot be used .*: put it back, or remove"):
        learner_context(folder)
    (folder / PRIVATE).unlink()
    with pytest.raises(SeedbedError, match="actor.key is there without private.pem"):
        ensure_credentials(folder)
    assert (folder / KEY).read_text() == key
    # A start that was killed between the two has given nobody a key.
    (folder / PRIVATE).write_text(private)
    (folder / KEY).unlink()
    ensure_credentials(folder)
    learner_context(folder)


def test_the_memory_of_a_stream_that_is_over_is_given_back(tmp_path: Path) -> None:
    ensure_credentials(tmp_path / FOLDER)

    def count() -> int:
        links = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return sum("seedbed-blocks" in str(each.readlink()) for each in links if each.exists())

    before = count()
    caller = Caller(Directory(tmp_path), tmp_path / FOLDER, ROLE, lambda: True)
    caller.make_room(10, 10)
    caller.close()
    assert count() > before  # another stream may begin
    for _ in range(2):
        caller.release()
    assert count() == before


def test_who_takes_the_name_of_a_dead_role_is_not_believed(tmp_path: Path) -> None:
    ensure_credentials(tmp_path / FOLDER)
    directory = Directory(tmp_path)
    number, name = directory.take_number(ROLE), f"seedbed-{os.urandom(16).hex()}"
    directory.announce(ROLE, Address(number, os.getpid(), this_machine(), name, ()))
    got: list[Any] = []
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind("\0" + name)
        impostor.listen()

        def pose() -> None:
            stream, _ = impostor.accept()
            with stream:
                stream.settimeout(10)
                got.append(stream.recv(64))
                stream.sendall(bytes(32))
                data, descriptors, _, _ = socket.recv_fds(stream, 64, 4)
                got.extend([data, descriptors])

        thread = threading.Thread(target=pose)
        thread.start()
        caller = Caller(directory, tmp_path / FOLDER, ROLE, lambda: len(got) == 3)
        caller.make_room(32, 32)
        with pytest.raises(Stopped):
            caller.connect(hello())
        thread.join()
    assert got[1:] == [b"", []], "it gets neither a proof nor the memory"
    assert "lacks the run's key" in caller.last_error or "Errno" in caller.last_error


def filtered() -> tuple[tuple[str, int], list[socket.socket]]:
    """Returns an address that does not answer, as behind a firewall, and what keeps it so."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    kept = [listener]
    for _ in range(3):
        kept.append(socket.socket())
        kept[-1].setblocking(False)
        kept[-1].connect_ex(listener.getsockname())
    return listener.getsockname(), kept


def web() -> tuple[tuple[str, int], socket.socket]:
    """Returns the address of another server."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = listener.accept()
                with stream:
                    stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    return listener.getsockname(), listener


def test_the_right_address_is_found_among_others(run: Run, tmp_path: Path, monkeypatch) -> None:
    """Some do not answer, one refuses, at one is another server, and at one a role of another run."""
    kept: list[socket.socket] = []
    hosts = []
    for _ in range(2):
        host, sockets = filtered()
        hosts.append(host)
        kept += sockets
    host, listener = web()
    kept.append(listener)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = closed.getsockname()
    (tmp_path / "other").mkdir()
    other = Run(tmp_path / "other")
    other.thread.start()
    hosts += [host, refused, ("127.0.0.1", other.port)]
    try:
        run.announce(*hosts, ("127.0.0.1", run.port), machine="another")
        caller, tried = run.caller(), list[tuple[str, int]]()

        def begin(found: tuple[Any, ...], *rest: Any) -> Any:
            tried.append(found[-1])
            return begin_to_connect(found, *rest)

        monkeypatch.setattr(reaching, "begin_to_connect", begin)
        caller.connect(hello())
        assert sorted(tried) == sorted([*hosts, ("127.0.0.1", run.port)])
        tried.clear()
        caller.connect(hello())
        assert tried[0] == ("127.0.0.1", run.port), "it is remembered"
        caller.close()
        run.announce(*hosts[2:], machine="another")
        lost = run.caller(patience_s=1.0)
        with pytest.raises(Stopped):
            lost.connect(hello())
        for host in hosts[2:]:
            assert f"127.0.0.1:{host[1]}" in lost.last_error
    finally:
        other.close()
        for each in kept:
            each.close()
