"""Replay shards and their clients in one process."""

from __future__ import annotations

import threading
from pathlib import Path

from seedbed.agents.dqn import Dqn
from seedbed.envs.host.gym import GymEnv
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.job import Job
from seedbed.paramserver.leases import Lease
from seedbed.paramserver.replay_folder import role_of, set_aside
from seedbed.paramserver.replay_shard import ReplayShard
from seedbed.paramserver.replaying import ShardedReplay
from seedbed.paramserver.role import Role
from seedbed.run.options import ParamServerConfig
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.credentials import ensure_credentials
from seedbed.types import ArraySpec, Discrete, EnvSpec, bind

SPEC = EnvSpec(ArraySpec((2,), "float32"), Discrete(2))


ENVS = 4


AGENT = Dqn(
    hidden_sizes=(4,),
    batch=32,
    capacity=4000,
    min_size=10,
    priority_exponent=0.6,
    importance_exponent=0.4,
)


FAR = Lease(1 << 40, 1 << 40, 1 << 40, 0)


class Shards:
    """The replay shards of a run, each in a thread of its own."""

    def __init__(self, run: Path, save: str | None = None, **options) -> None:
        config = ParamServerConfig(envs_per_actor=2 * ENVS, steps=1 << 40, **options)
        self.job = Job(GymEnv("CartPole-v1"), bind(AGENT, SPEC), SPEC, config, ())
        self.run, self.places = run, (Directory(run), run / CREDENTIALS)
        self.save = save
        ensure_credentials(run / CREDENTIALS)
        if save is not None:
            set_aside(run, self.job)
        self.job.write(run)
        self.roles: dict[int, Role] = {}
        self.works: dict[int, ReplayShard] = {}
        self.threads: dict[int, threading.Thread] = {}
        self.replays: list[ShardedReplay] = []
        for shard in range(config.replay_shards):
            self.start(shard)

    def start(self, shard: int) -> None:
        name = role_of(shard)
        role = Role(self.run, name, Directory(self.run).take_number(name))
        work = ReplayShard(role, self.job, shard, self.save)
        self.roles[shard], self.works[shard] = role, work
        self.threads[shard] = threading.Thread(
            target=role.serve, args=(work, self.job.listening(False))
        )
        self.threads[shard].start()

    def end(self, shard: int) -> None:
        self.roles[shard].finish()
        self.threads[shard].join()

    def learner(self, seat: int, number: int) -> ShardedReplay:
        self.replays.append(ShardedReplay(self.job, seat, number, self.places, seed=number))
        self.replays[-1].extend(FAR)
        return self.replays[-1]

    def close(self) -> None:
        for replay in self.replays:
            replay.close()
            replay.release()
        for shard in self.roles:
            self.end(shard)
