"""Clusters of the paper's size in the model of `seedbed plan`, with costs of streams and shards of here.

Each learner is a machine of its own, and so is each parameter shard and each replay shard, which have one
core. Costs are measured over TLS with several numbers of shards and two networks, and tried with a number
that the fit has not seen. A gradient is discarded if it is staler than `most_lag`, or than twice the number
of learners: each learner is behind by all others on average, so with many of them the default would discard
every second gradient.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from seedbed.agents.dqn import Dqn
from seedbed.envs.host.atari import AtariEnv
from seedbed.machine import cpu_name
from seedbed.plan.acting import Sizes
from seedbed.plan.costs import ActingCosts, Calibration, ShardCosts
from seedbed.plan.engine import Cost
from seedbed.plan.hosts import HostKind
from seedbed.plan.measuring import bench
from seedbed.plan.predict import Subject, predict
from seedbed.plan.round_trips import Measured, fit, measure, serving, traffic
from seedbed.plan.stepping import measure as measure_steps
from seedbed.run.options import GROUPS, ParamServerConfig
from seedbed.run.stacking import stacked_spec
from seedbed.types import ArraySpec, Discrete, EnvSpec, bind
from seedbed.version import __version__

SIZES = (1, 2, 8)  # shards with which costs are measured
UNSEEN = 4  # shards with which they are tried
NETWORKS: tuple[str, ...] = ("small", "nature")  # 0.7 and 1.7 million parameters
ENVIRONMENTS = 16  # of a learner
CORES = 2.0  # of a learner's machine
PAPER = (100, 31)  # learners and parameter shards
OTHERS = ((1, 1), (10, 4), (31, 10))
GIGABITS = (1.0, 10.0)
ENV, SPEC = AtariEnv("pong"), EnvSpec(ArraySpec((84, 84), "uint8"), Discrete(6))


def make_agent(network: str) -> Dqn:
    """Returns Pong's DQN."""
    return bind(Dqn(torso=network), stacked_spec(SPEC, ENV.frame_stack))


def round_trips(shards: int, network: str, seconds: float) -> Measured:
    """Measures round trips over TLS on this machine."""
    with serving(ENV, make_agent(network), SPEC, True, shards) as server:
        return measure(server, seconds)


def learner_costs(seconds: float) -> ActingCosts:
    """Measures acting, and the gradient of a batch."""
    size = ENVIRONMENTS // GROUPS
    step = measure_steps(ENV, size, 1, seconds)
    agent = Dqn(torso=NETWORKS[-1], min_size=1000)
    with (
        tempfile.TemporaryDirectory() as folder,
        bench(ENV, agent, size, Path(folder), seconds) as parts,
    ):
        calls = tuple(parts.calls())
        gradient, priorities = parts.update(parts.batch(), sharded=True)
        draw = parts.draw(priorities)
        # Each machine has cores to spare, so nothing crowds them.
        return ActingCosts(Cost(step.rested), 0.0, step.wake, calls, gradient, parts.seal(), draw)


def cluster(
    calibration: Calibration, learners: int, shards: int, gigabits: float
) -> dict[str, Any]:
    """Plays a cluster."""
    config = ParamServerConfig(
        learners=learners,
        parameter_shards=shards,
        replay_shards=shards,
        envs_per_actor=ENVIRONMENTS,
        most_lag=max(ParamServerConfig().most_lag, 2 * learners),
    )
    agent = make_agent(NETWORKS[-1])
    subject = Subject(
        runtime=config,
        frame_skip=ENV.frame_skip,
        sizes=Sizes(ENVIRONMENTS // GROUPS, agent.experience, 1, False, 0.0, 1),
        traffic=traffic(ENV, agent, SPEC, config),
    )
    kinds = [
        HostKind("learners", CORES, learners, gbit_per_s=gigabits, only=("learners",)),
        HostKind("parameter shards", 1.0, shards, gbit_per_s=gigabits, only=("parameters",)),
        HostKind("replay shards", 1.0, shards, gbit_per_s=gigabits, only=("replay",)),
    ]
    found = predict(subject, calibration, kinds)
    hours = 1e6 / 3600 / found.updates_per_s
    return {
        "learners": learners,
        "shards": shards,
        "gigabits": gigabits,
        "most_lag": config.most_lag,
        "updates_per_s": found.updates_per_s,
        "staleness_mean": found.lag_mean,
        "discarded_share": found.discarded_share,
        "learner_load_max": found.loads["learner threads"],
        "shard_load_max": found.loads["parameter shards"],
        "saturated": found.saturated,
        "bytes_per_s": found.bytes_per_s,
        "busy_core_hours_per_million": found.cores_busy * hours,
        "held_core_hours_per_million": sum(k.count * k.cores for k in kinds) * hours,
    }


def simulation(seconds: float) -> dict[str, Any]:
    """Measures costs, tries them with an unseen number of shards, and plays clusters; prints all."""
    print(f"simulation: costs of streams over TLS, {seconds:g} s each", flush=True)
    measured = [round_trips(s, network, seconds) for s in SIZES for network in NETWORKS]
    learner, shard = fit(measured)
    acting = learner_costs(seconds)
    print(
        f"  a gradient {1e3 * acting.update.cpu_s:.1f} ms; a learner {1e3 * learner.base:.2f} ms + "
        f"{1e3 * learner.shard:.2f} ms a shard + {1e3 * learner.megabyte:.2f} ms/MB; a shard "
        f"{1e3 * shard.base:.2f} ms + {1e3 * shard.megabyte:.2f} ms/MB"
    )
    unseen = round_trips(UNSEEN, NETWORKS[-1], seconds)
    foretold = {
        "learner": learner.of(UNSEEN, unseen.size),
        "shard": shard.of(0, unseen.size / UNSEEN),
    }
    print(
        f"  {UNSEEN} shards, which the fit has not seen: a learner {1e3 * foretold['learner']:.1f} ms "
        f"foretold, {1e3 * unseen.learner:.1f} measured; a shard {1e3 * foretold['shard']:.1f} and "
        f"{1e3 * unseen.shard:.1f}"
    )
    shards = ShardCosts(learner, shard, learner, shard)
    calibration = Calibration(cpu_name(), 1.0, "cpu", "cpu", __version__, acting, shards=shards)
    rows = []
    for learners, count in (*OTHERS, PAPER):
        for gigabits in GIGABITS:
            rows.append(cluster(calibration, learners, count, gigabits))
            show(rows[-1])
    return {
        "costs": {"gradient": acting.update, "learner": learner, "shard": shard},
        "measured": [m._asdict() for m in (*measured, unseen)],
        "foretold": foretold,
        "rows": rows,
    }


def show(row: dict[str, Any]) -> None:
    """Prints a cluster."""
    print(
        f"  {row['learners']:3} learners, {row['shards']:2} shards, {row['gigabits']:2.0f} Gb/s: "
        f"{row['updates_per_s']:6.1f} updates/s, staleness {row['staleness_mean']:.1f}, discarded "
        f"{row['discarded_share']:.3f}, load of a learner {row['learner_load_max']:.2f}, of the shards "
        f"{row['shard_load_max']:.2f}, {row['bytes_per_s'] / 1e6:.0f} MB/s, "
        f"{row['busy_core_hours_per_million']:.0f} busy of {row['held_core_hours_per_million']:.0f} core "
        f"hours a million updates; {row['saturated'] or 'nothing'} saturates",
        flush=True,
    )
