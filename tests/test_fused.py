"""The fused runtime: devices, kills, resumes, populations, and what goes wrong."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from checkpoint_files import stopped
from described import undescribed
from fused_runs import same, saved
from saved import config_of, curve, lines
from seedbed import api, cli
from seedbed.agents.ppo import Ppo
from seedbed.config.configuration import TrainConfig
from seedbed.config.saved import resumed
from seedbed.envs.device import changes, wrappers
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.device.probes import DelayProbe
from seedbed.envs.host.gym import GymEnv
from seedbed.exit_status import ExitStatus
from seedbed.fused import train as fused
from seedbed.fused.carry import Iteration, StageTimes
from seedbed.fused.program import Program
from seedbed.fused.train import _score
from seedbed.ops.keys import halves
from seedbed.run.checkpoint import CheckpointWriter
from seedbed.run.checkpoint_helper import list_steps, read_best
from seedbed.run.folder import RunFolder
from seedbed.run.history import read_history
from seedbed.run.metrics import RecentEpisodes
from seedbed.run.options import FusedConfig
from seedbed.run.restoring import restore
from seedbed.types import (
    ActorState,
    ArraySpec,
    Discrete,
    EnvSpec,
    EnvState,
    LearnerState,
    OnPolicy,
    Output,
    SeedbedError,
    StorageError,
    Timestep,
)
from small_disk import Outage, on_small_disk
from waiting import wait_for

TINY = Ppo(
    unroll=8, batch=16, epochs=2, minibatches=2, hidden_sizes=(8,), normalise_observations=True
)
PROBE = Ppo(
    unroll=16, batch=32, epochs=2, minibatches=2, hidden_sizes=(32,), gamma=0.9,
    learning_rate=1e-2,
)  # fmt: skip


def differ(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(not np.array_equal(x, y) for x, y in leaves)


def run_program(env, agent, iterations, **options):
    """Runs iterations with nothing around them; returns the program, the carry and the last report."""
    steps = iterations * agent.unroll * agent.batch
    program = Program(env, agent, FusedConfig(**{"steps": steps} | options))
    carry = program.place(program.first())
    program.compile(carry)
    return program, *advance(program, carry, iterations)


def advance(program, carry, iterations):
    """Runs iterations from the beginning; returns the carry and the last report."""
    done, report = [0] * program.members, None
    for _ in range(iterations):
        carry, report = program.run(carry, done)
        made = np.ravel(report.transitions).tolist()
        done = [sum(each) for each in zip(done, made, strict=True)]
    return carry, report


def train(folder, env, agent=TINY, resume=False, **options):
    options = {"steps": 640, "evaluate_episodes": 4, "log_every_s": 0.1} | options
    config = TrainConfig(env, agent, FusedConfig(**options), "test/ppo")
    return api.train(config, run=folder, resume=resume)


# -- several devices ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_one_and_several_devices_agree(devices):
    _, one, report = run_program(CartPole(), TINY, 6)
    _, several, report_of_several = run_program(CartPole(), TINY, 6, devices=tuple(range(devices)))
    assert len(several.env.timestep.reward.sharding.device_set) == devices
    assert len(jax.tree.leaves(several.learner.params)[0].sharding.device_set) == devices
    same(jax.device_get(several), jax.device_get(one), rtol=1e-5, atol=1e-5)
    assert report_of_several.episodes == report.episodes
    assert report_of_several.transitions == report.transitions
    for name in ("loss/total", "loss/policy", "loss/value", "entropy", "kl", "clipped"):
        np.testing.assert_allclose(
            report_of_several.metrics[name], report.metrics[name], rtol=1e-4, atol=1e-5
        )


# -- killed, interrupted, resumed -----------------------------------------------------------------

LONG = 1600 * 128
COMMAND = shlex.split(
    f"seedbed.envs.device.classic.cartpole:CartPole --steps {LONG} --evaluate-episodes 2 "
    "--agent.unroll 8 --agent.batch 16 --agent.epochs 2 --agent.minibatches 2 "
    "--agent.hidden-sizes 8 --agent.normalise-observations --checkpoint-every-s 0.1 "
    "--log-every-s 0.1"
)


def spawn(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "seedbed", "train", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_killed_interrupted_and_resumed_it_ends_where_an_undisturbed_run_does(run_folder, tmp_path):
    folder = run_folder / "checkpoints"
    process = spawn(*COMMAND, "--run", str(run_folder))
    wait_for(lambda: len(list_steps(folder)) > 1 if folder.exists() else False, process)
    time.sleep(random.uniform(0, 0.3))
    (helper,) = psutil.Process(process.pid).children()
    with stopped(helper):
        process.kill()
        process.communicate()
        assert max(list_steps(folder)) < LONG

        process = spawn("--resume", "--run", str(run_folder))
        first = process.stdout.readline()
        assert first.startswith("waiting until the helper that wrote checkpoints")
    # A new file of events means that lines past the checkpoint, which the kill left, are gone.
    wait_for(lambda: len(list(run_folder.glob("events.*"))) == 2, process)
    count = len(lines(run_folder))
    wait_for(lambda: len(lines(run_folder)) > count, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == ExitStatus.STOPPED, output
    begin = int(re.search(r"going on from step ([\d,]+)", output)[1].replace(",", ""))
    assert begin > 0
    assert "SIGINT: stopping and saving" in output
    assert f"go on with: seedbed train --resume --run {run_folder}" in output
    assert begin < max(list_steps(folder)) == lines(run_folder)[-1]["env_steps"] < LONG

    config = config_of(run_folder)
    assert (config.agent.unroll, config.agent.batch) == (8, 16)
    last = resumed(run_folder, None, None)
    api.train(last, run=run_folder, resume=True, checkpoint_every_s=60.0)
    summary = api.train(config, run=tmp_path / "undisturbed", checkpoint_every_s=60.0)
    assert LONG <= summary["env_steps"] < LONG + 128
    step, carry, metadata = saved(run_folder)
    other_step, other, other_metadata = saved(tmp_path / "undisturbed")
    assert step == other_step == summary["env_steps"]
    same(carry, other)
    assert metadata["episodes"] == other_metadata["episodes"]
    assert metadata["transitions"] == other_metadata["transitions"] == [step]
    wall = [line["wall_s"] for line in lines(run_folder)]
    steps = [line["env_steps"] for line in lines(run_folder)]
    assert wall == sorted(wall) and steps == sorted(steps)
    stints = [(stint.get("outcome"), stint["term"]) for stint in read_history(run_folder)]
    assert stints == [(None, 1), ("interrupted", 2), ("finished", 3)]
    assert read_history(run_folder)[1]["env_steps"] == begin


@pytest.mark.slow
@on_small_disk
def test_a_full_disk_stops_saving_and_not_training(disk):
    told = ["metrics cannot be written", "could not be written"]
    view, config = Outage(disk, told), FusedConfig(10**9, checkpoint_every_s=0.1, log_every_s=0.1)
    run = RunFolder.create(disk.path)
    with pytest.raises(StorageError, match="the checkpoint of step .* could not be written"):
        fused.train(env=CartPole(), agent=TINY, config=config, run=run, view=view)
    run.close()
    disk.empty()
    assert sum(told[0] in text for text in view.at_once) == 1
    assert any("training goes on" in text for text in view.messages)
    steps = [line["env_steps"] for line in lines(disk.path)]
    assert steps == sorted(steps) and steps[-1] > view.empty_from
    events = curve(disk.path)
    assert events == sorted(events) and events[-1] > view.empty_from


@pytest.mark.slow
def test_a_blocked_terminal_blocks_neither_training_nor_stopping(run_folder, full_pipe):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "seedbed", "train", *COMMAND, "--steps", "1_000_000_000", "--run", run_folder],
        env=environment, stdout=full_pipe[0], stderr=full_pipe[0],
    )  # fmt: skip
    try:
        wait_for(lambda: lines(run_folder), process)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == ExitStatus.STOPPED
    assert max(list_steps(run_folder / "checkpoints")) == lines(run_folder)[-1]["env_steps"] > 0


@pytest.mark.slow
def test_a_signal_cuts_an_evaluation_short_and_saves(run_folder, monkeypatch):
    evaluate = Program.evaluate

    def interrupted(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *arguments)

    monkeypatch.setattr(Program, "evaluate", interrupted)
    summary = train(run_folder, CartPole(), seeds=2)
    assert summary["interrupted"] and "evaluation/env_steps" not in summary
    assert max(list_steps(run_folder / "checkpoints")) == summary["env_steps"] >= 640
    assert not read_best(run_folder / "checkpoints")
    warnings = []
    assert api.restore(run_folder, warnings.append).member == "seed 0"
    (warning,) = warnings
    assert "no member was evaluated at this checkpoint: taking the first, seed 0" in warning


# -- what the learner sees --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counting:
    """Shows (a number drawn at the reset, the step, the last action); ends in both ways."""

    episode_steps: int = 6
    frame_skip: int = 1

    @property
    def spec(self):
        return EnvSpec(ArraySpec((3,), "float32"), Discrete(5))

    def reset(self, key):
        number = jax.random.randint(key, (), 0, 1 << 20).astype(jnp.float32)
        return self._state(number, jnp.float32(0), jnp.float32(0), jnp.bool_(True))

    def step(self, state, action):
        number, step = state.inner
        return self._state(number, step + 1, action.astype(jnp.float32), jnp.bool_(False))

    def _state(self, number, step, action, first):
        reward = jnp.where(first, 0.0, number + step)
        terminated = ~first & (step > jnp.mod(number, 9.0))
        observation = jnp.stack([number, step, action])
        timestep = Timestep(observation, reward, terminated, jnp.bool_(False), first)
        return EnvState((number, step), timestep, {"number": number})


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Keeps the last trajectory that it learned from in its optimizer state."""

    spec: EnvSpec | None = None
    unroll: int = 5
    batch: int = 4
    epochs: int = 1
    minibatches: int = 1

    @property
    def experience(self):
        return OnPolicy(self.unroll, self.batch)

    def init(self, key):
        rows, more = (self.unroll, self.batch), (self.unroll + 1, self.batch)
        flags = [jnp.zeros(more, bool) for _ in range(3)]
        steps = Timestep(jnp.zeros((*more, 3)), jnp.zeros(more), *flags)
        extras = {"draw": jnp.zeros(rows, jnp.uint32), "count": jnp.zeros(rows, jnp.int32)}
        kept = (steps, jnp.zeros(rows, jnp.int32), extras, jnp.zeros(rows, jnp.int32))
        return LearnerState(jax.random.normal(key, (2,)), kept, jnp.int32(0), jnp.float32(0))

    def actor_state(self, env_ids, num_envs):
        return ActorState(jnp.zeros(env_ids.shape, jnp.int32), env_ids)

    def act(self, params, actor_state, timestep, keys, evaluate):
        draw = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)
        core = jnp.where(timestep.first, 0, actor_state.core)
        extras = {"draw": draw, "count": core}
        return (draw % 5).astype(jnp.int32), extras, actor_state._replace(core=core + 1)

    def prepare(self, state, trajectory, key):
        steps, action, extras, _, version, _ = trajectory
        return steps, action, extras, version

    def gradients(self, state, minibatch, key):
        return minibatch, Output({"loss/total": jnp.float32(0)}, jnp.float32(1))

    def clip_gradient(self, grads):
        return grads

    def apply(self, state, grads, output):
        return state._replace(optimizer_state=grads, updates=state.updates + 1)


def test_every_transition_is_learned_from_once_and_in_order(tmp_path):
    agent, rows = Recorder(), []
    config = FusedConfig(steps=16 * 20)
    program = Program(Counting(), agent, config)
    carry = program.place(program.first()._replace(steps=halves(2**32 - 40)))
    program.compile(carry)
    for iteration in range(16):
        if iteration == 7:  # resumed, by another program
            with CheckpointWriter(tmp_path) as writer:
                writer.save(20 * iteration, carry, {})
            program = Program(Counting(), agent, config)
            _, carry, _ = restore(tmp_path, jax.eval_shape(program.first))
            carry = program.place(carry)
            program.compile(carry)
        carry, report = program.run(carry, [0])
        rows.append(jax.tree.map(np.array, carry.learner.optimizer_state))
        steps, _, _, version = rows[-1]
        ended = steps.terminated[1:] | steps.truncated[1:]
        assert (version == iteration).all()
        assert report.transitions == (~steps.first[1:]).sum()
        assert report.episodes == ended.sum()
        assert report.lengths == steps.observation[1:, :, 1][ended].sum()
    np.testing.assert_array_equal(carry.steps, halves(2**32 + 40))
    for (before, *_), (after, *_) in itertools.pairwise(rows):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[-1], y[0]), before, after)
    last = jax.tree.map(lambda x: x[-1:], rows[-1][0])
    parts = [jax.tree.map(lambda x: x[:-1], steps) for steps, *_ in rows] + [last]
    steps = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    action = np.concatenate([r[1] for r in rows])
    extras = jax.tree.map(lambda *x: np.concatenate(x), *(r[2] for r in rows))
    assert np.unique(extras["draw"]).size == extras["draw"].size, "a key was used twice"
    assert steps.first[0].all()
    numbers = steps.observation[..., 0][steps.first]
    assert np.unique(numbers).size == numbers.size, "two episodes began alike"
    kinds = set()
    for env in range(agent.batch):
        total = 0.0
        for t in range(len(action)):
            number, step, _ = steps.observation[t, env]
            assert extras["count"][t, env] == step
            if steps.terminated[t, env] or steps.truncated[t, env]:
                kinds.add((bool(steps.terminated[t, env]), bool(steps.truncated[t, env])))
                assert steps.first[t + 1, env] and steps.reward[t + 1, env] == 0
                assert steps.observation[t + 1, env, 1:].tolist() == [0, 0]
                total = 0.0
                continue
            assert not steps.first[t + 1, env]
            assert steps.observation[t + 1, env].tolist() == [number, step + 1, action[t, env]]
            assert steps.reward[t + 1, env] == number + step + 1
            assert steps.terminated[t + 1, env] == (step + 1 > number % 9)
            assert steps.truncated[t + 1, env] == (step + 1 == 6)
            total += steps.reward[t + 1, env]
        assert total == carry.env.metrics["episode_return"][env]
    assert kinds == {(True, False), (False, True), (True, True)}


# -- the integrators of a run -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Falling:
    """Looks like a MuJoCo task: a step of Euler's is worth 1, and one of its own integrator 2."""

    integrator: str = "xml"
    episode_steps: int = 5
    frame_skip: int = 1

    @property
    def spec(self):
        return EnvSpec(ArraySpec((1,), "float32"), Discrete(2))

    def reset(self, key):
        return self._state(jax.random.uniform(key, (1,)), jnp.float32(0), jnp.bool_(True))

    def step(self, state, action):
        reward = jnp.float32(1 if self.integrator == "euler" else 2)
        return self._state(state.inner + 0.1 * action - reward, reward, jnp.bool_(False))

    def _state(self, x, reward, first):
        no = jnp.bool_(False)
        return EnvState(x, Timestep(x, reward, no, no, first), {"worth": reward})


@pytest.mark.slow
def test_the_first_part_trains_with_euler_and_the_rest_and_evaluations_with_the_own(
    run_folder, capsys
):
    """The share ends with the third of six iterations; a resumed run changes where the first did."""
    summary = train(run_folder, Falling(), euler_share=0.5, evaluate_every=128, keep_checkpoints=9)
    assert summary["evaluation/episode_return_mean"] == 10
    assert "training with Euler's integrator for 320 steps, then" in capsys.readouterr().out
    config = config_of(run_folder)
    assert (
        config.env == Falling() and api.evaluate(run_folder, episodes=4)["episode_return_max"] == 10
    )
    whole = saved(run_folder)[1]
    _, carry, _ = run_program(Falling("euler"), TINY, 3, steps=640)
    own, _, _ = run_program(Falling(), TINY, 0, steps=640)
    for done in (320, 432, 544):
        carry, _ = own.run(carry, [done])
    same(whole, jax.device_get(carry))
    for checkpoint in (run_folder / "checkpoints").glob("0*"):
        if int(checkpoint.name) > 256:
            shutil.rmtree(checkpoint)
    again = train(run_folder, Falling(), euler_share=0.5, resume=True)
    assert again["env_steps"] == 640
    same(saved(run_folder)[1], whole)


@pytest.mark.slow
def test_a_run_may_be_euler_s_to_its_end_and_is_judged_with_the_own(run_folder, capsys):
    summary = train(run_folder, Falling(), euler_share=1.0)
    assert summary["evaluation/episode_return_mean"] == 10
    told = capsys.readouterr().out
    assert "training with Euler's integrator\n" in told
    _, carry, _ = run_program(Falling("euler"), TINY, 6, steps=640)
    same(saved(run_folder)[1].learner.params, jax.device_get(carry.learner.params))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"seeds": 2}, {"devices": (0, 1)}], ids=str)
def test_populations_and_devices_change_the_integrator_too(options):
    program, carry, _ = run_program(Falling(), TINY, 1, steps=640, euler_share=0.5, **options)
    _, report = program.run(carry, [319] * program.members)
    np.testing.assert_array_equal(report.returns, 5 * report.episodes)
    carry = program.place(program.first())
    carry, _ = program.run(carry, [320] * program.members)
    _, report = program.run(carry, [320] * program.members)
    np.testing.assert_array_equal(report.returns, 10 * report.episodes)


# -- populations ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Several(CartPole):
    """Shows its observation in parts, for each of which a network has layers of its own."""

    @property
    def spec(self):
        return EnvSpec({name: ArraySpec((2,), "float32") for name in "ab"}, Discrete(2))

    def reset(self, key):
        return self._parted(super().reset(key))

    def step(self, state, action):
        return self._parted(super().step(state, action))

    def _parted(self, state):
        x = state.timestep.observation
        parted = state.timestep._replace(observation={"a": x[:2], "b": x[2:]})
        return state._replace(timestep=parted)


class Half(Ppo):
    """It reports metrics of other types."""

    def _loss(self, weights, state, batch):
        loss, output = super()._loss(weights, state, batch)
        more = {"half": jnp.bfloat16(1.5), "whole": jnp.int32(3), "whether": jnp.bool_(True)}
        return loss, output._replace(metrics=output.metrics | more)


def test_metrics_of_any_type_are_reported_as_float32():
    agent = Half(**{field.name: getattr(TINY, field.name) for field in dataclasses.fields(TINY)})
    program = Program(CartPole(), agent, FusedConfig(steps=1000))
    carry = program.place(program.first())
    program.compile(carry)
    _, report = program.run(carry, [0])
    for name, value in (("half", 1.5), ("whole", 3.0), ("whether", 1.0)):
        found = report.metrics[name]
        assert found.dtype == np.float32 and (np.asarray(found) == value).all()


@pytest.mark.slow
def test_a_population_is_its_seeds_one_by_one(run_folder, capsys):
    """Its result is the median; the best is beside it, and is what an evaluation plays."""
    steps, agent = 128 * 10, dataclasses.replace(TINY, learning_rate=1e-2)
    summary = train(run_folder, CartPole(), agent, steps=steps, seeds=3, seed=5)
    scores = summary["evaluation/seeds"]
    assert len(scores) == 3 and summary["evaluation/episode_return_mean"] == sorted(scores)[1]
    best = int(np.argmax(scores))
    assert len(set(scores)) == 3 and summary["evaluation/best_return"] == scores[best]
    assert summary["evaluation/best_member"] == f"seed {5 + best}"
    printed = capsys.readouterr().out
    for words in (
        f"return {sorted(scores)[1]:.2f} (median of 3 members, from {min(scores):.2f} to",
        f"the best, seed {5 + best}, is what seedbed evaluate plays",
    ):
        assert words in printed
    assert lines(run_folder)[-1]["evaluation/seeds"] == scores
    assert not undescribed(lines(run_folder)[-1])
    trained = api.restore(run_folder)
    _, carry, metadata = saved(run_folder)
    assert metadata["best_seed"] == best
    assert summary["env_steps"] == min(metadata["transitions"]) >= steps
    assert len(set(metadata["transitions"])) > 1, "episodes of the seeds end at different steps"
    iterations = int(carry.steps[0, 0]) // agent.unroll
    program, _, _ = run_program(CartPole(), agent, 10, seed=5)
    for index in range(3):
        config = FusedConfig(steps=steps, seed=5 + index)
        one = program.place(Program(CartPole(), agent, config).first())
        one, _ = advance(program, one, iterations)
        mine = jax.tree.map(lambda x, i=index: x[i], carry)
        same(mine, jax.device_get(one), rtol=1e-4, atol=1e-4)
        if index == best:
            same(trained.params, one.learner.params, rtol=1e-4, atol=1e-4)
    played = api.evaluate(run_folder, episodes=4)
    assert played["episodes"] == 4 and played["member"] == f"seed {5 + best}"


# -- learning, reports ------------------------------------------------------------------------------

DELAYED = {"steps": 512 * 60, "evaluate_episodes": 32}
REQUIRED = {
    "wall_s",
    "env_steps",
    "frames",
    "env_steps_per_s",
    "frames_per_s",
    "learner_steps",
    "episodes",
    "episode_return_mean",
    "episode_length_mean",
    "rss_mb",
    "loss/total",
    "loss/policy",
    "loss/value",
    "entropy",
    "kl",
    "clipped",
}


@pytest.fixture(scope="module")
def delayed(tmp_path_factory):
    """A run of PPO on the delay probe: its folder and summary."""
    folder = tmp_path_factory.mktemp("delayed") / "run"
    return folder, train(folder, DelayProbe(), PROBE, **DELAYED)


@pytest.mark.slow
def test_ppo_learns_from_delayed_rewards_and_reports(delayed):
    folder, summary = delayed
    assert summary["evaluation/episode_return_mean"] > 6
    assert summary["evaluation/episode_length_mean"] == 8
    assert summary["evaluation/episodes"] == 32
    # In nine rows an environment makes eight transitions and opens one episode.
    iterations = next(k for k in range(100) if 32 * (16 * k - 16 * k // 9) >= 512 * 60)
    made = 32 * (16 * iterations - 16 * iterations // 9)
    assert summary["evaluation/env_steps"] == summary["env_steps"] == made
    assert summary["frames"] == made
    assert summary["learner_steps"] == iterations * 4
    assert not summary["interrupted"] and summary["run"] == str(folder)
    for line in lines(folder):
        assert not REQUIRED - set(line)
        assert 0 <= line["env_steps"] / 8 - line["episodes"] <= 32
        assert line["episode_length_mean"] == 8
    assert lines(folder)[-1] == {
        k: v if isinstance(v, int | str) else float(v)
        for k, v in summary.items()
        if k not in ("interrupted", "run")
    }
    assert list(folder.glob("events.out.tfevents.*"))
    assert read_best(folder / "checkpoints")["step"] == made


@pytest.mark.slow
def test_evaluation_does_not_disturb_training(delayed, run_folder):
    folder, undisturbed = delayed
    summary = train(run_folder, DelayProbe(), PROBE, **DELAYED, evaluate_every=512 * 25)
    assert summary["evaluation/env_steps"] == undisturbed["env_steps"]
    steps = list_steps(run_folder / "checkpoints")
    for due in (512 * 25, 512 * 50):
        assert any(due <= step < due + 512 for step in steps)
    same(saved(run_folder)[1], saved(folder)[1])


# -- what goes wrong --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Broken(Counting):
    """Goes wrong."""

    episode_steps: int = 50
    fault: str = "nan"

    def step(self, state, action):
        after = super().step(state, action)
        steps, (_, step) = after.timestep, after.inner
        if self.fault == "nan":
            observation = jnp.where(step == 37, jnp.nan, steps.observation) / (1 << 20)
            steps = steps._replace(
                observation=observation, terminated=jnp.bool_(False), reward=jnp.float32(1)
            )
        elif self.fault == "reward":
            steps = steps._replace(reward=steps.reward[None])
        elif self.fault == "endless":
            steps = steps._replace(terminated=jnp.bool_(False))
        elif self.fault == "branch" and step > 3:
            steps = steps._replace(terminated=jnp.bool_(True))
        return after._replace(timestep=steps)


@pytest.mark.slow
def test_a_nan_in_an_observation_stops_the_run_and_loses_nothing(run_folder, capsys):
    arguments = shlex.split(
        f"test_fused:Broken --run {run_folder} --steps 100_000 --checkpoint-every-s 0.1 "
        "--agent.unroll 8 --agent.batch 16 --agent.hidden-sizes 8"
    )
    assert cli.main(["train", *arguments]) == 1
    text = capsys.readouterr().err
    assert "Broken gave an observation or a reward that is not finite between steps" in text
    step, carry, metadata = saved(run_folder)
    (stint,) = read_history(run_folder)
    assert stint["outcome"] == "failed" and stint["failure"] in text
    # step 37 is in the fifth unroll of 8
    assert step in [128 * i for i in range(5)] and metadata["start"]["env_steps"] == step
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(carry.learner.params))
    assert not read_best(run_folder / "checkpoints")


def reported(options, **changed):
    """A run whose next iteration has this report, but for what is given the same for each of two members."""
    each = dict.fromkeys(Iteration._fields, np.ones(2, int))
    each |= {"metrics": {"loss": np.ones(2)}, "env_metrics": {}, "finite": np.ones(2, bool)}
    report = Iteration(**each | {"busy": StageTimes(*np.zeros((3, 2)))} | changed)
    program: Any = SimpleNamespace(members=2, config=options, task="Task", group=None)
    program.run = lambda carry, done: (carry, report)
    episodes = [RecentEpisodes(), RecentEpisodes()]
    return fused.FusedRun(program, None, [0, 0], np.zeros(2, int), episodes)


@pytest.mark.parametrize(
    ("options", "changed", "words"),
    [
        (
            FusedConfig(seeds=2, seed=3),
            {"metrics": {"loss": np.array([1, np.nan])}},
            "loss of seed 4 is nan at learner step 1: .* lower --agent.learning-rate",
        ),
        (
            FusedConfig(sweep="learning-rate=1e-3,9"),
            {"metrics": {"loss": np.array([1, np.inf])}},
            "loss of seed 0, learning_rate 9 is inf .* another value in its place in --sweep",
        ),
        (
            FusedConfig(seeds=2),
            {"finite": np.array([True, False])},
            "Task gave seed 1 an observation or a reward that is not finite between steps 0 and 1",
        ),
    ],
    ids=["seeds", "sweep", "environment"],
)
def test_the_member_that_diverges_is_named(options, changed, words):
    with pytest.raises(SeedbedError, match=words):
        reported(options, **changed).advance()


def test_metrics_of_a_task_are_logged_and_those_of_episodes_are_told_apart():
    own = {"episode_progress": np.array([1.0, 3.0]), "episode_return": np.array([5.0, 5.0])}
    run = reported(FusedConfig(seeds=2), env_metrics=own)
    run.advance()
    read = run.meter().read(1.0)
    assert read["env/episode_progress"] == 2 and "env/episode_return" not in read


def test_a_member_whose_return_is_not_a_number_is_not_the_best():
    result = {"episode_return_std": 0.0, "episodes": 4}
    returns = [2.0, np.nan, 7.0, 3.0]
    score = _score(
        [{"episode_return_mean": each, **result} for each in returns], FusedConfig(seeds=4)
    )
    assert score.value == 7 and score.metadata == {"best_seed": 2}
    assert (score.metrics["best_return"], score.metrics["best_member"]) == (7, "seed 2")


@pytest.mark.slow
def test_an_environment_that_never_ends_is_reported_and_loses_nothing(run_folder, monkeypatch):
    monkeypatch.setattr("seedbed.fused.playing.MOST_STEPS", 20)
    with pytest.raises(SeedbedError, match="did not end within 20 steps.*episode_steps"):
        train(run_folder, Broken(episode_steps=0, fault="endless"))
    assert max(list_steps(run_folder / "checkpoints")) == 640


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": (99,)}, "--devices names device 99: this host has 8"),
        ({"devices": (0, 0)}, "name one or more different device indices"),
        ({"devices": (0, 1, 2)}, "16 environments: it must divide by 3 devices x 2 minibatches, 6"),
        ({"devices": (0, 1), "seeds": 3}, "3 runs at once on 2 devices, of which each has equally"),
        ({"seeds": 0}, "seeds is 0: it must be 1 or more"),
        ({"steps": 0}, "steps is 0: it must be 1 or more"),
        ({"euler_share": 1.1}, "euler_share is 1.1: it must be from 0 to 1"),
        ({"euler_share": 0.5}, "euler_share is 0.5, but CartPole has no option integrator"),
        ({"env": GymEnv("CartPole-v1")}, "GymEnv with FusedConfig"),
        ({"env": wrappers.training(CartPole())}, "resets itself"),
        ({"env": changes.scale_reward(wrappers.auto_reset(CartPole()), 2.0)}, "resets itself"),
        (
            {"env": changes.scale_reward(changes.normalise_observation(CartPole()), 2.0)},
            "CartPole is in normalise_observation, .* give --agent.normalise-observations",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_leaves_no_folder(run_folder, changes, words):
    with pytest.raises(SeedbedError, match=words):
        train(run_folder, **{"env": CartPole()} | changes)
    assert not run_folder.exists()


@pytest.mark.slow
def test_a_killed_run_does_not_forget_its_last_evaluation(run_folder):
    first = train(run_folder, CartPole(), steps=128)
    file, found = run_folder / "metrics.jsonl", {}
    # As if it had been killed before the line that tells it: that is the last one.
    kept = [x for x in file.read_text().splitlines(True) if "evaluation/env_steps" not in x]
    file.write_text("".join(kept))
    train(run_folder, CartPole(), steps=3000, resume=True)
    for line in map(json.loads, file.read_text().splitlines()):
        if "evaluation/env_steps" in line:
            found[line["evaluation/env_steps"]] = line["evaluation/episode_return_mean"]
    assert found[first["env_steps"]] == first["evaluation/episode_return_mean"] and len(found) == 2


@pytest.mark.slow
def test_fewer_steps_than_an_iteration_and_another_batch_on_resuming(run_folder):
    summary = train(run_folder, CartPole(), steps=1, seed=3)
    assert summary["env_steps"] == 128 and summary["learner_steps"] == 4
    before = saved(run_folder)
    # There is nothing left to do: the run is evaluated again and stays as it is.
    again = train(run_folder, CartPole(), steps=1, seed=3, resume=True)
    assert again["env_steps"] == 128
    same(saved(run_folder)[1], before[1])
    wider = dataclasses.replace(TINY, batch=32)
    with pytest.raises(SeedbedError, match="is of another agent"):
        train(run_folder, CartPole(), wider, resume=True)
    assert json.loads((run_folder / "config.json").read_text())["agent"]["batch"] == 16


@pytest.mark.slow
def test_a_sweep_is_its_values_one_by_one():
    options = {"sweep": "learning-rate=1e-3,4e-3", "seeds": 2, "seed": 3}
    _, swept, _ = run_program(CartPole(), TINY, 2, **options)
    config = FusedConfig(**options)
    assert config.member_seeds == (3, 4, 3, 4)
    # One program of the second value runs both of its seeds.
    agent = dataclasses.replace(TINY, **config.variations[2])
    program, one, _ = run_program(CartPole(), agent, 2, seed=3)
    first = Program(CartPole(), agent, FusedConfig(steps=256, seed=4)).first()
    other, _ = advance(program, program.place(first), 2)
    for i, alone in ((2, one), (3, other)):
        member = jax.tree.map(lambda x, i=i: x[i], swept.learner.params)
        same(member, alone.learner.params, rtol=1e-4, atol=1e-5)
    assert differ(jax.tree.map(lambda x: x[0], swept.learner.params), one.learner.params)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"seeds": 4}, {"sweep": "learning-rate=1e-3,4e-3"}], ids=str)
def test_a_population_is_divided_among_devices(options):
    _, one, report = run_program(CartPole(), TINY, 4, **options)
    program, several, other = run_program(CartPole(), TINY, 4, devices=(0, 1), **options)
    for leaf in jax.tree.leaves(several):
        assert len(leaf.sharding.device_set) == 2 and not leaf.is_fully_replicated
    same(jax.device_get(several), jax.device_get(one), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(report.transitions, other.transitions)
    results = program.evaluate(several, 3)
    assert results is not None and len(results) == program.members


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("learning_rate", "write an option of the agent and its values"),
        ("learning_rate=fast", "write an option of the agent and its values"),
        ("epochs=1,2", "epochs is no float of Ppo"),
        ("learning_rate=1e-3,-1", "Ppo.learning_rate is -1"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(sweep, words):
    with pytest.raises(SeedbedError, match=words):
        Program(CartPole(), TINY, FusedConfig(sweep=sweep))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "sweep"),
    [(CartPole(), "value_clip=0.1,0.2"), (Pendulum(), "initial_scale=0.5,1")],
    ids=["flag", "constant"],
)
def test_an_option_that_changes_the_program_cannot_be_swept(env, sweep):
    with pytest.raises(SeedbedError, match="changes the program itself"):
        run_program(env, TINY, 1, sweep=sweep)
