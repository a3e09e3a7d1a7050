"""SIGTERM at random moments, to every process of a run at once or to one: nothing hangs, and all is saved."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from stopping import CENTRAL, GORILA, Moment, Trained, list_steps, metrics, require_end, resume
from test_gorila_drill import head, require_books

from seedbed.exit_status import ExitStatus
from test_paramserver_run import require_no_gaps, saved_items

SEEDS = int(os.environ.get("SEEDBED_DRILL_SEEDS", "20"))
_MORE_STEPS = 400


def drill(run: Path, commands: tuple[str, ...], seed: int) -> None:
    """Starts a run, stops it at a moment of this seed, checks what is saved, and goes on with it."""
    chance, shared = random.Random(seed), set(Path("/dev/shm").iterdir())
    command = commands[seed % len(commands)]
    moment = Moment.draw(chance, seed // len(commands) + seed)
    with Trained(run, f"{command} --steps 1_000_000_000") as trained:
        trained.await_moment(moment, chance)
        stopped = trained.stop(moment, chance)
    found = {"seed": seed, "commit": head(), "command": command, "moment": moment._asdict(),
             "seconds": stopped.seconds, "status": stopped.status}  # fmt: skip
    print(found)
    require_end(run, stopped, shared)
    saved = "stopped and saved" in stopped.said
    steps = (list_steps(run / "checkpoints") or [0])[-1]
    if saved and commands is GORILA:
        found["books"] = require_books(run)
        if command.startswith("counting"):
            items = saved_items(run)
            require_no_gaps(items, whole=False)
            found["items"] = len(items)
    items = metrics(run)[-1].get("replay/items") if saved else None
    said = resume(run, command, _MORE_STEPS)
    if saved:
        assert f"going on from step {steps:,} " in said, said
        assert "filling it again" not in said, said
    if saved and items is not None and commands is CENTRAL:
        assert f"replay goes on with {items:,.0f} items" in said, (items, said)
    (run.parent / "found.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_central_run(tmp_path, seed):
    drill(tmp_path / "run", CENTRAL, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_run_with_parameter_shards(tmp_path, seed):
    drill(tmp_path / "run", GORILA, seed)


def test_every_process_of_a_central_run_at_once(tmp_path):
    run, chance = tmp_path / "run", random.Random(0)
    shared = set(Path("/dev/shm").iterdir())
    with Trained(run, f"{CENTRAL[0]} --steps 1_000_000_000") as trained:
        moment = Moment("SAVED", 1.0, "all")
        trained.await_moment(moment, chance)
        stopped = trained.stop(moment, chance)
    assert stopped.status == ExitStatus.STOPPED, stopped.said
    require_end(run, stopped, shared)
