"""The process that copies a run's folder from and to a bucket; a program, without JAX.

`fetch FOLDER` brings what the bucket has, unless this machine has trained the run last. `keep FOLDER` then
sends what is new, until it is told to end, or until whoever has started it is gone. The key of a run, its
locks and what only its processes tell one another stay here. Who has the run is told by its terms, as in a
folder: each start makes a file in the bucket that nobody else can make, and one that finds a later one sends
nothing any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import math
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from seedbed.exit_status import ExitStatus
from seedbed.files import copy_folder_once, files_below, load_json, write_json
from seedbed.run.bucket import address_file, name_of
from seedbed.run.bucket_names import (
    BEFORE,
    CHECKPOINTS,
    INDEX,
    belongs,
    is_checkpoint,
    order,
    parent_of,
    replays_of,
    saved_at,
    step_of,
)
from seedbed.run.checkpoint_helper import TERMS, newest_claim
from seedbed.run.folder import CONFIG, LOCK, METRICS
from seedbed.streams.beside import Parent
from seedbed.streams.credentials import ELSEWHERE

_EVERY_S, _AGAIN_S = 15.0, 30.0
# Seconds for which nobody looks whether another process has the run, while files are being sent.
_LOOK_S = 10.0
# How often a bucket is listed anew because a file went while it was read.
_TRIES = 5
# Passes after which replays are given up: saving is faster than sending.
_MOST_LATE = 4
# Beside a run's folder: what has been sent and fetched, and the lock of who fetches.
_STATE, _FETCHING = "sent.json", "fetch.lock"
# Files that grow with each line of metrics, and are sent whole; and the bytes a second that this may take.
_LOGS, _LOG_BYTES_S = (METRICS, "events.out.tfevents."), 100_000
_LOG_MOST_S = 600.0  # that a log waits: a machine that is lost takes no more lines with it
# Errors that come again: no such protocol, no rights, no such bucket. Others may be of the network or a disk.
_LASTING = (ValueError, PermissionError, FileNotFoundError)
# What changes with a file's content, as the library of each bucket names it.
_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "updated")


class Taken(Exception):
    """Raised if another process has the run now."""


class Bucket:
    """A run's folder and its copy. For one thread; methods raise OSError and what the library raises."""

    def __init__(self, folder: Path) -> None:
        self.address = name_of(folder)
        fsspec: Any = importlib.import_module("fsspec")
        # What others have written since must be seen.
        self._files, root = fsspec.core.url_to_fs(
            self.address, use_listings_cache=False, skip_instance_cache=True
        )
        self._root, self._folder = str(root).rstrip("/"), folder
        self._term = newest_claim(folder).term
        self._state = self._beside(_STATE)
        # By path, the size and time of a file here that the bucket has, and its version there if it is known.
        self._same: dict[str, list[int]] = {}
        self._versions: dict[str, str] = {}
        self._sent_s: dict[str, float] = {}  # when this process has sent a file last
        # Whether the last pass has sent no checkpoint, as all waited for their replays.
        self._waited = False
        self._late = 0  # passes in a row after which the newest was not there with its replay
        # Where `fetch` has copied the folder, of which the bucket lacked checkpoints; "" if it has not.
        self.aside = ""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = load_json(self._state)
            self._same, self._versions = dict(state["same"]), dict(state["versions"])

    def _beside(self, name: str) -> Path:
        return address_file(self._folder).with_name(f"{self._folder.name}.{name}")

    def _write_state(self) -> None:
        write_json(self._state, {"same": self._same, "versions": self._versions})

    def _find(self, below: str = "") -> dict[str, dict[str, Any]]:
        """Returns what is known of each file in the bucket, by its path in the run."""
        try:
            found = self._files.find(f"{self._root}{below}", detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {path[start:]: about for path, about in found.items()}

    def _terms(self) -> list[int]:
        names = [PurePosixPath(path).name for path in self._find(f"/{TERMS}")]
        return sorted(int(name) for name in names if name.isdecimal() and len(name) < 12)

    def _token(self, term: int) -> bytes:
        """Returns what the bucket has in the file of a term."""
        return self._files.cat_file(f"{self._root}/{TERMS}/{term:06d}")

    def _stat(self, path: str) -> list[int]:
        found = (self._folder / path).stat()
        return [found.st_size, found.st_mtime_ns]

    def fetch(self, parent: Parent | None = None) -> None:
        """Brings what the bucket has, unless a process here trains the run, or the last that did was here."""
        with self._beside(_FETCHING).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in reversed(range(_TRIES)):
                try:
                    if terms := self._terms():
                        self._fetch(terms[-1], parent)
                    return
                except FileNotFoundError as error:
                    # A process that trains has removed something since the list was made.
                    if not left:
                        raise OSError("files go while they are read") from error

    def _fetch(self, newest: int, parent: Parent | None) -> None:
        with self._alone() as alone:
            if not alone:
                return
            file = self._folder / TERMS / f"{newest:06d}"
            mine = file.exists() and file.read_bytes() == self._token(newest)
            there = {path: about for path, about in self._find().items() if belongs(path)}
            if not mine:
                self._set_aside()
            try:
                for path, about in sorted(there.items(), key=lambda item: order(item[0])):
                    if parent is not None and parent.ending.is_set():
                        raise InterruptedError("it was interrupted")
                    self._bring(path, about, mine)
            finally:
                self._write_state()
            if mine:
                return
            for path in self._local():
                if path not in there:
                    (self._folder / path).unlink()
            # The next start here takes a later term; and this file is not that of who has the run.
            file.parent.mkdir(exist_ok=True)
            file.write_text(secrets.token_hex(8))
            # Who has written the bucket is not known: what it names is not imported unasked. A start that
            # was killed before it had sent anything has left its term only.
            if there:
                (self._folder / ELSEWHERE).touch()
                (self._folder / CHECKPOINTS).mkdir(exist_ok=True)

    def _set_aside(self) -> None:
        """Copies the folder, but for a replay, if the bucket has never had one of its checkpoints."""
        here, claim = filter(is_checkpoint, self._local()), newest_claim(self._folder)
        # Of the same name, should this fetch not come to its end.
        aside = self._beside(f"unsent-{claim.term}-{claim.token[:8]}")
        if aside.exists() or any(self._same.get(path) != self._stat(path) for path in here):
            copy_folder_once(self._folder, aside, ("replay", "roles"))
            self.aside = str(aside)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Keeps processes from training into the folder meanwhile; yields False if one does."""
        self._folder.mkdir(0o755, parents=True, exist_ok=True)
        with (self._folder / LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _bring(self, path: str, about: dict[str, Any], mine: bool) -> None:
        """Fetches a file that is not here as the bucket has it; of a run of this machine, what is lost."""
        local = self._folder / path
        versions = (f"{about['size']} {about[name]}" for name in _VERSIONS if name in about)
        version = next(versions, "")
        if local.exists():
            same = version and self._versions.get(path) == version
            if mine or (same and self._same.get(path) == self._stat(path)):
                return
        local.parent.mkdir(0o755, parents=True, exist_ok=True)
        part = local.with_name(f".{local.name}.part")
        self._files.get_file(f"{self._root}/{path}", str(part))
        part.replace(local)
        self._same[path], self._versions[path] = self._stat(path), version

    def claim(self) -> None:
        """Tells the bucket who has the run; raises Taken if another process was first."""
        self._term = newest_claim(self._folder).term
        self._require_mine()
        path = f"{TERMS}/{self._term:06d}"
        token = (self._folder / path).read_bytes()
        self._files.makedirs(f"{self._root}/{TERMS}", exist_ok=True)
        try:
            self._files.pipe_file(f"{self._root}/{path}", token, mode="create")
        except FileExistsError:
            # A library that tries again may meet what it has written itself.
            if self._token(self._term) != token:
                raise Taken from None

    def _require_mine(self) -> None:
        """Raises Taken if there is a later term, of which the folder is told, so that its learner ends."""
        newest = max(self._terms(), default=0)
        if newest > self._term:
            # A later start here has a file of that name, which says that the run is its own.
            file = self._folder / TERMS / f"{newest:06d}"
            with contextlib.suppress(FileExistsError), file.open("x") as told:
                told.write(secrets.token_hex(8))
            raise Taken
        self._looked_s = time.monotonic()

    def _local(self) -> list[str]:
        """Returns what belongs into the bucket, in the order in which it is sent."""
        found = (path.relative_to(self._folder).as_posix() for path in files_below(self._folder))
        return sorted(filter(belongs, found), key=order)

    def new(self, ending: bool = False) -> list[str]:
        """Returns what has changed since it was sent; of a replay, only if it has been saved since.

        Large logs are left out until it is time for them again, unless the run is `ending`.
        """
        found: list[str] = []
        here = self._local()
        for path in here:
            # What goes meanwhile, such as an old checkpoint, is none of the bucket's concern.
            with contextlib.suppress(FileNotFoundError):
                now = self._stat(path)
                if self._same.get(path) != now and (ending or self._is_due(path, now[0])):
                    found.append(path)
        saved = replays_of(found)
        return [path for path in found if parent_of(path) not in replays_of(here) - saved]

    def _is_due(self, path: str, size: int) -> bool:
        passed_s = time.monotonic() - self._sent_s.get(path, -math.inf)
        large = path.startswith(_LOGS) and size > _LOG_BYTES_S * passed_s
        return not large or passed_s > _LOG_MOST_S

    def send(self, ending: bool = False) -> None:
        """Sends what is new, and then removes what is gone. Raises Taken if another process has the run."""
        self._require_mine()
        here = self._local()
        if CONFIG not in here:
            self._discard()
            return
        new = [path for path in self.new(ending) if path.startswith(BEFORE)]
        self._put(new)
        # A replay takes so long that other checkpoints may be there now. They wait for their own replays,
        # unless these have gone meanwhile; but not all of them in two passes.
        found = [path for path in self.new(ending) if not path.startswith(BEFORE)]
        indices = [path for path in self._local() if path.endswith(INDEX)]
        unsent = [f"{CHECKPOINTS}{saved_at(path)}/" for path in indices if path not in self._same]
        later = [path for path in found if self._waited or not path.startswith(tuple(unsent))]
        self._waited = len(later) < len(found) and not any(map(is_checkpoint, later))
        self._put(later)
        if new or later or not self._same.keys() <= set(here):
            self._remove_gone()
        self._write_state()

    def _put(self, paths: list[str]) -> None:
        for path in paths:
            if time.monotonic() > self._looked_s + _LOOK_S:
                self._require_mine()
            try:
                # As it is before: what is written meanwhile is new the next time.
                now = self._stat(path)
            except FileNotFoundError:
                continue
            self._files.makedirs(f"{self._root}/{parent_of(path)}", exist_ok=True)
            try:
                self._files.put_file(str(self._folder / path), f"{self._root}/{path}")
            except FileNotFoundError:
                if (self._folder / path).exists():
                    raise
                continue
            self._same[path], self._sent_s[path] = now, time.monotonic()
            self._versions.pop(path, None)

    def _remove_gone(self) -> None:
        """Removes checkpoints and parts of replays that are not here any more; all else stays.

        While a pass lasts, all checkpoints that it has sent may have gone here. Then the newest two of these
        stay, and all replays, until the bucket has a newer one with its replay. If saving is so much faster
        than sending that this does not come, it is done without replays.
        """
        self._require_mine()
        here, sent = self._local(), self._same.keys()
        steps = sorted({step_of(path) for path in here if is_checkpoint(path)})
        indices = {path: saved_at(path) for path in here if path.endswith(INDEX)}
        lacking = {step_of(path) for path in here if is_checkpoint(path) and path not in sent}
        whole = [step for step in steps if step not in lacking]
        unsent = {step for path, step in indices.items() if path not in sent}
        with_replay = [step for step in whole if step in set(indices.values()) - unsent]
        self._late = 0 if with_replay or not indices else self._late + 1
        there = with_replay if indices and self._late <= _MOST_LATE else whole
        gone = [path for path in self._find() if path not in here]
        old = sorted({step_of(path) for path in gone if is_checkpoint(path)})
        done = bool(there) and there[-1:] > old[-1:]
        of_replays = replays_of(here)
        stay = [] if done else old[-2:]
        for path in gone:
            other = path.startswith(CHECKPOINTS) or parent_of(path) in of_replays
            if step_of(path) not in stay if is_checkpoint(path) else done and other:
                self._remove(path)
        self._same = {path: now for path, now in self._same.items() if path in here}
        for term in self._terms():
            if term < self._term:
                self._remove(f"{TERMS}/{term:06d}")

    def _discard(self) -> None:
        """Removes what a run has left that failed before it trained; raises OSError if it has trained."""
        if any(path.startswith(CHECKPOINTS) or path == METRICS for path in self._same):
            raise FileNotFoundError(f"{self._folder} has been removed")
        for path in self._same:
            self._remove(path)
        for term in self._terms():
            self._remove(f"{TERMS}/{term:06d}")
        self._same = {}
        self._write_state()

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{path}")


def _keep(bucket: Bucket, parent: Parent) -> int:
    """Sends what is new until it is time to end; returns the exit status."""
    failed_s, told = 0.0, False
    while True:
        ending = parent.ending.wait(_EVERY_S)
        if not ending and time.monotonic() < failed_s:
            continue
        try:
            if ending and (left := bucket.new(ending)):
                parent.say(say=f"sending {len(left)} files to {bucket.address}")
            bucket.send(ending)
            if told:
                parent.say(say=f"{bucket.address} has everything again")
            failed_s, told = 0.0, False
        except Taken:
            return ExitStatus.REFUSED  # the learner finds it in its folder, and ends
        except Exception as error:  # each library has errors of its own
            if not told:
                parent.say(say=f"{bucket.address} refuses ({_text(error)}); tried again")
            failed_s, told = time.monotonic() + _AGAIN_S, True
        if ending:
            return ExitStatus.TRY_AGAIN if told else 0


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def main() -> None:
    """Does what the command line asks for."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    parent, name = Parent(), name_of(folder)
    parent.listen()
    try:
        bucket = Bucket(folder)
        if what == "fetch":
            bucket.fetch(parent)
        else:
            bucket.claim()
    except Taken:
        parent.say(error=f"another process trains {name}: wait for it, or stop it", again=True)
        return
    except ImportError as error:
        parent.say(error=f"{_text(error)}: pip install 'seedbed[s3]' or 'seedbed[gs]'")
        return
    except Exception as error:
        parent.say(
            error=f"the bucket cannot be used ({_text(error)}): check its name and your rights",
            again=not isinstance(error, _LASTING) and "Credentials" not in type(error).__name__,
        )
        return
    parent.say(ready=True, aside=bucket.aside)
    if what == "keep":
        sys.exit(_keep(bucket, parent))


if __name__ == "__main__":
    main()
