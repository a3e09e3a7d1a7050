"""A process of the learner's that publishes timesteps: how it is started, listened to and ended."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from seedbed import strict_json
from seedbed.actors.actor import FDS, MESSAGE_BYTES
from seedbed.actors.slots import Slot, SlotLayout
from seedbed.exit_status import TemporaryError
from seedbed.streams.supervisor import Supervisor, exit_text, start_module
from seedbed.types import EnvSpec, SeedbedError

TAIL_BYTES = 8192
"""How many of the last bytes of a process's output are kept."""
_ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}


# Seconds until a start that the system has refused is tried again.
_AGAIN_S = 1.0


class NotStarted(SeedbedError):
    """Raised if the system refuses to start a process."""


def start_again(
    start: Callable[[], None], supervisor: Supervisor, note: Callable[[str], None]
) -> None:
    """Starts the process that takes the place of another, and waits a second where the system refuses that.

    Raises SeedbedError after `MAX_DEATHS` refusals. Call from the pool's thread only.
    """
    while True:
        try:
            return start()
        except NotStarted as error:
            note(supervisor.end(f"could not be started ({error.__cause__})", early=True))
            time.sleep(_AGAIN_S)


class ChildProcess:
    """A running process that publishes timesteps: a `peers.Peer`.

    It reads its job from stdin. It has one end of a socket pair, over which JSON and descriptors pass. Only
    the pool's thread uses it, but for `pid` and `cpu_seconds`. The constructor starts `module`, gives it the
    job, and raises NotStarted if it cannot.
    """

    def __init__(
        self, module: str, job: dict[str, Any], groups: range, lives: Sequence[int]
    ) -> None:
        self.groups = groups
        # How often it has said that it lives, besides by timesteps.
        self.beats = 0
        # The specification of the environments; None until the process has told it.
        self.spec: EnvSpec | None = None
        # What it has done that no other process would do better; None if nothing.
        self.fault: SeedbedError | None = None
        # The slots by group; empty before `share`.
        self.slots: list[Slot] = []
        # Descriptors of doorbells by group: (of observations, of actions).
        self.bells: list[tuple[int, int]] = []
        # The last `TAIL_BYTES` bytes that were read of the process's stdout and stderr.
        self.tail = bytearray()
        self._lives = lives
        # How often it was asked to end, and until when it may take for that, on the monotonic clock.
        self._asked, self._patient_until = 0, 0.0
        self._final_cpu_seconds = 0.0
        try:
            with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
                self._begin(module, job, ours, theirs)
                ours.pop_all()
        except OSError as error:
            raise NotStarted(f"cannot start a process of {module}: {error}") from error
        self.connection.setblocking(False)
        os.set_blocking(self.output, False)
        self.descriptors: dict[int, Callable[[], None]] = {
            self.connection.fileno(): self._receive,
            self.output: self._read_output,
        }

    def _begin(
        self,
        module: str,
        job: dict[str, Any],
        ours: contextlib.ExitStack,
        theirs: contextlib.ExitStack,
    ) -> None:
        """Starts the process; the stacks close the descriptors of either side. Raises OSError."""
        self.connection, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.enter_context(self.connection)
        theirs.enter_context(end)
        self.output, output = os.pipe()
        ours.callback(os.close, self.output)
        theirs.callback(os.close, output)
        # A file: neither a message nor a pipe holds the largest job.
        file = theirs.enter_context(os.fdopen(os.memfd_create("seedbed-job"), "w+b"))
        file.write(strict_json.dumps(job).encode())
        file.seek(0)
        self.popen = start_module(
            module,
            ("--fd", str(end.fileno())),
            _ONE_THREAD,
            stdin=file.fileno(),
            stdout=output,
            stderr=output,
            pass_fds=[end.fileno()],
        )

    @property
    def pid(self) -> int:
        """The process id. Any thread may read it."""
        return self.popen.pid

    @property
    def present(self) -> range | Sequence[int]:
        """The groups whose environments are there; all of them, for a process that has its own."""
        return self.groups

    def share(self, layout: SlotLayout) -> None:
        """Makes the shared memory and doorbells of the groups, and sends them to the process.

        A process that does not take what is sent is killed. Call from the pool's thread only.
        """
        count = len(self.groups)
        memory_fd = os.memfd_create("seedbed-slots")
        try:
            os.ftruncate(memory_fd, layout.size * count)
            memory = mmap.mmap(memory_fd, layout.size * count)
            self.slots = [Slot(layout, memory, i * layout.size) for i in range(count)]
            self.bells = [(os.eventfd(0), os.eventfd(0)) for _ in range(count)]
            for slot, life in zip(self.slots, self._lives, strict=True):
                slot.open(life)
            fds = [memory_fd, *(fd for pair in self.bells for fd in pair)]
            for first in range(0, len(fds), FDS):
                socket.send_fds(self.connection, [b"slots"], fds[first : first + FDS])
        except (BlockingIOError, ConnectionError):
            self.kill()
        finally:
            os.close(memory_fd)

    def _take(self, message: dict[str, Any]) -> None:
        """Takes a message of the process that is not an error."""
        raise NotImplementedError

    def _receive(self) -> None:
        """Reads a message of the process. After a hang-up it is killed."""
        try:
            data = self.connection.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.kill()
            return
        message = strict_json.loads(data)
        if "error" in message:
            kind = TemporaryError if message.get("temporary") else SeedbedError
            self.fault = kind(message["error"])
        else:
            self._take(message)

    def _read_output(self) -> None:
        if not self._drain():
            del self.descriptors[self.output]

    def _drain(self) -> bool:
        """Reads up to 64 KiB of the output without waiting; returns False if the output has ended."""
        try:
            text = os.read(self.output, 1 << 16)
        except BlockingIOError:
            return True
        self.tail = (self.tail + text)[-TAIL_BYTES:]
        return bool(text)

    def last_words(self) -> str:
        """Returns the end of the output. Call from the pool's thread only, before `release`."""
        self._drain()
        return self.tail.decode(errors="replace").strip()

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of the process up to its last timestep. Any thread may call this."""
        slots = self.slots
        return max((slot.cpu_seconds for slot in slots), default=self._final_cpu_seconds)

    def ended(self) -> str | None:
        """Returns None while the process lives, and then a phrase that says how it ended, or its fault.

        A process with a fault has ended for the pool, although its environments may still be closing. Call
        from the pool's thread only.
        """
        if self.fault is not None:
            return str(self.fault)
        status = self.popen.poll()
        if status is None:
            return None
        # What it said may not have been read yet: a hello and an error.
        for _ in range(2):
            if self.descriptors and self.fault is None:
                self._receive()
        return exit_text(status) if self.fault is None else str(self.fault)

    def kill(self) -> None:
        """Kills the process without waiting; nothing of it is read any more but its last words.

        Call from the pool's thread only.
        """
        self.popen.kill()
        self.descriptors = {}

    def leave(self, patience_s: float = 1.0) -> None:
        """Asks the process to exit, without waiting: by hanging up, and if it is asked again, by SIGTERM.

        `gone` then gives it so many seconds. Call from the pool's thread only.
        """
        if self._asked:
            self.popen.terminate()
            # A stopped process receives SIGTERM only when it continues.
            self.popen.send_signal(signal.SIGCONT)
        else:
            # Not closed: what was sent would be lost with what this process has not read.
            self.connection.shutdown(socket.SHUT_WR)
            self.descriptors = {}
            # A process without slots has nothing to clean up yet.
            if not self.slots:
                self.popen.terminate()
        self._asked += 1
        self._patient_until = time.monotonic() + patience_s

    def close(self) -> None:
        """Ends the process and releases everything; a second call does nothing.

        It waits as long as `leave` has said, calls it once more, and kills after another second. Call from
        the pool's thread only.
        """
        if self.output < 0:
            return
        if not self._asked:
            self.leave()
        while not self.gone():
            if self._asked < 2:
                self.leave()
            else:
                self.popen.kill()
                self.popen.wait()
        self.release()

    def gone(self) -> bool:
        """Waits as long as the last `leave` has said; returns whether the process has ended.

        Call from the pool's thread only.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(max(0.0, self._patient_until - time.monotonic()))
        return self.popen.returncode is not None

    def release(self) -> None:
        """Closes every descriptor. The shared memory is freed when no view of it is left.

        Call from the pool's thread only.
        """
        self._final_cpu_seconds = self.cpu_seconds()
        self.connection.close()
        for fd in [self.output, *(fd for pair in self.bells for fd in pair)]:
            if fd >= 0:
                os.close(fd)
        self.output, self.descriptors, self.bells, self.slots = -1, {}, [], []
