"""The replay of a learner, in shards: steps go to them, and batches are drawn from all of them."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from seedbed import trees
from seedbed.central.inference import ActOutput
from seedbed.ops.priorities import importance_weights
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.job import Job
from seedbed.paramserver.leases import Lease, Tally
from seedbed.paramserver.replay_client import Draw, ReplayClient
from seedbed.paramserver.replay_folder import layout_of
from seedbed.replay.host.replay import Sample, empty_sample
from seedbed.run.measures import Stopwatch
from seedbed.run.stacking import FrameTrajectory
from seedbed.types import ActorState, Timestep, Tree

# Batches that are drawn ahead, that of the learner among them.
_BUFFERS = 2


@dataclasses.dataclass
class _Part:
    """Columns of a batch that one shard fills."""

    batch: _Batch
    columns: slice
    client: ReplayClient
    share: float  # of all weights that the shard had when it was chosen


@dataclasses.dataclass(eq=False)
class _Batch:
    """A batch that is being drawn, or was."""

    sample: Sample
    missing: int = 0  # items
    parts: list[_Part] = dataclasses.field(default_factory=list)
    epochs: list[int] = dataclasses.field(default_factory=list)  # of the shards, by part


class ShardedReplay:
    """The replay of a learner: a `central.experience.Sink`, and the source of its batches.

    The inference thread adds, the learner thread takes, and the streams' threads do the rest.
    """

    def __init__(
        self, job: Job, seat: int, learner: int, places: tuple[Directory, Path], seed: int
    ) -> None:
        """Connects to the shards. `seat` is the learner's place among those of the run, from 0 on.

        `places` are the run's directory and its folder of credentials; `seed` is that of choosing shards.
        """
        config, layout = job.config, layout_of(job)
        self._experience, self._layout = layout.experience, layout
        self._size = self._experience.batch
        self._random = np.random.default_rng(seed)
        # Where each group goes: the number of a shard, and of a group there.
        every = range(seat * config.groups, (seat + 1) * config.groups)
        bundled = config.replay == "bundled"
        self._homes = [
            (0, group % config.groups) if bundled else divmod(group, config.replay_shards)[::-1]
            for group in every
        ]
        self.waited = Stopwatch()  # runs while `add` waits for the learner to catch up
        self._lives = [-1] * config.groups
        # Guards what follows; notified when a waiting thread may go on.
        self._work = threading.Condition()
        self._closed = False
        self._lease = Lease()
        self._drawn = self._planned = 0  # items that the learner got, and that were asked for
        self._tags = 0
        self._parts: dict[int, _Part] = {}  # on their way, by tag
        self._homeless: list[_Part] = []  # for which no shard has items
        self._free = [empty_sample(layout, self._size) for _ in range(_BUFFERS)]
        self._ready: collections.deque[_Batch] = collections.deque()
        self._taken: _Batch | None = None
        self._finished = False
        self.steps = config.steps
        shards = [seat] if bundled else range(config.replay_shards)
        self._clients = [
            ReplayClient(layout, shard, learner, places, self._arrive, self._plan)
            for shard in shards
        ]

    @property
    def tally(self) -> Tally:
        """The counts of the learner's work. Any thread may read it."""
        return Tally(
            sum(client.transitions for client in self._clients),
            sum(client.added for client in self._clients),
            self._drawn,
        )

    def renew(self, groups: Sequence[int]) -> None:
        """Does nothing: no group waits for parameters. Call from the inference thread only."""

    def extend(self, lease: Lease) -> None:
        """Takes a new lease. Call from the learner thread only."""
        with self._work:
            self._lease = lease
            self._work.notify_all()
        self._plan()

    @property
    def done(self) -> bool:
        """Whether the run has its steps, or the replay was closed. Any thread may read it."""
        return self._closed or self._lease.total_steps >= self.steps

    @property
    def env_steps(self) -> int:
        """Transitions of all learners, by the last lease. Any thread may read it."""
        return self._lease.total_steps

    @property
    def over(self) -> bool:
        """Whether the replay was closed: until then, others may add what is drawn. Any thread may read it."""
        return self._closed

    @property
    def ended(self) -> bool:
        """Whether nothing more will be added, and the shards have it all. Any thread may read it."""
        return self._finished and self.idle

    @property
    def idle(self) -> bool:
        """Whether the shards have all that was added. Any thread may read it."""
        return all(client.idle for client in self._clients)

    def arrive(self, group: int, life: int, timestep: Timestep) -> bool:
        """Returns True: acting never waits for newer parameters. Call from the inference thread only."""
        return True

    def add(
        self, groups: Sequence[int], lives: Sequence[int], timestep: Timestep, output: ActOutput
    ) -> None:
        """Sends steps, leaves `[k, n, ...]`, to the groups' shards, until `done`; waits for the lease.

        A group's first step in a new life starts new streams. Call from the inference thread only.
        """
        core = output.actor_state.core
        step = jax.tree.map(np.asarray, (timestep, output.action, output.extras, core))
        for position, group in enumerate(groups):
            client, home = self._clients[self._homes[group][0]], self._homes[group][1]
            if not self._may_add(client):
                self.waited.start()
                with self._work:
                    self._work.wait_for(lambda client=client: self.done or self._may_add(client))
                self.waited.stop()
            if self.done:
                return
            opens = lives[position] != self._lives[group]
            self._lives[group] = lives[position]
            mine = trees.map(lambda leaf, at=position: leaf[at], step)
            first = mine[0].first
            client.append(home, opens, first.size - int(np.count_nonzero(first)), mine)

    def _may_add(self, client: ReplayClient) -> bool:
        lease = self._lease
        steps = sum(each.appended for each in self._clients)
        return steps < lease.steps and self.tally.added < lease.added and not client.full

    def flush(self) -> None:
        """Does nothing: `add` has handed on every step. Call from the inference thread only."""

    def finish(self) -> None:
        """Ends all streams behind their last rows. Call from the inference thread only."""
        for client in self._clients:
            mine = [home for number, home in self._homes if self._clients[number] is client]
            client.end(mine)
        self._finished = True

    def _plan(self) -> None:
        """Draws ahead, as far as the lease and the buffers go. Any thread may call this."""
        with self._work:
            self._place(self._take_homeless())
            while (
                self._free
                and not self._closed
                and self._planned + self._size <= self._lease.drawn
                and self._choose(1)
            ):
                batch = _Batch(self._free.pop(), missing=self._size)
                self._planned += self._size
                at = 0
                for client, count, share in self._choose(self._size):
                    part = _Part(batch, slice(at, at + count), client, share)
                    at += count
                    self._ask(part)
            self._work.notify_all()

    def _take_homeless(self) -> list[_Part]:
        homeless, self._homeless = self._homeless, []
        return homeless

    def _place(self, parts: Sequence[_Part]) -> None:
        """Asks shards that have items for parts whose own shard has gone. The lock is held."""
        for part in parts:
            chosen = self._choose(1)
            if not chosen:
                self._homeless.append(part)
                continue
            part.client, _, part.share = chosen[0]
            self._ask(part)

    def _choose(self, count: int) -> list[tuple[ReplayClient, int, float]]:
        """Chooses shards for `count` items, in proportion to their weights; [] if none has items."""
        totals = np.array([client.figures.total for client in self._clients])
        if not totals.sum() > 0:
            return []
        shares = totals / totals.sum()
        counts = self._random.multinomial(count, shares)
        found = zip(self._clients, counts.tolist(), shares.tolist(), strict=True)
        return [each for each in found if each[1]]

    def _ask(self, part: _Part) -> None:
        self._tags += 1
        self._parts[self._tags] = part
        part.client.draw(Draw(self._tags, part.columns.stop - part.columns.start))

    def _arrive(self, client: ReplayClient, tag: int, sample: Sample | None, total: float) -> None:
        """Takes the items of a part, or asks elsewhere for them. The streams' threads call this."""
        with self._work:
            part = self._parts.pop(tag, None)
            if part is None:
                return
            if sample is None:
                self._place([part])
                return
            batch, columns = part.batch, part.columns
            for name in ("timesteps", "action", "extras"):
                trees.map(
                    lambda to, leaf: np.copyto(to[:, columns], leaf),
                    getattr(batch.sample, name),
                    getattr(sample, name),
                )
            for name in ("core", "slots", "generations"):
                trees.map(
                    lambda to, leaf: np.copyto(to[columns], leaf),
                    getattr(batch.sample, name),
                    getattr(sample, name),
                )
            # The shard was chosen by what it had told; it has drawn by what it had then.
            batch.sample.weights[columns] = part.share * sample.weights / total
            batch.parts.append(part)
            batch.epochs.append(client.epoch)
            batch.missing -= columns.stop - columns.start
            if not batch.missing:
                weights = importance_weights(self._experience, batch.sample.weights)
                batch.sample.importance[:] = weights
                self._ready.append(batch)
                self._work.notify_all()

    def take(self, timeout_s: float) -> list[FrameTrajectory]:
        """Waits at most so long for a batch, in numpy buffers that are valid until `learned`; [] is none.

        Call from the learner thread only.
        """
        self.check()
        with self._work:
            self._work.wait_for(lambda: bool(self._ready) or self._closed, timeout_s)
            if not self._ready:
                return []
            self._taken = batch = self._ready.popleft()
            self._drawn += self._size
        sample = batch.sample
        action, extras = jax.tree.map(lambda leaf: leaf[:-1], (sample.action, sample.extras))
        memory = ActorState(sample.core, ())
        return [
            FrameTrajectory(sample.timesteps, action, extras, memory, importance=sample.importance)
        ]

    def learned(self, transitions: int, metrics: dict[str, float], priorities: Tree) -> None:
        """Sends new priorities `[B]` of the last batch's items, unless they are (); takes its buffers back.

        Call from the learner thread only, after `take`.
        """
        del transitions, metrics
        batch, self._taken = self._taken, None
        assert batch is not None, "take comes first"
        if not isinstance(priorities, tuple):
            sample = batch.sample
            for part, epoch in zip(batch.parts, batch.epochs, strict=True):
                columns = part.columns
                part.client.prioritise(
                    epoch,
                    sample.slots[columns],
                    sample.generations[columns],
                    np.asarray(priorities[columns], np.float64),
                )
        with self._work:
            self._free.append(batch.sample)
        self._plan()

    def check(self) -> None:
        """Raises what has ended a stream, if anything has."""
        for client in self._clients:
            if client.failure is not None:
                raise client.failure

    def close(self) -> None:
        """Wakes every thread that waits; nothing passes afterwards. Any thread may call this."""
        with self._work:
            self._closed = True
            self._work.notify_all()

    def release(self) -> None:
        """Ends all streams. Call after `close`, when no other thread uses the replay."""
        for client in self._clients:
            client.close()
