"""Trains a preset from the command line with several seeds and writes its curve to docs/results/.

Seeds run one after another, each with the whole machine, and each is then played. An interrupted series goes
on where it stopped: what was played is not trained again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from _judging import EPISODES
from _training import CommandError, output, started
from central import split_overrides
from seedbed.machine import cpu_name
from seedbed.run.lines import read_lines
from seedbed.viewer.palette import LIGHT

ROOT = Path(__file__).parent.parent
TRAINED, EVALUATED = "episode_return_mean", "evaluation/episode_return_mean"
SCORES = {TRAINED: "mean training return (last 100)", EVALUATED: "mean return in an evaluation"}
WIDTH, HEIGHT, LEFT, TOP = 640, 320, 60, 30


Curves = Mapping[int, list[dict[str, Any]]] | Mapping[str, list[dict[str, Any]]]
"""The lines of metrics of several runs, by their seed or by what they are called."""


class RunResult(NamedTuple):
    """A run's command, its metrics, and what `seedbed evaluate` said of it."""

    command: str
    lines: list[dict[str, Any]]
    played: dict[str, Any]


class JudgedRun(NamedTuple):
    """A run's metrics, and what a judge found."""

    lines: list[dict[str, Any]]
    found: dict[str, Any]


def explores(preset: str) -> bool:
    """Returns whether training acts at random more often than evaluations do, and so has lower returns."""
    return preset.endswith(("dqn", "r2d2", "gorila", "gorila-apex"))


def score_of(preset: str) -> str:
    """Returns the metric that tells when a run has reached a target."""
    return EVALUATED if explores(preset) else TRAINED


def train(command: list[str], run: Path, score: str, stop_at: float) -> None:
    """Trains to the end, or until the metric `score` is `stop_at`: then it is stopped as by Ctrl-C."""
    resume = ["--resume"] if (run / "config.json").exists() else []
    full = [sys.executable, "-m", *command, "--run", str(run), *resume]
    with started(full) as process:
        stopped = False
        while process.poll() is None:
            time.sleep(1.0)
            scores = [line.get(score) for line in read_lines(run / "metrics.jsonl")]
            known = [value for value in scores if value is not None]
            if not stopped and known and known[-1] >= stop_at:
                stopped = True
                process.send_signal(signal.SIGINT)
    if process.returncode and not stopped:
        raise CommandError(f"{' '.join(full)}\nended with {process.returncode}")


def judge(preset: str, seed: int, args: argparse.Namespace, overrides: list[str]) -> RunResult:
    """Trains one seed and plays it, unless its folder says what came of that."""
    run = args.runs / f"{preset.replace('/', '-')}-{seed}"
    command = ["seedbed", "train", preset, "--seed", str(seed), *overrides]
    played = run / "played.json"
    if not played.exists():
        stop_at = args.target if args.until_target else math.inf
        train(command, run, score_of(preset), stop_at)
        play = ["-m", "seedbed", "evaluate", str(run), "--newest", "--json"]
        play += ["--episodes", str(EPISODES)]
        played.write_text(json.dumps(output([sys.executable, *play])))
    return RunResult(
        " ".join(command), read_lines(run / "metrics.jsonl"), json.loads(played.read_text())
    )


def judged(script: str, preset: str, command: list[str], run: Path) -> JudgedRun:
    """Trains one seed and lets `SCRIPT PRESET --judge RUN` judge it, unless its folder says what it found."""
    said = run / "judged.json"
    if not said.exists():
        train(command, run, TRAINED, math.inf)
        said.write_text(json.dumps(output([sys.executable, script, preset, "--judge", str(run)])))
    lines = [line for line in read_lines(run / "metrics.jsonl") if TRAINED in line]
    return JudgedRun(lines, json.loads(said.read_text()))


def reached(lines: list[dict[str, Any]], score: str, target: float) -> str:
    """Says when the metric `score` was at least the target for the first time."""
    for line in lines:
        if line.get(score) is not None and line[score] >= target:
            return f"{minutes(line['wall_s'])}, {line['frames']:,} frames"
    return "not reached"


def label(curve: int | str) -> str:
    """Returns what a curve is called: a number is a seed."""
    return curve if isinstance(curve, str) else f"seed {curve}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Returns round numbers that cover an interval: the outer two are at or beyond its ends."""
    if high - low <= 1e-6 * max(abs(high), 1.0):
        low, high = low - 1.0, high + 1.0
    least = (high - low) / (most - 1)
    scale = 10.0 ** math.floor(math.log10(least))
    for step in (scale, 2 * scale, 2.5 * scale, 5 * scale, 10 * scale, 20 * scale):
        first, last = math.floor(low / step), math.ceil(high / step)
        if last - first < most:
            break
    return [step * i for i in range(first, last + 1)]


def curve(curves: Curves, target: float | None, title: str, dashed: str = "target") -> str:
    """Draws the mean training return against wall-clock time as SVG; `target` is a line called `dashed`."""
    longest = max(lines[-1]["wall_s"] for lines in curves.values())
    unit, name = (1.0, "seconds") if longest < 120 else (60.0, "minutes")
    points = {
        seed: [(x["wall_s"] / unit, x["episode_return_mean"]) for x in lines if x["episodes"]]
        for seed, lines in curves.items()
    }
    every = [point for line in points.values() for point in line]
    levels = [y for _, y in every] + ([] if target is None else [target])
    times, returns = ticks(0.0, max(x for x, _ in every)), ticks(min(levels), max(levels))
    x_max, low, high = times[-1], returns[0], returns[-1]

    def place(x: float, y: float) -> str:
        return (
            f"{LEFT + x / x_max * (WIDTH - LEFT - 20):.1f},"
            f"{TOP + (high - y) / (high - low) * (HEIGHT - TOP - 50):.1f}"
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{title}</text>',
    ]
    for y in returns:
        left, right = place(0, y), place(x_max, y)
        beside = float(left.split(",")[1]) + 4
        parts.append(f'<polyline points="{left} {right}" stroke="#ddd" fill="none"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{beside:.1f}" text-anchor="end">{written(y)}</text>')
    for x in times:
        middle = place(x, low).split(",")[0]
        parts.append(
            f'<text x="{middle}" y="{HEIGHT - 30}" text-anchor="middle">{written(x)}</text>'
        )
    dashes = 'stroke="#555" stroke-dasharray="5 4" fill="none"'
    many = len(points) > 3
    if target is not None:
        left, right = place(0, target), place(x_max, target)
        level = float(left.split(",")[1])
        many = many or level < TOP + 20 + 16 * len(points)
        beside = level - 4 if level > TOP + 16 else level + 13  # the title is above
        named = f"{dashed} {written(target)}"
        parts.append(f'<polyline points="{left} {right}" {dashes}/>')
        parts.append(
            f'<text x="{LEFT + 90}" y="{beside:.1f}" fill="#555" font-size="11">{named}</text>'
        )
    # Returns rise: below their later part is room for many names, and for those in the target's way.
    x, top = (WIDTH - 120, HEIGHT - 60 - 16 * len(points)) if many else (LEFT + 10, TOP)
    for index, (seed, line) in enumerate(sorted(points.items())):
        color, path = LIGHT[index % len(LIGHT)], " ".join(place(*point) for point in line)
        parts.append(f'<polyline points="{path}" stroke="{color}" stroke-width="1.5" fill="none"/>')
        if len(line) == 1:
            at, height = path.split(",")
            parts.append(f'<circle cx="{at}" cy="{height}" r="3" fill="{color}"/>')
        parts.append(
            f'<text x="{x}" y="{top + 16 + 16 * index}" fill="{color}">{label(seed)}</text>'
        )
    parts.append(
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 8}" text-anchor="middle">{name}</text></svg>'
    )
    return "\n".join(parts) + "\n"


def written(value: float) -> str:
    """Writes a number on an axis for people."""
    return f"{round(value, 6) + 0.0:,.10g}"


def minutes(seconds: float) -> str:
    """Writes a duration for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


REMARK = (
    "Wall-clock counts from the start of the command but for imports; compilation and periodic evaluations "
    "are included. Returns are raw scores of whole games."
)
PLAYED = (
    f" The evaluation is {EPISODES} games with the newest checkpoint, mean ± standard deviation."
)
STOPPED = (
    " Each run was stopped, as by Ctrl-C, when the return of the second column was at the target."
)
EXPLORES = (
    " Training explores: its environments act at random at rates from 40 % down to 0.07 %, "
    "evaluations at 0.1 %. The curve is of training, the target of evaluations, minutes apart."
)


class Page(NamedTuple):
    """What a page says besides the curves."""

    table: list[str]  # lines of Markdown
    remark: str
    commands: list[str]
    commit: str


def write(name: str, curves: Curves, target: float | None, page: Page) -> None:
    """Writes the points, the picture (if there are two points) and the page.

    `target` is one of training returns, or None.
    """
    out = ROOT / "docs" / "results"
    out.mkdir(parents=True, exist_ok=True)
    fields = ("wall_s", "env_steps", "frames", "episode_return_mean", "frames_per_s", "rss_mb")
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("seed", *fields))
        for seed, lines in sorted(curves.items()):
            writer.writerows((seed, *(line.get(field) for field in fields)) for line in lines)
    title = f"{name}: mean return of the last 100 episodes"
    returns = {line.get(TRAINED) for lines in curves.values() for line in lines} - {None}
    picture = []
    if len(returns) > 1:
        (out / f"{name}.svg").write_text(curve(curves, target, title))
        picture = [f"![the curve]({name}.svg)", ""]
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"# {name}",
        "",
        *picture,
        *page.table,
        "",
        page.remark,
        f"Commit {page.commit}; {cores} cores of {cpu_name()}; points in [{name}.csv]({name}.csv). Commands:",
        "",
        "```sh",
        *page.commands,
        "```",
        "",
    ]
    (out / f"{name}.md").write_text("\n".join(lines))


def table(runs: dict[int, RunResult], score: str, target: float) -> list[str]:
    """Tells for each seed when the target was reached, and what came of it."""
    rows = []
    for seed, (_, lines, played) in sorted(runs.items()):
        last = lines[-1]
        rows.append(
            f"| {seed} | {reached(lines, score, target)} | {last['episode_return_mean']:.2f} | "
            f"{played['episode_return_mean']:.2f} ± {played['episode_return_std']:.2f} | "
            f"{played['episode_return_min']:.0f} | "
            f"{minutes(last['wall_s'])} | {last['frames'] / last['wall_s']:,.0f} |"
        )
    return [
        f"| seed | {SCORES[score]} >= {target:g} | training, at the end | evaluation | its worst game | "
        "wall-clock | frames/s |",
        "|---" * 7 + "|",
        *rows,
    ]


def head() -> str:
    """Names the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Trains, then writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("preset", nargs="?", default="pong/impala")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=18.0)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning")
    parser.add_argument(
        "--until-target", action="store_true", help="stop a run that has reached the target"
    )
    parser.add_argument(
        "--commit", default=head(), help="that trained runs which are there already"
    )
    own, overrides = split_overrides(sys.argv[1:])
    args = parser.parse_args(own)
    remark = REMARK + PLAYED + (STOPPED if args.until_target else "")
    remark += EXPLORES if explores(args.preset) else ""
    runs: dict[int, RunResult] = {}
    for seed in args.seeds:
        try:
            runs[seed] = judge(args.preset, seed, args, overrides)
        except CommandError as error:
            raise SystemExit(str(error)) from None
        commands = [run.command for run in runs.values()]
        curves = {seed: run.lines for seed, run in runs.items()}
        page = Page(table(runs, score_of(args.preset), args.target), remark, commands, args.commit)
        dashed = None if explores(args.preset) else args.target
        write(args.preset.replace("/", "-"), curves, dashed, page)
    print("\n".join(table(runs, score_of(args.preset), args.target)))


if __name__ == "__main__":
    main()
