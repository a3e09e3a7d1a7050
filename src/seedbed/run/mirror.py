"""The process that copies a run's folder from and to a bucket; a program, without JAX.

`fetch FOLDER` brings what the bucket has and this machine lacks. `keep FOLDER` then sends what is new, until
it is told to end, or until whoever has started it is gone. The key of a run, its locks and what only its
processes tell one another stay here. Who has the run is told by its terms, as in a folder: each start makes a
file in the bucket that nobody else can make, and one that finds a later one sends nothing any more.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from seedbed.exit_status import ExitStatus
from seedbed.files import load_json, write_json
from seedbed.run.bucket import address_file, name_of
from seedbed.run.checkpoint_helper import TERMS, newest_claim
from seedbed.streams.beside import Parent
from seedbed.streams.credentials import FOLDER as LISTEN

_EVERY_S, _AGAIN_S = 15.0, 30.0
# What has been sent, and under which term of this machine's.
_STATE = "sent.json"
_LEFT_OUT = (LISTEN, TERMS)
_ROLE_FILES = ("address.json", "log.txt")
# Files of this size and more that have the same size are the same: those of checkpoints and replay.
_LARGE_BYTES = 1 << 20


# What a save of a replay ends with; its other files grow between saves.
_INDEX = ".index"


def _order(path: str) -> tuple[bool, bool, str]:
    """Has checkpoints go first, so that metrics are not ahead of them, and indices after what they name."""
    return not path.startswith("checkpoints/"), path.endswith(_INDEX), path


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
        self._state = address_file(folder).with_name(f"{folder.name}.{_STATE}")
        self._term, self._sent = 0, dict[str, list[int]]()
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = load_json(self._state)
            self._term, self._sent = int(state["term"]), dict(state["sent"])

    def _write_state(self) -> None:
        write_json(self._state, {"term": self._term, "sent": self._sent})

    def _find(self, below: str = "") -> dict[str, int]:
        """Returns the size of each file in the bucket, by its path in the run."""
        try:
            found = self._files.find(f"{self._root}{below}", detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root) + 1
        return {path[start:]: int(each["size"] or 0) for path, each in found.items()}

    def _terms(self) -> list[int]:
        names = [Path(path).name for path in self._find(f"/{TERMS}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def fetch(self) -> None:
        """Brings what the bucket has, unless this machine has trained the run last."""
        if self._folder.is_dir() and self._terms()[-1:] in ([], [self._term]):
            return
        there = self._find()
        self._term, self._sent = 0, {}
        for path, size in there.items():
            local = self._folder / path
            if size < _LARGE_BYTES or not local.exists() or local.stat().st_size != size:
                local.parent.mkdir(0o755, parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{path}", str(local))
            self._note(path)
        for path in [*self._local(), *self._local(TERMS)]:
            if path not in there:
                (self._folder / path).unlink()
        self._write_state()

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
            raise Taken from None
        self._write_state()

    def _require_mine(self) -> None:
        """Raises Taken if there is a later term, of which the folder is told, so that its learner ends."""
        newest = max(self._terms(), default=0)
        if newest > self._term:
            name = f"{TERMS}/{newest:06d}"
            self._files.get_file(f"{self._root}/{name}", str(self._folder / name))
            raise Taken

    def _local(self, below: str = "") -> list[str]:
        """Returns what belongs into the bucket, in the order in which it is sent."""
        paths = [path for path in (self._folder / below).rglob("*") if path.is_file()]
        found: list[str] = []
        for path in (path.relative_to(self._folder) for path in paths):
            hidden = any(part.startswith(".") for part in path.parts)
            left_out = path.parts[0] in _LEFT_OUT and not below
            if not (hidden or left_out or path.name in _ROLE_FILES):
                found.append(str(path))
        return sorted(found, key=_order)

    def _note(self, path: str) -> None:
        found = (self._folder / path).stat()
        self._sent[path] = [found.st_size, found.st_mtime_ns]

    def new(self) -> list[str]:
        """Returns what has changed since it was sent; of a replay, only if it has been saved since."""
        found: list[str] = []
        here = self._local()
        for path in here:
            # What goes meanwhile, such as an old checkpoint, is none of the bucket's concern.
            with contextlib.suppress(FileNotFoundError):
                now = (self._folder / path).stat()
                if self._sent.get(path) != [now.st_size, now.st_mtime_ns]:
                    found.append(path)
        replays = {str(Path(path).parent) for path in here if path.endswith(_INDEX)}
        saved = {str(Path(path).parent) for path in found if path.endswith(_INDEX)}
        return [path for path in found if str(Path(path).parent) not in replays - saved]

    def send(self) -> None:
        """Sends what is new, and then removes what is gone. Raises Taken if another process has the run."""
        self._require_mine()
        for path in self.new():
            with contextlib.suppress(FileNotFoundError):
                # As it is before: what is written meanwhile is new the next time.
                self._note(path)
                self._files.makedirs(f"{self._root}/{Path(path).parent}", exist_ok=True)
                try:
                    self._files.put_file(str(self._folder / path), f"{self._root}/{path}")
                except BaseException:
                    del self._sent[path]
                    raise
        here = set(self._local())
        for path in [path for path in self._sent if path not in here]:
            self._remove(path)
            del self._sent[path]
        # A run that has failed before it trained has left nothing.
        mine = self._term if self._folder.is_dir() else self._term + 1
        for term in self._terms():
            if term < mine:
                self._remove(f"{TERMS}/{term:06d}")
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
        if ending and (left := bucket.new()):
            parent.say(say=f"sending {len(left)} files to {bucket.address}")
        try:
            bucket.send()
            if told:
                parent.say(say=f"{bucket.address} has everything again")
            failed_s, told = 0.0, False
        except Taken:
            return 0  # the learner finds it in its folder, and ends
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
    try:
        bucket = Bucket(folder)
        if what == "fetch":
            bucket.fetch()
        else:
            bucket.claim()
    except Taken:
        parent.say(error=f"another process trains {name}: wait for it, or stop it")
        return
    except ImportError as error:
        parent.say(error=f"{_text(error)}: pip install 'seedbed[s3]' or 'seedbed[gs]'")
        return
    except Exception as error:
        parent.say(
            error=f"the bucket cannot be used ({_text(error)}): check its name and your rights"
        )
        return
    parent.say(ready=True)
    parent.listen()
    if what == "keep":
        sys.exit(_keep(bucket, parent))


if __name__ == "__main__":
    main()
