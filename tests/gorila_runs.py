"""Runs of the parameter-server runtime, and the items that they have saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from central_runs import View, counting_env
from counting_agent import CountingReplayAgent, check_item
from seedbed import trees
from seedbed.paramserver import train as paramserver
from seedbed.paramserver.job import Job
from seedbed.paramserver.replay_folder import layout_of, role_of
from seedbed.replay.host.replay import HostReplay
from seedbed.run.folder import RunFolder
from seedbed.run.options import ParamServerConfig
from seedbed.testing import counting

AGENT = CountingReplayAgent(capacity=100_000, min_size=20, ratio=0.5)


def train(folder: Path, view: View | None = None, env=None, agent=AGENT, resume=False, **options):
    view = view or View()
    run = RunFolder.resume(folder, view.message) if resume else RunFolder.create(folder)
    run.write_config({})
    config = {
        "steps": 3000, "learners": 2, "parameter_shards": 2, "replay_shards": 2, "envs_per_actor": 4,
        "log_every_s": 0.2, "evaluate_episodes": 2, "evaluate_every": 0, "checkpoint_every_s": 2.0,
    } | options  # fmt: skip
    try:
        return paramserver.train(
            env=env or counting_env(sleep_s=0.0005),
            agent=agent,
            config=ParamServerConfig(**config),
            run=run,
            view=view,
        )
    finally:
        run.close()


def items_of(replay: HostReplay) -> list[tuple[int, int, int]]:
    """Returns (environment, episode, opening step) of each item of a replay of counting environments."""
    storage, found = replay._storage, []
    slots = np.flatnonzero(storage.items.tree.weights > 0)
    if not len(slots):
        return []
    sample = replay.make_sample(len(slots))
    windows = storage.items.read(slots)
    storage.records.gather(windows, trees.leaves((sample.timesteps, sample.action, sample.extras)))
    storage.read_cores(windows, trees.leaves(sample.core))
    for item in range(len(slots)):
        mine = jax.tree.map(
            lambda leaf, at=item: leaf[:, at],
            (sample.timesteps, sample.action, sample.extras),
        )
        found.append(check_item(*mine, sample.core[item]))
    return found


def saved_items(folder: Path, shards: Sequence[int] = ()) -> list[tuple[int, int, int]]:
    """Returns the items that replay shards, or all, have saved."""
    job, found = Job.read(folder, trusted=True), []
    for shard in shards or range(job.config.replay_shards):
        replay = HostReplay(layout_of(job), Job.folder(folder) / role_of(shard) / "replay")
        assert replay.restore() is not None
        found += items_of(replay)
    return found


def require_no_gaps(items: list[tuple[int, int, int]], whole: bool) -> None:
    """Asserts that no item is there twice and, of lives that nothing has cut, none is missing."""
    assert len(set(items)) == len(items), "an item is there twice"
    if not whole:
        return
    by_env: dict[int, list[tuple[int, int]]] = {}
    for env, episode, step in items:
        by_env.setdefault(env, []).append((episode, step))
    for env, found in by_env.items():
        last = max(episode for episode, _ in found)
        expected = {
            (episode, step)
            for episode in range(last)
            for step in range(0, counting.episode_length(env, episode, 7), AGENT.period)
        }
        assert expected <= set(found), "an item of a whole episode is missing"


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
