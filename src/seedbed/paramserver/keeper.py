"""How the coordinator keeps a role going: it starts its process, listens to it, and starts it again."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seedbed.exit_status import ExitStatus, TrainingDiverged, is_no_room
from seedbed.paramserver.caller import Caller, Stopped
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.launching import LOG, Launcher, RoleProcess, RoleSpec, launcher_of
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.role import COORDINATOR
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.messages import Message
from seedbed.streams.supervisor import Supervisor, exit_text, last_line
from seedbed.types import SeedbedError

_REPORT_S = 0.2
# Seconds of silence after which a process is killed: a role answers within a tenth of a second.
_HUNG_S = 20.0
# Seconds in which a process must answer that has told where it is; or do some work, if it has not told yet.
_START_S = 120.0
# Seconds between two starts for which the disk has no room.
_ROOM_S = 5.0


class Keeper:
    """A role through all its processes, in a thread of its own. Any thread may use it.

    `down_bytes` is the size of the largest block that the role sends to the coordinator.
    """

    def __init__(
        self,
        run: Path,
        role: RoleSpec,
        down_bytes: int,
        greeted: Callable[[Keeper, dict[str, Any]], None] = lambda keeper, said: None,
        launcher: Launcher | None = None,
    ) -> None:
        """Starts the role, or adopts its process if it runs. `greeted` is called at each connection.

        By default its `launcher` is that of this machine.
        """
        self.role, self.report = role, dict[str, Any]()
        self.reported = False  # whether `report` is of the process that there is
        self.failure: SeedbedError | None = None
        self._launcher, self._greeted = launcher or launcher_of(run, role), greeted
        self._directory = Directory(run)
        self._notices: collections.deque[str] = collections.deque(maxlen=50)
        self._closed, self._finishing = threading.Event(), threading.Event()
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._process = self._launcher.adopt()
        self._supervisor = Supervisor(role.name, log=str(self._directory.path / role.name / LOG))
        self._caller = Caller(self._directory, run / CREDENTIALS, role.name, self._gone)
        if down_bytes:
            self._caller.make_room(0, down_bytes)
        self.connected = False
        self._full = False  # whether the disk had no room for the last start
        self._thread = threading.Thread(target=self._guard, name=role.name, daemon=True)
        self._thread.start()

    @property
    def restarts(self) -> int:
        """How often its process was started again."""
        return self._supervisor.restarts

    @property
    def waits_for_room(self) -> bool:
        """Whether there is no process, because a disk had no room for it."""
        return self._full

    @property
    def pid(self) -> int | None:
        """The id of the role's process, None if there is none."""
        process = self._process
        return None if process is None else process.pid

    @property
    def caller(self) -> Caller:
        """The stream to the role. Only functions given to `request` may use it."""
        return self._caller

    def _gone(self) -> bool:
        """Returns whether nobody can answer; kills a process that hangs before it has told where it is."""
        process = self._process
        if process is not None and not self.connected and process.idle_s() > _START_S:
            self._end_hung(process, _START_S)
        return self._closed.is_set() or process is None or not process.alive()

    def _guard(self) -> None:
        try:
            while not self._closed.is_set():
                self._keep()
        except SeedbedError as error:
            self.failure = error
        except Exception as error:
            self.failure = SeedbedError(f"{self.role.name}: {error!r}")
        finally:
            self.connected = False
            self._caller.release()
            self._refuse_all()

    def _keep(self) -> None:
        """Starts the process if there is none, and listens to it while it lives."""
        if self._process is None or not self._process.alive():
            if self._finishing.is_set():
                self._closed.set()
                return
            self._bury()
            try:
                self._start()
            except ConnectionError:
                # The host did not answer: it may be gone, and the role belongs elsewhere then.
                self._closed.wait(_REPORT_S)
                return
            except OSError as error:
                if is_no_room(error):
                    self._await_room(str(error))
                    return
                how = f"could not be started ({error.strerror or error})"
                self._notices.append(self._supervisor.end(how, early=True))
                self._closed.wait(_REPORT_S)
                return
        try:
            until_s = time.monotonic() + _START_S
            said = self._caller.connect(lambda: self._hello(until_s))
            self.connected, self._full = True, False
            self._greeted(self, said)
            while not self._gone():
                self.fetch_report()
                self._serve(time.monotonic() + _REPORT_S)
        except (ConnectionError, Stopped):
            self.connected = False
            self._caller.close()

    def _hello(self, until_s: float) -> dict[str, Any]:
        if time.monotonic() > until_s and self._process is not None:
            self._end_hung(self._process, _START_S)
        return {"role": COORDINATOR, "number": 0}

    def _end_hung(self, process: RoleProcess, silent_s: float) -> None:
        """Kills a process that has been silent for so long, if it is ours; `_bury` tells it."""
        if process.ours:
            self._supervisor.hung(silent_s)
        process.end()

    def _await(self, kind: Kind) -> Message:
        """Returns the next message of a kind; a process that is silent for too long is killed."""
        until_s = time.monotonic() + _HUNG_S
        process = self._process
        assert process is not None
        while True:
            message = self._caller.receive(until_s)
            if message is None:
                if not process.ours:
                    self._notices.append(
                        f"{self.role.name} has given no sign for {_HUNG_S:.0f} s: looking for it"
                    )
                self._end_hung(process, _HUNG_S)
                raise ConnectionError(f"{self.role.name} gave no sign")
            if message.kind is kind:
                return message

    def _serve(self, until_s: float) -> None:
        """Calls the functions that `request` gets until this time."""
        while (left_s := until_s - time.monotonic()) > 0 and not self._gone():
            try:
                request = self._requests.get(timeout=min(left_s, 0.05))
            except queue.Empty:
                continue
            if not request.answer.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            try:
                request.answer.set_result(request.function(self))
            except BaseException as error:
                request.answer.set_exception(error)
                if not isinstance(error, SeedbedError):
                    raise

    def ask(
        self, kind: Kind, answer: Kind, block: np.ndarray | None = None, **fields: Any
    ) -> Message:
        """Sends a message and returns its answer. Only functions given to `request` may call this."""
        self._caller.send(kind, block, **fields)
        return self._await(answer)

    def fetch_report(self) -> dict[str, Any]:
        """Asks for a report, and takes its notices. Only functions given to `request` may call this."""
        report = self.ask(Kind.REPORT, Kind.REPORT).fields
        name = self.role.name
        self._notices.extend(f"{name}: {notice}" for notice in report.pop("notices", ()))
        self.report, self.reported = report, True
        return report

    def request(self, function: Callable[[Keeper], Any]) -> concurrent.futures.Future[Any]:
        """Has a function called by the role's thread when there is a stream. Any thread may call this."""
        request = _Request(function, concurrent.futures.Future())
        if self._closed.is_set() or self.failure is not None:
            request.answer.set_exception(ConnectionError(f"{self.role.name} has ended"))
        else:
            self._requests.put(request)
            if self._closed.is_set():
                self._refuse_all()  # the thread may have ended just before
        return request.answer

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._requests.get_nowait().answer
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(ConnectionError(f"{self.role.name} has ended"))

    def _bury(self) -> None:
        """Tells how a process has ended, if there was one; raises SeedbedError if another would not live."""
        if self._process is None:
            return
        code, answered = self._process.status(), self.reported
        self._process, self.reported = None, False
        if code == ExitStatus.NO_ROOM:
            said = last_line(self._launcher.last_words())
            self._await_room(said or str(self._directory.path))
            return
        words = self._launcher.last_words()
        if code == ExitStatus.DIVERGED and words:
            raise TrainingDiverged(last_line(words))
        if code == ExitStatus.REFUSED and words:
            raise SeedbedError(last_line(words))
        # A process that was killed has left words that have nothing to do with its end.
        words = "" if code == -signal.SIGKILL else words
        how = "has ended" if code is None else exit_text(code)
        # However long it has taken, an end before the first answer brings a run nothing.
        self._notices.append(self._supervisor.end(how, words, None if answered else True))

    def _start(self) -> None:
        self._supervisor.begin()
        self._process = self._launcher.start(anew=not self.report)
        if self._closed.is_set():
            self._process.end()  # `kill` came before there was a process

    def _await_room(self, why: str) -> None:
        """Waits before a start for which a disk had no room is tried again; tells it at the first time."""
        if not self._full:
            self._notices.append(
                f"{self.role.name} cannot be started, as its disk is full ({why}): make room there; it is "
                f"tried again every {_ROOM_S:.0f} s"
            )
        self._full = True
        self._closed.wait(_ROOM_S)

    def kill(self) -> None:
        """Ends the role at once, for good; does not wait. Call `close` afterwards, if there is time."""
        self._closed.set()
        if (process := self._process) is not None:
            process.kill()

    def take_notices(self) -> list[str]:
        """Returns messages for the user, each once. One thread at a time may call this."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def finish(self) -> None:
        """Lets the role end by itself, after it has saved what it has; does not wait."""
        self._finishing.set()
        self.request(lambda keeper: keeper.caller.send(Kind.FINISH))

    def abandon(self) -> None:
        """Ends the stream, and leaves the role to another coordinator."""
        self._closed.set()
        self._thread.join()

    def close(self, patience_s: float = 10.0) -> None:
        """Ends the role: it may take so long to end by itself after `finish`, and is killed then."""
        until_s = time.monotonic() + patience_s
        process = self._process
        there = process.alive if process is not None and process.ours else lambda: self.connected
        while there() and self._finishing.is_set() and time.monotonic() < until_s:
            time.sleep(0.02)
        self._closed.set()
        self._thread.join()
        if self._process is not None:
            self._process.end()


class _Request(NamedTuple):
    """What the role's thread is asked to do."""

    function: Callable[[Keeper], Any]
    answer: concurrent.futures.Future[Any]
