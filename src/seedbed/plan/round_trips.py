"""Microbenchmarks of parameter shards: round trips of a gradient and parameters, and their costs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from seedbed.envs.host.contract import HostEnvConfig
from seedbed.paramserver import caller, shard
from seedbed.paramserver.beginning import write_saves
from seedbed.paramserver.caller import Stopped
from seedbed.paramserver.directory import Directory, this_machine
from seedbed.paramserver.job import Job
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import RoleSpec
from seedbed.paramserver.leases import Lease, Tally
from seedbed.paramserver.outliers import Outliers
from seedbed.paramserver.plan import Plan, ShardLayout
from seedbed.paramserver.replay_folder import layout_of
from seedbed.paramserver.replay_shard import RowLayout, SampleLayout
from seedbed.paramserver.updater import ShardedUpdater
from seedbed.plan.costs import MB, Linear
from seedbed.plan.sharded import Traffic
from seedbed.run.checking import check_agent
from seedbed.run.options import ParamServerConfig
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.credentials import ensure_credentials
from seedbed.types import Agent, EnvSpec, Output, learns_from_replay

_GRADIENTS = 4  # different ones, pushed in turn
_PADDING = 1.2  # the most by which the bytes of one agent differ with the number of shards


class _NoBatches:
    """A source without batches, which no lease holds up; an `updater.Leased`."""

    tally = Tally()

    def extend(self, lease: Lease) -> None:
        """Ignores a lease: nothing is drawn here."""


class Trips(NamedTuple):
    """Round trips that were made."""

    number: int
    passed_s: float
    learner_s: float  # CPU seconds of this process
    shards_s: float  # of all shards


class Server:
    """Parameter shards on this machine, and a learner's end at them. For one thread."""

    def __init__(
        self, run: Path, env: HostEnvConfig, agent: Agent, spec: EnvSpec, tls: bool, shards: int
    ) -> None:
        """Starts the shards in a run's folder; `agent` is bound to the stacked `spec`.

        With `tls`, nothing is shared: bytes go over loopback, as if the shards were on another machine.
        """
        config = ParamServerConfig(parameter_shards=shards, listen="127.0.0.1" if tls else "")
        self.job = Job(env, agent, spec, config, check_agent(agent))
        ensure_credentials(run / CREDENTIALS)
        self.job.write(run)
        state = agent.init(jax.random.key(0))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        write_saves(self.job, run, state, 0, 0, 0.0)
        roles = [
            RoleSpec(shard.role_of(i), shard.__name__, ("--number", str(i))) for i in range(shards)
        ]
        self._opened = contextlib.ExitStack()
        self.keepers = list[Keeper]()
        with contextlib.ExitStack() as opened:
            for i, role in enumerate(roles):
                self.keepers.append(Keeper(run, role, self.job.plan.state_layout(i).size))
                opened.callback(self.keepers[i].close)
            self.updater = self._connected(run, tls)
            opened.callback(self.updater.close)
            self._opened = opened.pop_all()
        rng = np.random.default_rng(0)
        self.gradients = [
            jax.tree.map(
                lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype),
                self.job.plan.gradient,
            )
            for _ in range(_GRADIENTS)
        ]

    def _connected(self, run: Path, tls: bool) -> ShardedUpdater:
        directory = Directory(run)
        # Where the shards are said to be on another machine, nothing is shared.
        caller.this_machine = (lambda: "another") if tls else this_machine
        try:
            return ShardedUpdater(
                self.job.plan,
                directory.take_number("learner"),
                directory,
                run / CREDENTIALS,
                Outliers(0.0),
                _NoBatches(),
                lambda: any(keeper.failure is not None for keeper in self.keepers),
            )
        except Stopped:
            self._raise_failure()
            raise
        finally:
            caller.this_machine = this_machine

    def _raise_failure(self) -> None:
        for keeper in self.keepers:
            if keeper.failure is not None:
                raise keeper.failure

    def round_trips(self, seconds: float) -> Trips:
        """Goes round for a while."""
        output = Output({}, jnp.float32(32))
        own, others = [psutil.Process()], [psutil.Process(k.pid) for k in self.keepers]
        begun, before, count = time.perf_counter(), (cpu(own), cpu(others)), 0
        while (passed_s := time.perf_counter() - begun) < seconds:
            self.updater.push(self.gradients[count % _GRADIENTS], output)
            jax.block_until_ready(self.updater.pull())
            count += 1
        return Trips(count, passed_s, cpu(own) - before[0], cpu(others) - before[1])

    def bytes(self) -> int:
        """Returns the bytes that a round trip moves: the gradient, and the parameters."""
        return sum(s.layout.up_bytes + s.layout.params_bytes for s in self.updater._shards)

    def close(self) -> None:
        """Ends the shards; raises what has ended one of them."""
        with self._opened:
            for keeper in self.keepers:
                keeper.finish()
            self._raise_failure()


@contextlib.contextmanager
def serving(
    env: HostEnvConfig, agent: Agent, spec: EnvSpec, tls: bool, shards: int
) -> Iterator[Server]:
    """Starts shards in a folder of their own, and ends them."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), env, agent, spec, tls, shards)
        try:
            yield server
        finally:
            server.close()


def cpu(processes: list[psutil.Process]) -> float:
    """Returns the CPU seconds of processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


class Measured(NamedTuple):
    """CPU seconds of round trips."""

    shards: int
    size: float  # bytes up and down
    learner: float
    shard: float  # of one shard, on average


def measure(server: Server, seconds: float) -> Measured:
    """Measures round trips, after some that do not count."""
    server.round_trips(0.3 * seconds)
    trips, shards = server.round_trips(seconds), len(server.keepers)
    each = trips.learner_s / trips.number, trips.shards_s / trips.number / shards
    return Measured(shards, server.bytes(), *each)


def fit(measured: list[Measured]) -> tuple[Linear, Linear]:
    """Returns the costs of a learner and of a shard, by least squares of relative errors.

    Measurements of one agent differ in the number of shards, and in bytes by padding alone. What the bytes
    cost is then told by the shards, of which each has its part of them, and a megabyte costs a learner as
    much.
    """
    rows = [(1.0, m.size / m.shards / MB) for m in measured]
    base, megabyte = _least_squares(rows, [m.shard for m in measured])
    sizes = [m.size for m in measured]
    if max(sizes) > _PADDING * min(sizes):
        rows = [(1.0, m.shards, m.size / MB) for m in measured]
        learner = Linear(*_least_squares(rows, [m.learner for m in measured]))
    else:
        own = [max(1e-9, m.learner - megabyte * m.size / MB) for m in measured]
        base_of_own, each = _least_squares([(1.0, m.shards) for m in measured], own)
        learner = Linear(base_of_own, each, megabyte)
    return learner, Linear(base, 0.0, megabyte)


def _least_squares(rows: list[tuple[float, ...]], values: list[float]) -> list[float]:
    """Returns the coefficients, none of which is below 0: a cost that noise has made negative is none."""
    weights = 1.0 / np.array(values)
    found = np.linalg.lstsq(np.array(rows) * weights[:, None], np.ones(len(values)), rcond=None)[0]
    return [max(0.0, float(each)) for each in found]


def traffic(env: HostEnvConfig, agent: Agent, spec: EnvSpec, config: ParamServerConfig) -> Traffic:
    """Returns what a learner sends and gets in an update without a refresh of its targets."""
    plan = Plan(agent, config.parameter_shards, check_agent(agent))
    layouts = [ShardLayout(plan, number) for number in range(config.parameter_shards)]
    items = row = 0.0
    if learns_from_replay(agent):
        replay = layout_of(Job(env, agent, spec, config, plan.gradient))
        items, row = SampleLayout(replay, agent.experience.batch).size, RowLayout(replay).size
    return Traffic([x.up_bytes for x in layouts], [x.params_bytes for x in layouts], items, row)
