"""A run's folder: `config.json`, `metrics.jsonl`, `history.json`, checkpoints and more, and its locks."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from seedbed.exit_status import TemporaryError
from seedbed.files import copy_once, load_json, unfinished, write_json
from seedbed.printable import printable
from seedbed.run.checkpoint_helper import (
    TERMS,
    UNCLAIMED,
    Claim,
    list_steps,
    newest_claim,
    remove_leftovers,
    successor,
)
from seedbed.types import SeedbedError

CHECKPOINTS = "checkpoints"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
HISTORY = "history.json"
"""The file that tells when and where the run was trained, and how that ended."""
# What some mounts of Lustre and NFS say to flock.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
LOCK = ".lock"
"""The file that is locked by the process that trains into the folder."""
SAVING = ".saving.lock"
"""The file that is locked by that process and by its checkpoint helper, which may live longer than it."""
SCENE = "scene"
"""The key of a run's configuration with the place of its copied MJCF file in the folder."""
SCENES = "scenes"
"""The folder of the copies of MJCF files that the run has trained with."""
LISTEN = "listen"
"""The folder of the run's key, and of its address for actors of other machines."""
ROLES = "roles"
"""The folder of the processes of a run with a parameter server."""
LOOK_S = 0.2
"""The most seconds to wait for a lock that somebody holds who only looks whether a run is trained."""
PATIENCE_S = 60.0
"""The most seconds to wait until the helper of a killed trainer has finished its write."""


class TakenOver(SeedbedError):
    """Raised when another learner has the run now: this one writes nothing any more."""


def new_folder(preset: str, now: Callable[[], datetime.datetime] | None = None) -> Path:
    """Makes an empty folder for a new run, such as `runs/pong-impala-20250131-142500`; returns its path.

    Of runs that begin in the same second, others end in -2, -3 and so on. The path is relative to the working
    directory. `now` returns the time; None means the local clock. Raises SeedbedError if it cannot be made.
    """
    moment = (now or datetime.datetime.now)()
    name = "".join(c if c.isalnum() or c in "._" else "-" for c in preset).strip("-")
    path = first = Path("runs") / f"{name}-{moment:%Y%m%d-%H%M%S}"
    try:
        path.parent.mkdir(exist_ok=True)
        for number in itertools.count(2):
            # Others must not be able to write what a later start would import: run/trust.py.
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o755)
                break
            path = first.with_name(f"{first.name}-{number}")
    except OSError as error:
        raise _unusable(path, error) from error
    return path


class RunFolder:
    """A run's folder. `create` and `resume` lock it for training by one process; `read` does not.

    The locks end with `close`, or when the process and its helper have died; a helper that still runs keeps
    its own. For one thread at a time.
    """

    def __init__(self, path: Path, trusted: bool = False) -> None:
        self.path = path
        # Whether the user trusts the folder, whoever can write it; see run/trust.py.
        self.trusted = trusted
        # This start of a learner; term 0 if the folder was opened with `read`.
        self.claim = UNCLAIMED
        self._locks: dict[str, int] = {}  # descriptors
        self._unlocked = False  # whether the file system has no locks
        self._prepared = False  # whether the folder `listen` was there before the run

    @classmethod
    def create(cls, path: Path, tell: Callable[[str], None] = lambda text: None) -> RunFolder:
        """Makes and locks the folder of a new run; an existing folder must be empty.

        It may hold `listen`, if other machines have its key already. Waits as `resume` does. Raises
        SeedbedError if the folder is not empty or cannot be written, or if another process trains into it.
        """
        try:
            # Others must not be able to write what a later start would import: run/trust.py.
            path.mkdir(0o755, parents=True, exist_ok=True)
            # What a start leaves that was killed before it had written the configuration.
            own = (LOCK, SAVING, TERMS, LISTEN, unfinished(Path(CONFIG)).name)
            content = [each.name for each in path.iterdir() if each.name not in own]
            prepared = (path / LISTEN).is_dir()
        except OSError as error:
            raise _unusable(path, error) from error
        if content:
            remedy = "continue it with --resume, or " if CONFIG in content else ""
            raise SeedbedError(
                f"the run folder {printable(path)} is not empty (it holds {sorted(content)[0]}): {remedy}"
                "name another folder with --run"
            )
        run = cls(path)
        run._prepared = prepared
        run._take(tell)
        return run

    @classmethod
    def resume(cls, path: Path, tell: Callable[[str], None] = lambda text: None) -> RunFolder:
        """Opens and locks the folder of an earlier run, so that its training can continue.

        If the run was killed and the helper that writes its checkpoints has not ended yet, this calls `tell`
        with a message and waits for the helper, at most `PATIENCE_S` seconds. Raises SeedbedError if the
        helper takes longer, if another process trains into the folder, if it cannot be written, or if it is
        not the folder of a run.
        """
        run = cls.read(path)
        run._take(tell)
        return run

    def _take(self, tell: Callable[[str], None]) -> None:
        """Takes both locks, the next term, and half-written checkpoints away; keeps no lock if it raises."""
        try:
            self._await_lock(
                LOCK,
                LOOK_S,
                f"another process trains into {printable(self.path)}: wait for it, stop it, or name "
                "another folder",
            )
            self._wait_for_helper(tell)
            if self._unlocked:
                tell(
                    f"{printable(self.path)} is on a file system without locks: a second start would take "
                    "the run over from this one"
                )
            self.claim = self._next_claim()
            remove_leftovers(self.checkpoints)
        except OSError as error:
            self.close()
            raise _unusable(self.path, error) from error
        except BaseException:
            self.close()
            raise

    def _wait_for_helper(self, tell: Callable[[str], None]) -> None:
        """Takes the lock `SAVING`; waits if the helper of a killed trainer still holds it."""
        if self._lock(SAVING):
            return
        tell(
            f"waiting until the helper that wrote checkpoints to {printable(self.path)} has ended: its "
            "trainer was killed"
        )
        self._await_lock(
            SAVING,
            PATIENCE_S,
            "the helper of a trainer that was killed still writes a checkpoint to "
            f"{printable(self.path)}: wait, or end it (its program is seedbed.run.checkpoint_helper)",
        )

    def _await_lock(self, name: str, patience_s: float, refusal: str) -> None:
        """Takes a lock; raises TemporaryError, which says `refusal`, if another process holds it for long."""
        deadline = time.monotonic() + patience_s
        while not self._lock(name):
            if time.monotonic() > deadline:
                raise TemporaryError(refusal)
            time.sleep(0.01)

    def _next_claim(self) -> Claim:
        """Takes the next term, by making a file that nobody else can make."""
        terms = self.path / TERMS
        terms.mkdir(exist_ok=True)
        while True:
            claim = Claim(newest_claim(self.path).term + 1, secrets.token_hex(8))
            try:
                with (terms / f"{claim.term:06d}").open("x") as file:
                    file.write(claim.token)
            except FileExistsError:
                continue
            return claim

    def _forget_former_terms(self) -> None:
        # Files that cannot be removed do no harm.
        with contextlib.suppress(OSError):
            for former in (self.path / TERMS).iterdir():
                if former.name.isdecimal() and int(former.name) < self.term:
                    former.unlink(missing_ok=True)

    @property
    def term(self) -> int:
        """The number of this start of a learner; 0 if the folder was opened with `read`."""
        return self.claim.term

    def require_claim(self) -> None:
        """Raises TakenOver if another learner has the run; call it before anything is written."""
        require_claim(self.path, self.claim)

    def _lock(self, name: str) -> bool:
        """Locks a file of the folder; returns False if another process holds it."""
        # A flock ends when all processes with the descriptor have ended: a killed run leaves nothing behind.
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return False
                raise
            # The term says whose the run is: who comes later has it, and the one before ends.
            self._unlocked = True
        self._locks[name] = descriptor
        return True

    def is_training(self) -> bool:
        """Returns whether a process trains into the folder. Any thread of any process may call it.

        It never takes the lock of a run that is trained. If no process holds that lock, it takes a shared one
        for an instant, and `create` and `resume` wait for that.
        """
        try:
            # Not to wait for a writer, if it is a pipe.
            descriptor = os.open(self.path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    @property
    def lock(self) -> int:
        """The descriptor that a helper must inherit to write into the folder for this process.

        Raises KeyError if the folder was opened with `read`, or is closed.
        """
        return self._locks[SAVING]

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Opens the folder of a run to look at it, without a lock, so also while the run trains.

        Raises SeedbedError if it is not the folder of a run.
        """
        if not (path / CONFIG).is_file():
            what = "there is no such folder" if not path.exists() else f"it has no {CONFIG}"
            raise SeedbedError(
                f"{printable(path)} is not the folder of a run: {what}; check the path"
            )
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        """The path of the checkpoints' folder, which may be missing."""
        return self.path / CHECKPOINTS

    @property
    def listen(self) -> Path:
        """The path of the folder with what actors of other machines need, which may be missing."""
        return self.path / LISTEN

    @property
    def replay(self) -> Path:
        """The path of the folder for the saved replay, which may be missing."""
        return self.path / "replay"

    def write_config(self, config: dict[str, Any], files: Mapping[str, Path] | None = None) -> None:
        """Writes the run's resolved configuration, atomically. Raises SeedbedError if the disk refuses it.

        Copies `files`, named by their places in the folder, where their content never changes. Call it only
        with the folder locked, from one thread at a time.
        """
        try:
            write_json(self.path / CONFIG, config)
            for place, file in (files or {}).items():
                copy_once(file, self.path / place)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def read_config(self, read: Callable[[Path], Any] = load_json) -> dict[str, Any]:
        """Returns the run's configuration. Raises SeedbedError if it cannot be read or is no JSON object."""
        try:
            config = read(self.path / CONFIG)
        except (OSError, ValueError) as error:
            raise SeedbedError(
                f"{self.path / CONFIG} cannot be read ({error}): restore it, or start a new run"
            ) from error
        if not isinstance(config, dict):
            raise SeedbedError(f"{self.path / CONFIG} is not a JSON object: restore it")
        return config

    @contextlib.contextmanager
    def training(
        self, config: dict[str, Any], files: Mapping[str, Path] | None = None
    ) -> Iterator[None]:
        """Writes the configuration, for a run that trains in the `with` block; closes the folder at the end.

        `files` are those of `write_config`. If the block raises before the run has saved a new checkpoint, a
        new run's folder is removed as `discard_untrained` does, and a resumed run gets back the configuration
        that its checkpoints were trained with. Raises SeedbedError if the configuration cannot be written.
        For one thread at a time.
        """
        with contextlib.closing(self):
            # Not before: by the last one, a bucket that refuses this start knows the next one as ours.
            self._forget_former_terms()
            former = self.read_config() if (self.path / CONFIG).exists() else None
            before = list_steps(self.checkpoints)
            try:
                self.write_config(config, files)
                yield
            except BaseException:
                if successor(self.path, self.claim):
                    raise  # the folder is another's
                if former is None:
                    self.discard_untrained()
                elif set(list_steps(self.checkpoints)) <= set(before):
                    # A full disk must not hide the failure that ended the run.
                    with contextlib.suppress(SeedbedError):
                        self.write_config(former)
                raise

    def close(self) -> None:
        """Gives up the locks, so that another process may train into the folder once the helper has ended.

        Call from one thread at a time.
        """
        for descriptor in self._locks.values():
            os.close(descriptor)
        self._locks.clear()

    def discard_untrained(self) -> None:
        """Removes the folder of a run that failed before it trained, and closes it.

        Removes nothing if there are metrics, a checkpoint, or files that are not a run's own, nor if another
        learner has the run. Errors of the disk are not raised. Call it only with the folder locked, from one
        thread at a time.
        """
        if successor(self.path, self.claim):
            self.close()
            return
        with contextlib.suppress(OSError), contextlib.closing(self):
            metrics = self.path / METRICS
            trained = metrics.exists() and metrics.stat().st_size > 0
            entries = list(self.path.iterdir())
            folders = [folder.name for folder in (self.checkpoints, self.replay, self.listen)]
            own = (SCENES, CONFIG, HISTORY, LOCK, SAVING, TERMS, ROLES, METRICS, *folders)
            if trained or any(
                entry.name not in own and ".tfevents." not in entry.name for entry in entries
            ):
                return
            if self.checkpoints.is_dir():
                self.checkpoints.rmdir()  # raises OSError if it holds a checkpoint
            doomed = [self.replay, *(self.path / name for name in (TERMS, ROLES, SCENES))]
            for folder in doomed if self._prepared else [*doomed, self.listen]:
                shutil.rmtree(folder, ignore_errors=True)
            for entry in self.path.iterdir():
                if entry != self.listen:
                    entry.unlink()
            self.path.rmdir()  # raises OSError if `listen` stays


def require_claim(run: Path, claim: Claim) -> None:
    """Raises TakenOver if another learner has had a run since a claim."""
    if newer := successor(run, claim):
        raise TakenOver(
            f"another learner has taken over the run {printable(run)} (term {newer}; this one is of term "
            f"{claim.term}): this one ends, and saves nothing"
        )


def _unusable(path: Path, error: OSError) -> SeedbedError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return SeedbedError(
        f"the run folder {printable(path)} cannot be written ({error.strerror or error}): "
        f"{'make room there, or ' if full else ''}name another folder with --run"
    )
