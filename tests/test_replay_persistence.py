"""Saves of the host's replay: what comes back, and what a kill or a full disk leaves."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay_streams import SPEC, Recorder, experience, layout, read_all, require_whole
from seedbed import files
from seedbed.replay.host import persistence
from seedbed.replay.host.arena import Arena, Files
from seedbed.replay.host.layout import CHUNK
from seedbed.replay.host.replay import HostReplay
from seedbed.types import ArraySpec, Discrete, EnvSpec, SeedbedError, StorageError
from small_disk import on_small_disk

KEEPS = experience(
    sequence=6, period=4, burn_in=5, capacity=150, priority_exponent=0.7, importance_exponent=0.5
)
LONGEST = 17


def make(folder: Path, **changes) -> HostReplay:
    return HostReplay(layout(KEEPS, **changes), folder, seed=3)


def filled(folder: Path, rows: int = 200) -> tuple[HostReplay, Recorder]:
    replay = make(folder)
    recorder = Recorder(replay, LONGEST)
    for i in range(rows):
        recorder.append(i % 2)
    replay.seal_pending()
    return replay, recorder


def require_equal(one: HostReplay, other: HostReplay) -> None:
    for mine, yours in zip(read_all(one), read_all(other), strict=True):
        np.testing.assert_equal(mine, yours)


def disk(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.undo()
    if full:
        monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_a_restored_replay_goes_on_as_the_other(tmp_path):
    replay, _ = filled(tmp_path)
    sample = replay.sample(20)
    replay.update_priorities(sample.slots, sample.generations, np.linspace(0.1, 4, 20))
    replay.save("7")
    restored = make(tmp_path)
    assert restored.restore(["7"]) == "7"
    restored.check_valid()
    require_equal(replay, restored)
    for _ in range(5):
        np.testing.assert_equal(replay.sample(9), restored.sample(9))
    assert (restored.inserted, restored.sampled) == (replay.inserted, replay.sampled)


@pytest.mark.slow
def test_the_newest_two_saves_are_kept_and_only_their_files(tmp_path):
    replay, recorder = filled(tmp_path)
    for name in range(6):
        for i in range(500):
            recorder.append(i % 2)
        replay.save(str(name))
    assert sorted(p.name.split(".")[1] for p in tmp_path.glob("*.index")) == ["4", "5"]
    before = len(list(tmp_path.iterdir()))
    assert make(tmp_path).restore(["0", "1", "2", "3"]) is None
    restored = make(tmp_path)
    assert restored.restore([str(name) for name in range(6)]) == "5"
    assert len(list(tmp_path.glob("*.index"))) == 1
    assert len(list(tmp_path.iterdir())) < before
    restored.check_valid()
    require_equal(replay, restored)


def test_a_damaged_index_gives_way_to_the_one_before(tmp_path):
    replay, recorder = filled(tmp_path)
    replay.save("1")
    contents = read_all(replay)
    recorder.append(0)
    replay.save("2")
    (newest,) = tmp_path.glob("*.2.index")
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    restored = make(tmp_path)
    assert restored.restore(["1", "2"]) == "1"
    assert restored.take_notices()[0].startswith("the replay saved as 2 is damaged")
    np.testing.assert_equal(read_all(restored), contents)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    filled(folder)[0].save("1")
    return folder


def entry(table: str, value: object, at: int = -1) -> Callable[..., None]:
    return lambda header, arrays: arrays[table].__setitem__((..., at), value)


def field(name: str, value: object) -> Callable[..., None]:
    return lambda header, arrays: header.__setitem__(name, value)


def file(at: int, value: object) -> Callable[..., None]:
    return lambda header, arrays: header["files"][0].__setitem__(at, value)


def table(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[..., None]:
    return lambda header, arrays: arrays.__setitem__(name, change(arrays[name]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (file(0, "images"), "files"),
        (file(1, -1), "files"),
        (file(1, 1 << 70), "files"),
        (file(2, "../rows-00000000.segment"), "files"),
        (file(2, "rows-00000000.segment\n"), "files"),
        (file(2, "9.index"), "files"),
        (file(3, 0), "files"),
        (file(3, 1 << 40), "files"),
        (field("files", [["rows", 0]]), "files"),
        (field("files", []), "tables"),
        (lambda header, arrays: header["files"].append(header["files"][0]), "files"),
        (lambda header, arrays: header.pop("largest"), "largest"),
        (field("inserted", 1 << 62), "inserted"),
        (field("inserted", 9), "generation"),
        (field("largest", "NaN"), "largest"),
        (field("owed", True), "owed"),
        (field("state", {"sampled": 1, "random": {}}), "state"),
        (entry("generation", 1 << 40), "generation"),
        (entry("generation", 0, at=slice(None)), "generation"),
        (entry("weights", 0), "weights"),
        (entry("weights", np.inf), "weights"),
        (entry("chunks", 1 << 30), "chunks"),
        (entry("chunks", -9), "chunks"),
        (entry("offset", -1), "offset"),
        (entry("offset", CHUNK), "offset"),
        (entry("front", -1), "front"),
        (entry("front", 2**31 - 1), "length"),
        (entry("length", 1), "length"),
        (entry("length", 90), "length"),
        (entry("core", 1 << 30), "core"),
        (entry("env", 6), "env"),
        (entry("env", -1), "env"),
        (entry("image_offset", -2, at=0), "images"),
        (entry("image_offset", -1, at=0), "images"),
        (entry("image_offset", 1 << 40, at=0), "images"),
        (entry("image_size", 0, at=0), "images"),
        (entry("image_size", 1 << 30, at=0), "images"),
        (table("chunks", lambda chunks: chunks.astype(np.int64)), "tables"),
        (table("core", lambda core: core[:-1]), "tables"),
        (lambda header, arrays: arrays.pop("image_size"), "tables"),
    ],
)
def test_an_index_that_no_replay_wrote_is_damage(saved, tmp_path, change, words):
    (path,) = saved.glob("*.index")
    header, arrays = persistence._read_index(path)
    arrays = {key: leaf.copy() for key, leaf in arrays.items()}
    change(header, arrays)
    files.write_arrays(tmp_path / path.name, persistence._MAGIC, header, arrays)
    for segment in saved.glob("*.segment"):
        (tmp_path / segment.name).hardlink_to(segment)
    before = {each.name for each in tmp_path.iterdir()}
    restored = make(tmp_path)
    assert restored.restore(["1"]) is None
    assert restored.take_notices() == [
        f"the replay saved as 1 is damaged: {words} of its index cannot be right"
    ]
    assert {each.name for each in tmp_path.iterdir()} == before
    restored.check_valid()


def test_a_file_that_does_not_tell_its_arrays_is_damage(tmp_path):
    path = tmp_path / "00000000.1.index"
    # A dtype's text is that of a type only if it has no fields.
    files.write_arrays(path, persistence._MAGIC, {}, {"x": np.zeros(3, [("a", "int32")])})
    replay = make(tmp_path)
    assert replay.restore(["1"]) is None
    assert replay.take_notices()[0].endswith("00000000.1.index does not tell its arrays")


def test_a_missing_segment_is_damage(tmp_path):
    replay, _ = filled(tmp_path)
    replay.save("1")
    next(tmp_path.glob("images-*")).unlink()
    restored = make(tmp_path)
    assert restored.restore(["1"]) is None
    assert "damaged" in restored.take_notices()[0]
    restored.check_valid()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "spec": EnvSpec(
                    {**SPEC.observation, "image": ArraySpec((84, 84), "uint8")}, Discrete(9)
                )
            },
            r"observation\[0\] uint8 \(32, 32\), this one is of uint8 \(84, 84\)",
        ),
        ({"experience": dataclasses.replace(KEEPS, capacity=151)}, "capacity 150, .* 151"),
        ({"experience": dataclasses.replace(KEEPS, sequence=7)}, "sequence 6, .* 7"),
        (
            {"experience": dataclasses.replace(KEEPS, priority_exponent=0.6)},
            "priority exponent 0.7",
        ),
        ({"frame_stack": 4}, "frame stack 1, .* 4"),
        ({"core": ()}, r"core\[0\] float32 \(3,\), .* nothing"),
        ({"num_groups": 3}, "groups 2 of 3 environments"),
    ],
)
def test_a_replay_of_another_shape_is_refused_by_name(tmp_path, changes, words):
    replay, _ = filled(tmp_path)
    replay.save("1")
    other = HostReplay(dataclasses.replace(layout(KEEPS), **changes), tmp_path)
    with pytest.raises(SeedbedError, match=words):
        other.restore(["1"])


def test_what_only_learning_reads_may_change(tmp_path):
    replay, _ = filled(tmp_path)
    replay.save("1")
    keeps = dataclasses.replace(KEEPS, batch=9, ratio=3.0, min_size=20, importance_exponent=1.0)
    assert HostReplay(layout(keeps), tmp_path).restore(["1"]) == "1"


def test_a_replay_in_memory_cannot_be_saved():
    with pytest.raises(SeedbedError, match="in memory only"):
        HostReplay(layout(KEEPS)).save("1")


@pytest.mark.slow
@on_small_disk
def test_a_full_disk_stops_saving_and_nothing_else(disk):
    replay, recorder = filled(disk.path)
    replay.save("1")
    contents = read_all(replay)
    disk.fill()
    for i in range(3000):
        recorder.append(i % 2)
        if i % 100 == 0:
            replay.seal_pending()
            require_whole(replay, replay.sample(8), LONGEST)
    notices = replay.take_notices()
    assert len(notices) == 1 and "memory only" in notices[0]
    with pytest.raises(
        StorageError, match="could not be saved as 2 .*; the earlier index is whole"
    ):
        replay.save("2")
    replay.check_valid()
    restored = make(disk.path)
    assert restored.restore(["1", "2"]) == "1"
    np.testing.assert_equal(read_all(restored), contents)


@pytest.mark.slow
@on_small_disk
def test_saving_goes_on_when_there_is_room_again(disk):
    disk.path.mkdir()
    disk.fill()
    replay, recorder = filled(disk.path)
    with pytest.raises(StorageError, match="could not be saved as 1"):
        replay.save("1")
    disk.empty()
    for name in ("2", "3"):
        replay.save(name)
        for i in range(400):
            recorder.append(i % 2)
        replay.seal_pending()
        replay.check_valid()
    for i in range(3000):
        recorder.append(i % 2)
    replay.save("4")
    restored = make(disk.path)
    restored.restore(["4"])
    require_equal(replay, restored)
    restored.check_valid()


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SeedbedError, match="replay cannot be kept in .*file/replay.*Not a dir"):
        make(tmp_path / "file" / "replay")


@pytest.mark.slow
def test_a_file_that_cannot_be_removed_stops_nothing(tmp_path, monkeypatch):
    replay, recorder = filled(tmp_path)
    unlink = Path.unlink

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    for name in ("1", "2", "3"):
        for i in range(3000):  # segments are closed, and saves too many
            recorder.append(i % 2)
        replay.save(name)
        replay.check_valid()
    monkeypatch.setattr(Path, "unlink", unlink)
    replay.save("4")
    assert {path.name for path in tmp_path.iterdir()} == files_of(replay, "3", "4")
    restored = make(tmp_path)
    assert restored.restore(["4"]) == "4"
    require_equal(replay, restored)


@pytest.mark.slow
def test_a_restored_save_stays_also_where_nothing_can_be_removed(tmp_path, monkeypatch):
    replay, _ = filled(tmp_path)
    replay.save("1")
    contents = read_all(replay)
    monkeypatch.setattr(persistence.ReplayArchive, "_prune", lambda *_: fail())
    replay = make(tmp_path)
    assert replay.restore(["1"]) == "1"
    recorder = Recorder(replay, LONGEST)
    for i in range(3000):  # its segments are closed
        recorder.append(i % 2)
    restored = make(tmp_path)
    assert restored.restore(["1"]) == "1"
    np.testing.assert_equal(read_all(restored), contents)


def files_of(replay: HostReplay, *saves: str) -> set[str]:
    """Files that a replay and its saves have."""
    folder = replay._storage.files.folder
    indexes = [path for save in saves for path in folder.glob(f"*.{save}.index")]
    named = {
        file for path in indexes for _, _, file, _ in persistence._read_index(path)[0]["files"]
    }
    live = {file for s in replay._storage.segments.values() for file in s.arena.files}
    return {path.name for path in indexes} | named | live - {None}


@pytest.mark.slow
def test_an_index_that_cannot_be_read_for_the_moment_keeps_its_files(tmp_path, monkeypatch):
    replay, recorder = filled(tmp_path)
    replay.save("1")
    read, failing = persistence._read_index, []

    def read_later(path: Path) -> Any:
        if path.name.endswith(".1.index") and not failing:
            failing.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read(path)

    for i in range(3000):
        recorder.append(i % 2)
    monkeypatch.setattr(persistence, "_read_index", read_later)
    replay.save("2")
    assert failing
    monkeypatch.setattr(persistence, "sync", lambda path: fail())
    with pytest.raises(StorageError):
        replay.save("3")
    monkeypatch.undo()
    contents = read_all(replay)
    for i in range(3000):
        recorder.append(i % 2)
    replay.seal_pending()
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    assert make(tmp_path.with_name("copy")).restore(["1"]) == "1"
    restored = make(tmp_path)
    assert restored.restore(["2"]) == "2"
    np.testing.assert_equal(read_all(restored), contents)


def fail() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.slow
@pytest.mark.parametrize("renamed", [False, True])
def test_a_failed_save_leaves_no_file_and_keeps_none(tmp_path, monkeypatch, renamed):
    replay, recorder = filled(tmp_path)
    replay.save("1")
    saved = {path.name for path in tmp_path.iterdir()}
    disk(monkeypatch, full=True)
    for i in range(3000):  # segments that are in memory only: a save copies them out
        recorder.append(i % 2)
    disk(monkeypatch, full=False)
    before, real = {path.name for path in tmp_path.iterdir()}, persistence.sync

    def refuse(path: Path) -> None:
        if path == tmp_path or (path.suffix == ".part" and not renamed):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path)

    for module in (persistence, files):
        monkeypatch.setattr(module, "sync", refuse)
    with pytest.raises(SeedbedError, match="disk full"):
        replay.save("2")
    assert {path.name for path in tmp_path.iterdir()} == before
    for _ in range(3):  # segments in files are closed between saves that fail
        for i in range(3000):
            recorder.append(i % 2)
        with pytest.raises(SeedbedError, match="disk full"):
            replay.save("2")
    live = {file for s in replay._storage.segments.values() for file in s.arena.files}
    assert {path.name for path in tmp_path.iterdir()} == saved | live - {None}
    assert make(tmp_path).restore(["1", "2"]) == "1"


@pytest.mark.slow
def test_a_segment_that_is_used_again_when_its_save_ends_keeps_its_own_file(tmp_path, monkeypatch):
    disk(monkeypatch, full=True)
    replay, recorder = filled(tmp_path, 2000)
    disk(monkeypatch, full=False)

    class Storage:
        """Hands the lock to who appends as soon as the save's pins are gone."""

        def __init__(self, storage: Any, then: Callable[[], None]) -> None:
            self._storage, self._then, self.lock = storage, then, self

        def __getattr__(self, name: str) -> Any:
            return getattr(self._storage, name)

        def __enter__(self) -> None:
            self._storage.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._storage.lock.release()
            then, self._then = self._then, lambda: None
            then()

        def notify_all(self) -> None:
            self._storage.lock.notify_all()

    def append() -> None:
        for i in range(1000):
            recorder.append(i % 2)
        replay.seal_pending()

    archive, storage = replay._archive, replay._storage
    monkeypatch.setattr(archive, "_storage", Storage(storage, append))
    opened = storage.rows.opened.copy()
    replay.save("1")
    assert ((storage.rows.opened != opened) & (opened >= 0)).any(), "no segment was used again"
    replay.save("2")
    restored = make(tmp_path)
    assert restored.restore(["2"]) == "2"
    require_equal(replay, restored)


def test_a_cut_keeps_its_files_while_an_older_one_is_given_up(tmp_path):
    replay, recorder = filled(tmp_path, 200)
    older = replay.cut("1")
    for i in range(60):
        recorder.append(i % 2)
    newer, items = replay.cut("2"), replay.items
    replay.discard(older)
    for i in range(3000):
        recorder.append(i % 2)
    replay.seal_pending()
    replay.write(newer)
    restored = make(tmp_path)
    assert restored.restore(["2"]) == "2" and restored.items == items


@pytest.mark.slow
def test_a_folder_that_is_gone_is_told_and_stops_nothing(tmp_path):
    folder = tmp_path / "replay"
    replay, recorder = filled(folder)
    shutil.rmtree(folder)
    for i in range(3000):
        recorder.append(i % 2)
    replay.seal_pending()
    require_whole(replay, replay.sample(8), LONGEST)
    (notice,) = replay.take_notices()
    assert "No such file or directory: the replay keeps what comes in memory only" in notice
    with pytest.raises(SeedbedError, match="could not be saved as 1"):
        replay.save("1")
    folder.mkdir()
    for i in range(3000):  # until the segments whose files went with it are closed
        recorder.append(i % 2)
    replay.save("2")
    restored = make(folder)
    restored.restore(["2"])
    require_equal(replay, restored)


def drive(replay: HostReplay, recorder: Recorder, items: int) -> int:
    """Draws as early as may be until so many items more were published; returns how many it drew."""
    goal, before = replay.inserted + items, replay.sampled
    while replay.inserted < goal:
        drew = replay.sampled
        while replay.can_sample(4):
            replay.sample(4)
        assert replay.can_insert() or replay.sampled > drew, "neither may go on"
        if replay.can_insert():
            recorder.append(0)
            replay.seal_pending()
    return replay.sampled - before


@pytest.mark.quick("0.5-0", "6.0-100")
@pytest.mark.parametrize(
    ("ratio", "missing"), [(2.0, 0), (0.5, 0), (6.0, 0), (2.0, 100), (0.5, 100), (6.0, 100)]
)
def test_a_resumed_replay_goes_on_at_once_at_another_ratio(tmp_path, ratio, missing):
    def start(**changes) -> tuple[HostReplay, Recorder]:
        keeps = dataclasses.replace(KEEPS, capacity=2000, **changes)
        replay = HostReplay(layout(keeps), tmp_path, seed=3)
        return replay, Recorder(replay, LONGEST)

    slack, published = 4 * 4, 3 * CHUNK  # items at once
    replay, recorder = start(ratio=2.0, min_size=50)
    assert abs(drive(replay, recorder, 600) - 2.0 * 550) <= slack + 2 * published
    replay.save("1")
    resumed, recorder = start(ratio=ratio, min_size=replay.items + missing)
    assert resumed.restore(["1"]) == "1"
    assert resumed._storage.items.limiter.owed == replay._storage.items.limiter.owed
    if missing:
        drive(resumed, recorder, missing - published)
        assert resumed.sampled == replay.sampled
        drive(resumed, recorder, published)
    before = resumed.sampled
    assert abs(drive(resumed, recorder, 300) - 300 * ratio) <= slack + published * ratio
    assert before - replay.sampled <= slack + published * ratio


@pytest.mark.slow
def test_others_go_on_while_it_is_saved(tmp_path, monkeypatch):
    """Appends, seals and draws from within the synchronisation of files."""
    replay, recorder = filled(tmp_path)
    contents, real = read_all(replay), os.fsync

    def meanwhile(descriptor: int) -> None:
        for i in range(
            6000 if replay.inserted < 1000 else 10
        ):  # segments are closed and used again
            recorder.append(i % 2)
        replay.seal_pending()
        require_whole(replay, replay.sample(8), LONGEST)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    replay.save("1")
    monkeypatch.undo()
    assert replay.inserted > contents[0].generations[-1] + 300
    restored = make(tmp_path)
    restored.restore(["1"])
    np.testing.assert_equal(read_all(restored), contents)


def memory_that(raises: str, number: int) -> type:
    """A type of memory whose method, or whose constructor, fails as the system would."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return type("Memory", (mmap.mmap,), {raises: fail})


def test_a_kernel_without_huge_pages_keeps_a_replay(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", memory_that("madvise", errno.EINVAL))
    assert Arena("rows", 2, [4096], None).views[0].size == 3 * 4096


def test_addresses_that_are_refused_are_told(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", memory_that("__new__", errno.ENOMEM))
    with pytest.raises(SeedbedError, match=r"4.1 GB of addresses for rows.*lower --agent.capacity"):
        Arena("rows", 9, [100_000 * 4096], None)


def test_a_segment_that_cannot_be_mapped_whole_stays_in_memory(tmp_path, monkeypatch):
    place = Arena._place

    def refused(self, segment, part, flags, descriptor, offset):
        if part == 1 and descriptor >= 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        place(self, segment, part, flags, descriptor, offset)

    monkeypatch.setattr(Arena, "_place", refused)
    files = Files(tmp_path)
    arena = Arena("x", 3, [4096, 8192], files)
    for segment in (0, 1):
        arena.open(segment)
    for view, size in zip(arena.views, arena.part_bytes, strict=True):
        view[: 2 * size] = 7
    assert arena.files == [None] * 3 and not list(tmp_path.iterdir())
    assert ["Cannot allocate memory" in notice for notice in files.notices] == [True]
    arena.close(0, frozenset())


SAVER = """
import sys
from pathlib import Path
from test_replay_persistence import filled
replay, recorder = filled(Path(sys.argv[1]))
name = int(sys.argv[2])
while True:
    for i in range(120):
        recorder.append(i % 2)
    replay.save(str(name))
    print(name, flush=True)
    name += 1
"""


def test_a_kill_while_saving_leaves_the_save_before(tmp_path):
    random = np.random.default_rng(0)
    for attempt in range(4):
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        child = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path), str(attempt * 10_000)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(float(random.uniform(0, 0.15)))
        child.send_signal(signal.SIGKILL)
        done = attempt * 10_000 + len(child.stdout.read().splitlines())
        child.wait()
        replay = make(tmp_path)
        names = [str(done), str(done + 1)]  # its own end may not have been told
        assert replay.restore(names) in names
        replay.check_valid()
        assert replay.take_notices() == []
        require_whole(replay, read_all(replay)[0], LONGEST)
        assert replay.items == 150
