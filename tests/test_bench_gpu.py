"""`seedbed bench gpu` without a GPU: its parts on a CPU, and what it does when a section fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import _gpu
import gpu
from _training import CommandError, pace
from seedbed.exit_status import ExitStatus


@pytest.fixture
def other():
    """A device that is not the one that results are compared with."""
    return jax.devices()[1]


@pytest.fixture
def quick(monkeypatch):
    for name, value in {"STEPPED": 2, "PLAYED": 2, "TURNS": 2, "TURN_S": 0.0}.items():
        monkeypatch.setattr(_gpu, name, value)


@pytest.fixture
def report(tmp_path):
    return gpu.Report(tmp_path / "results" / "gpu.json", {"date": "today"})


def merged(figures):
    return {key: value for each in figures for key, value in each.items()}


# The whole


@pytest.mark.slow
def test_without_a_gpu_it_refuses_in_one_line(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, gpu.__file__, "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == ExitStatus.FAILED and done.stdout == "" and not out.exists()
    assert done.stderr.count("\n") == 1 and "JAX finds no NVIDIA GPU here (only cpu)" in done.stderr


def test_a_failed_section_is_recorded_and_the_others_go_on(report, capsys):
    seen = []

    def first(job):
        job.add(rate=1.5)
        seen.append(json.loads(report.path.read_text()))
        raise ValueError("no such thing")

    def second(job):
        assert 0 < job.left <= 3
        job.add(rate=2.5)

    sections = (gpu.Section("a", 9, first), gpu.Section("b", 3, second))
    gpu.run_sections(sections, report, 60)
    assert seen == [{"date": "today", "a": {"rate": 1.5}}]
    saved = json.loads(report.path.read_text())
    assert saved["a"]["rate"] == 1.5 and saved["b"]["rate"] == 2.5
    assert "ValueError: no such thing" in saved["a"]["failed"] and "first" in saved["a"]["failed"]
    assert report.failed == ["a"]
    assert "failed" in capsys.readouterr().out


def test_a_difference_fails_parity(report, monkeypatch):
    tasks = []

    def part(job, name, task, **_):
        if name == "lower":
            return
        tasks.append(task)
        yield {task: "the same bits" if task != "ant" else "step 3: .reward[1] is 2 and not 3"}

    monkeypatch.setattr(gpu, "part", part)
    with pytest.raises(CommandError, match=r"ant: step 3"):
        gpu.parity(gpu.Job("parity", report, time.monotonic() + 60))
    assert len(tasks) == 11 and report.figures["parity"]["hopper"] == "the same bits"


# The parts


@pytest.mark.slow
def test_parity_of_two_devices(other):
    found = merged(_gpu.parity(other, "inverted_pendulum"))
    assert found == {
        "inverted_pendulum, a step": "the same bits",
        "inverted_pendulum": "the same bits",
    }


@pytest.mark.slow
def test_parity_names_the_step(other, monkeypatch):
    """A device that computes something else."""
    real = _gpu.on

    def on(device, fn, *args):
        result = real(device, fn, *args)
        if device is not other or len(args) < 2:
            return result
        return jax.tree.map(lambda x: x + 1 if x.dtype == np.float32 else x, result)

    monkeypatch.setattr(_gpu, "on", on)
    found = merged(_gpu.parity(other, "inverted_pendulum"))
    assert found["inverted_pendulum, a step"].startswith(".time[0] is")
    assert found["inverted_pendulum"].startswith("step 0: ")
    assert "numbers differ" in found["inverted_pendulum"]


@pytest.mark.slow
def test_rates_and_what_is_known_of_a_device(other, quick):
    for figures in (
        merged(_gpu.rates(other, "inverted_pendulum", (16, 64))),
        merged(_gpu.environment_rates(other, "inverted_pendulum", (16, 64))),
    ):
        assert list(figures) == ["16", "64"] and min(figures.values()) > 0
    assert _gpu.bandwidth(other, 1000) > 0
    about = _gpu.describe(other)
    assert about["platform"] == "cpu" and about["versions"]["jax"] == jax.__version__
    json.dumps(about)


@pytest.mark.slow
def test_the_memory_of_a_step():
    if not all(map(_gpu.ptxas.find, _gpu.ptxas.PACKAGES)):
        pytest.skip("there is no ptxas, or no nvdisasm")
    found = _gpu.memory("inverted_pendulum", "sm_90")
    assert found["registers"] > 0 and found["bytes of operands and results"] > 40
    assert set(gpu.MOVED) <= set(found)


@pytest.mark.slow
def test_kernels_are_compiled_where_no_gpu_is(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path))
    assert _gpu.lower("cartpole/ppo")["cartpole/ppo, seconds to its kernels"] > 0
    assert any((tmp_path / "kernels").iterdir())


@pytest.mark.slow
def test_a_profile_lists_operations():
    found = merged(_gpu.profile("cartpole/ppo", batch=8, unroll=4))
    assert found["env_steps_per_s"] > 0
    assert any(table for table in found["ms of operations"].values())


@pytest.mark.slow
def test_training_is_stopped_in_time():
    found = gpu.train_for("cartpole/ppo", 12, "--steps", "1000000000", "--log-every-s", "0.5")
    assert found["interrupted"] and found["env_steps"] > 0 and found["env_steps_per_s"] > 0
    assert found["returns"] and "time/learning" in found["last"]
    whole = gpu.train_for("cartpole/ppo", 60, "--steps", "2048")
    assert not whole["interrupted"] and whole["command"].endswith("cartpole/ppo --steps 2048")
    with pytest.raises(CommandError, match="unknown option"):
        gpu.train_for("cartpole/ppo", 60, "--stepps", "2048")


def test_a_run_that_has_not_stepped_has_no_pace():
    lines = [
        {"env_steps": 0, "env_steps_per_s": 0.0, "wall_s": wall_s} for wall_s in (2.0, 4.0, 6.0)
    ]
    assert pace(lines) == (0.0, 6.0)
