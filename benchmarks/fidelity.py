"""Trains one agent on the physics of this project and on Gymnasium's, and compares what it reaches.

Both sides are Gymnasium environments for the central runtime, which trains them with the same settings: SAC,
in the same number of steps and updates. Runs of both sides take turns, one on each core of the machine. What
was trained before is not trained again. At the end the returns of the final evaluations are compared by their
medians and by the Mann-Whitney test.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import queue
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import scipy.stats

import seedbed
from _training import CommandError, save_part, started
from seedbed.run.lines import read_lines

PEERS = {"half_cheetah": "HalfCheetah-v5", "ant": "Ant-v5"}
SIDES = ("ours", "gymnasium")
EVALUATED = "evaluation/episode_return_mean"


def half_cheetah() -> gymnasium.Env:
    """HalfCheetah on the physics of this project, as a Gymnasium environment."""
    return seedbed.make_gymnasium("half_cheetah")


def ant() -> gymnasium.Env:
    """Ant on the physics of this project, as a Gymnasium environment."""
    return seedbed.make_gymnasium("ant")


def command(name: str, side: str, seed: int, args: argparse.Namespace) -> list[str]:
    """The command of one run, without its folder."""
    target = PEERS[name] if side == "gymnasium" else f"fidelity:{name}"
    options = ["--steps", args.steps, "--agent.ratio", args.ratio, "--agent.min-size", 10_000]
    options += ["--actors", 2, "--envs-per-actor", 8, "--seed", seed]
    options += ["--evaluate-every", 0, "--evaluate-episodes", 16]
    full = ["seedbed", "train", target, "--agent", "sac", "--runtime", "central", *options]
    return [str(part) for part in full]


def trained(line: list[str], run: Path, core: int) -> list[dict[str, Any]]:
    """Trains on one core to the end, or reads what was trained; returns the lines of the metrics."""
    if run.exists() and any(EVALUATED in line for line in read_lines(run / "metrics.jsonl")):
        return read_lines(run / "metrics.jsonl")
    if (run / "config.json").exists():  # it has all options
        line = ["seedbed", "train", "--resume"]
    full = ["taskset", "-c", str(core), sys.executable, "-m", *line, "--run", str(run)]
    log = run.with_suffix(".log")
    here = {"cwd": Path(__file__).parent, "stderr": subprocess.STDOUT}  # the target is this module
    with log.open("a") as out, started(full, stdout=out, **here) as process:
        process.wait()
    if process.returncode:
        raise CommandError(f"{' '.join(full)}\nended with {process.returncode}; see {log}")
    return read_lines(run / "metrics.jsonl")


def compared(returns: dict[str, list[float]]) -> dict[str, Any]:
    """The medians of both sides, their ratio and the p-value of the two-sided Mann-Whitney test."""
    medians = {side: statistics.median(values) for side, values in returns.items()}
    test = scipy.stats.mannwhitneyu(*(returns[side] for side in SIDES))
    ratio = medians["ours"] / medians["gymnasium"]
    return {"medians": medians, "ratio": ratio, "p": float(test.pvalue)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--steps", type=int, default=250_000)
    parser.add_argument("--ratio", type=int, default=128, help="samples learned from for each step")
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/fidelity.json"))
    args = parser.parse_args()
    args.runs = args.runs.resolve()
    args.runs.mkdir(parents=True, exist_ok=True)
    cores: queue.Queue[int] = queue.Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def one(side: str, seed: int) -> dict[str, Any]:
        core = cores.get()
        try:
            run = args.runs / f"{args.name}-{side}-{seed}"
            lines = trained(command(args.name, side, seed, args), run, core)
        finally:
            cores.put(core)
        last = lines[-1]
        shown = {"side": side, "seed": seed, "return": last[EVALUATED]}
        shown |= {key: last[key] for key in ("env_steps", "learner_steps", "wall_s")}
        print(shown, flush=True)
        return shown

    with concurrent.futures.ThreadPoolExecutor(cores.qsize()) as pool:
        runs = list(
            pool.map(lambda job: one(*job), [(s, seed) for seed in args.seeds for s in SIDES])
        )
    returns = {side: [run["return"] for run in runs if run["side"] == side] for side in SIDES}
    found = compared(returns)
    print(found)
    protocol = {"steps": args.steps, "samples_a_step": args.ratio, "evaluation_episodes": 16}
    save_part(args.out, args.name, {**protocol, "runs": runs, **found})


if __name__ == "__main__":
    main()
