"""Trains presets by central inference and compares their speed with a computed bound and with a peer.

    python benchmarks/central.py                          # pong/impala
    python benchmarks/central.py pong/r2d2 pong/dqn -- --agent.ratio 2
    python benchmarks/central.py pong/impala --peer

Every part (an environment's step, acting on it, appending it to replay and sealing it there, drawing from
replay, learning) is measured alone (_central_costs.py), for one env step. No run can be faster than the
machine's cores allow for the sum of CPU times, nor than any one thread for the sum of its parts; the lower is
the bound. With --peer the network of pong/impala, or Doom's, is trained by Sample Factory's APPO in the
same run, turn about. What follows -- goes to `seedbed train`. Make the peer's environment with
benchmarks/peers/sample_factory_setup.sh.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from _stamp import stamp
from seedbed.machine import cpu_name
from seedbed.run.lines import read_lines

HERE = Path(__file__).parent
PEER_PYTHON = Path("~/.cache/seedbed/peers/sample-factory/bin/python").expanduser()
PEERS = {"pong/impala": "pong", "doom/health_gathering_supreme/ppo": "doom"}
"""What Sample Factory trains beside a preset, with its network."""
SETTLE_S = 20.0  # after the first update
BUSY = 0.7  # load of the machine, before, above which something else takes a share of it
NEAR, PROMPT = 0.9, 0.05  # of the bound, at least; of the learner's time waiting for replay, less
THREADS = {
    "acting": ("inference", "appending"),
    "replay": ("sealing", "drawing"),
    "learner": ("learning",),
}
"""Which parts one thread of a run does one after the other."""


def costs_alone(run: Path, groups: int) -> dict[str, Any]:
    """Measures the parts of a run alone, acting on so many groups at once."""
    command = [sys.executable, HERE / "_central_costs.py", run, str(groups)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def bounds(parts: dict[str, dict[str, float]], cores: int) -> dict[str, float]:
    """Env steps a second that the cores allow, and each thread that a run has."""
    found = {"cores": 1e3 * cores / sum(part["cpu_ms"] for part in parts.values())}
    for thread, names in THREADS.items():
        wall = sum(parts[name]["wall_ms"] for name in names if name in parts)
        if wall:
            found[thread] = 1e3 / wall
    return found


def train_ours(preset: str, seconds: float, overrides: list[str]) -> dict[str, Any]:
    """Runs the command for some time, interrupts it, reads its metrics, and measures its parts."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable, "-m", "seedbed", "train", preset, "--run", str(run),
            "--steps", "1000000000", "--central.evaluate-every", "0", "--central.log-every-s", "2",
            *overrides,
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        lines: list[dict[str, Any]] = []
        cpu: list[tuple[float, float]] = []
        begun = None
        while begun is None or time.monotonic() < begun + SETTLE_S + seconds:
            time.sleep(0.5)
            if process.poll() is not None:
                raise SystemExit(f"training failed:\n{process.stderr.read().decode()}")  # type: ignore[union-attr]
            lines = learned_lines(run)
            begun = begun or (time.monotonic() if lines else None)
            if lines:
                cpu.append((lines[-1]["wall_s"], tree_cpu(process.pid)))
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
        window = [line for line in lines if line["wall_s"] >= lines[0]["wall_s"] + SETTLE_S]
        first, last = window[0]["wall_s"], window[-1]["wall_s"]
        used = cpu[-1][1] - next(spent for wall, spent in cpu if wall >= first)
        found = summary(window) | {"cpu_ms_per_step": 1e3 * used / steps_of(window)}
        actors = json.loads((run / "config.json").read_text())["central"]
        size = actors["envs_per_actor"] // 2
        alone = costs_alone(run, max(1, round(found["inference_rows_mean"] / size)))
    limits = bounds(alone["parts"], len(os.sched_getaffinity(0)))
    cpu_ms = sum(part["cpu_ms"] for part in alone["parts"].values())
    return found | {
        "window_s": last - first,
        "alone": alone,
        "alone_cpu_ms_per_step": cpu_ms,
        "bounds_env_steps_per_s": limits,
        "ratio_to_bound": found["env_steps_per_s"] / min(limits.values()),
        "ratio_of_cpu": cpu_ms / found["cpu_ms_per_step"],
    }


def learned_lines(run: Path) -> list[dict[str, Any]]:
    """Reads the metrics of a run since it began to learn."""
    return [line for line in read_lines(run / "metrics.jsonl") if line["learner_steps"]]


def steps_of(window: list[dict[str, Any]]) -> int:
    return window[-1]["env_steps"] - window[0]["env_steps"]


def summary(window: list[dict[str, Any]]) -> dict[str, float]:
    """Rates and shares of a run between the first line and the last."""
    first, last = window[0], window[-1]
    seconds = [after["wall_s"] - before["wall_s"] for before, after in itertools.pairwise(window)]

    def rate(name: str) -> float:
        return (last[name] - first[name]) / sum(seconds)

    def mean(name: str) -> float:
        """Averages what a line tells of the time since the line before it."""
        return statistics.fmean((line.get(name, 0.0) for line in window[1:]), seconds)

    found = {
        "env_steps_per_s": rate("env_steps"),
        "frames_per_s": rate("frames"),
        "updates_per_env_step": rate("learner_steps") / rate("env_steps"),
        "learner_waiting": mean("learner_waiting_share"),
        "acting_blocked": mean("inference_blocked_share"),
        "inference_rows_mean": mean("inference_rows_mean"),
        "rss_mb": max(line["rss_mb"] for line in window),
    }
    if "lag_mean" in last:
        return found | {"lag_mean": statistics.fmean(line.get("lag_mean", 0.0) for line in window)}
    short = mean("replay/short_share")
    return found | {
        "learner_waiting_for_steps": short,
        "learner_waiting_for_replay": found["learner_waiting"] - short,
        "replay_busy": mean("replay/busy_share"),
        "bytes_per_frame": last["replay/bytes_per_frame"],
    }


def tree_cpu(pid: int) -> float:
    """CPU-seconds of a process and its living descendants."""
    process = psutil.Process(pid)
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        try:
            total += sum(each.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def train_peer(world: str, seconds: float, python: Path) -> dict[str, float]:
    """Runs Sample Factory's APPO on the same task."""
    if not python.exists():
        raise SystemExit(f"no {python}: make it with {HERE}/peers/sample_factory_setup.sh")
    script = HERE / "peers" / "sample_factory_runs.py"
    done = subprocess.run(
        [python, script, world, "--seconds", str(seconds + SETTLE_S)],
        check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separates a benchmark's own arguments from those for `seedbed train`, after `--`."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def median(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def met(yes: bool) -> str:
    return "met" if yes else "MISSED"


def tell(preset: str, row: dict[str, Any]) -> None:
    """Prints what a training of a preset took, beside its bound."""
    limits, parts = row["bounds_env_steps_per_s"], row["alone"]["parts"]
    least = min(limits, key=limits.__getitem__)
    print(
        f"{preset}: {row['env_steps_per_s']:,.0f} env steps/s, {row['frames_per_s']:,.0f} frames/s, "
        f"{row['updates_per_env_step']:.4f} updates a step, {row['rss_mb']:,.0f} MB\n"
        "  alone, ms a step, CPU (wall): "
        + ", ".join(f"{n} {c['cpu_ms']:.3f} ({c['wall_ms']:.3f})" for n, c in parts.items())
        + "\n  bounds, env steps/s: "
        + ", ".join(f"{name} {limit:,.0f}" for name, limit in limits.items())
        + f"\n  {row['ratio_to_bound']:.3f} of the bound ({least}); target {NEAR:g}: "
        f"{met(row['ratio_to_bound'] >= NEAR)}\n"
        f"  {row['alone_cpu_ms_per_step']:.3f} CPU ms a step alone, {row['cpu_ms_per_step']:.3f} in "
        f"training: {row['ratio_of_cpu']:.3f}"
    )
    if "replay_busy" in row:
        waiting = row["learner_waiting_for_replay"]
        print(
            f"  the learner waits {waiting:.1%} of its time for replay (target less than {PROMPT:.0%}: "
            f"{met(waiting < PROMPT)}), {row['learner_waiting_for_steps']:.1%} for steps; acting waits "
            f"{row['acting_blocked']:.1%} for the learner; replay's thread is busy {row['replay_busy']:.1%}"
        )
    sys.stdout.flush()


def compare(preset: str, args: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Trains a preset, turn about with the peer if there is one; prints and returns the figures."""
    ours, peer = [], []
    for _ in range(args.repeats):
        ours.append(train_ours(preset, args.seconds, overrides))
        tell(preset, ours[-1])
        if args.peer and preset in PEERS:
            peer.append(train_peer(PEERS[preset], args.seconds, args.peer_python))
            print(f"  Sample Factory APPO: {peer[-1]['frames_per_s']:,.0f} frames/s", flush=True)
    result: dict[str, Any] = {
        "overrides": overrides,
        "ratio_to_bound": median(ours, "ratio_to_bound"),
        "ratio_of_cpu": median(ours, "ratio_of_cpu"),
        "seedbed": ours,
    }
    if peer:
        ratio = median(ours, "frames_per_s") / median(peer, "frames_per_s")
        result |= {"peer": peer, "ratio_to_peer": ratio}
        print(f"  ratio to the peer: {ratio:.2f}")
    return result


def main() -> None:
    """Measures, prints and saves the figures of each preset and its overrides beside those of others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "presets", nargs="*", default=["pong/impala"], help="what to train, in turn"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="of training that count, each time"
    )
    parser.add_argument("--repeats", type=int, default=1, help="times that each system trains")
    parser.add_argument(
        "--peer", action="store_true", help=f"train {' and '.join(PEERS)} by Sample Factory, too"
    )
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "central.json")
    own, overrides = split_overrides(sys.argv[1:])
    args = parser.parse_args(own)
    if args.peer and not set(args.presets) & set(PEERS):
        parser.error(f"--peer goes with {' and '.join(PEERS)}, not with {', '.join(args.presets)}")
    machine = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }
    if machine["load_before"] > BUSY:
        print(
            f"load {machine['load_before']:.1f}: others use the machine, so this measures them too"
        )
    for preset in args.presets:
        result = {"machine": machine, "stamp": stamp()} | compare(preset, args, overrides)
        saved = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        name = " ".join([preset, *overrides])
        args.out.write_text(json.dumps(saved | {name: result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
