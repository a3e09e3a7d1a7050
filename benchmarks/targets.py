"""Trains Brax's tasks with targets and counts the targets that are reached, for docs/results/.

Each policy then plays 100 episodes of 20 s without noise. Seeds run one after another, each with the whole
machine; an interrupted series goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import learning
from _training import output
from central import split_overrides

EPISODES = 100
REMARK = (
    f"Targets are those reached in an episode of 20 s, over {EPISODES} episodes with the newest checkpoint, "
    "without noise. The curve is of the return in training, with noise. Wall-clock counts from the start of "
    "the command but for imports. The task's physics, observation and reward agree with MuJoCo's C code step "
    "by step (tests/test_targets.py); what differs from Brax's task is told in its docstring."
)


def count(run: str) -> list[int]:
    """Plays a run's newest checkpoint; returns the number of targets reached in each episode."""
    from seedbed.policy import restore
    from seedbed.viewer.record import record

    trained = restore(run, lambda text: None, True, False)
    recording = record(trained.env, trained, EPISODES, 0, "")
    return [int(episode.series["hits"].sum()) for episode in recording.episodes]


def judge(command: list[str], run: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Trains one seed and plays it, unless its folder says what came of that."""
    hits = run / "hits.json"
    if not hits.exists():
        learning.train(command, run, learning.TRAINED, math.inf)
        hits.write_text(json.dumps(output([sys.executable, __file__, "--count", str(run)])))
    lines = learning.read_lines(run / "metrics.jsonl")
    # Before an episode has ended, there is no return.
    return [line for line in lines if learning.TRAINED in line], json.loads(hits.read_text())


def row(seed: int, lines: list[dict[str, Any]], hits: list[int]) -> str:
    """Writes a line of the table."""
    last, some = lines[-1], sum(each > 0 for each in hits) / len(hits)
    return (
        f"| {seed} | {statistics.mean(hits):.1f} ± {statistics.stdev(hits):.1f} | {min(hits)} | {some:.0%} | "
        f"{last['episode_return_mean']:.1f} | {learning.minutes(last['wall_s'])} | {last['env_steps']:,} | "
        f"{last['env_steps'] / last['wall_s']:,.0f} |"
    )


def main() -> None:
    """Trains, then writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", nargs="?", default="grasp")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=learning.ROOT / "runs" / "targets")
    parser.add_argument("--count", metavar="RUN", help=argparse.SUPPRESS)
    own, overrides = split_overrides(sys.argv[1:])
    args = parser.parse_args(own)
    if args.count:
        print(json.dumps(count(args.count)))
        return
    found: dict[int, tuple[list[dict[str, Any]], list[int]]] = {}
    commands: list[str] = []
    for seed in args.seeds:
        command = ["seedbed", "train", args.preset, "--seed", str(seed), *overrides]
        commands.append(" ".join(command))
        found[seed] = judge(command, args.runs / f"{args.preset.replace('/', '-')}-{seed}")
        means = [statistics.mean(hits) for _, hits in found.values()]
        table = [
            "| seed | targets an episode | in the worst | episodes with one | return in training | "
            "wall-clock | env steps | env steps/s |",
            "|---" * 8 + "|",
            *(row(each, *result) for each, result in sorted(found.items())),
            f"| median | {statistics.median(means):.1f} | | | | | | |",
            f"| worst | {min(means):.1f} | | | | | | |",
        ]
        page = learning.Page(table, REMARK, commands, learning.head())
        curves = {each: lines for each, (lines, _) in found.items()}
        learning.write(args.preset.replace("/", "-"), curves, None, page)
    print("\n".join(table))


if __name__ == "__main__":
    main()
