"""Central inference on one host: actor processes step environments; this process acts and learns."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.actors.local import local_pool
from seedbed.actors.pool import ActorPool
from seedbed.actors.process import Launcher
from seedbed.actors.remote import RemoteActors
from seedbed.central.acting import InferenceLoop
from seedbed.central.experience import Place, SavedSource, Share, Sink, forget_others
from seedbed.central.gate import shared_gate
from seedbed.central.inference import Inference, act_output
from seedbed.central.learning import Learner, LearnerLoop
from seedbed.central.listening import announce_end, listen
from seedbed.central.meter import Setup
from seedbed.central.replaying import ReplayFeed
from seedbed.central.run import CentralRun
from seedbed.central.sharing import FollowingSource, LeadingSource
from seedbed.central.unrolls import UnrollQueue, UnrollSink
from seedbed.central.updater import LocalUpdater
from seedbed.envs.host.contract import HostEnvConfig
from seedbed.exit_status import StoppedEarly
from seedbed.ops.keys import derived_seed, fold_count, halves
from seedbed.run import devices
from seedbed.run.callback import Callback, OnMetrics
from seedbed.run.checking import checked
from seedbed.run.checkpoint_helper import list_steps
from seedbed.run.devices import choose_devices, choose_shared_devices, dispatch_in_place
from seedbed.run.folder import RunFolder
from seedbed.run.group import Group
from seedbed.run.loaded_weights import LoadedWeights
from seedbed.run.measures import Clock, EpisodeStatistics
from seedbed.run.options import GROUPS, CentralConfig
from seedbed.run.runtime import View
from seedbed.run.session import Session
from seedbed.run.stacking import stacked_spec
from seedbed.types import Agent, LearnerState, OnPolicy, Replay, SeedbedError, learns_from_replay

_MODEST = 10
"""The niceness of actors with replay, where the learner decides the pace. The actors then use the CPU time
that the learner's serial parts leave free, instead of running in bursts. R2D2 gains 9 % on Pong, DQN 20 %."""
# Seconds between two looks whether another learner has the run, while the first actor is waited for.
_LOOK_S = 10.0


def train(
    *,
    env: HostEnvConfig,
    agent: Agent,
    config: CentralConfig,
    run: RunFolder,
    view: View,
    callback: Callback | OnMetrics | None = None,
    weights: LoadedWeights | None = None,
) -> dict[str, Any]:
    """Trains until `config.steps` transitions count, and returns a summary: the last metrics of the run.

    `config` is fitted to the agent, which this function binds. A transition counts when it has been
    learned from. With an agent that learns from replay, it counts when it enters replay; after the last one,
    the updates that the ratio still asks for are made. If the folder has checkpoints, training goes on from
    the newest whole one.

    SIGINT, SIGTERM and SIGHUP stop training and save. They are handled only if the main thread calls this.
    Raises KeyboardInterrupt at a second signal, and StoppedEarly at a first one that comes before an actor
    has answered. Raises SeedbedError if the run ends with a failure that the user can
    repair. What was learned is saved first, unless the failure came during an update, as TrainingDiverged
    does.
    """
    if (group := Group.joined) is not None:
        group.meet("settled")
    _require_processes(config, group)
    dispatch_in_place()
    with (
        Session(run, view, callback, weights) as session,
        _telling(actors_of(env, agent, config, run), view) as pool,
    ):
        if config.local_actors:
            view.message(
                f"starting {config.local_actors} actors with {config.envs_per_actor} environments each"
            )
        remote = listen(pool, env, config, run, view.message) if config.listen else None
        if group is not None:
            group.look = functools.partial(_require_going_on, session, group)
        _await_spec(pool, session)
        if group is not None and group.member.of > 1:
            view.message(f"training as one learner, divided among {group.member.of} processes")
        begun = _begin(env, agent, config, pool, session)
        view.message("compiling")
        setup = set_up(env, config, pool, run, begun)._replace(remote=remote)
        found = setup.source.restore(begun.env_steps)
        forget_others(run.replay, config.learners)
        if begun.env_steps and found:
            view.message(found)
        with contextlib.nullcontext() if group is None else group.leading():
            summary = session.train(CentralRun(setup))
        if remote is not None:
            _say_farewell(remote, run, summary)
        return summary


@contextlib.contextmanager
def _telling(pool: ActorPool, view: View) -> Iterator[ActorPool]:
    """Closes a pool at the end of the block, and shows its last notices."""
    with pool:
        yield pool
    for notice in pool.take_notices():
        view.message(notice)


def _require_going_on(session: Session, group: Group) -> None:
    """Raises StoppedEarly after a signal, and PeerLost or SeedbedError if another process goes no further."""
    if session.interrupted():
        raise StoppedEarly
    group.require_all()


def _require_processes(config: CentralConfig, group: Group | None) -> None:
    if config.learners > 1 and group is None:
        raise SeedbedError(
            f"learners is {config.learners}, and this process is alone: start as many with --cluster "
            "ranks, ray or slurm, or give --learners 1"
        )


def actors_of(env: HostEnvConfig, agent: Agent, config: CentralConfig, run: RunFolder) -> ActorPool:
    """Starts the actors of this process, for a run that begins or goes on in a folder."""
    # The seed depends on the newest checkpoint: a resumed run must not play the run's first episodes again.
    past = list_steps(run.checkpoints)[-1:] if run.checkpoints.is_dir() else []
    launcher = Launcher(
        env=env,
        envs_per_group=config.envs_per_actor // GROUPS,
        groups=GROUPS,
        seed=Place.here().seed(derived_seed(config.seed, sum(past))),
        niceness=_MODEST if learns_from_replay(agent) else 0,
    )
    others = config.groups - config.local_actors * GROUPS
    return local_pool(
        launcher, actors=config.local_actors, timeout_s=config.actor_timeout_s, others=others
    )


def _say_farewell(remote: RemoteActors, run: RunFolder, summary: dict[str, Any]) -> None:
    """Tells actors of other machines whether the run has ended, or was stopped and may go on."""
    steps = f"after {summary['env_steps']:,} steps"
    if summary["interrupted"]:
        remote.finish(f"the run was stopped {steps}; it goes on with --resume", over=False)
        return
    text = f"the run has ended {steps}"
    announce_end(run, text)
    remote.finish(text, over=True)


def _await_spec(pool: ActorPool, session: Session) -> None:
    """Waits until the first actor has sent the spec, and shows notices of actors meanwhile.

    Raises StoppedEarly if a signal comes, TakenOver if another learner has the run, and SeedbedError if
    no actor answers in time or the actors cannot work.
    """
    look = Clock(_LOOK_S)

    def give_up() -> bool:
        if look.due():
            session.run.require_claim()
        for notice in pool.take_notices():
            session.view.message(notice)
        return session.interrupted()

    if pool.wait_spec(give_up) is None:
        raise StoppedEarly


class Begun(NamedTuple):
    """The state in which a run begins or goes on, the same in all processes of a learner."""

    agent: Agent  # bound
    state: LearnerState
    env_steps: int
    episodes: EpisodeStatistics


def _begin(
    env: HostEnvConfig, agent: Agent, config: CentralConfig, pool: ActorPool, session: Session
) -> Begun:
    """Begins a run, or goes on from its newest whole checkpoint."""
    begun = first(env, agent, config, pool)
    state = session.begun(begun.agent, begun.state)
    if (resumed := session.resume(lambda: state)) is not None:
        state, metadata = resumed
        begun.episodes.load(metadata["episodes"])
    return begun._replace(state=state, env_steps=session.start.env_steps)


def first(env: HostEnvConfig, agent: Agent, config: CentralConfig, pool: ActorPool) -> Begun:
    """Returns the beginning of a run; the pool knows its spec. Raises SeedbedError for an agent's faults."""
    agent = checked(agent, stacked_spec(pool.spec, env.frame_stack))
    init_key, _, _ = jax.random.split(jax.random.key(config.seed), 3)
    episodes = EpisodeStatistics(pool.num_groups, pool.group_size)
    return Begun(agent, agent.init(init_key), 0, episodes)


def set_up(
    env: HostEnvConfig, config: CentralConfig, pool: ActorPool, run: RunFolder, begun: Begun
) -> Setup:
    """Makes and compiles the parts of a run, with all processes of a learner: all begin as the leader."""
    inference_devices = choose_devices(config.inference_devices, "--inference-devices")
    learner_devices = choose_shared_devices(config.learner_devices, "--learner-devices")
    agent, group, place, spec = begun.agent, Group.joined, Place.here(), pool.spec
    state, env_steps = begun.state, begun.env_steps
    if group is not None:
        state, counted = group.spread((state, np.array(env_steps)))
        env_steps = int(counted)
    _, act_key, learn_key = jax.random.split(jax.random.key(config.seed), 3)
    act_key = fold_count(act_key, halves(env_steps))
    envs, many = place.number * pool.num_envs, place.of * pool.num_envs
    ids = np.arange(envs, envs + pool.num_envs).reshape(pool.num_groups, pool.group_size)
    inferences = [
        Inference(agent, spec, env.frame_stack, device, part, many, act_key)
        for device, part in zip(
            inference_devices, np.array_split(ids, len(inference_devices)), strict=True
        )
    ]
    gate = shared_gate(inference_devices, learner_devices)
    updater = LocalUpdater(agent, state, learner_devices)
    learner = Learner(agent, env.frame_stack, learner_devices, learn_key, updater, gate)
    share = Share.of(agent, config, run, env_steps)
    sink, source = _experience(learner, env, pool, share)
    if group is not None:
        kind = LeadingSource if group.leads else FollowingSource
        adds = isinstance(share.experience, Replay)
        source = kind(source, group, adds, config.steps, env_steps)
    learning = LearnerLoop(learner, inferences, source, source.mark)
    for inference in inferences:
        inference.compile(spec)
    acting = InferenceLoop(pool, inferences, sink, begun.episodes, gate, place)
    return Setup(agent, env, config, pool, acting, learning, source, None, gate, group)


def _experience(
    learner: Learner, env: HostEnvConfig, pool: ActorPool, share: Share
) -> tuple[Sink, SavedSource]:
    """Makes what is between acting and learning: either unrolls and their queue, or replay."""
    agent, experience = learner.agent, share.experience
    if learns_from_replay(agent):
        ahead = any(devices.policy_of(device).queues for device in learner.devices)
        transfer = learner.assemble if ahead else None
        feed = ReplayFeed(agent, pool, env.frame_stack, share, transfer)
        return feed, feed
    assert isinstance(experience, OnPolicy), "an agent's experience is one of the two"
    per_batch = experience.batch // pool.group_size
    # The largest lag to expect, in batches, if groups are equally fast: each group completes an unroll while
    # one is being filled, and may complete another one while that waits to enter the queue. Two batches are
    # in the queue before it, and one is being learned from.
    batches = 0 if experience.synchronous else 3 + math.ceil(2 * pool.num_groups / per_batch)
    most_lag = batches * agent.epochs * agent.minibatches
    queue = UnrollQueue(2 * per_batch, per_batch, most_lag, share.env_steps, share.steps)
    output = act_output(agent, pool.spec, env.frame_stack, pool.group_size)
    sink = UnrollSink(queue, experience, pool.spec, env.frame_stack, output, pool.num_groups)
    return sink, queue
