"""Compares what environments have recorded with what learners have learned from (`recording.py`).

Transition i leads from timestep i of an environment to the next one. A life of the environment is a stretch
of timesteps that belong together; a learner gets it in whole unrolls.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from recording import END, OPENING, RECORD, RESET, UNROLLS, Unroll, read_unrolls, reward_of


@dataclasses.dataclass
class Terms:
    """What a run may lose."""

    unroll: int  # its length T
    groups: int  # that the learner makes room for
    size: int  # environments of a group
    # Times, monotonic, within which a learner has died, with what it had not learned yet.
    deaths: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    queued: int = 4  # complete unrolls of an environment that a learner may lose when it dies

    def offsets(self) -> Counter[int]:
        """Returns of how many environments a new learner drops so many transitions at first.

        Its groups complete their first unrolls one after the other (`UnrollSink`).
        """
        before = Counter(group * self.unroll // self.groups for group in range(self.groups))
        return Counter({steps: self.size * groups for steps, groups in before.items()})


@dataclasses.dataclass
class Account:
    """What was found."""

    environments: int = 0
    made: int = 0  # transitions that the environments have made
    learned: int = 0
    lives: int = 0
    unlearned_lives: int = 0  # longer than an unroll
    openings: int = 0  # lives that begin with an episode, where the one before has ended


class Life(NamedTuple):
    """Timesteps `first` to `last` of an environment, of whose transitions [begun, ended) were learned."""

    first: int
    begun: int
    ended: int
    last: int
    learner: int  # the number of the learner that learned it; -1 if none did

    @property
    def dropped(self) -> int:
        """The transitions before the first that was learned."""
        return self.begun - self.first


def read_records(folder: Path) -> dict[int, np.ndarray]:
    """Returns the records of all machines' environments by their number."""
    found = {}
    for machine in folder.iterdir():
        if machine.is_dir() and machine.name != UNROLLS:
            for path in machine.iterdir():
                if len(path.name) == 6:
                    found[int(path.name, 16)] = np.fromfile(path, RECORD)
    return found


def settle(folder: Path, terms: Terms) -> Account:
    """Compares all records; raises AssertionError for a transition that is lost, repeated or another's."""
    records = read_records(folder)
    # The learner that has learned from a transition, by environment and transition.
    learned = {number: np.full(len(rows) + 1, -1) for number, rows in records.items()}
    for learner, path in enumerate(sorted((folder / UNROLLS).iterdir())):
        for unroll in read_unrolls(path):
            take(learner, unroll, records, learned)
    account, dropped = Account(), Counter[tuple[int, int]]()
    for environment, rows in records.items():
        name = f"{environment:06x}"
        assert rows["number"].tolist() == list(range(1, len(rows) + 1)), f"{name}: its own records"
        account.environments += len(rows) > 0
        account.made += max(0, len(rows) - 1)
        account.learned += int((learned[environment] >= 0).sum())
        learners = set[int]()  # of its lives so far
        for life in lives(rows, learned[environment]):
            check_end(f"{name}, {life}", life, rows, terms)
            account.lives += 1
            account.openings += bool(life.first > 1 and rows["kind"][life.first - 1] == OPENING)
            account.unlearned_lives += (
                life.begun == life.ended and life.last - life.first > terms.unroll
            )
            if life.dropped:
                assert life.learner not in learners, f"{name}, {life}: dropped {life.dropped} later"
                dropped[life.learner, life.dropped] += 1
            learners.add(life.learner)
    allowed = terms.offsets()
    for (learner, steps), environments in dropped.items():
        assert environments <= allowed[steps], (
            f"learner {learner} dropped {steps} of {environments}"
        )
    return account


def take(
    learner: int, unroll: Unroll, records: dict[int, np.ndarray], learned: dict[int, np.ndarray]
) -> None:
    """Compares an unroll, and notes that a learner has learned from it; raises AssertionError."""
    if not unroll.observation.any():
        return  # zeros, with which the program was compiled
    environment = int(unroll.observation[0, 0])
    assert environment in records, f"{environment:06x} was learned from and never stepped"
    compare(unroll, environment, records[environment])
    numbers = unroll.observation[:-1, 1].astype(int)
    notes = learned[environment]
    repeated = numbers[notes[numbers] >= 0]
    assert not repeated.size, f"{environment:06x}: {repeated} were learned from twice"
    notes[numbers] = learner


def compare(unroll: Unroll, environment: int, rows: np.ndarray) -> None:
    """Compares an unroll with its environment's records; raises AssertionError."""
    numbers = unroll.observation[:, 1].astype(int)
    where = f"{environment:06x}, {numbers[0]} to {numbers[-1]}"
    assert (unroll.observation[:, 0] == environment).all(), f"{where}: of several environments"
    assert (np.diff(numbers) == 1).all() and numbers[0] >= 1, f"{where}: {numbers}"
    assert numbers[-1] <= len(rows), f"{where}: only {len(rows)} were made"
    made = rows[numbers - 1]
    opening = (made["kind"] == OPENING) | (made["kind"] == RESET)
    assert (unroll.observation[:, 2] == made["age"]).all(), f"{where}: another age"
    assert (unroll.observation[:, 3] == made["action"]).all(), f"{where}: another action before"
    assert (unroll.first == opening).all(), f"{where}: another first"
    assert (unroll.ended == (made["kind"] == END)).all(), f"{where}: another end"
    rewards = [
        0.0 if o else reward_of(environment, n) for n, o in zip(numbers, opening, strict=True)
    ]
    assert unroll.reward.tolist() == rewards, f"{where}: another reward"
    steps = ~opening[1:]
    assert (unroll.action[steps] == made["action"][1:][steps]).all(), f"{where}: another action"
    assert (unroll.count == made["age"][:-1]).all(), f"{where}: another memory {unroll.count}"


def lives(rows: np.ndarray, learned: np.ndarray) -> Iterator[Life]:
    """Yields the lives of an environment in order.

    `learned` holds the learner of each transition, or -1. A reset in the middle of an episode
    begins another life. An opening timestep may: it does if something before it was not learned from, and
    something after it was.
    """
    first = 1
    while first <= len(rows):
        resets = np.flatnonzero(rows["kind"][first:] == RESET)
        last = first + int(resets[0]) if resets.size else len(rows)
        stretch = learned[first:last] >= 0  # transitions from `first` on
        if not stretch.any():
            yield Life(first, first, first, last, -1)
            first = last + 1
            continue
        begun = first + int(stretch.argmax())
        gaps = np.flatnonzero(learned[begun:last] < 0)
        ended = begun + int(gaps[0]) if gaps.size else last
        later = np.flatnonzero(learned[ended:last] >= 0)
        if later.size:
            # The next life begins with an opening timestep, maybe with some that a new learner has dropped.
            again = ended + int(later[0])
            openings = np.flatnonzero(rows["kind"][ended:again] == OPENING)
            last = ended + int(openings[-1]) if openings.size else again - 1
        yield Life(first, begun, ended, last, int(learned[begun]))
        first = last + 1


def check_end(name: str, life: Life, rows: np.ndarray, terms: Terms) -> None:
    """Raises AssertionError if more is lost of a life than its last part of an unroll."""
    if life.last < len(rows):
        assert rows["kind"][life.last] in (OPENING, RESET), f"{name}: a gap within an episode"
    time = float(rows["time"][life.last - 1])
    dead = any(since <= time <= until for since, until in terms.deaths)
    lost = range(1, 1 + terms.queued if dead else 1)
    if life.begun == life.ended:
        # A new learner drops nearly an unroll at first; `Account.unlearned_lives` counts these lives.
        most = (2 + len(lost)) * terms.unroll
        assert life.last - life.first <= most, f"{name}: nothing was learned"
        return
    # The last timestep may not have arrived.
    whole = {
        (made - life.begun) // terms.unroll * terms.unroll for made in (life.last, life.last - 1)
    }
    whole |= {max(whole) - number * terms.unroll for number in lost}
    got, made = life.ended - life.begun, life.last - life.begun
    assert got in whole, f"{name}: {got} were learned of {made}"
