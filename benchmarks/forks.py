"""Goes on from one checkpoint of a run in float32 and in bfloat16, several times each, in turns.

Seeds differ more than precisions do. Forks of one checkpoint have learned the same until then, and differ
by their precision and by chance: by how threads take turns, and by the seeds of their environments. The
first fork of each precision has the run's own seed, the next ones those after it.
Prints how many frames each fork took to the target, the medians, and how often chance alone would order
forks as unevenly (Mann-Whitney). Forks that are there already are not trained again.

    python benchmarks/forks.py runs/pong-impala-0 --step 1000369
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

from scipy.stats import mannwhitneyu

from _training import CommandError
from learning import TRAINED, train
from seedbed.files import write_json
from seedbed.machine import cpu_name
from seedbed.run.folder import CONFIG, HISTORY, METRICS
from seedbed.run.lines import read_lines

ROOT = Path(__file__).parent
RESULT = ROOT / "results" / "forks.json"
DTYPES = ("float32", "bfloat16")


def fork(run: Path, step: int, into: Path, dtype: str, repeat: int) -> None:
    """Copies what a run was at one of its checkpoints, with another compute dtype and seed."""
    checkpoint = Path("checkpoints") / f"{step:012d}"
    config = json.loads((run / CONFIG).read_text())
    config["agent"]["compute_dtype"] = dtype
    config["central"]["seed"] += repeat
    shutil.copytree(run / checkpoint, into / checkpoint)
    shutil.copy(run / HISTORY, into)
    lines = (line for line in read_lines(run / METRICS) if line["env_steps"] <= step)
    (into / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    # last, as a folder with it is gone on with
    write_json(into / CONFIG, config)


def frames_to(target: float, lines: list[dict[str, Any]], step: int) -> int | None:
    """Returns the frames after the checkpoint until the mean return reached the target; None if never."""
    for line in lines:
        score = line.get(TRAINED)
        if line["env_steps"] > step and score is not None and score >= target:
            return line["frames"] - step * (line["frames"] // line["env_steps"])
    return None


def compared(frames: dict[str, list[int | None]]) -> dict[str, Any]:
    """Returns the medians (None: not reached), and the probability of orders as uneven by chance."""
    late = {name: [math.inf if x is None else x for x in found] for name, found in frames.items()}
    medians = {name: statistics.median(found) for name, found in late.items()}
    return {
        "medians": {name: x if math.isfinite(x) else None for name, x in medians.items()},
        "p": float(mannwhitneyu(*late.values()).pvalue),
    }


def save(row: dict[str, Any]) -> None:
    """Puts a row in the place of a former one of the same checkpoint, target and machine."""
    same = ("run", "step", "target", "cpu")
    old = json.loads(RESULT.read_text()) if RESULT.exists() else []
    kept = [other for other in old if any(other[key] != row[key] for key in same)]
    write_json(RESULT, [*kept, row])


def refusal(args: argparse.Namespace) -> str | None:
    """Returns what is wrong with the arguments, if anything."""
    if args.repeats < 1:
        return f"--repeats {args.repeats} must be 1 or more"
    if not math.isfinite(args.target):
        return f"--target {args.target} must be a number"
    config = args.run / CONFIG
    if not config.exists() or "central" not in json.loads(config.read_text()):
        return f"{args.run} is not the folder of a run with central inference"
    checkpoints = args.run / "checkpoints"
    if not (checkpoints / f"{args.step:012d}").is_dir():
        there = ", ".join(str(int(p.name)) for p in sorted(checkpoints.glob("[0-9]*"))) or "none"
        return f"{args.run} has no checkpoint of step {args.step}; it has {there}"
    lines = (line for line in read_lines(args.run / METRICS) if line["env_steps"] <= args.step)
    score = max((line[TRAINED] for line in lines if TRAINED in line), default=-math.inf)
    if score >= args.target:
        return f"the run had a return of {score:g} before step {args.step}; take a higher --target"
    return None


def frames_of(args: argparse.Namespace, dtype: str, repeat: int) -> int | None:
    """Trains a fork, unless that is done; returns the frames it took, None if the run's were too few."""
    name = f"{args.run.name}-{args.step}-{dtype}-{repeat}-to-{args.target:g}"
    into = args.forks / name
    done = into / "forked.json"
    if not done.exists():
        if not (into / CONFIG).exists():
            shutil.rmtree(into, ignore_errors=True)
            fork(args.run, args.step, into, dtype, repeat)
        train(["seedbed", "train"], into, TRAINED, args.target)
        lines = read_lines(into / METRICS)
        write_json(done, {"frames": frames_to(args.target, lines, args.step)})
    return json.loads(done.read_text())["frames"]


def main() -> None:
    """Trains, prints and saves JSON after each pair."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run with a compute dtype")
    parser.add_argument("--step", type=int, required=True, help="of the checkpoint to go on from")
    parser.add_argument("--repeats", type=int, default=4, help="forks of each precision")
    parser.add_argument("--target", type=float, default=18.0, help="mean training return")
    parser.add_argument("--forks", type=Path, default=ROOT.parent / "runs" / "forks")
    args = parser.parse_args()
    if wrong := refusal(args):
        parser.error(wrong)
    frames: dict[str, list[int | None]] = {dtype: [] for dtype in DTYPES}
    for repeat in range(args.repeats):
        for dtype, found in frames.items():
            found.append(frames_of(args, dtype, repeat))
            taken = "not within the run's" if found[-1] is None else f"{found[-1]:,}"
            print(f"{dtype:9} {taken} frames to a return of {args.target:g}", flush=True)
        row = {"run": args.run.name, "step": args.step, "target": args.target, "cpu": cpu_name()}
        save(row | {"frames": frames} | compared(frames))
    print(json.dumps(compared(frames)))


if __name__ == "__main__":
    try:
        main()
    except CommandError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted: the same command goes on") from None
