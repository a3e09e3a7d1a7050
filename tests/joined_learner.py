"""Ten updates from recorded trajectories, by one of several processes that learn as one.

Run as `python joined_learner.py NUMBER OF ADDRESS OUT`; OUT gets the learner states, by agent, of the process
that leads. Imported, `learned` does it in one process.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path

import jax
import numpy as np

from recorded import SPEC, record
from seedbed.agents.dqn import Dqn
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.agents.r2d2 import R2d2
from seedbed.agents.sac import Sac
from seedbed.central.learning import Learner, mean_metrics
from seedbed.central.updater import LocalUpdater
from seedbed.run.devices import choose_shared_devices
from seedbed.run.group import Group, here
from seedbed.run.member import Member
from seedbed.run.stacking import FrameTrajectory
from seedbed.types import Box, EnvSpec, bind, learns_from_replay

BATCH, UPDATES = 16, 10
BOX = Box((2,), (-1.0, -1.0), (1.0, 1.0))
AGENTS = {
    "impala": Impala(batch=BATCH, unroll=6, hidden_sizes=(16,), normalise_observations=True),
    "ppo": Ppo(batch=BATCH, unroll=6, epochs=2, minibatches=2, normalise_returns=True),
    "dqn": Dqn(batch=BATCH, n_step=6, hidden_sizes=(16, 8), target_period=3),
    "r2d2": R2d2(batch=BATCH, sequence=4, burn_in=2, n_step=2),
    "sac": Sac(batch=BATCH, hidden_sizes=(16,)),
}


def batches(name, agent, state):
    """Yields the whole batches that an agent learns from: what it has done, with other rewards in each."""
    timesteps, action, extras, memory = record(agent, state, BATCH)
    rows = 1 + (agent.experience.steps if learns_from_replay(agent) else 6)
    timesteps = jax.tree.map(lambda leaf: leaf[:rows], timesteps)
    action, extras = jax.tree.map(lambda leaf: leaf[: rows - 1], (action, extras))
    for seed in range(UPDATES):
        rng = np.random.default_rng(seed)
        changed = timesteps._replace(
            reward=rng.normal(size=timesteps.reward.shape).astype(np.float32)
        )
        frames = FrameTrajectory(changed, action, extras, memory)
        if learns_from_replay(agent):
            yield frames._replace(importance=rng.uniform(0.5, 1, BATCH).astype(np.float32))
        else:
            yield frames._replace(params_version=np.zeros(action.shape[:2], np.int32))


def part_of(frames, number, of):
    """Returns a process's columns of a whole batch."""
    width = BATCH // of
    columns = slice(number * width, (number + 1) * width)

    def along(axis, tree):
        return jax.tree.map(lambda leaf: np.asarray(leaf)[(slice(None),) * axis + (columns,)], tree)

    axes = FrameTrajectory(1, 1, 1, 0, 1, 0)  # type: ignore[arg-type]
    return FrameTrajectory(*map(along, axes, frames))


def learned(name, number=0, of=1, indices=(0,)):
    """Returns the learner state, the last metrics and this process's priorities after ten updates."""
    spec = EnvSpec(SPEC.observation, BOX) if name == "sac" else SPEC
    agent = bind(AGENTS[name], spec)
    state, devices = agent.init(jax.random.key(0)), choose_shared_devices(indices, "")
    updater = LocalUpdater(agent, state, devices)
    learner = Learner(agent, 1, devices, jax.random.key(5), updater)
    for step, frames in enumerate(batches(name, agent, state)):
        batch = learner.assemble([part_of(frames, number, of)])
        result = learner.update(batch, np.float32(step / UPDATES))
    # Of these two, each process has its own part's, and the metric is their mean.
    of_parts = ("gradient_norm", "explained_variance")
    state, found, priorities = jax.device_get(
        here((updater.state, result.metrics, result.priorities))
    )
    metrics = {k: v for k, v in mean_metrics(found).items() if k not in of_parts}
    return state, metrics, priorities


if __name__ == "__main__":
    number, of, address, out = sys.argv[1:]
    group = Group(Member(int(number), int(of), int(number), address, "lo", os.getppid()))
    found = {name: learned(name, int(number), int(of)) for name in AGENTS}
    leaves = {name: jax.tree.leaves(each) for name, each in found.items()}
    Path(out).write_bytes(pickle.dumps(leaves))
    group.meet("done")
    if group.leads:
        time.sleep(2)  # JAX ends the others with the one that leads
    os._exit(0)
