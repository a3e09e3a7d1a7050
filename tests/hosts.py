"""Learners and hosts of actors that are joined by streams, and a link that can be cut."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from actor_pools import Learner
from seedbed.actors.local import local_pool
from seedbed.actors.process import Launcher
from seedbed.actors.remote import Listening, RemoteActors
from seedbed.envs.host.gym import FactoryEnv
from seedbed.streams import credentials

HOST = """
import sys, json, signal
from pathlib import Path
from seedbed.streams.credentials import ActorKey
from seedbed.actors.host import Host, HostOptions
key, port, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
insecure = options.pop("insecure", False)
options = HostOptions(**{"processes": 1, "allow": ("counting_environment",), **options})
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
tell = lambda text: print(text, flush=True)
host = Host(ActorKey.read(key), lambda: [("127.0.0.1", port)], options, insecure, tell)
print("ended:", host.run(lambda: bool(stopped)) or "stopped", flush=True)
"""


class Net:
    """A learner that listens, and hosts that are started and ended."""

    def __init__(
        self,
        folder: Path,
        env: FactoryEnv,
        *,
        group_size: int = 2,
        groups: int = 4,
        term: int = 1,
        port: int = 0,
        insecure: bool = False,
        actors: int = 0,
        timeout_s: float = 20.0,
    ) -> None:
        self.folder, self.ports = folder / credentials.FOLDER, []
        credentials.ensure_credentials(self.folder)
        launcher = Launcher(env=env, envs_per_group=group_size, groups=2, seed=0)
        self.pool = local_pool(launcher, actors=actors, others=groups)
        self.remote = RemoteActors(
            self.pool,
            Listening(
                host="127.0.0.1",
                port=port,
                former_port=0,
                folder=self.folder,
                insecure=insecure,
                term=term,
                env=env,
                group_size=group_size,
                groups=range(2 * actors, 2 * actors + groups),
                seed=0,
                timeout_s=timeout_s,
            ),
            self.ports.append,
        )
        self.hosts: list[subprocess.Popen[bytes]] = []
        self.learner = Learner(self.pool)

    def port(self) -> int:
        """Waits until the ingest process listens."""
        self.learner.run(lambda: bool(self.ports))
        return self.ports[-1]

    def start_host(self, port: int | None = None, **options: object) -> subprocess.Popen[bytes]:
        """Starts a host, whose output goes to a file of its number."""
        output = (self.folder / f"host{len(self.hosts)}.log").open("wb")
        host = subprocess.Popen(
            [
                sys.executable,
                "-c",
                HOST,
                str(self.folder / credentials.KEY),
                str(port or self.port()),
                json.dumps(options),
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            process_group=0,
        )
        self.hosts.append(host)
        return host

    def said(self, number: int = 0) -> str:
        """Returns what a host has printed."""
        return (self.folder / f"host{number}.log").read_text()

    def close(self) -> None:
        """Ends everything."""
        for host in self.hosts:
            host.send_signal(signal.SIGCONT)
            host.terminate()
        self.pool.close()
        for host in self.hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.wait(10)
            host.kill()
            host.wait()


def progress(net: Net, groups: range, steps: int = 20) -> None:
    """Turns until these groups have made so many more steps in the lives they are in then."""
    learner = net.learner
    learner.run(lambda: all(learner.steps[group] >= steps for group in groups))


class Proxy:
    """A TCP link to a port of this machine that can be cut, or stalled and healed. It runs in a thread."""

    def __init__(self, port: int) -> None:
        self._target, self._pairs, self._stalled = port, [], False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._pairs.append((client, server))
            for a, b in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self._stalled:
                    time.sleep(0.05)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Breaks every connection."""
        pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def stall(self) -> None:
        """Passes nothing on any more."""
        self._stalled = True

    def heal(self) -> None:
        """Passes on again; connections of before are lost."""
        self.cut()
        self._stalled = False

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.heal()
