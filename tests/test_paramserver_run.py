"""Whole runs of the parameter-server runtime: every process is real, and some are killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from central_runs import View, counting_env
from counting_agent import CountingAgent
from described import undescribed
from gorila_runs import AGENT, gone, require_no_gaps, saved_items, train
from seedbed.agents.dqn import Dqn
from seedbed.envs.host.gym import GymEnv
from seedbed.exit_status import TrainingDiverged
from seedbed.paramserver import keeper
from seedbed.paramserver.directory import Directory
from seedbed.paramserver.replay_folder import role_of
from seedbed.run.checkpoint_helper import list_steps
from seedbed.run.options import ParamServerConfig
from seedbed.types import SeedbedError
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("importable")


def roles(folder: Path) -> dict[str, int]:
    """Returns the process ids of all roles that have told them."""
    directory = Directory(folder)
    names = [path.name for path in directory.path.iterdir() if (path / "address.json").exists()]
    addresses = {name: directory.find(name) for name in names}
    return {name: address.pid for name, address in addresses.items() if address is not None}


def test_every_step_becomes_an_item_once_and_updates_follow_the_ratio(tmp_path):
    view = View()
    summary = train(tmp_path / "run", view, most_lag=10**6)
    assert summary["env_steps"] >= 3000
    # Each learner may go on to the end of its groups' steps.
    assert summary["env_steps"] < 3000 + 2 * 2 * 2
    items = saved_items(tmp_path / "run")
    require_no_gaps(items, whole=True)
    assert summary["replay/items"] == len(items)
    # An item is drawn half a time on average, those up to min_size not at all.
    updates = (len(items) - AGENT.min_size) * AGENT.ratio / AGENT.batch
    assert abs(summary["learner_steps"] - updates) <= 1
    assert summary["cluster/pushes_applied"] == 2 * summary["learner_steps"]
    assert summary["cluster/pushes_discarded"] == 0
    assert not summary["interrupted"] and summary["cluster/restarts"] == 0
    assert list_steps(tmp_path / "run" / "checkpoints")[-1] == summary["env_steps"]
    assert all(gone(pid) for pid in roles(tmp_path / "run").values())


def in_thread(folder: Path, view: View, **options) -> tuple[threading.Thread, list]:
    results: list = []

    def run() -> None:
        try:
            results.append(train(folder, view, **options))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def steps_of(view: View) -> int:
    return view.lines[-1]["env_steps"] if view.lines else 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parameters-0", "parameters-1", "replay-0", "learner-1"])
def test_the_rest_goes_on_when_a_role_is_killed(tmp_path, victim):
    folder, view = tmp_path / "run", View()
    thread, results = in_thread(folder, view, steps=12_000)
    wait_for(lambda: steps_of(view) > 3000)
    pids, before = roles(folder), steps_of(view)
    os.kill(pids[victim], signal.SIGKILL)
    wait_for(lambda: roles(folder)[victim] != pids[victim], seconds=15)
    wait_for(lambda: steps_of(view) > before + 500)
    thread.join()
    assert not isinstance(results[0], BaseException), results[0]
    assert any(f"{victim} was killed by SIGKILL; started again" in each for each in view.messages)
    now = roles(folder)
    assert {name for name in pids if now[name] != pids[name]} == {victim}
    summary = results[0]
    assert summary["env_steps"] >= 12_000 and summary["cluster/restarts"] == 1
    require_no_gaps(saved_items(folder), whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parameters-0", "replay-1", "learner-0"])
def test_a_role_that_hangs_is_killed_and_started_again(tmp_path, victim, monkeypatch):
    monkeypatch.setattr(keeper, "_HUNG_S", 3.0)
    folder, view = tmp_path / "run", View()
    thread, results = in_thread(folder, view, steps=12_000)
    wait_for(lambda: steps_of(view) > 3000)
    pids, before = roles(folder), steps_of(view)
    os.kill(pids[victim], signal.SIGSTOP)
    wait_for(lambda: roles(folder)[victim] != pids[victim], seconds=30)
    wait_for(lambda: steps_of(view) > before + 500)
    thread.join()
    assert not isinstance(results[0], BaseException), results[0]
    told = f"{victim} was killed, as it gave no sign for 3 s; started again"
    assert [each for each in view.messages if victim in each and "killed" in each] == [told]
    assert gone(pids[victim]) and results[0]["cluster/restarts"] == 1
    require_no_gaps(saved_items(folder), whole=False)


SCRIPT = """
import sys
from pathlib import Path
from gorila_runs import View, train
view = View()
view.message = lambda text: print(text, flush=True)
view.update = lambda metrics: print(metrics["env_steps"], flush=True)
if __name__ == "__main__":
    print(train(Path(sys.argv[1]), view, steps=int(sys.argv[2]), resume=bool(int(sys.argv[3]))))
"""


def start_script(folder: Path, steps: int, resume: bool) -> subprocess.Popen[str]:
    """Starts a coordinator in a process of its own."""
    script = folder.with_name("script.py")
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(folder), str(steps), str(int(resume))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def kill_coordinator(folder: Path) -> dict[str, int]:
    """Starts a run and kills its coordinator after 3000 steps and a checkpoint; returns what goes on."""
    first = start_script(folder, 20_000, resume=False)
    assert first.stdout is not None
    for line in first.stdout:
        late = line.strip().isdecimal() and int(line) > 3000
        # On a busy machine the first checkpoint may come later than so many steps.
        if late and list_steps(folder / "checkpoints"):
            break
    pids = roles(folder)
    first.kill()
    first.communicate()
    time.sleep(2)
    assert not any(gone(pid) for pid in pids.values())
    return pids


@pytest.mark.slow
def test_the_rest_goes_on_without_a_coordinator_and_the_next_one_takes_over(tmp_path):
    folder = tmp_path / "run"
    pids = kill_coordinator(folder)
    second = start_script(folder, 20_000, resume=True)
    out, _ = second.communicate(timeout=300)
    assert second.returncode == 0, out
    assert "the processes of this run go on: taking them over" in out
    assert roles(folder) == pids
    assert all(gone(pid) for pid in pids.values())
    require_no_gaps(saved_items(folder), whole=True)


@pytest.mark.slow
def test_a_signal_while_a_run_is_taken_over_saves_what_has_gone_on(tmp_path):
    folder = tmp_path / "run"
    pids = kill_coordinator(folder)
    saved = list_steps(folder / "checkpoints")[-1]
    second = start_script(folder, 20_000, resume=True)
    assert second.stdout is not None
    assert any("taking them over" in line for line in second.stdout)
    second.send_signal(signal.SIGTERM)
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0 and "'interrupted': True" in out, out
    assert list_steps(folder / "checkpoints")[-1] > saved
    assert all(gone(pid) for pid in pids.values())
    require_no_gaps(saved_items(folder), whole=True)


@pytest.mark.slow
def test_a_coordinator_with_other_options_ends_what_goes_on(tmp_path):
    folder, view = tmp_path / "run", View()
    pids = kill_coordinator(folder)
    saved = list_steps(folder / "checkpoints")[-1]
    others = {"learners": 3, "parameter_shards": 1, "replay_shards": 1}
    summary = train(folder, view, resume=True, steps=saved + 1500, **others)
    assert f"ended {len(pids)} processes of this run" in " ".join(view.messages)
    assert all(gone(pid) for pid in pids.values())
    assert summary["env_steps"] < saved + 1500 + 3 * 2 * 2
    assert summary["cluster/learners"] == 3
    assert "IndexError" not in (folder / "roles" / role_of(0) / "log.txt").read_text()
    require_no_gaps(saved_items(folder), whole=False)


class Stopping(View):
    """Stops the run with a signal when it has so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    def update(self, metrics) -> None:
        super().update(metrics)
        if metrics["env_steps"] >= self._steps:
            self._steps = 1 << 40
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_other_numbers_and_all_its_items(tmp_path):
    folder = tmp_path / "run"
    first = train(folder, Stopping(2000), steps=100_000)
    assert first["interrupted"]
    step, before = list_steps(folder / "checkpoints")[-1], sorted(saved_items(folder))
    # It has its steps already: nothing is added.
    view, numbers = View(), {"learners": 1, "parameter_shards": 3, "replay_shards": 1}
    again = train(folder, view, resume=True, steps=step, **numbers)
    assert any("moving the items of replay" in each for each in view.messages)
    assert again["env_steps"] == step and again["learner_steps"] >= first["learner_steps"]
    assert again["replay/items"] == len(before)
    assert again["episodes"] >= first["episodes"] > 0
    assert sorted(saved_items(folder)) == before
    numbers = {"learners": 3, "parameter_shards": 1, "replay_shards": 4}
    last = train(folder, resume=True, steps=step + 1000, **numbers)
    assert last["env_steps"] >= step + 1000 and last["learner_steps"] > again["learner_steps"]
    after = saved_items(folder)
    assert set(before) < set(after)
    require_no_gaps(after, whole=False)
    assert not list((folder / "roles").glob("*former"))


class StoppingAll(Stopping):
    """Sends SIGTERM to every process of the run at once, as systemd, Slurm and Kubernetes do."""

    def update(self, metrics) -> None:
        if metrics["env_steps"] >= self._steps:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
        super().update(metrics)


@pytest.mark.slow
def test_a_run_of_which_every_process_is_stopped_at_once_saves_all(tmp_path):
    folder, view = tmp_path / "run", StoppingAll(500)
    numbers = {"learners": 1, "parameter_shards": 1, "replay_shards": 1}
    summary = train(folder, view, steps=100_000, checkpoint_every_s=1000, **numbers)
    assert summary["interrupted"]
    told = " ".join(view.messages)
    assert not re.search(r"(learner|parameters|replay)-0 (has ended|exited|was killed)", told)
    assert list_steps(folder / "checkpoints")[-1] >= 500
    found = saved_items(folder)
    assert len(found) >= summary["replay/items"] > 100  # that were told before the cut
    require_no_gaps(found, whole=False)
    assert all(gone(pid) for pid in roles(folder).values())


def test_sizes_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(SeedbedError, match="replay_shards is 9, but 2 learners have only 4 groups"):
        ParamServerConfig(replay_shards=9)
    with pytest.raises(SeedbedError, match="each of the 2 learners has a shard of its own"):
        ParamServerConfig(replay="bundled", replay_shards=1)
    with pytest.raises(SeedbedError, match="train it with --runtime central"):
        ParamServerConfig().fitted(CountingAgent(synchronous=True))
    with pytest.raises(SeedbedError, match="learners is 0"):
        ParamServerConfig(learners=0)


@pytest.mark.slow
def test_an_error_that_no_restart_repairs_ends_the_run_after_it_was_saved(tmp_path):
    # It breaks some seconds after both learners have begun, however unevenly they start.
    env = counting_env(fault="raise", fault_at=300, sleep_s=0.01)
    folder = tmp_path / "run"
    with pytest.raises(SeedbedError, match="the counter broke"):
        train(folder, env=env, checkpoint_every_s=1000)
    assert all(gone(pid) for pid in roles(folder).values())
    first, last = list_steps(folder / "checkpoints")
    assert first < last and last > 600
    assert len(saved_items(folder)) > 100


@pytest.mark.slow
def test_a_run_that_has_diverged_goes_on_from_its_last_checkpoint(tmp_path):
    agent = Dqn(hidden_sizes=(8,), min_size=100, capacity=1000, batch=16, learning_rate=1e30)
    options = {"env": GymEnv("CartPole-v1"), "checkpoint_every_s": 1000.0}
    with pytest.raises(TrainingDiverged, match="is not finite at learner step"):
        train(tmp_path / "run", agent=agent, **options)
    agent = dataclasses.replace(agent, learning_rate=1e-3)
    summary = train(tmp_path / "run", agent=agent, resume=True, steps=1500, **options)
    assert summary["learner_steps"] > 10 and np.isfinite(summary["loss/total"])


@pytest.mark.slow
def test_metrics_name_the_load_and_staleness(tmp_path):
    folder = tmp_path / "run"
    env = GymEnv("CartPole-v1")
    agent = Dqn(hidden_sizes=(8,), min_size=100, capacity=1000, batch=16, ratio=2.0)
    train(folder, env=env, agent=agent, steps=1500, learners=2)
    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    names = set().union(*lines)
    assert {
        "cluster/load/parameters-0",
        "cluster/load/replay-1",
        "cluster/staleness_mean",
        "cluster/bytes_per_s",
        "cluster/pushes_applied",
        "time/learning",
        "bottleneck",
    } <= names
    assert not undescribed(names)
