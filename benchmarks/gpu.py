"""An NVIDIA GPU, in at most ten minutes: the CPU's results, steps a second, and training to a score.

Sections, in this order: parity (steps of all models and tasks, with resets, have the CPU's bits), memory
(what a thread takes, by ptxas), rates (steps of Hopper, Ant and Humanoid for 1,024 to 131,072 environments,
beside the bound that the memory of threads sets), training (Ant and Humanoid by their presets), sanitizer
(NVIDIA's compute-sanitizer), profile (operations of training), pong (central inference), peers (Brax's PPO
and MJX).

What is not installed (ptxas, compute-sanitizer, ale_py, Brax, MJX) is recorded as absent. Each section has a
time; one that fails is recorded and the others go on. The results are written after each figure.
`--sections` runs some of them, and keeps what `--out` holds of the others.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import learning
from _peers import PEERS
from _training import CommandError, pace, started
from central import read_lines
from fused import TARGETS

HERE = Path(__file__).parent
RESULT = HERE / "results" / "gpu.json"
ALL_S = 590.0
MODELS = ("hopper", "ant", "humanoid")
TASKS = ("ant", "humanoid", "hopper")
TRAINED = ("ant/ppo", "humanoid/ppo")
SAVE_S = 15.0  # for a run that is interrupted to save and end
PEER_ENVS = 8192
MOVED = ("array bytes moved a step", "spill bytes moved a step", "bytes of operands and results")
WAITING = r"wait|blocked|inference|learner_program|^time/|bottleneck"
"""Metrics that tell what waits for what."""
# What the GPU's driver has compiled, it keeps.
KEPT = {"CUDA_CACHE_MAXSIZE": str(4 << 30)}
# Parts that run beside one another share the GPU's memory.
SHARING = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Report:
    """Figures by section, in a file that is written anew with each. Any thread may add to it."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.figures, self.failed = path, dict(about), list[str]()
        self._lock = threading.Lock()

    def add(self, section: str, **figures: Any) -> None:
        """Merges figures into those of a section, and writes the file."""
        with self._lock:
            self.figures.setdefault(section, {}).update(figures)
            text = json.dumps(self.figures, indent=1) + "\n"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(self.path)


class Job(NamedTuple):
    """A section at work."""

    name: str
    report: Report
    ends: float  # on the clock of time.monotonic

    @property
    def left(self) -> float:
        """Seconds until it must have ended."""
        return self.ends - time.monotonic()

    def add(self, **figures: Any) -> None:
        """Adds figures, and prints them."""
        self.report.add(self.name, **figures)
        for key, value in figures.items():
            print(f"  {key}: {shown(value)}", flush=True)


class Section(NamedTuple):
    """A part of the benchmark. `run` raises what it failed by."""

    name: str
    seconds: float  # at most
    run: Callable[[Job], None]


def run_sections(sections: tuple[Section, ...], report: Report, seconds: float) -> None:
    """Runs sections one after another until all the seconds have passed; failures do not stop the others."""
    ends = time.monotonic() + seconds
    for section in sections:
        now = time.monotonic()
        print(f"{section.name} ({ends - now:.0f} s left)", flush=True)
        try:
            if ends - now < 1:
                raise CommandError(f"no time was left of {seconds:.0f} s")
            section.run(Job(section.name, report, min(ends, now + section.seconds)))
        except Exception as error:
            report.failed.append(section.name)
            report.add(section.name, failed=traceback.format_exc())
            print(f"  failed: {str(error).strip().splitlines()[-1:]}", flush=True)
        ran = {
            "seconds": round(time.monotonic() - now, 1),
            "commit": report.figures.get("commit", ""),
        }
        report.add(section.name, **ran)


def lines_of(
    command: list[Any], seconds: float, environment: dict[str, str] | None = None
) -> Iterator[str]:
    """Yields what a command prints, line by line, and kills it after some seconds.

    Raises CommandError, with the last that it said, if it fails or does not end in time.
    """
    full = [str(part) for part in command]
    with (
        tempfile.TemporaryFile("w+") as errors,
        started(full, stdout=subprocess.PIPE, stderr=errors, env=environment) as process,
    ):
        late = threading.Event()

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(max(seconds, 0.1), end)
        timer.start()
        try:
            yield from process.stdout or ()
            status = process.wait()
        finally:
            timer.cancel()
        if late.is_set() or status:
            errors.seek(0)
            how = f"took more than {seconds:.0f} s" if late.is_set() else f"ended with {status}"
            raise CommandError(f"{' '.join(full)} {how}: {errors.read()[-3000:]}")


def part(
    job: Job, name: str, *names: str, sharing: bool = False, cpu: bool = False
) -> Iterator[Any]:
    """Yields the figures of a part of _gpu.py, in a process of its own, until the job must end."""
    environment = os.environ | KEPT | (SHARING if sharing else {})
    if cpu:
        environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, HERE / "_gpu.py", name, *names]
    for line in lines_of(command, job.left, environment):
        if line.startswith("{"):
            yield json.loads(line)


def beside(calls: list[Callable[[], None]], most: int) -> None:
    """Makes calls in threads, at most so many at once; raises one CommandError for all that failed."""
    with concurrent.futures.ThreadPoolExecutor(max(1, most)) as pool:
        made = [pool.submit(call) for call in calls]
    failed = [str(error) for error in (each.exception() for each in made) if error is not None]
    if failed:
        raise CommandError("\n".join(failed))


# Sections


def parity(job: Job) -> None:
    """Compares the GPU's results with the CPU's, some tasks at once; raises CommandError at a difference.

    Beside it, other cores compile what training will need.
    """
    from seedbed.envs.names import ON_DEVICE

    tasks = [name for name, path in ON_DEVICE.items() if ".locomotion." in path]
    different: list[str] = []

    def compare(task: str) -> None:
        for figures in part(job, "parity", task, sharing=True):
            job.add(**figures)
            different.extend(f"{k}: {v}" for k, v in figures.items() if v != "the same bits")

    def compile_for(preset: str) -> None:
        for figures in part(job, "lower", preset, cpu=True):
            job.add(**figures)

    calls = [lambda preset=preset: compile_for(preset) for preset in TRAINED]
    calls += [lambda task=task: compare(task) for task in tasks]
    beside(calls, (os.cpu_count() or 2) * 3 // 4)
    if different:
        raise CommandError("\n".join(["results differ from the CPU's", *different]))


def memory(job: Job) -> None:
    """Asks ptxas what a thread takes."""
    import _ptxas as ptxas

    lacking = {
        tool: package for tool, package in ptxas.PACKAGES.items() if ptxas.find(tool) is None
    }
    if lacking:
        job.add(absent=", ".join(f"{tool}: pip install {lacking[tool]}" for tool in lacking))
        return
    architecture = "sm_" + job.report.figures["device"]["capability"].replace(".", "")

    def ask(name: str) -> None:
        for figures in part(job, "memory", name, architecture, cpu=True):
            job.add(**{name: figures})

    beside([lambda name=name: ask(name) for name in MODELS], (os.cpu_count() or 2) // 2)


def rates(job: Job) -> None:
    """Measures steps a second, of models and of tasks, and what they are of the bound."""
    (copied,) = part(job, "bandwidth")
    job.add(**copied)
    for name in MODELS:
        taken = job.report.figures.get("memory", {}).get(name)
        row: dict[str, Any] = {}
        if taken is not None:
            row["bound"] = copied["bytes_per_s"] / sum(taken[kind] for kind in MOVED)
        for figures in part(job, "rates", name):
            row |= figures
            if "bound" in row:
                row["of the bound"] = {
                    size: round(row[size] / row["bound"], 3) for size in row if size.isdigit()
                }
            job.report.add(job.name, **{name: row})
        job.add(**{name: row})
    for task in TASKS:
        row = {}
        for figures in part(job, "environment", task):
            row |= figures
            job.report.add(job.name, **{f"{task}, the task": row})
        job.add(**{f"{task}, the task": row})


def training(job: Job) -> None:
    """Trains presets to their scores, each in its share of the time."""
    for number, preset in enumerate(TRAINED):
        found = train_for(preset, job.left / (len(TRAINED) - number) - SAVE_S)
        found["target"] = TARGETS[preset].score
        found["reached"] = max(found["returns"], default=0.0) >= found["target"]
        job.add(**{preset: found})


def train_for(preset: str, seconds: float, *options: str) -> dict[str, Any]:
    """Trains a preset for at most so many seconds, then stops it as by Ctrl-C; returns what it logged."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "seedbed", "train", preset, "--run", str(run), *options]
        begun, interrupted = time.monotonic(), False
        with (
            tempfile.TemporaryFile("w+") as said,
            started(
                command, stdout=said, stderr=subprocess.STDOUT, env=os.environ | KEPT
            ) as process,
        ):
            try:
                process.wait(max(seconds, 1.0))
            except subprocess.TimeoutExpired:
                interrupted = True
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(SAVE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            said.seek(0)
            text = said.read()
        wall, lines = time.monotonic() - begun, read_lines(run / "metrics.jsonl")
    if not lines or (process.returncode and not interrupted):
        raise CommandError(f"{' '.join(command)} ended with {process.returncode}: {text[-3000:]}")
    last = lines[-1]
    evaluated = last.get(learning.EVALUATED)
    trained = [line[learning.TRAINED] for line in lines if line.get(learning.TRAINED) is not None]
    return {
        "command": " ".join(["seedbed", "train", preset, *options]),
        "wall_s": wall,
        "interrupted": interrupted,
        "env_steps": last["env_steps"],
        "env_steps_per_s": pace(lines)[0],
        "returns": [*trained[-3:], *([] if evaluated is None else [evaluated])],
        "last": {name: last[name] for name in last if re.search(WAITING, name)},
    }


def sanitizer(job: Job) -> None:
    """Runs a small part below compute-sanitizer, which looks for accesses out of bounds."""
    found = shutil.which("compute-sanitizer")
    if found is None:
        job.add(absent="compute-sanitizer is not on the PATH")
        return
    # An allocation for each buffer, else accesses beyond its end are within XLA's own.
    environment = os.environ | KEPT | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    command = [found, "--tool", "memcheck", "--error-exitcode", "77"]
    command += [sys.executable, HERE / "_gpu.py", "parity", "hopper"]
    said = []
    for line in lines_of(command, job.left, environment):
        if line.startswith("{"):
            job.add(**json.loads(line))
        elif line.startswith("="):
            said.append(line.strip("= \n"))
            job.report.add(job.name, said=said[-20:])
    job.add(verdict=said[-1] if said else "it said nothing")
    if not said or not re.search(r"ERROR SUMMARY: 0 errors", said[-1]):
        raise CommandError(f"compute-sanitizer: {said[-20:]}")


def profile(job: Job) -> None:
    """Lists the operations that take most time while Ant trains."""
    for figures in part(job, "profile", "ant/ppo"):
        job.add(**figures)


def pong(job: Job) -> None:
    """Trains Pong by central inference, for its rate and what waits for what."""
    if importlib.util.find_spec("ale_py") is None:
        job.add(absent="ale_py")
        return
    job.add(**{"pong/impala": train_for("pong/impala", job.left - SAVE_S, "--log-every-s", "2")})


def peers(job: Job) -> None:
    """Measures Brax's PPO on its Ant, and MJX's steps of ours, where they are installed."""
    own = PEERS / "brax" / "bin" / "python"
    python = own if own.exists() else Path(sys.executable)
    for name, module, command in (
        ("brax ppo", "brax", ["brax_ppo.py", "--seconds", "10"]),
        ("mjx", "mujoco.mjx", ["brax_physics.py", "mjx", asset("ant"), str(PEER_ENVS)]),
    ):
        there = [python, "-c", f"import {module}"]
        if subprocess.run(there, capture_output=True).returncode:
            job.add(**{name: {"absent": f"{module} cannot be imported by {python}"}})
            continue
        full = [python, HERE / "peers" / command[0], *command[1:]]
        *_, last = lines_of(full, job.left * (0.7 if name == "brax ppo" else 1))
        job.add(**{name: json.loads(last)})


def asset(name: str) -> str:
    """Returns the path of a model of Gymnasium's."""
    import gymnasium

    return str(Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / f"{name}.xml")


SECTIONS = (
    Section("parity", 150, parity),
    Section("memory", 60, memory),
    Section("rates", 150, rates),
    Section("training", 150, training),
    Section("sanitizer", 45, sanitizer),
    Section("profile", 45, profile),
    Section("pong", 80, pong),
    Section("peers", 150, peers),
)


def shown(value: Any) -> str:
    """Writes a figure for people."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items())
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def commit() -> str:
    """Names the commit that is checked out; an empty text where there is no git."""
    return learning.head() if shutil.which("git") else ""


def main() -> None:
    """Measures, prints and saves everything; exits with 1 if a section failed, or without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULT, help=f"default: {RESULT}")
    names = [section.name for section in SECTIONS]
    parser.add_argument("--sections", nargs="+", choices=names, help="default: all")
    args = parser.parse_args()
    out, begun = args.out, time.monotonic()
    kept = json.loads(out.read_text()) if args.sections and out.exists() else {}
    about = {name: kept[name] for name in kept if name in names and name not in args.sections}
    report = Report(out, {"date": datetime.date.today().isoformat(), "commit": commit(), **about})
    try:
        (device,) = part(Job("device", report, begun + 60), "device")
        found = "" if device["platform"] == "gpu" else f"only {device['device']}"
    except CommandError as error:
        found = str(error).strip().splitlines()[-1]
    if found:
        lacking = (
            f"JAX finds no NVIDIA GPU here ({found}): pip install seedbed[cuda] where there is one"
        )
        raise SystemExit(f"seedbed bench gpu: {lacking}")
    if about and kept["device"]["device"] != device["device"]:
        other = kept["device"]["device"]
        raise SystemExit(f"seedbed bench gpu: {out} is of another GPU, {other}: name another --out")
    Job("device", report, 0.0).add(**device)
    chosen = tuple(section for section in SECTIONS if section.name in (args.sections or names))
    run_sections(chosen, report, ALL_S - (time.monotonic() - begun))
    if report.failed:
        raise SystemExit(f"failed: {', '.join(report.failed)}; see {out}")
    print(f"all in {time.monotonic() - begun:.0f} s, in {out}")


if __name__ == "__main__":
    main()
