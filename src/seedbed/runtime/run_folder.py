"""A run's folder: `config.json`, `metrics.jsonl`, TensorBoard events, `checkpoints/` and `replay/`."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from seedbed.runtime.checkpoint_writer import list_steps, remove_leftovers
from seedbed.types import SeedbedError

CONFIG = "config.json"
LOCK = ".lock"
"""Held by the process that trains into the folder."""
SAVING = ".saving.lock"
"""Held by that process and by the helper that writes its checkpoints, which may outlive it."""
PATIENCE_S = 60.0
"""Seconds in which the helper of a trainer that was killed may finish its write."""


def default_path(preset: str, now: Callable[[], datetime.datetime] | None = None) -> Path:
    """Names the folder of a new run, such as `runs/pong-impala-20250131-142500`."""
    moment = (now or datetime.datetime.now)()
    name = "".join(c if c.isalnum() or c in "._" else "-" for c in preset).strip("-")
    return Path("runs") / f"{name}-{moment:%Y%m%d-%H%M%S}"


class RunFolder:
    """A run's folder, held by one training process until `close` (or its and its helper's death)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: dict[str, int] = {}  # descriptors

    @classmethod
    def create(cls, path: Path, tell: Callable[[str], None] = lambda text: None) -> RunFolder:
        """Makes the folder of a new run; an existing folder must be empty. Waits as `resume` does."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            content = [each.name for each in path.iterdir() if each.name not in (LOCK, SAVING)]
        except OSError as error:
            raise _unusable(path, error) from error
        if content:
            remedy = "continue it with --resume, or " if CONFIG in content else ""
            raise SeedbedError(
                f"the run folder {path} is not empty (it holds {sorted(content)[0]}): {remedy}"
                "name another folder with --run"
            )
        run = cls(path)
        run._take(tell)
        return run

    @classmethod
    def resume(cls, path: Path, tell: Callable[[str], None] = lambda text: None) -> RunFolder:
        """Opens the folder of an earlier run to go on with it.

        If the run was killed and the helper that writes its checkpoints has not ended yet, this calls
        `tell` with a message and waits for the helper, at most `PATIENCE_S`. Raises SeedbedError if the
        helper takes longer, or if another process trains into the folder.
        """
        run = cls.read(path)
        run._take(tell)
        return run

    def _take(self, tell: Callable[[str], None]) -> None:
        """Takes both locks, and removes half-written checkpoints."""
        try:
            if not self._lock(LOCK):
                raise SeedbedError(
                    f"another process trains into {self.path}: wait for it, stop it, or name another "
                    "folder"
                )
            self._wait_for_helper(tell)
            remove_leftovers(self.checkpoints)
        except OSError as error:
            self.close()
            raise _unusable(self.path, error) from error
        except BaseException:
            self.close()
            raise

    def _wait_for_helper(self, tell: Callable[[str], None]) -> None:
        """Takes the lock that the helper of a killed trainer may still hold, as soon as the helper ends."""
        if self._lock(SAVING):
            return
        tell(
            f"waiting until the helper that wrote checkpoints to {self.path} has ended: its trainer was "
            "killed"
        )
        deadline = time.monotonic() + PATIENCE_S
        while not self._lock(SAVING):
            if time.monotonic() > deadline:
                raise SeedbedError(
                    f"the helper of a trainer that was killed still writes a checkpoint to {self.path}: "
                    "wait until it ends, or end it (its program is seedbed.runtime.checkpoint_writer)"
                )
            time.sleep(0.05)

    def _lock(self, name: str) -> bool:
        """Locks a file of the folder; returns False if another process holds it."""
        # flock ends with the processes that have the descriptor, so a killed run leaves nothing to clean up.
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._locks[name] = descriptor
        return True

    @property
    def lock(self) -> int:
        """The descriptor that a helper must inherit to write into the folder for this process."""
        return self._locks[SAVING]

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Opens the folder of a run to look at it, also while it trains."""
        if not (path / CONFIG).is_file():
            what = "there is no such folder" if not path.exists() else f"it has no {CONFIG}"
            raise SeedbedError(f"{path} is not the folder of a run: {what}; check the path")
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def replay(self) -> Path:
        """The folder of what is kept to learn from again."""
        return self.path / "replay"

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes the run's resolved configuration, atomically."""
        temporary = self.path / f".{CONFIG}.new"
        try:
            with temporary.open("w") as file:
                json.dump(config, file, indent=2)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path / CONFIG)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _unusable(self.path, error) from error

    def read_config(self) -> dict[str, Any]:
        """Reads the run's configuration."""
        try:
            config = json.loads((self.path / CONFIG).read_text())
        except (OSError, ValueError) as error:
            raise SeedbedError(
                f"{self.path / CONFIG} cannot be read ({error}): restore it, or start a new run"
            ) from error
        if not isinstance(config, dict):
            raise SeedbedError(f"{self.path / CONFIG} is not a JSON object: restore it")
        return config

    @contextlib.contextmanager
    def training(self, config: dict[str, Any]) -> Iterator[None]:
        """Keeps a configuration while a run trains with it; closes the folder at the end.

        A failure before anything was saved leaves the folder as it was: a new run's goes, and a resumed
        run has the configuration that its checkpoints were trained with.
        """
        former = self.read_config() if (self.path / CONFIG).exists() else None
        before = list_steps(self.checkpoints)
        try:
            self.write_config(config)
            yield
        except BaseException:
            if former is None:
                self.discard_untrained()
            elif set(list_steps(self.checkpoints)) <= set(before):
                with contextlib.suppress(
                    SeedbedError
                ):  # what failed is told, not that it filled the disk
                    self.write_config(former)
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Lets other processes train into the folder, as soon as a helper that is left has ended."""
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks.clear()

    def discard_untrained(self) -> None:
        """Removes the files of a run that failed before it trained, and closes the folder."""
        with contextlib.suppress(OSError), contextlib.closing(self):
            metrics = self.path / "metrics.jsonl"
            trained = metrics.exists() and metrics.stat().st_size > 0
            entries = list(self.path.iterdir())
            own = (CONFIG, LOCK, SAVING, metrics.name, self.checkpoints.name, self.replay.name)
            if trained or any(
                entry.name not in own and ".tfevents." not in entry.name for entry in entries
            ):
                return
            if self.checkpoints.is_dir():
                self.checkpoints.rmdir()  # refuses where there is a checkpoint
            shutil.rmtree(self.replay, ignore_errors=True)
            for entry in self.path.iterdir():
                entry.unlink()
            self.path.rmdir()


def _unusable(path: Path, error: OSError) -> SeedbedError:
    return SeedbedError(
        f"the run folder {path} cannot be written ({error.strerror or error}): "
        "name another folder with --run"
    )
