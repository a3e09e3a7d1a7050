"""Parameter shards and their clients in one process."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seedbed.envs.host.gym import GymEnv
from seedbed.paramserver.caller import Caller
from seedbed.paramserver.directory import SAVE, Directory
from seedbed.paramserver.job import Job
from seedbed.paramserver.leases import Lease, Leases, Tally
from seedbed.paramserver.ledger import ShardLedger
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.outliers import Outliers
from seedbed.paramserver.role import COORDINATOR, Role
from seedbed.paramserver.saves import ShardSave
from seedbed.paramserver.shard import ParameterShard, role_of
from seedbed.paramserver.updater import ShardedUpdater
from seedbed.run.checking import check_agent
from seedbed.run.options import ParamServerConfig
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.credentials import ensure_credentials
from seedbed.streams.messages import Message
from seedbed.streams.server import Client
from seedbed.types import ArraySpec, Discrete, EnvSpec, bind


class NoSource:
    """Does nothing, and keeps the lease that it got."""

    tally = Tally()

    def extend(self, lease: Lease) -> None:
        self.lease = lease


SPEC = EnvSpec(ArraySpec((4,), "float32"), Discrete(3))


def job_of(agent, shards, most_lag=100, host=None, spec=SPEC) -> Job:
    options = ParamServerConfig(
        parameter_shards=shards, most_lag=most_lag, steps=10_000, listen=host or ""
    )
    agent = bind(agent, spec)
    return Job(GymEnv("CartPole-v1"), agent, spec, options, check_agent(agent))


class Shards:
    """The parameter shards of a run, each in a thread of its own."""

    def __init__(self, run: Path, job: Job) -> None:
        self.run, self.job, self.directory = run, job, Directory(run)
        ensure_credentials(run / CREDENTIALS)
        job.write(run)
        state = job.agent.init(jax.random.key(0))
        self.roles: dict[int, Role] = {}
        self.works: dict[int, ParameterShard] = {}
        self.threads: dict[int, threading.Thread] = {}
        for shard in range(job.config.parameter_shards):
            leaves = [np.asarray(x) for x in jax.tree.leaves(job.plan.part(state, shard))]
            folder = self.directory.path / role_of(shard)
            folder.mkdir(parents=True)
            books = {"pushes": ShardLedger(0, 1).save(), "leases": Leases(None, 0).save()}
            ShardSave(books, leaves).write(folder / SAVE)
            self.start(shard)

    def start(self, shard: int) -> None:
        role = Role(self.run, role_of(shard), self.directory.take_number(role_of(shard)))
        work = ParameterShard(role, self.job, shard)
        self.roles[shard], self.works[shard] = role, work
        self.threads[shard] = threading.Thread(
            target=role.serve, args=(work, self.job.listening(False))
        )
        self.threads[shard].start()

    def end(self, shard: int) -> None:
        self.roles[shard].finish()
        self.threads[shard].join()

    def close_learner(self, shard: int, learner: int, push: int) -> None:
        """Does what the coordinator does with a learner that it does not see."""
        caller = Caller(self.directory, self.run / CREDENTIALS, role_of(shard), lambda: False)
        caller.make_room(0, self.job.plan.state_layout(shard).size)
        caller.connect(lambda: {"role": COORDINATOR, "number": 0})
        caller.send(Kind.CLOSE, learner=learner, push=push)
        message = caller.receive()
        assert message is not None and message.kind is Kind.CLOSED
        caller.close()

    def learner(self, number: int, deviations: float = 0.0) -> ShardedUpdater:
        outliers = Outliers(deviations)
        return ShardedUpdater(
            self.job.plan,
            number,
            self.directory,
            self.run / CREDENTIALS,
            outliers,
            NoSource(),
            lambda: False,
        )

    def close(self) -> None:
        for shard in self.roles:
            self.end(shard)


class StubLearner:
    """A learner for the coordinator only: a `role.Work` that pauses when it is asked to, and may hang."""

    def __init__(self, run: Shards, seat: int) -> None:
        self.number, self.pausing = seat + 1, True
        self.pauses, self.hang = 0, threading.Event()
        self.breaks = False  # whether the next PAUSE breaks the stream behind its answer
        self.role = Role(run.run, f"learner-{seat}", self.number)
        self.thread = threading.Thread(
            target=self.role.serve, args=(self, run.job.listening(False))
        )
        self.thread.start()

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        return {"learner": self.number}

    def leave(self, client: Client) -> None:
        self.pausing = False

    def take(self, client: Client, message: Message) -> None:
        if self.hang.is_set():
            while self.hang.is_set():
                time.sleep(0.01)
            raise ConnectionError
        self.pausing = message.kind is Kind.PAUSE
        self.pauses += self.pausing
        client.send(message.kind)
        if self.pausing and self.breaks:
            self.breaks = False
            raise ConnectionError

    def tick(self, now_s: float) -> bool:
        return True

    def report(self) -> dict[str, Any]:
        return {"paused": self.pausing}

    def close(self) -> None:
        pass

    def end(self) -> None:
        self.hang.clear()
        self.role.finish()
        self.thread.join()
