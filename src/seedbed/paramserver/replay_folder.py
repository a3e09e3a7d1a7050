"""Where replay shards keep their items, and how these move when a run goes on with other numbers.

A shard's replay is in `roles/replay-N/replay`. A run that is resumed with another number of shards, or of
groups of environments, first moves these folders to `roles/former`, with the job that they belong to. Each
new shard copies its streams from there, and saves them; then `roles/former` is removed. If the coordinator is
killed meanwhile, the next one begins again from there, and does not take the processes over.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from seedbed.central import replaying
from seedbed.files import load_json, sync, write_json
from seedbed.ops.keys import derived_seed
from seedbed.paramserver.job import Job
from seedbed.printable import printable
from seedbed.replay.host.layout import Layout
from seedbed.replay.host.persistence import saved_items
from seedbed.replay.host.replay import HostReplay
from seedbed.replay.host.writing import Priorities
from seedbed.types import SeedbedError, learns_from_replay

_REPLAY, _CAPACITY = "replay", "capacity.json"
_FORMER = "former"
_ASIDE = f".{_FORMER}"  # not whole yet, or not any more


def role_of(shard: int) -> str:
    """Returns the name of a replay shard's role."""
    return f"replay-{shard}"


def layout_of(job: Job, least_capacity: int = 0) -> Layout:
    """Returns the layout of a replay shard of a run, with room for so many items at least."""
    config, agent = job.config, job.agent
    assert learns_from_replay(agent)
    experience = agent.experience
    capacity = max(-(-experience.capacity // config.replay_shards), least_capacity)
    groups = -(-config.learners * config.groups // config.replay_shards)
    part = dataclasses.replace(
        experience, capacity=capacity, min_size=min(experience.min_size, capacity)
    )
    return replaying.layout_of(agent, part, job.spec, job.frame_stack, groups, config.group_size)


def open_replay(
    run: Path, job: Job, shard: int, save: str | None, priorities: Priorities
) -> HostReplay:
    """Opens a shard's replay with its save of this name, or with the newest if it is None.

    If the run has former shards, it takes its streams over from them, and saves them under that name. Raises
    SeedbedError if the folder cannot be used.
    """
    folder = Job.folder(run) / role_of(shard)
    former = Job.folder(run) / _FORMER
    seed = derived_seed(job.config.seed, shard)
    if save is None or not former.is_dir() or saved_items(folder / _REPLAY, save) is not None:
        replay = HostReplay(layout_of(job, _capacity(folder)), folder / _REPLAY, seed, priorities)
        replay.restore(None if save is None else [save])
        return replay
    sources = _sources(former, job, shard, save)
    moved = sum(source.count(groups) for source, groups in sources)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _CAPACITY, moved)
    except OSError as error:
        raise SeedbedError(
            f"{printable(folder)} cannot be written ({error.strerror}): give this user the right and the "
            "room to write "
            "there, and resume again"
        ) from error
    replay = HostReplay(layout_of(job, moved), folder / _REPLAY, seed, priorities)
    replay.take_over(sources)
    replay.save(save)
    return replay


def _capacity(folder: Path) -> int:
    """Returns the number of items that a shard had to take over, for which it keeps room."""
    try:
        return int(load_json(folder / _CAPACITY))
    except (OSError, ValueError, TypeError):
        return 0


def _sources(
    former: Path, job: Job, shard: int, save: str
) -> list[tuple[HostReplay, dict[int, int]]]:
    """Opens all former shards; returns each with the groups that are this shard's now."""
    before = Job.read(former.parent.parent, former, job.trusted)
    count, groups = job.config.replay_shards, layout_of(job).num_groups
    sources: list[tuple[HostReplay, dict[int, int]]] = []
    stream = mine = 0
    for number in range(before.config.replay_shards):
        folder = former / role_of(number)
        replay = HostReplay(layout_of(before, _capacity(folder)), folder / _REPLAY)
        replay.restore([save])
        chosen: dict[int, int] = {}
        for group in range(replay.layout.num_groups):
            if stream % count == shard:
                chosen[group] = mine % groups
                mine += 1
            stream += 1
        sources.append((replay, chosen))
    return sources


def set_aside(run: Path, job: Job) -> bool:
    """Moves the replay of shards aside if a resumed run has others; returns whether there are former ones.

    Call before the job is written. Raises SeedbedError if the items cannot be taken over.
    """
    roles = Job.folder(run)
    former = roles / _FORMER
    if not former.is_dir():
        before = Job.read(run, trusted=job.trusted)
        if _shape(before) == _shape(job):
            return False
        if before.config.group_size != job.config.group_size:
            raise SeedbedError(
                f"the run had groups of {before.config.group_size} environments, now they are of "
                f"{job.config.group_size}: resume with --envs-per-actor {before.config.envs_per_actor}, or "
                f"remove {roles} to begin with an empty replay"
            )
        aside = roles / _ASIDE
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            before.write(run, aside)
            aside.rename(former)
        except OSError as error:
            raise SeedbedError(
                f"{roles} cannot be written ({error.strerror}): give this user the right and the room to "
                "write there, and resume again"
            ) from error
    before = Job.read(run, former, job.trusted)
    for number in range(before.config.replay_shards):
        folder, there = roles / role_of(number), former / role_of(number)
        if not there.exists() and (folder / _REPLAY).exists():
            folder.rename(there)
    # What an interrupted start has copied is copied again.
    for number in range(job.config.replay_shards):
        shutil.rmtree(roles / role_of(number), ignore_errors=True)
    return True


def count_items(run: Path, job: Job, save: str) -> tuple[int, list[str]]:
    """Returns the number of items in the shards' saves of a name, and the names of shards that have none.

    Call after `set_aside`. If streams are to move, they are those of the former shards.
    """
    folder = Job.folder(run)
    if has_former(run):
        folder = folder / _FORMER
        job = Job.read(run, folder, job.trusted)
    names = [role_of(shard) for shard in range(job.config.replay_shards)]
    found = {name: saved_items(folder / name / _REPLAY, save) for name in names}
    missing = [name for name, items in found.items() if items is None]
    return sum(items or 0 for items in found.values()), missing


def has_former(run: Path) -> bool:
    """Returns whether streams of a run are being moved, or were when it was killed."""
    return (Job.folder(run) / _FORMER).is_dir()


def forget_former(run: Path) -> None:
    """Removes the former shards, when all streams have moved and were saved.

    No start finds a part of them: they are renamed first. Raises SeedbedError if the disk refuses that.
    """
    roles = Job.folder(run)
    former, aside = roles / _FORMER, roles / _ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    if not former.is_dir():
        return
    try:
        former.rename(aside)
        sync(roles)
    except OSError as error:
        raise SeedbedError(
            f"{former} cannot be removed ({error.strerror}): mend the folder, and resume the run"
        ) from error
    shutil.rmtree(aside, ignore_errors=True)


def _shape(job: Job) -> tuple[int, int, int]:
    config = job.config
    return config.replay_shards, config.learners * config.groups, config.group_size
