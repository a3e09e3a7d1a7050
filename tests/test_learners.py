"""Processes of the central runtime that learn as one: equal updates, and those that are lost."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import joined_learner
from seedbed import cli
from seedbed.central.sharing import FollowingSource, LeadingSource
from seedbed.config import flags, resolve, settle
from seedbed.exit_status import ExitStatus
from seedbed.launch import as_one, members
from seedbed.run.group import Group
from seedbed.run.member import Member
from seedbed.run.options import CentralConfig, ParamServerConfig
from seedbed.streams.addresses import bind_listener, joined_address
from seedbed.types import SeedbedError
from test_together import ENDLESS, RANK, Job
from waiting import wait_for

HELPER = Path(joined_learner.__file__)


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """The leaves of what two processes have learned, by process and agent."""
    folder = tmp_path_factory.mktemp("joined")
    with bind_listener("127.0.0.1", 0, 0) as free:
        address = joined_address("127.0.0.1", free.getsockname()[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    outs = [folder / f"out-{number}" for number in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HELPER), str(number), "2", address, str(out)], env=environment
        )
        for number, out in enumerate(outs)
    ]
    try:
        assert [process.wait(300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [pickle.loads(out.read_bytes()) for out in outs]


@pytest.mark.slow
@pytest.mark.parametrize("name", joined_learner.AGENTS)
def test_two_processes_learn_as_one_from_the_same_trajectories(joined, name):
    state, metrics, priorities = joined_learner.learned(name)
    assert metrics and state.updates == joined_learner.UPDATES * (4 if name == "ppo" else 1)
    width = joined_learner.BATCH // 2
    for number, leaves in enumerate(found[name] for found in joined):
        rows = slice(number * width, (number + 1) * width)
        mine = jax.tree.map(lambda leaf: leaf[rows], priorities)  # noqa: B023
        expected = jax.tree.leaves((state, metrics, mine))
        for ours, theirs in zip(leaves, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_two_devices_draw_the_noise_of_a_loss_as_one():
    one, two = (joined_learner.learned("sac", indices=indices) for indices in ((0,), (0, 1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, two)


OFTEN = shlex.split(
    "--evaluate-every 0 --evaluate-episodes 2 --log-every-s 0.1 --checkpoint-every-s 0.5"
)
IMPALA = shlex.split(
    "cartpole/impala --actors 2 --envs-per-actor 8 --agent.batch 24 --agent.hidden-sizes 8"
)


@pytest.mark.slow
def test_a_central_run_of_two_goes_on_with_three_and_with_one(tmp_path):
    run = tmp_path / "run"
    for learners in (2, 3):
        words = [*IMPALA, *OFTEN, "--steps", str(ENDLESS)] if learners == 2 else ["--resume"]
        with Job(run, learners, *words, "--learners", str(learners)) as job:
            job.await_learning()
            job.ranks[0].send_signal(signal.SIGTERM)
            assert job.end() == [ExitStatus.STOPPED] * learners, job.text()
        assert f"training as one learner, divided among {learners} processes" in job.text()
        assert "stopped and saved; go on with" in job.text()
    before = lines(run)[-1]
    steps = before["env_steps"] + 2000
    assert cli.main(["train", "--resume", "--run", str(run)]) == ExitStatus.FAILED
    words = ["train", "--resume", "--run", str(run), "--learners", "1", "--steps", str(steps)]
    assert cli.main(words) == 0
    after = lines(run)[-1]
    assert after["env_steps"] >= steps and after["learner_steps"] > before["learner_steps"] > 0
    # All count what all have learned from, once.
    each = after["env_steps"] / after["learner_steps"]
    assert 0.9 * 24 * 8 < each <= 24 * 8


DQN = ("CartPole-v1", "--agent", "dqn", "--agent.min-size", "600", "--agent.hidden-sizes", "8")


@pytest.mark.slow
def test_a_central_run_goes_on_without_processes_that_are_killed_or_leave(tmp_path):
    words = [*DQN, "--agent.batch", "24", "--actors", "1", *OFTEN, "--steps", str(ENDLESS)]
    kept = "replay goes on with"
    with Job(tmp_path / "run", 3, *words, "--learners", "3") as job:
        job.await_learning()
        job.member(1).kill()
        wait_for(lambda: "3 of 3 processes go on" in job.text(), job.ranks[0])
        assert "the process of rank 1 was killed by signal 9" in job.text()
        job.await_learning()
        # Each has kept its own part of the replay.
        assert [job.text(rank).count(kept) for rank in range(3)] == [1, 1, 1]
        job.ranks[1].kill()
        wait_for(lambda: "rank 1 is gone: 2 of 3 processes" in job.text(), job.ranks[0])
        job.await_learning()
        assert min(job.text(rank).count(kept) for rank in (0, 2)) >= 2
        job.ranks[2].send_signal(signal.SIGTERM)
        assert job.ranks[2].wait(100) == ExitStatus.STOPPED
        wait_for(lambda: "1 of 3 processes go on" in job.text(), job.ranks[0])
        job.await_learning()
        job.ranks[0].send_signal(signal.SIGTERM)
        assert job.end() == [ExitStatus.STOPPED, -signal.SIGKILL, ExitStatus.STOPPED]


@pytest.mark.slow
def test_replays_of_several_processes_make_the_steps_and_updates_of_the_run(tmp_path):
    words = [*DQN, "--agent.batch", "24", "--agent.ratio", "1.2", *OFTEN, "--steps", "20000"]
    with Job(tmp_path / "run", 2, *words, "--learners", "2") as job:
        assert job.end() == [0, 0], job.text()
    last = lines(tmp_path / "run")[-1]
    assert 20000 <= last["env_steps"] < 20000 + 4000
    # Of what comes after `min_size`, each item is drawn 1.2 times, but for eight batches of each process.
    owed = (last["env_steps"] - 600) * 1.2 / 24
    assert 0.9 * owed - 16 < last["learner_steps"] <= owed


@pytest.mark.slow
def test_what_a_process_fails_of_ends_the_job_and_is_told(tmp_path):
    words = ["failing_member:make", "--agent", "impala", "--agent.batch", "32", *OFTEN]
    with Job(tmp_path / "run", 2, *words, "--steps", str(ENDLESS), "--learners", "2") as job:
        assert job.end() == [ExitStatus.FAILED] * 2, job.text()
    assert "process 1 of this learner has failed" in job.text()
    assert "the licence of this machine is used up" in job.text()
    assert "go on as one learner" not in job.text(), "there was no second round"
    assert lines(tmp_path / "run")[-1]["learner_steps"] > 0


@pytest.mark.slow
def test_an_agent_that_acts_stops_and_learns_has_learners_too(tmp_path):
    words = ["CartPole-v1", "--agent", "ppo", "--agent.batch", "32", "--steps", "20000", *OFTEN]
    with Job(tmp_path / "run", 2, *words, "--learners", "2") as job:
        assert job.end() == [0, 0], job.text()
    last = lines(tmp_path / "run")[-1]
    assert last["env_steps"] >= 20000 and last["lag_max"] <= 40 + 1
    assert "rank 1 ended: the run has ended" in job.text(1)


def test_a_job_has_as_many_processes_as_learners():
    config = {"central": {"learners": 3}}
    assert as_one.learn_as_one(config, RANK, "")
    assert not as_one.learn_as_one(config, RANK, "1")
    with pytest.raises(SeedbedError, match="learners is 2, but the job has 3 processes: give --le"):
        as_one.learn_as_one(config, RANK, "2")
    for asked in ("", "3", "4"):
        assert not as_one.learn_as_one({"paramserver": {"learners": 2}}, RANK, asked)
    assert as_one.learn_as_one({"fused": {}}, RANK, "")


def test_a_batch_is_divided_among_learners_as_their_groups_allow():
    central = {"actors": 2, "envs_per_actor": 8, "learner_devices": [0]}
    unrolls = {"agent": {"batch": 48, "unroll": 8}, "central": central}
    # 48 are three unrolls of each of 16 environments: 24 of two processes would not be any.
    assert [as_one.parts_of(unrolls).most(there) for there in (3, 2)] == [3, 1]
    unrolls["agent"]["batch"] = 24
    assert as_one.parts_of(unrolls).most(4) == 3
    # A run that had hosts for its actors has none of its own.
    assert as_one.parts_of({**unrolls, "central": central | {"actors": 0}}).most(3) == 3
    replay = {"agent": {"batch": 32}, "central": central}
    assert [as_one.parts_of(replay).most(there) for there in (3, 2)] == [2, 2]


def test_one_process_refuses_to_be_several(tmp_path, capsys):
    words = ["train", *IMPALA, "--learners", "2", "--run", str(tmp_path / "run")]
    assert cli.main(words) == ExitStatus.FAILED
    assert "learners is 2, and this process is alone" in capsys.readouterr().err
    assert cli.main([*words, "--agent.batch", "25"]) == ExitStatus.FAILED
    assert "agent.batch is 25: it must divide by 2 learners" in capsys.readouterr().err
    assert cli.main([*words, "--listen", "127.0.0.1:0"]) == ExitStatus.FAILED
    assert "learners is 2, each with own actors: leave out --listen" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_each_runtime_has_learners_and_actors_of_its_own():
    central = resolve.train_config("pong/dqn")
    gorila = settle.in_runtime(central, "paramserver")
    assert isinstance(gorila.runtime, ParamServerConfig) and gorila.runtime.learners == 2
    back = settle.in_runtime(gorila, "central")
    assert isinstance(back.runtime, CentralConfig) and back.runtime.learners == 1
    assert (gorila.runtime.actors, back.runtime.actors) == (1, 0), "one of a learner, open"


def test_the_last_of_several_values_counts():
    words = ["--learners", "2", "--central.learners=3", "--actors", "4"]
    assert flags.given(words, "--learners") == "3" and flags.given(words, "--steps") == ""


class Service:
    """The coordination service, in which a key comes when it has been asked for often enough."""

    def __init__(self, comes: dict[str, int]) -> None:
        self.comes, self.values, self.waits = comes, dict[str, str](), list[int]()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self.values[key] = value

    def key_value_delete(self, key: str) -> None:
        self.values.pop(key, None)

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [each for each in self.values.items() if each[0].startswith(folder)]

    def key_value_try_get(self, key: str) -> str:
        return self.blocking_key_value_get(key, 0)

    def blocking_key_value_get(self, key: str, wait_ms: int) -> str:
        self.waits.append(wait_ms)
        self.comes[key] = self.comes.get(key, 99) - 1
        if key not in self.values and self.comes[key] > 0:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values.get(key, "")


def group_of(service: Service, number: int, of: int) -> Group:
    """Returns a group that has joined nobody."""
    group = object.__new__(Group)
    group.member, group.lacks = Member(number, of, number, "", "", 0), False
    group.__dict__ |= {"_client": service, "_commands": 0, "_commanding": threading.Lock()}
    return group


def own_source(**given: object) -> types.SimpleNamespace:
    """Returns a source without batches."""
    nothing = {"env_steps": 10, "save": lambda step, settle: None, "take": lambda timeout_s: []}
    return types.SimpleNamespace(**nothing | given)


def test_a_signal_while_all_save_and_end_loses_no_checkpoint():
    group = group_of(Service({"saved-1/1": 3, "ended/1": 3}), 0, 2)

    def look() -> None:
        raise InterruptedError

    group.look = look
    with group.leading():
        LeadingSource(own_source(), group, False, 100, 10).save(10, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(InterruptedError):
        group.meet("program-1")
    group._client.key_value_set("failed/1", "no room")
    with pytest.raises(SeedbedError, match="process 1 of this learner has failed: no room"):
        group.meet("saved-2", looks=False)


def test_steps_of_others_count_when_all_have_told_theirs():
    service = Service({})
    source = LeadingSource(own_source(), group_of(service, 0, 3), True, 100, 40)  # type: ignore[arg-type]
    service.key_value_set("count/1", "11")
    source._count()
    assert source.env_steps == 40, "as it was when the run went on"
    service.key_value_set("count/2", "21")
    source._count()
    assert source.env_steps == 10 + 11 + 21


@pytest.mark.parametrize("over", [False, True])
def test_a_process_without_steps_to_come_waits_for_its_leader(over):
    service = Service({})
    source = FollowingSource(own_source(over=over), group_of(service, 1, 2), False, 100, 10)  # type: ignore[arg-type]
    assert source.take(0.0) == []
    assert service.waits == [1000 if over else 0]


def test_a_run_that_listened_goes_on_with_learners():
    words = ["--listen", ":4711", "--advertise", "here", "--stream-groups", "8", "--learners", "1"]
    listening = flags.override(resolve.train_config("pong/impala"), words, False)
    assert isinstance(listening.runtime, CentralConfig)
    given = ["--learners", "2"]
    more = members.sizes_for(listening.runtime, given)
    joined = flags.override(listening, [*given, *more], False).runtime
    assert joined == CentralConfig(**vars(joined) | {"listen": "", "advertise": (), "learners": 2})
