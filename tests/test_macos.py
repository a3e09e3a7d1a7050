"""On macOS the fused runtime trains, and what needs Linux is refused in one line.

`as_macos/sitecustomize.py` makes the processes of these tests look so: what macOS lacks is not there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seedbed.config import resolve
from untrained_run import write_run

HERE = Path(__file__).parent
REFUSED = {
    "train pong": "the central runtime",
    "train pong/dqn --runtime central": "the central runtime",
    "train pong/gorila --runtime paramserver": "the paramserver runtime",
    "actor somewhere:1234": "seedbed actor",
    "host somewhere": "seedbed host",
    "evaluate {host}": "an environment of the host",
}
NEEDS = "needs Linux (memfd, eventfd, epoll), and this is darwin"


def on_macos(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python, with what macOS lacks hidden from it and from its children."""
    paths = [str(HERE / "as_macos"), *(entry for entry in sys.path if entry)]
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def seedbed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return on_macos("-m", "seedbed", *arguments)


def test_what_linux_has_is_hidden():
    code = (
        "import os, select, sys, seedbed\n"
        "assert sys.platform == 'darwin'\n"
        "assert not {'memfd_create', 'eventfd', 'sched_getaffinity', 'waitid'} & {*dir(os)}\n"
        "assert 'epoll' not in dir(select)\n"
        "try: open('/proc/self/stat')\n"
        "except FileNotFoundError: print('hidden')\n"
    )
    found = on_macos("-c", code)
    assert (found.stdout, found.stderr) == ("hidden\n", "")


@pytest.mark.slow
def test_the_fused_runtime_trains(run_folder):
    options = "--steps 2000 --evaluate-every 1000 --evaluate-episodes 2 --checkpoint-every-s 0.1"
    found = seedbed("train", "cartpole/ppo", *options.split(), "--run", str(run_folder))
    assert found.returncode == 0, found.stderr
    assert "trained with a mean return of" in found.stdout


@pytest.mark.slow
def test_what_needs_linux_is_refused(tmp_path):
    # One process for all: most of its time is imports.
    code = (
        "import sys, seedbed.cli\n"
        "for line in sys.argv[1:]:\n"
        "    status = seedbed.cli.main(line.split())\n"
        "    print(status, flush=True)\n"
    )
    host = write_run(tmp_path / "host", resolve.train_config("cartpole/impala"))
    lines = [line.format(host=host) for line in REFUSED]
    lines = [f"{line} --run {tmp_path / 'run'}" if "train" in line else line for line in lines]
    found = on_macos("-c", code, *lines)
    assert found.stdout.split() == ["1"] * len(REFUSED), found.stderr
    for line, what in zip(found.stderr.splitlines(), REFUSED.values(), strict=True):
        assert line.startswith(f"seedbed: {what} {NEEDS}: ")
        assert "Linux" in line.removeprefix(f"seedbed: {what} {NEEDS}")
    assert not (tmp_path / "run").exists()
