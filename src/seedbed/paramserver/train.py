"""The coordinator of a run with parameter shards, replay shards and several learners."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import jax

from seedbed.actors.local import local_pool
from seedbed.actors.process import Launcher
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.exit_status import StoppedEarly
from seedbed.paramserver.beginning import is_running, roles_of, write_saves
from seedbed.paramserver.cluster import Cluster
from seedbed.paramserver.episodes import Episodes
from seedbed.paramserver.hosts import Hosts
from seedbed.paramserver.job import Job
from seedbed.paramserver.launching import end_all, end_starting
from seedbed.paramserver.replay_folder import count_items, forget_former, has_former, set_aside
from seedbed.paramserver.run import ClusterRun
from seedbed.run.callback import Callback, OnMetrics
from seedbed.run.checking import check_agent
from seedbed.run.checkpoint_helper import name_of
from seedbed.run.devices import share_accelerators
from seedbed.run.folder import RunFolder
from seedbed.run.loaded_weights import LoadedWeights
from seedbed.run.options import ParamServerConfig
from seedbed.run.runtime import View
from seedbed.run.session import Session
from seedbed.run.stacking import stacked_spec
from seedbed.streams.credentials import ensure_credentials
from seedbed.types import Agent, EnvSpec, bind, learns_from_replay


def train(
    *,
    env: HostEnvConfig,
    agent: Agent,
    config: ParamServerConfig,
    run: RunFolder,
    view: View,
    callback: Callback | OnMetrics | None = None,
    weights: LoadedWeights | None = None,
) -> dict[str, Any]:
    """Trains until `config.steps` transitions count, and returns a summary: the last metrics of the run.

    This process starts all others, watches them, saves and evaluates. If it is killed, the others go on for a
    minute, and the next start with the same options takes them over. Else, if the folder has checkpoints,
    training goes on from the newest whole one, also with other numbers of learners and shards.

    SIGINT, SIGTERM and SIGHUP stop training and save; see `central.train.train`. Raises SeedbedError if the
    run ends with a failure that the user can repair, KeyboardInterrupt at a second signal, and StoppedEarly
    at a first one that comes before all roles have begun.
    """
    path = run.path.resolve()
    share_accelerators()
    ensure_credentials(run.listen)
    with Session(run, view, callback, weights) as session:
        spec = _find_spec(env, config, session)
        agent = bind(agent, stacked_spec(spec, env.frame_stack))
        view.message("tracing the agent")
        job = Job(env, agent, spec, config, check_agent(agent), run.trusted)
        hosts = Hosts(
            path,
            config.hosts,
            config.listen,
            run.term,
            session.interruption.come,
            run.require_claim,
        )
        with contextlib.closing(hosts):
            session.interruption.ending.append(hosts.kill)
            return _train_on(hosts, job, run, session)


def _train_on(hosts: Hosts, job: Job, run: RunFolder, session: Session) -> dict[str, Any]:
    """Trains with the machines of a run, once its processes are begun or taken over."""
    path = run.path.resolve()
    hosts.find_former(session.interrupted)
    adopts = _may_adopt(job, path, hosts)
    save = None if adopts else _prepare(job, session, hosts)
    if adopts:
        # They would be started twice.
        end_starting(path)
        session.view.message("the processes of this run go on: taking them over")
    cluster = Cluster(job, path, save, hosts, adopts)
    session.interruption.ending.append(cluster.kill)
    try:
        _await_roles(cluster, session, adopts)
        forget_former(path)
        trained = ClusterRun(cluster, run, Episodes.of_newest(run.checkpoints))
        if adopts:
            progress = trained.progress()
            session.take_over(progress.env_steps, progress.updates)
        return session.train(trained)
    except KeyboardInterrupt:
        cluster.kill()
        raise
    finally:
        cluster.close()


def _find_spec(env: HostEnvConfig, config: ParamServerConfig, session: Session) -> EnvSpec:
    """Asks an actor for the spec of the environments, which are not made in this process."""
    launcher = Launcher(env=env, envs_per_group=1, groups=1, seed=config.seed)
    with local_pool(launcher, actors=1, timeout_s=config.actor_timeout_s) as pool:
        spec = pool.wait_spec(session.interrupted)
    if spec is None:
        raise StoppedEarly
    return spec


def _await_roles(cluster: Cluster, session: Session, adopts: bool) -> None:
    """Waits until all roles of this machine have begun, and shows their notices meanwhile.

    Raises StoppedEarly if a signal comes, unless the roles were taken over: what they have done is saved.
    """

    def stop() -> bool:
        for notice in cluster.take_notices():
            session.view.message(notice)
        return session.interrupted() and not adopts

    if not cluster.await_ready(stop):
        raise StoppedEarly


def _may_adopt(job: Job, run: Path, hosts: Hosts) -> bool:
    """Returns whether the processes of a run go on, with these options and with all their items."""
    return job.is_written(run) and not has_former(run) and is_running(job, run, hosts)


def _prepare(job: Job, session: Session, hosts: Hosts) -> str | None:
    """Waits for the hosts, and writes what the roles begin with.

    Returns the name of the replay's save, if the run is resumed. Raises StoppedEarly if a signal comes first.
    """
    path = session.run.path.resolve()
    if not hosts.await_all(session.view.message, session.interrupted):
        raise StoppedEarly
    if ended := end_all(path) + hosts.end_all():
        session.view.message(
            f"ended {ended} processes of this run, which could not be taken over: their options were others, "
            "a parameter shard was missing, or items were moving to other replay shards"
        )
    state = job.agent.init(jax.random.split(jax.random.key(job.config.seed), 3)[0])
    state = session.begun(job.agent, state)
    resumed = session.resume(lambda: state)
    items, owed = 0, 0.0
    if resumed is not None:
        state, metadata = resumed
        if learns_from_replay(job.agent):
            items = _find_replay(job, session)
        owed = metadata["owed"] if items else 0.0
    job.write(path)
    Job.read(path, trusted=job.trusted)  # what the roles could not read is told here, once
    write_saves(job, path, state, session.start.env_steps, items, owed)
    roles = roles_of(job, path, None)
    session.view.message(
        f"starting {job.config.parameter_shards} parameter shards, {len(roles['replay'])} replay shards and "
        f"{job.config.learners} learners, actors of each: {job.config.actors} (process {os.getpid()} "
        "coordinates them)"
    )
    return None if resumed is None else name_of(session.start.env_steps)


def _find_replay(job: Job, session: Session) -> int:
    """Returns how many items the replay shards of a resumed run begin with; tells what is missing."""
    path = session.run.path.resolve()
    if set_aside(path, job):
        session.view.message("moving the items of replay to their new shards")
    items, missing = count_items(path, job, name_of(session.start.env_steps))
    if missing:
        session.view.message(
            f"the replay of {', '.join(missing)} was not saved with this checkpoint: filling it again"
        )
    return items
