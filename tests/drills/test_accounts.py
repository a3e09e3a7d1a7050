"""The comparison of accounts finds what it is there for."""

from __future__ import annotations

from pathlib import Path

import accounts
import faults
import numpy as np
import pytest
import recording
from recording import END, OPENING, RECORD, RESET, STEP, UNROLLS, Unroll

T = 4


def write(folder: Path, kinds: list[int], unrolls: list[int], environment: int = 7) -> None:
    """Writes the records of an environment, and unrolls from these numbers on."""
    ages, rows = [], []
    for number, kind in enumerate(kinds, 1):
        ages.append(0 if kind in (OPENING, RESET) else ages[-1] + 1)
        action = 0 if not ages[-1] else 10 + number
        rows.append((number, kind, action, ages[-1], float(number)))
    made = np.array(rows, RECORD)
    (folder / "host").mkdir(exist_ok=True)
    (folder / UNROLLS).mkdir(exist_ok=True)
    (folder / UNROLLS / "a").unlink(missing_ok=True)
    made.tofile(folder / "host" / f"{environment:06x}")
    for start in unrolls:
        part = made[start - 1 : start + T]
        opening = (part["kind"] == OPENING) | (part["kind"] == RESET)
        rewards = [
            0.0 if o else recording.reward_of(environment, int(n))
            for n, o in zip(part["number"], opening, strict=True)
        ]
        observation = np.stack(
            [np.full(T + 1, environment), part["number"], part["age"], part["action"]], axis=1
        )
        unroll = Unroll(
            observation,
            np.array(rewards),
            opening,
            part["kind"] == END,
            part["action"][1:],
            part["age"][:-1],
        )
        batch = Unroll(*(np.asarray(leaf)[:, None] for leaf in vars(unroll).values()))
        recording.write_unrolls(folder / UNROLLS / "a", batch)


TERMS = accounts.Terms(unroll=T, groups=1, size=1)
EPISODE = [OPENING, *[STEP] * 9, END]


def settle(folder: Path, kinds: list[int], unrolls: list[int], **terms: object) -> accounts.Account:
    write(folder, kinds, unrolls)
    changed = {**vars(TERMS), **terms}
    return accounts.settle(folder, accounts.Terms(**changed))


def test_whole_accounts_are_found_whole(tmp_path: Path) -> None:
    found = settle(tmp_path, EPISODE * 2, [1, 5, 9, 13, 17])
    assert found == accounts.Account(environments=1, made=21, learned=20, lives=1)


@pytest.mark.parametrize("kind", [RESET, OPENING])
def test_a_new_life_begins_with_an_unroll(tmp_path: Path, kind: int) -> None:
    # The first life has 11 timesteps, of which the last may not have arrived: two unrolls.
    found = settle(tmp_path, [*EPISODE, kind, *EPISODE[1:]], [1, 5, 12, 16])
    assert (found.learned, found.lives, found.openings) == (16, 2, kind == OPENING)


@pytest.mark.parametrize(
    ("unrolls", "message"),
    [
        ([1, 5, 9, 13], "16 were learned of 21"),
        ([1, 5, 13, 17], "dropped 1 later"),
        ([5, 9, 13, 17], "learner 0 dropped 4 of 1"),
        ([1, 5, 5, 9, 13, 17], "learned from twice"),
    ],
)
def test_lost_and_repeated_unrolls_are_found(tmp_path, unrolls, message) -> None:
    with pytest.raises(AssertionError, match=message):
        settle(tmp_path, EPISODE * 2, unrolls)


def test_a_dead_learner_may_lose_what_was_queued(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="8 were learned of 21"):
        settle(tmp_path, EPISODE * 2, [1, 5])
    settle(tmp_path, EPISODE * 2, [1, 5], deaths=[(20.0, 30.0)])
    with pytest.raises(AssertionError, match="8 were learned of 21"):
        settle(tmp_path, EPISODE * 2, [1, 5], deaths=[(20.0, 30.0)], queued=2)


def test_only_from_the_first_life_with_a_new_learner_is_something_dropped(tmp_path: Path) -> None:
    # Of two groups, the second one's first unroll begins after half of one.
    settle(tmp_path, EPISODE, [3, 7], groups=2)
    with pytest.raises(AssertionError, match="learner 0 dropped 1 of 1"):
        settle(tmp_path, EPISODE, [2, 6], groups=2)
    with pytest.raises(AssertionError, match="dropped 2 later"):
        settle(tmp_path, [*EPISODE, RESET, *EPISODE[1:]], [1, 5, 14, 18], groups=2)


def test_lives_of_which_nothing_was_learned_are_counted(tmp_path: Path) -> None:
    kinds = [OPENING, *[STEP] * 7] + [RESET, *[STEP] * 7] * 4
    found = settle(tmp_path, kinds, [])
    assert (found.lives, found.unlearned_lives) == (5, 5)


def test_zeros_are_of_the_compiler_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, EPISODE, [1])
    (unroll,) = recording.read_unrolls(tmp_path / UNROLLS / "a")
    unroll.observation = unroll.observation * (np.arange(T + 1)[:, None] > 0)
    batch = Unroll(*(np.asarray(leaf)[:, None] for leaf in vars(unroll).values()))
    recording.write_unrolls(tmp_path / UNROLLS / "a", batch)
    with pytest.raises(AssertionError, match="000000 was learned from and never stepped"):
        accounts.settle(tmp_path, TERMS)


@pytest.mark.parametrize("field", ["reward", "action", "first", "ended", "count"])
def test_another_environments_numbers_are_found(tmp_path: Path, field: str) -> None:
    write(tmp_path, EPISODE, [1])
    (unroll,) = recording.read_unrolls(tmp_path / UNROLLS / "a")
    leaf = np.array(getattr(unroll, field), np.float64)
    leaf[2] = 1 - leaf[2]
    setattr(unroll, field, leaf)
    rows = accounts.read_records(tmp_path)[7]
    with pytest.raises(AssertionError, match="another"):
        accounts.compare(unroll, 7, rows)


def test_the_page_has_a_row_for_each_fault() -> None:
    table = (Path(__file__).parents[2] / "docs" / "faults.md").read_text().splitlines()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table if line.startswith("| ")]
    assert rows[1:] == [fault.name for fault in faults.FAULTS]
