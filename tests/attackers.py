"""Clients that say to a port what no honest one says."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import struct
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hosts import Net, progress
from seedbed.actors import wire
from seedbed.actors.slots import slot_layout, spec_to_json
from seedbed.actors.wire import LEARNER, Kind, StepCodec
from seedbed.envs.host import versions
from seedbed.paramserver import messages as gorila
from seedbed.paramserver.caller import Caller
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.registration import HOST, Entrance, Registrar, Registration
from seedbed.paramserver.role import COORDINATOR
from seedbed.streams import credentials
from seedbed.streams import messages as packing
from seedbed.streams.credentials import FOLDER, ActorKey
from seedbed.streams.handshake import Challenge, Place, knock
from seedbed.streams.messages import VERSION, Handshake, frame, pack, unpack

ROLES = ("parameters-0", "replay-0", "learner-0", "host-1")


class IngestPort:
    """The port of a learner that listens, which an honest host uses, too."""

    kinds, local = Kind, False

    def __init__(self, one: Net) -> None:
        self.one, self.folder, self.place = one, one.folder, Place(LEARNER, 1)
        self._lives = {group: one.learner.lives[group] for group in range(2)}
        self._pid = one.pool.pids()[0]
        self._bytes = psutil.Process(self._pid).memory_info().rss

    def plain(self) -> socket.socket:
        """Returns a connection on which nothing was said."""
        return socket.create_connection(("127.0.0.1", self.one.port()), timeout=10)

    def said(self) -> dict[str, Any]:
        """Returns what the HELLO of a new honest client says."""
        return {"role": secrets.token_hex(16), "number": 0, "life": 0, "step": 0}

    def turn(self) -> None:
        """Lets the honest end work."""
        self.one.learner.turn(0.0)

    def goes_on(self) -> None:
        """Requires that the honest host is in its lives, in an ingest process of its size."""
        one = self.one
        progress(one, range(2), max(one.learner.steps) + 20)
        assert {group: one.learner.lives[group] for group in range(2)} == self._lives
        assert one.pool.pids()[0] == self._pid
        assert psutil.Process(self._pid).memory_info().rss < self._bytes + 20e6


class DoorPort:
    """The port at which hosts come to a coordinator."""

    kinds, local, place = gorila.Kind, False, Place(COORDINATOR, 0)

    def __init__(self, run: Path, door: Registrar) -> None:
        self.folder, self._run = run / FOLDER, run
        host, port = door.addresses[0].split(":")
        self._address = (host, int(port))

    def plain(self) -> socket.socket:
        return socket.create_connection(self._address, timeout=10)

    def said(self) -> dict[str, Any]:
        return {"role": HOST, "number": 7, "name": "", "shares": True}

    def turn(self) -> None: ...

    def goes_on(self) -> None:
        """Requires that an honest host gets a name."""
        entrance = Entrance(lambda: [self._address])
        named = Registration(self._run, entrance, True).register(lambda caller: False)
        assert named is not None and named.name.startswith("host-") and not named.private


class RolePort:
    """A port of a role, on this machine or for others, and an honest coordinator at the role."""

    kinds = gorila.Kind

    def __init__(self, name: str, run: Path, down_bytes: int, local: bool) -> None:
        self.local, self.folder = local, run / FOLDER
        directory, until_s = Directory(run), time.monotonic() + 20
        self.caller = Caller(directory, self.folder, name, lambda: time.monotonic() > until_s)
        self.caller.make_room(0, down_bytes)
        self.caller.connect(lambda: {"role": COORDINATOR, "number": 0})
        found = directory.find(name)
        assert found is not None
        self._address, self.place = found, Place(name, found.number)

    def plain(self) -> socket.socket:
        if not self.local:
            return socket.create_connection(self._address.hosts[0], timeout=10)
        stream = socket.socket(socket.AF_UNIX)
        stream.connect("\0" + self._address.socket)
        return stream

    def said(self) -> dict[str, Any]:
        return {"role": "learner", "number": 7}

    def turn(self) -> None: ...

    def goes_on(self) -> None:
        """Requires that the coordinator's stream is still there, and answered."""
        self.caller.send(gorila.Kind.REPORT)
        answer = self.caller.receive(time.monotonic() + 10)
        assert answer is not None and answer.kind is gorila.Kind.REPORT
        self.caller.close()


class Refused(Exception):
    """The server has said no, or has closed the door."""


class Client:
    """One end of a stream that does what a test tells it; every call waits."""

    def __init__(self, port: IngestPort | DoorPort | RolePort, key: ActorKey | None = None) -> None:
        self.port, self.key = port, key or ActorKey.read(port.folder / credentials.KEY)
        self.socket = port.plain()
        if port.local:
            assert knock(self.socket, self.key, port.place, -1, lambda: False)
        else:
            context = self.key.context()
            self.socket = context.wrap_socket(self.socket, server_hostname="seedbed")

    def send(self, frame: bytes) -> None:
        self.socket.sendall(frame)

    def read(self) -> tuple[Any, bytes]:
        """Reads the next message but heartbeats; raises ConnectionError."""
        while True:
            header = packing.read_header(
                self._exactly(packing.HEADER_BYTES), 1 << 30, self.port.kinds
            )
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
            self.port.turn()
        return data

    def challenged(self) -> Challenge:
        """Reads the CHALLENGE."""
        kind, body = self.read()
        return Challenge.read(unpack(kind, memoryview(body)), *self.port.place)

    def hello(self, **changes: Any) -> bytes:
        """Answers the challenge; returns the frame of the HELLO."""
        frame = self.challenged().answer(self.key, **{**self.port.said(), **changes})
        self.send(frame)
        return frame

    def enter(self, **hello: Any) -> tuple[int, StepCodec]:
        """Goes as far as BEGIN at the port of a learner that listens; returns the life."""
        assert isinstance(self.port, IngestPort)
        self.hello(**hello)
        assert self.read()[0] is Handshake.WELCOME
        pool = self.port.one.pool
        assert pool.layout is not None, "an honest host is there first"
        files = versions.of_module("counting_environment")
        self.send(pack(Kind.READY, {"spec": spec_to_json(pool.spec), "versions": files}))
        kind, body = self.read()
        if kind is Handshake.REFUSE:
            raise Refused(body)
        assert kind is Kind.BEGIN, body
        return wire.read_begin(memoryview(body))[0], StepCodec(slot_layout(pool.spec, 2))

    def refused(self) -> tuple[str, str]:
        """Reads the refusal that ends the stream; returns its code and text."""
        kind, body = self.read()
        assert kind is Handshake.REFUSE, (kind, body)
        said = unpack(kind, memoryview(body)).fields
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


def hello(text: bytes) -> bytes:
    """The frame of a HELLO whose fields are such a text."""
    return frame(Handshake.HELLO, struct.pack("<I", len(text)), text)


def header(kind: int, length: int, version: int = VERSION) -> bytes:
    return struct.pack("<2sBBII", b"Sb", version, kind, length, 0)
