"""Runs `seedbed train` as people do, in a process of its own, and measures what it took."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from _stamp import stamp
from seedbed.machine import cpu_name, usable_cores
from seedbed.run.lines import read_lines


class CommandError(Exception):
    """A command failed; its text says which, and how."""


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Starts a command in a session of its own, and leaves nothing of it behind."""
    process = subprocess.Popen(command, start_new_session=True, text=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def output(command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Runs a command and reads its last line as JSON."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, env=environment, **pipes) as process:
        text, errors = process.communicate()
    if process.returncode:
        raise CommandError(f"{' '.join(command)}\nfailed: {errors[-3000:]}")
    return json.loads(text.strip().splitlines()[-1])


class Watch(threading.Thread):
    """Samples the memory and CPU time of a process and its children each second.

    `peak_mb` is the largest sum of their memory; `cpu` are pairs of a time of day and the CPU seconds of all
    until then, of children that have ended, too.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process, self._over, self.peak_mb = psutil.Process(pid), threading.Event(), 0.0
        self.cpu: list[tuple[float, float]] = []
        self.start()

    def run(self) -> None:
        while not self._over.wait(1.0):
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = (self._process, *self._process.children(recursive=True))
                self.peak_mb = max(self.peak_mb, sum(p.memory_info().rss for p in tree) / 1e6)
                # Times of a process, and of its children that have ended.
                self.cpu.append((time.time(), sum(sum(p.cpu_times()[:4]) for p in tree)))

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self.peak_mb


def run_training(
    command: list[str], run: Path, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """Runs `seedbed train` to its end and returns what it took; shows what it prints."""
    full = [sys.executable, "-m", *command, "--run", str(run)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    begun, clock = time.time(), time.perf_counter()
    with started(full, env=environment, **pipes) as process:
        watch, tail = Watch(process.pid), []
        for line in process.stdout or ():  # ends with the process
            tail = [*tail[-20:], line]
            print(f"    {line}", end="", flush=True)
        _, status, usage = os.wait4(process.pid, 0)
        wall, sampled = time.perf_counter() - clock, watch.stop()
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise CommandError(f"{' '.join(full)}\nended with {process.returncode}:\n{''.join(tail)}")
    metrics = run / "metrics.jsonl"
    lines = read_lines(metrics)
    zero = metrics.stat().st_mtime - begun - lines[-1]["wall_s"]  # of the run's clock, in ours
    rate, end = pace(lines)
    return {
        "wall_s": wall,
        "last_step_s": zero + end,
        "env_steps": lines[-1]["env_steps"],
        "env_steps_per_s": rate,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mb": max(sampled, usage.ru_maxrss * 1024 / 1e6),
    }


def pace(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Steps a second, and when the last was learned from, on the run's clock.

    The last line is of after the evaluation; the steps since the line before it were as fast as the rest.
    A run that has logged no step is 0 steps a second fast.
    """
    *during, last = lines
    if not during:  # a run shorter than the period of the log: both count the evaluation in
        return last["env_steps_per_s"], last["wall_s"]
    first, late = during[0], during[-1]
    rate = late["env_steps_per_s"]
    if len(during) > 1:
        rate = (late["env_steps"] - first["env_steps"]) / (late["wall_s"] - first["wall_s"])
    if rate == 0:
        return 0.0, last["wall_s"]
    end = late["wall_s"] + (last["env_steps"] - late["env_steps"]) / rate
    return rate, min(end, last["wall_s"])


def first_step(command: list[str], environment: dict[str, str] | None = None) -> float:
    """Seconds from the command's start to the end of its first iteration of learning."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Path(folder) / "run"
        often = ["--fused.log-every-s", "0.1", "--run", str(run)]
        full = [sys.executable, "-m", *command, *often]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        clock = time.perf_counter()
        with started(full, env=environment, **quiet) as process:
            while not read_lines(run / "metrics.jsonl"):
                if process.poll() is not None:
                    raise CommandError(f"{' '.join(full)}\nended before it learned")
                time.sleep(0.02)
            return time.perf_counter() - clock


@contextlib.contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """An environment in which nothing has been compiled."""
    without = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        kept = {name: value for name, value in os.environ.items() if name not in without}
        yield kept | {"HOME": home, "SEEDBED_CACHE": str(Path(home) / "seedbed")}


def save_part(path: Path, name: str, part: dict[str, Any]) -> None:
    """Saves a part of a result beside those of earlier calls, with the machine and the day."""
    result = json.loads(path.read_text()) if path.exists() else {}
    found = stamp()
    now = {
        "machine": cpu_name(),
        "cores": usable_cores(),
        "load_before": found["machine"]["load_before"],
        **{each: found[each] for each in ("date", "commit", "command")},
    }
    path.write_text(json.dumps({**result, name: {**now, **part}}, indent=1) + "\n")
