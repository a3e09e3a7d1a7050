"""The examples run, and benchmarks name what there is."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import identify_ant
from seedbed.run.history import read_history

EXAMPLES = Path(__file__).parent.parent / "examples"
SURE = 7  # of Ants
BENCHMARKS = EXAMPLES.parent / "benchmarks"


def train(run_folder: Path, *arguments: str) -> str:
    """Trains in examples/ by the command line on one device; returns its output."""
    flags = os.environ["XLA_FLAGS"].split()
    one_device = " ".join(flag for flag in flags if "device_count" not in flag)
    done = subprocess.run(
        [sys.executable, "-m", "seedbed", "train", *arguments, "--run", str(run_folder)],
        cwd=EXAMPLES,
        env={**os.environ, "XLA_FLAGS": one_device},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_task_of_ones_own_trains_from_the_command_line(run_folder):
    size = ("--steps", "512", "--agent.batch", "16", "--agent.unroll", "8")
    told = train(
        run_folder,
        *("custom_task:Crawler", *size, "--evaluate-episodes", "2", "--env.episode-steps", "20"),
    )
    assert "trained with a mean return" in told
    assert "not finite" not in told


@pytest.mark.slow
def test_an_agent_of_ones_own_learns_from_the_command_line(run_folder):
    """CartPole pays about 20 to random actions, and 500 at most."""
    cartpole = "seedbed.envs.device.classic.cartpole:CartPole"
    told = train(
        run_folder, cartpole, "--agent", "reinforce:Reinforce", "--steps", "150_000", "--seed", "1"
    )
    assert float(re.search(r"mean return of (\S+) in evaluation", told)[1]) > 150


@pytest.mark.slow
def test_an_ants_mass_and_friction_are_identified():
    """Of one seed, whose errors are far from the limit."""
    recording = identify_ant.record(SURE)
    errors = np.abs(identify_ant.identify(recording) / recording.truth - 1)
    assert errors[0] == pytest.approx(0.5) and errors[-1].max() < 0.01


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nine_of_ten_ants_are_identified(tmp_path):
    told = ran("identify_ant.py", "--plot", str(tmp_path / "plot.svg"))
    assert int(re.search(r"(\d+) of 10 within 1 %", told)[1]) >= 9
    assert (tmp_path / "plot.svg").read_text().count("<svg") == 1


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torch", "torchrl"])
def test_other_libraries_train_our_ant(package):
    pytest.importorskip(package)
    told = ran("one_file_ppo.py" if package == "torch" else "torchrl_ppo.py", "--steps", "100_000")
    assert re.search(r"81,920 steps, return -?\d+", told)


def ran(name: str, *arguments: str) -> str:
    """Runs an example; returns what it says."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "longest"), [("custom_task.py", 60), ("reinforce.py", 80)])
def test_the_examples_are_short(name, longest):
    assert len((EXAMPLES / name).read_text().splitlines()) <= longest


@pytest.mark.parametrize("name", sorted(path.name for path in BENCHMARKS.glob("*.py")))
def test_what_a_benchmark_names_is_there(name):
    """A long run must not end with a name that has changed."""
    tree = ast.parse((BENCHMARKS / name).read_text())
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("seedbed"):
            for alias in node.names:
                found = importlib.import_module(node.module)
                if not hasattr(found, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                value = getattr(found, alias.name)
                if isinstance(value, types.ModuleType):
                    modules[alias.asname or alias.name] = value
    used = [
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    for module, attribute in used:
        assert module not in modules or hasattr(modules[module], attribute), (module, attribute)


@pytest.mark.slow
def test_a_curriculum_goes_on_with_the_weights_of_the_stage_before(tmp_path: Path):
    curriculum = importlib.import_module("curriculum")
    curriculum.main(tmp_path, steps=20_000)
    stint = read_history(tmp_path / "torso-1.5")[0]
    assert stint["from"]["run"] == str(tmp_path / "torso-1.0")
    assert stint["from"]["parts"] == stint["from"]["of"]
