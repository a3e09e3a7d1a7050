"""Runs in buckets: what is sent and fetched, who has a run, and what becomes of one whose machine is lost."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed import cache, train
from seedbed.exit_status import ExitStatus, TemporaryError, status_of
from seedbed.launch import job
from seedbed.launch.ranks import Rank
from seedbed.run import mirror
from seedbed.run.bucket import address_file, folder_of, is_address, kept, name_of, run_path
from seedbed.run.bucket_names import belongs
from seedbed.run.checkpoint_helper import newest_claim
from seedbed.run.folder import RunFolder, TakenOver
from seedbed.run.mirror import Bucket, Taken
from seedbed.run.trust import Trust, Untrusted
from seedbed.types import SeedbedError
from waiting import wait_for


def test_addresses_are_told_from_folders():
    assert is_address("s3://bucket/run") and is_address("gs://b/r") and is_address("file:///x")
    assert not any(map(is_address, ("runs/pong", "/x", "C:\\x", "host:4711", "s3:/x", "s3://")))
    assert folder_of("s3://b/run") == folder_of("s3://b/run/") != folder_of("s3://c/run")
    assert name_of(Path("runs/pong")) == "runs/pong" and run_path("runs/pong") == Path("runs/pong")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path_factory.mktemp("cache")))


class Machine:
    """A machine with a folder of its own of a run that is kept in a bucket of the disk."""

    def __init__(self, root: Path, name: str, there: Path) -> None:
        self.folder = cache.directory("runs") / f"{root.name}-{name}"
        self.folder.parent.mkdir(exist_ok=True)
        address_file(self.folder).write_text(json.dumps({"address": f"file://{there}"}))

    def bucket(self) -> Bucket:
        return Bucket(self.folder)

    def begin(self) -> RunFolder:
        """Takes the run, as training does."""
        self.bucket().fetch()
        new = not (self.folder / "config.json").exists()
        run = (RunFolder.create if new else RunFolder.resume)(self.folder)
        run.write_config({"at": str(self.folder)})
        return run

    def content(self) -> dict[str, bytes]:
        return {path: (self.folder / path).read_bytes() for path in self.bucket()._local()}


@pytest.fixture
def machines(tmp_path) -> tuple[Machine, Machine]:
    there = tmp_path / "bucket" / "run"
    return Machine(tmp_path, "one", there), Machine(tmp_path, "other", there)


def test_another_machine_goes_on_where_the_first_was_lost(machines, tmp_path):
    one, other = machines
    run = one.begin()
    keeping = one.bucket()
    keeping.claim()
    (run.path / "metrics.jsonl").write_text("1\n")
    (run.checkpoints / "5").mkdir(parents=True)
    (run.checkpoints / "5" / "large").write_bytes(os.urandom(2 << 20))
    (run.path / ".hidden").write_text("here")
    run.listen.mkdir()
    (run.listen / "actor.key").write_text("secret")
    keeping.send()
    assert not keeping.new()
    sent = [path.name for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
    assert sorted(sent) == ["000001", "config.json", "large", "metrics.jsonl"]
    # What came after that is lost with the machine.
    (run.path / "metrics.jsonl").write_text("1\n2\n")
    again = other.begin()
    assert again.checkpoints.is_dir()
    assert again.term == 2 and (again.path / "metrics.jsonl").read_text() == "1\n"
    taking = other.bucket()
    taking.claim()
    (again.checkpoints / "5").rename(again.checkpoints / "6")
    taking.send()
    # The first machine lives after all: it finds out, sends nothing, and its learner ends.
    with pytest.raises(Taken):
        keeping.send()
    with pytest.raises(TakenOver):
        run.require_claim()
    run.close()
    # If the run goes on there, it has what the other one has sent.
    one.bucket().fetch()
    assert one.content() == {**other.content(), "config.json": one.content()["config.json"]}
    assert (one.folder / "checkpoints" / "6" / "large").exists()
    assert not (one.folder / "checkpoints" / "5" / "large").exists()
    third = RunFolder.resume(one.folder)
    assert third.term == 3
    # Two that begin at once: one has it.
    twin = RunFolder(other.folder)
    again.close()
    twin._take(lambda text: None)
    assert twin.term == 3
    one.bucket().claim()
    with pytest.raises(Taken):
        other.bucket().claim()
    for each in (third, twin):
        each.close()


def test_a_file_that_could_not_be_sent_is_sent_later(machines, monkeypatch):
    """Whatever has failed: the folder for it, too."""
    one, _ = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    keeping.send()
    (run.checkpoints / "5").mkdir(parents=True)
    (run.checkpoints / "5" / "a").write_text("a")
    for name in ("makedirs", "put_file"):
        method = getattr(keeping._files, name)

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError("no")

        monkeypatch.setattr(keeping._files, name, refuse)
        with pytest.raises(PermissionError):
            keeping.send()
        assert one.bucket().new() == keeping.new() == ["checkpoints/5/a"]
        monkeypatch.setattr(keeping._files, name, method)
    keeping.send()
    assert not keeping.new()
    run.close()


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd", "../x", "a/../../x", "a//b", "", ".lock", "a/.hidden", "listen/actor.key",
        "listen/private.pem", "terms/000001", "roles/replay-0/address.json",
    ],
)  # fmt: skip
def test_names_in_a_bucket_lead_nowhere_else(name):
    assert not belongs(name)
    assert belongs("config.json") and belongs("roles/replay-0/replay/a.index")


def test_what_a_bucket_names_is_not_imported_unasked(machines):
    one, other = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    keeping.send()
    run.close()
    other.bucket().fetch()
    with pytest.raises(Untrusted, match="another machine has sent it"):
        Trust.reading(other.folder, other.folder / "config.json")[1].require("code:function")
    Trust.reading(one.folder, one.folder / "config.json")[1].require("code:function")


def test_what_is_lost_of_the_folder_is_brought_back_and_not_removed(machines, tmp_path):
    one, _ = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    (run.checkpoints / "5").mkdir(parents=True)
    (run.checkpoints / "5" / "a").write_text("a")
    (run.path / "metrics.jsonl").write_text("1\n")
    keeping.send()
    before = one.content()
    # While it trains, somebody clears the cache.
    (run.path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="has been removed"):
        keeping.send()
    run.close()
    shutil.rmtree(run.checkpoints)
    one.bucket().fetch()
    assert one.content() == before


def test_what_copies_an_earlier_start_leaves_the_next_one_its_run(machines):
    one, _ = machines
    run, earlier = one.begin(), one.bucket()
    earlier.claim()
    earlier.send()
    run.close()
    again = one.begin()
    one.bucket().claim()
    with pytest.raises(Taken):
        earlier.send()
    again.require_claim()
    again.close()


def test_what_was_not_sent_is_kept_where_another_machine_has_gone_on(machines):
    one, other = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    for step in ("5", "7"):
        (run.checkpoints / step).mkdir(parents=True)
        (run.checkpoints / step / "a").write_text(step)
        if step == "5":
            keeping.send()
    run.close()
    again, taking = other.begin(), other.bucket()
    taking.claim()
    taking.send()
    again.close()
    fetching = one.bucket()
    fetching.fetch()
    assert not (run.checkpoints / "7").exists() or not list((run.checkpoints / "7").iterdir())
    aside = RunFolder.read(Path(fetching.aside))
    assert (aside.checkpoints / "7" / "a").read_text() == "7"
    assert fetching.aside.startswith(f"{one.folder}.unsent-1-")
    fetching = one.bucket()
    fetching.fetch()
    assert not fetching.aside, "there is nothing else to keep"


def test_a_run_that_failed_before_it_trained_leaves_nothing(machines, tmp_path):
    one, _ = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    keeping.send()
    run.discard_untrained()
    assert not one.folder.exists()
    keeping.send()
    assert not [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()]


def test_a_run_that_trains_here_is_not_fetched_over(machines):
    one, other = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    keeping.send()
    again = other.begin()
    (again.path / "metrics.jsonl").write_text("new\n")
    # As of a fetch that began before: the bucket has not the new term yet.
    other.bucket().fetch()
    assert (again.path / "metrics.jsonl").read_text() == "new\n"
    assert again.claim == newest_claim(again.path)
    for each in (run, again):
        each.close()


def test_two_histories_are_not_mixed(machines):
    """The same names and sizes, of two machines that have gone on from the same step."""
    one, other = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    keeping.send()
    again, taking = other.begin(), other.bucket()
    for each, letter in ((run, b"A"), (again, b"B")):
        (each.checkpoints / "5").mkdir(parents=True)
        for name, size in (("large", 2 << 20), ("small", 10)):
            (each.checkpoints / "5" / name).write_bytes(letter * size)
    taking.claim()
    taking.send()
    for each in (run, again):
        each.close()
    one.bucket().fetch()
    content = one.content()
    assert {content[f"checkpoints/5/{name}"][:1] for name in ("large", "small")} == {b"B"}


def test_a_start_that_the_bucket_refuses_undoes_nothing_that_it_lacks(machines):
    one, _ = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    keeping.send()
    newer = [run.path / "metrics.jsonl", run.checkpoints / "6" / "a"]
    newer[1].parent.mkdir(parents=True)
    for path in newer:
        path.write_text("unsent\n")
    run.close()
    RunFolder.resume(one.folder).close()
    one.bucket().fetch()
    assert [path.read_text() for path in newer] == ["unsent\n"] * 2
    run = RunFolder.resume(one.folder)
    one.bucket().claim()
    with run.training({"at": "here"}):
        assert [path.name for path in (run.path / "terms").iterdir()] == ["000003"]


def test_a_file_beside_a_folder_that_is_not_of_the_cache_is_nobodys_bucket(tmp_path):
    target, folder = tmp_path / "target", tmp_path / "pong"
    target.mkdir()
    (target / "checkpoints").write_text("precious")
    address_file(folder).write_text(json.dumps({"address": f"file://{target}"}))
    run = RunFolder.create(folder)
    run.write_config({})
    with kept(folder, print):
        (run.path / "metrics.jsonl").write_text("1\n")
    run.close()
    assert [path.name for path in target.iterdir()] == ["checkpoints"]
    assert name_of(folder) == str(folder)
    assert job.folder_of(folder, Rank(0, 2, 1, 0.0, "", "")) == folder


def save_checkpoint(run: RunFolder, step: int, keep: int = 3) -> None:
    """Makes a checkpoint after the index of its replay, which names a file; keeps some, and two replays."""
    run.replay.mkdir(exist_ok=True)
    for old in range(step - 1):
        (run.replay / f"{old:08d}.{old:04d}.index").unlink(missing_ok=True)
        (run.replay / f"rows-{old}.data").unlink(missing_ok=True)
    (run.replay / f"rows-{step}.data").write_text("x")
    (run.replay / f"{step:08d}.{step:04d}.index").write_text(f"rows-{step}.data")
    for old in range(step - keep + 1):
        shutil.rmtree(run.checkpoints / f"{old:04d}", ignore_errors=True)
    (run.checkpoints / f"{step:04d}").mkdir(parents=True)
    for name in ("a", "b"):
        (run.checkpoints / f"{step:04d}" / name).write_text(str(step))


def newest_in(there: Path) -> int:
    """Returns the step of the newest checkpoint in a bucket that has all its files."""
    folders = (there / "checkpoints").iterdir()
    return max(int(path.name) for path in folders if len(list(path.iterdir())) == 2)


def whole_in(there: Path) -> list[int]:
    """Returns the steps of the checkpoints in a bucket that are whole, with their replays."""
    replay = there / "replay"
    whole = [path for path in replay.glob("*.index") if (replay / path.read_text()).exists()]
    named = {path.name.split(".")[1] for path in whole}
    return sorted(
        int(path.name)
        for path in (there / "checkpoints").iterdir()
        if path.name in named and len(list(path.iterdir())) == 2
    )


@pytest.mark.parametrize("lost", [2, 99])
@pytest.mark.parametrize("saves", [1, 2, 4])
@pytest.mark.parametrize("when", range(5))
def test_a_bucket_always_has_a_checkpoint_with_its_replay(
    machines, tmp_path, monkeypatch, when, saves, lost
):
    """Wherever a pass ends, and however much is saved here while it sends; the newest one is it, mostly."""
    one, _ = machines
    run, keeping, there = one.begin(), one.bucket(), tmp_path / "bucket" / "run"
    keeping.claim()
    for step in (1, 2, 3):
        save_checkpoint(run, step)
        keeping.send()
        assert whole_in(there)[-1] == newest_in(there) == step
    save_checkpoint(run, 4)
    put, count = keeping._files.put_file, 0

    def put_file(*args: Any) -> None:
        nonlocal count
        if count == when:
            for step in range(5, 5 + saves):
                save_checkpoint(run, step)
        if count == when + lost:
            raise ConnectionError("lost")
        count += 1
        put(*args)

    monkeypatch.setattr(keeping._files, "put_file", put_file)
    with contextlib.suppress(ConnectionError):
        keeping.send()
    whole = whole_in(there)
    # If a checkpoint has lost its replay while that was to be sent, it is sent without.
    assert whole and (whole[-1] == newest_in(there) or saves > 1)
    monkeypatch.setattr(keeping._files, "put_file", put)
    for _ in range(2):
        keeping.send()
    steps = sorted(int(path.name) for path in run.checkpoints.iterdir())
    assert whole_in(there)[-1] == newest_in(there) == steps[-1]
    folders = (there / "checkpoints").iterdir()
    assert sorted(int(path.name) for path in folders if any(path.iterdir())) == steps
    run.close()


@pytest.mark.parametrize("saves", [1, 2, 4])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_bucket_that_is_slower_than_saving_has_a_checkpoint_and_not_all(
    machines, tmp_path, monkeypatch, keep, saves
):
    one, _ = machines
    run, keeping, there = one.begin(), one.bucket(), tmp_path / "bucket" / "run"
    keeping.claim()
    save_checkpoint(run, 1, keep)
    keeping.send()
    put, step, at_once = keeping._files.put_file, 1, True

    def put_file(*args: Any) -> None:
        nonlocal step, at_once
        put(*args)
        if at_once:
            at_once = False
            for _ in range(saves):
                step += 1
                save_checkpoint(run, step, keep)

    monkeypatch.setattr(keeping._files, "put_file", put_file)
    newest = []
    for _ in range(20):
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write("1\n")
        at_once = True
        keeping.send()
        newest.append(newest_in(there))
    assert newest[-1] > step - 4 * saves - keep, "the bucket goes on with the run"
    for folder in ("checkpoints", "replay"):
        files = [path for path in (there / folder).rglob("*") if path.is_file()]
        assert len(files) < 2 * (3 + keep + 6 * saves)
    run.close()


def test_a_claim_whose_answer_was_lost_is_ones_own(machines):
    one, _ = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    keeping.claim()
    (run.path / "metrics.jsonl").write_text("unsent\n")
    run.close()
    # The process was killed before anything was sent: the folder has what the bucket lacks.
    one.bucket().fetch()
    assert (one.folder / "metrics.jsonl").read_text() == "unsent\n"


def test_a_file_that_goes_while_the_bucket_is_read_is_no_failure(machines, monkeypatch):
    one, other = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    (run.path / "metrics.jsonl").write_text("1\n")
    keeping.send()
    reading = other.bucket()
    get, failures = reading._files.get_file, [FileNotFoundError(), FileNotFoundError()]

    def get_file(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        get(*arguments)

    monkeypatch.setattr(reading._files, "get_file", get_file)
    reading.fetch()
    assert other.content() == one.content() and not failures
    run.close()


names = st.sampled_from(["metrics.jsonl", "checkpoints/1/a", "checkpoints/2/b", "d/c", "e"])
changes = st.lists(st.tuples(names, st.one_of(st.none(), st.binary(max_size=5))), max_size=12)


@settings(max_examples=30, deadline=None)
@given(st.lists(changes, max_size=4))
def test_a_bucket_has_what_the_folder_has(tmp_path_factory, turns):
    root = tmp_path_factory.mktemp("turns")
    there = root / "bucket"
    one, other = Machine(root, "one", there), Machine(root, "other", there)
    run, kept_one = one.begin(), one.bucket()
    kept_one.claim()
    clock = 0
    for turn in turns:
        for name, data in turn:
            path = run.path / name
            if data is None:
                # All else stays in the bucket.
                if name.startswith("checkpoints/"):
                    path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                # A disk's clock may be coarser than this loop.
                clock += 1
                os.utime(path, ns=(clock, clock))
        kept_one.send()
        other.bucket().fetch()
        here, there = one.content(), other.content()
        # What is newer than all that is here stays: the newest has gone before it was sent, perhaps.
        newest = max((name for name in here if name.startswith("checkpoints/")), default="")
        assert {name: x for name, x in there.items() if name in here or name <= newest} == here
    run.close()
    shutil.rmtree(root)


def test_a_replay_is_sent_when_it_has_been_saved(machines):
    one, _ = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    run.replay.mkdir()
    segment, index = run.replay / "steps-0", run.replay / "00000001.5.index"
    segment.write_bytes(b"1")
    index.write_bytes(b"save")
    assert keeping.new() == ["config.json", "replay/steps-0", "replay/00000001.5.index"]
    keeping.send()
    segment.write_bytes(b"12")
    assert keeping.new() == []
    index.rename(run.replay / "00000002.9.index")
    assert keeping.new() == ["replay/steps-0", "replay/00000002.9.index"]
    run.close()


def test_a_log_that_grows_takes_only_so_much_of_the_network(machines, monkeypatch):
    """A line of 10 kB every 15 s, for four hours."""
    one, other = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    keeping.send()
    now, sent, put = [time.monotonic()], [0], keeping._files.put_file

    def count(source: str, to: str) -> None:
        sent[0] += Path(source).stat().st_size
        put(source, to)

    monkeypatch.setattr(mirror, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(keeping._files, "put_file", count)
    for _ in range(1000):
        with (run.path / "metrics.jsonl").open("a") as file:
            file.write("x" * 10_000)
        now[0] += 15.0
        keeping.send()
    assert 10e6 < sent[0] < 100_000 * 15.0 * 1000
    assert keeping.new() == [] and keeping.new(ending=True) == ["metrics.jsonl"]
    keeping.send(ending=True)
    # However large, it waits for ten minutes at most.
    monkeypatch.setattr(mirror, "_LOG_BYTES_S", 1)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write("x" * 10_000)
    for passed_s, new in ((599.0, []), (2.0, ["metrics.jsonl"])):
        now[0] += passed_s
        assert keeping.new() == new
    keeping.send()
    run.close()
    other.begin().close()
    assert (other.folder / "metrics.jsonl").stat().st_size == 10_010_000


def test_a_bucket_that_refuses_for_a_while_is_sent_everything_later(machines, monkeypatch):
    one, _ = machines
    run, keeping = one.begin(), one.bucket()
    keeping.claim()
    keeping.send()
    put = keeping._files.put_file

    def refuse(*_: Any) -> None:
        raise PermissionError("no")

    (run.path / "metrics.jsonl").write_text("1\n")
    monkeypatch.setattr(keeping._files, "put_file", refuse)
    with pytest.raises(PermissionError):
        keeping.send()
    assert keeping.new() == ["metrics.jsonl"]
    monkeypatch.setattr(keeping._files, "put_file", put)
    keeping.send()
    assert not keeping.new()
    run.close()


def test_the_end_says_what_the_bucket_lacks_and_where_it_is(machines, monkeypatch, tmp_path):
    one, _ = machines
    run = one.begin()
    told: list[str] = []
    text = f"lacks what is new in {one.folder}; .*go on with: seedbed train --resume --run file://"
    with pytest.raises(TemporaryError, match=text), kept(run.path, told.append):
        (run.path / "metrics.jsonl").write_text("1\n")
        # Where files were to be, there is one.
        shutil.rmtree(tmp_path / "bucket" / "run")
        (tmp_path / "bucket" / "run").write_text("")
    assert "refuses" in told[-1]
    run.close()


def test_a_failure_of_the_run_is_told_and_not_the_buckets(machines, tmp_path):
    one, _ = machines
    run = one.begin()
    with pytest.raises(ZeroDivisionError), kept(run.path, lambda text: None):
        shutil.rmtree(tmp_path / "bucket")
        (tmp_path / "bucket").write_text("")
        raise ZeroDivisionError
    run.close()


def test_what_cannot_be_used_is_told_before_training(monkeypatch, tmp_path):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path))
    with pytest.raises(
        SeedbedError, match="foo://x/run: the bucket cannot be used .Protocol"
    ) as error:
        run_path("foo://x/run")
    assert status_of(error.value) == ExitStatus.FAILED
    (tmp_path / "file").write_text("")
    run = RunFolder.create(run_path(f"file://{tmp_path}/file/run"))
    text = r"the bucket cannot be used \(.*\): check its name and your rights"
    # It may be otherwise when the same command is given again.
    with pytest.raises(TemporaryError, match=text), kept(run.path, lambda text: None):
        raise AssertionError
    run.close()


def test_a_start_that_was_killed_before_it_sent_anything_is_in_nobodys_way(machines):
    one, other = machines
    run = one.begin()
    one.bucket().claim()
    again = other.begin()
    assert again.term == 2
    other.bucket().claim()
    for each in (run, again):
        each.close()


def test_a_run_that_another_has_taken_is_not_said_to_be_in_the_bucket(machines):
    one, other = machines
    run = one.begin()
    text = f"another process has taken file://.*, which has none of what is new in {one.folder}"
    with pytest.raises(SeedbedError, match=text), kept(run.path, lambda text: None):
        (run.path / "metrics.jsonl").write_text("1\n")
        other.begin().close()
        other.bucket().claim()
    text = "another process trains file://"
    with pytest.raises(TemporaryError, match=text), kept(run.path, lambda text: None):
        raise AssertionError
    run.close()


def test_a_start_that_the_bucket_refuses_keeps_no_lock(machines, tmp_path):
    one, _ = machines
    (tmp_path / "bucket").write_text("")  # where its folder would be
    for _ in range(2):
        with pytest.raises(TemporaryError, match="the bucket cannot be used"):
            train("cartpole", run=one.folder, steps=1000)


def test_the_machines_of_a_job_need_a_folder(machines):
    one, _ = machines
    with pytest.raises(SeedbedError, match="--run is file://.* find one another in a folder"):
        job.folder_of(one.folder, Rank(0, 2, 1, 0.0, "", ""))


@pytest.fixture
def s3(tmp_path) -> Iterator[dict[str, str]]:
    """The environment with a server that speaks as S3 does."""
    if not all(importlib.util.find_spec(name) for name in ("s3fs", "moto", "flask")):
        pytest.skip("s3fs and moto[server] are not installed")
    code = (
        "from moto.server import ThreadedMotoServer as S; import time\n"
        "s = S(ip_address='127.0.0.1', port=0); s.start()\n"
        "print('port', s.get_host_and_port()[1], flush=True); time.sleep(600)"
    )
    python = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {
        "PYTHONPATH": python,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert server.stdout is not None
    port = next(line.split()[1] for line in server.stdout if line.startswith("port "))
    environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    make = "import s3fs; s3fs.S3FileSystem().mkdir('bucket')"
    subprocess.run([sys.executable, "-c", make], env=environment, check=True)
    yield environment
    server.kill()
    server.communicate()


@pytest.mark.slow
def test_a_run_in_a_bucket_survives_its_first_machine(s3, tmp_path):
    def start(machine: str, *words: str) -> subprocess.Popen[str]:
        environment = s3 | {"SEEDBED_CACHE": str(tmp_path / machine)}
        return subprocess.Popen(
            [sys.executable, "-m", "seedbed", *words], env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def files() -> str:
        code = "import s3fs; print(s3fs.S3FileSystem(use_listings_cache=False).find('bucket/run'))"
        listing = subprocess.run(
            [sys.executable, "-c", code], env=s3, capture_output=True, text=True, check=True
        )
        return listing.stdout

    train = ["train", "CartPole-v1", "--agent", "dqn", "--steps", "200000", "--evaluate-every", "0"]
    train += ["--checkpoint-every-s", "2", "--save-replay"]
    first = start("one", *train, "--run", "s3://bucket/run")
    wait_for(lambda: files().count("manifest.json") >= 3 and ".index" in files(), first)
    os.killpg(first.pid, signal.SIGKILL)
    # Its machine is lost with all that it has, also the process that sends.
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        if f"{tmp_path}/one".encode() in line.read_bytes():
            os.kill(int(line.parent.name), signal.SIGKILL)
    first.communicate()
    second, said = start("two", "train", "--resume", "--run", "s3://bucket/run"), list[str]()
    output = second.stdout
    assert output is not None
    wait_for(lambda: said.append(output.readline()) or "going on from" in said[-1], second)
    second.send_signal(signal.SIGTERM)
    said.append(second.communicate(timeout=120)[0])
    assert second.returncode == ExitStatus.STOPPED, "".join(said)
    assert "go on with: seedbed train --resume --run s3://bucket/run" in said[-1]
    assert "replay was not saved" not in "".join(said)
    played = start("three", "evaluate", "s3://bucket/run", "--episodes", "1")
    assert "return" in played.communicate(timeout=120)[0] and played.returncode == 0
