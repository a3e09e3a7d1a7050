"""What people install: the wheel alone, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def call(*command: str | Path, folder: Path, status: int = 0) -> str:
    """Runs a command as a stranger would, without what the tests set; returns all that it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**kept, "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_trains_and_evaluates_in_an_empty_environment(tmp_path):
    call(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, folder=ROOT)
    (wheel,) = tmp_path.glob("seedbed-*.whl")
    names = {
        Path(name).name
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/licenses/" in name
    }
    assert names == {"LICENSE", "three.txt", "uplot.txt"}
    call(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    tools = tmp_path / "venv" / "bin"
    call(tools / "pip", "install", "--quiet", "--disable-pip-version-check", wheel, folder=tmp_path)
    seedbed = tools / "seedbed"
    told = call(
        seedbed,
        *("train", "cartpole/ppo", "--run", "run", "--steps", "50_000", "--evaluate-episodes", "4"),
        folder=tmp_path,
    )
    assert "trained with a mean return" in told and "Warning" not in told
    assert list((tmp_path / ".cache" / "seedbed" / "programs").iterdir())
    told = call(seedbed, "evaluate", "run", "--episodes", "4", folder=tmp_path)
    assert "4 episodes" in told
    assert "in the repository's folder benchmarks/" in call(
        seedbed, "bench", folder=tmp_path, status=1
    )
