"""Agents that learn from replay in the central runtime."""

from __future__ import annotations

import dataclasses
import errno
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import counting_environment as counting
import test_central
from counting_agent import CountingAgent
from seedbed.runtime.checkpoint import CheckpointWriter
from seedbed.runtime.checkpoint_writer import list_steps, name_of
from seedbed.runtime.replaying import ReplayFeed
from seedbed.types import Replay, SeedbedError
from test_central import (  # noqa: F401  a fixture
    View,
    counting_env,
    importable,
    lines,
    train,
)


@dataclasses.dataclass(frozen=True)
class CountingReplayAgent(CountingAgent):
    """The counting agent, learning from replayed sequences."""

    capacity: int = 150
    min_size: int = 20
    ratio: float = 0.5
    actions: int = counting.NUM_ACTIONS

    @property
    def experience(self):
        return Replay(
            batch=self.batch, sequence=6, period=6, burn_in=3, capacity=self.capacity,
            min_size=self.min_size, ratio=self.ratio, priority_exponent=0.9,
            importance_exponent=0.6,
        )  # fmt: skip

    def initial_priorities(self, timesteps, extras):
        return 1.0 + extras["count"].max(0).astype(jnp.float32)

    def prepare(self, state, trajectory, key):
        return super().prepare(state, trajectory, key) | {"importance": trajectory.importance[None]}

    def gradients(self, state, minibatch, key):
        grads, output = super().gradients(state, minibatch, key)
        return grads, output._replace(priorities=1.0 / minibatch["importance"][0])


def check_item(steps, action, extras, core):
    """Checks that an item `[T + 1, ...]` is a piece of one episode, padded on either side."""
    real = np.flatnonzero(steps.observation[:, counting.ENV])
    begin, end = real[0], real[-1]
    assert len(real) == end - begin + 1 and end >= begin + 1
    padding = np.ones(len(steps.first), bool)
    padding[real] = False
    assert (steps.first == (padding | (steps.observation[:, counting.STEP] == 0))).all()
    assert not (steps.terminated | steps.truncated | (steps.reward != 0))[padding].any()
    env, episode, opening, _ = steps.observation[begin].tolist()
    if begin == 0:
        assert core == opening or opening == 0
    else:
        assert opening == 0 and begin == 3, (
            "only what comes before an episode is padded at the front"
        )
    for row in range(begin, end):
        step = opening + row - begin
        assert extras["count"][row] == step
        expected = [env, episode, step + 1, int(action[row])]
        assert steps.observation[row + 1].tolist() == expected
        assert steps.reward[row + 1] == 1000 * episode + step + 1
    length = counting.episode_length(env, episode, 7)
    over = (steps.terminated | steps.truncated)[end]
    assert over == (opening + end - begin == length)
    assert end == len(steps.first) - 1 or over, "padded at the end, but the episode goes on"
    return (env, episode, opening + max(3 - begin, 0))


@pytest.fixture
def taken(monkeypatch):
    """What the learner was given: identities of items, each checked."""
    found, take = [], ReplayFeed.take

    def checked(self):
        unrolls = take(self)
        for unroll in unrolls:
            for env in range(unroll.action.shape[1]):
                timesteps, action, extras = jax.tree.map(
                    lambda leaf, e=env: leaf[:, e], (unroll.timesteps, unroll.action, unroll.extras)
                )
                found.append(check_item(timesteps, action, extras, unroll.actor_state.core[env]))
        return unrolls

    monkeypatch.setattr(ReplayFeed, "take", checked)
    return found


@pytest.fixture
def run_folder(tmp_path):
    return tmp_path / "run"


def replay_train(folder, view=None, **options):
    return train(folder, view, **{"agent": CountingReplayAgent()} | options)


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
    # Drawing keeps to the ratio, but for four batches and what is drawn ahead.
    assert abs(drawn - 0.5 * (inserted - 20)) <= 6 * 4
    assert 4 * batches <= drawn <= 4 * (batches + 2) and len(taken) <= drawn
    assert summary["replay/items"] == 150


def test_several_inference_and_learner_devices(run_folder, taken):
    summary = replay_train(run_folder, inference_devices=(0, 1), learner_devices=(2, 3))
    assert summary["learner_steps"] > 10 and len(taken) >= 4 * summary["learner_steps"]


def test_a_killed_run_goes_on_with_its_replay(run_folder):
    process = test_central.spawn(run_folder, agent="test_central_replay.CountingReplayAgent()")
    test_central.wait_for(lambda: len(test_central.checkpoints(run_folder)) >= 2, process)
    process.kill()
    process.wait()
    view = View()
    newest = max(int(path.name) for path in test_central.checkpoints(run_folder))
    summary = replay_train(run_folder, view, resume=True, steps=newest + 500)
    (message,) = (text for text in view.messages if "replay goes on" in text)
    assert int(message.split()[-2].replace(",", "")) >= 20
    assert summary["learner_steps"] > lines(run_folder)[0]["learner_steps"]


def test_a_checkpoint_has_its_replay_however_slow_it_is(run_folder, monkeypatch):
    """Wherever a run is killed: the replay of the newest checkpoint that is whole is there."""
    write, save, seen = CheckpointWriter._write, ReplayFeed.save, []

    def slow(self, request):
        time.sleep(0.3)
        return write(self, request)

    def checked(self, step):
        save(self, step)
        if whole := list_steps(run_folder / "checkpoints"):
            newest = name_of(max(whole))
            seen.append(any(newest in path.name for path in run_folder.glob("replay/*.index")))

    monkeypatch.setattr(CheckpointWriter, "_write", slow)
    monkeypatch.setattr(ReplayFeed, "save", checked)
    env = counting_env(sleep_s=0.002)
    replay_train(run_folder, env=env, steps=8000, checkpoint_every_s=0.1)
    assert len(seen) >= 3 and all(seen)


def test_it_saves_before_it_learns(run_folder):
    """While replay fills there is a checkpoint too, and what was filled is not lost."""
    agent = CountingReplayAgent(min_size=140)
    replay_train(run_folder, agent=agent, steps=500, checkpoint_every_s=0.1)
    assert len(test_central.checkpoints(run_folder)) >= 2
    view = View()
    summary = replay_train(run_folder, view, agent=agent, resume=True, steps=2500)
    (message,) = (text for text in view.messages if "replay goes on" in text)
    assert 0 < int(message.split()[-2]) < 140 and summary["learner_steps"] > 0


def test_a_checkpoint_without_room_does_not_end_training(run_folder, monkeypatch):
    save, failed = CheckpointWriter.save, []

    def full(self, *arguments, **options):
        if not failed:
            failed.append(arguments)
            raise SeedbedError("the checkpoint of step 1 could not be written")
        save(self, *arguments, **options)

    monkeypatch.setattr(CheckpointWriter, "save", full)
    view = View()
    summary = replay_train(run_folder, view)
    assert summary["env_steps"] >= 3000
    assert any("could not be written; training goes on" in text for text in view.messages)


def test_replay_that_is_not_saved_is_filled_again(run_folder):
    replay_train(run_folder, save_replay=False)
    assert not (run_folder / "replay").exists()
    view = View()
    replay_train(run_folder, view, save_replay=False, resume=True, steps=4000)
    assert any("filling it again" in text for text in view.messages)


def test_a_full_disk_stops_saving_and_not_training(run_folder, monkeypatch):
    allocate, used = os.posix_fallocate, []

    def full(descriptor, offset, size):
        if used:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        used.append(allocate(descriptor, offset, size))

    monkeypatch.setattr(os, "posix_fallocate", full)
    view = View()
    summary = replay_train(run_folder, view)
    assert summary["env_steps"] >= 3000 and summary["learner_steps"] > 10
    assert any("No space left on device" in text for text in view.messages)
    assert any("training goes on" in text for text in view.messages)
    assert test_central.checkpoints(run_folder)


def test_another_replay_is_refused_by_name(run_folder):
    replay_train(run_folder)
    with pytest.raises(Exception, match="capacity"):
        replay_train(run_folder, resume=True, agent=CountingReplayAgent(capacity=99), steps=4000)
    with pytest.raises(SeedbedError, match="groups 4 of 2 .*--actors"):
        replay_train(run_folder, resume=True, actors=1, steps=4000)
    assert list((run_folder / "replay").iterdir())
