"""Compares what environments have recorded with what a learner has learned from (`recording.py`).

Transition i leads from timestep i of an environment to the next one. A life of the environment is a stretch
of timesteps that belong together; the learner gets it in whole unrolls.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
from recording import END, OPENING, RECORD, RESET, UNROLLS, Unroll, read_unrolls, reward_of


@dataclasses.dataclass
class Terms:
    """What a run may lose."""

    unroll: int  # its length T
    groups: int  # that the learner makes room for
    size: int  # environments of a group
    # Times, monotonic, within which a learner was killed or taken over, with what it had not learned yet.
    deaths: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    queued: int = 4  # complete unrolls of an environment that a learner may lose when it dies

    def offsets(self) -> Counter[int]:
        """Returns how many environments of a new learner may drop so many transitions at first.

        The groups of a new learner complete their first unrolls one after the other (`UnrollSink`).
        """
        before = Counter(g * self.unroll // self.groups for g in range(self.groups))
        return Counter({steps: self.size * groups for steps, groups in before.items()})


@dataclasses.dataclass
class Account:
    """What was found."""

    environments: int = 0
    made: int = 0  # transitions that the environments have made
    learned: int = 0
    lives: int = 0


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
    records, account = read_records(folder), Account()
    learned_by = {
        number: np.full(len(rows) + 1, -1)  # the learner that has learned a transition
        for number, rows in records.items()
    }
    for term, path in enumerate(sorted((folder / UNROLLS).iterdir())):
        for unroll in read_unrolls(path):
            environment = int(unroll.observation[0, 0])
            if not environment:
                continue  # zeros, with which the program was compiled
            assert environment in records, f"{environment:06x} was learned from and never stepped"
            compare(unroll, environment, records[environment])
            numbers = unroll.observation[:-1, 1].astype(int)
            repeated = numbers[learned_by[environment][numbers] >= 0]
            assert not repeated.size, f"{environment:06x}: {repeated} were learned from twice"
            learned_by[environment][numbers] = term
    dropped: Counter[tuple[int, int]] = Counter()  # environments by learner and first dropped
    for environment, rows in records.items():
        if len(rows):
            learned = learned_by[environment]
            account.environments += 1
            account.made += len(rows) - 1
            account.learned += int((learned >= 0).sum())
            account.lives += check_lives(f"{environment:06x}", rows, learned, terms, dropped)
    allowed = terms.offsets()
    for (term, steps), environments in dropped.items():
        assert environments <= allowed[steps], f"learner {term} dropped {steps} of {environments}"
    return account


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


def check_lives(
    name: str,
    rows: np.ndarray,
    learned: np.ndarray,
    terms: Terms,
    dropped: Counter[tuple[int, int]],
) -> int:
    """Checks that every life was learned up to its last whole unroll; returns the number of lives.

    Counts in `dropped` the transitions at the beginning that a new learner leaves out.
    """
    assert rows["number"].tolist() == list(range(1, len(rows) + 1)), f"{name}: its own records"
    first, lives = 1, 0
    while first <= len(rows):
        begun, ended, last = bounds(rows, learned, first)
        check_life(f"{name}, {first} to {last}", (first, begun, ended, last), rows, terms)
        if begun > first and begun < ended:
            dropped[int(learned[begun]), begun - first] += 1
        first, lives = last + 1, lives + 1
    return lives


def bounds(rows: np.ndarray, learned: np.ndarray, first: int) -> tuple[int, int, int]:
    """Finds a life from timestep `first`: [begun, ended), the transitions that were learned, and its end.

    A reset in the middle of an episode begins another life. An opening timestep may; it does if it is learned
    from, and the transition that led to it is not.
    """
    resets = np.flatnonzero(rows["kind"][first:] == RESET)
    last = first + int(resets[0]) if resets.size else len(rows)
    stretch = learned[first:last] >= 0  # transitions from `first` on
    if not stretch.any():
        return first, first, last
    begun = first + int(stretch.argmax())
    rest = ~(learned[begun:last] >= 0)
    ended = begun + int(rest.argmax()) if rest.any() else last
    later = np.flatnonzero(learned[ended:last] >= 0)
    if not later.size:
        return begun, ended, last
    # The next life begins with an opening timestep, maybe with some that a new learner has dropped.
    again = ended + int(later[0])
    openings = np.flatnonzero(rows["kind"][ended:again] == OPENING)
    return begun, ended, ended + int(openings[-1]) if openings.size else again - 1


def check_life(name: str, life: tuple[int, int, int, int], rows: np.ndarray, terms: Terms) -> None:
    """Raises AssertionError if more of a life is lost than its last part of an unroll."""
    first, begun, ended, last = life
    if last < len(rows):
        assert rows["kind"][last] in (OPENING, RESET), f"{name}: a gap within an episode"
    assert begun - first < terms.unroll, f"{name}: {begun - first} were dropped at first"
    time = float(rows["time"][last - 1])
    dead = any(since <= time <= until for since, until in terms.deaths)
    if begun == ended:
        # The first unroll of a new learner may be dropped, too.
        most = (2 + dead * terms.queued) * terms.unroll
        assert last - first <= most, f"{name}: nothing was learned of {last - first}"
        return
    whole = {(made - begun) // terms.unroll * terms.unroll for made in (last, last - 1)}
    if dead:
        most = max(whole)
        whole |= {most - n * terms.unroll for n in range(1, 1 + terms.queued)}
    assert ended - begun in whole, f"{name}: {ended - begun} were learned of {last - begun}"
