"""The roles of a run, and what they begin with."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from seedbed.paramserver import learner, replay_folder, replay_shard, shard
from seedbed.paramserver.directory import SAVE, Directory
from seedbed.paramserver.hosts import Hosts
from seedbed.paramserver.job import Job
from seedbed.paramserver.launching import RoleSpec, running
from seedbed.paramserver.leases import Leases
from seedbed.paramserver.ledger import ShardLedger
from seedbed.paramserver.placement import Wish
from seedbed.paramserver.saves import ShardSave
from seedbed.printable import printable
from seedbed.types import LearnerState, Replay, SeedbedError, learns_from_replay


def roles_of(job: Job, run: Path, save: str | None) -> dict[str, list[RoleSpec]]:
    """Returns the roles of a run by kind: parameters, replay and learners.

    Replay shards begin with the save of a name, if it is given; started again, they go on from their newest.
    """
    config = job.config
    saved = () if save is None else ("--save", save)
    trusted = ("--trust-run",) if job.trusted else ()
    replays = config.replay_shards if learns_from_replay(job.agent) else 0
    return {
        "parameters": [
            RoleSpec(shard.role_of(i), shard.__name__, ("--number", str(i), *trusted))
            for i in range(config.parameter_shards)
        ],
        "replay": [
            RoleSpec(
                replay_folder.role_of(i),
                replay_shard.__name__,
                ("--number", str(i), *trusted),
                saved,
            )
            for i in range(replays)
        ],
        "learners": [
            RoleSpec(
                learner.role_of(i),
                learner.__name__,
                ("--number", str(i), *trusted),
                starts=learner.STARTS,
            )
            for i in range(config.learners)
        ],
    }


def write_saves(
    job: Job, run: Path, state: LearnerState, steps: int, items: int, owed: float
) -> None:
    """Writes what the parameter shards begin with: their parts of a state, and books without pushes.

    `steps` transitions of the run are done, replay holds `items`, and `owed` draws are asked for. Learners
    that still live from an earlier session have to begin again. Raises SeedbedError if the disk refuses.
    """
    experience = job.agent.experience
    replay = experience if isinstance(experience, Replay) else None
    updates = int(state.updates)
    host = jax.tree.map(np.asarray, state)
    earlier = _earlier_learners(run)
    for number in range(job.config.parameter_shards):
        folder = job.folder(run) / shard.role_of(number)
        pushes = ShardLedger(0, 0, updates, earlier).save()
        leases = Leases(replay, job.config.steps, steps, items, owed).save()
        leaves = jax.tree.leaves(job.plan.part(host, number))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ShardSave({"pushes": pushes, "leases": leases}, leaves).write(folder / SAVE)
        except OSError as error:
            raise SeedbedError(
                f"{printable(folder)} cannot be written ({error.strerror}): name another folder with --run"
            ) from error


def _earlier_learners(run: Path) -> int:
    """Returns a number that no learner of this session has, and none of an earlier one exceeds."""
    directory = Directory(run)
    try:
        return directory.take_number(learner.STARTS)
    except OSError as error:
        raise SeedbedError(
            f"{printable(directory.path)} cannot be written ({error.strerror}): mend it, or name another "
            "folder with --run"
        ) from error


def is_running(job: Job, run: Path, hosts: Hosts) -> bool:
    """Returns whether all parameter shards of a run go on without a coordinator."""
    names = [role.name for role in roles_of(job, run, None)["parameters"]]
    return all(hosts.holder(name) or running(run, name) for name in names)


def wishes_of(job: Job, roles: dict[str, list[RoleSpec]]) -> list[Wish]:
    """Returns what the roles of a run ask of machines."""
    cores = {"parameters": 0.5, "replay": 0.5, "learners": 1.0 + job.config.actors}
    return [Wish(role.name, kind, cores[kind]) for kind in roles for role in roles[kind]]
