"""README's section on actors of other machines, followed between two network namespaces.

The namespaces share nothing but a link in userspace (`link.py`), which delays and loses frames, and the file
system. They are in a user namespace of their own, so that no right is needed but that of making one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
README = HERE.parent.parent / "README.md"
LEARNER, ACTOR = "10.77.0.1", "10.77.0.2"
SMALL = "--envs-per-actor 4 --stream-groups 8 --evaluate-every 0 --log-every-s 1 --steps 1_000_000"


def may_make_namespaces() -> bool:
    """Whether this machine lets its users do so, and has the link's device."""
    if not (shutil.which("unshare") and shutil.which("ip") and Path("/dev/net/tun").exists()):
        return False
    made = subprocess.run(["unshare", "-Urn", "ip", "link", "set", "lo", "up"], capture_output=True)
    return made.returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not may_make_namespaces(), reason="no user namespaces, ip or /dev/net/tun"),
]


def commands() -> list[str]:
    """The lines of README's block, without comments."""
    section = README.read_text().split("### Actors on other machines")[1]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return [line.partition("#")[0].strip() for line in block[1].splitlines()]


class Machines:
    """Two network namespaces, `here` of the actor and `there` of the learner."""

    def __init__(self, folder: Path, delay_s: float, loss: float) -> None:
        self.folder, self.processes = folder, []
        self.outer = self._start(["unshare", "-Urn", "sleep", "600"])
        time.sleep(0.3)
        enter = ["nsenter", "--preserve-credentials", "-U", "-n", "-t", str(self.outer.pid)]
        self.inner = self._start([*enter, "unshare", "-n", "sleep", "600"])
        time.sleep(0.3)
        self.here = enter
        self.there = [*enter[:-1], str(self.inner.pid)]
        arguments = [str(self.inner.pid), str(delay_s), str(loss), "1"]
        command = [*self.here, sys.executable, str(HERE / "link.py"), *arguments]
        link = self._start(command, stdout=subprocess.PIPE, text=True)
        assert link.stdout is not None and link.stdout.readline() == "ready\n"
        for side, device, address in (
            (self.here, "here", ACTOR),
            (self.there, "there", LEARNER),
        ):
            for arguments in (
                f"addr add {address}/24 dev {device}",
                f"link set {device} up",
                "link set lo up",
            ):
                subprocess.run([*side, "ip", *arguments.split()], check=True)

    def _start(self, command: list[str], **options) -> subprocess.Popen:
        process = subprocess.Popen(command, start_new_session=True, **options)
        self.processes.append(process)
        return process

    def run(self, side: list[str], line: str, log: str) -> subprocess.Popen:
        """Runs a line of README, in the folder, with the program that is tested."""
        program, *arguments = shlex.split(line)
        assert program == "seedbed"
        path = os.pathsep.join([str(HERE.parent), *sys.path])
        with (self.folder / log).open("wb") as file:
            return self._start(
                [*side, sys.executable, "-m", "seedbed", *arguments],
                cwd=self.folder,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": path},
            )

    def close(self) -> None:
        for process in reversed(self.processes):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


def wait_for(condition, *processes, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert all(process.poll() is None for process in processes), "a command has ended"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.2)


@pytest.mark.parametrize(("delay_s", "loss"), [(0.002, 0.0), (0.05, 0.02), (0.2, 0.0)])
def test_readme_between_two_machines(tmp_path, delay_s, loss):
    learn, join, join_elsewhere = commands()
    assert "--listen 0.0.0.0:4711" in learn and "learner.example.org:4711" in join_elsewhere
    learn = learn.replace("train pong", "train counting_environment:make_slow")
    learn += f" --agent counting_agent:CountingAgent --agent.actions 1000 {SMALL}"
    allowed = " --processes 1 --allow counting_environment"
    machines = Machines(tmp_path, delay_s, loss)
    metrics = tmp_path / "runs" / "pong" / "metrics.jsonl"

    def streams() -> int:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        told = [json.loads(line) for line in lines]
        return int(told[-1].get("streams/streams", 0)) if told else 0

    try:
        learner = machines.run(machines.there, learn, "learner.log")
        wait_for((tmp_path / "runs/pong/listen/address.json").exists, learner)
        first = machines.run(machines.here, join + allowed, "first.log")
        wait_for(lambda: streams() == 2, learner, first)
        shutil.copy(tmp_path / "runs/pong/listen/actor.key", tmp_path / "actor.key")
        elsewhere = join_elsewhere.replace("learner.example.org", LEARNER)
        second = machines.run(machines.here, elsewhere + allowed, "second.log")
        wait_for(lambda: streams() == 4, learner, first, second)

        def last() -> dict:
            return json.loads(metrics.read_text().splitlines()[-1])

        wait_for(lambda: last()["streams/action_p50_s"] > 2 * delay_s, learner, first, second)
        assert last()["env_steps"] > 0 and last()["streams/refused"] == 0
    finally:
        for log in ("learner.log", "first.log", "second.log"):
            if (tmp_path / log).exists():
                print(log, (tmp_path / log).read_text()[-1500:])
        machines.close()
