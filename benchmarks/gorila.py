"""What asynchrony costs and brings: Gorila with 1, 2 and 4 learners against one central learner.

    python benchmarks/gorila.py                       # all three parts, about 45 minutes
    python benchmarks/gorila.py --only cartpole       # or pong, or simulation
    python benchmarks/gorila.py --quick               # for a moment; nothing is saved

A learner, with its actor process, gets a quarter of a core by a control group (Linux, root), in the central
runtime as in Gorila, so that more learners have more to learn with, as on more machines. Parameter shards,
replay shards and the coordinator have no quota, while the central learner pays for its replay, its optimizer
and its checkpoints from its quarter: so each row has `cpu_ms_per_step`, the CPU time of all processes for a
step, while they learn. `cartpole` tells returns at equal samples and at equal
wall-clock, `pong` only updates a second, and `simulation` what the paper's size, 100 learners and 31
parameter shards, would do, from costs that are measured here. All sides have as many environments, which the
learners share: with more of them, each would see less of an episode in as many samples. For two cores, run it
with `taskset -c 0,1`.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import _cluster
from _judging import EPISODES
from _quota import Quota, Warden
from _training import CommandError, Watch, output, pace, save_part, started
from seedbed.run.lines import read_lines

RESULT = Path(__file__).parent / "results" / "gorila.json"
QUOTA = 0.25  # cores of a learner with its actor
LEARNERS = (0, 1, 2, 4)  # 0: the central runtime
ENVIRONMENTS = 16  # of all learners together
RETURN = "episode_return_mean"
WINDOW = 10_000  # steps


def arguments(learners: int) -> list[str]:
    """Returns the options of a side: as many shards of each kind as learners, at most two."""
    each = str(ENVIRONMENTS // max(1, learners))
    common = ["--evaluate-every", "0", "--log-every-s", "0.5", "--envs-per-actor", each]
    if not learners:
        return ["--runtime", "central", "--actors", "1", *common]
    shards = str(min(2, learners))
    return [
        "--learners",
        str(learners),
        "--parameter-shards",
        shards,
        "--replay-shards",
        shards,
        *common,
    ]


def train(preset: str, learners: int, seed: int, steps: int, run: Path) -> dict[str, Any]:
    """Trains with a quota for each learner; returns its metrics, and the largest memory of all processes."""
    command = ["train", preset, "--seed", str(seed), "--steps", str(steps), "--run", str(run)]
    if preset == "pong/gorila":
        # Its own 20,000 would take longer to fill than all the rest.
        command += ["--agent.min-size", "1000"]
    full = [sys.executable, "-m", "seedbed", *command, *arguments(learners)]
    with contextlib.ExitStack() as stack:
        groups = [stack.enter_context(Quota(str(i), QUOTA)) for i in range(max(1, learners))]

        def group_of(process: psutil.Process) -> Quota | None:
            if not learners:
                return groups[0]
            words = process.cmdline()
            if "seedbed.paramserver.learner" not in words:
                return None
            return groups[int(words[words.index("--number") + 1])]

        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = stack.enter_context(started(full, **pipes))
        with Warden(process.pid, group_of):
            watch = Watch(process.pid)
            said, _ = process.communicate()
            peak_mb = watch.stop()
    if process.returncode:
        raise CommandError(f"{' '.join(full)}\nended with {process.returncode}:\n{said[-3000:]}")
    metrics = run / "metrics.jsonl"
    lines = read_lines(metrics)
    zero = metrics.stat().st_mtime - lines[-1]["wall_s"]  # of the run's clock, as a time of day
    return {"lines": lines, "peak_mb": peak_mb, "cpu_s": cpu_of_step(lines, zero, watch.cpu)}


def learning(lines: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the first and the last line of learning; the very last counts an evaluation in."""
    grown = [line for line in lines[:-1] if line["learner_steps"]]
    if len(grown) < 3:
        raise CommandError("the run was too short to measure: raise --steps")
    return grown[0], grown[-1]


def cpu_of_step(lines: list[dict[str, Any]], zero: float, cpu: list[tuple[float, float]]) -> float:
    """Returns the CPU seconds of all processes for a step while they learn.

    `zero` is the time of day at which the run's clock began, and `cpu` is what `Watch` has sampled.
    """
    first, last = learning(lines)
    times, used = zip(*cpu, strict=True)
    begun, ended = np.interp([zero + first["wall_s"], zero + last["wall_s"]], times, used)
    return float(ended - begun) / (last["env_steps"] - first["env_steps"])


def growth(lines: list[dict[str, Any]], name: str) -> float:
    """Returns how much a metric has grown a second while the run learned."""
    first, last = learning(lines)
    return (last[name] - first[name]) / (last["wall_s"] - first["wall_s"])


def staleness(lines: list[dict[str, Any]]) -> float | None:
    """Returns the mean of the intervals' mean staleness; None in the central runtime."""
    found = [line["cluster/staleness_mean"] for line in lines if "cluster/staleness_mean" in line]
    return statistics.mean(found[len(found) // 2 :]) if found else None


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Returns a run's figures besides its returns."""
    lines = found["lines"]
    return {
        "steps_per_s": pace(lines)[0],
        "updates_per_s": growth(lines, "learner_steps"),
        "updates": lines[-1]["learner_steps"],
        "wall_s": lines[-1]["wall_s"],
        "staleness_mean": staleness(lines),
        "discarded_share": statistics.mean(x.get("cluster/discarded_share", 0.0) for x in lines),
        "cpu_ms_per_step": 1e3 * found["cpu_s"],
        "peak_mb": found["peak_mb"],
    }


def late_return(lines: list[dict[str, Any]], wall_s: float) -> float:
    """Returns the mean return of the last episodes at a time of the run's clock: those of `WINDOW` steps.

    An episode of CartPole returns its number of steps.
    """
    before = [line for line in lines if line["wall_s"] <= wall_s and line["episodes"]]
    if not before:
        return 0.0
    last = before[-1]
    first = next(line for line in before if line["env_steps"] >= last["env_steps"] - WINDOW)
    steps, episodes = (last[name] - first[name] for name in ("env_steps", "episodes"))
    return steps / episodes if episodes else 0.0


def show(side: int, row: dict[str, Any]) -> None:
    """Prints a row."""
    name = f"{side} learner{'s' * (side > 1)}" if side else "central"
    text = ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, (int, float)))
    print(f"  {name}: {text}", flush=True)


def cartpole(seeds: list[int], steps: int) -> dict[str, Any]:
    """Trains CartPole with each number of learners; returns rows by seed and number."""
    rows: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        print(f"cartpole/gorila, seed {seed}, {steps:,} steps", flush=True)
        found, own = dict[int, dict[str, Any]](), dict[str, Any]()
        for side in LEARNERS:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                run = Path(folder) / "run"
                found[side] = train("cartpole/gorila", side, seed, steps, run)
                play = ["-m", "seedbed", "evaluate", str(run), "--newest", "--json"]
                played = output([sys.executable, *play, "--episodes", str(EPISODES)])
            own[str(side)] = {
                **summary(found[side]),
                "return_at_samples": late_return(found[side]["lines"], float("inf")),
                "played": played[RETURN],
            }
        # When the fastest side had all its samples.
        end_s = min(each["lines"][-2]["wall_s"] for each in found.values())
        for side in LEARNERS:
            own[str(side)]["return_at_seconds"] = late_return(found[side]["lines"], end_s)
            show(side, own[str(side)])
        rows[str(seed)] = own
    return {"steps": steps, "rows": rows}


def pong(steps: int) -> dict[str, Any]:
    """Trains Pong for a while with each number of learners; returns updates a second."""
    print(f"pong/gorila, {steps:,} steps", flush=True)
    rows = {}
    for side in LEARNERS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            rows[str(side)] = summary(train("pong/gorila", side, 0, steps, Path(folder) / "run"))
        show(side, rows[str(side)])
    one = rows["0"]["updates_per_s"]
    shares = {side: row["updates_per_s"] / one for side, row in rows.items()}
    print("  updates/s against central:", ", ".join(f"{k}: {v:.2f}" for k, v in shares.items()))
    return {"steps": steps, "rows": rows}


def save(name: str, part: dict[str, Any]) -> None:
    """Saves a part beside those of earlier calls."""
    save_part(RESULT, name, {"quota": QUOTA, **part})


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("cartpole", "pong", "simulation"))
    parser.add_argument("--quick", action="store_true", help="for a moment; nothing is saved")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of CartPole")
    parser.add_argument("--steps", type=int, default=50_000, help="agent steps of CartPole")
    parser.add_argument("--pong-steps", type=int, default=8_000, help="agent steps of Pong")
    given = parser.parse_args()
    parts = {
        "cartpole": lambda: cartpole(given.seeds, given.steps),
        "pong": lambda: pong(given.pong_steps),
        "simulation": lambda: _cluster.simulation(5.0),
    }
    if given.quick:
        parts = {
            "cartpole": lambda: cartpole([0], 4_000),
            "pong": lambda: pong(3_000),
            "simulation": lambda: _cluster.simulation(0.5),
        }
    for name, measure in parts.items():
        if given.only in (None, name):
            try:
                part = measure()
            except CommandError as error:
                raise SystemExit(str(error)) from None
            if not given.quick:
                save(name, part)


if __name__ == "__main__":
    main()
