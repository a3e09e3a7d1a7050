"""Microbenchmarks of a replay shard: rows that go there, batches that come back, and their costs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import psutil

from seedbed.central.inference import ActOutput, act_output
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.paramserver import caller, replay_shard
from seedbed.paramserver.directory import Directory, this_machine
from seedbed.paramserver.job import Job
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import RoleSpec
from seedbed.paramserver.leases import Lease
from seedbed.paramserver.replay_folder import role_of
from seedbed.paramserver.replaying import ShardedReplay
from seedbed.plan.costs import ReplayCosts, ReplayTrip
from seedbed.plan.round_trips import cpu
from seedbed.replay.host.layout import CHUNK
from seedbed.run.checking import check_agent
from seedbed.run.options import GROUPS, ParamServerConfig
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.credentials import ensure_credentials
from seedbed.types import Agent, EnvSpec, SeedbedError, Timestep, Tree, learns_from_replay

_ANSWERS_S = 120.0  # until a shard's process has begun, and answers
_LOOKS_S = 1e-4
_MUCH = 1 << 60


class _Trips:
    """A replay shard on this machine, and a learner's end at it. For one thread."""

    def __init__(self, replay: ShardedReplay, keeper: Keeper, output: ActOutput) -> None:
        self._replay, self._keeper, self._output = replay, keeper, output

    def measure(self, call: Callable[[int], None], seconds: float) -> ReplayTrip:
        """Returns the CPU seconds of a call in this thread, in the streams' threads, and in the shard."""
        begun, count = time.perf_counter(), 0
        own, shard = [psutil.Process()], [psutil.Process(self._keeper.pid)]
        thread_s, own_s, shard_s = time.thread_time(), cpu(own), cpu(shard)
        while time.perf_counter() < begun + seconds:
            call(count)
            count += 1
        thread_s = time.thread_time() - thread_s
        own_s, shard_s = cpu(own) - own_s, cpu(shard) - shard_s
        return ReplayTrip(thread_s / count, max(0.0, own_s - thread_s) / count, shard_s / count)

    def add(self, timestep: Timestep) -> None:
        """Sends a step of a group, and waits until the shard has it: steps of few groups come alone."""
        step, output = jax.tree.map(lambda leaf: leaf[None], (timestep, self._output))
        self._replay.add([0], [0], step, output)
        self._wait(lambda: self._replay.idle, "takes no rows")

    def draw(self, priorities: Tree) -> None:
        """Takes a batch, and gives its items new priorities."""
        self._wait(lambda: bool(self._replay.take(1.0)), "gives no batch")
        self._replay.learned(0, {}, priorities)

    def _wait(self, over: Callable[[], bool], what: str) -> None:
        begun = time.perf_counter()
        while not over():
            self._replay.check()
            if self._keeper.failure is not None:
                raise self._keeper.failure
            if time.perf_counter() > begun + _ANSWERS_S:
                raise SeedbedError(f"a replay shard that is measured {what}: try again")
            time.sleep(_LOOKS_S)


@contextlib.contextmanager
def _serving(
    env: HostEnvConfig, agent: Agent, spec: EnvSpec, size: int, tls: bool
) -> Iterator[_Trips]:
    """Starts a shard in a folder of its own, and ends it; with `tls`, bytes go over loopback."""
    config = ParamServerConfig(
        envs_per_actor=GROUPS * size,
        steps=_MUCH,
        replay_shards=1,
        listen="127.0.0.1" if tls else "",
    )
    job = Job(env, agent, spec, config, check_agent(agent))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        run = Path(folder)
        ensure_credentials(run / CREDENTIALS)
        job.write(run)
        role = RoleSpec(role_of(0), replay_shard.__name__, ("--number", "0"))
        keeper = Keeper(run, role, 0)
        opened.callback(keeper.close)
        opened.callback(keeper.finish)
        # Where the shard is said to be on another machine, nothing is shared.
        caller.this_machine = (lambda: "another") if tls else this_machine
        opened.callback(setattr, caller, "this_machine", this_machine)
        directory = Directory(run)
        number = directory.take_number("learner")
        replay = ShardedReplay(job, 0, number, (directory, run / CREDENTIALS), 0)
        opened.callback(replay.release)
        opened.callback(replay.close)
        output = act_output(agent, spec, job.frame_stack, config.group_size)
        output = output._replace(params_version=np.int32(0))
        output = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), output)
        replay.extend(Lease(_MUCH, _MUCH, _MUCH))
        yield _Trips(replay, keeper, output)


def measure(
    env: HostEnvConfig,
    agent: Agent,
    spec: EnvSpec,
    timesteps: Sequence[Timestep],
    seconds: float,
    *,
    tls: bool,
) -> ReplayCosts:
    """Measures a replay shard on this machine for a bound agent that learns from replay.

    `timesteps`, leaves `[n, ...]`, are a group's; with `tls` nothing is shared. Raises SeedbedError if the
    shard ends or does not answer.
    """
    assert learns_from_replay(agent)
    experience = agent.experience
    priorities: Tree = np.ones(experience.batch) if experience.priority_exponent else ()
    with _serving(env, agent, spec, len(timesteps[0].first), tls) as trips:
        for number in range(CHUNK + 2 * experience.steps):  # until it has items, at the latest
            trips.add(timesteps[number % len(timesteps)])
        trips.measure(lambda number: trips.draw(priorities), 0.3 * seconds)
        row = trips.measure(lambda number: trips.add(timesteps[number % len(timesteps)]), seconds)
        return ReplayCosts(row, trips.measure(lambda number: trips.draw(priorities), seconds))
