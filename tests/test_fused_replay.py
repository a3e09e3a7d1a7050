"""Agents that learn from replay in the fused runtime."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from fused_runs import same, saved
from seedbed import api
from seedbed.agents.awr import Awr
from seedbed.agents.dqn import Dqn
from seedbed.agents.r2d2 import R2d2
from seedbed.agents.sac import Sac
from seedbed.config.configuration import TrainConfig
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.device.probes import RepeatProbe
from seedbed.fused.program import Program
from seedbed.policy import Policy
from seedbed.run.evaluation import SpecPolicy
from seedbed.run.forms import PlainForms
from seedbed.run.options import FusedConfig
from seedbed.types import SeedbedError, bind

TINY = Dqn(
    batch=32, ratio=2.0, capacity=1000, min_size=200, hidden_sizes=(8,), target_period=7, n_step=2,
    priority_exponent=0.6, importance_exponent=0.4,
)  # fmt: skip
SIZES = {"envs": 4, "unroll": 8}
"""32 items an iteration: two updates."""
LEARNS = {"learning_rate": 1e-3, "adam_epsilon": 1e-8, "target_period": 100, "gamma": 0.95}
REMEMBERS = R2d2(
    sequence=8, burn_in=4, lstm_size=32, head_size=32, hidden_sizes=(32,), batch=32, ratio=4.0,
    capacity=5000, min_size=200, n_step=3, priority_exponent=0.6, **LEARNS,
)  # fmt: skip


def run_program(env, agent, iterations, **options):
    """Runs iterations with nothing around them; returns the program, the carry and the reports."""
    options = SIZES | options
    steps = iterations * options["envs"] * options["unroll"]
    program = Program(env, agent, FusedConfig(steps=steps, **options))
    carry, reports = program.place(program.first()), []
    program.compile(carry)
    for _ in range(iterations):
        carry, report = program.run(carry, [0] * program.members)
        reports.append(report)
    return program, carry, reports


def train(folder, env, agent=TINY, resume=False, **options):
    options = {"steps": 640, "evaluate_episodes": 4, "log_every_s": 0.1} | SIZES | options
    config = TrainConfig(env, agent, FusedConfig(**options), "test/dqn")
    return api.train(config, run=folder, resume=resume)


@pytest.mark.slow
def test_it_waits_for_enough_and_then_learns_at_the_ratio():
    _, carry, reports = run_program(CartPole(), TINY, 25)
    updates = [int(report.updates) for report in reports]
    made = np.cumsum([int(report.transitions) for report in reports])
    assert made[-1] < 25 * 32, "some rows were auto-resets, which ask for nothing"
    # Two updates for every 32 transitions after the first 200.
    np.testing.assert_array_equal(updates, 2 * np.maximum(0, (made - 200) // 32))
    assert int(carry.learner.updates) == updates[-1]
    assert reports[0].metrics["loss/total"] == 0 and reports[-1].metrics["loss/total"] > 0


@pytest.mark.slow
def test_replay_holds_what_happened():
    """CartPole is deterministic: each row and its action must lead to the next row."""
    env = CartPole()
    _, carry, _ = run_program(env, TINY, 20)
    records = carry.replay.records
    states = jax.vmap(jax.vmap(env.reset))(
        jax.random.split(jax.random.key(0), records.timestep.first.shape)
    )
    timestep = records.timestep
    states = states._replace(
        inner=jax.tree.map(lambda _, x: x, states.inner, timestep.observation), timestep=timestep
    )
    after = jax.vmap(jax.vmap(env.step))(states, records.action).timestep
    rows = slice(0, int(carry.replay.position) - 1 or None)
    goes_on = ~np.asarray(timestep.first)[1:][rows]
    for got, made in ((timestep.observation, after.observation), (timestep.reward, after.reward)):
        moved = np.asarray(got)[1:][rows][goes_on[: len(np.asarray(got)[1:][rows])]]
        np.testing.assert_allclose(
            moved, np.asarray(made)[:-1][rows][goes_on], rtol=1e-5, atol=1e-6
        )
    assert goes_on.sum() > 300 and not goes_on.all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "agent"),
    [
        (CartPole(), TINY),
        (
            Pendulum(),
            Sac(batch=16, ratio=1.0, capacity=500, min_size=64, hidden_sizes=(8,), noise="pink"),
        ),
        (RepeatProbe(), dataclasses.replace(REMEMBERS, batch=4, ratio=1.0, min_size=8)),
    ],
    ids=["dqn", "sac", "r2d2"],
)
def test_a_resumed_run_ends_where_an_undisturbed_one_does(tmp_path, env, agent):
    train(tmp_path / "whole", env, agent)
    train(tmp_path / "parts", env, agent, steps=320)
    train(tmp_path / "parts", env, agent, resume=True)
    whole, parts = (saved(tmp_path / name) for name in ("whole", "parts"))
    assert 640 <= whole[0] == parts[0] < 640 + 32 and int(whole[1].learner.updates) > 0
    same(parts[1], whole[1])


@pytest.mark.slow
def test_a_population_with_replay_is_divided_among_devices():
    agent = Sac(batch=16, ratio=1.0, capacity=500, min_size=64, hidden_sizes=(8,))
    _, one, reports = run_program(Pendulum(), agent, 8, seeds=2)
    _, several, others = run_program(Pendulum(), agent, 8, seeds=2, devices=(0, 1))
    assert int(one.learner.updates[0]) > 0
    for leaf in jax.tree.leaves(several):
        assert len(leaf.sharding.device_set) == 2 and not leaf.is_fully_replicated
    same(jax.device_get(several), jax.device_get(one), rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(reports[-1].updates, others[-1].updates)


@pytest.mark.slow
def test_a_resumed_run_explores_as_it_is_told(tmp_path):
    train(tmp_path, CartPole(), steps=64)
    _, before, _ = saved(tmp_path)
    agent = dataclasses.replace(TINY, epsilon=0.5 * TINY.epsilon)
    train(tmp_path, CartPole(), agent, resume=True)
    _, after, _ = saved(tmp_path)
    wanted = jax.device_get(bind(agent, CartPole().spec).actor_state(np.arange(4), 4)).per_env
    same(after.actor.per_env, wanted, rtol=1e-6)
    assert not np.array_equal(before.actor.per_env, after.actor.per_env)


def test_members_are_judged_with_their_own_options():
    """An option that acts only in evaluations makes members of one seed differ there."""
    swept = {"sweep": "evaluation_epsilon=0,1", "evaluate_episodes": 8}
    program = Program(CartPole(), TINY, FusedConfig(**SIZES, **swept))
    certain, random = program.evaluate(program.first(), 0)
    assert certain["episode_return_mean"] != random["episode_return_mean"]


def test_an_option_that_changes_the_program_is_told_before_it_is_traced():
    agent = Awr(unroll=8, batch=8, hidden_sizes=(8,), capacity=500, min_size=64)
    program = Program(Pendulum(), agent, FusedConfig(**SIZES, sweep="initial_scale=0.5,1"))
    with pytest.raises(SeedbedError, match="changes the program itself"):
        program.first()


@pytest.mark.parametrize(
    ("agent", "options", "words"),
    [
        (TINY, {"envs": 3}, "24 items an iteration, .* that is 1.5 updates"),
        (TINY, {"unroll": 1}, "4 items an iteration, .* that is 0.25 updates"),
        (TINY, {"devices": (0, 1)}, "trains on one device"),
        (TINY, {"envs": 0}, "envs is 0: it must be 1 or more"),
        (dataclasses.replace(TINY, capacity=200), {"unroll": 64}, "raise the capacity"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_leaves_no_folder(tmp_path, agent, options, words):
    with pytest.raises(SeedbedError, match=words):
        train(tmp_path / "run", CartPole(), agent, **options)
    assert not (tmp_path / "run").exists()


def test_a_sweep_of_how_experience_is_kept_is_refused():
    for sweep in ("ratio=1,2", "priority_exponent=0.3,0.6"):
        with pytest.raises(SeedbedError, match="changes how experience is kept"):
            Program(CartPole(), TINY, FusedConfig(sweep=sweep, **SIZES))


def test_sizes_that_do_not_fit_are_answered_with_some_that_do(tmp_path):
    with pytest.raises(SeedbedError, match="as with --unroll 640") as refusal:
        train(tmp_path / "run", RepeatProbe(), R2d2(lstm_size=8), envs=16, unroll=8)
    assert "0.0375 updates" in str(refusal.value)
    with pytest.raises(SeedbedError, match="needs|choose ppo"):  # the environment comes first
        train(tmp_path / "run", Pendulum(), R2d2(lstm_size=8))


class Zero(Dqn):
    """An agent whose new items cannot be drawn."""

    def initial_priorities(self, timesteps, extras):
        return 0 * super().initial_priorities(timesteps, extras)


@pytest.mark.slow
def test_an_iteration_tells_of_priorities_that_cannot_be():
    for agent, valid in ((TINY, True), (Zero(**dataclasses.asdict(TINY)), False)):
        _, _, reports = run_program(CartPole(), agent, 2)
        assert bool(reports[-1].valid) == valid


@pytest.mark.slow
def test_a_loaded_memory_takes_the_reward_in():
    agent, spec = bind(REMEMBERS, RepeatProbe().spec), RepeatProbe().spec
    params = agent.init(jax.random.key(0)).params
    observation = np.eye(4, dtype=np.float32)[[0, 1, 2, 3]]

    def memory(reward):
        policy = SpecPolicy(agent, spec, 1, params)
        policy.act(observation)
        policy.act(observation, reward=reward)
        return policy._state.actor_state.core.lstm.hidden

    same(memory(0.0), memory(np.zeros(4)))
    assert not np.allclose(memory(0.0), memory(np.array([1.0, 0, 0, 0])))
    np.testing.assert_array_equal(memory(0.0)[1:], memory(np.array([1.0, 0, 0, 0]))[1:])


def test_a_loaded_memory_asks_for_the_reward(monkeypatch):
    spec, told = RepeatProbe().spec, []
    blind = SimpleNamespace(act=lambda now: (told.append(now.reward.tolist()), np.zeros(4, int))[1])
    monkeypatch.setattr(SpecPolicy, "_player", lambda self, greedy: blind)
    policy = Policy(PlainForms(spec), SpecPolicy(bind(REMEMBERS, spec), spec, 1, ()))
    observation = np.eye(4, dtype=np.float32)
    policy.act(observation)
    for first in (None, np.array([True, True, True, False])):
        with pytest.raises(SeedbedError, match="reward is None, but R2d2 has a memory"):
            policy.act(observation, first)
    policy.act(observation, np.ones(4, bool))
    policy.predict(observation)
    policy.act(observation, reward=1.0)
    assert told == [[0.0] * 4] * 3 + [[1.0] * 4]


def test_an_agent_of_other_actions_is_refused(tmp_path):
    with pytest.raises(SeedbedError, match="choose ppo, or sac for a Box"):
        train(tmp_path / "run", Pendulum(), TINY)
    with pytest.raises(SeedbedError, match="choose"):
        train(tmp_path / "run", CartPole(), Sac(batch=16, ratio=1.0))
