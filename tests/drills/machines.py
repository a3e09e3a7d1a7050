"""Machines of a drill: namespaces with processes, a network and temporary files of their own.

They share two disks in memory and the installed programs. All are in one user namespace, so that no right is
needed but that of making one; when the outermost process ends, nothing of them is left.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

HERE = Path(__file__).parent
RUNS = Path("/mnt")
"""Where machines see the disk for runs, which a drill can fill."""
RECORDS = Path("/srv")
"""Where machines see the disk for what a drill records."""
_DISKS = f"mount -t tmpfs -o size=48m runs {RUNS} && mount -t tmpfs records {RECORDS}"
_PRIVATE = "mount -t tmpfs tmp /tmp && mount -t tmpfs shm /dev/shm"
# Until its input ends: with whoever has started it.
_WAIT = "ip link set lo up && echo ready && exec cat"


def missing() -> str:
    """Returns what this machine lacks for a drill, "" if nothing."""
    if not (shutil.which("unshare") and shutil.which("ip") and Path("/dev/net/tun").exists()):
        return "unshare, ip and /dev/net/tun"
    if any(Path(path).is_relative_to("/tmp") for path in (HERE, sys.prefix)):
        return "a place outside /tmp for this repository, which its machines do not share"
    made = subprocess.run(
        ["unshare", "-Urnmpu", "--fork", "--mount-proc", "sh", "-c", _DISKS], capture_output=True
    )
    return "" if made.returncode == 0 else "the right to make user namespaces"


def wait_until(done: Callable[[], bool], what: str, seconds: float = 60.0) -> float:
    """Waits until `done()`, and returns the seconds; raises TimeoutError that names `what`."""
    begun = time.monotonic()
    while not done():
        if time.monotonic() > begun + seconds:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.05)
    return time.monotonic() - begun


class Process:
    """A command on a machine, and what it prints."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._popen, self.log = popen, log
        wait_until(lambda: self._find() is not None or popen.poll() is not None, "a command", 10)
        self._child = self._find()

    def _find(self) -> psutil.Process | None:
        """Returns the process on the machine; ours only waits for it."""
        try:
            return next(iter(psutil.Process(self._popen.pid).children()), None)
        except psutil.NoSuchProcess:
            return None

    @property
    def child(self) -> psutil.Process:
        """The process on the machine."""
        assert self._child is not None, self.said()
        return self._child

    def tree(self) -> list[psutil.Process]:
        """Returns the process on the machine and those that it has started."""
        return [self.child, *self.child.children(recursive=True)]

    def said(self) -> str:
        """Returns what it has printed."""
        return self.log.read_text()

    def code(self) -> int | None:
        """Returns its exit status, None while it runs."""
        return self._popen.poll()

    def suspend(self) -> None:
        """Stops it."""
        self.child.suspend()

    def resume(self) -> None:
        """Lets it go on. The process that waits for it has stopped, too."""
        self.child.resume()
        psutil.Process(self._popen.pid).resume()

    def kill(self) -> None:
        """Kills it, and waits until it has ended; what it has started lives on."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.child.kill()
        self._popen.wait(20)

    def terminate(self) -> int:
        """Asks it to end, waits, and returns its exit status."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.child.terminate()
        return self._popen.wait(60)


class Machine:
    """A machine, which has a name."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self.name = world, name
        self.set_clock(0)
        command = f"hostname {name} && {_PRIVATE} && {_WAIT}"
        unshare = ["unshare", "-nmpu", "--fork", "--kill-child", "--mount-proc"]
        self._outer = world.begin([*world.enter, *unshare, "sh", "-c", command])
        self._init = psutil.Process(self._outer.pid).children(recursive=True)[-1].pid
        self.enter = [*_ENTER, "-n", "-m", "-p", "-u", "-t", str(self._init)]

    @property
    def network(self) -> int:
        """A process in the machine's network."""
        return self._init

    def call(self, *commands: str) -> None:
        """Runs short commands; raises CalledProcessError."""
        for command in commands:
            subprocess.run([*self.enter, *command.split()], check=True, capture_output=True)

    def start(self, name: str, command: Sequence[str], **environment: str) -> Process:
        """Starts a command, whose output goes to a log of this name; raises TimeoutError.

        If the library for that is there, the command has the time of the machine's clock.
        """
        if (library := find_faketime()) is not None:
            environment |= {
                "LD_PRELOAD": str(library),
                "FAKETIME_TIMESTAMP_FILE": str(RECORDS / f"clock-{self.name}"),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        log = self._world.logs / f"{name}.log"
        with log.open("ab") as file:
            popen = subprocess.Popen(
                [*self.enter, *command],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **_programs(), **environment},
            )
        self._world.keep(popen)
        return Process(popen, log)

    def seedbed(self, name: str, *arguments: str, **environment: str) -> Process:
        """Starts our command; raises TimeoutError."""
        return self.start(name, [sys.executable, "-m", "seedbed", *arguments], **environment)

    def set_clock(self, ahead_s: float) -> None:
        """Sets the clock of what `seedbed` has started and starts from now on."""
        (self._world.records / f"clock-{self.name}").write_text(f"{ahead_s:+.0f}\n")

    def power_off(self) -> None:
        """Ends everything on the machine at once; it cannot be used again."""
        psutil.Process(self._init).kill()
        self._outer.wait(20)


class World:
    """Some machines, the disks that they share, and their links. A context manager; for one thread.

    It ends with the process that has made it, however that ends.
    """

    def __init__(self, logs: Path) -> None:
        self.logs, self._processes = logs, list[subprocess.Popen[Any]]()
        command = f"{_DISKS} && {_WAIT}"
        unshare = ["unshare", "-Urnmp", "--fork", "--kill-child", "--mount-proc"]
        outer = self.begin([*unshare, "sh", "-c", command])
        init = psutil.Process(outer.pid).children()[0].pid
        self.enter = [*_ENTER, "-n", "-m", "-p", "-t", str(init)]
        root = Path(f"/proc/{init}/root")
        # The disks, as they are seen from outside.
        self.runs, self.records = root / RUNS.relative_to("/"), root / RECORDS.relative_to("/")

    def begin(self, command: list[str]) -> subprocess.Popen[str]:
        """Starts a process that lives as long as the world, and waits until it is ready."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **_programs()},
        )
        self.keep(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{command} has failed with {process.wait()}")
        return process

    def keep(self, process: subprocess.Popen[Any]) -> None:
        """Sees to it that a process ends with the world."""
        self._processes.append(process)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *failure: object) -> None:
        # The first one takes all that is in the world with it.
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


class Link:
    """A link between two machines, which can delay, lose, repeat, keep back and cut."""

    def __init__(self, world: World, one: Machine, other: Machine, number: int) -> None:
        """Gives the machines the addresses 10.77.NUMBER.1 and .2, and their ends the name `linkNUMBER`."""
        self.addresses, self.device = (f"10.77.{number}.1", f"10.77.{number}.2"), f"link{number}"
        self._ends = (one, other)
        link = [sys.executable, str(HERE / "link.py"), self.device, str(number)]
        self._process = world.begin([*link, str(one.network), str(other.network)])
        for machine, address in zip(self._ends, self.addresses, strict=True):
            machine.call(
                f"ip addr add {address}/24 dev {self.device}", f"ip link set {self.device} up"
            )

    def set(self, **conditions: float) -> None:
        """Sets the conditions of the link (`link.Conditions`), all others to none."""
        commands: IO[str] | None = self._process.stdin
        assert commands is not None
        commands.write(json.dumps(conditions) + "\n")
        commands.flush()

    def close(self) -> None:
        """Takes the link away."""
        self._process.kill()
        self._process.wait()

    def limit(self, rate: str) -> None:
        """Limits both directions to a rate of tc's, such as "1mbit"; "" lifts the limit."""
        how = f"add dev {self.device} root tbf rate {rate} burst 16kb latency 400ms"
        command = how if rate else f"del dev {self.device} root"
        for machine in self._ends:
            machine.call(f"tc qdisc {command}")


_ENTER = ["nsenter", "--preserve-credentials", "-U"]


def find_faketime() -> Path | None:
    """Returns the library that fakes the clock, None if it is not installed."""
    package = importlib.util.find_spec("libfaketime")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.rglob("libfaketime.so.1"), None)


def _programs() -> dict[str, str]:
    """Returns the environment in which a machine finds the programs that are tested."""
    return {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), *sys.path])}


def head() -> str:
    """Names the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()
