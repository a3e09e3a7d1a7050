"""How processes of this program start, what their ends mean, and when another one takes their place. No JAX.

A role is what a process does: an actor, the ingest process, a learner, a shard. Whoever keeps it going
has a `Supervisor`, which counts and words the ends; the process may be a child, or anywhere else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO

from seedbed.types import SeedbedError

MAX_DEATHS = 5
"""The number of early deaths in a row after which a role is not started again."""
_EARLY_S = 30.0  # from a start to an end that is early, where the role itself knows no better
_LINE_CHARACTERS = 300  # of a process's last line that a message quotes


def start_module(
    module: str,
    arguments: Sequence[str] = (),
    settings: Mapping[str, str | None] | None = None,
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts a module of this program in a process that finds the same modules as this one.

    `settings` are environment variables; None removes one. The rest is as in `Popen`. Any thread may call
    this. Raises OSError.
    """
    # What a process wrote last is what users see; by default JAX ends a traceback with a note of its own.
    unfiltered = {"JAX_TRACEBACK_FILTERING": "off"}
    environment = {**unfiltered, **os.environ, **same_modules(), **(settings or {})}
    return subprocess.Popen(
        # With -P and our path, it imports nothing from the current folder.
        [sys.executable, "-P", "-X", "faulthandler", "-m", module, *arguments],
        env={name: value for name, value in environment.items() if value is not None},
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(pass_fds),
        start_new_session=start_new_session,
    )


def own_output() -> TextIO:
    """Returns what a process answers its parent through: its standard output, which no longer is one.

    What an environment or a library prints goes to stderr from now on, and does not reach the parent as an
    answer.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def same_modules() -> dict[str, str]:
    """Returns the variables with which a Python that is started with -P finds this one's modules."""
    return {"PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)}


def exit_text(status: int) -> str:
    """Returns a phrase that says how a process ended. `status` is its return code, negative for a signal."""
    if status >= 0:
        return f"exited with status {status}"
    # Real-time signals have no names.
    known = -status in signal.Signals.__members__.values()
    return f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"


class Supervisor:
    """A role through all its processes. For one thread.

    Call `begin` at each start, `hung` when a process is killed for its silence, and `end` at each end.
    """

    def __init__(self, name: str, early: str = "soon after its start", log: str = "") -> None:
        """`name` and `early`, which says what an early end is, are for messages, as is the path of a log."""
        self.name, self.restarts = name, 0
        self._early, self._log = early, log
        self._deaths = 0  # early ones, in a row
        self._hung = ""  # how the process was killed, if it was
        self._begun_s = time.monotonic()

    def begin(self) -> None:
        """Notes that a process starts."""
        self._begun_s, self._hung = time.monotonic(), ""

    def hung(self, silent_s: float, option: str = "") -> None:
        """Notes that the process is killed; `option` is what sets the time, if the user can."""
        self._hung = f"was killed, as it gave no sign for {silent_s:g} s{option and f' ({option})'}"

    def end(self, how: str, words: str = "", early: bool | None = None, after: str = "") -> str:
        """Takes the end of the process; returns a notice that it is started again.

        `how` is a phrase, `after` says what the process had done, `words` is the end of what it has written,
        and `early` tells whether it was of no use; if that is None, the time since its start decides. Raises
        SeedbedError, with all words, after `MAX_DEATHS` early ends in a row.
        """
        if early is None:
            early = time.monotonic() < self._begun_s + _EARLY_S
        self._deaths = self._deaths + 1 if early else 0
        if self._hung:
            how, self._hung = self._hung + ("," if after else ""), ""
        how += after
        last = last_line(words)
        if self._deaths >= MAX_DEATHS:
            see = f"; see {self._log}" if self._log else ""
            raise SeedbedError(
                f"{self.name} died {MAX_DEATHS} times in a row {self._early}; the last time it {how}{see}"
                + quoted(words)
            )
        self.restarts += 1
        return f"{self.name} {how}{f' ({last})' if last else ''}; started again"


def quoted(words: str) -> str:
    """Returns a quotation of an output: its last line first, which is all that users see, and then all."""
    return f"; its last words: {last_line(words)}\n{words}" if words else "; it wrote nothing"


def last_line(words: str) -> str:
    """Returns the last line of an output, shortened, for a message of one line; "" if there is none."""
    lines = words.strip().splitlines()
    return lines[-1].strip()[-_LINE_CHARACTERS:] if lines else ""
