"""What the data plane costs: Pong through the actor pool against ALE's vector environment alone.

The learner is an echo: it answers with random actions at once. Both sides step the same number of
emulators in processes of one emulator thread each, in turns, so that a busy machine disturbs both
alike. A second part steps an environment that costs nothing, which leaves the messages themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np

from _stamp import write_result
from seedbed.actors.local import local_pool
from seedbed.actors.process import Launcher
from seedbed.envs.host.atari import FRAME_SKIP, SIZE, AtariEnv
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.envs.host.gym import FactoryEnv
from seedbed.run.metrics import processes_rss
from seedbed.run.options import GROUPS

RESULT = Path(__file__).parent / "results" / "data_plane.json"
DIRECT = """
import json, sys, time
import numpy as np
from ale_py.vector_env import AtariVectorEnv
n, seconds, seed = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
env = AtariVectorEnv("pong", n, num_threads=1, stack_num=1, reward_clipping=False)
env.reset(seed=seed)
rng = np.random.default_rng(seed)
print("ready", flush=True)
sys.stdin.readline()
steps, cpu, start = 0, time.process_time(), time.monotonic()
while time.monotonic() < start + seconds:
    env.step(rng.integers(0, 6, n, dtype=np.int32))
    steps += n
wall, cpu = time.monotonic() - start, time.process_time() - cpu
print(json.dumps({"steps": steps, "rate": steps / wall, "cpu_us": 1e6 * cpu / steps}))
"""


class Still(gymnasium.Env):
    """Does nothing at all."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(6)
        self._frame = np.zeros((SIZE, SIZE), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        return self._frame, {}

    def step(self, action: int) -> tuple:
        return self._frame, 0.0, False, False, {}


def echo(env: HostEnvConfig, actors: int, envs_per_actor: int, seconds: float) -> dict[str, float]:
    """Steps a pool with random actions for a while."""
    rng = np.random.default_rng(0)
    launcher = Launcher(env=env, envs_per_group=envs_per_actor // GROUPS, groups=GROUPS, seed=0)
    with local_pool(launcher, actors=actors) as pool:
        assert pool.spec
        size = pool.group_size
        staging = np.zeros((size, SIZE, SIZE), np.uint8)

        def turn() -> int:
            ready = pool.poll(1.0)
            for group in ready:
                slot = pool.slots[group]
                np.copyto(staging, slot.timestep.observation)
                slot.action[...] = rng.integers(0, 6, size, dtype=np.int32)
                pool.reply(group)
            return len(ready)

        while min(slot.step for slot in pool.slots) < 5:  # all groups are built
            turn()
        cpu, mine = pool.cpu_seconds(), time.process_time()
        messages, start = 0, time.monotonic()
        while time.monotonic() < start + seconds:
            messages += turn()
        wall, mine = time.monotonic() - start, time.process_time() - mine
        cpu = pool.cpu_seconds() - cpu
        rss = processes_rss(pool.pids()) / actors
    return {
        "rate": messages * size / wall,
        "actor_cpu_us_per_step": 1e6 * cpu / (messages * size),
        "actor_cpu_us_per_message": 1e6 * cpu / messages,
        "learner_cpu_us_per_message": 1e6 * mine / messages,
        "learner_cpu_us_per_step": 1e6 * mine / (messages * size),
        "actor_rss_mb": rss,
    }


def direct(processes: int, num_envs: int, seconds: float) -> dict[str, float]:
    """Steps ALE's vector environment in as many processes, without any transport."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", DIRECT, str(num_envs), str(seconds), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(processes)
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    results = []
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        output, _ = process.communicate()
        results.append(json.loads(output))
    return {
        "rate": sum(result["rate"] for result in results),
        "actor_cpu_us_per_step": statistics.mean(result["cpu_us"] for result in results),
    }


def still_host_cpu_us(num_envs: int, steps: int = 3000) -> float:
    """CPU per step of the still environments stepped in this process: what is not transport."""
    host = FactoryEnv(f"{Path(__file__).stem}:Still").make(num_envs, 0)
    host.reset()
    action, start = np.zeros(num_envs, np.int32), time.process_time()
    for _ in range(steps):
        host.step(action)
    return 1e6 * (time.process_time() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--envs-per-actor", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # so that actors find Still
    shape = (options.actors, options.envs_per_actor)
    rounds = []
    for _ in range(options.rounds):
        pool = echo(AtariEnv("pong"), *shape, options.seconds)
        alone = direct(*shape, options.seconds)
        cost = pool["actor_cpu_us_per_step"] + pool["learner_cpu_us_per_step"]
        rounds.append(
            {
                "pool": pool,
                "direct": alone,
                "ratio": pool["rate"] / alone["rate"],
                "cpu_ratio": alone["actor_cpu_us_per_step"] / cost,  # unmoved by a busy machine
            }
        )
        print(json.dumps(rounds[-1]), flush=True)
    messages = {}
    for group_size in (1, 8, 32):
        still = echo(FactoryEnv(f"{Path(__file__).stem}:Still"), 1, 2 * group_size, 3.0)
        still["host_cpu_us_per_message"] = still_host_cpu_us(group_size)
        messages[str(group_size)] = still
        print(group_size, json.dumps(still), flush=True)
    best = max(rounds, key=lambda each: each["pool"]["rate"])
    result = {
        "command": "python benchmarks/data_plane.py",
        "actors": options.actors,
        "envs_per_actor": options.envs_per_actor,
        "machine": {"cores": os.cpu_count(), "cpu": _cpu(), "python": platform.python_version()},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average": os.getloadavg(),
        "frames_per_step": FRAME_SKIP,
        "median_ratio": statistics.median(each["ratio"] for each in rounds),
        "median_cpu_ratio": statistics.median(each["cpu_ratio"] for each in rounds),
        "best_env_steps_per_s": best["pool"]["rate"],
        "rounds": rounds,
        "still_by_group_size": messages,
    }
    RESULT.parent.mkdir(exist_ok=True)
    write_result(RESULT, result)
    print(
        f"Pong through the pool: {result['median_ratio']:.3f} of the rate of ALE alone, "
        f"{result['median_cpu_ratio']:.3f} by CPU time (medians)"
    )


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
