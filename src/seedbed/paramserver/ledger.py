"""What becomes of each push: the books of a parameter shard, and those of a learner (docs/gorila.md).

A learner numbers its pushes from 1 and sends each to every shard, one at a time. At each shard a push ends in
one of three ways: applied, discarded, or rolled back, if the shard had it and was restored from an earlier
save. Both sides keep books, which agree whenever a stream begins. Without sockets and clocks; for one thread.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from seedbed.types import SeedbedError


class BookError(SeedbedError):
    """Raised if the books of a learner and a shard do not fit.

    The learner's process is to end, and another start of it goes on under another number.
    """


class Version(NamedTuple):
    """The state of a shard's parameters. Versions of different epochs cannot be compared."""

    epoch: int  # the number of the shard's start, which no other start of it has had
    number: int  # gradients applied


class PushOutcome(enum.Enum):
    """The fate of a push at a shard."""

    APPLIED = 1
    DISCARDED = 2  # it was made of parameters that are too old, or is not finite


@dataclasses.dataclass
class PushCounts:
    """How a learner's pushes have ended at a shard."""

    applied: int = 0
    discarded: int = 0
    rolled_back: int = 0

    @property
    def ended(self) -> int:
        """The number of the last push that has ended: all before it have."""
        return self.applied + self.discarded + self.rolled_back

    def enter(self, fate: PushOutcome) -> None:
        """Counts a push."""
        if fate is PushOutcome.APPLIED:
            self.applied += 1
        else:
            self.discarded += 1


class Verdict(NamedTuple):
    """A shard's answer to a push."""

    push: int
    fate: PushOutcome
    version: Version  # after it


class ShardLedger:
    """A shard's books of all learners. What `save` returns belongs to the parameters of that moment."""

    def __init__(self, epoch: int, most_lag: int, number: int = 0, earlier: int = 0) -> None:
        """Opens books of a shard to which `number` gradients were applied already.

        A gradient of parameters more than `most_lag` gradients old is discarded. Learners up to the number
        `earlier` are of an earlier session: what they have done is counted, or lost.
        """
        self.version = Version(epoch, number)
        self._earlier = earlier
        self._most_lag = most_lag
        self._books: dict[int, PushCounts] = {}  # by learner
        self._last: dict[int, Verdict] = {}

    def greet(self, learner: int, ended: int) -> tuple[PushCounts, Verdict | None]:
        """Begins a stream of a learner that knows the end of `ended` pushes; returns books and last verdict.

        Pushes that the learner knows of and the shard does not were rolled back with the shard. Raises
        BookError if the learner is of an earlier session.
        """
        if learner <= self._earlier:
            raise BookError(
                f"learner {learner} is of an earlier session of the run: it goes on under another number"
            )
        books = self._books.setdefault(learner, PushCounts())
        if ended > books.ended:
            books.rolled_back += ended - books.ended
            self._last.pop(learner, None)
        return dataclasses.replace(books), self._last.get(learner)

    def judge(
        self, learner: int, push: int, base: Version, finite: bool = True
    ) -> tuple[Verdict, bool]:
        """Decides about a push of a gradient of parameters of version `base`; says whether it is a new one.

        A gradient that is not `finite` is discarded.
        The gradient of a new push is to be applied if its fate is `APPLIED`; that of a repeated one never.
        Raises BookError if another push must come first, or if one after this has come.
        """
        books = self._books.setdefault(learner, PushCounts())
        last = self._last.get(learner)
        if last is not None and push == last.push:
            return last, False
        if push != books.ended + 1:
            raise BookError(
                f"push {push} of learner {learner} came after push {books.ended}: it goes on under another "
                "number"
            )
        fresh = base.epoch == self.version.epoch
        stale = not fresh or self.version.number - base.number > self._most_lag
        applied = finite and not stale
        if applied:
            self.version = self.version._replace(number=self.version.number + 1)
        verdict = Verdict(
            push, PushOutcome.APPLIED if applied else PushOutcome.DISCARDED, self.version
        )
        books.enter(verdict.fate)
        self._last[learner] = verdict
        return verdict, True

    def close(self, learner: int, push: int) -> None:
        """Discards the pushes up to `push` that are missing, of a learner that the coordinator does not see.

        The learner may still live, and come back: it gets the answer to its last push like any other.
        """
        books = self._books.setdefault(learner, PushCounts())
        if push > books.ended:
            books.discarded += push - books.ended
            self._last[learner] = Verdict(push, PushOutcome.DISCARDED, self.version)

    @property
    def books(self) -> dict[int, PushCounts]:
        """How the pushes have ended, by learner."""
        return self._books

    def save(self) -> dict[str, object]:
        """Returns the books as JSON, to be saved with the parameters of the same moment."""
        return {
            "number": self.version.number,
            "earlier": self._earlier,
            "books": {str(each): dataclasses.astuple(b) for each, b in self._books.items()},
            "last": {str(each): (v.push, v.fate.value) for each, v in self._last.items()},
        }

    @classmethod
    def restore(cls, saved: dict[str, object], epoch: int, most_lag: int) -> ShardLedger:
        """Opens the books that were saved, in another epoch."""
        number, earlier, books, last = (
            saved[name] for name in ("number", "earlier", "books", "last")
        )
        assert isinstance(number, int) and isinstance(earlier, int)
        assert isinstance(books, dict) and isinstance(last, dict)
        ledger = cls(epoch, most_lag, number, earlier)
        ledger._books = {int(each): PushCounts(*counts) for each, counts in books.items()}
        ledger._last = {
            int(each): Verdict(push, PushOutcome(fate), ledger.version)
            for each, (push, fate) in last.items()
        }
        return ledger


class LearnerLedger:
    """A learner's books at one shard. At most one push has no answer."""

    def __init__(self) -> None:
        self.books = PushCounts()
        self.version: Version | None = None  # the newest that the shard has told
        self._sent = 0

    @property
    def waits(self) -> bool:
        """Whether a push has no answer yet."""
        return self._sent > self.books.ended

    @property
    def sent(self) -> int:
        """The number of the last push."""
        return self._sent

    def push(self) -> int:
        """Returns the number of the next push. Every push before it must have its answer."""
        assert not self.waits, "one push at a time"
        self._sent += 1
        return self._sent

    def answer(self, verdict: Verdict) -> bool:
        """Takes an answer; returns False for one that has come before."""
        if not self.waits or verdict.push != self._sent:
            return False
        self.books.enter(verdict.fate)
        self.version = verdict.version
        return True

    def greeted(self, theirs: PushCounts, last: Verdict | None, version: Version) -> bool:
        """Takes the shard's books, as a stream begins; returns whether the last push is to be sent again."""
        self.version = version
        if last is not None and self.waits and last.push == self._sent:
            self.books = dataclasses.replace(theirs)
            return False
        if theirs.ended != self.books.ended:
            raise BookError(
                f"the shard knows of {theirs.ended} pushes that have ended, and this learner of "
                f"{self.books.ended}: it goes on under another number"
            )
        self.books = dataclasses.replace(theirs)
        return self.waits
