"""Trains tasks of dm_control and judges them in MuJoCo's C code, for docs/results/.

Each policy plays 64 episodes of EnvPool's copy of the task. Seeds run one after another, each with the whole
machine; an interrupted series goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

import learning
from central import split_overrides

EPISODES, STEPS, SEED = 64, 1000, 1
REMARK = (
    f"A policy plays {EPISODES} episodes of EnvPool's copy of the task, which is MuJoCo's C code, with the "
    "newest checkpoint, without noise on its actions. The most that an episode can bring is 1,000. The curve "
    "is of the return in training, where actions have noise. Wall-clock counts from the start of the command "
    "but for imports."
)


def envpool_name(task: str) -> str:
    """Returns EnvPool's name of a task, such as `WalkerWalk-v1` for `walker-walk`."""
    return "".join(part.capitalize() for part in task.replace("-", "_").split("_")) + "-v1"


def in_envpool(run: str, task: str) -> dict[str, float]:
    """Plays a run's policy in EnvPool's task; returns mean, standard deviation, least and greatest return."""
    import envpool  # type: ignore[import-not-found]

    import seedbed
    from seedbed.policy import restore

    policy = seedbed.load(run, newest=True)
    # EnvPool shows what other tasks of the same domain show besides.
    names = list(restore(run, lambda text: None, True, False).env.spec.observation)
    envs: Any = envpool.make_gymnasium(envpool_name(task), num_envs=EPISODES, seed=SEED)
    seen, _ = envs.reset()
    total = np.zeros(EPISODES)
    for step in range(STEPS):
        action = policy.act({name: np.asarray(seen[name], np.float32) for name in names})
        seen, reward, terminated, truncated, _ = envs.step(np.asarray(action, np.float64))
        total += reward
        ended = terminated | truncated
        if ended.any() != (step == STEPS - 1):
            raise SystemExit(f"{task}: {ended.sum()} episodes ended after {step + 1} steps")
    return dict(
        zip(
            ("mean", "std", "min", "max"),
            map(float, (total.mean(), total.std(), total.min(), total.max())),
            strict=True,
        )
    )


def row(seed: int, run: learning.JudgedRun) -> str:
    """Writes a line of the table."""
    last, found = run.lines[-1], run.found
    return (
        f"| {seed} | {found['mean']:.0f} ± {found['std']:.0f} | {found['min']:.0f} | "
        f"{last['wall_s']:.0f} s | {last['env_steps']:,} | "
        f"{last['env_steps'] / last['wall_s']:,.0f} |"
    )


def main() -> None:
    """Trains, then writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", nargs="?", default="dm/walker-walk/ppo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=learning.ROOT / "runs" / "suite")
    parser.add_argument(
        "--commit", default=learning.head(), help="that trained runs which are there already"
    )
    parser.add_argument("--judge", metavar="RUN", help=argparse.SUPPRESS)
    own, overrides = split_overrides(sys.argv[1:])
    args = parser.parse_args(own)
    if args.judge:
        print(json.dumps(in_envpool(args.judge, args.preset.split("/")[1])))
        return
    runs: dict[int, learning.JudgedRun] = {}
    commands: list[str] = []
    table: list[str] = []
    for seed in args.seeds:
        command = ["seedbed", "train", args.preset, "--seed", str(seed), *overrides]
        commands.append(" ".join(command))
        run = args.runs / f"{args.preset.replace('/', '-')}-{seed}"
        runs[seed] = learning.judged(__file__, args.preset, command, run)
        means = [each.found["mean"] for each in runs.values()]
        seconds = [each.lines[-1]["wall_s"] for each in runs.values()]
        table = [
            "| seed | return in EnvPool's task | its worst episode | wall-clock | env steps | env steps/s |",
            "|---" * 6 + "|",
            *(row(each, result) for each, result in sorted(runs.items())),
            f"| median | {statistics.median(means):.0f} | | {statistics.median(seconds):.0f} s | | |",
            f"| worst | {min(means):.0f} | | {max(seconds):.0f} s | | |",
        ]
        page = learning.Page(table, REMARK, commands, args.commit)
        curves = {each: result.lines for each, result in runs.items()}
        learning.write(args.preset.replace("/", "-"), curves, None, page)
    print("\n".join(table))


if __name__ == "__main__":
    main()
