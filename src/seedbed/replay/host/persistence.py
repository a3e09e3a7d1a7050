"""Saves of a replay: an index names the segment files with its data, and contains everything else.

Segment files are only written at places that no index refers to. So a save exists as soon as its index is
written (to a temporary file, synced, renamed), and a process that is killed leaves the earlier save whole.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seedbed.files import read_arrays, sync, write_arrays
from seedbed.printable import printable
from seedbed.replay.host.arena import SUFFIX, Files
from seedbed.replay.host.items import Windows
from seedbed.replay.host.layout import Layout
from seedbed.replay.host.segments import Segments
from seedbed.replay.host.soundness import require_header, require_sound
from seedbed.replay.host.storage import ReplayStorage
from seedbed.types import SeedbedError, StorageError

_MAGIC = b"seedbed replay 2"
_INDEX = re.compile(r"(\d{8})\.(.+)\.index")


class _SegmentFile(NamedTuple):
    """The state of a segment at the time of a save."""

    kind: str  # a key of `ReplayStorage.segments`
    segment: int
    file: str
    allocated: int  # units
    settled: bool  # whether nothing will be written to it any more
    absent: bool  # whether it is in memory only, so that `write` must write the file


class ReplaySnapshot(NamedTuple):
    """The contents of a save: its name, the header and arrays of its index, and its segments."""

    name: str
    header: dict[str, Any]
    arrays: dict[str, np.ndarray]
    parts: list[_SegmentFile]


class ReplayArchive:
    """The writer and reader of a storage's saves in its folder. It keeps the newest save and an earlier one.

    The caller must see to it that one save at a time is made.
    """

    def __init__(self, storage: ReplayStorage, files: Files) -> None:
        self._storage, self._folder = storage, files.folder
        self._synced: set[str] = set()
        # The files that indexes name, and the snapshots that are neither written nor discarded yet.
        self._named: frozenset[str] = frozenset()
        self._cuts: list[ReplaySnapshot] = []
        self._notices = files.notices

    @property
    def _segments(self) -> dict[str, Segments]:
        return self._storage.segments

    def snapshot(self, name: str, state: dict[str, Any]) -> ReplaySnapshot:
        """Returns a save's list of files, which are kept from now on, and its copy of the weights.

        Call from the thread that holds the writer's `sealing`, under the storage's lock. The caller must add
        `tables` to the arrays while it still holds `sealing`, and then call `write`: segments that are in
        memory only are pinned until then. Raises StorageError if the disk has no room for them.
        """
        parts: list[_SegmentFile] = []
        try:
            for kind, segments in self._segments.items():
                used = np.flatnonzero(segments.references > 0)
                for segment in used[np.argsort(segments.opened[used])].tolist():
                    file = segments.arena.files[segment]
                    settled = segment != segments.current and not segments.holds[segment]
                    allocated = int(segments.allocated[segment])
                    made = file or segments.arena.create()
                    segments.pins[segment] += file is None
                    parts.append(
                        _SegmentFile(kind, segment, made, allocated, settled, file is None)
                    )
        except OSError as error:
            self._unpin(parts)
            self._discard(parts)
            raise self._failure(name, error) from error
        items = self._storage.items
        header = {
            "layout": self._storage.layout.describe(),
            "inserted": items.inserted,
            "largest": items.largest,
            "owed": items.limiter.owed,
            "state": state,
            "files": [[p.kind, p.segment, p.file, p.allocated] for p in parts],
        }
        cut = ReplaySnapshot(name, header, {"weights": items.tree.weights.copy()}, parts)
        self._cuts.append(cut)
        self._keep_needed()
        return cut

    def _keep_needed(self) -> frozenset[str]:
        """Has segments keep the files of indexes and of snapshots, and returns these; the lock is held."""
        needed = self._named.union(part.file for cut in self._cuts for part in cut.parts)
        for segments in self._segments.values():
            segments.kept = needed
        return needed

    def _let_go(self, snapshot: ReplaySnapshot) -> None:
        self._cuts = [cut for cut in self._cuts if cut is not snapshot]
        self._unpin(snapshot.parts)

    def tables(self, snapshot: ReplaySnapshot) -> dict[str, np.ndarray]:
        """Returns copies of the tables of a snapshot's items, by generation, and of its chunks.

        These tables change only when items are published, or when rows that no item has are forgotten. So
        call from the thread that holds the writer's `sealing`; the storage's lock is not needed.
        """
        items, frames = self._storage.items, self._storage.frames
        weights = snapshot.arrays["weights"]
        live = np.flatnonzero(weights > 0)
        live = live[np.argsort(items.generation[live])]
        windows = {key: leaf[live] for key, leaf in items.windows._asdict().items()}
        rows = [part.segment for part in snapshot.parts if part.kind == "rows"]
        chunks = self._storage.rows.units_of(rows)
        return {
            **windows,
            "generation": items.generation[live],
            "weights": weights[live],
            "image_offset": frames.offset.take(chunks, axis=1),
            "image_size": frames.size.take(chunks, axis=1),
        }

    def write(self, snapshot: ReplaySnapshot, keep: str | None) -> None:
        """Writes a snapshot to the disk, and removes the files that neither an index nor the storage needs.

        One earlier save stays: the newest with the name `keep`, or the newest of all if none has it. Any
        thread may call this, without locks, but only one at a time. Raises StorageError if the disk refuses;
        the earlier saves are whole then.
        """
        parts, whole = snapshot.parts, False
        try:
            for part in parts:
                if part.absent:
                    self._segments[part.kind].arena.write(part.segment, part.file)
            for part in parts:
                if part.file not in self._synced:
                    sync(self._folder / part.file)
            _write_index(self._folder, snapshot)
            whole = True
        except OSError as error:
            raise self._failure(snapshot.name, error) from error
        finally:
            with self._storage.lock:
                for part in parts:
                    # The next save need not write a settled segment again, though the segment stays in
                    # memory. This must come before the pin is released: then the segment may be reused.
                    if whole and part.absent and part.settled:
                        self._segments[part.kind].arena.files[part.segment] = part.file
                self._named |= {part.file for part in parts if whole}
                self._let_go(snapshot)
            if not whole:
                self._discard(parts)
        self._synced |= {part.file for part in parts if part.settled}
        # Files that cannot be removed now are removed by the next save.
        with contextlib.suppress(OSError):
            newest, *before = _list_indexes(self._folder)
            kept = [path for path in before if _name_of(path) == keep] or before
            self._prune([newest, *kept[:1]])

    def discard(self, snapshot: ReplaySnapshot) -> None:
        """Lets go of a snapshot that is not to be written. Any thread may call this, one at a time."""
        with self._storage.lock:
            self._let_go(snapshot)
        self._discard([part for part in snapshot.parts if part.absent])

    def _unpin(self, parts: Sequence[_SegmentFile]) -> None:
        for part in parts:
            self._segments[part.kind].pins[part.segment] -= part.absent
        self._storage.lock.notify_all()

    def _discard(self, parts: Sequence[_SegmentFile]) -> None:
        """Removes the files that only a failed save needed: the disk may be full."""
        with self._storage.lock:
            needed = self._live() | self._keep_needed()
        for file in {part.file for part in parts} - needed:
            # The caller reports why the save failed, which is worth more than an error here.
            with contextlib.suppress(OSError):
                (self._folder / file).unlink(missing_ok=True)

    def _live(self) -> set[str | None]:
        return {file for s in self._segments.values() for file in s.arena.files}

    def _failure(self, name: str, error: OSError) -> StorageError:
        full = "disk full" if error.errno == errno.ENOSPC else error.strerror
        return StorageError(
            f"the replay could not be saved as {name} to {self._folder}: {full}; the earlier index is "
            "whole. Make room there, or mend the folder"
        )

    def _prune(self, indexes: Sequence[Path]) -> None:
        """Removes all other indexes, and segment files that neither these nor the storage needs.

        Raises OSError if a file cannot be removed.
        """
        present = list(self._folder.iterdir())
        named: set[str] = set()
        for path in indexes:
            # A damaged index keeps no files.
            with contextlib.suppress(ValueError):
                named |= {file for _, _, file, _ in _read_index(path)[0]["files"]}
        with self._storage.lock:
            self._named = frozenset(named)
            needed = self._live() | self._keep_needed()
        # Indexes are removed first, so that no index ever names a file that was removed.
        for path in sorted(present, key=lambda path: path.name.endswith(SUFFIX)):
            index = path.name.endswith((".index", ".index.part")) and path not in indexes
            data = path.name.endswith(SUFFIX) and path.name not in needed
            if index or data:
                path.unlink(missing_ok=True)
                self._synced.discard(path.name)

    def restore(self, names: Sequence[str] | None) -> tuple[str, dict[str, Any]] | None:
        """Loads the newest usable save with one of `names` into an empty storage; removes all other saves.

        None stands for every name.

        Returns its name and the `state` that `snapshot` was given, or None if there is no such save. A
        damaged save is skipped and leaves a notice. Raises SeedbedError if the save is of a replay with
        another layout. Call before other threads use the replay.
        """
        for path in _list_indexes(self._folder):
            name = _name_of(path)
            if names is not None and name not in names:
                continue
            try:
                header, arrays = _read_index(path)
                _require_same(header["layout"], self._storage.layout, self._folder)
                require_sound(self._storage, header, arrays)
                self._attach(header["files"])
            except (OSError, ValueError) as error:
                self._notices.append(f"the replay saved as {name} is damaged: {error}")
                continue
            with self._storage.lock:
                self._load(header, arrays)
                self._named = frozenset(file for _, _, file, _ in header["files"])
                self._keep_needed()
            # Files that cannot be removed now are removed by the next save.
            with contextlib.suppress(OSError):
                self._prune([path])
            return name, header["state"]
        return None

    def _attach(self, files: Sequence[tuple[str, int, str, int]]) -> None:
        attached: list[tuple[Segments, int]] = []
        everything = frozenset(file for _, _, file, _ in files)
        try:
            for kind, segment, file, allocated in files:
                self._segments[kind].attach(segment, file, allocated)
                attached.append((self._segments[kind], segment))
        except OSError:
            for segments, segment in attached:
                segments.detach(segment, everything)
            raise

    def _load(self, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        items, frames = self._storage.items, self._storage.frames
        windows = Windows(**{key: arrays[key] for key in Windows._fields})
        items.load(windows, arrays["generation"], arrays["weights"])
        items.inserted, items.largest = header["inserted"], header["largest"]
        items.limiter.owed = header["owed"]
        rows = [segment for kind, segment, _, _ in header["files"] if kind == "rows"]
        frames.load(self._storage.rows.units_of(rows), arrays["image_offset"], arrays["image_size"])


def saved_items(folder: Path, name: str) -> int | None:
    """Returns the number of items in the newest whole save of a name in a folder; None if it has none."""
    for path in _list_indexes(folder) if folder.is_dir() else ():
        if _name_of(path) == name:
            with contextlib.suppress(OSError, ValueError):
                return len(_read_index(path)[1]["weights"])
    return None


def _list_indexes(folder: Path) -> list[Path]:
    """Returns the paths of the indexes in a folder, newest first."""
    return sorted((p for p in folder.iterdir() if _INDEX.fullmatch(p.name)), reverse=True)


def _name_of(path: Path) -> str:
    return path.name.split(".", 1)[1].removesuffix(".index")


def _write_index(folder: Path, snapshot: ReplaySnapshot) -> None:
    newest = _list_indexes(folder)
    serial = int(newest[0].name[:8]) + 1 if newest else 0
    path = folder / f"{serial:08d}.{snapshot.name}.index"
    try:
        write_arrays(path, _MAGIC, snapshot.header, snapshot.arrays)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _read_index(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the header and the arrays of an index; raises OSError or ValueError if it is damaged."""
    header, arrays = read_arrays(path, _MAGIC)
    require_header(header)
    return header, arrays


def _require_same(was: dict[str, Any], layout: Layout, folder: Path) -> None:
    """Raises SeedbedError, which names the first difference, if a save has another layout."""
    now = layout.describe()
    # Segments come last: their sizes follow from the other properties, which tell a user more.
    for key in sorted({**now, **was}, key=lambda key: key == "segments"):
        before, here = was.get(key, "nothing"), now.get(key, "nothing")
        if before != here:
            options = " (--actors and --envs-per-actor)" if key == "groups" else ""
            raise SeedbedError(
                f"the replay was of {key} {before}, this one is of {here}; resume with the settings of "
                f"before{options}, or remove {printable(folder)} to begin with an empty replay"
            )
