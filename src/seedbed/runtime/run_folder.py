"""A run's folder: `config.json`, `metrics.jsonl`, TensorBoard events, `checkpoints/` and `replay/`."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from seedbed.runtime.checkpoint_writer import list_steps
from seedbed.types import SeedbedError

CONFIG = "config.json"
LOCK = ".lock"


def default_path(preset: str, now: Callable[[], datetime.datetime] | None = None) -> Path:
    """Names the folder of a new run, such as `runs/pong-impala-20250131-142500`."""
    moment = (now or datetime.datetime.now)()
    name = "".join(c if c.isalnum() or c in "._" else "-" for c in preset).strip("-")
    return Path("runs") / f"{name}-{moment:%Y%m%d-%H%M%S}"


class RunFolder:
    """A run's folder, held by one training process until `close` (or its death)."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Makes the folder of a new run; an existing one must be empty."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            content = [entry.name for entry in path.iterdir() if entry.name != LOCK]
        except OSError as error:
            raise _unusable(path, error) from error
        if content:
            remedy = "continue it with --resume, or " if CONFIG in content else ""
            raise SeedbedError(
                f"the run folder {path} is not empty (it holds {sorted(content)[0]}): {remedy}"
                "name another folder with --run"
            )
        return cls(path, _lock(path))

    @classmethod
    def resume(cls, path: Path) -> RunFolder:
        """Opens the folder of an earlier run to go on with it."""
        run = cls.read(path)
        run._lock = _lock(path)
        return run

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
        """Lets other processes train into the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard_untrained(self) -> None:
        """Closes, and removes what a run that failed before it trained has left."""
        self.close()
        with contextlib.suppress(OSError):
            metrics = self.path / "metrics.jsonl"
            trained = metrics.exists() and metrics.stat().st_size > 0
            entries = list(self.path.iterdir())
            own = (CONFIG, LOCK, metrics.name, self.checkpoints.name, self.replay.name)
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


def _lock(path: Path) -> int:
    # flock ends with the process, so a killed run leaves nothing to clean up.
    descriptor = -1
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise SeedbedError(
            f"another process trains into {path}: wait for it, stop it, or name another folder"
        ) from error
    except OSError as error:
        raise _unusable(path, error) from error
    return descriptor


def _unusable(path: Path, error: OSError) -> SeedbedError:
    return SeedbedError(
        f"the run folder {path} cannot be written ({error.strerror or error}): "
        "name another folder with --run"
    )
