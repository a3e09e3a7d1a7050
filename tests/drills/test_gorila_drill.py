"""The drill of several learners: every fault, one after another in any order (`gorila_faults.py`)."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from gorila_faults import FAULTS, REPLAY, Drill, Fault, require_books
from machines import World, head, missing, wait_until

from gorila_runs import require_no_gaps, saved_items
from seedbed.exit_status import ExitStatus

SEEDS = int(os.environ.get("SEEDBED_DRILL_SEEDS", "20"))
_PATIENCE_S = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=f"drills need {missing()}"),
]


def endure(drill: Drill, fault: Fault) -> dict[str, float]:
    """Makes a fault; returns the seconds until its victim is back, and until all go on."""
    before, begun = fault.victim and drill.start_of(fault.victim), time.monotonic()
    fault.make(drill)
    begun = time.monotonic() if not fault.victim else begun
    back = 0.0
    if fault.victim:
        back = wait_until(lambda: drill.start_of(fault.victim) != before, fault.name, _PATIENCE_S)
    drill.recovered(_PATIENCE_S)
    return {"back_s": back, "recovery_s": time.monotonic() - begun}


def require_items(run: Path, faults: Sequence[Fault]) -> int:
    """Asserts that no item is there twice, and none is missing where no shard has died; returns how many."""
    lost = {fault.loses for fault in faults}
    count = 0
    for number, name in enumerate(REPLAY):
        items = saved_items(run, [number])
        require_no_gaps(items, whole=name not in lost)
        count += len(items)
    return count


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_fault(tmp_path, seed):
    chance, begun = random.Random(seed), time.monotonic()
    found: dict[str, dict[str, float]] = {}
    faults = chance.sample(FAULTS, len(FAULTS))
    # Items of one replay shard stay, so that none may be missing there.
    spared = chance.choice(REPLAY)
    faults = [fault for fault in faults if fault.loses != spared]
    try:
        with World(tmp_path) as world:
            drill = Drill(world)
            for fault in faults:
                found[fault.name] = endure(drill, fault)
            assert drill.train.terminate() == ExitStatus.STOPPED, drill.train.said()
            wait_until(lambda: drill.learner.code() is not None, "the learner's end", 30)
            assert drill.learner.code() == ExitStatus.FINISHED, drill.learner.said()
            books, items = require_books(drill.run), require_items(drill.run, faults)
    finally:
        print({name: [round(x, 2) for x in each.values()] for name, each in found.items()})
    seconds = time.monotonic() - begun
    print(books, items, f"{seconds:.0f} s")
    assert items > 500 and books["applied"] > 100
    for fault in faults:
        if fault.within_s:
            assert found[fault.name]["back_s"] < fault.within_s, fault.name
    content = {
        "seed": seed,
        "commit": head(),
        "seconds": seconds,
        "books": books,
        "items": items,
        "found": found,
    }
    (tmp_path / "found.json").write_text(json.dumps(content))
