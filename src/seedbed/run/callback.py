"""What users' own code is told of a run while it goes on, and how it ends the run."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from seedbed.errors import SeedbedError
from seedbed.nearest import did_you_mean

OnMetrics: TypeAlias = Callable[[dict[str, Any]], Any]
"""A function that gets each line of metrics, as `Callback.on_metrics` does."""


class Callback:
    """A base class for users' code that follows a run; all of its methods do nothing.

    Each may return True: the run is then saved, evaluated and ended. The thread that called `train` calls
    them. Reports and checkpoints wait while they work; in the fused runtime, training does, too. An Exception
    is told, but not again until the method has worked once, and training goes on. If one changes the working
    directory, that holds until it returns.
    """

    def on_start(self, run: Path) -> Any:
        """Is called before training begins or goes on, with the folder of the run."""

    def on_metrics(self, metrics: dict[str, Any]) -> Any:
        """Is called with each line of metrics as `metrics.jsonl` gets it.

        It has names and plain values, None for NaN, and comes every `log_every_s` seconds and once at the
        end.
        """

    def on_checkpoint(self, step: int, folder: Path) -> Any:
        """Is called when a checkpoint of `step` transitions is whole, with its folder.

        A checkpoint that another follows at once may be left out. It is removed when there are
        `keep_checkpoints` newer ones, unless it is the best.
        """

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> Any:
        """Is called with what came of an evaluation of the parameters after `step` transitions."""

    def on_end(self, summary: dict[str, Any]) -> None:
        """Is called when the run has ended, also after a signal, with the summary that `train` returns.

        It is not called if the run fails.
        """


def require_callback(callback: object) -> None:
    """Raises SeedbedError for a class in place of an object, and for a method that nothing would call."""
    if isinstance(callback, type):
        raise SeedbedError(
            f"train: callback is the class {callback.__name__}: give an object, {callback.__name__}()"
        )
    if not isinstance(callback, Callback):
        return
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if name.startswith("on_") and name not in known:
            hint = did_you_mean(name, known)
            raise SeedbedError(f"train: callback has a method {name}, which is not called{hint}")


@contextlib.contextmanager
def _same_folder() -> Iterator[None]:
    """Keeps the working directory, to which a run's path may be relative, if it can be opened."""
    try:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.fchdir(folder)
        os.close(folder)


class _OfMetrics(Callback):
    """A callback of a function of metrics."""

    def __init__(self, function: OnMetrics) -> None:
        self._function = function

    def on_metrics(self, metrics: dict[str, Any]) -> Any:
        return self._function(metrics)


class Listener:
    """A callback as a session calls it: it cannot fail."""

    def __init__(self, callback: Callback | OnMetrics | None, warn: Callable[[str], None]) -> None:
        """Takes a user's callback; `warn` gets a message about each failure."""
        if callback is None:
            callback = Callback()
        self._callback = callback if isinstance(callback, Callback) else _OfMetrics(callback)
        self._warn = warn
        self._failing: set[str] = set()

    def tell(self, method: str, *args: Any) -> bool:
        """Calls a method of the callback; returns whether it asked to end the run."""
        try:
            with _same_folder():
                answer = getattr(self._callback, method)(*args)
        except Exception as error:
            if method not in self._failing:
                text = "".join(traceback.format_exception_only(error)).strip()
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}, line {last.lineno}"
                self._warn(f"{method} failed: {text} ({where}); training goes on")
            self._failing.add(method)
            return False
        self._failing.discard(method)
        return isinstance(answer, bool | np.bool_) and bool(answer)
