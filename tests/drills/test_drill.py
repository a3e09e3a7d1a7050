"""The drill: every fault, one after another in random order, on machines of namespaces."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time

import pytest
from drill import ENVS, HOSTS, Drill, Found, endure
from faults import FAULTS
from machines import World, find_faketime, head, missing

SEEDS = int(os.environ.get("SEEDBED_DRILL_SEEDS", "20"))
lacking = missing() or ("" if find_faketime() else "libfaketime (pip install -e .[drills])")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(lacking), reason=f"the drill needs {lacking}"),
]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_fault(tmp_path, seed):
    chance, begun = random.Random(seed), time.monotonic()
    found, victims = dict[str, Found](), dict[str, str]()
    try:
        with World(tmp_path) as world:
            drill = Drill(world)
            for fault in chance.sample(FAULTS, len(FAULTS)):
                victim = drill.hosts[chance.randrange(HOSTS)]
                victims[fault.name] = victim.name
                found[fault.name] = endure(drill, fault, victim)
            account = drill.end()
    finally:
        print({name: [round(x, 2) for x in each[:3]] for name, each in found.items()})
    seconds = time.monotonic() - begun
    print(account, f"{seconds:.0f} s")
    assert account.made > 15_000 and account.lives > 30
    assert account.learned > 0.95 * account.made
    # A life may begin with an episode by chance only: one in 23 ends when its episode does.
    assert account.openings < 0.2 * account.lives
    assert account.unlearned_lives < 0.1 * account.lives
    assert seconds < 360
    content = {
        "seed": seed,
        "commit": head(),
        "seconds": seconds,
        "cores": len(os.sched_getaffinity(0)),
        "environments": HOSTS * ENVS,
        "account": dataclasses.asdict(account),
        "victims": victims,
        "found": {name: each._asdict() for name, each in found.items()},
    }
    (tmp_path / "found.json").write_text(json.dumps(content))
