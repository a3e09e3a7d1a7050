"""One life of an actor process, as the learner sees it: its descriptors, memory and last words."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from seedbed.transport.slots import Layout, Slot
from seedbed.types import SeedbedError

TAIL_BYTES = 8192
_MODULE = "seedbed.transport.actor"
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}


class ActorProcess:
    """A running actor; everything it holds belongs to this life only."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.incarnation: int = job["incarnation"]
        self.slots: list[Slot] = []  # empty until the handshake
        self.bells: list[tuple[int, int]] = []  # (observation, action) by group
        self.tail = bytearray()  # the end of what it wrote to the terminal
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.setblocking(False)
        self.output, output = os.pipe()
        os.set_blocking(self.output, False)
        try:
            self.connection.send(json.dumps(job).encode())
            self.popen = subprocess.Popen(
                # -P and our path: the actor finds the modules that the learner finds
                [
                    sys.executable,
                    "-P",
                    "-X",
                    "faulthandler",
                    "-m",
                    _MODULE,
                    "--fd",
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(_path())},
            )
        except OSError as error:
            self.release()
            raise SeedbedError(f"cannot start an actor process: {error}") from error
        finally:
            theirs.close()
            os.close(output)

    def share(self, layout: Layout, groups: int) -> None:
        """Makes memory and doorbells and sends them over."""
        memory_fd = os.memfd_create("seedbed-slots")
        try:
            os.ftruncate(memory_fd, layout.size * groups)
            memory = mmap.mmap(memory_fd, layout.size * groups)
            self.slots = [Slot(layout, memory, i * layout.size) for i in range(groups)]
            self.bells = [(os.eventfd(0), os.eventfd(0)) for _ in range(groups)]
            for slot in self.slots:
                slot.open(self.incarnation)
            fds = [memory_fd, *(fd for pair in self.bells for fd in pair)]
            socket.send_fds(self.connection, [b"slots"], fds)
        finally:
            os.close(memory_fd)

    def drain(self) -> bool:
        """Reads what it wrote; returns whether it may write more."""
        try:
            text = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        self.tail = (self.tail + text)[-TAIL_BYTES:]
        return bool(text)

    def last_words(self) -> str:
        """Returns the end of its output."""
        self.drain()
        return self.tail.decode(errors="replace").strip()

    def cpu_seconds(self) -> float:
        """CPU time up to its last timestep."""
        return max((slot.cpu_seconds for slot in self.slots), default=0.0)

    def release(self) -> None:
        """Closes every descriptor; the memory goes when the last view of it goes."""
        self.connection.close()
        for fd in [self.output, *(fd for pair in self.bells for fd in pair)]:
            if fd >= 0:
                os.close(fd)
        self.output, self.bells, self.slots = -1, [], []


def _path() -> list[str]:
    return [str(Path(entry).absolute()) for entry in sys.path]


def exit_text(status: int) -> str:
    """Says how a process ended."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def end(processes: list[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Waits for processes that were asked to leave, then terminates, then kills them; reaps all."""
    if _gone(processes, patience_s):
        return
    for process in processes:
        process.terminate()
        process.send_signal(
            signal.SIGCONT
        )  # a stopped process gets its signal only when it goes on
    if _gone(processes, patience_s):
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def _gone(processes: list[subprocess.Popen[bytes]], patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    waiting = list(processes)
    while waiting:
        waiting = [process for process in waiting if process.poll() is None]
        if waiting and time.monotonic() > deadline:
            return False
        if waiting:
            time.sleep(0.002)
    return True
