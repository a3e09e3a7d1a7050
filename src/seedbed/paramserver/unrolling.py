"""The experience of a learner whose agent learns from unrolls as they come."""

from __future__ import annotations

import time

from seedbed.actors.pool import ActorPool
from seedbed.central.inference import act_output
from seedbed.central.unrolls import UnrollQueue, UnrollSink
from seedbed.paramserver.job import Job
from seedbed.paramserver.leases import Lease, Tally
from seedbed.run.stacking import FrameTrajectory
from seedbed.types import Tree, on_policy


class LeasedUnrolls(UnrollSink):
    """Unrolls that go to this learner only, as far as its lease of steps goes.

    A transition counts when it has been learned from. The inference thread adds, the learner thread takes.
    """

    def __init__(self, job: Job, pool: ActorPool) -> None:
        """Allocates memory; the pool must know its spec."""
        experience, config = on_policy(job.agent), job.config
        assert experience is not None
        per_batch = experience.batch // pool.group_size
        # How far learners are behind one another is `cluster/staleness_mean`; the queue tells of no lag.
        endless = 1 << 62
        self._unrolls = UnrollQueue(2 * per_batch, per_batch, endless, 0, endless)
        output = act_output(job.agent, pool.spec, job.frame_stack, pool.group_size)
        super().__init__(
            self._unrolls, experience, pool.spec, job.frame_stack, output, pool.num_groups
        )
        self.steps, self._lease, self._learned = config.steps, Lease(), 0
        self._closed = False

    @property
    def tally(self) -> Tally:
        """The counts of the learner's work. Any thread may read it."""
        return Tally(steps=self._learned)

    @property
    def env_steps(self) -> int:
        """Transitions of all learners, by the last lease. Any thread may read it."""
        return self._lease.total_steps

    @property
    def over(self) -> bool:
        """Whether `close` was called. Any thread may read it."""
        return self._closed

    @property
    def done(self) -> bool:
        """Whether the run has its steps, or the queue was closed. Any thread may read it."""
        return self._unrolls.over or self.env_steps >= self.steps

    @property
    def ended(self) -> bool:
        """Whether nothing more is learned from. Any thread may read it."""
        return self.done

    def extend(self, lease: Lease) -> None:
        """Takes a new lease. Call from the learner thread only."""
        self._lease = lease
        if self.done:
            # Acting may wait for room.
            self._unrolls.close()

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        """Waits at most so long for the unrolls of a batch; returns [] if there is none, or no lease for it.

        Call from the learner thread only.
        """
        if self._learned < self._lease.steps and not self.done:
            return self._unrolls.take(timeout_s)
        time.sleep(timeout_s)
        return []

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Counts the transitions of the last batch. Call from the learner thread only."""
        del metrics, priorities
        self._learned += transitions

    def close(self) -> None:
        """Wakes every thread that waits; nothing passes afterwards. Any thread may call this."""
        self._closed = True
        self._unrolls.close()

    def release(self) -> None:
        """Does nothing: there are no streams. Call when no other thread uses the unrolls."""
