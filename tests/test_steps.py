"""One meaning of a step in both runtimes: a transition; and what follows from the count of them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from central_runs import counting_env, train
from counting_agent import CountingAgent, CountingReplayAgent
from saved import lines
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.central.unrolls import UnrollQueue
from seedbed.fused.carry import Iteration, StageTimes
from seedbed.fused.program import Program
from seedbed.fused.train import FusedRun
from seedbed.ops.keys import derived_seed, evaluation_seed, fold_count, halves, later
from seedbed.run.metrics import RecentEpisodes
from seedbed.run.options import CentralConfig, FusedConfig
from seedbed.run.restoring import restore
from seedbed.run.update import progress_of
from seedbed.testing import counting
from seedbed.types import ArraySpec, Discrete, EnvSpec, EnvState, SeedbedError, Timestep

pytestmark = pytest.mark.usefixtures("importable")


@dataclasses.dataclass(frozen=True)
class Short:
    """Episodes of `length` steps on the device."""

    length: int = 1
    episode_steps: int = 0
    frame_skip: int = 3

    @property
    def spec(self):
        return EnvSpec(ArraySpec((1,), "float32"), Discrete(counting.NUM_ACTIONS))

    def reset(self, key):
        del key
        return self._state(jnp.int32(0))

    def step(self, state, action):
        del action
        return self._state(state.inner + 1)

    def _state(self, step):
        ended = step >= self.length
        observation, reward = step[None].astype(jnp.float32), step.astype(jnp.float32)
        timestep = Timestep(observation, reward, ended, jnp.bool_(False), step == 0)
        return EnvState(step, timestep, {})


def train_fused(env, agent, **options):
    """Trains as the fused runtime does; returns the transitions, and the learner's state at the end."""
    config = FusedConfig(**options)
    program = Program(env, agent, config)
    carry, done = program.place(program.first()), 0
    program.compile(carry)
    while done < config.steps:
        carry, report = program.run(carry, [done])
        done += int(report.transitions)
    return done, jax.device_get(carry.learner)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "synchronous"), [(1, True), (5, False)])
def test_both_runtimes_make_the_same_updates(run_folder, length, synchronous):
    """In `unroll` rows an environment opens an episode once or three times, wherever they begin."""
    agent = CountingAgent(
        unroll=6, batch=8, epochs=2, minibatches=2, synchronous=synchronous,
        actions=counting.NUM_ACTIONS,
    )  # fmt: skip
    a_batch = 8 * 6 * length // (length + 1)
    steps = 30 * a_batch - 7
    summary = train(run_folder, env=counting_env(length=length, spread=1), agent=agent, steps=steps)
    assert summary["env_steps"] == summary["frames"] == 30 * a_batch
    assert summary["learner_steps"] == 30 * 4
    _, central, _ = restore(run_folder / "checkpoints", agent.init(None))
    assert central.optimizer_state["seen"] == 2 * 30 * a_batch, (
        "each in every epoch, resets in none"
    )
    assert central.progress == progress_of(29 * a_batch, steps) < 1
    done, fused = train_fused(Short(length), agent, steps=steps)
    assert done == 30 * a_batch
    assert (fused.updates, fused.progress) == (central.updates, central.progress)
    assert fused.optimizer_state == central.optimizer_state
    assert all(line["env_steps"] % a_batch == 0 for line in lines(run_folder))


@pytest.mark.slow
def test_both_runtimes_make_the_updates_that_the_ratio_asks_for(run_folder):
    """Also those that are owed when acting has ended; on the device in fours, which an iteration makes."""
    agent = CountingReplayAgent(sequence=1, period=1, burn_in=0, capacity=2000, min_size=20)
    env = counting_env(length=1, spread=1)
    summary = train(run_folder, env=env, agent=agent, steps=1000)
    assert (
        1000 <= summary["env_steps"] < 1004 and summary["replay/inserted"] == summary["env_steps"]
    )
    assert summary["learner_steps"] == (summary["env_steps"] - 20) * 0.5 // 4
    done, fused = train_fused(Short(1), agent, steps=1000, envs=4, unroll=8)
    assert done == 1008
    assert fused.updates == 4 * ((done - 20) * 0.5 // 16)
    assert 0 <= summary["learner_steps"] - fused.updates < 4


@pytest.mark.slow
def test_the_last_step_size_is_what_was_left_of_the_run():
    agent = Ppo(unroll=6, batch=4, epochs=1, minibatches=2, hidden_sizes=(4,), learning_rate=1e-3)
    # Each iteration makes 4 * 5 transitions, and the last begins after 80 of 90.
    done, state = train_fused(Short(5), agent, steps=90)
    assert done == 100 and state.updates == 10
    np.testing.assert_allclose(state.optimizer_state.learning_rate, 1e-3 * (1 - 80 / 90), rtol=1e-5)


def test_metrics_are_of_the_last_updates_that_were_made():
    """With replay an iteration may make none, and the seeds of a population not all."""

    def report(updates, losses, valid=True):
        number = np.zeros(2, np.int32)
        return Iteration(
            transitions=np.array([5, 7]), updates=np.array(updates), finite=np.ones(2, bool),
            valid=np.array([True, valid]),
            metrics={"loss": np.array(losses)}, env_metrics={}, episodes=number, returns=number,
            lengths=number, busy=StageTimes(number, number, number),
        )  # fmt: skip

    reports = [report([0, 0], [0, 0]), report([2, 0], [3, 0]), report([2, 2], [0, 5])]
    reports = iter([*reports, report([2, 2], [0, 5], valid=False)])
    carry = SimpleNamespace(learner=SimpleNamespace(updates=np.zeros(2, np.int32)))
    program = SimpleNamespace(
        run=lambda carry, done: (carry, next(reports)),
        config=SimpleNamespace(steps=100),
        members=2,
        group=None,
    )
    episodes = [RecentEpisodes(), RecentEpisodes()]
    run = FusedRun(program, carry, [0, 0], np.zeros(2, int), episodes)
    seen = []
    for _ in range(3):
        assert run.advance()
        seen.append((*run.progress(), run.learned))
    assert seen == [(5, 0, 12, {}), (10, 0, 24, {"loss": 3}), (15, 2, 36, {"loss": 5})]
    with pytest.raises(SeedbedError, match="not above 0 before step 20: the agent must give"):
        run.advance()


# -- counts -----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(count=st.integers(0, 2**64 - 2**32), steps=st.integers(0, 2**32 - 1))
def test_counts_go_on_beyond_32_bits(count, steps):
    more = np.array([0, steps], np.uint32)
    expected = [halves(count), halves(count + steps)]
    np.testing.assert_array_equal(LATER(halves(count), more), expected)


LATER = jax.jit(later)


def test_keys_and_seeds_differ_beyond_32_bits():
    counts = [1, 2, 2**31, 2**32, 2**32 + 1, 2**33 + 1, 2**63 + 1]
    keys = [tuple(jax.random.key_data(fold_count(KEY, halves(n))).tolist()) for n in counts]
    assert len(set(keys)) == len(counts)
    seeds = [derived_seed(seed, n) for seed in (0, 1) for n in counts]
    assert len(set(seeds)) == 2 * len(counts) and all(0 <= seed < 2**31 for seed in seeds)


def test_an_evaluation_plays_no_episodes_of_the_training_that_goes_on_from_it():
    trained = derived_seed(7, 1000)
    ranks = {trained, *(derived_seed(trained, rank) for rank in range(1, 1000))}
    assert evaluation_seed(7, 1000) not in ranks
    assert evaluation_seed(7, 1000) != evaluation_seed(7, 2000) != evaluation_seed(8, 2000)


KEY = jax.random.key(0)


def test_progress_is_exact_and_ends_at_one():
    assert progress_of(0, 7) == 0 and progress_of(9, 7) == 1
    assert progress_of(2**40 // 4, 2**40) == np.float32(0.25)
    assert progress_of(5, 7).dtype == np.float32


# -- lag, sizes -------------------------------------------------------------------------------------


def test_a_batch_that_is_too_old_is_told_of():
    queue = UnrollQueue(4, 2, most_lag=6, env_steps=0, steps=100)
    queue.learned(10, {"lag_max": 6.0}, ())
    assert not queue.take_notices()
    queue.learned(10, {"lag_max": 7.0}, ())
    (notice,) = queue.take_notices()
    assert "a lag of 7 updates" in notice and "explains 6" in notice
    queue.learned(10, {"lag_max": 14.0}, ())
    assert not queue.take_notices(), "said again only where it is twice as bad"
    queue.learned(10, {"lag_max": 15.0}, ())
    assert len(queue.take_notices()) == 1
    assert queue.env_steps == 40


@pytest.mark.parametrize(
    ("given", "chosen"),
    [((0, 0), (8, 4)), ((2, 0), (2, 16)), ((0, 4), (8, 4)), ((2, 8), (2, 8)), ((1, 2), (1, 2))],
)
def test_a_batch_has_equally_many_unrolls_of_every_environment(monkeypatch, given, chosen):
    monkeypatch.setattr("seedbed.run.options.usable_cores", lambda: 12.0)
    config = CentralConfig(actors=given[0], envs_per_actor=given[1]).fitted(Ppo(batch=32))
    assert (config.actors, config.envs_per_actor) == chosen
    assert config.fitted(Ppo(batch=32)) == config


def test_other_agents_have_an_actor_for_each_core(monkeypatch):
    monkeypatch.setattr("seedbed.run.options.usable_cores", lambda: 1.5)
    config = CentralConfig().fitted(Impala(batch=32))
    assert (config.actors, config.envs_per_actor) == (1, 32)


@pytest.mark.parametrize(
    ("agent", "options", "words"),
    [
        (CountingAgent(batch=3), {}, "multiple of the 2 environments of a group.*--agent.batch"),
        (CountingAgent(batch=64), {}, "only 8 environments: lower --agent.batch, or raise --actors"),
        (CountingAgent(batch=4), {"learner_devices": (0, 1, 2)}, "must divide.*--learner-devices"),
        (CountingAgent(), {"inference_devices": (0, 1, 2, 3, 4)}, "4 groups.*--inference-devices"),
        (CountingAgent(), {"envs_per_actor": 3}, "give an even --envs-per-actor"),
        (Ppo(batch=20), {}, "2 actors with 4 .*--agent.batch, --actors or --envs-per-actor"),
        (Ppo(batch=4), {}, "2 actors with 4 environments"),
        (Ppo(batch=9, minibatches=3), {"actors": 0, "envs_per_actor": 0}, "environments in 2 groups"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_by_name(agent, options, words):
    config = CentralConfig(**{"actors": 2, "envs_per_actor": 4} | options)
    with pytest.raises(SeedbedError, match=words):
        config.fitted(agent)
