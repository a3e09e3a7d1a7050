"""Runs of the central runtime for tests: in this process, and in one that may be killed."""

import contextlib
import subprocess
import sys
import time

import psutil

from counting_agent import CountingAgent
from seedbed.central import train as central
from seedbed.envs.host.gym import FactoryEnv
from seedbed.run.folder import RunFolder
from seedbed.run.options import CentralConfig
from seedbed.testing import counting


def counting_env(**options):
    return FactoryEnv("counting_environment:make", kwargs=options)


class View:
    """Remembers what was shown."""

    report_every_s = 0.5

    def __init__(self):
        self.lines, self.messages = [], []

    def update(self, metrics):
        self.lines.append(metrics)

    def message(self, text):
        self.messages.append(text)


def train(folder, view=None, env=None, agent=None, resume=False, **options):
    view = view or View()
    run = RunFolder.resume(folder, view.message) if resume else RunFolder.create(folder)
    run.write_config({})
    config = {
        "steps": 3000, "actors": 2, "envs_per_actor": 4, "log_every_s": 0.2, "evaluate_episodes": 2,
        "evaluate_every": 0, "checkpoint_every_s": 0.5,
    } | options  # fmt: skip
    try:
        return central.train(
            env=env or counting_env(sleep_s=0.0002),
            agent=agent or CountingAgent(actions=counting.NUM_ACTIONS),
            config=CentralConfig(**config),
            run=run,
            view=view,
        )
    finally:
        run.close()


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import central_runs
{imports}
central_runs.train(
    Path({folder!r}), central_runs.Printer(), resume={resume}, steps=10**9, agent={agent},
    env=central_runs.FactoryEnv("counting_environment:make_slow"),
)
"""


class Printer(View):
    """Prints, for a test that watches another process."""

    def update(self, metrics):
        print("steps", metrics["env_steps"], flush=True)

    def message(self, text):
        print(text, flush=True)


def spawn(folder, resume=False, agent="None"):
    module = agent.partition(".")[0]
    imports = f"import {module}" if module != agent else ""
    script = SCRIPT.format(
        path=sys.path, folder=str(folder), resume=resume, agent=agent, imports=imports
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def checkpoints(folder):
    path = folder / "checkpoints"
    return [p for p in path.iterdir() if p.is_dir() and p.name[0] != "."] if path.exists() else []


def gone(pids):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    left.append(pid)
        if not left:
            return True
        time.sleep(0.1)
    return False


class Waker(View):
    """Lets a stopped process go on when it is told that it is waited for."""

    def __init__(self, process):
        super().__init__()
        self.process = process

    def message(self, text):
        super().message(text)
        if text.startswith("waiting until"):
            self.process.resume()


def helper_of(process):
    """The process that writes the checkpoints of a trainer."""
    children = psutil.Process(process.pid).children()
    (helper,) = [child for child in children if "checkpoint_helper" in " ".join(child.cmdline())]
    return helper
