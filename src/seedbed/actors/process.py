"""One life of an actor process, as the learner sees it: its descriptors, memory and output."""

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

from seedbed.actors.slots import Layout, Slot
from seedbed.types import SeedbedError

TAIL_BYTES = 8192
"""How many of the last bytes of an actor's output are kept."""
_MODULE = "seedbed.actors.actor"
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}


class ActorProcess:
    """A running actor process. Its slots, descriptors and output belong to this life of the actor only.

    The constructor starts the process, and raises SeedbedError if it cannot.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.incarnation: int = job["incarnation"]
        # The slots by group; empty before `share`.
        self.slots: list[Slot] = []
        # Descriptors of doorbells by group: (of observations, of actions).
        self.bells: list[tuple[int, int]] = []
        # The last `TAIL_BYTES` bytes that were read of the process's stdout and stderr.
        self.tail = bytearray()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.setblocking(False)
        self.output, output = os.pipe()
        os.set_blocking(self.output, False)
        try:
            self.connection.send(json.dumps(job).encode())
            self.popen = subprocess.Popen(
                # With -P and our path, the actor finds the same modules as the learner.
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
        """Makes the shared memory and doorbells of `groups` groups, and sends them to the actor.

        Raises BlockingIOError or ConnectionError if they cannot be sent. Call from the pool's thread only.
        """
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
        """Reads up to 64 KiB of the actor's output without waiting; returns False if the output has ended.

        Call from the pool's thread only, before `release`.
        """
        try:
            text = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        self.tail = (self.tail + text)[-TAIL_BYTES:]
        return bool(text)

    def last_words(self) -> str:
        """Returns the end of the actor's output. Call from the pool's thread only, before `release`."""
        self.drain()
        return self.tail.decode(errors="replace").strip()

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of the process up to its last timestep, 0 after `release`.

        Any thread may call this.
        """
        return max((slot.cpu_seconds for slot in self.slots), default=0.0)

    def release(self) -> None:
        """Closes every descriptor. The shared memory is freed when no view of it is left.

        Call from the pool's thread only.
        """
        self.connection.close()
        for fd in [self.output, *(fd for pair in self.bells for fd in pair)]:
            if fd >= 0:
                os.close(fd)
        self.output, self.bells, self.slots = -1, [], []


def _path() -> list[str]:
    return [str(Path(entry).absolute()) for entry in sys.path]


def exit_text(status: int) -> str:
    """Returns a phrase that says how a process ended. `status` is its return code, negative for a signal."""
    if status >= 0:
        return f"exited with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


def end(processes: list[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Waits until processes that were asked to exit have ended, and reaps them.

    After `patience_s` seconds those left get SIGTERM, and after another `patience_s` seconds SIGKILL. Any
    thread may call this, if no other one waits for these processes.
    """
    if _gone(processes, patience_s):
        return
    for process in processes:
        process.terminate()
        # A stopped process receives SIGTERM only when it continues.
        process.send_signal(signal.SIGCONT)
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
