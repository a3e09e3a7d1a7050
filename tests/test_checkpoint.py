from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest

from checkpoint_files import TEMPLATE, stopped, write, write_tree
from seedbed.envs.host import pickled
from seedbed.exit_status import TemporaryError
from seedbed.run import checkpoint, checkpoint_helper, restoring
from seedbed.run.checkpoint import CheckpointWriter
from seedbed.run.checkpoint_helper import list_steps, name_of, read_best, remove_leftovers
from seedbed.run.folder import RunFolder
from seedbed.run.restoring import (
    restore,
    restore_best,
    restore_newest,
    task_number,
    warn_of_other_task,
)
from seedbed.types import SeedbedError, StorageError


class State(NamedTuple):
    params: dict
    optimizer: tuple
    key: object


def tree(value: float = 1.0) -> State:
    params = {
        "w": jnp.full((3, 4), value),
        "half": np.full((5,), value, ml_dtypes.bfloat16),
        "layers": [np.arange(3, dtype=np.int64), np.array(2**40)],
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 3), np.float32),
    }
    optimizer = (np.float32(value), None, {"count": jnp.int32(7)})
    return State(params, optimizer, {"raw": jax.random.PRNGKey(3), "typed": jax.random.key(4)})


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if jax.dtypes.issubdtype(
            jnp.asarray(a).dtype if not hasattr(a, "dtype") else a.dtype, jax.dtypes.prng_key
        ):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_round_trip_is_exact(tmp_path):
    mutable = np.ones((4,), np.float32)
    with CheckpointWriter(tmp_path) as writer:
        writer.save(10, {"state": tree(), "host": mutable}, {"env_steps": 640, "pi": 0.1})
        mutable[:] = 9.0  # the caller goes on with its buffers at once
    template = {"state": tree(2.0), "host": np.zeros_like(mutable)}
    step, restored, metadata = restore(tmp_path, template)
    assert (step, metadata) == (10, {"env_steps": 640, "pi": 0.1})
    assert_same(restored["state"], tree())
    assert (restored["host"] == 1.0).all()


def test_a_whole_checkpoint_is_told_of_once_and_a_score_of_an_older_one_is_none(tmp_path):
    with CheckpointWriter(tmp_path) as writer:
        assert writer.take_written() is None
        told = []
        for step, score in ((100, None), (200, None), (100, 3.0), (200, 2.0)):
            writer.save(step, tree(), {}, score)
            writer.wait()
            told.append(writer.take_written())
    assert [path and int(path.name) for path in told] == [100, 200, None, None]


def test_abstract_template(tmp_path):
    write(tmp_path, 1, 3.0)
    template = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
    assert (restore(tmp_path, template)[1]["w"] == 3.0).all()


def test_helper_ignores_interrupts_survives_kill_and_ends_when_idle(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2, idle_s=0.3)
    writer.save(1, tree(1.0), {})
    while writer.helper_pid is None:
        time.sleep(0.01)
    helper = psutil.Process(writer.helper_pid)
    assert os.getsid(helper.pid) != os.getsid(0)
    writer.wait()
    assert helper.memory_info().rss < 400e6
    os.kill(helper.pid, signal.SIGINT)
    writer.save(2, tree(2.0), {}, score=5.0)
    writer.wait()
    os.kill(helper.pid, signal.SIGKILL)
    writer.save(3, tree(3.0), {}, score=float("nan"))
    writer.save(4, tree(4.0), {}, score=4.0)
    writer.wait()
    assert list_steps(tmp_path) == [2, 3, 4]
    assert read_best(tmp_path) == {"step": 2, "score": 5.0, "task": 0}
    deadline = time.time() + 20
    while writer.helper_pid is not None and time.time() < deadline:
        time.sleep(0.05)
    assert writer.helper_pid is None
    writer.close()
    assert not [child for child in psutil.Process().children() if child.pid == helper.pid]
    step, restored, _ = restore_best(tmp_path, tree())
    assert step == 2
    assert_same(restored, tree(2.0))


def test_who_gives_up_waits_for_no_write(tmp_path):
    """A second Ctrl-C; the helper that is stopped would never end what it writes."""
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path) as writer:
        writer.save(1, tree(1.0), {})
        writer.wait()
        with stopped(helper := psutil.Process(writer.helper_pid)):
            writer.save(2, tree(2.0), {})
            writer.save(3, tree(3.0), {})
            raise KeyboardInterrupt
    psutil.wait_procs([helper], timeout=10)
    assert list_steps(tmp_path) == [1] and not helper.is_running()


def test_a_full_disk_is_reported_and_costs_nothing_else(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.save(1, tree(), {})
    writer.wait()
    assert writer.helper_pid is not None
    psutil.Process(writer.helper_pid).rlimit(psutil.RLIMIT_FSIZE, (64, 2**40))
    writer.save(2, tree(), {})
    with pytest.raises(StorageError, match="step 2 could not be written .*--run"):
        writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]
    assert restore(tmp_path, tree())[0] == 1
    writer.save(3, tree(), {})
    writer._requests.join()
    with pytest.raises(StorageError, match="step 3 could not be written"):
        writer.save(4, tree(), {})  # which goes on all the same
    writer._requests.join()
    with pytest.raises(ValueError, match="the cause") as cause, writer:
        raise ValueError("the cause")
    assert "step 4 could not be written" in cause.value.__notes__[0]


def test_a_newer_checkpoint_makes_good_for_one_that_failed(tmp_path, monkeypatch):
    begin, reasons = threading.Event(), iter(["no room", None])

    def write_slowly(self, request):
        begin.wait()
        return next(reasons)

    monkeypatch.setattr(CheckpointWriter, "_write", write_slowly)
    with CheckpointWriter(tmp_path) as writer:
        writer.save(1, TEMPLATE, {})
        writer.save(2, TEMPLATE, {})
        begin.set()
        writer.wait()


def test_a_fault_of_the_writer_itself_is_reported_and_blocks_nobody(tmp_path, monkeypatch):
    class Faulty:
        def __init__(self, *given):
            raise AttributeError("this system has no O_TMPFILE")

    monkeypatch.setattr(checkpoint, "_Helper", Faulty)
    writer = CheckpointWriter(tmp_path)
    for step in (1, 2, 3):
        with contextlib.suppress(StorageError):
            writer.save(step, TEMPLATE, {})
    with pytest.raises(StorageError, match="step 3 could not be written .*AttributeError: this"):
        writer.close()


def test_an_unusable_folder_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(tmp_path / "file" / "checkpoints")
    writer.save(1, {"w": np.zeros(3)}, {})
    with pytest.raises(SeedbedError, match="could not be written"):
        writer.close()


def test_keeps_the_last_and_the_best(tmp_path):
    for step, score in ((1, 1.0), (2, 9.0), (3, None), (4, 3.0), (5, None), (6, None)):
        write(tmp_path, step, step, score=score, keep=2)
    assert list_steps(tmp_path) == [2, 5, 6]
    assert restore_best(tmp_path, TEMPLATE)[0] == 2
    assert restore(tmp_path, TEMPLATE)[0] == 6
    write(tmp_path, 6, 60.0, keep=2)  # updated once more without another step
    assert (restore(tmp_path, TEMPLATE)[1]["w"] == 60.0).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"{step:012d}" for step in (2, 5, 6)),
        "best.json",
    ]


def test_a_score_of_another_task_is_no_better_one(tmp_path):
    run, told, numbers = RunFolder.create(tmp_path), list[str](), []
    for code, reward in (("a", 1), ("b", 1), ("b", 2)):
        kwargs = {"name": "make", "pickled": code, "options": {"reward": reward}}
        run.write_config({"env": {"factory": pickled.MAKE, "kwargs": kwargs}})
        numbers.append(task_number(run))
        write(run.checkpoints, 1, score=9.0, task=numbers[0])
        warn_of_other_task(run, told.append)
    assert numbers[0] == numbers[1] != numbers[2]
    assert len(told) == 1 and "of step 1, was in an environment with other options" in told[0]
    write(run.checkpoints, 2, task=numbers[2])
    assert restore_best(run.checkpoints, TEMPLATE)[0] == 1
    write(run.checkpoints, 3, score=1.0, task=numbers[2])
    write(run.checkpoints, 4, score=0.5, task=numbers[2])
    assert restore_best(run.checkpoints, TEMPLATE)[0] == 3
    run.close()


def test_a_score_that_comes_later_rewrites_nothing(tmp_path):
    write(tmp_path, 1, 1.0, score=1.0)
    write(tmp_path, 2, 2.0)
    before = (tmp_path / "000000000002").stat().st_ino
    write(tmp_path, 2, 2.0, score=3.0)
    assert (tmp_path / "000000000002").stat().st_ino == before
    assert read_best(tmp_path) == {"step": 2, "score": 3.0, "task": 0}
    damage_flip(tmp_path / "000000000002")
    write(tmp_path, 2, 2.0, score=4.0)
    assert restore_best(tmp_path, TEMPLATE)[0] == 2
    assert read_best(tmp_path) == {"step": 2, "score": 4.0, "task": 0}


def test_other_arrays_beside_the_same_parameters_keep_what_is_known_of_these(tmp_path):
    """As of a run that goes on with other rates of exploration."""
    with CheckpointWriter(tmp_path) as writer:
        for value, updates, more in ((1.0, 7, {"evaluation": 5}), (2.0, 7, {}), (3.0, 8, {})):
            arrays = {"x": np.full(3, value)}
            writer.save(4, arrays, {"start": {"updates": updates}} | more)
            writer.wait()
            _, found, metadata = restore(tmp_path, arrays)
            assert found["x"][0] == value
            assert metadata.get("evaluation") == (5 if updates == 7 else None)


def test_an_older_checkpoint_stays_where_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    write(tmp_path, 1, 1.0)
    rename = Path.rename

    def refuse(self, target):
        if self.name.startswith(".writing-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 1, 2.0)
    assert (restore(tmp_path, TEMPLATE)[1]["w"] == 1.0).all()
    assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]


def test_who_has_lost_the_run_leaves_alone_what_its_successor_writes(run_folder, monkeypatch):
    def taken(folder: Path) -> None:
        later.append(RunFolder.resume(run_folder))
        (folder.parent / ".writing-000000000009").mkdir()

    first, later = RunFolder.create(run_folder), []
    first.write_config({})
    first.checkpoints.mkdir()
    first.close()  # its locks do not reach the other machine
    monkeypatch.setattr(checkpoint_helper, "_sync_tree", taken)
    with pytest.raises(RuntimeError, match="another learner has taken over"):
        write(first.checkpoints, 1, claim=first.claim)
    with pytest.raises(RuntimeError, match="another learner has taken over"):
        write(first.checkpoints, 1, claim=first.claim)
    assert [path.name for path in first.checkpoints.iterdir()] == [".writing-000000000009"]
    later[0].close()


@pytest.mark.parametrize("read", [restore, restore_best, restore_newest])
def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(tmp_path, monkeypatch, read):
    def away(path: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write(tmp_path, 1, 1.0)
    write(tmp_path, 2, 2.0)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_helper, "load_json", away)
        with pytest.raises(TemporaryError, match="000000000002 cannot be read .Input/output error"):
            read(tmp_path, TEMPLATE)
    assert read(tmp_path, TEMPLATE)[0] == 2


def test_a_best_that_cannot_be_read_now_is_not_replaced(tmp_path, monkeypatch):
    def away(path: Path) -> Any:
        if path.name == checkpoint_helper.BEST:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(path)

    read = checkpoint_helper.load_json
    write(tmp_path, 1, score=9.0)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_helper, "load_json", away)
        with pytest.raises(OSError, match="Stale"):
            write(tmp_path, 2, score=1.0)
        assert read_best(tmp_path) is None
    best = read_best(tmp_path)
    assert best is not None and best["step"] == 1


def test_a_former_checkpoint_that_cannot_be_read_now_stays(tmp_path, monkeypatch):
    def away(path: Path) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    write(tmp_path, 1, 1.0)
    (tmp_path / name_of(1)).rename(tmp_path / f".removing-{name_of(1)}")
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_helper, "load_json", away)
        remove_leftovers(tmp_path)
    remove_leftovers(tmp_path)
    assert restore(tmp_path, TEMPLATE)[0] == 1


def damage_truncate(folder):
    largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-3])


def damage_flip(folder):
    path = next(p for p in folder.rglob("*") if p.is_file() and "ocdbt.process" in str(p))
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def damage_manifest(folder):
    (folder / "manifest.json").write_text('{"files": ')


def damage_missing(folder):
    next(p for p in (folder / "arrays").rglob("*") if p.is_file()).unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_manifest, damage_missing])
def test_a_damaged_checkpoint_falls_back(tmp_path, damage):
    write(tmp_path, 1, 1.0, score=1.0)
    write(tmp_path, 2, 2.0, score=2.0)
    damage(tmp_path / "000000000002")
    for function in (restore_best, restore):
        assert list_steps(tmp_path) == [1, 2]  # restoring to evaluate changes nothing
        warnings = []
        step, restored, _ = function(tmp_path, TEMPLATE, warnings.append)
        assert step == 1
        assert (restored["w"] == 1.0).all()
        assert warnings
        assert "000000000002 is damaged" in warnings[0]
    assert (tmp_path / "damaged-000000000002").is_dir()
    write(tmp_path, 2, 2.0, keep=2)
    assert list_steps(tmp_path) == [1, 2]
    for step in (1, 2):
        damage(tmp_path / f"{step:012d}")
    with pytest.raises(SeedbedError, match="no whole checkpoint"):
        restore(tmp_path, TEMPLATE)
    assert list_steps(tmp_path) == [1, 2]  # a start from nothing must not follow silently


def test_without_a_checkpoint_one_waits(tmp_path):
    message = f"no checkpoint yet: wait for the first, or .*--resume --run {tmp_path}$"
    for function in (restore, restore_best):
        with pytest.raises(SeedbedError, match=message):
            function(tmp_path / "checkpoints", TEMPLATE)


def test_a_best_that_is_pruned_while_it_is_read_gives_way_to_its_successor(tmp_path, monkeypatch):
    write(tmp_path, 1, 1.0, score=1.0)
    load = restoring._load

    def prune_and_load(path, template, part):
        if path.name == "000000000001":
            write(tmp_path, 2, 2.0, score=2.0, keep=1)
        return load(path, template, part)

    monkeypatch.setattr(restoring, "_load", prune_and_load)
    warnings = []
    step, restored, _ = restore_best(tmp_path, TEMPLATE, warnings.append)
    assert (step, restored["w"][0], warnings) == (2, 2.0, [])


def test_another_agents_checkpoint_is_refused(tmp_path):
    write(tmp_path, 1)
    with pytest.raises(SeedbedError, match=r"w is float32\[4\] there and float32\[5\]"):
        restore(tmp_path, {"w": np.zeros((5,), np.float32)})
    with pytest.raises(SeedbedError, match=r"w is float32\[4\] there and int32\[4\]"):
        restore(tmp_path, {"w": np.zeros((4,), np.int32)})
    with pytest.raises(SeedbedError, match="v .*only in the agent"):
        restore(tmp_path, {**TEMPLATE, "v": np.zeros(())})


def test_metrics_of_another_version_begin_at_zero(tmp_path):
    def state(*metrics: str) -> dict:
        return {
            "env": {"metrics": {name: np.ones(2, np.float32) for name in metrics}, "x": np.ones(3)}
        }

    write_tree(tmp_path, 1, state("height", "gone"))
    _, found, _ = restore(tmp_path, state("height", "new"))
    assert found["env"]["metrics"]["height"].tolist() == [1, 1] == found["env"]["x"].tolist()[:2]
    assert found["env"]["metrics"]["new"].tolist() == [0, 0] and found["env"]["metrics"].keys() == {
        "height",
        "new",
    }
    write_tree(tmp_path, 2, {"params": {"metrics": {"height": np.ones(2)}}})
    with pytest.raises(SeedbedError, match="params.metrics.new .*only in the agent"):
        restore(tmp_path, {"params": {"metrics": {"height": np.ones(2), "new": np.ones(2)}}})


def test_half_written_checkpoints_are_invisible_and_removed(tmp_path):
    from seedbed.run.checkpoint_helper import remove_leftovers

    write(tmp_path, 1)
    (tmp_path / ".writing-000000000002").mkdir()
    (tmp_path / ".removing-000000000000").mkdir()
    assert list_steps(tmp_path) == [1]
    assert restore(tmp_path, TEMPLATE)[0] == 1
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]


def test_a_damaged_best_file_means_the_newest(tmp_path):
    write(tmp_path, 1, score=5.0)
    write(tmp_path, 2, score=1.0)
    (tmp_path / "best.json").write_text(json.dumps({"step": 77, "score": 1}))
    assert restore_best(tmp_path, TEMPLATE)[0] == 2


def test_the_newest_may_be_removed_while_it_is_read(tmp_path, monkeypatch):
    """A run that trains keeps few: whoever follows it takes the next one."""
    write(tmp_path, 1)
    load = restoring._load

    def late(path: Path, template: State, part: str):
        if path.name.endswith("1"):
            write(tmp_path, 2)
            shutil.rmtree(path)
        return load(path, template, part)

    monkeypatch.setattr(restoring, "_load", late)
    assert restore_newest(tmp_path, TEMPLATE)[0] == 2
