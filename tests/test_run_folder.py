from __future__ import annotations

import concurrent.futures
import datetime
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from checkpoint_files import TEMPLATE, stopped, write
from seedbed.launch import key
from seedbed.run import folder as run_folder_module
from seedbed.run.bucket import run_path
from seedbed.run.checkpoint import CheckpointWriter
from seedbed.run.checkpoint_helper import Claim, list_steps, name_of
from seedbed.run.folder import RunFolder, TakenOver, new_folder
from seedbed.run.restoring import beginning_anew, restore
from seedbed.types import SeedbedError, StorageError


def test_every_new_run_has_a_folder_of_its_own(tmp_path, monkeypatch):
    def now():
        return datetime.datetime(2025, 1, 31, 14, 25, 0)

    monkeypatch.chdir(tmp_path)
    name = "runs/pong-impala-20250131-142500"
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: str(new_folder("pong/impala", now)), range(4)))
    assert sorted(made) == [name, *(f"{name}-{number}" for number in (2, 3, 4))]
    assert str(new_folder("ALE/Pong-v5/my.module:Agent", now)) == (
        "runs/ALE-Pong-v5-my.module-Agent-20250131-142500"
    )
    RunFolder.create(Path(name)).close()
    shutil.rmtree("runs")
    Path("runs").touch()
    with pytest.raises(SeedbedError, match="runs"):
        new_folder("pong/impala", now)


def test_the_working_directory_may_be_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_path(".") == tmp_path and run_path("here") == Path("here")


def test_create_write_resume(run_folder):
    told = []
    run = RunFolder.create(run_folder)
    run.write_config({"steps": 10})
    with pytest.raises(SeedbedError, match="another process trains into"):
        RunFolder.resume(run_folder, told.append)
    assert not told, "one that lives is not waited for"
    assert RunFolder.read(run_folder).read_config() == {"steps": 10}  # reading needs no lock
    run.close()
    again = RunFolder.resume(run_folder)
    assert again.read_config() == {"steps": 10}
    assert again.checkpoints == run_folder / "checkpoints"
    again.close()


def test_a_folder_with_something_in_it_is_refused(run_folder):
    run_folder.mkdir()
    (run_folder / "notes.txt").write_text("")
    with pytest.raises(SeedbedError, match=r"not empty \(it holds notes.txt\): name another"):
        RunFolder.create(run_folder)
    (run_folder / "config.json").write_text("{}")
    with pytest.raises(SeedbedError, match="continue it with --resume"):
        RunFolder.create(run_folder)


def test_what_is_no_run_is_refused(run_folder):
    with pytest.raises(SeedbedError, match="there is no such folder"):
        RunFolder.resume(run_folder)
    run_folder.mkdir()
    with pytest.raises(SeedbedError, match=r"it has no config.json"):
        RunFolder.read(run_folder)
    (run_folder / "config.json").write_text("{")
    with pytest.raises(SeedbedError, match="cannot be read"):
        RunFolder.read(run_folder).read_config()


def test_an_unwritable_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SeedbedError, match=r"cannot be written \(Not a directory\).*--run"):
        RunFolder.create(tmp_path / "file" / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_place_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(SeedbedError, match="Permission denied"):
        RunFolder.create(tmp_path / "run")


def test_a_failed_start_leaves_nothing(run_folder):
    run = RunFolder.create(run_folder)
    run.write_config({})
    run.checkpoints.mkdir()
    (run_folder / "metrics.jsonl").write_text("")
    (run_folder / "events.out.tfevents.1").write_text("")
    run.discard_untrained()
    assert not run_folder.exists()


def test_a_start_that_was_killed_before_it_had_a_configuration_is_in_nobodys_way(run_folder):
    code = f"""
import os, signal
from pathlib import Path
from seedbed.run.folder import RunFolder
run = RunFolder.create(Path({str(run_folder)!r}))
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGTERM)
run.write_config({{}})
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -15
    assert (run_folder / ".config.json.new").exists()
    run = RunFolder.create(run_folder)
    run.write_config({})
    run.close()
    assert not (run_folder / ".config.json.new").exists()


@pytest.mark.parametrize("kept", ["metrics.jsonl", "notes.txt", "checkpoints/000000000001/x"])
def test_what_was_trained_stays(run_folder, kept):
    run = RunFolder.create(run_folder)
    run.write_config({})
    (run_folder / kept).parent.mkdir(parents=True, exist_ok=True)
    (run_folder / kept).write_text("{}")
    run.discard_untrained()
    assert (run_folder / kept).exists()
    assert (run_folder / "config.json").exists()


def test_without_locks_a_later_start_takes_the_run_over(run_folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder_module.fcntl, "flock", refuse)
    told = []
    run = RunFolder.create(run_folder, told.append)
    assert "without locks" in told[0]
    run.write_config({})
    run.require_claim()
    assert not run.is_training()
    later = RunFolder.resume(run_folder)
    later.require_claim()
    with pytest.raises(TakenOver):
        run.require_claim()
    for each in (run, later):
        each.close()


def test_the_lock_ends_with_its_process(run_folder):
    code = (
        "import os, pathlib; from seedbed.run.folder import RunFolder;"
        f"run = RunFolder.create(pathlib.Path({str(run_folder)!r})); run.write_config({{}});"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -9
    RunFolder.resume(run_folder).close()


@pytest.mark.slow
def test_every_start_of_a_learner_is_a_term_and_an_earlier_one_writes_nothing(run_folder):
    first = RunFolder.create(run_folder)
    first.write_config({})
    with CheckpointWriter(first.checkpoints, lock=first.lock, claim=first.claim) as writer:
        writer.save(1, np.zeros(3), {})
        writer.wait()
        # As if the first one were cut off from the folder, whose locks do not reach it.
        first.close()
        second = RunFolder.resume(run_folder)
        assert (first.term, second.term) == (1, 2)
        writer.save(2, np.zeros(3), {})
        with pytest.raises(TakenOver, match="another learner has taken over the run .*term 2"):
            writer.wait()
    second.require_claim()
    with pytest.raises(TakenOver, match="term 2; this one is of term 1"):
        first.require_claim()
    (run_folder / "terms").rename(run_folder / "gone")
    first.require_claim()
    (run_folder / "gone").rename(run_folder / "terms")
    (run_folder / "terms" / "²").touch()
    second.require_claim()
    with CheckpointWriter(second.checkpoints, lock=second.lock, claim=second.claim) as writer:
        writer.save(3, np.zeros(3), {})
        writer.wait()
    assert list_steps(second.checkpoints) == [1, 3]
    assert (
        json.loads((second.checkpoints / "000000000003" / "manifest.json").read_text())["term"] == 2
    )
    second.close()
    assert RunFolder.read(run_folder).term == 0


def test_a_learner_whose_run_is_anothers_removes_and_changes_nothing(run_folder):
    """Whatever ends it: here Ctrl-C, before and after the first checkpoint."""
    first = RunFolder.create(run_folder)
    with pytest.raises(KeyboardInterrupt), first.training({"by": "first"}):
        for name in (".lock", ".saving.lock"):  # they do not reach the other machine
            (run_folder / name).unlink()
        second = RunFolder.resume(run_folder)
        second.write_config({"by": "second"})
        (run_folder / "listen").mkdir()
        raise KeyboardInterrupt
    assert second.read_config() == {"by": "second"} and (run_folder / "listen").is_dir()
    first.claim = Claim(1, "first")
    first.discard_untrained()
    assert run_folder.is_dir()
    second.close()


def test_a_folder_that_was_made_anew_is_anothers(run_folder):
    first = RunFolder.create(run_folder)
    shutil.rmtree(run_folder)
    first.require_claim()
    second = RunFolder.create(run_folder)
    assert (first.term, second.term) == (1, 1)
    with pytest.raises(TakenOver):
        first.require_claim()
    second.write_config({})
    with CheckpointWriter(run_folder / "checkpoints", claim=first.claim) as writer:
        writer.save(1, np.zeros(3), {})
        with pytest.raises(TakenOver, match="another learner has taken over"):
            writer.wait()
    first.close()
    second.close()


TRAINER = """
import fcntl, sys, termios, time
from pathlib import Path
import numpy as np
import psutil
from checkpoint_files import suspend
from seedbed.run.checkpoint import CheckpointWriter
from seedbed.run.folder import RunFolder

run = RunFolder.create(Path(sys.argv[1]))
run.write_config({})
writer = CheckpointWriter(run.checkpoints, lock=run.lock, claim=run.claim)
writer.save(1, np.zeros(3), {})
writer.wait()
suspend(psutil.Process(writer.helper_pid))
writer.save(2, np.zeros(3), {})
pipe = writer._helper.process.stdin
while not any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):
    time.sleep(0.01)
print(writer.helper_pid, flush=True)
time.sleep(600)
"""


def test_a_run_is_not_resumed_while_the_helper_of_a_killed_one_writes(run_folder, monkeypatch):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(run_folder)], stdout=subprocess.PIPE, env=environment
    )
    assert trainer.stdout is not None
    helper = psutil.Process(int(trainer.stdout.readline()))
    trainer.kill()
    trainer.wait()
    monkeypatch.setattr(run_folder_module, "PATIENCE_S", 0.3)
    told = []

    def go_on(text: str) -> None:
        told.append(text)
        helper.resume()

    with stopped(helper):
        with pytest.raises(SeedbedError, match="still writes a checkpoint .*checkpoint_helper"):
            RunFolder.resume(run_folder, told.append)
        assert len(told) == 1 and told[0].startswith("waiting until")
        assert list_steps(run_folder / "checkpoints") == [1] and helper.is_running()
        monkeypatch.setattr(run_folder_module, "PATIENCE_S", 60.0)
        run = RunFolder.resume(run_folder, go_on)
    assert len(told) == 2
    assert list_steps(run.checkpoints) == [1, 2], "the helper ended what it had begun"
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE
    run.close()


def test_a_checkpoint_whose_successor_did_not_come_is_taken_back(run_folder):
    run = RunFolder.create(run_folder)
    run.write_config({})
    write(run.checkpoints, 1, 1.0)
    write(run.checkpoints, 2, 2.0)
    (run.checkpoints / name_of(2)).rename(run.checkpoints / f".removing-{name_of(2)}")
    (run.checkpoints / f".writing-{name_of(2)}").mkdir()  # killed between two renames
    damaged = run.checkpoints / f".removing-{name_of(1)}"
    shutil.copytree(run.checkpoints / name_of(1), damaged)
    run.close()
    RunFolder.resume(run_folder).close()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [name_of(1), name_of(2)]
    assert restore(run.checkpoints, TEMPLATE)[0] == 2


def test_a_configuration_that_finds_no_room_leaves_nothing(run_folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = RunFolder.create(run_folder)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SeedbedError, match="No space left"), run.training({}):
        pass
    assert not run_folder.exists()


def test_a_run_that_has_learned_does_not_begin_anew_without_its_checkpoints(run_folder):
    run = RunFolder.create(run_folder)
    assert beginning_anew(run) == ""
    metrics = run_folder / "metrics.jsonl"
    metrics.write_text('{"env_steps": 512, "learner_steps": 0}\n')
    assert beginning_anew(run) == "the run has no checkpoint yet: starting from the beginning"
    metrics.write_text('{"env_steps": 512, "learner_steps": 8}\n')
    run.checkpoints.symlink_to(run_folder / "a disk that is not mounted")
    with pytest.raises(
        SeedbedError, match="checkpoints has no checkpoint, though .* got to step 512: "
    ):
        beginning_anew(run)
    run.checkpoints.unlink()
    # As a learner leaves it that was killed before its first checkpoint was whole.
    with CheckpointWriter(run.checkpoints, claim=run.claim):
        assert beginning_anew(run).endswith("starting from the beginning")
        # As a disk leaves it that was mounted there.
        metrics.write_text('{"env_steps": 512, "learner_steps": 8, "wall_s": 700.0}\n')
        with pytest.raises(SeedbedError, match="has no checkpoint, though"):
            beginning_anew(run)
    run.close()


def test_a_folder_that_is_gone_is_not_made_again(run_folder):
    run = RunFolder.create(run_folder)
    with CheckpointWriter(run.checkpoints, claim=run.claim) as writer:
        shutil.rmtree(run_folder)
        writer.save(1, np.zeros(3), {})
        with pytest.raises(
            StorageError, match="FileNotFoundError.*the folder is gone. Bring it back"
        ):
            writer.wait()
    assert not run_folder.exists()
    run.close()


def test_a_key_is_made_with_the_folder_locked(run_folder, monkeypatch):
    def make(listen: Path) -> None:
        locked.append(RunFolder(listen.parent).is_training())

    locked: list[bool] = []
    monkeypatch.setattr(key, "ensure_credentials", make)
    key.make(run_folder)
    assert locked == [True]
    RunFolder.create(run_folder).close()


def test_a_configuration_that_cannot_be_read_leaves_the_folder_free(run_folder):
    RunFolder.create(run_folder).close()
    (run_folder / "config.json").write_text("{")
    run = RunFolder.resume(run_folder)
    with pytest.raises(SeedbedError, match="cannot be read"), run.training({}):
        pass
    RunFolder.resume(run_folder).close()
