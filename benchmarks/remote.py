"""Training Pong with actors of this machine, and with the same actors over encrypted streams, in turns.

    python benchmarks/remote.py                   # six pairs of 60 s
    python benchmarks/remote.py --quick           # one short pair; nothing is saved

Both sides have two actor processes of 32 emulators, and the same cores: run it with `taskset -c 0,1` for the
figures of two. The streams go over loopback, through the ingest process and the actors' supervisor, which the
local side does not have.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _stamp import write_result
from _training import CommandError, started
from central import tree_cpu
from seedbed.machine import cpu_name, usable_cores
from seedbed.run.lines import read_lines

RESULT = Path(__file__).parent / "results" / "remote.json"
ACTORS = 2
SETTLE_S = 10.0  # of training before the measurement
TARGET = 0.9


def train(folder: Path, seconds: float, remote: bool) -> dict[str, Any]:
    """Trains for a while; returns transitions a second and CPU milliseconds a transition."""
    run, quiet = folder / "run", {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    how = ["--listen", "127.0.0.1:0", "--stream-groups", "4"] if remote else ["--actors", "2"]
    options = [
        "--steps",
        "1_000_000_000",
        "--evaluate-every",
        "1_000_000_000",
        "--log-every-s",
        "1",
    ]
    seedbed = [sys.executable, "-m", "seedbed"]
    learner = [*seedbed, "train", "pong", "--run", str(run), *how, *options]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(learner, **quiet))]
        if remote:
            while not (run / "listen" / "address.json").exists():
                time.sleep(0.1)
            actor = [*seedbed, "actor", str(run), "--processes", str(ACTORS)]
            processes.append(stack.enter_context(started(actor, **quiet)))
        while not any(line["env_steps"] for line in read_lines(run / "metrics.jsonl")):
            if any(process.poll() is not None for process in processes):
                raise CommandError(f"{' '.join(learner)} ended")
            time.sleep(0.2)
        time.sleep(SETTLE_S)
        before, first = (
            sum(tree_cpu(p.pid) for p in processes),
            read_lines(run / "metrics.jsonl")[-1],
        )
        time.sleep(seconds)
        after, last = sum(tree_cpu(p.pid) for p in processes), read_lines(run / "metrics.jsonl")[-1]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[0].wait(20)
    steps = last["env_steps"] - first["env_steps"]
    wall = last["wall_s"] - first["wall_s"]
    row = {"steps_per_s": steps / wall, "cpu_ms_per_step": 1e3 * (after - before) / steps}
    names = ("action_p50_s", "action_p99_s", "answer_p50_s", "answer_p99_s")
    return row | {name: last[f"streams/{name}"] for name in names if remote}


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    pairs, seconds = (1, 10.0) if args.quick else (6, 60.0)
    rows: dict[str, list[dict[str, Any]]] = {"local": [], "remote": []}
    for turn in range(pairs):
        order = ("local", "remote") if turn % 2 == 0 else ("remote", "local")
        for side in order:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                row = train(Path(folder), seconds, remote=side == "remote")
            rows[side].append(row)
            text = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
            print(f"pair {turn}, {side}: {text}", flush=True)
    found = zip(rows["remote"], rows["local"], strict=True)
    ratios = [a["steps_per_s"] / b["steps_per_s"] for a, b in found]
    middle = statistics.median(ratios)
    print(
        f"remote to local: median {middle:.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)}), target "
        f"{TARGET}: {middle >= TARGET}"
    )
    if not args.quick:
        result = {
            "cpu": cpu_name(),
            "cores": usable_cores(),
            "ratios": ratios,
            "median": middle,
            "pairs": rows,
        }
        write_result(RESULT, result)


if __name__ == "__main__":
    main()
