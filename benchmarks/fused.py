"""Trains presets of the fused runtime from the command line, and plays them in Gymnasium's own tasks.

    python benchmarks/fused.py                          # every preset that has a target, five seeds each
    python benchmarks/fused.py ant/ppo --cold --peers
    python benchmarks/fused.py ant/ppo --seeds 0 --peers

Each seed is the real command in a fresh process, with the whole machine and a warm cache; seconds count from
the command's start. A policy then plays 40 episodes in Gymnasium's v5 task, MuJoCo's C code, and 40 in ours.
--cold runs with empty caches beside it, --peers Brax's PPO and Stable-Baselines3's (Ant only), turn about;
make their environments with benchmarks/peers/brax_setup.sh and sb3_setup.sh. What follows -- goes to `seedbed
train`; then nothing is saved unless --out says where. Rows are saved as they come, curves to docs/results.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import learning
from _judging import EPISODES, apart, gap, physics, play, returned
from _peers import PEERS, gradients, gymnasium_id, peer_commands
from _stamp import stamp
from _training import CommandError, empty_caches, first_step, output, run_training
from central import split_overrides
from seedbed.run.lines import read_lines
from seedbed.types import SeedbedError

HERE = Path(__file__).parent
RESULT = HERE / "results" / "fused.json"
STARTS, ROUNDS = 3, 2
GAP, ERRORS = (
    5.0,
    3.0,
)  # a seed's gap may be above one of them: % of the larger, and standard errors
COLD_S, FIRST_COLD_S, FIRST_WARM_S, PEAK_MB = 15.0, 20.0, 6.0, 2000.0  # at most
BRAX, SB3 = 15.0, 20.0  # times their throughput, at least


class Target(NamedTuple):
    """What the median of the seeds is to reach, and the worst of them."""

    score: float  # in Gymnasium's task
    seconds: float
    note: str = ""
    worst: float = 0.0  # besides: no seed has less than half of a positive median


TARGETS = {
    "ant/ppo": Target(4000, 90, "stretch 60 s, bar 150 s", worst=3900),
    "half_cheetah/ppo": Target(5000, 120),
    "hopper/ppo": Target(2500, 90),
    "walker2d/ppo": Target(3500, 150),
    "humanoid/ppo": Target(5000, 600),
    "reacher/ppo": Target(-5, 60),
    "inverted_pendulum/ppo": Target(1000, 20),
    "inverted_double_pendulum/ppo": Target(9000, 20),
    "inverted_double_pendulum/apg": Target(9000, 20),
    "pendulum/apg": Target(-200, 20),
    "cartpole/ppo": Target(500, 8),
    "cartpole/dqn": Target(475, 90),
    "half_cheetah/sac": Target(4000, 1800),
    "half_cheetah/ars": Target(3430, 60),  # Mania et al. (2018), in 1.7 million steps
    "half_cheetah/es": Target(2386, 120),  # Salimans et al. (2017), in 2.9 million steps
}


def train_command(preset: str, seed: int, overrides: list[str]) -> list[str]:
    """What a person types, but for the folder."""
    return ["seedbed", "train", preset, "--seed", str(seed), *overrides]


def spread(values: list[float], digits: int = 0) -> str:
    """Writes median, minimum and maximum."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def save(out: Path | None, preset: str, part: str, figures: dict[str, Any]) -> None:
    """Puts a part of a preset's row (learning, cold or peers) in the place of the former one."""
    if out is None:
        return
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    row = next((row for row in rows if row["preset"] == preset), {"preset": preset})
    rows = [each for each in rows if each["preset"] != preset] + [row | {part: figures}]
    rows.sort(key=lambda each: list(TARGETS).index(each["preset"]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def learn(preset: str, args: argparse.Namespace, folder: Path) -> None:
    """Trains and plays every seed, saving after each; draws the curves."""
    task, runs, curves = gymnasium_id(preset), [], {}
    commands = [train_command(preset, seed, args.overrides) for seed in range(args.seeds)]
    print(f"{preset}: warming the caches", flush=True)
    run_training([*commands[0], "--steps", "1"], folder / "warm")  # the evaluation's programs too
    first_step(commands[0])
    for seed, command in enumerate(commands):
        print(f"  {' '.join(command)}", flush=True)
        run = folder / f"seed-{seed}"
        took = run_training(command, run)
        theirs, ours = play(run, task), play(run, None)
        curves[seed] = read_lines(run / "metrics.jsonl")
        row = {"seed": seed, "command": " ".join(command), **took, **gap(theirs, ours)}
        runs.append(row | {"gymnasium": theirs, "ours": ours})
        print(
            f"  seed {seed}: {task} {returned(theirs)}, ours {returned(ours)} ({apart(row)} apart) "
            f"after {took['wall_s']:.1f} s (last step {took['last_step_s']:.1f} s), "
            f"{took['cpu_s']:.0f} CPU s, {took['peak_mb']:.0f} MB, "
            f"{took['env_steps_per_s']:,.0f} env steps/s",
            flush=True,
        )
        figures = {"summary": summary(runs), "physics": physics(run), "runs": runs}
        save(args.out, preset, "learning", {**stamp(), **figures})
        if args.out == RESULT:
            draw(preset, curves, runs, figures["physics"])
    print(f"{preset}: {physics(run)}")
    tell(preset, runs)


def draw(
    preset: str,
    curves: dict[int, list[dict[str, Any]]],
    runs: list[dict[str, Any]],
    integrators: str,
) -> None:
    """Writes the page of a preset into docs/results."""
    target, found = TARGETS[preset].score, summary(runs)
    rows = [
        f"| {run['seed']} | {returned(run['gymnasium'])} | {run['gymnasium']['min']:,.0f} | "
        f"{returned(run['ours'])} | {apart(run)} | {run['wall_s']:.1f} s | "
        f"{run['env_steps']:,} | {run['env_steps_per_s']:,.0f} |"
        for run in runs
    ]
    rows.append(
        f"| median | {found['gymnasium']:,.1f} | | {found['ours']:,.1f} | {found['gap_percent']:.1f} % | "
        f"{found['wall_s']:.1f} s | | {found['env_steps_per_s']:,.0f} |"
    )
    rows.append(
        f"| worst | {found['worst_gymnasium']:,.1f} | | {found['worst_ours']:,.1f} | "
        f"{found['worst_gap_percent']:.1f} % | {max(run['wall_s'] for run in runs):.1f} s | | |"
    )
    head = (
        "| seed | return in Gymnasium's task | its worst episode | return in ours | gap | "
        "wall-clock | env steps | env steps/s |"
    )
    remark = (
        f"Returns are means of {EPISODES} episodes with the newest checkpoint ± their standard error, "
        "without noise; the curve is of training, with it. A gap is in % of the larger mean, and in standard "
        f"errors of the difference. {integrators} Wall-clock is the whole command, from a warm cache, with "
        "its own evaluation at the end."
    )
    page = learning.Page(
        [head, "|---" * 8 + "|", *rows], remark, [run["command"] for run in runs], stamp()["commit"]
    )
    learning.write(preset.replace("/", "-"), curves, target, page)


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the medians of a preset's figures, and the worst of those that must not be bad."""
    theirs = [run["gymnasium"]["mean"] for run in runs]
    ours = [run["ours"]["mean"] for run in runs]
    names = ("wall_s", "last_step_s", "env_steps_per_s", "cpu_s", "peak_mb", "gap_percent")
    return {
        "gymnasium": statistics.median(theirs),
        "worst_gymnasium": min(theirs),
        "ours": statistics.median(ours),
        "worst_ours": min(ours),
        **{name: statistics.median(run[name] for run in runs) for name in names},
        "worst_gap_percent": max(run["gap_percent"] for run in runs),
    }


def tell(preset: str, runs: list[dict[str, Any]]) -> None:
    """Prints the figures of a preset beside its target."""
    target, found = TARGETS[preset], summary(runs)
    peak = max(run["peak_mb"] for run in runs)
    note = f"; {target.note}" if target.note else ""
    least = max(target.worst, 0.5 * found["gymnasium"])
    worst = f"; worst, target {least:,.0f}: {met(found['worst_gymnasium'] >= least)}"
    wide = [
        run["seed"]
        for run in runs
        if run["gap_percent"] > GAP and run["gap_standard_errors"] > ERRORS
    ]

    def of(name: str, digits: int = 1) -> str:
        values = [run[name] for run in runs]
        return spread([x["mean"] if isinstance(x, dict) else x for x in values], digits)

    print(
        f"{preset}: median of {len(runs)} seeds (minimum to maximum)\n"
        f"  return in Gymnasium  {of('gymnasium')}; target {target.score:,.0f}: "
        f"{met(found['gymnasium'] >= target.score)}{worst if least > 0 else ''}\n"
        f"  return in ours       {of('ours')}\n"
        f"  gap of a seed        {of('gap_percent')} % of the larger, {of('gap_standard_errors')} standard "
        f"errors; target: no seed above both {GAP:g} % and {ERRORS:g}: {met(not wide)}"
        f"{f' by {wide}' if wide else ''}\n"
        f"  wall-clock           {of('wall_s')} s; target {target.seconds:g} s{note}: "
        f"{met(found['wall_s'] <= target.seconds)}\n"
        f"  to the last step     {of('last_step_s')} s\n"
        f"  env steps/s          {of('env_steps_per_s', 0)}\n"
        f"  CPU seconds          {of('cpu_s', 0)}\n"
        f"  peak memory          {of('peak_mb', 0)} MB; target {PEAK_MB:,.0f} MB: {met(peak < PEAK_MB)}",
        flush=True,
    )


def met(reached: bool) -> str:
    """Says whether a target is met."""
    return "met" if reached else "MISSED"


def cold(preset: str, args: argparse.Namespace, folder: Path) -> None:
    """Compares empty caches with warm ones: a whole run each, and starts turn about."""
    command = train_command(preset, 0, args.overrides)
    print(f"{preset}: a whole run with empty caches, then one with warm ones", flush=True)
    with empty_caches() as environment:
        whole = run_training(command, folder / "cold", environment)["wall_s"]
    warm = run_training(command, folder / "cold-beside", None)["wall_s"]
    firsts: dict[str, list[float]] = {"cold": [], "warm": []}
    figures = {"cold_wall_s": whole, "warm_wall_s": warm, "first_step_s": firsts}
    for _ in range(STARTS):
        with empty_caches() as environment:
            firsts["cold"].append(first_step(command, environment))
        firsts["warm"].append(first_step(command))
        print(f"  first step: cold {firsts['cold'][-1]:.1f} s, warm {firsts['warm'][-1]:.1f} s")
        save(args.out, preset, "cold", {**stamp(), **figures})
    median = {kind: statistics.median(values) for kind, values in firsts.items()}
    print(
        f"{preset}: a cold cache adds {whole - warm:.1f} s ({whole:.1f} s, warm {warm:.1f} s); target "
        f"{COLD_S:g} s: {met(whole - warm <= COLD_S)}\n"
        f"  first learner step, cold  {spread(firsts['cold'], 1)} s; target {FIRST_COLD_S:g} s: "
        f"{met(median['cold'] <= FIRST_COLD_S)}\n"
        f"  first learner step, warm  {spread(firsts['warm'], 1)} s; target {FIRST_WARM_S:g} s: "
        f"{met(median['warm'] <= FIRST_WARM_S)}",
        flush=True,
    )


def peers(preset: str, args: argparse.Namespace, folder: Path) -> None:
    """Measures training throughput, ours and theirs, turn about."""
    rows: dict[str, list[dict[str, Any]]] = {"seedbed": []}
    # The peers step the integrator that the file names, from the first step to the last.
    command = train_command(preset, 0, [*args.overrides, "--euler-share", "0"])
    ratios: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        run = folder / f"peers-{turn}"
        rows["seedbed"].append(run_training(command, run) | gradients(run))
        ours = rows["seedbed"][-1]["env_steps_per_s"]
        print(f"  round {turn}: seedbed {ours:,.0f} env steps/s", flush=True)
        for name, other in peer_commands(preset, run).items():
            found = output(other, {**os.environ, "JAX_PLATFORMS": "cpu"})
            rows.setdefault(name, []).append(found)
            ratios.setdefault(name, []).append(ours / found["env_steps_per_s"])
            print(
                f"  round {turn}: {name} {found['env_steps_per_s']:,.0f} env steps/s, "
                f"{found['cpu_seconds'] / found['window_s']:.2f} cores: ours {ratios[name][-1]:.1f} x",
                flush=True,
            )
            save(args.out, preset, "peers", {**stamp(), "rounds": rows, "ratios": ratios})
    wanted = {"brax": BRAX, "sb3": SB3}
    for name, values in ratios.items():
        reached = met(statistics.median(values) >= wanted.get(name, 0.0))
        target = f"; target {wanted[name]:g}: {reached}" if name in wanted else ""
        theirs, mine = (
            f"{row['gradient_steps']:,} gradient steps per {row['rows']:,} rows"
            for row in (rows[name][0], rows["seedbed"][0])
        )
        print(
            f"{preset}: {spread(values, 1)} x {name}{target}; it makes {theirs}, ours {mine}",
            flush=True,
        )


def measure(preset: str, args: argparse.Namespace) -> None:
    """Does what was asked for with one preset; raises CommandError."""
    with tempfile.TemporaryDirectory(prefix="seedbed-fused-", ignore_cleanup_errors=True) as folder:
        if args.seeds:
            learn(preset, args, Path(folder))
        if args.cold:
            cold(preset, args, Path(folder))
        if args.peers and preset == "ant/ppo":
            peers(preset, args, Path(folder))


def main() -> None:
    """Measures what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*", metavar="PRESET", default=list(TARGETS))
    parser.add_argument("--seeds", type=int, default=5, help="how many; 0: only --cold, --peers")
    parser.add_argument("--cold", action="store_true", help="empty caches too")
    parser.add_argument(
        "--peers", action="store_true", help="Brax and Stable-Baselines3 too (ant/ppo)"
    )
    parser.add_argument("--out", type=Path, help=f"default: {RESULT.relative_to(HERE.parent)}")
    own, overrides = split_overrides(sys.argv[1:])
    args = parser.parse_args(own, argparse.Namespace(overrides=overrides))
    for preset in args.presets:
        if preset not in TARGETS:
            parser.error(f"{preset} has no target; {', '.join(TARGETS)} have")
    if args.peers and "ant/ppo" not in args.presets:
        parser.error("--peers compares ant/ppo: name it")
    for venv, script in (("brax", "brax_setup.sh"), ("sb3", "sb3_setup.sh")):
        if args.peers and not (PEERS / venv / "bin" / "python").exists():
            parser.error(f"no {PEERS / venv}: make it with {HERE}/peers/{script}")
    if args.out is None and not overrides:
        args.out = RESULT
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    failed = []
    try:
        for preset in args.presets:
            try:
                measure(preset, args)
            except (CommandError, SeedbedError) as error:
                print(f"{preset}: {error}", file=sys.stderr, flush=True)
                failed.append(preset)
    except KeyboardInterrupt:
        where = f"what was measured is in {args.out}" if args.out else "nothing was to be saved"
        raise SystemExit(f"interrupted; {where}") from None
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
