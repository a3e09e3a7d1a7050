from __future__ import annotations

import datetime
import os
import subprocess
import sys

import pytest

from seedbed.runtime.run_folder import RunFolder, default_path
from seedbed.types import SeedbedError


def test_default_path():
    def now():
        return datetime.datetime(2025, 1, 31, 14, 25, 0)

    assert str(default_path("pong/impala", now)) == "runs/pong-impala-20250131-142500"
    assert str(default_path("ALE/Pong-v5/my.module:Agent", now)) == (
        "runs/ALE-Pong-v5-my.module-Agent-20250131-142500"
    )


def test_create_write_resume(run_folder):
    run = RunFolder.create(run_folder)
    run.write_config({"steps": 10})
    with pytest.raises(SeedbedError, match="another process trains into"):
        RunFolder.resume(run_folder)
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


@pytest.mark.parametrize("kept", ["metrics.jsonl", "notes.txt", "checkpoints/000000000001/x"])
def test_what_was_trained_stays(run_folder, kept):
    run = RunFolder.create(run_folder)
    run.write_config({})
    (run_folder / kept).parent.mkdir(parents=True, exist_ok=True)
    (run_folder / kept).write_text("{}")
    run.discard_untrained()
    assert (run_folder / kept).exists()
    assert (run_folder / "config.json").exists()


def test_the_lock_ends_with_its_process(run_folder):
    code = (
        "import os, pathlib; from seedbed.runtime.run_folder import RunFolder;"
        f"run = RunFolder.create(pathlib.Path({str(run_folder)!r})); run.write_config({{}});"
        "os.kill(os.getpid(), 9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -9
    RunFolder.resume(run_folder).close()
