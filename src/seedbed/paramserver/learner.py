"""A learner: it acts by central inference, draws batches, and pushes gradients to the parameter shards."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seedbed.actors.local import local_pool
from seedbed.actors.pool import ActorPool
from seedbed.actors.process import Launcher
from seedbed.central.acting import InferenceLoop
from seedbed.central.gate import shared_gate
from seedbed.central.inference import Inference
from seedbed.central.learning import Learner, LearnerLoop
from seedbed.exit_status import ExitStatus
from seedbed.ops.keys import derived_seed, fold_count, halves
from seedbed.paramserver.caller import Stopped
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.job import Job
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.outliers import Outliers
from seedbed.paramserver.replaying import ShardedReplay
from seedbed.paramserver.role import COORDINATOR, ORPHAN_S, Role, end_on_signals, parse, run_role
from seedbed.paramserver.unrolling import LeasedUnrolls
from seedbed.paramserver.updater import ShardedUpdater
from seedbed.run.devices import Device, choose_devices, dispatch_in_place, share_accelerators
from seedbed.run.measures import EpisodeStatistics
from seedbed.run.options import GROUPS
from seedbed.run.programs import keep_programs
from seedbed.streams.addresses import Listening
from seedbed.streams.credentials import FOLDER as CREDENTIALS
from seedbed.streams.messages import Message, ProtocolError
from seedbed.streams.server import Client
from seedbed.types import Array, SeedbedError, learns_from_replay

# The niceness of actors, as in a central run with replay.
_MODEST = 10
# Seconds without a batch after which a learner that adds nothing any more says that it is idle.
_IDLE_S = 1.0


STARTS = "learner"
"""All learners of a run count their starts together: the number of one is that of its books, too."""


def role_of(seat: int) -> str:
    """Returns the name of a learner's role."""
    return f"learner-{seat}"


class LearnerWork:
    """The threads of a learner, and what it tells the coordinator: a `role.Work`.

    The role's thread calls the methods.
    """

    def __init__(self, role: Role, job: Job, seat: int) -> None:
        """Starts the actors, and connects to the shards. Raises SeedbedError if that fails for good."""
        self.number = role.number
        self._job, self._ended = job, threading.Event()
        self._role, self._begun_s = role, time.monotonic()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        config, agent = job.config, job.agent
        places = role.directory, role.directory.path.parent / CREDENTIALS
        seed = derived_seed(config.seed, self.number)
        launcher = Launcher(
            env=job.env,
            envs_per_group=config.group_size,
            groups=GROUPS,
            seed=seed,
            niceness=_MODEST if learns_from_replay(agent) else 0,
        )
        self._pool = local_pool(launcher, actors=config.actors, timeout_s=config.actor_timeout_s)
        self.outliers = Outliers(config.outlier_deviations)
        _await_spec(self._pool, job, self._stops)
        self._source = _experience(job, seat, self.number, places, self._pool)
        self._updater = ShardedUpdater(
            job.plan,
            self.number,
            *places,
            self.outliers,
            self._source,
            self._stops,
        )
        self._episodes = EpisodeStatistics(self._pool.num_groups, self._pool.group_size)
        key = fold_count(jax.random.key(config.seed), halves(self.number))
        act_key, learn_key = jax.random.split(key)
        devices = choose_devices((0,), "learner_devices")
        gate = shared_gate(devices, devices)
        learner = Learner(agent, job.frame_stack, devices, learn_key, self._updater, gate)
        inference = _inference(job, seat, self._pool, devices[0], act_key)
        self._learning = LearnerLoop(learner, [inference], self._source)
        # Until the coordinator knows of it: a cut must not miss a learner.
        self._learning.pause()
        inference.compile(job.spec)
        self._acting = InferenceLoop(self._pool, [inference], self._source, self._episodes, gate)
        loops = {"inference": self._acting.run, "learner": self._learning.run}
        self._threads = [
            threading.Thread(target=self._guard, args=(loop,), name=name, daemon=True)
            for name, loop in loops.items()
        ]
        for thread in self._threads:
            thread.start()

    def _stops(self) -> bool:
        """Whether waiting for others has to end: also if a run has no shards when this learner starts."""
        alone = not self._threads and time.monotonic() > self._begun_s + ORPHAN_S
        return self._ended.is_set() or self._role.finishing or alone

    def _guard(self, loop: Callable[[threading.Event], None]) -> None:
        try:
            loop(self._ended)
        except Stopped:
            pass
        except BaseException as failure:
            self._failure = self._failure or failure
            self._ended.set()

    def greet(self, client: Client, said: dict[str, Any]) -> dict[str, Any]:
        """Lets the coordinator in, and nobody else."""
        del client
        if said["role"] != COORDINATOR:
            raise ProtocolError("a learner serves the coordinator only")
        return {"learner": self.number}

    def leave(self, client: Client) -> None:
        """Goes on learning: a pause ends with the coordinator that asked for it."""
        del client
        self._learning.resume()

    def take(self, client: Client, message: Message) -> None:
        """Takes PAUSE and RESUME; `report` says when the pause has begun."""
        if message.kind is Kind.PAUSE:
            self._learning.pause()
        elif message.kind is Kind.RESUME:
            self._learning.resume()
        else:
            raise ProtocolError(f"{message.kind.name} came out of turn")
        client.send(message.kind)

    def tick(self, now_s: float) -> bool:
        """Returns True until a thread has failed."""
        del now_s
        return not self._ended.is_set()

    def report(self) -> dict[str, Any]:
        """Returns figures; those that count are since the start of this learner."""
        updater, tally, learning = self._updater, self._source.tally, self._learning
        idle = self._source.ended and time.monotonic() > learning.starved_since_s + _IDLE_S
        return {
            "paused": learning.paused,
            "idle": idle,
            "books": [[b.applied, b.discarded, b.rolled_back] for b in updater.books],
            "lags": {str(lag): count for lag, count in dict(updater.lags).items()},
            "outliers": self.outliers.discarded,
            "tally": list(tally),
            # Means of no episodes are no numbers, and messages have none that are not finite.
            "episodes": {
                name: value if math.isfinite(value) else None
                for name, value in self._episodes.summary().items()
            },
            "metrics": learning.metrics,
            "seconds": {
                "learning": learning.busy.read(),
                "learner_waiting": learning.waiting.read(),
                "inference": self._acting.counters.busy_s,
                "inference_blocked": self._acting.blocked_s,
            },
            "actors_cpu_s": self._pool.cpu_seconds(),
            "actor_pids": self._pool.pids(),
            "actor_restarts": self._pool.restarts,
            "notices": self._pool.take_notices(),
        }

    def close(self) -> None:
        """Ends all threads and actors; raises what has ended one of them."""
        self._ended.set()
        self._source.close()
        for thread in self._threads:
            thread.join()
        self._source.release()
        self._updater.close()
        self._pool.close()
        if self._failure is not None:
            raise self._failure


def _experience(
    job: Job, seat: int, number: int, places: tuple[Directory, Path], pool: ActorPool
) -> ShardedReplay | LeasedUnrolls:
    """Returns where steps go and batches come from."""
    if learns_from_replay(job.agent):
        seed = derived_seed(job.config.seed, number)
        return ShardedReplay(job, seat, number, places, seed)
    return LeasedUnrolls(job, pool)


def _inference(job: Job, seat: int, pool: ActorPool, device: Device, key: Array) -> Inference:
    """Returns the acting of a learner, whose environments have their places among those of all learners."""
    envs = np.arange(pool.num_envs).reshape(pool.num_groups, -1) + seat * pool.num_envs
    total = job.config.learners * pool.num_envs
    return Inference(job.agent, job.spec, job.frame_stack, device, envs, total, key)


def _await_spec(pool: ActorPool, job: Job, stop: Callable[[], bool]) -> None:
    """Waits for the first actor; raises Stopped, or SeedbedError if it is not of the run."""
    spec = pool.wait_spec(stop)
    if spec is None:
        raise Stopped
    if spec != job.spec:
        raise SeedbedError(
            f"the environments here have another spec, {spec}, than those of the run, {job.spec}"
        )


def main() -> None:
    """Serves a learner of a run. Call from the main thread."""
    given = parse("A learner")
    dispatch_in_place()
    share_accelerators()
    keep_programs()

    def make() -> tuple[Role, LearnerWork, Listening | None]:
        job = Job.read(given.run, trusted=given.trusted)
        role = Role(given.run, role_of(given.number), given.start)
        end_on_signals(role)
        at = job.listening(given.hosted)
        try:
            return role, LearnerWork(role, job, given.number), at
        except Stopped:
            if role.finishing:
                raise
            sys.exit(ExitStatus.ALONE)

    run_role(make)


if __name__ == "__main__":
    main()
