"""All roles of a run, as the coordinator sees them: starting, cuts, saves of replay, and the end."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from seedbed.exit_status import TemporaryError
from seedbed.paramserver import learner, replay_folder, replay_shard, shard
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.hosts import Hosts
from seedbed.paramserver.job import Job
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import LOG, RoleSpec, running
from seedbed.paramserver.leases import Leases
from seedbed.paramserver.ledger import ShardLedger
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.placement import Wish
from seedbed.paramserver.saves import NAME, ShardSave
from seedbed.printable import printable, resume_command
from seedbed.run.folder import ROLES
from seedbed.types import LearnerState, Replay, SeedbedError, learns_from_replay

_POLL_S = 0.02
# Seconds in which all roles must have answered, where a snapshot or a save waits for them.
_PATIENCE_S = 120.0
# Seconds in which all roles must have begun.
_READY_S = 600.0
# Seconds in which a learner must have paused, or a snapshot is made without it.
_PAUSE_S = 30.0
# How often a cut is tried, and the seconds between two tries.
_TRIES, _RETRY_S = 20, 0.2
_T = TypeVar("_T")


class Cut(NamedTuple):
    """The state of all parameter shards after the same pushes."""

    state: LearnerState  # whole, on the host
    books: list[dict[str, Any]]  # by shard


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
            RoleSpec(learner.role_of(i), learner.__name__, ("--number", str(i), *trusted))
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
    earlier = Directory(run).take_number("learner")
    experience = job.agent.experience
    replay = experience if isinstance(experience, Replay) else None
    updates = int(state.updates)
    host = jax.tree.map(np.asarray, state)
    for number in range(job.config.parameter_shards):
        folder = job.folder(run) / shard.role_of(number)
        pushes = ShardLedger(0, 0, updates, earlier).save()
        leases = Leases(replay, job.config.steps, steps, items, owed).save()
        leaves = jax.tree.leaves(job.plan.part(host, number))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ShardSave({"pushes": pushes, "leases": leases}, leaves).write(folder / NAME)
        except OSError as error:
            raise SeedbedError(
                f"{printable(folder)} cannot be written ({error.strerror}): name another folder with --run"
            ) from error


def is_running(job: Job, run: Path, hosts: Hosts) -> bool:
    """Returns whether all parameter shards of a run go on without a coordinator."""
    names = [role.name for role in roles_of(job, run, None)["parameters"]]
    return all(hosts.holder(name) or running(run, name) for name in names)


def wishes_of(job: Job, roles: dict[str, list[RoleSpec]]) -> list[Wish]:
    """Returns what the roles of a run ask of machines."""
    cores = {"parameters": 0.5, "replay": 0.5, "learners": 1.0 + job.config.actors}
    return [Wish(role.name, kind, cores[kind]) for kind in roles for role in roles[kind]]


class Cluster:
    """The roles of a run and their keepers. For the coordinator's thread."""

    def __init__(self, job: Job, run: Path, save: str | None, hosts: Hosts) -> None:
        """Starts all roles, or adopts those that run. `save` names the replay's save to go on from."""
        self.job, self._run, self._hosts = job, run, hosts
        self._roles = roles_of(job, run, save)
        self._layouts = [job.plan.state_layout(i) for i in range(job.plan.shards)]
        # Learning begins with the first cut, the checkpoint from which a run that diverges at once goes on.
        self._cutting = True
        # Restarts of replay shards after which there were items enough, and those that were told.
        self._refilled = self._told = 0
        self._notices: list[str] = []
        hosts.plan(wishes_of(job, self._roles))

        sizes = [layout.size for layout in self._layouts]
        self.parameters = [
            Keeper(run, role, size, launcher=hosts.launcher(role))
            for role, size in zip(self._roles["parameters"], sizes, strict=True)
        ]
        self.replay = [
            Keeper(run, role, 0, launcher=hosts.launcher(role)) for role in self._roles["replay"]
        ]
        self.learners = [
            Keeper(run, role, 0, self._greeted, hosts.launcher(role))
            for role in self._roles["learners"]
        ]

    @property
    def all(self) -> list[Keeper]:
        """Returns the keepers of all roles: parameter shards, replay shards, learners."""
        return [*self.parameters, *self.replay, *self.learners]

    def _greeted(self, keeper: Keeper, said: dict[str, Any]) -> None:
        """Lets a learner begin, or pauses it while a cut is being made: its pause ended with its stream."""
        del said
        if self._cutting:
            _pause(keeper)
        else:
            _resume(keeper)

    def check(self) -> None:
        """Tells parameter shard 0 what replay has lost; raises SeedbedError if a role has failed for good."""
        self._hosts.look()
        _check(self.all)
        self._tell_losses()

    def _tell_losses(self) -> None:
        """Tells parameter shard 0 how many items there are after a replay shard was started again.

        It goes on until there are enough to learn from: items that were added in the last moments before the
        shard died are counted later. Shard 0 would let nobody add what it believes to be there.
        """
        restarts = sum(keeper.restarts for keeper in self.replay)
        experience = self.job.agent.experience
        if not isinstance(experience, Replay) or restarts == self._refilled:
            return
        if not all(keeper.reported for keeper in (self.parameters[0], *self.replay)):
            return
        items = sum(keeper.report["items"] for keeper in self.replay)
        if items >= experience.min_size:
            self._refilled = restarts
        elif restarts != self._told:
            self._notices.append(
                f"replay has {items:,} items left and needs {experience.min_size:,}: learners fill it before "
                "they learn on"
            )
            self._told = restarts
        self.parameters[0].request(lambda keeper: keeper.caller.send(Kind.HELD, items=items))

    def await_ready(self, stop: Callable[[], bool]) -> bool:
        """Waits until every role has reported; returns False if `stop` returns True first."""
        until_s = time.monotonic() + _READY_S
        while silent := [keeper for keeper in self.all if not keeper.report]:
            self.check()
            if stop():
                return False
            if time.monotonic() > until_s:
                raise TemporaryError(self._silence(silent[0], _READY_S))
            time.sleep(_POLL_S)
        return True

    def _silence(self, keeper: Keeper, patience_s: float) -> str:
        """Returns what a user is told of a role that does not answer."""
        name, why = keeper.role.name, keeper.caller.last_error
        return (
            f"{name} has not answered for {patience_s:.0f} s{f' ({why})' if why else ''}: see "
            f"{printable(self._run / ROLES / name / LOG)}, and go on with: {resume_command(self._run)}"
        )

    def _ask_all(
        self,
        keepers: Sequence[Keeper],
        function: Callable[[Keeper], _T],
        patience_s: float | None = None,
    ) -> list[_T]:
        """Calls a function in the threads of several roles, and waits for the results.

        Where a role dies meanwhile, the function is called again for its successor. A learner or a replay
        shard that fails for good has no result: what the others have is saved without it.
        """
        futures = [keeper.request(function) for keeper in keepers]
        results: list[_T] = []
        patience_s = _PATIENCE_S if patience_s is None else patience_s
        until_s = time.monotonic() + patience_s
        for number, keeper in enumerate(keepers):
            while keeper.failure is None:
                _check(self.parameters)
                try:
                    results.append(futures[number].result(timeout=0.2))
                    break
                except concurrent.futures.TimeoutError:
                    pass
                except ConnectionError:
                    futures[number] = keeper.request(function)
                if time.monotonic() > until_s:
                    raise TemporaryError(self._silence(keeper, patience_s))
        _check(self.parameters)
        return results

    def cut(self) -> Cut | None:
        """Pauses the learners, copies the state of all shards, and lets learners go on.

        A learner that hangs or is gone is left out. Returns None if one that is left out goes on pushing.
        """
        self._cutting = True
        try:
            self._pause_learners()
            for _ in range(_TRIES):
                self._close_learners()
                if (cut := self._copy()) is not None:
                    return cut
                time.sleep(_RETRY_S)
            return None
        finally:
            self._cutting = False
            # `_greeted` lets a learner go on that comes back later.
            for keeper in self.learners:
                if keeper.connected:
                    keeper.request(_resume)

    def _pause_learners(self) -> None:
        """Asks all learners to pause, and waits for those that are connected, but not for long.

        `_greeted` pauses one that comes back, or begins, meanwhile.
        """
        asked = {keeper: keeper.request(_pause) for keeper in self.learners if keeper.connected}

        def missing(keeper: Keeper) -> bool:
            paused = asked[keeper].done() and keeper.report.get("paused", False)
            return keeper.connected and not paused

        until_s = time.monotonic() + _PAUSE_S
        while any(map(missing, asked)) and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _close_learners(self) -> None:
        """Ends the pushes of learners that have not paused, which some shards may have and others not."""
        paused = {
            keeper.report["learner"]
            for keeper in self.learners
            if keeper.connected and keeper.report.get("paused", False)
        }
        reports = self._ask_all(self.parameters, lambda keeper: keeper.fetch_report())
        ended: dict[int, int] = {}
        for report in reports:
            for name, counts in report["books"].items():
                ended[int(name)] = max(ended.get(int(name), 0), sum(counts))
        others = {number: push for number, push in ended.items() if number not in paused}

        def close(keeper: Keeper) -> None:
            for number, push in others.items():
                keeper.ask(Kind.CLOSE, Kind.CLOSED, learner=number, push=push)

        self._ask_all(self.parameters, close)

    def _copy(self) -> Cut | None:
        """Fetches the state of all shards; returns None if they have not had the same pushes."""
        plan = self.job.plan

        def fetch(keeper: Keeper) -> tuple[list[np.ndarray], dict[str, Any]]:
            layout = self._layouts[self.parameters.index(keeper)]
            message = keeper.ask(Kind.STATE, Kind.STATE)
            block = keeper.caller.take_block(message, layout.size)
            return [np.array(leaf) for leaf in layout.views(block)], message.fields["books"]

        found = self._ask_all(self.parameters, fetch)
        ended = [
            {name: sum(counts) for name, counts in books["pushes"]["books"].items()}
            for _, books in found
        ]
        if any(each != ended[0] for each in ended):
            return None
        structures = [jax.tree.structure(plan.part(plan.state, i)) for i in range(plan.shards)]
        parts = [
            jax.tree.unflatten(structure, leaves)
            for structure, (leaves, _) in zip(structures, found, strict=True)
        ]
        return Cut(plan.division.join(parts, plan.state), [books for _, books in found])

    def save_replay(self, name: str, keep: str | None) -> list[str]:
        """Has all replay shards save under a name, and waits; returns what went wrong.

        A save may take as long as it needs: a shard that hangs meanwhile is killed.
        """

        def save(keeper: Keeper) -> str:
            while not keeper.ask(Kind.SAVE, Kind.SAVE, name=name, keep=keep).fields["begun"]:
                time.sleep(_POLL_S)
            while name not in (report := keeper.fetch_report())["saved"]:
                time.sleep(_POLL_S)
            return report["saved"][name]

        errors = self._ask_all(self.replay, save, patience_s=math.inf)
        return [error for error in errors if error]

    def take_notices(self) -> list[str]:
        """Returns messages of all roles for the user, each once."""
        own, self._notices = self._notices, []
        of_roles = [notice for keeper in self.all for notice in keeper.take_notices()]
        return [*own, *self._hosts.take_notices(), *of_roles]

    def pids(self) -> list[int]:
        """Returns the ids of all processes of this machine, those of actors among them."""
        own = [keeper.pid for keeper in self.all]
        here = [keeper for keeper in self.learners if keeper.pid is not None]
        actors = [pid for keeper in here for pid in keeper.report.get("actor_pids", [])]
        return [pid for pid in [*own, *actors] if pid is not None]

    def end_learners(self) -> None:
        """Ends all learners; the shards stay."""
        _end(self.learners)

    def close(self) -> None:
        """Ends all roles, the learners first."""
        self.end_learners()
        _end([*self.replay, *self.parameters])

    def kill(self) -> None:
        """Ends all roles at once, and does not wait: what they have not saved is lost. For any thread."""
        for keeper in self.all:
            keeper.kill()
        self._hosts.kill()


def _check(keepers: Sequence[Keeper]) -> None:
    for keeper in keepers:
        if keeper.failure is not None:
            raise keeper.failure


def _end(keepers: Sequence[Keeper]) -> None:
    for keeper in keepers:
        keeper.finish()
    for keeper in keepers:
        keeper.close()


def _pause(keeper: Keeper) -> None:
    keeper.ask(Kind.PAUSE, Kind.PAUSE)
    if keeper.report:
        # What was reported before says nothing about this pause.
        keeper.report["paused"] = False


def _resume(keeper: Keeper) -> None:
    keeper.ask(Kind.RESUME, Kind.RESUME)
