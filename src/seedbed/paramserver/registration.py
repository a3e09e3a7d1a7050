"""How a host comes to a run: at the coordinator's door it gets a name, and tells where it is. No JAX."""

from __future__ import annotations

import enum
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seedbed.central.listening import advertised, former_port
from seedbed.files import write_json
from seedbed.paramserver.caller import Caller, Stopped
from seedbed.paramserver.directory import Address, Directory
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.role import COORDINATOR, listen_at
from seedbed.printable import printable
from seedbed.streams.addresses import listening_ports
from seedbed.streams.credentials import ADDRESS, PRIVATE
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.handshake import Place
from seedbed.streams.messages import ProtocolError, require_fields
from seedbed.streams.server import Client, Server
from seedbed.types import SeedbedError

HOST = "host"
"""What a host calls itself at the door."""
NAME = "host-"
"""How the names of hosts begin."""
_NAMES = re.compile(rf"{NAME}[0-9]{{1,9}}", re.ASCII)
_TICK_S, _TELL_S = 0.1, 1.0


class Registrar:
    """The coordinator's door for hosts, in a thread of its own: a `server.Handler`."""

    def __init__(self, run: Path, listen: str, term: int, joined: Callable[[str], None]) -> None:
        """Listens, and writes where into the run's folder.

        `joined` gets the name of each host that has told where it is, in the door's thread, again and again
        until the host is connected. Raises SeedbedError if the address cannot be had, or the disk refuses.
        """
        self._run, self._listen, self._joined = run, listen, joined
        self._directory = Directory(run)
        self._closed = threading.Event()
        at, path = listening_ports(listen), run / CREDENTIALS / ADDRESS
        self._server = Server(self, Place(COORDINATOR, 0), Kind, run / CREDENTIALS)
        try:
            port = listen_at(self._server, at, former_port(run / CREDENTIALS))
            self.addresses = advertised(at.host, port, ())
        except OSError as error:
            self._server.close()
            raise SeedbedError(
                f"the door for hosts cannot listen at {listen} ({error.strerror}): name an address that this "
                "machine has, or more ports, with --listen"
            ) from error
        try:
            write_json(path, {"term": term, "addresses": self.addresses, "insecure": False})
        except OSError as error:
            self._server.close()
            raise SeedbedError(
                f"{printable(path)} cannot be written ({error.strerror}): name another folder with --run"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="hosts", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._server.serve(_TICK_S)
        self._server.close()

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Names a host that has no name yet; takes the address of one that has."""
        del client
        if said["role"] != HOST:
            raise ProtocolError(f"the coordinator's door is for hosts, not for a {said['role']!r}")
        told = require_fields(said, name=str, shares=bool)
        name = told["name"]
        if not name:
            private = "" if told["shares"] else (self._run / CREDENTIALS / PRIVATE).read_text()
            name = f"{NAME}{self._directory.take_number(HOST)}"
            return {"name": name, "listen": self._listen, "private": private}
        if not _NAMES.fullmatch(name):
            raise ProtocolError(f"{name!r} is no name of a host")
        try:
            address = Address.from_json(said.get("address"))
        except (ValueError, TypeError, KeyError) as error:
            raise ProtocolError(f"{name} has told no address ({error!r})") from error
        self._directory.announce(name, address)
        self._joined(name)
        return {}

    def take(self, client: Client, kind: enum.IntEnum, body: memoryview) -> None:
        """Takes nothing more."""
        raise ProtocolError(f"{kind.name} came out of turn")

    def leave(self, client: Client, refusal: ProtocolError | None) -> None:
        """Does nothing: a host stays only to say what it has to say."""

    def close(self) -> None:
        """Listens no more."""
        self._closed.set()
        self._thread.join()


class Entrance:
    """The addresses of a run's door, as a host knows them; what `Caller` asks as a directory."""

    def __init__(self, addresses: Callable[[], Sequence[tuple[str, int]]]) -> None:
        self._addresses = addresses

    def find(self, role: str) -> Address | None:
        """Returns where the coordinator may be, None if nobody knows."""
        del role
        found = tuple(self._addresses())
        return Address(0, 0, "", "", found) if found else None


class Named(NamedTuple):
    """The answer of the door to a host that has no name yet."""

    name: str
    listen: str  # where the roles of the run listen
    private: str  # the private key and the certificate of the run, if it does not see the folder


class Registration:
    """A host's side of the door. `register` is for the main thread; `keep` begins a thread."""

    def __init__(self, run: Path, entrance: Entrance, shares: bool) -> None:
        """`run` has the run's key in its folder `listen`; `shares` says whether it is the coordinator's."""
        self._run, self._entrance, self._shares = run, entrance, shares
        self._number = secrets.randbits(53)
        self._ended = threading.Event()
        self.refusal: SeedbedError | None = (
            None  # why the coordinator does not want this host any more
        )
        self._thread: threading.Thread | None = None

    def _call(self, stop: Callable[[Caller], bool], **said: Any) -> dict[str, Any] | None:
        """Says something at the door, as often as it takes; returns the answer, None if `stop` does first.

        Raises SeedbedError if the coordinator refuses this host.
        """
        caller = Caller(self._entrance, self._run / CREDENTIALS, COORDINATOR, lambda: stop(caller))
        hello = {"role": HOST, "number": self._number, "shares": self._shares, **said}
        try:
            return caller.connect(lambda: hello)
        except Stopped:
            return None
        finally:
            caller.close()

    def register(self, stop: Callable[[Caller], bool]) -> Named | None:
        """Waits for a coordinator that gives this host a name; returns None if `stop` does first.

        `stop` is called several times a second, and may raise. Raises SeedbedError if this host is
        refused, or if what it gets is no name of a host: the name becomes a part of paths.
        """
        said = self._call(stop, name="")
        if said is None:
            return None
        if not _NAMES.fullmatch(str(said.get("name"))):
            raise SeedbedError(
                f"the coordinator names this host {said.get('name')!r}, and names are {NAME} and a number: "
                "check the address, and that both machines have the same version"
            )
        return Named(**{name: str(said[name]) for name in Named._fields})

    def keep(
        self, name: str, find: Callable[[], Address | None], coordinated: Callable[[], bool]
    ) -> None:
        """Tells where the host is, whenever no coordinator is connected to it, until `close`.

        `find` returns the address, None if there is none yet. Not from the folder: a coordinator that has
        given this host up removes it there.
        """

        def tell() -> None:
            while not self._ended.wait(_TELL_S if coordinated() else _TICK_S):
                address = find()
                if coordinated() or address is None:
                    continue
                try:
                    self._call(
                        lambda _: self._ended.is_set() or coordinated(),
                        name=name,
                        address=address._asdict(),
                    )
                except SeedbedError as error:
                    self.refusal = error
                    return
                self._ended.wait(_TELL_S)

        self._thread = threading.Thread(target=tell, name="registration", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells nothing more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
