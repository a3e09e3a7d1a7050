"""All roles of a run, as the coordinator sees them: starting, cuts, saves of replay, and the end."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from seedbed.exit_status import TemporaryError
from seedbed.paramserver.beginning import roles_of, wishes_of
from seedbed.paramserver.copies import Copies
from seedbed.paramserver.hosts import Hosts
from seedbed.paramserver.job import Job
from seedbed.paramserver.keeper import Keeper
from seedbed.paramserver.launching import LOG
from seedbed.paramserver.messages import Kind
from seedbed.paramserver.saves import ShardSave
from seedbed.printable import printable, resume_command
from seedbed.run.folder import ROLES
from seedbed.types import LearnerState, Replay

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


class Cluster:
    """The roles of a run and their keepers. For the coordinator's thread."""

    def __init__(
        self, job: Job, run: Path, save: str | None, hosts: Hosts, adopts: bool = False
    ) -> None:
        """Starts all roles that do not run. `save` names the replay's save to go on from.

        `adopts` says whether the run has gone on without a coordinator.
        """
        self.job, self._run, self._hosts = job, run, hosts
        self._roles = roles_of(job, run, save)
        self._layouts = [job.plan.state_layout(i) for i in range(job.plan.shards)]
        # Learning begins with the first cut, the checkpoint from which a run that diverges at once goes on.
        self._cutting = True
        # A replay shard may have been lost that no coordinator has told of, and hosts with folders of their
        # own may begin with fewer items than the run had.
        unsure = adopts or (save is not None and any(not host.shares for host in hosts.look()))
        # Restarts of replay shards after which there were items enough (-1 if nobody knows), and those that
        # the user was told of.
        self._refilled, self._told = -1 if unsure else 0, 0
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
        self._copies = Copies(run, self.parameters, self._fetch, hosts.keeps_apart)

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
        self._copies.tend(time.monotonic())

    def _tell_losses(self) -> None:
        """Tells parameter shard 0 how many items there are after a replay shard has lost some, or may have.

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

        Where a role dies meanwhile, the function is called again for its successor. A role that waits for
        room on its disk has no result, nor has a learner or a replay shard that fails for good: what the
        others have is saved without it.
        """
        futures = [keeper.request(function) for keeper in keepers]
        results: list[_T] = []
        patience_s = _PATIENCE_S if patience_s is None else patience_s
        until_s = time.monotonic() + patience_s
        for number, keeper in enumerate(keepers):
            while keeper.failure is None and not keeper.waits_for_room:
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
            else:
                futures[number].cancel()
        _check(self.parameters)
        return results

    def cut(self) -> Cut | None:
        """Pauses the learners, copies the state of all shards, and lets learners go on.

        A learner that hangs or is gone is left out. Returns None if one that is left out goes on pushing, or
        if a parameter shard waits for room on its disk.
        """
        if any(keeper.waits_for_room for keeper in self.parameters):
            return None
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
            keeper.report["start"]
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

        found = self._ask_all(self.parameters, self._fetch)
        if len(found) < len(self.parameters):
            return None
        ended = [
            {name: sum(counts) for name, counts in save.books["pushes"]["books"].items()}
            for save in found
        ]
        if any(each != ended[0] for each in ended):
            return None
        self._copies.keep(found)
        parts = [save.state(plan.part(plan.state, i)) for i, save in enumerate(found)]
        return Cut(plan.division.join(parts, plan.state), [save.books for save in found])

    def _fetch(self, keeper: Keeper) -> ShardSave:
        """Copies the state of a shard, and its books. In the keeper's thread."""
        layout = self._layouts[self.parameters.index(keeper)]
        message = keeper.ask(Kind.STATE, Kind.STATE)
        block = keeper.caller.take_block(message, layout.size)
        leaves = [np.array(leaf) for leaf in layout.views(block)]
        return ShardSave(message.fields["books"], leaves)

    def save_replay(self, name: str, keep: str | None) -> list[str]:
        """Has all replay shards save under a name, and waits; returns what went wrong.

        A save may take as long as it needs: a shard that hangs meanwhile is killed.
        """

        def save(keeper: Keeper) -> tuple[str, str]:
            while not keeper.ask(Kind.SAVE, Kind.SAVE, name=name, keep=keep).fields["begun"]:
                time.sleep(_POLL_S)
            while name not in (report := keeper.fetch_report())["saved"]:
                time.sleep(_POLL_S)
            return keeper.role.name, report["saved"][name]

        saved = dict(self._ask_all(self.replay, save, patience_s=math.inf))
        # Of those that have not failed, only one without room has no result.
        going_on = [each.role.name for each in self.replay if each.failure is None]
        full = [each for each in going_on if each not in saved]
        errors = [f"{each} was not saved as {name}, as its disk is full" for each in full]
        return [*filter(None, saved.values()), *errors]

    def take_notices(self) -> list[str]:
        """Returns messages of all roles for the user, each once."""
        own, self._notices = self._notices, []
        of_roles = [notice for keeper in self.all for notice in keeper.take_notices()]
        return [*own, *self._hosts.take_notices(), *of_roles, *self._copies.take_notices()]

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
        """Ends all roles, the learners first; leaves them as they are if another coordinator has the run."""
        self._copies.close()
        if self._hosts.taken_over():
            for keeper in self.all:
                keeper.abandon()
            return
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
