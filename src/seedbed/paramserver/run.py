"""A run of the parameter-server runtime as the session drives it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from seedbed.central.evaluation import Evaluation
from seedbed.exit_status import TemporaryError
from seedbed.paramserver.cluster import Cluster, Cut
from seedbed.paramserver.episodes import Episodes
from seedbed.paramserver.meter import ClusterMeter, reports_of
from seedbed.printable import resume_command
from seedbed.run.bucket import name_of as name_of_run
from seedbed.run.checkpoint_helper import list_steps, name_of
from seedbed.run.evaluation import compile_play
from seedbed.run.folder import RunFolder
from seedbed.run.options import ParamServerConfig
from seedbed.run.runtime import Progress, Snapshot
from seedbed.types import Replay

# How often the last cut is tried, and seconds between two.
_LAST_CUTS, _RECUT_S = 5, 2.0


class ClusterRun:
    """The roles of a run, which train by themselves; a `run.runtime.Runtime`. For the session's thread."""

    def __init__(self, cluster: Cluster, folder: RunFolder, episodes: Episodes) -> None:
        """Takes roles that have begun, and the episodes that the run has had."""
        self._cluster, self._folder = cluster, folder
        self._job, self._episodes = cluster.job, episodes
        self._wanted = False
        self._stopped = threading.Event()
        self._play = compile_play(self._job.agent)
        self._evaluations: list[Evaluation] = []
        self._notices: list[str] = []

    @property
    def options(self) -> ParamServerConfig:
        """The options of the run."""
        return self._job.config

    @property
    def frame_skip(self) -> int:
        """The number of simulator frames in a step."""
        return self._job.env.frame_skip

    def start(self) -> None:
        """Does nothing: the roles have begun."""

    def advance(self) -> bool:
        """Waits a moment while the roles work; returns False once nothing is left to learn from.

        Raises SeedbedError if a role has failed for good.
        """
        time.sleep(0.1)
        self._cluster.check()
        # A learner that is started again counts from 0: what it has told before is kept.
        self.recent_episodes()
        return not (self._stopped.is_set() or self._done())

    def _done(self) -> bool:
        """Returns whether all steps are done and the ratio asks for no further batch."""
        cluster, experience = self._cluster, self._job.agent.experience
        first = cluster.parameters[0].report
        reports = [each.report for each in cluster.learners]
        idle = bool(reports) and all(report.get("idle", False) for report in reports)
        batch = experience.batch if isinstance(experience, Replay) else 1
        few = sum(keeper.report.get("items", 0) for keeper in cluster.replay)
        waits = isinstance(experience, Replay) and few < experience.min_size
        return idle and (first.get("owed", 0.0) < batch or waits)

    def stop(self) -> None:
        """Lets `advance` return False. Any thread may call this."""
        self._stopped.set()

    def join(self) -> BaseException | None:
        """Does nothing: the roles end after the last snapshot."""
        return None

    def progress(self) -> Progress:
        """Returns the counts so far, as parameter shard 0 has told them."""
        first = self._cluster.parameters[0].report
        steps, version = first.get("total_steps", 0), first.get("version", [0, 0])
        return Progress(steps, version[1], steps)

    def recent_episodes(self) -> dict[str, float]:
        """Returns the count of episodes of all learners, and means of about the last 100."""
        return self._episodes.take(reports_of(self._cluster))

    def meter(self) -> ClusterMeter:
        """Starts measurements; the first interval begins now."""
        return ClusterMeter(self._cluster, self._episodes)

    def request_snapshot(self) -> None:
        """Asks for a snapshot, which `take_snapshot` makes."""
        self._wanted = True

    def take_snapshot(self) -> Snapshot | None:
        """Makes the snapshot that was asked for: a cut through all shards."""
        if not self._wanted:
            return None
        cut = self._cluster.cut()
        if cut is None:
            return None
        self._wanted = False
        return self._snapshot(cut)

    def last_snapshot(self) -> Snapshot | None:
        """Makes a snapshot after training has ended; raises TemporaryError if there is none.

        A learner whose parameter shard has died needs a moment to find its successor.
        """
        for left in reversed(range(_LAST_CUTS)):
            if (cut := self._cluster.cut()) is not None:
                return self._snapshot(cut)
            if left:
                time.sleep(_RECUT_S)
        full = [each.role.name for each in self._cluster.parameters if each.waits_for_room]
        why = f"the disk of {full[0]} is full" if full else "parameter shards had different pushes"
        raise TemporaryError(
            f"the end of the run could not be saved: {why}; go on from the last checkpoint with: "
            f"{resume_command(name_of_run(self._folder.path))}"
        )

    def _snapshot(self, cut: Cut) -> Snapshot:
        leases = cut.books[0]["leases"]
        # What a resumed run goes on from; tallies of learners that are gone mean nothing then.
        metadata = {
            "items": leases["held"],
            "owed": leases["owed"],
            "episodes": self._episodes.state(),
        }
        return Snapshot(leases["total_steps"], cut.state, metadata, int(cut.state.updates))

    def save_beside(self, step: int, settle: Callable[[], None]) -> None:
        """Saves the replay shards under the name of the checkpoint; failures of the disk become notices."""
        if not self._cluster.replay:
            return
        settle()
        whole = [name_of(each) for each in list_steps(self._folder.checkpoints)[-1:]]
        errors = self._cluster.save_replay(name_of(step), next(iter(whole), None))
        self._notices += [f"{error}; training goes on" for error in errors]

    def evaluate(self, snapshot: Snapshot, seed: int, give_up: Callable[[], bool]) -> Evaluation:
        """Starts an evaluation beside training."""
        del give_up  # the session gives it to `Evaluation.wait`
        job = self._job
        evaluation = Evaluation(
            job.agent, job.env, job.config, self._play, snapshot.arrays.params, seed
        )
        self._evaluations = [evaluation]
        return evaluation

    def take_notices(self) -> list[str]:
        """Returns messages of roles and evaluations, each once."""
        own, self._notices = self._notices, []
        return [
            *own,
            *self._cluster.take_notices(),
            *(
                f"evaluation: {notice}"
                for each in self._evaluations
                for notice in each.take_notices()
            ),
        ]

    def pids(self) -> list[int]:
        """Returns the ids of all other processes of the run."""
        found = [*self._cluster.pids(), *(pid for each in self._evaluations for pid in each.pids)]
        return [pid for pid in found if pid != os.getpid()]
