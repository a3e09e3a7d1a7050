"""A turn of central_or_actor.py: training in one way of acting for a while, and what was measured."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from _reports import ask, next_line
from _training import CommandError, started
from seedbed.run.lines import read_lines
from seedbed.streams.credentials import ADDRESS, FOLDER, ensure_credentials

HERE = Path(__file__).parent
ACTORS, ENVS = 2, 32
LONGEST_S = 400.0  # until something was learned
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
PARTS = ("environment", "inference", "learning", "wire of actors", "wire of the learner")


def overrides(options: dict[str, Any]) -> list[str]:
    """Returns an agent's options as arguments of the command line."""
    found = []
    for name, value in options.items():
        option = f"--agent.{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [] if value is True else [value]
        found += [option, *map(str, values)]
    return found


def wait_until(done: Callable[[], bool], processes: list[subprocess.Popen[str]]) -> None:
    """Waits until `done` returns True; raises CommandError if a process ends, or if it takes too long."""
    until = time.monotonic() + LONGEST_S
    while not done():
        if any(process.poll() is not None for process in processes) or time.monotonic() > until:
            raise CommandError("a process has ended, or nothing is learned: see what it said above")
        time.sleep(0.2)


def measured(
    take: Callable[[], dict[str, Any]], settle: float, seconds: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Takes figures before and after a while; both have their `time`."""
    time.sleep(settle)
    before = {"time": time.monotonic()} | take()
    time.sleep(seconds)
    return before, {"time": time.monotonic()} | take()


def shared(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Returns what follows from the figures of either way, which have the same names."""
    passed = {name: after[name] - before[name] for name in after if isinstance(after[name], float)}
    steps, wall = passed["steps"], passed["time"]
    waits = sorted(after["waits"])
    if not waits or steps <= 0 or passed["learned"] <= 0:
        raise CommandError(f"nothing was learned in {wall:.1f} s: give more --seconds")
    parts = {name: 1e3 * passed[name] / steps for name in PARTS}
    return {
        "steps_per_s": steps / wall,
        "learned_per_s": passed["learned"] / wall,
        "up_bytes": passed["sent_bytes"] / steps,
        "down_bytes": passed["received_bytes"] / steps,
        "ms_between_actions": 1e3 * ACTORS * ENVS * wall / steps,  # of an environment, all told
        "p50_ms": 1e3 * waits[len(waits) // 2],
        "p99_ms": 1e3 * waits[int(0.99 * len(waits))],
        "cpu_ms": sum(parts.values()),
        "cpu_ms_of": parts,
        "blocked": passed["blocked"] / wall,
        "updates_per_s": passed["updates"] / wall,
        "lag": after["lag"],
        "window_s": wall,
    }


def summed(reports: list[dict[str, Any]], name: str) -> float:
    return float(sum(report[name] for report in reports))


def process_cpu(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


def run_central(
    folder: Path, options: dict[str, Any], settle: float, seconds: float
) -> dict[str, Any]:
    """Trains by central inference with streams for a while, and measures it."""
    run = folder / "run"
    command = [
        *(sys.executable, "-m", "seedbed", "train", "pong", "--run", str(run)),
        *("--listen", "127.0.0.1:0", "--stream-groups", str(2 * ACTORS)),
        *("--steps", "1_000_000_000", "--evaluate-every", "1_000_000_000"),
        *("--checkpoint-every-s", "1_000_000", "--log-every-s", "1", *overrides(options)),
    ]
    with contextlib.ExitStack() as stack:
        learner = stack.enter_context(started(command, stdout=subprocess.DEVNULL))
        wait_until((run / FOLDER / ADDRESS).exists, [learner])
        script = [sys.executable, str(HERE / "_measured_host.py"), str(run), str(ACTORS)]
        errors = stack.enter_context((folder / "host.txt").open("w"))
        host = stack.enter_context(started(script, **PIPES, stderr=errors))
        lines = run / "metrics.jsonl"
        wait_until(lambda: any(line["env_steps"] for line in read_lines(lines)), [learner, host])
        wait_until(lambda: ask(host)["playing"] == 2 * ACTORS, [learner, host])
        process = psutil.Process(learner.pid)
        (ingest,) = [p for p in process.children() if "seedbed.actors.ingest" in p.cmdline()]

        def take() -> dict[str, Any]:
            report, told = ask(host), read_lines(lines)
            assert report["streams"] == 2 * ACTORS, "a stream broke"
            return {
                "steps": float(report["steps"]),
                "sent_bytes": float(report["sent_bytes"]),
                "received_bytes": float(report["received_bytes"]),
                "waits": report["waits"],
                "environment": report["environment_s"],
                "wire of actors": report["wire_s"],
                "wire of the learner": process_cpu(ingest),
                "process": process_cpu(process),
                "learned": float(told[-1]["env_steps"]),
                "updates": float(told[-1]["learner_steps"]),
                "lines": told,
                "lag": told[-1].get("lag_mean") or 0.0,
            }

        before, after = measured(take, settle, seconds)
    divide(before, after)
    rows = [line["inference_rows_mean"] for line in window(before, after)]
    return shared(before, after) | {
        "environments_of_a_call": statistics.fmean(row for row in rows if row)
    }


def window(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the lines of metrics of the measurement."""
    return after["lines"][len(before["lines"]) :]


def divide(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Divides the CPU time of the learner's process between inference and learning, as the run does."""
    lines = window(before, after)
    if not lines:
        raise CommandError("the run wrote no metrics: give more --seconds")
    acting, learning = (
        statistics.fmean(x[f"time/{n}"] for x in lines) for n in ("inference", "learning")
    )
    spent, share = after["process"] - before["process"], acting / (acting + learning)
    before |= {"inference": 0.0, "learning": 0.0, "blocked": 0.0}
    after |= {"inference": spent * share, "learning": spent * (1 - share)}
    blocked = statistics.fmean(line["inference_blocked_share"] for line in lines)
    after["blocked"] = blocked * (after["time"] - before["time"])


@contextlib.contextmanager
def actor_inference(
    folder: Path, options: dict[str, Any], cadence: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts a learner, and actors that act for themselves; yields their processes, the learner's first."""
    ensure_credentials(folder / FOLDER)
    script = [sys.executable, str(HERE / "_actor_inference.py")]
    common = [json.dumps(options), str(folder / FOLDER), str(ENVS), cadence]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started([*script, "learner", *common], **PIPES))]
        port = next_line(processes[0]).strip()
        for number in range(ACTORS):
            command = [*script, "actor", *common, port, str(number)]
            processes.append(stack.enter_context(started(command, **PIPES)))
        yield processes


def run_actors(
    folder: Path, options: dict[str, Any], cadence: str, settle: float, seconds: float
) -> dict[str, Any]:
    """Lets actors act for themselves for a while, and measures it."""
    with actor_inference(folder, options, cadence) as processes:
        learner, *actors = processes
        wait_until(
            lambda: (
                ask(learner)["learned"] > 0 and all(ask(actor)["steps"] > 0 for actor in actors)
            ),
            processes,
        )

        def take() -> dict[str, Any]:
            told, reports = ask(learner), [ask(actor) for actor in actors]
            figures = ("steps", "sent_bytes", "received_bytes")
            return {name: summed(reports, name) for name in figures} | {
                "waits": [wait for report in reports for wait in report["waits"]],
                "environment": summed(reports, "environment_s"),
                "inference": summed(reports, "inference_s"),
                "wire of actors": summed(reports, "wire_s"),
                "wire of the learner": told["wire_s"],
                "learning": told["cpu_s"] - told["wire_s"],
                "blocked": summed(reports, "blocked_s") / len(actors),
                "learned": float(told["learned"]),
                "updates": float(told["updates"]),
                "shipped": float(told["shipped"]),
                "lag": told["lag"],
            }

        before, after = measured(take, settle, seconds)
    shipped = (after["shipped"] - before["shipped"]) / len(actors)
    updates = max(1.0, after["updates"] - before["updates"])
    row = shared(before, after) | {"shipped_per_update": shipped / updates}
    return row | {"environments_of_a_call": float(ENVS)}
