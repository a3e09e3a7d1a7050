"""Predictions of `seedbed plan` against runs of the same configurations on this machine.

    python benchmarks/plan.py --sections predict    # calibrates, predicts and saves, about 10 minutes
    python benchmarks/plan.py --sections measure    # trains each three times and judges them, 25 minutes
    python benchmarks/plan.py --sections actors     # what --actors auto chooses against a grid, 30 minutes
    python benchmarks/plan.py --only cartpole/ppo   # some cases, the first two; nothing is saved

Commit the predictions before they are judged: a prediction is of microbenchmarks of this machine and nothing
else, and has the commit that made it. An error is the difference of environment steps a second from what
was measured, in shares of that. A run is measured from SETTLE_S after its first update on, and LOADING_S
later for each actor of Atari: loading 32 emulators takes 12 s of a core, while other actors act already.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from _training import CommandError, Watch, save_part, started
from central import BUSY
from seedbed.machine import usable_cores
from seedbed.run.lines import read_lines

RESULT = Path(__file__).parent / "results" / "plan.json"
SECTIONS = ("predict", "measure", "actors")
CHOSEN, GRID_ROUNDS, PAIRS = ("cartpole/impala", "pong/impala"), 2, 6
SETTLE_S, LOADING_S, SECONDS, STARTED_S = 5.0, 10.0, 10.0, 90.0
ROUNDS = 3  # of measurements, in which cases take turns
MEDIAN, WORST = 0.2, 0.4  # the errors that are allowed
TRAIN = ["--steps", "1e9", "--evaluate-every", "0", "--log-every-s", "0.5"]
# A run learns as soon as this is there, not after a minute.
FEW = ["--agent.min-size", "2000"]


class Case(NamedTuple):
    """A configuration."""

    words: list[str]  # of `seedbed train`
    streams: int = 0  # processes of `seedbed actor`, over TLS on loopback
    loading: int = 0  # actors of Atari


def cases() -> dict[str, Case]:
    """Returns all cases by name."""
    found: dict[str, Case] = {}
    for actors in (1, 2, 4):
        count = ["--actors", str(actors)]
        found[f"central pong/impala {actors}"] = Case(["pong/impala", *count], loading=actors)
        found[f"central cartpole/impala {actors}"] = Case(["cartpole/impala", *count])
        found[f"central CartPole-v1/dqn {actors}"] = Case(["CartPole-v1", "--agent", "dqn", *count])
    found["central pong/dqn 2"] = Case(["pong/dqn", "--actors", "2", *FEW], loading=2)
    for name in ("pong/impala", "cartpole/impala"):
        loading = int(name.startswith("pong"))
        found[f"stream {name} 1"] = Case([name, "--listen", "127.0.0.1:0"], 1, loading)
    for learners in (1, 2):
        shards = ["--parameter-shards", str(learners), "--replay-shards", str(learners)]
        count = ["--learners", str(learners), *shards]
        found[f"paramserver cartpole/gorila {learners}"] = Case(["cartpole/gorila", *count])
        few = ["pong/gorila", *count, *FEW]
        found[f"paramserver pong/gorila {learners}"] = Case(few, loading=learners)
    found["cartpole/ppo"] = Case(["cartpole/ppo"])
    # In a whole run, the two integrators take turns.
    found["ant/ppo"] = Case(["ant/ppo", "--euler-share", "0"])
    return found


def predict(case: Case) -> dict[str, Any]:
    """Returns what `seedbed plan` says, with fresh measurements."""
    command = [sys.executable, "-m", "seedbed", "plan", *case.words, "--json", "--fresh"]
    with tempfile.TemporaryDirectory() as folder:
        if case.streams:
            hosts = Path(folder) / "hosts.toml"
            lines = ["[[hosts]]", 'name = "here"', f"cores = {usable_cores()}"]
            hosts.write_text("\n".join([*lines, f"actors = {case.streams}"]))
            command += ["--hosts", str(hosts)]
        process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise CommandError(f"{' '.join(command)}\nfailed: {process.stderr[-3000:]}")
    return json.loads(process.stdout)


def measure(case: Case, seconds: float) -> dict[str, float]:
    """Trains for a while; returns rates of the steady part."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run, program = Path(folder) / "run", [sys.executable, "-m", "seedbed"]
        command = [*program, "train", *case.words, *TRAIN, "--run", str(run)]
        with contextlib.ExitStack() as stack:
            process = stack.enter_context(started(command, **quiet))
            if case.streams:
                words = ["actor", str(run), "--processes", str(case.streams)]
                while not (run / "listen" / "address.json").exists() and process.poll() is None:
                    time.sleep(0.1)
                stack.enter_context(started([*program, *words], **quiet))
            metrics, watch = run / "metrics.jsonl", Watch(process.pid)
            lines = steady(process, metrics, SETTLE_S + LOADING_S * case.loading, seconds)
            zero = metrics.stat().st_mtime - read_lines(metrics)[-1]["wall_s"]
            watch.stop()
            # Roles of a parameter server end with the run.
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
    first, last = lines[0], lines[-1]
    passed = last["wall_s"] - first["wall_s"]
    times, used = zip(*watch.cpu, strict=True)
    begun, ended = np.interp([zero + first["wall_s"], zero + last["wall_s"]], times, used)
    every = (line.get("lag_mean", line.get("cluster/staleness_mean")) for line in lines)
    lags = [lag for lag in every if lag is not None]
    return {
        "steps_per_s": (last["env_steps"] - first["env_steps"]) / passed,
        "updates_per_s": (last["learner_steps"] - first["learner_steps"]) / passed,
        "lag_mean": statistics.fmean(lags) if lags else 0.0,
        # Without the processes of `seedbed actor`.
        "cores_busy": float(ended - begun) / passed,
        "seconds": passed,
    }


def steady(process: Any, metrics: Path, settle_s: float, seconds: float) -> list[dict[str, Any]]:
    """Waits, and returns the lines of metrics from `settle_s` after the first update on."""
    begun = time.monotonic()
    while process.poll() is None:
        lines = [line for line in read_lines(metrics) if line["learner_steps"]]
        if lines:
            later = [x for x in lines if x["wall_s"] >= lines[0]["wall_s"] + settle_s]
            if later and later[-1]["wall_s"] - later[0]["wall_s"] >= seconds:
                return later
        elif time.monotonic() > begun + STARTED_S:
            raise CommandError(f"{process.args} made no update in {STARTED_S:g} s")
        time.sleep(0.2)
    raise CommandError(f"{process.args} ended with {process.returncode}:\n{process.stderr.read()}")


def swept(name: str, seconds: float) -> dict[str, Any]:
    """Returns what `--actors auto` chooses and foretells, and what runs with each number of actors do.

    Numbers take turns, forward and back. If another number is better than the chosen one, both are measured
    in PAIRS more pairs, whose median ratio counts.
    """
    words = [name, "--actors", "auto"]
    said = predict(Case(words))
    foretold = {int(n): rate for n, rate in said["actors"]["env_steps_per_s"].items()}
    chosen = said["actors"]["chosen"]
    emulates = name.startswith("pong")
    found: dict[int, list[float]] = {n: [] for n in foretold}

    def run(actors: int) -> float:
        case = Case([name, "--actors", str(actors)], loading=actors * emulates)
        found[actors].append(measure(case, seconds)["steps_per_s"])
        print(f"{name} with {actors} actors: {found[actors][-1]:,.0f} steps/s", flush=True)
        return found[actors][-1]

    for number in range(GRID_ROUNDS):
        for actors in [*found][:: -1 if number % 2 else 1]:
            run(actors)
    grid = {n: statistics.median(rates) for n, rates in found.items()}
    best = max(grid, key=lambda n: grid[n])
    ratios = [1.0]
    if best != chosen:
        ratios = []
        for number in range(PAIRS):
            pair = (chosen, best) if number % 2 else (best, chosen)
            rates = {n: run(n) for n in pair}
            ratios.append(rates[chosen] / rates[best])
    ratio = statistics.median(ratios)
    print(f"{name}: auto is {chosen}, the best is {best}; ratio {ratio:.3f}", flush=True)
    rows = {str(n): {"foretold": foretold[n], "steps_per_s": grid[n]} for n in grid}
    return {"chosen": chosen, "best": best, "ratio": ratio, "ratios": ratios, "actors": rows}


def measured(
    chosen: dict[str, Case], rows: dict[str, dict[str, Any]], seconds: float
) -> dict[str, dict[str, Any]]:
    """Trains each case once a round, forward and back, and judges medians; returns rows by name."""
    every: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for number in range(ROUNDS):
        for name in [*chosen][:: -1 if number % 2 else 1]:
            every[name].append(measure(chosen[name], seconds))
            print(f"{name:<32} {every[name][-1]['steps_per_s']:>9,.0f} steps/s", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for name, runs in every.items():
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        found[name] = judged(name, rows[name], medians)
        found[name]["every_steps_per_s"] = [run["steps_per_s"] for run in runs]
    return found


def judged(name: str, foretold: dict[str, Any], found: dict[str, float]) -> dict[str, Any]:
    """Prints and returns a case."""
    said = foretold["predicted"]
    error = said["env_steps_per_s"] / found["steps_per_s"] - 1.0
    print(
        f"{name:<32} {said['env_steps_per_s']:>9,.0f} steps/s foretold, {found['steps_per_s']:>9,.0f} "
        f"measured: {100 * error:+.0f} % ({said['updates_per_s']:.1f} and {found['updates_per_s']:.1f} "
        f"updates/s, {said['cores_busy']:.2f} and {found['cores_busy']:.2f} cores busy; "
        f"{said['saturated'] or 'nothing'} saturates)",
        flush=True,
    )
    return {**found, "error": error}


def save(name: str, part: dict[str, Any]) -> None:
    """Saves a section beside the other."""
    save_part(RESULT, name, part)


def main() -> int:
    """Predicts, measures, prints and saves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS[:2]))
    parser.add_argument("--only", nargs="+", choices=cases(), metavar="CASE", help="save nothing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a measurement")
    given = parser.parse_args()
    # Runs end with this program, also if it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if given.only and "actors" in given.sections:
        parser.error("--only is of the other sections: leave it out, or actors")
    chosen = {name: case for name, case in cases().items() if name in (given.only or cases())}
    if (load := os.getloadavg()[0]) > BUSY:
        print(f"load {load:.1f}: others use the machine, so this measures them too")
    rows: dict[str, dict[str, Any]] = {}
    try:
        if "actors" in given.sections:
            save("actors", {"rows": {name: swept(name, given.seconds) for name in CHOSEN}})
        if not {"predict", "measure"} & {*given.sections}:
            return 0
        if "predict" in given.sections:
            for name, case in chosen.items():
                rows[name] = predict(case)
                said = rows[name]["predicted"]
                print(f"{name:<32} {said['env_steps_per_s']:>9,.0f} steps/s foretold", flush=True)
            if not given.only:
                save("predictions", {"rows": rows})
        else:
            if not RESULT.exists():
                parser.error(f"{RESULT} is not there: run --sections predict first")
            rows = json.loads(RESULT.read_text())["predictions"]["rows"]
        if "measure" not in given.sections:
            return 0
        found = measured(chosen, rows, given.seconds)
    except CommandError as error:
        raise SystemExit(str(error)) from None
    errors = [abs(row["error"]) for row in found.values()]
    median, worst = statistics.median(errors), max(errors)
    print(f"errors: median {100 * median:.0f} %, worst {100 * worst:.0f} %")
    if not given.only:
        save("measurements", {"median_error": median, "worst_error": worst, "rows": found})
    return int(median > MEDIAN or worst > WORST)


if __name__ == "__main__":
    raise SystemExit(main())
