"""What a run's folder tells of when and where it was trained, and of how that ended."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import pytest

from seedbed.exit_status import PeerLost
from seedbed.run import history
from seedbed.run.folder import HISTORY, RunFolder, TakenOver
from seedbed.run.history import RunSegment, read_history, state_of

BEGUN = time.time()


def train(run: RunFolder, env_steps: int = 0, failure=None, interrupted: bool = False) -> list[str]:
    """Has a stint, and returns what it warned of."""
    told: list[str] = []
    expected = pytest.raises(type(failure)) if failure else contextlib.nullcontext()
    with expected, RunSegment(run, BEGUN, env_steps, lambda: interrupted, told.append):
        if failure:
            raise failure
    return told


@pytest.fixture
def run(run_folder):
    folder = RunFolder.create(run_folder)
    folder.write_config({})
    yield folder
    folder.close()


@pytest.mark.parametrize(
    ("failure", "interrupted", "outcome"),
    [
        (None, False, "finished"),
        (None, True, "interrupted"),
        (KeyboardInterrupt("again"), False, "interrupted"),
        (PeerLost("another process is gone"), False, "interrupted"),
        (ValueError("odd\nvalue"), False, "failed"),
    ],
)
def test_how_a_stint_ends(run, failure, interrupted, outcome):
    assert train(run, failure=failure, interrupted=interrupted) == []
    (stint,) = read_history(run.path)
    assert stint["outcome"] == outcome and stint["term"] == 1
    assert stint["begun"] == BEGUN < stint["ended"] <= time.time()
    assert stint.get("failure") == ("odd" if outcome == "failed" else None)
    assert stint.get("reason") == (str(failure) if isinstance(failure, PeerLost) else None)
    assert state_of(run, read_history(run.path), done=False) == "running"
    run.close()
    assert state_of(run, read_history(run.path), done=False) == outcome


def test_a_resumed_run_keeps_its_machines(run, monkeypatch):
    train(run, interrupted=True)
    run.close()
    described = history.describe_machine()
    monkeypatch.setattr(history, "describe_machine", lambda: {**described, "cpu": "another"})
    again = RunFolder.resume(run.path)
    train(again, env_steps=640)
    again.close()
    first, second = read_history(run.path)
    assert (first["outcome"], second["outcome"]) == ("interrupted", "finished")
    assert (first["env_steps"], second["env_steps"]) == (0, 640)
    assert first["machine"] == described and second["machine"]["cpu"] == "another"
    assert described["cores"] > 0 and described["memory_bytes"] > 1e8 and described["cpu"]
    assert sum(described["devices"].values()) == 8  # those of tests
    for package in ("seedbed", "jax", "numpy", "mujoco"):
        assert first["versions"][package][0].isdigit()


def test_a_stint_that_was_killed_has_no_outcome(run):
    with RunSegment(run, BEGUN, 0, lambda: False, lambda text: None):
        stints = read_history(run.path)
    assert "outcome" not in stints[0]
    run.close()
    assert state_of(run, stints, done=True) == "interrupted"


def test_a_run_without_a_history_is_judged_by_its_steps(run):
    run.close()
    assert state_of(run, [], done=True) == "finished"
    assert state_of(run, [], done=False) == "interrupted"


def test_a_run_that_another_learner_has_is_left_alone(run):
    train(run)
    run.close()
    newer = RunFolder.resume(run.path)
    before = (run.path / HISTORY).read_text()
    train(run, failure=TakenOver("another has it"))
    train(run)
    assert (run.path / HISTORY).read_text() == before
    newer.close()


def test_a_full_disk_is_told_and_training_goes_on(run, monkeypatch):
    def refuse(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history, "write_json", refuse)
    (told, _) = train(run)
    assert "history.json cannot be written (No space left on device)" in told
    assert read_history(run.path) == []


@pytest.mark.parametrize("content", ["", "[1]", "{}", "[{"])
def test_a_damaged_history_is_none(run, content):
    (run.path / HISTORY).write_text(content)
    assert read_history(run.path) == []


def test_looking_takes_no_lock_from_a_run(run):
    assert run.is_training()
    run.close()
    assert not run.is_training()
    # Nobody looked at it so often that it could not be trained meanwhile.
    looks = "from seedbed.run.folder import RunFolder; import sys, pathlib\n"
    looks += "print('ready', flush=True)\n"
    looks += "while True: RunFolder(pathlib.Path(sys.argv[1])).is_training()"
    with subprocess.Popen([sys.executable, "-c", looks, run.path], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            for _ in range(20):
                RunFolder.resume(run.path).close()
        finally:
            other.kill()


def test_a_folder_that_was_never_trained_is_not_in_training(tmp_path):
    assert not RunFolder(tmp_path).is_training()
    assert json.loads(json.dumps(history.describe_versions()))
    assert list(tmp_path.iterdir()) == []
