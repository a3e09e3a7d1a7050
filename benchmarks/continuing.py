"""Trains an Ant to 4,000, and goes on with a heavier torso: beside the same from scratch, seed by seed.

The scratch run has its preset's steps and the run that goes on has half of them. What counts is when the mean
return of the last 100 episodes reaches 95 % of the scratch run's mean over its last tenth. Both train
with the task's own integrator only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import learning

sys.path.append(str(learning.ROOT / "examples"))
FACTOR, ENOUGH = 1.5, 4000.0
REMARK = (
    f"Ant with a torso of {FACTOR} times the weight (examples/curriculum.py). Curves: mean training return "
    "of the last 100 episodes of the heavier Ant, from scratch, and from the weights of an Ant that had "
    f"reached {ENOUGH:,.0f} with the usual torso; the steps of that first stage are in the table only. Both "
    "sides train with the task's own integrator throughout (euler_share 0)."
)


def train(kind: str, seed: int, run: Path, start: Path | None) -> None:
    """Trains one run, in a process of its own."""
    if not (run / "done").exists():
        options = [str(run), str(start or "")]
        subprocess.run([sys.executable, __file__, "--one", kind, str(seed), *options], check=True)
        (run / "done").touch()


def train_here(kind: str, seed: int, run: Path, start: str) -> None:
    """Trains one run: `first` with the usual torso, `scratch`, or `continued` for half the steps."""
    import curriculum
    import seedbed

    usual = curriculum.stage(1.0).runtime.steps
    if kind == "first":
        config = curriculum.stage(1.0, seed=seed, until_return=ENOUGH)
    else:
        steps = usual if kind == "scratch" else usual // 2
        # The preset trains with Euler's integrator at first, whose returns are lower.
        config = curriculum.stage(FACTOR, seed=seed, steps=steps, euler_share=0.0)
    seedbed.train(config, run=run, start=start or None)


def curve(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run that have a return."""
    return [line for line in learning.read_lines(run / "metrics.jsonl") if learning.TRAINED in line]


def compare(seed: int, runs: Path) -> dict[str, Any]:
    """Trains the three runs of a seed; returns steps, returns and where the goal was reached."""
    first, scratch, continued = (
        runs / f"{kind}-{seed}" for kind in ("first", "scratch", "continued")
    )
    train("first", seed, first, None)
    train("scratch", seed, scratch, None)
    train("continued", seed, continued, first)
    lines = curve(scratch)
    whole = lines[-1]["env_steps"]
    late = [line[learning.TRAINED] for line in lines if line["env_steps"] > 0.9 * whole]
    goal = 0.95 * statistics.mean(late)
    # Both by the same line: where a training return of the goal is there first.
    begun, reached = (
        [line for line in found if line[learning.TRAINED] >= goal]
        for found in (lines, curve(continued))
    )
    return {
        "seed": seed,
        "first_steps": curve(first)[-1]["env_steps"],
        "scratch_steps": whole,
        "scratch_return": statistics.mean(late),
        "goal": goal,
        "steps": reached[0]["env_steps"] if reached else None,
        "scratch_reached": begun[0]["env_steps"],
        "share": reached[0]["env_steps"] / begun[0]["env_steps"] if reached else None,
        "continued_return": curve(continued)[-1][learning.TRAINED],
    }


def row(found: dict[str, Any]) -> str:
    """Writes a line of the table."""
    steps = f"{found['steps']:,} ({found['share']:.0%})" if found["steps"] else "not reached"
    return (
        f"| {found['seed']} | {found['first_steps']:,} | {found['scratch_return']:,.0f} | "
        f"{found['scratch_reached']:,} | {steps} | "
        f"{found['continued_return']:,.0f} |"
    )


def main() -> None:
    """Trains, then writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=learning.ROOT / "runs" / "continuing")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, seed, run, start = args.one
        train_here(kind, int(seed), Path(run), start)
        return
    found = [compare(seed, args.runs) for seed in args.seeds]
    table = [
        "| seed | steps of the first stage | from scratch, last tenth | steps to 95 % of it | continued "
        "(share of those) | continued, at the end of half the steps |",
        "|---" * 6 + "|",
        *map(row, found),
    ]
    curves = {
        f"{seed} {words}": curve(args.runs / f"{kind}-{seed}")
        for seed in args.seeds
        for kind, words in (("scratch", "from scratch"), ("continued", "from weights"))
    }
    page = learning.Page(table, REMARK, ["seedbed bench continuing"], learning.head())
    learning.write("go-on-from-weights", curves, None, page)
    print("\n".join(table))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
