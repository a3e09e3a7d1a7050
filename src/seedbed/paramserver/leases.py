"""One count of steps and one ratio of drawing to adding for all learners of a run.

Parameter shard 0 keeps both, since no learner works without it. A learner reports what it has done since its
start, and gets a lease: how far it may go before it has to ask again. When a learner's stream ends, when
it has not asked for long, or when it asks but has done nothing for long, what its lease leaves unused is
given to others. If the learner works on nevertheless, the run exceeds its steps and its ratio by that unused
part at most. Reports are totals, so none counts twice. For one thread.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from seedbed.replay.limiter import SLACK_BATCHES, RatioLimiter
from seedbed.types import Replay

_BATCHES = 4
"""The batches that a lease allows to draw, at most."""
# The steps that a lease allows: so many are enough until the next, and so few that learners end together.
_LEAST_STEPS, _MOST_STEPS = 1 << 10, 1 << 14
# The share of what is left that one lease may take, divided by the number of learners.
_SHARE = 0.5
# Seconds after which a learner that asks, and has done nothing, is not waited for: its replay may be away.
_IDLE_S, _ASKS_S = 30.0, 5.0


class Tally(NamedTuple):
    """The counts of a learner's work since its start."""

    steps: int = 0  # transitions that count
    added: int = 0  # items that came of them
    drawn: int = 0  # items


class Lease(NamedTuple):
    """How far a learner may go, in the counts of its tally; and what all have done."""

    steps: int = 0
    added: int = 0
    drawn: int = 0
    total_steps: int = 0  # of the run


@dataclasses.dataclass
class _Holder:
    """A learner that has a lease."""

    tally: Tally
    until: Tally
    worked_s: float  # when its tally has changed last
    asked_s: float  # when it has asked last


class Leases:
    """The leases of all learners. `save` returns what belongs to the parameters of that moment.

    Drawing may be `SLACK_BATCHES` batches behind for each of the `learners` of the run.
    """

    def __init__(
        self,
        experience: Replay | None,
        steps: int,
        done: int = 0,
        items: int = 0,
        owed: float = 0.0,
        learners: int = 1,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`steps` are those of the run, of which `done` are done; replay holds `items`.

        `owed` draws are asked for already. `experience` is None if the agent learns without replay. `now_s`
        returns the time.
        """
        self._experience, self._steps = experience, steps
        self._learners, self._now_s = learners, now_s
        self._limiter = None if experience is None else RatioLimiter(experience)
        if self._limiter is not None:
            self._limiter.owed = owed
        self._held = items
        self.total_steps = done
        self._tallies: dict[int, Tally] = {}  # by learner
        self._holders: dict[int, _Holder] = {}

    @property
    def owed(self) -> float:
        """Draws that the ratio has asked for, minus those that were made."""
        return 0.0 if self._limiter is None else self._limiter.owed

    def report(self, learner: int, tally: Tally) -> None:
        """Counts what a learner has done since its last report."""
        before = self._tallies.get(learner, Tally())
        steps, added, drawn = (max(0, now - then) for now, then in zip(tally, before, strict=True))
        self._tallies[learner] = Tally(*map(max, tally, before))
        self.total_steps += steps
        if self._limiter is not None and self._experience is not None:
            self._limiter.added(added, self._held)
            self._held = min(self._held + added, self._experience.capacity)
            self._limiter.drawn(drawn)
        if learner in self._holders:
            self._update(self._holders[learner], self._tallies[learner])

    def _update(self, holder: _Holder, tally: Tally) -> None:
        if holder.tally != tally:
            holder.tally, holder.worked_s = tally, self._now_s()

    def lower_held(self, items: int) -> None:
        """Counts no more than these items as held: a replay shard has lost some."""
        self._held = min(self._held, items)

    def lease(self, learner: int) -> Lease:
        """Returns a learner's lease, which may go further than the one before, and never less far."""
        tally = self._tallies.get(learner, Tally())
        now_s = self._now_s()
        holder = self._holders.setdefault(learner, _Holder(tally, tally, now_s, now_s))
        self._update(holder, tally)
        holder.asked_s = now_s
        left = self._left()
        idle_s, silent_s = now_s - _IDLE_S, now_s - _ASKS_S
        # One that does not even ask may be busy with a long update.
        busy = [
            each
            for each in self._holders.values()
            if each is holder or each.worked_s > idle_s or each.asked_s < silent_s
        ]
        taken = Tally(*map(sum, zip(*map(_unused, busy), strict=True)))
        share = _SHARE / max(self._learners, len(busy))
        grants = []
        for name, room, used in zip(Tally._fields, left, taken, strict=True):
            own, free = getattr(_unused(holder), name), room - used
            most = max(1, int(room * share))
            if name == "steps":
                most = min(max(_LEAST_STEPS, most), _MOST_STEPS)
            if name == "drawn" and self._experience is not None:
                batch = self._experience.batch
                most = _BATCHES * batch
                # Part of a batch is of no use.
                free -= (own + free) % batch
            grants.append(max(0, min(free, most - own)))
        until = Tally(
            *(
                max(at, now) + more
                for at, now, more in zip(holder.until, tally, grants, strict=True)
            )
        )
        holder.until = until
        return Lease(*until, self.total_steps)

    def _left(self) -> Tally:
        """Returns what may still be done by all together, those of leases among it."""
        steps = self._steps - self.total_steps
        if self._limiter is None or self._experience is None:
            return Tally(steps, 0, 0)
        experience, owed = self._experience, self._limiter.owed
        missing = max(0, experience.min_size - self._held)
        slack = SLACK_BATCHES * experience.batch * self._learners
        # An item at least, however many draws it asks for.
        beyond = max(int((slack - owed) / experience.ratio), int(owed < slack))
        # Nothing can be drawn while items are missing, so draws that are owed do not keep them out.
        return Tally(steps, missing + beyond, 0 if missing else int(owed))

    def expire(self, learner: int) -> None:
        """Takes back what a learner's lease has left unused."""
        self._holders.pop(learner, None)

    def save(self) -> dict[str, Any]:
        """Returns the counts as JSON types."""
        tallies = {str(learner): list(tally) for learner, tally in self._tallies.items()}
        return {
            "tallies": tallies,
            "total_steps": self.total_steps,
            "held": self._held,
            "owed": self.owed,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on from saved counts; learners report again what they have done since."""
        self._tallies = {int(name): Tally(*counts) for name, counts in saved["tallies"].items()}
        self.total_steps, self._held = saved["total_steps"], saved["held"]
        if self._limiter is not None:
            self._limiter.owed = saved["owed"]


def _unused(holder: _Holder) -> Tally:
    return Tally(
        *(max(0, until - now) for until, now in zip(holder.until, holder.tally, strict=True))
    )
