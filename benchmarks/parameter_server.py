"""Round trips of a gradient and parameters through parameter shards, a second; the optimizer is applied.

    python benchmarks/parameter_server.py             # shared memory and TLS in turns
    python benchmarks/parameter_server.py --quick     # for a moment; nothing is saved

A round trip pushes the gradient of DQN with the network of Mnih et al. (2015), 1.7 million float32, to two
shards, which apply it with Adam, and pulls the parameters and what targets need. One learner waits for each
round trip; its gradients are made before. What one core needs to copy the same bytes is measured in turns
with it. Over TLS, the shards are on this machine, too, but share no memory; there is no network. For two
cores, run it with `taskset -c 0,1`.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from _stamp import write_result
from seedbed.agents.dqn import Dqn
from seedbed.envs.host.atari import AtariEnv
from seedbed.machine import cpu_name, usable_cores
from seedbed.plan import round_trips
from seedbed.plan.round_trips import Server
from seedbed.run.stacking import stacked_spec
from seedbed.types import ArraySpec, Discrete, EnvSpec, bind

RESULT = Path(__file__).parent / "results" / "parameter_server.json"
SHARDS = 2
TARGET, GOAL, TLS_TARGET = 100.0, 150.0, 15.0  # round trips a second


@contextlib.contextmanager
def serving(tls: bool) -> Iterator[Server]:
    """Starts shards for DQN with the network of the paper."""
    env, spec = AtariEnv("pong"), EnvSpec(ArraySpec((84, 84), "uint8"), Discrete(6))
    agent = bind(Dqn(torso="nature"), stacked_spec(spec, env.frame_stack))
    with round_trips.serving(env, agent, spec, tls, SHARDS) as server:
        yield server


def copies(size: int, seconds: float) -> float:
    """Returns how often a second one core copies so many bytes."""
    source, to = np.ones(size, np.uint8), np.ones(size, np.uint8)
    begun, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - begun) < seconds:
        np.copyto(to, source)
        count += 1
    return count / passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="for a moment; nothing is saved")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn")
    given = parser.parse_args()
    rounds, seconds = (1, 0.5) if given.quick else (given.rounds, given.seconds)
    rates: dict[str, list[float]] = {"shared": [], "tls": [], "copies": []}
    used: dict[str, list[float]] = {"shared": [], "tls": []}
    size = parameters = 0
    for _ in range(rounds):
        for name in ("shared", "tls"):
            with serving(name == "tls") as server:
                server.round_trips(0.2 * seconds)
                trips = server.round_trips(seconds)
                size, parameters = server.bytes(), server.parameters
            rates[name].append(trips.number / trips.passed_s)
            used[name].append(1e3 * (trips.learner_s + trips.shards_s) / trips.number)
        rates["copies"].append(copies(size, 0.2 * seconds))
    median = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{parameters:,} parameters, {SHARDS} shards, {size / 1e6:.1f} MB a round trip")
    for name, target in (("shared", TARGET), ("tls", TLS_TARGET)):
        values = sorted(rates[name])
        print(
            f"{name:7} {median[name]:6.1f} round trips/s ({values[0]:.1f} to {values[-1]:.1f}; target "
            f"{target:.0f}), {statistics.median(used[name]):.1f} CPU ms each, "
            f"{median[name] / median['copies']:.3f} of a copy's rate"
        )
    if given.quick:
        return 0
    result = {
        "machine": cpu_name(),
        "cores": usable_cores(),
        "parameters": parameters,
        "shards": SHARDS,
        "bytes": size,
        "round_trips_per_s": rates,
        "cpu_ms": used,
    }
    write_result(RESULT, result)
    return int(median["shared"] < TARGET or median["tls"] < TLS_TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
