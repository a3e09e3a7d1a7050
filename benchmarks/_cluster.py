"""A simulation of many machines with parameter shards, calibrated by what streams and shards cost here.

Each learner is a machine with one core for learning, and each parameter shard one with a core for its work; a
machine sends and receives at the network's rate. A learner computes a gradient, sends each shard its part,
and waits for the answers and the parameters of all, as `ShardedUpdater` does. An update counts where it is
applied: one that all shards discard is none, and one that half of them discard is half.

Assumed of the rest, which nobody waits for:
- A learner's next batch comes from replay, and the steps of its environments go there, while it learns; both
  take their time of its network card. The bytes are those of Pong's items and rows, without compression.
- Its machine has as many more cores as acting takes: emulators and inference, at the ratio of the agent, with
  costs that are measured here, and the streams to replay, a megabyte of which costs what one of parameters
  does.
- There are as many replay shards as parameter shards, each with a core of its own and a network card that is
  never full. A megabyte costs one what it costs a parameter shard, the optimizer included.
- A gradient is discarded if it is staler than MOST_LAG, or than twice the number of learners: each learner
  is behind by all others on average, so with many of them the default would discard every second gradient.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil

from parameter_server import Server, cpu
from seedbed.agents.dqn import Batch, Dqn
from seedbed.envs.host.atari import AtariEnv
from seedbed.paramserver.job import Job
from seedbed.paramserver.plan import Plan, ShardLayout
from seedbed.paramserver.replay_folder import layout_of
from seedbed.paramserver.replay_shard import RowLayout, SampleLayout
from seedbed.run.checking import check_agent
from seedbed.run.options import ParamServerConfig
from seedbed.run.stacking import stacked_spec
from seedbed.types import ArraySpec, Discrete, EnvSpec, bind

MB = 1e6
SIZES = (1, 2, 8)  # shards with which costs are measured
UNSEEN = 4  # shards with which they are tried
NETWORKS: tuple[str, ...] = ("small", "nature")  # 0.7 and 1.7 million parameters
MOST_LAG = ParamServerConfig().most_lag
ENVIRONMENTS = 16  # of a learner
LATENCY_S = 1e-4  # of the network, one way
PAPER = (100, 31)  # learners and parameter shards
OTHERS = ((1, 1), (10, 4), (31, 10))
GIGABITS = (1.0, 10.0)


class Cost(NamedTuple):
    """CPU seconds."""

    base: float
    shard: float  # for each shard; of a learner only
    megabyte: float

    def of(self, shards: int, size: float) -> float:
        """Returns the seconds for an update of `size` bytes, up and down, with so many shards."""
        return self.base + self.shard * shards + self.megabyte * size / MB


class Costs(NamedTuple):
    """What an update costs a learner, besides its gradient, and each shard; the gradient; and acting."""

    gradient: float
    learner: Cost
    shard: Cost
    acting: float  # of the steps that an update asks for


class Traffic(NamedTuple):
    """Bytes of an update, by parameter shard; and those from and to all replay shards."""

    up: list[int]
    down: list[int]
    items: float
    rows: float


class Measured(NamedTuple):
    """CPU seconds of round trips over TLS."""

    shards: int
    size: float  # bytes up and down
    learner: float
    shard: float  # of one shard, on average


ENV, SPEC = AtariEnv("pong"), EnvSpec(ArraySpec((84, 84), "uint8"), Discrete(6))


def make_agent(network: str) -> Dqn:
    """Returns Pong's DQN."""
    return bind(Dqn(torso=network), stacked_spec(SPEC, ENV.frame_stack))


def steps_of(agent: Dqn) -> float:
    """Returns the environment steps for which the ratio asks for one update."""
    return agent.experience.batch / agent.experience.ratio * agent.experience.period


def traffic(agent: Dqn, shards: int) -> Traffic:
    """Returns what a learner sends and gets in an update without a refresh of its targets."""
    plan = Plan(agent, shards, check_agent(agent))
    layouts = [ShardLayout(plan, shard) for shard in range(shards)]
    replay = layout_of(Job(ENV, agent, SPEC, ParamServerConfig(), plan.gradient))
    row = RowLayout(replay).size / replay.group_size
    return Traffic(
        [x.up_bytes for x in layouts],
        [x.params_bytes for x in layouts],
        SampleLayout(replay, agent.experience.batch).size,
        row * steps_of(agent),
    )


@contextlib.contextmanager
def serving(shards: int, network: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), True, shards, make_agent(network))
        try:
            yield server
        finally:
            server.close()


def measure(shards: int, network: str, seconds: float) -> Measured:
    """Measures round trips over TLS on this machine."""
    with serving(shards, network) as server:
        server.round_trips(0.3 * seconds)
        own, others = [psutil.Process()], [psutil.Process(k.pid) for k in server.keepers]
        before = cpu(own), cpu(others)
        rate, _ = server.round_trips(seconds)
        count = rate * seconds
        learner, shard = cpu(own) - before[0], cpu(others) - before[1]
        return Measured(shards, server.bytes(), learner / count, shard / count / shards)


def gradient_seconds(agent: Dqn, seconds: float) -> float:
    """Returns the CPU seconds of the gradient of a batch."""
    size, random_ = agent.experience.batch, np.random.default_rng(0)
    images = random_.integers(0, 255, (2, 1, size, 84, 84, 4), np.uint8)
    numbers = np.ones((1, size), np.float32)
    batch = Batch(
        images[0],
        np.zeros((1, size), np.int32),
        numbers,
        0.99 * numbers,
        images[1],
        numbers > 0,
        numbers,
    )
    state, function = agent.init(jax.random.key(0)), jax.jit(agent.gradients)
    given = jax.device_put((state, batch, jax.random.key(0)))
    jax.block_until_ready(function(*given))
    begun, used, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() < begun + seconds:
        jax.block_until_ready(function(*given))
        count += 1
    return (time.process_time() - used) / count


def acting_seconds(agent: Dqn, seconds: float) -> float:
    """Returns the CPU seconds of a step of an environment of Pong, the choice of its action included."""
    env, act = ENV.make(ENVIRONMENTS, 0), jax.jit(agent.act, static_argnums=4)
    timestep = env.reset()
    frames = np.zeros((ENVIRONMENTS, 84, 84, ENV.frame_stack), np.uint8)
    params = agent.init(jax.random.key(0)).params
    memory = agent.actor_state(np.arange(ENVIRONMENTS), ENVIRONMENTS)
    keys = jax.random.split(jax.random.key(0), ENVIRONMENTS)

    def step() -> None:
        nonlocal timestep
        action, *_ = act(params, memory, timestep._replace(observation=frames), keys, False)
        timestep = env.step(np.asarray(action))

    try:
        step()
        begun, used, count = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() < begun + seconds:
            step()
            count += ENVIRONMENTS
        return (time.process_time() - used) / count
    finally:
        env.close()


def fit(measured: list[Measured]) -> tuple[Cost, Cost]:
    """Returns the costs of a learner and of a shard, by least squares of relative errors."""
    rows = [(1.0, m.shards, m.size / MB) for m in measured]
    learner = _least_squares(rows, [m.learner for m in measured])
    rows = [(1.0, m.size / m.shards / MB) for m in measured]
    base, megabyte = _least_squares(rows, [m.shard for m in measured])
    return Cost(*learner), Cost(base, 0.0, megabyte)


def _least_squares(rows: list[tuple[float, ...]], values: list[float]) -> list[float]:
    weights = 1.0 / np.array(values)
    found = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(values)), rcond=None)
    return found[0].tolist()


class Machine:
    """A core and a network card in each direction, each of which does one thing after another."""

    def __init__(self) -> None:
        self.core = self.sends = self.receives = 0.0  # when each is free
        self.busy = 0.0

    def work(self, at: float, seconds: float) -> float:
        """Returns when work is done that could begin at a time."""
        self.core = max(self.core, at) + seconds
        self.busy += seconds
        return self.core

    def stream(self, at: float, up_s: float, down_s: float) -> None:
        """Takes so many seconds of the network card, for which nobody waits."""
        self.sends = max(self.sends, at) + up_s
        self.receives = max(self.receives, at) + down_s


def transfer(source: Machine, to: Machine, at: float, seconds: float) -> float:
    """Returns when bytes have come that could be sent at a time."""
    source.sends = max(source.sends, at) + seconds
    to.receives = max(to.receives, source.sends - seconds + LATENCY_S) + seconds
    return to.receives


def simulate(
    costs: Costs, learners: int, parts: Traffic, gigabits: float, updates: int
) -> dict[str, Any]:
    """Plays updates of all learners; returns rates and staleness of the later half."""
    rng, shards = random.Random(0), len(parts.up)
    rate = gigabits * 1e9 / 8
    machines = [Machine() for _ in range(learners)]
    servers = [Machine() for _ in range(shards)]
    total = sum(parts.up) + sum(parts.down)
    most_lag = max(MOST_LAG, 2 * learners)
    own = costs.learner.of(shards, total)
    sizes = [up + down for up, down in zip(parts.up, parts.down, strict=True)]
    applied = [0] * shards
    base = [[0] * shards for _ in range(learners)]
    wait = [0] * learners  # answers that a learner lacks
    lags: list[int] = []
    discarded = pushes = done = late = 0
    events: list[tuple[float, int, str, int, int]] = []
    count = 0

    def at(when: float, what: str, learner: int, shard: int = -1) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (when, count, what, learner, shard))

    for learner in range(learners):
        at(rng.uniform(0, costs.gradient + own), "learn", learner)
    half_s = 0.0
    while done < updates:
        now, _, what, learner, shard = heapq.heappop(events)
        if what == "learn":
            # Gradients take a little less or more, so that learners do not march in step.
            seconds = costs.gradient * rng.uniform(0.9, 1.1) + own
            wait[learner] = shards
            machines[learner].stream(now, parts.rows / rate, parts.items / rate)
            ready = machines[learner].work(now, seconds)
            for each in rng.sample(range(shards), shards):
                came = transfer(machines[learner], servers[each], ready, parts.up[each] / rate)
                at(came, "push", learner, each)
        elif what == "push":
            at(servers[shard].work(now, costs.shard.of(0, sizes[shard])), "apply", learner, shard)
        elif what == "apply":
            lag = applied[shard] - base[learner][shard]
            pushes += 1
            discarded += lag > most_lag
            if lag <= most_lag:
                applied[shard] += 1
                if done >= updates // 2:
                    late += 1
                    lags.append(lag)
            base[learner][shard] = applied[shard]
            came = transfer(servers[shard], machines[learner], now, parts.down[shard] / rate)
            at(came, "parameters", learner, shard)
        else:
            wait[learner] -= 1
            if not wait[learner]:
                done += 1
                if done == updates // 2:
                    half_s = now
                    before = [m.busy for m in (*machines, *servers)]
                at(now, "learn", learner)
    passed = now - half_s
    rounds, counted = updates - updates // 2, late / shards
    busy = [m.busy - b for m, b in zip((*machines, *servers), before, strict=True)]
    loads = [each / passed for each in busy]
    streamed = (parts.items + parts.rows) / MB
    acting = costs.acting + costs.learner.megabyte * streamed
    replay = costs.shard.megabyte * streamed
    # Of each learner's machine, of all parameter shards, and of as many replay shards.
    cores = learners * (1 + math.ceil(acting * rounds / learners / passed)) + 2 * shards
    return {
        "learners": learners,
        "shards": shards,
        "gigabits": gigabits,
        "most_lag": most_lag,
        "updates_per_s": counted / passed,
        "staleness_mean": statistics.mean(lags),
        "staleness_max": max(lags),
        "discarded_share": discarded / pushes,
        "learner_load_mean": statistics.mean(loads[:learners]),
        "shard_load_mean": statistics.mean(loads[learners:]),
        "shard_load_max": max(loads[learners:]),
        "acting_load_mean": acting * rounds / learners / passed,
        "bytes_per_s": (total + parts.items + parts.rows) * rounds / passed,
        "replay_bytes_per_s": (parts.items + parts.rows) * rounds / passed,
        "busy_core_hours_per_million": (sum(busy) + (acting + replay) * rounds)
        / counted
        * 1e6
        / 3600,
        "held_core_hours_per_million": cores * passed / counted * 1e6 / 3600,
    }


def simulation(seconds: float) -> dict[str, Any]:
    """Measures costs, tries them with an unseen number of shards, and plays clusters; prints all."""
    print(f"simulation: costs of streams over TLS, {seconds:g} s each", flush=True)
    measured = [measure(s, network, seconds) for s in SIZES for network in NETWORKS]
    agent = make_agent(NETWORKS[-1])
    acting = acting_seconds(agent, seconds) * steps_of(agent)
    costs = Costs(gradient_seconds(agent, seconds), *fit(measured), acting)
    learner, shard = costs.learner, costs.shard
    print(
        f"  a gradient {1e3 * costs.gradient:.1f} ms; its {steps_of(agent):g} steps {1e3 * acting:.1f} ms"
    )
    print(
        f"  a learner {1e3 * learner.base:.2f} ms + "
        f"{1e3 * learner.shard:.2f} ms a shard + {1e3 * learner.megabyte:.2f} ms/MB; a shard "
        f"{1e3 * shard.base:.2f} ms + {1e3 * shard.megabyte:.2f} ms/MB"
    )
    unseen = measure(UNSEEN, NETWORKS[-1], seconds)
    foretold = {
        "learner": learner.of(UNSEEN, unseen.size),
        "shard": shard.of(0, unseen.size / UNSEEN),
    }
    print(
        f"  {UNSEEN} shards, which the fit has not seen: a learner {1e3 * foretold['learner']:.1f} ms "
        f"foretold, {1e3 * unseen.learner:.1f} measured; a shard {1e3 * foretold['shard']:.1f} and "
        f"{1e3 * unseen.shard:.1f}"
    )
    rows = []
    for learners, shards in (*OTHERS, PAPER):
        parts = traffic(agent, shards)
        for gigabits in GIGABITS:
            rows.append(simulate(costs, learners, parts, gigabits, 60 * learners))
            show(rows[-1])
    return {
        "costs": costs._asdict(),
        "measured": [m._asdict() for m in (*measured, unseen)],
        "foretold": foretold,
        "traffic_of_paper": traffic(agent, PAPER[1])._asdict(),
        "rows": rows,
    }


def show(row: dict[str, Any]) -> None:
    """Prints a cluster."""
    print(
        f"  {row['learners']:3} learners, {row['shards']:2} shards, {row['gigabits']:2.0f} Gb/s: "
        f"{row['updates_per_s']:6.1f} updates/s, staleness {row['staleness_mean']:.1f}, discarded "
        f"{row['discarded_share']:.3f}, load of a learner {row['learner_load_mean']:.2f}, of the shards "
        f"{row['shard_load_mean']:.2f} (most {row['shard_load_max']:.2f}), "
        f"{row['acting_load_mean']:.2f} cores of a learner act, {row['bytes_per_s'] / MB:.0f} MB/s "
        f"({row['replay_bytes_per_s'] / MB:.0f} of replay), {row['busy_core_hours_per_million']:.0f} busy of "
        f"{row['held_core_hours_per_million']:.0f} core hours a million updates",
        flush=True,
    )
