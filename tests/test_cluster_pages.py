"""docs/clusters.md and examples/cluster followed on one machine; SLURM and Ray have drills of their own."""

from __future__ import annotations

import argparse
import configparser
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from seedbed.config import flags
from seedbed.exit_status import ExitStatus
from seedbed.launch import joining
from waiting import wait_for

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "cluster"
PAGE = ROOT / "docs" / "clusters.md"


def commands(title: str) -> list[list[str]]:
    """Returns the words of the commands of a section's first block."""
    section = PAGE.read_text().partition(f"# {title}\n")[2]
    block = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def require_command(words: list[str]) -> None:
    """Asserts that our program takes a command line."""
    program, command, *rest = words
    assert Path(program).name == "seedbed"
    if command == "train":
        given = flags.split_train_arguments(rest)
        assert given.request.what or given.request.resume
    else:
        assert command == "host"
        parser = argparse.ArgumentParser()
        joining.declare(parser)
        joining.options_of(parser.parse_args(rest))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Any]:
    """Starts commands as a user would, in a folder of its own."""
    programs, started = tmp_path / "bin", list[subprocess.Popen[str]]()
    programs.mkdir()
    python = os.pathsep.join(entry for entry in sys.path if entry)

    def install(name: str, text: str) -> None:
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    install("seedbed", f'#!/bin/sh\nexec "{sys.executable}" -m seedbed "$@"\n')
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": python}

    class Here:
        path = tmp_path

        def install(self, name: str, text: str) -> None:
            install(name, text)

        def start(self, words: list[str]) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                words, cwd=tmp_path, env=os.environ | environment, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
            started.append(process)
            return process

    yield Here()
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def require_end(processes: list[subprocess.Popen[str]], status: int) -> None:
    for process in processes:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == status, said


@pytest.mark.slow
def test_the_lines_of_hosts_by_hand(here):
    train, host = commands("By hand")
    trainer = here.start([*train, "--steps", "3000", "--evaluate-episodes", "2"])
    require_end([trainer, here.start(host), here.start(host)], ExitStatus.FINISHED)


@pytest.mark.slow
def test_the_lines_of_hosts_without_the_folder(here):
    train, host = commands("Machines that do not see the folder")
    trainer = here.start([*train, "--steps", "3000", "--evaluate-episodes", "2"])
    key = here.path / "runs" / "cartpole" / "listen" / "actor.key"
    wait_for(key.exists)
    (here.path / "actor.key").write_text(key.read_text())
    host = [word.replace("trainer.example.org", "127.0.0.1") for word in host]
    require_end([trainer, here.start(host), here.start(host)], ExitStatus.FINISHED)


@pytest.mark.slow
def test_the_ssh_script(here):
    here.install("ssh", '#!/bin/sh\nshift\nexec "$@"\n')
    run = here.path / "run"
    script = here.start([str(EXAMPLES / "ssh.sh"), str(run), "one", "two"])
    wait_for(lambda: (run / "metrics.jsonl").exists(), script)
    os.killpg(script.pid, signal.SIGINT)
    require_end([script], ExitStatus.STOPPED)


@pytest.mark.parametrize("file", ["slurm.sbatch", "slurm-seeds.sbatch"])
def test_srun_gets_the_cores_for_a_task_from_the_job(here, monkeypatch, file):
    here.install("srun", '#!/bin/sh\necho "${SRUN_CPUS_PER_TASK-none}"\n')
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    said = [here.start(["bash", str(EXAMPLES / file)]).communicate(timeout=20)[0]]
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    said.append(here.start(["bash", str(EXAMPLES / file)]).communicate(timeout=20)[0])
    assert said == ["none\n", "16\n"]


def test_the_ray_script(here):
    here.install("ray", '#!/bin/sh\necho "$@"\n')
    words = ["http://head:8265", "cartpole/gorila", "/srv/runs/cartpole"]
    said, _ = here.start([str(EXAMPLES / "ray-job.sh"), *words]).communicate(timeout=20)
    submit, _, command = said.strip().partition(" -- ")
    assert submit == "job submit --address http://head:8265"
    require_command(command.split())


def test_the_indexed_job():
    job = yaml.safe_load((EXAMPLES / "indexed-job.yaml").read_text())["spec"]
    (container,) = job["template"]["spec"]["containers"]
    require_command(container["command"])
    assert {"name": "COMPLETIONS", "value": str(job["completions"])} in container["env"]
    # What is only requested is no quota, by which actors are counted.
    assert container["resources"]["limits"] == container["resources"]["requests"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [ExitStatus.FAILED, ExitStatus.USAGE]


def test_the_systemd_unit():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(EXAMPLES / "seedbed-host.service")
    service = unit["Service"]
    require_command(service["ExecStart"].split())
    stay = [int(word) for word in service["RestartPreventExitStatus"].split()]
    assert stay == [ExitStatus.FAILED, ExitStatus.USAGE]
    assert int(service["SuccessExitStatus"]) == ExitStatus.STOPPED
