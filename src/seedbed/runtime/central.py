"""Central inference on one host: actors step environments, this process acts and learns for them."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import jax
import numpy as np

from seedbed.runtime.checkpoint import CheckpointWriter, restore
from seedbed.runtime.checkpoint_writer import list_steps
from seedbed.runtime.config import CentralConfig
from seedbed.runtime.inference import Inference
from seedbed.runtime.learning import Learner
from seedbed.runtime.loops import InferenceLoop, LearnerLoop, UnrollQueue
from seedbed.runtime.metrics import EpisodeStatistics, MetricsLog
from seedbed.runtime.replaying import ReplayFeed
from seedbed.runtime.reporting import Interruption, Start, View, choose_devices, stopping_signals
from seedbed.runtime.run_folder import RunFolder
from seedbed.runtime.stacking import stacked_spec
from seedbed.runtime.supervisor import Setup, Supervisor
from seedbed.transport.pool import ActorPool
from seedbed.types import (
    Agent,
    HostEnvConfig,
    LearnerState,
    OnPolicy,
    Replay,
    ReplayAgent,
    SeedbedError,
    bind,
)

_MODEST = 10
"""How far actors step back for a learner that decides the pace, as with replay: they fill what its serial
parts leave of the cores, instead of coming in bursts. R2D2 gains 9 % on Pong, DQN 20 %."""


def train(
    *, env: HostEnvConfig, agent: Agent, config: CentralConfig, run: RunFolder, view: View
) -> dict[str, Any]:
    """Trains until `config.steps` agent steps are done, and returns a summary of the run.

    A folder that holds checkpoints is gone on with. SIGINT, SIGTERM and SIGHUP stop training and save; a
    second one gives up at once. Raises SeedbedError on what the user can mend, after saving what was
    learned, and KeyboardInterrupt where a signal came before there was anything to save.
    """
    begun = time.monotonic()
    # Acting takes less time than handing it to a thread of JAX's. Without effect once JAX has started.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # A resumed run must not play the episodes again with which it began.
    past = list_steps(run.checkpoints)[-1:] if run.checkpoints.is_dir() else []
    with contextlib.ExitStack() as stack:
        interruption = stack.enter_context(stopping_signals(view))
        pool = stack.enter_context(
            ActorPool(
                env,
                actors=config.num_actors,
                envs_per_actor=config.envs_per_actor,
                seed=config.seed + sum(past),
                niceness=_MODEST if isinstance(agent, ReplayAgent) else 0,
                timeout_s=config.actor_timeout_s,
            )
        )
        view.message(
            f"starting {config.num_actors} actors with {config.envs_per_actor} environments each"
        )
        _await_spec(pool, interruption, view)
        setup = _set_up(env, agent, config, pool, run, view)._replace(begun=begun)
        log = stack.enter_context(contextlib.closing(MetricsLog(run.path, setup.start.env_steps)))
        writer = stack.enter_context(CheckpointWriter(run.checkpoints, config.keep_checkpoints))
        supervisor = Supervisor(setup, log, writer, view, interruption)
        supervisor.run()
        return supervisor.finish()


def _await_spec(pool: ActorPool, interruption: Interruption, view: View) -> None:
    """Waits for the first actor; tells of deaths meanwhile; raises KeyboardInterrupt at a signal."""

    def give_up() -> bool:
        for notice in pool.take_notices():
            view.message(notice)
        return interruption.requested()

    if pool.wait_spec(give_up) is None:
        raise KeyboardInterrupt("interrupted before training began: there was nothing to save")


def _check_sizes(agent: Agent, config: CentralConfig, pool: ActorPool) -> None:
    """Raises SeedbedError where sizes do not divide."""
    experience, learners = agent.experience, len(config.learner_devices)
    batch = experience.batch
    if isinstance(experience, OnPolicy):
        if batch % pool.group_size:
            raise SeedbedError(
                f"agent.batch is {batch} unrolls: it must be a multiple of a group's "
                f"{pool.group_size} environments (half of --envs-per-actor)"
            )
        if batch > pool.num_envs * 2:
            raise SeedbedError(
                f"agent.batch is {batch} unrolls, but there are only {pool.num_envs} environments: "
                "lower it, or raise --actors or --envs-per-actor"
            )
    if batch % (learners * agent.minibatches):
        raise SeedbedError(
            f"agent.batch is {batch}: it must divide by {learners} learner devices x "
            f"{agent.minibatches} minibatches"
        )
    if pool.num_groups < len(config.inference_devices):
        raise SeedbedError(
            f"{len(config.inference_devices)} inference devices for the {pool.num_groups} groups of "
            f"{config.num_actors} actors: name fewer with --inference-devices, or raise --actors"
        )


def _total_updates(agent: Agent, steps: int) -> int:
    """Updates of a run of this many agent steps."""
    experience = agent.experience
    if isinstance(experience, Replay):
        items = max(0, steps // experience.period - experience.min_size)
        return math.ceil(items * experience.ratio / experience.batch)
    batches = -(-steps // (experience.unroll * experience.batch))
    return batches * agent.epochs * agent.minibatches


def _set_up(
    env: HostEnvConfig,
    agent: Agent,
    config: CentralConfig,
    pool: ActorPool,
    run: RunFolder,
    view: View,
) -> Setup:
    inference_devices = choose_devices(config.inference_devices, "--inference-devices")
    learner_devices = choose_devices(config.learner_devices, "--learner-devices")
    spec = pool.spec
    _check_sizes(agent, config, pool)
    total = _total_updates(agent, config.steps)
    agent = bind(agent, stacked_spec(spec, env.frame_stack), total)
    run_key = jax.random.key(config.seed)
    init_key, act_key, learn_key = jax.random.split(run_key, 3)
    state, start, episodes = _initial(agent, init_key, run, pool, view)
    act_key = jax.random.fold_in(act_key, start.env_steps)

    view.message("compiling")
    group_envs = np.arange(pool.num_envs).reshape(pool.num_groups, pool.group_size)
    parts = np.array_split(group_envs, len(inference_devices))
    inferences = [
        Inference(agent, spec, env.frame_stack, device, part, pool.num_envs, act_key)
        for device, part in zip(inference_devices, parts, strict=True)
    ]
    feed: UnrollQueue | ReplayFeed
    if isinstance(agent, ReplayAgent):
        feed = ReplayFeed(agent, pool, env.frame_stack, config, run)
        found = feed.restore(start.env_steps)
        if start.env_steps:
            view.message(found)
    else:
        unrolls = agent.experience.batch // pool.group_size
        feed = UnrollQueue(2 * unrolls, unrolls)
    learner = Learner(agent, env.frame_stack, learner_devices, learn_key)
    learning = LearnerLoop(learner, state, inferences, feed)
    for inference in inferences:
        inference.compile(spec)
    deadline = 0.0 if inference_devices[0].platform == "cpu" else 0.5e-3
    left = config.steps - start.env_steps
    acting = InferenceLoop(pool, inferences, feed, episodes, deadline, left)
    return Setup(agent, env, config, pool, acting, learning, feed, start)


def _initial(
    agent: Agent, key: jax.Array, run: RunFolder, pool: ActorPool, view: View
) -> tuple[LearnerState, Start, EpisodeStatistics]:
    """Makes the initial state, or restores that of the newest whole checkpoint."""
    state = agent.init(key)
    episodes = EpisodeStatistics(pool.num_groups, pool.group_size)
    if not (run.checkpoints.is_dir() and list_steps(run.checkpoints)):
        if (run.path / "metrics.jsonl").exists():
            view.message("the run has no checkpoint yet: starting from the beginning")
        return state, Start(), episodes
    step, state, metadata = restore(run.checkpoints, state, view.message)
    start = Start(**metadata["start"])
    episodes.load(metadata["episodes"])
    view.message(f"going on from step {step:,} ({start.updates:,} learner steps)")
    return state, start, episodes
