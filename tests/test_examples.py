"""The examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_task_of_ones_own_trains_from_the_command_line(run_folder):
    size = (
        "--steps",
        "512",
        "--agent.batch",
        "16",
        "--agent.unroll",
        "8",
        "--evaluate-episodes",
        "2",
    )
    flags = os.environ["XLA_FLAGS"].split()
    one_device = " ".join(flag for flag in flags if "device_count" not in flag)
    command = [sys.executable, "-m", "seedbed", "train", "custom_task:Crawler", *size]
    done = subprocess.run(
        [*command, "--run", str(run_folder), "--env.episode-steps", "20"],
        cwd=EXAMPLES,
        env={**os.environ, "XLA_FLAGS": one_device},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "trained with a mean return" in done.stdout
    assert "not finite" not in done.stdout


def test_the_example_is_short():
    lines = (EXAMPLES / "custom_task.py").read_text().splitlines()
    assert len(lines) < 60
