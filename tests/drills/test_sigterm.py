"""SIGTERM at random moments, to every process of a run at once or to one: nothing hangs, and all is saved."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
import types
from pathlib import Path
from typing import Any

import pytest
from gorila_faults import require_books
from machines import head, wait_until
from stopping import (
    CENTRAL,
    GORILA,
    HUNG_S,
    Moment,
    Trained,
    left_of,
    require_end,
    resume,
    shared_memory,
)

from gorila_runs import AGENT, items_of, require_no_gaps, saved_items
from seedbed.central.experience import Share
from seedbed.central.replaying import ReplayFeed
from seedbed.exit_status import ExitStatus
from seedbed.paramserver.job import Job
from seedbed.paramserver.replay_folder import count_items
from seedbed.run.checkpoint_helper import list_steps, name_of
from seedbed.run.folder import RunFolder
from seedbed.run.options import CentralConfig
from seedbed.testing import counting
from seedbed.types import ArraySpec, Discrete, EnvSpec, bind

SEEDS = int(os.environ.get("SEEDBED_DRILL_SEEDS", "20"))
_MORE_STEPS = 400


def central_items(run: Path, step: int) -> list[tuple[int, int, int]]:
    """Returns the items that were saved with a checkpoint of a central run of counting environments."""
    copy = shutil.copytree(run, run.with_name("copy"))
    spec = EnvSpec(ArraySpec((4,), "int32"), Discrete(counting.NUM_ACTIONS))
    pool: Any = types.SimpleNamespace(spec=spec, num_groups=4, group_size=2)
    share = Share.of(AGENT, CentralConfig(), RunFolder(copy), 0)
    feed = ReplayFeed(bind(AGENT, spec), pool, 1, share)
    assert feed.restore(step).startswith("replay goes on")
    return items_of(feed.replay)


def require_saved(run: Path, step: int, command: str, harmed: bool) -> dict[str, Any]:
    """Asserts that what was saved with a checkpoint fits together, and lacks nothing; returns counts."""
    found: dict[str, Any] = {}
    counts = command.startswith("counting")
    if (run / "roles").exists():
        found["books"] = require_books(run)
        found["items"], missing = count_items(run, Job.read(run), name_of(step))
        assert not missing
        if counts:
            require_no_gaps(saved_items(run), whole=not harmed)
    elif counts:
        items = central_items(run, step)
        require_no_gaps(items, whole=not harmed)
        found["items"] = len(items)
    return found


def drill(run: Path, commands: tuple[str, ...], seed: int) -> None:
    """Starts a run, stops it at a moment of this seed, checks what is saved, and goes on with it."""
    chance, shared = random.Random(seed), shared_memory()
    command = commands[seed % len(commands)]
    moment = Moment.draw(chance, seed // len(commands) + seed)
    with Trained(run, f"{command} --steps 1_000_000_000") as trained:
        trained.await_moment(moment, chance)
        stopped = trained.stop(moment, chance)
    found = {"seed": seed, "commit": head(), "command": command, "moment": moment._asdict(),
             "seconds": stopped.seconds, "status": stopped.status}  # fmt: skip
    print(found)
    require_end(run, stopped, shared, exact=commands is CENTRAL)
    saved = "stopped and saved" in stopped.said
    steps = (list_steps(run / "checkpoints") or [0])[-1]
    if saved:
        found |= require_saved(run, steps, command, stopped.harmed)
        print(found)
    said = resume(run, command, _MORE_STEPS)
    if saved:
        assert f"going on from step {steps:,} " in said, said
        assert "filling it again" not in said, said
    if saved and steps and "items" in found and commands is CENTRAL:
        assert f"replay goes on with {found['items']:,} items" in said, said
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


@pytest.mark.slow
def test_what_is_given_up_by_a_second_ctrl_c_leaves_no_role(tmp_path):
    """A terminal sends it to the coordinator only; nothing else has told the roles to end."""
    run = tmp_path / "run"
    with Trained(run, f"{GORILA[0]} --steps 1_000_000_000") as trained:
        wait_until(lambda: len(left_of(run)) > 4, "roles that start", 60)
        for _ in range(2):
            trained.popen.send_signal(signal.SIGINT)
            time.sleep(0.3)
        trained.popen.wait(HUNG_S)
        wait_until(lambda: not left_of(run), "the end of all roles", 10)
    assert trained.popen.returncode in (ExitStatus.GIVEN_UP, ExitStatus.STOPPED), trained.said()


@pytest.mark.slow
def test_every_process_of_a_central_run_at_once(tmp_path):
    run, chance = tmp_path / "run", random.Random(0)
    shared = shared_memory()
    with Trained(run, f"{CENTRAL[0]} --steps 1_000_000_000") as trained:
        moment = Moment("SAVED", 1.0, "all")
        trained.await_moment(moment, chance)
        stopped = trained.stop(moment, chance)
    assert stopped.status == ExitStatus.STOPPED, stopped.said
    require_end(run, stopped, shared, exact=True)
