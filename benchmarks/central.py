"""Trains Pong by central inference and compares its speed with a computed bound and with a peer.

The bound is cores / (CPU-seconds per agent step), the sum of what an environment step, acting on it and
learning from it cost when each is measured alone. With --peer the same network is trained by Sample
Factory's APPO in the same run, turn about. What follows -- goes to `seedbed train`. Make its environment with
benchmarks/peers/sample_factory_setup.sh.
"""

from __future__ import annotations

import argparse
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

import numpy as np
import psutil

HERE = Path(__file__).parent
PEER_PYTHON = Path("~/.cache/seedbed/peers/sample-factory/bin/python").expanduser()
SETTLE_S = 20.0
GROUP = 16


def cpu_per_call(call, repeats: int) -> float:
    """Returns the median CPU-seconds of a call, all threads counted."""
    call()
    costs = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        costs.append(time.process_time() - start)
    return statistics.median(costs)


def environment_cost() -> float:
    """CPU-seconds of one Pong step."""
    from seedbed.envs.atari import AtariEnv

    host, rng = AtariEnv("pong").make(GROUP, 0), np.random.default_rng(0)
    host.reset()

    def steps() -> None:
        for _ in range(20):
            host.step(rng.integers(0, 6, GROUP).astype(np.int32))

    cost = cpu_per_call(steps, 25) / (20 * GROUP)
    host.close()
    return cost


def network_costs(rows: int) -> tuple[float, float]:
    """CPU-seconds per step of acting in batches of `rows` groups, and of learning."""
    import jax
    import jax.numpy as jnp

    from seedbed import presets
    from seedbed.runtime.inference import Inference
    from seedbed.runtime.learning import Learner
    from seedbed.runtime.stacking import stacked_spec
    from seedbed.types import ArraySpec, Discrete, EnvSpec, Timestep, bind

    config = presets.resolve("pong/impala")
    spec = EnvSpec(ArraySpec((84, 84), "uint8"), Discrete(6))
    agent = bind(config.agent, stacked_spec(spec, 4), 1000)
    unroll, batch = agent.experience.unroll, agent.experience.batch
    device = jax.devices()[0]
    groups = np.arange(rows * GROUP).reshape(rows, GROUP)
    acting = Inference(agent, spec, 4, device, groups, groups.size, jax.random.key(0))
    learner = Learner(agent, 4, [device], jax.random.key(0))
    state = learner.place(agent.init(jax.random.key(0)))
    acting.publish(state.params, 0)
    acting.compile(spec)
    frames = np.random.default_rng(0).integers(0, 255, (rows, GROUP, 84, 84)).astype(np.uint8)
    flag = np.zeros((rows, GROUP), bool)
    timestep = Timestep(frames, np.zeros((rows, GROUP), np.float32), flag, flag, flag)
    unrolls = []

    def act() -> None:
        acted, complete = acting.act(timestep, list(range(rows)))
        unrolls.extend(acting.take(group) for group in complete)
        np.asarray(acted.action)

    inference = cpu_per_call(act, 200) / groups.size
    while len(unrolls) * GROUP < batch:
        act()
    joined = learner.assemble(unrolls[: max(batch // GROUP, 1)])
    joined = jax.tree.map(jnp.copy, joined)
    box = [state]

    def learn() -> None:
        box[0], metrics, _ = learner.update(box[0], joined)
        jax.block_until_ready((box[0], metrics))

    return inference, cpu_per_call(learn, 25) / (unroll * joined.params_version.shape[1])


def train_ours(seconds: float, overrides: list[str]) -> dict[str, float]:
    """Runs the command for some time, interrupts it, and reads its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable, "-m", "seedbed", "train", "pong/impala", "--run", str(run),
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
            lines = read_lines(run / "metrics.jsonl")
            begun = begun or (time.monotonic() if lines else None)
            if lines:
                cpu.append((lines[-1]["wall_s"], tree_cpu(process.pid)))
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
    window = [line for line in lines if line["wall_s"] >= lines[0]["wall_s"] + SETTLE_S]
    first, last = window[0], window[-1]
    wall = last["wall_s"] - first["wall_s"]
    steps = last["env_steps"] - first["env_steps"]
    used = cpu[-1][1] - next(c for t, c in cpu if t >= first["wall_s"])
    return {
        "env_steps_per_s": steps / wall,
        "frames_per_s": (last["frames"] - first["frames"]) / wall,
        "window_s": wall,
        "cpu_seconds_per_step": used / steps,
        "lag_mean": statistics.fmean(line["lag_mean"] or 0.0 for line in window),
        "inference_rows_mean": last["inference_rows_mean"],
        "rss_mb": max(line["rss_mb"] for line in window),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the whole lines of a metrics file that is being written."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"
    ]


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


def train_peer(seconds: float, python: Path) -> dict[str, float]:
    """Runs Sample Factory's APPO on the same task."""
    if not python.exists():
        raise SystemExit(f"no {python}: make it with {HERE}/peers/sample_factory_setup.sh")
    script = HERE / "peers" / "sample_factory_pong.py"
    done = subprocess.run(
        [python, script, "--seconds", str(seconds + SETTLE_S)],
        check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads(done.stdout.strip().splitlines()[-1])


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separates a benchmark's own arguments from those for `seedbed train`, after `--`."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def median(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="of training that count, each time"
    )
    parser.add_argument("--repeats", type=int, default=1, help="times that each system trains")
    parser.add_argument("--peer", action="store_true", help="train Sample Factory too")
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "central.json")
    own, overrides = split_overrides(sys.argv[1:])
    args = parser.parse_args(own)
    cores = len(os.sched_getaffinity(0))
    environment = environment_cost()
    ours: list[dict[str, float]] = []
    peer: list[dict[str, float]] = []
    for repeat in range(args.repeats):
        ours.append(train_ours(args.seconds, overrides))
        print(f"seedbed {repeat}: {ours[-1]['frames_per_s']:,.0f} frames/s", flush=True)
        if args.peer:
            peer.append(train_peer(args.seconds, args.peer_python))
            print(f"peer {repeat}: {peer[-1]['frames_per_s']:,.0f} frames/s", flush=True)
    rows = max(1, round(median(ours, "inference_rows_mean") / GROUP))
    inference, learning = network_costs(rows)
    cost = environment + inference + learning
    result = {
        "machine": {"cpu": cpu_name(), "cores": cores, "python": platform.python_version()},
        "cost_ms": {
            "environment": environment * 1e3, "inference": inference * 1e3, "learning": learning * 1e3,
        },
        "bound_env_steps_per_s": cores / cost,
        "seedbed": ours,
        "peer": peer,
        "ratio_to_bound": median(ours, "env_steps_per_s") / (cores / cost),
    }  # fmt: skip
    if peer:
        result["ratio_to_peer"] = median(ours, "frames_per_s") / median(peer, "frames_per_s")
    print(
        f"CPU ms per step: environment {environment * 1e3:.3f}, inference {inference * 1e3:.3f} "
        f"(batches of {rows * GROUP}), learning {learning * 1e3:.3f}\n"
        f"bound on {cores} cores: {cores / cost:,.0f} env steps/s\n"
        f"seedbed: {median(ours, 'env_steps_per_s'):,.0f} env steps/s, "
        f"{median(ours, 'frames_per_s'):,.0f} frames/s, "
        f"{median(ours, 'cpu_seconds_per_step') * 1e3:.3f} CPU ms per step, "
        f"{median(ours, 'rss_mb'):,.0f} MB\n"
        f"ratio to the bound: {result['ratio_to_bound']:.3f}"
    )
    if peer:
        print(
            f"Sample Factory APPO: {median(peer, 'frames_per_s'):,.0f} frames/s\n"
            f"ratio to the peer: {result['ratio_to_peer']:.2f}"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


def cpu_name() -> str:
    """Returns the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
