"""The examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


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


def test_a_task_of_ones_own_trains_from_the_command_line(run_folder):
    size = ("--steps", "512", "--agent.batch", "16", "--agent.unroll", "8")
    told = train(
        run_folder,
        *("custom_task:Crawler", *size, "--evaluate-episodes", "2", "--env.episode-steps", "20"),
    )
    assert "trained with a mean return" in told
    assert "not finite" not in told


def test_an_agent_of_ones_own_learns_from_the_command_line(run_folder):
    """CartPole pays about 20 to random actions, and 500 at most."""
    cartpole = "seedbed.envs.device.classic.cartpole:CartPole"
    told = train(
        run_folder, cartpole, "--agent", "reinforce:Reinforce", "--steps", "150_000", "--seed", "1"
    )
    assert float(re.search(r"mean return of (\S+) in evaluation", told)[1]) > 150


@pytest.mark.parametrize(("name", "longest"), [("custom_task.py", 60), ("reinforce.py", 80)])
def test_the_examples_are_short(name, longest):
    assert len((EXAMPLES / name).read_text().splitlines()) <= longest
