"""Trains a preset of a task that walks, and measures how fast its policies walk in Gymnasium's own task.

A policy plays 20 episodes of 10 s without noise, in MuJoCo's C code. A fall ends an episode, and what it had
walked counts, over 10 s. An interrupted series goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import gymnasium

import learning
from _judging import physics
from _training import output

EPISODES, SECONDS = 20, 10.0
REMARK = (
    f"Speeds are along x over {SECONDS:g} s in Gymnasium's task, which is MuJoCo's C code, of {EPISODES} "
    "episodes with the newest checkpoint, without noise; a fall ends an episode, and what it had walked "
    "counts. The curve is of the return in training, with noise."
)


def speeds(run: str) -> list[float]:
    """Plays a run's newest checkpoint in Gymnasium's task; returns the speed of each episode in m/s."""
    import seedbed
    from seedbed.policy import restore

    task: Any = restore(run, lambda text: None, True, False).env
    policy = seedbed.load(run, newest=True)
    env = gymnasium.make(task.gymnasium_id, **task.gymnasium_options())
    data: Any = env.unwrapped.data  # type: ignore[attr-defined]
    steps, found = round(SECONDS / env.unwrapped.dt), []  # type: ignore[attr-defined]
    for seed in range(EPISODES):
        observation, _ = env.reset(seed=seed)
        begun = float(data.qpos[0])
        for _ in range(steps):
            observation, _, terminated, truncated, _ = env.step(policy.act(observation))
            if terminated or truncated:
                break
        found.append((float(data.qpos[0]) - begun) / SECONDS)
    return found


def judge(command: list[str], run: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """Trains one seed and plays it, unless its folder says what came of that."""
    walked = run / "speeds.json"
    if not walked.exists():
        learning.train(command, run, learning.TRAINED, math.inf)
        walked.write_text(json.dumps(output([sys.executable, __file__, "--measure", str(run)])))
    lines = learning.read_lines(run / "metrics.jsonl")
    return [line for line in lines if learning.TRAINED in line], json.loads(walked.read_text())


def main() -> None:
    """Trains, then writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", nargs="?", default="ant/apg")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=learning.ROOT / "runs" / "walking")
    parser.add_argument("--remark", default="", help="what else the page should say")
    parser.add_argument("--measure", metavar="RUN", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(speeds(args.measure)))
        return
    curves: dict[int, list[dict[str, Any]]] = {}
    commands, rows, means = [], [], []
    for seed in args.seeds:
        command = ["seedbed", "train", args.preset, "--seed", str(seed)]
        commands.append(" ".join(command))
        curves[seed], found = judge(command, args.runs / f"{args.preset.replace('/', '-')}-{seed}")
        means.append(statistics.mean(found))
        last = curves[seed][-1]
        returned = last["evaluation/episode_return_mean"]
        rows.append(
            f"| {seed} | {means[-1]:.2f} | {min(found):.2f} | {returned:,.0f} | "
            f"{last['env_steps']:,} | {learning.minutes(last['wall_s'])} |"
        )
        table = [
            "| seed | m/s | in the slowest episode | return in ours | env steps | wall-clock |",
            "|---" * 6 + "|",
            *rows,
            f"| median | {statistics.median(means):.2f} | | | | |",
            f"| worst | {min(means):.2f} | | | | |",
        ]
        trained = physics(args.runs / f"{args.preset.replace('/', '-')}-{args.seeds[0]}")
        remark = " ".join([REMARK, trained, *filter(None, [args.remark])])
        page = learning.Page(table, remark, commands, learning.head())
        learning.write(args.preset.replace("/", "-"), curves, None, page)
    print("\n".join(table))


if __name__ == "__main__":
    main()
