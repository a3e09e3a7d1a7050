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
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from seedbed.agents.dqn import Dqn
from seedbed.envs.host.atari import AtariEnv
from seedbed.machine import cpu_name, usable_cores
from seedbed.paramserver import caller, shard
from seedbed.paramserver.beginning import write_saves
from seedbed.paramserver.directory import Directory, this_machine
from seedbed.paramserver.job import Job
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import RoleSpec
from seedbed.paramserver.leases import Tally
from seedbed.paramserver.outliers import Outliers
from seedbed.paramserver.updater import ShardedUpdater
from seedbed.run.checking import check_agent
from seedbed.run.options import ParamServerConfig
from seedbed.run.stacking import stacked_spec
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.credentials import ensure_credentials
from seedbed.types import Agent, ArraySpec, Discrete, EnvSpec, Output, bind

RESULT = Path(__file__).parent / "results" / "parameter_server.json"
SHARDS = 2
TARGET, GOAL, TLS_TARGET = 100.0, 150.0, 15.0  # round trips a second
GRADIENTS = 4  # different ones, pushed in turn


class Server:
    """Parameter shards, and a learner's end at them."""

    def __init__(
        self, run: Path, tls: bool, shards: int = SHARDS, agent: Agent | None = None
    ) -> None:
        """`agent` is bound to Pong's observations; by default it is DQN with the network of the paper."""
        env = AtariEnv("pong")
        spec = EnvSpec(ArraySpec((84, 84), "uint8"), Discrete(6))
        agent = agent or bind(Dqn(torso="nature"), stacked_spec(spec, env.frame_stack))
        config = ParamServerConfig(parameter_shards=shards, listen="127.0.0.1" if tls else "")
        self.job = Job(env, agent, spec, config, check_agent(agent))
        ensure_credentials(run / CREDENTIALS)
        self.job.write(run)
        state = agent.init(jax.random.key(0))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        write_saves(self.job, run, state, 0, 0, 0.0)
        directory = Directory(run)
        roles = [
            RoleSpec(shard.role_of(i), shard.__name__, ("--number", str(i))) for i in range(shards)
        ]
        self.keepers = [
            Keeper(run, role, self.job.plan.state_layout(i).size) for i, role in enumerate(roles)
        ]
        # Where the shards are said to be on another machine, nothing is shared.
        caller.this_machine = (lambda: "another") if tls else this_machine
        self.updater = ShardedUpdater(
            self.job.plan,
            directory.take_number("learner"),
            directory,
            run / CREDENTIALS,
            Outliers(0.0),
            SimpleNamespace(tally=Tally(), extend=lambda lease: None),
            lambda: False,
        )
        rng = np.random.default_rng(0)
        self.gradients = [
            jax.tree.map(
                lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
                self.job.plan.gradient,
            )
            for _ in range(GRADIENTS)
        ]

    def round_trips(self, seconds: float) -> tuple[float, float]:
        """Returns round trips a second, and CPU milliseconds of all processes for each."""
        output = Output({}, jnp.float32(32))
        processes = [psutil.Process(), *(psutil.Process(k.pid) for k in self.keepers)]
        begun, used, count = time.perf_counter(), cpu(processes), 0
        while (passed := time.perf_counter() - begun) < seconds:
            self.updater.push(self.gradients[count % GRADIENTS], output)
            jax.block_until_ready(self.updater.pull())
            count += 1
        return count / passed, 1e3 * (cpu(processes) - used) / count

    def bytes(self) -> int:
        """Bytes that a round trip moves: the gradient, and the parameters."""
        return sum(s.layout.up_bytes + s.layout.params_bytes for s in self.updater._shards)

    def close(self) -> None:
        self.updater.close()
        for keeper in self.keepers:
            if keeper.failure is not None:
                raise keeper.failure
            keeper.finish()
        for keeper in self.keepers:
            keeper.close()


@contextlib.contextmanager
def serving(tls: bool) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), tls)
        try:
            yield server
        finally:
            server.close()


def cpu(processes: list[psutil.Process]) -> float:
    """CPU seconds of processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


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
                rate, each = server.round_trips(seconds)
                size, parameters = server.bytes(), server.parameters
            rates[name].append(rate)
            used[name].append(each)
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
        "date": datetime.date.today().isoformat(),
        "parameters": parameters,
        "shards": SHARDS,
        "bytes": size,
        "round_trips_per_s": rates,
        "cpu_ms": used,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int(median["shared"] < TARGET or median["tls"] < TLS_TARGET)


if __name__ == "__main__":
    raise SystemExit(main())
