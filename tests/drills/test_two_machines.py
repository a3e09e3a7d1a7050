"""docs/many-machines.md on actors of other machines, followed between two machines (`machines.py`)."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from machines import RUNS, Link, Machine, Process, World, missing, wait_until

PAGE = Path(__file__).parents[2] / "docs" / "many-machines.md"
SMALL = "--envs-per-actor 4 --stream-groups 8 --evaluate-every 0 --log-every-s 1 --steps 1_000_000"

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"drills need {missing()}")


def commands() -> list[list[str]]:
    """The commands of the page's first block."""
    block = re.search(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    return [shlex.split(line, comments=True)[1:] for line in block[1].splitlines()]


def swap(command: list[str], **others: str) -> list[str]:
    """Returns a command with other words in the place of some, whose dots and dashes are left out."""
    found = {re.sub(r"\W", "", word): word for word in command}
    assert set(others) <= set(found), (command, others)
    changed = {found[name]: word for name, word in others.items()}
    return [changed.get(word, word) for word in command]


@pytest.mark.slow
@pytest.mark.parametrize(("delay_s", "loss"), [(0.002, 0.0), (0.05, 0.02), (0.2, 0.0)])
def test_the_page_between_two_machines(tmp_path, delay_s, loss):
    learn, join, join_elsewhere = commands()
    learn = swap(learn, pong="counting_environment:make_slow", runspong=f"{RUNS}/pong")
    learn += ["--agent", "counting_agent:CountingAgent", "--agent.actions", "1000", *SMALL.split()]
    allowed = ["--processes", "1", "--allow", "counting_environment"]
    with World(tmp_path) as world:
        there, here = Machine(world, "learner"), Machine(world, "actor")
        link = Link(world, there, here, 1)
        link.set(delay_s=delay_s, loss=loss)
        running: list[Process] = []
        metrics = world.runs / "pong" / "metrics.jsonl"

        def last() -> dict[str, float]:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            return json.loads(lines[-1]) if lines else {}

        def come(done) -> None:
            def seen() -> bool:
                assert all(each.code() is None for each in running), [r.said() for r in running]
                return done()

            wait_until(seen, "the metrics", 120)

        running.append(there.seedbed("learner", *learn))
        come((world.runs / "pong/listen/address.json").exists)
        running.append(here.seedbed("first", *swap(join, runspong=f"{RUNS}/pong"), *allowed))
        come(lambda: last().get("streams/streams") == 2)
        key = world.records / "actor.key"
        shutil.copy(world.runs / "pong/listen/actor.key", key)
        elsewhere = swap(
            join_elsewhere,
            learnerexampleorg4711=f"{link.addresses[0]}:4711",
            actorkey="/srv/actor.key",
        )
        running.append(here.seedbed("second", *elsewhere, *allowed))
        come(lambda: last().get("streams/streams") == 4)
        come(lambda: last()["streams/action_p50_s"] > 2 * delay_s)
        assert last()["env_steps"] > 0 and last()["streams/refused"] == 0
