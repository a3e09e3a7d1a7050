"""A process beside this one, for a library that is kept out of it: both talk in lines. It imports no JAX."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from seedbed.streams.supervisor import own_output, start_module

_END = "end"


class Beside:
    """That process, as its parent has it. `tell` is called by a thread of its own with what it says."""

    def __init__(
        self, module: str, arguments: Sequence[str], tell: Callable[[str], None], lost: str
    ) -> None:
        """Starts a module; `lost` is what `tell` gets if the process ends before it is to."""
        self._tell, self._lost = tell, lost
        self._process = start_module(
            module,
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What the terminal sends is for this process, which ends that one.
            start_new_session=True,
        )
        self._ending = False
        self._thread = threading.Thread(target=self._relay, daemon=True)

    def first(self, patience_s: float) -> dict[str, Any] | None:
        """Returns the first thing that it says, None if that takes too long; {} if it ends before.

        What it says afterwards goes to `tell`, unless it has an `error` to say: then it has ended.
        """
        try:
            if not select.select([self._process.stdout], [], [], patience_s)[0]:  # type: ignore[list-item]
                self._kill()
                return None
            said = self._read()
        except BaseException:
            self._kill()
            raise
        if said is None or "error" in said:
            self._kill()
            return said or {}
        self._thread.start()
        return said

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _relay(self) -> None:
        while (said := self._read()) is not None:
            self._tell(str(said.get("say") or said.get("error")))
        if not self._ending:
            self._tell(self._lost)

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self, patience_s: float | None) -> int | None:
        """Tells it to end, and waits; returns its exit status, None if it had to be killed."""
        self._ending = True
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{_END}\n".encode())
            self._process.stdin.close()
        except OSError:
            pass  # it has ended already
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._kill()
            self._thread.join()


class Parent:
    """The process's end. It ends when its parent says so, or is gone; what libraries print goes to stderr."""

    def __init__(self) -> None:
        # Whoever stops a machine signals every process; what is to be done at the end takes longer here.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._output = own_output()
        self.ending = threading.Event()  # it is time to end
        self.gone = False  # and nobody has said so: the parent was killed

    def say(self, **what: Any) -> None:
        """Says something; nothing, if the parent is gone."""
        try:
            self._output.write(json.dumps(what) + "\n")
            self._output.flush()
        except OSError:
            self.gone = True

    def listen(self) -> None:
        """Begins to wait for the word to end, or for the end of the parent."""

        def wait() -> None:
            self.gone = not sys.stdin.readline()
            self.ending.set()

        threading.Thread(target=wait, daemon=True).start()
