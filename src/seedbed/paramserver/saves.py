"""The saves of a parameter shard: its part of the learner state and its books, of one moment."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.files import read_arrays, write_arrays
from seedbed.printable import printable
from seedbed.types import SeedbedError, Tree

_MAGIC = b"seedbed shard 1"


class ShardSave(NamedTuple):
    """The content of a shard's save."""

    books: dict[str, Any]  # what `ShardLedger.save` returned
    leaves: Sequence[np.ndarray]  # of the shard's part of the learner state

    def state(self, like: Tree) -> Tree:
        """Returns the state with the structure of `like`; raises SeedbedError if the shapes differ."""
        expected, structure = jax.tree.flatten(like)
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in self.leaves]
        if shapes != [(tuple(leaf.shape), str(leaf.dtype)) for leaf in expected]:
            raise SeedbedError(
                "a parameter shard's save is of another agent, or of another number of shards: resume the "
                "run from its checkpoint"
            )
        return jax.tree.unflatten(structure, list(self.leaves))

    def write(self, path: Path) -> None:
        """Replaces the save at a path; raises OSError."""
        arrays = {str(number): np.asarray(leaf) for number, leaf in enumerate(self.leaves)}
        write_arrays(path, _MAGIC, {"books": self.books}, arrays)

    @classmethod
    def read(cls, path: Path) -> ShardSave:
        """Reads the save at a path; raises SeedbedError if it is not whole."""
        try:
            header, arrays = read_arrays(path, _MAGIC)
        except (OSError, ValueError) as error:
            raise SeedbedError(
                f"{printable(path)} cannot be used ({error}): remove the folder "
                f"{path.parent.parent.name} and resume "
                "the run from its checkpoint"
            ) from error
        return cls(header["books"], list(arrays.values()))


class Saver:
    """A thread that writes saves. `offer` and `close` are for the shard's thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.error = ""  # why the last save could not be written; "" if it was
        self.written = 0  # saves
        self._notices: collections.deque[str] = collections.deque()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self._thread is not None and self._thread.is_alive()

    def offer(self, save: ShardSave) -> None:
        """Writes a save beside the shard's work; `busy` must be false, and nobody may change its arrays."""
        assert not self.busy
        self._thread = threading.Thread(target=self._write, args=(save,), daemon=True)
        self._thread.start()

    def _write(self, save: ShardSave) -> None:
        try:
            save.write(self._path)
            self.error, self.written = "", self.written + 1
        except OSError as error:
            if not self.error:
                self._notices.append(
                    f"{self._path} cannot be written ({error.strerror or error}): free the disk, or what is "
                    "learned until the next checkpoint is lost if this shard dies; tried again"
                )
            self.error = str(error)

    def take_notices(self) -> list[str]:
        """Returns messages for the user, each once; a failure that goes on is told once."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def close(self) -> None:
        """Waits until nothing is written."""
        if self._thread is not None:
            self._thread.join()
