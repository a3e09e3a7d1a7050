"""Agents that learn from replay in the central runtime."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import types

import jax
import numpy as np
import pytest

import central_runs
from central_runs import View, counting_env, train
from checkpoint_files import stopped
from counting_agent import CountingReplayAgent, check_item
from saved import curve, lines
from seedbed.central.experience import Share
from seedbed.central.inference import ActOutput
from seedbed.central.replaying import ReplayFeed
from seedbed.replay.host import persistence
from seedbed.run.checkpoint import CheckpointWriter
from seedbed.run.checkpoint_helper import list_steps, name_of
from seedbed.run.folder import RunFolder
from seedbed.run.options import CentralConfig
from seedbed.testing import counting
from seedbed.types import (
    ActorState,
    ArraySpec,
    Discrete,
    EnvSpec,
    SeedbedError,
    StorageError,
    Timestep,
    bind,
)
from small_disk import Outage, on_small_disk
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture
def taken(monkeypatch):
    """What the learner was given: identities of items, each checked."""
    found, take = [], ReplayFeed.take

    def checked(self, timeout_s):
        parts = take(self, timeout_s)
        for part in parts:
            for env in range(part.action.shape[1]):
                timesteps, action, extras = jax.tree.map(
                    lambda leaf, e=env: np.asarray(leaf)[:, e],
                    (part.timesteps, part.action, part.extras),
                )
                found.append(check_item(timesteps, action, extras, part.actor_state.core[env]))
        return parts

    monkeypatch.setattr(ReplayFeed, "take", checked)
    return found


@pytest.fixture
def run_folder(tmp_path):
    return tmp_path / "run"


def replay_train(folder, view=None, **options):
    return train(folder, view, **{"agent": CountingReplayAgent()} | options)


@pytest.mark.slow
def test_items_are_what_happened_also_where_actors_die(run_folder, taken):
    view = View()
    env = counting_env(fault="exit", fault_at=230, sleep_s=0.0002)
    summary = replay_train(run_folder, view, env=env, steps=6000)
    assert summary["actor_restarts"] >= 1 and summary["env_steps"] >= 6000
    assert len({env for env, _, _ in taken}) > 8, "items of more lives than there are environments"
    # Episodes have 7 to 11 steps: an item at 0, and one at 6.
    assert {start for _, _, start in taken} == {0, 6}
    batches = summary["learner_steps"]
    drawn, inserted = summary["replay/sampled"], summary["replay/inserted"]
    # Learning goes on until it has made every update that the ratio asks for.
    assert drawn == len(taken) == 4 * batches
    assert batches == 0.5 * (inserted - 20) // 4
    assert summary["replay/items"] == 150


@pytest.mark.slow
def test_accelerators_learn_from_every_batch_that_was_drawn(run_folder, taken, accelerators):
    """One device acts and learns, one only acts and one only learns."""
    summary = replay_train(run_folder, inference_devices=(0, 1), learner_devices=(1, 2))
    assert summary["learner_program_ms"] > 0 and 0 <= summary["inference_behind_share"] <= 1
    drawn, inserted = summary["replay/sampled"], summary["replay/inserted"]
    assert drawn == len(taken) == 4 * summary["learner_steps"]
    assert summary["learner_steps"] == 0.5 * (inserted - 20) // 4


def has_items(folder, count):
    """Whether the log tells of so many items in replay."""
    told = (folder / "metrics.jsonl").exists()
    return told and any(line["replay/items"] >= count for line in lines(folder)[:-1])


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_replay(run_folder):
    """The checkpoint that its helper ends after the kill has the replay that was saved for it."""
    process = central_runs.spawn(run_folder, agent="test_central_replay.CountingReplayAgent()")
    wait_for(lambda: has_items(run_folder, 20), process)
    before = max(list_steps(run_folder / "checkpoints"), default=0)
    wait_for(lambda: max(list_steps(run_folder / "checkpoints"), default=0) > before, process)
    with stopped(helper := central_runs.helper_of(process)):
        process.kill()
        process.wait()
        newest = max(int(path.name) for path in central_runs.checkpoints(run_folder))
        view = central_runs.Waker(helper)
        summary = replay_train(run_folder, view, resume=True, steps=newest + 500)
    assert view.messages[0].startswith("waiting until")
    (begun,) = (text for text in view.messages if text.startswith("going on from step"))
    assert int(begun.split()[4].replace(",", "")) >= newest
    (message,) = (text for text in view.messages if "replay goes on" in text)
    assert int(message.split()[-2].replace(",", "")) >= 20
    assert summary["learner_steps"] > lines(run_folder)[0]["learner_steps"]


@pytest.mark.slow
def test_a_checkpoint_has_its_replay_however_slow_it_is(run_folder, monkeypatch):
    """Wherever a run is killed: the replay of the newest checkpoint that is whole is there."""
    write, save, seen = CheckpointWriter._write, ReplayFeed.save, []

    def slow(self, request):
        time.sleep(0.3)
        return write(self, request)

    def checked(self, step, settle):
        save(self, step, settle)
        if whole := list_steps(run_folder / "checkpoints"):
            seen.append(has_replay(run_folder, max(whole)))

    monkeypatch.setattr(CheckpointWriter, "_write", slow)
    monkeypatch.setattr(ReplayFeed, "save", checked)
    env = counting_env(sleep_s=0.002)
    replay_train(run_folder, env=env, steps=12_000, checkpoint_every_s=0.1)
    assert len(seen) >= 3 and all(seen)


@pytest.mark.slow
def test_a_second_signal_while_replay_is_saved_leaves_no_checkpoint_without_it(
    run_folder, monkeypatch
):
    save, saves = ReplayFeed.save, []

    def interrupted(self, step, settle):
        saves.append(step)
        if len(saves) == 3:
            raise KeyboardInterrupt
        save(self, step, settle)

    monkeypatch.setattr(ReplayFeed, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env = counting_env(sleep_s=0.005)
        replay_train(run_folder, env=env, steps=10**6, checkpoint_every_s=0.3)
    whole = list_steps(run_folder / "checkpoints")
    assert whole and saves[2] not in whole and has_replay(run_folder, max(whole))


@pytest.mark.slow
def test_it_saves_before_it_learns(run_folder):
    """While replay fills there is a checkpoint too, and what was filled is not lost."""
    agent = CountingReplayAgent(min_size=140)
    replay_train(run_folder, agent=agent, steps=500, checkpoint_every_s=0.1)
    assert len(central_runs.checkpoints(run_folder)) >= 2
    view = View()
    summary = replay_train(run_folder, view, agent=agent, resume=True, steps=2500)
    (message,) = (text for text in view.messages if "replay goes on" in text)
    assert 0 < int(message.split()[-2]) < 140 and summary["learner_steps"] > 0


@pytest.mark.slow
def test_replay_that_is_not_saved_is_filled_again(run_folder):
    replay_train(run_folder, save_replay=False)
    assert not (run_folder / "replay").exists()
    view = View()
    replay_train(run_folder, view, save_replay=False, resume=True, steps=4000)
    assert any("filling it again" in text for text in view.messages)


@pytest.mark.slow
@on_small_disk
def test_a_full_disk_stops_saving_and_not_training(disk):
    told = ["metrics cannot be written", "the checkpoint of step", "the replay could not be saved"]
    view = Outage(disk, told)
    with pytest.raises(StorageError, match="the checkpoint of step .* could not be written"):
        env, often = counting_env(sleep_s=0.002), {"checkpoint_every_s": 0.1, "log_every_s": 0.1}
        replay_train(disk.path, view, env=env, steps=10**9, **often)
    disk.empty()
    assert sum(told[0] in text for text in view.at_once) == 1
    assert any("training goes on" in text for text in view.messages)
    steps = [line["env_steps"] for line in lines(disk.path)]
    assert steps == sorted(steps) and steps[-1] > view.empty_from
    events = curve(disk.path)
    assert events == sorted(events) and events[-1] > view.empty_from
    newest = max(list_steps(disk.path / "checkpoints"))
    assert has_replay(disk.path, newest)


def has_replay(folder, step):
    """Whether the replay of a checkpoint is on the disk."""
    return any(f".{name_of(step)}." in path.name for path in folder.glob("replay/*.index"))


@pytest.mark.slow
def test_a_priority_that_cannot_be_ends_the_run_by_name_and_loses_nothing(run_folder):
    agent = CountingReplayAgent(poison_from=20)
    with pytest.raises(SeedbedError, match="an item was given priority 0.0"):
        replay_train(run_folder, agent=agent, steps=10**6, checkpoint_every_s=600)
    first, last = list_steps(run_folder / "checkpoints")
    assert last > first and has_replay(run_folder, last)


def empty_feed(run_folder, transfer=None, **options):
    """Makes a feed of one group of two environments."""
    run = RunFolder(run_folder)
    spec = EnvSpec(ArraySpec((4,), "int32"), Discrete(counting.NUM_ACTIONS))
    pool = types.SimpleNamespace(spec=spec, num_groups=1, group_size=2)
    agent = bind(CountingReplayAgent(**options), spec)
    return ReplayFeed(agent, pool, 1, Share.of(agent, CentralConfig(), run, 0), transfer)


def feed(run_folder, priorities, transfer=None, **options):
    """Makes a feed whose agent's priorities are given, and which has three chunks to seal."""
    made = empty_feed(run_folder, transfer, **options)
    made.replay._writer._priorities = priorities
    add_rows(made, range(24))
    return made


def add_rows(made, rows):
    """Adds a step of both environments for each row; the first opens their episodes."""
    for row in rows:
        zero, no = np.zeros((1, 2), np.float32), np.zeros((1, 2), bool)
        observation, first = np.zeros((1, 2, 4), np.int32), np.full((1, 2), row == 0)
        timestep = Timestep(observation, zero, no, no, first)
        extras = {"count": zero.astype(np.int32), "env": zero.astype(np.int32)}
        extras["draw"] = zero.astype(np.uint32)
        output = ActOutput(zero.astype(np.int32), extras, ActorState(zero, ()), 0)
        made.add([0], [0], timestep, output)
        assert not made.done


def save_at(feed, step):
    """Saves a feed for a checkpoint of `step` steps."""
    feed.env_steps = step
    assert feed.mark() == step
    feed.save(step, lambda: None)


def test_what_is_saved_is_what_was_there_at_the_mark(run_folder):
    """A checkpoint is written later than its state was copied, and acting goes on meanwhile."""
    made = feed(run_folder, None)
    first = made.mark()
    at_first = made.replay.stats()["inserted"], made.replay.count([0])
    add_rows(made, range(24, 60))
    second = made.mark()
    add_rows(made, range(60, 90))
    made.save(first, lambda: None)
    assert has_replay(run_folder, first) and not has_replay(run_folder, second)
    again = empty_feed(run_folder)
    assert "goes on" in again.restore(first)
    assert (again.replay.stats()["inserted"], again.replay.count([0])) == at_first
    again.replay.check_valid()
    made.save(second, lambda: None)
    third = made.mark()
    made.mark()  # the same steps: the first of the two marks is let go
    add_rows(made, range(90, 120))
    for _ in range(3):  # marks whose checkpoints are never saved
        made.mark()
        add_rows(made, range(120, 140))
    made.save(third, lambda: None)
    assert not has_replay(run_folder, third)  # only the last two are kept
    made.replay.check_valid()


def test_a_batch_is_transferred_ahead_and_counts_once_it_is_learned(run_folder, tmp_path):
    moved, device = [], jax.devices()[1]

    def transfer(parts):
        moved.append(jax.tree.map(np.array, parts[0]))
        return jax.device_put(parts[0], device)

    def wait_for(count):
        deadline = time.monotonic() + 60
        while len(moved) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(moved) == count, "more than one batch ahead"

    def saved(step):
        """Draws that a run counts as made, and as owed, which goes on from a save now."""
        save_at(made, step)
        folder = tmp_path / str(step)
        shutil.copytree(run_folder, folder)
        again = empty_feed(folder, min_size=2, ratio=4.0)
        assert "goes on" in again.restore(step)
        return again.replay.sampled, again.replay._items.limiter.owed

    made, stop = feed(run_folder, None, transfer, min_size=2, ratio=4.0), threading.Event()
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    try:
        wait_for(2)
        asked = 4.0 * (made.replay.inserted - 2)
        for learned in range(2):
            (batch,) = made.take(60.0)
            assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(batch))
            jax.tree.map(np.testing.assert_array_equal, batch, moved[learned])
            # The next one was drawn before this one's priorities are known, and is there already.
            wait_for(2 + learned)
            assert made.replay.sampled == 4 * (2 + learned)
            assert saved(2 * learned) == (4 * learned, asked - 4 * learned)
            made.learned(0, {}, np.ones(4))
            wait_for(3 + learned)
            assert saved(2 * learned + 1) == (4 + 4 * learned, asked - 4 - 4 * learned)
    finally:
        made.close()
        thread.join(60)


def test_saving_tells_of_the_disk_and_raises_what_is_the_agents(run_folder, monkeypatch):
    bad = feed(run_folder, lambda timesteps, extras: np.zeros(timesteps.reward.shape[1]))
    with pytest.raises(SeedbedError, match="priority 0.0"):
        save_at(bad, 1)
    assert not bad.take_notices() and has_replay(run_folder, 1)
    bad.replay.check_valid()
    good = feed(run_folder / "good", None)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(persistence, "sync", full)
    save_at(good, 1)
    (notice,) = good.take_notices()
    assert "disk full" in notice and "training goes on" in notice


def test_the_replay_of_the_newest_whole_checkpoint_stays_where_those_after_it_fail(run_folder):
    saves = feed(run_folder, None)
    (run_folder / "checkpoints" / name_of(2)).mkdir(parents=True)
    for step in range(1, 7):
        save_at(saves, step)
    assert has_replay(run_folder, 2) and has_replay(run_folder, 6)
    assert len(list(run_folder.glob("replay/*.index"))) == 2
