"""ES and ARS: whole episodes, noise in pairs, steps against slow ones, and what they learn."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fused_runs import same
from seedbed.agents.ars import Ars
from seedbed.agents.es import Es
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.fused.program import Program
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig
from seedbed.types import ArraySpec, Box, EnvSpec, EnvState, SeedbedError, Timestep, bind

KEY = jax.random.key(0)
ES = Es(batch=16, hidden_sizes=(4,), noise=0.5)
ARS = Ars(batch=16, best=3, noise=0.5)
agents = pytest.mark.parametrize("agent", (ES, ARS), ids=("es", "ars"))


@dataclasses.dataclass(frozen=True)
class Aim:
    """The reward of step t is -(a - 1/2)^2 + t; an episode lasts as its key says, and may be cut short."""

    longest: int = 9
    episode_steps: int = 7
    frame_skip: int = 1

    @property
    def spec(self):
        return EnvSpec(ArraySpec((2,), "float32"), Box((1,), (-1.0,), (1.0,)))

    def reset(self, key):
        length = jax.random.randint(key, (), 1, self.longest + 1)
        inner = jnp.stack([jnp.float32(0), jnp.float32(length)])
        return EnvState.opening(inner, inner, {})

    def step(self, state, action):
        inner = state.inner.at[0].add(1)
        reward = inner[0] - jnp.square(action[0] - 0.5)
        return EnvState.after(inner, inner, reward, inner[0] >= inner[1], {})


def run(env, agent, generations, **options):
    program = Program(env, agent, FusedConfig(steps=10_000_000, **options))
    carry = program.place(program.first())
    program.compile(carry)
    reports, done = [], 0
    for _ in range(generations):
        carry, report = program.run(carry, [done])
        done += int(report.transitions)
        reports.append(report)
    return program, carry, reports


def played(agent, state, env_ids, episodes):
    """Slow returns of episodes of given lengths, one environment after the other, in numpy."""
    params = jax.device_get(state.params)
    flat, unravel = ravel_pytree(params.weights)
    noise = np.asarray(agent._noise(state.params, jnp.asarray(env_ids)))
    outputs = jax.jit(lambda flat, x: agent._policy().apply(unravel(flat), x[None])[0])
    returns, seen = [], []
    for one, length in zip(noise, episodes, strict=True):
        weights, total = np.asarray(flat + agent.noise * one), 0.0
        for t in range(min(length, 7)):
            observation = np.array([t, length], np.float32)
            seen.append(observation)
            x = (observation - params.seen.mean) / np.sqrt(np.maximum(params.seen.variance, 1e-4))
            output = outputs(weights, np.clip(x, -5, 5))
            total += t + 1 - np.square(np.clip(output[0], -1, 1) - 0.5)
        returns.append(total)
    return np.array(returns), np.array(seen), noise


def slow_step(agent, returns, noise):
    """The papers' steps, as sums over pairs."""
    plus, minus = returns[::2], returns[1::2]
    if isinstance(agent, Es):
        order = returns.argsort().argsort()
        rank = order / (len(returns) - 1) - 0.5
        return (rank[:, None] * noise).sum(0) / len(returns) / agent.noise
    best = np.argsort(-np.maximum(plus, minus))[: agent.best]
    used = np.concatenate([plus[best], minus[best]])
    return ((plus - minus)[best, None] * noise[::2][best]).sum(0) / agent.best / used.std()


@agents
def test_a_generation_is_whole_episodes_and_the_paper_s_step(agent):
    program, carry, _ = run(Aim(), agent, 0)
    for _ in range(3):
        before = jax.device_get(carry.learner)
        carry, report = program.run(carry, [0])
        state = jax.device_get(carry.env)
        lengths = state.timestep.observation[:, 1].astype(int)  # the opening observation's
        returns, seen, noise = played(
            program.agent, before, np.arange(16, dtype=np.uint32), lengths
        )
        np.testing.assert_allclose(state.timestep.reward, returns, rtol=1e-4)
        assert report.episodes == 16 and report.transitions == np.minimum(lengths, 7).sum()
        assert report.lengths == report.transitions
        np.testing.assert_allclose(report.returns, returns.sum(), rtol=1e-4)
        step = slow_step(agent, returns, noise)
        moved = (
            ravel_pytree(carry.learner.params.weights)[0] - ravel_pytree(before.params.weights)[0]
        )
        if isinstance(agent, Ars):
            np.testing.assert_allclose(moved, agent.learning_rate * step, rtol=2e-3, atol=1e-6)
        else:
            # The gradient that Adam got is in the change of its mean.
            former, mean = (
                ravel_pytree(each.optimizer_state[1][0].mu)[0] for each in (before, carry.learner)
            )
            wanted = agent.weight_decay * ravel_pytree(before.params.weights)[0] - step
            np.testing.assert_allclose(10 * mean - 9 * former, wanted, rtol=2e-3, atol=1e-5)
            if int(before.updates) == 0:  # Adam's first step has the size of the rate
                clear = np.abs(wanted) > 1e-4
                np.testing.assert_allclose(
                    moved[clear], -agent.learning_rate * np.sign(wanted[clear]), rtol=1e-2
                )
        # Every observation that was acted on counts once.
        weight = before.params.seen.weight
        mean = (weight * before.params.seen.mean + seen.sum(0)) / (weight + len(seen))
        after = carry.learner.params
        np.testing.assert_allclose(after.seen.weight, weight + len(seen), rtol=1e-5)
        np.testing.assert_allclose(after.seen.mean, mean, rtol=1e-4)
        assert after.generation == before.params.generation + 1


@agents
def test_pairs_have_opposite_noise_and_others_their_own(agent):
    agent = bind(agent, Aim().spec)
    state = agent.init(KEY)
    noise = np.asarray(agent._noise(state.params, jnp.arange(6, dtype=jnp.uint32)))
    np.testing.assert_array_equal(noise[::2], -noise[1::2])
    assert len(np.unique(np.abs(noise[:, 0]))) == 3
    later = state.params._replace(generation=jnp.int32(1))
    assert (np.asarray(agent._noise(later, jnp.arange(6, dtype=jnp.uint32))) != noise).all()
    # As an environment of its own, and evaluated, the policy is the one in the middle.
    step = Timestep(
        np.ones((1, 2), np.float32), *np.zeros((2, 1), np.float32), *np.ones((2, 1), bool)
    )
    actor = agent.actor_state(jnp.arange(1), 1)
    action, extras, after = agent.act(state.params, actor, step, jax.random.split(KEY, 1), True)
    assert extras == () and action.shape == (1, 1)
    same(after, actor)


def test_equal_returns_share_a_rank_and_move_nothing():
    agent = bind(ES, Aim().spec)
    fitness = agent._fitness(jnp.float32([3, 1, 3, 2]))
    np.testing.assert_allclose(
        fitness * agent.noise, [2.5 / 3 - 0.5, -0.5, 2.5 / 3 - 0.5, 1 / 3 - 0.5], rtol=1e-6
    )
    assert not np.any(agent._fitness(jnp.full(8, 7.0)))
    # Of ten equal pairs three are taken, and nothing is divided by their deviation of 0.
    returns = jnp.full(20, 500.0).at[-1].set(9.0)
    assert not np.any(bind(ARS, Aim().spec)._fitness(returns))


@pytest.mark.slow
@agents
@pytest.mark.parametrize("devices", [2, 8])
def test_one_and_several_devices_agree(agent, devices):
    _, one, alone = run(Aim(), agent, 4)
    _, several, reports = run(Aim(), agent, 4, devices=tuple(range(devices)))
    same(jax.device_get(several.learner), jax.device_get(one.learner), rtol=2e-4, atol=2e-5)
    for a, b in zip(alone, reports, strict=True):
        assert (a.episodes, a.transitions) == (b.episodes, b.transitions)
        np.testing.assert_allclose(a.returns, b.returns, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "agent", [Es(learning_rate=0.03), Ars(noise=0.1, best=8)], ids=("es", "ars")
)
def test_it_balances_a_pole(agent):
    program, carry, _ = run(CartPole(), agent, 40, evaluate_episodes=16)
    found = program.evaluate(carry, seed=0)[0]
    assert found["episode_return_mean"] > 475, found


def test_a_generation_goes_on_from_a_carry_bit_for_bit():
    program, carry, _ = run(Aim(), ES, 2)
    held = jax.device_get(carry)
    again, _ = program.run(program.place(held), [0])
    carry, _ = program.run(carry, [0])
    same(jax.device_get(again), jax.device_get(carry))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Es(batch=7), "Es.batch is 7; give an even number"),
        (lambda: Es(gamma=0.99), "Es.gamma is 0.99; give 1: returns are not discounted"),
        (lambda: Ars(batch=8, best=5), "Ars.best is 5; give from 1 to half of batch, 4"),
        (lambda: Ars(noise=0.0), "Ars.noise is 0.0; give more than 0"),
        (lambda: CentralConfig().fitted(Es()), "only the fused runtime plays"),
        (lambda: ParamServerConfig().fitted(Ars()), "only the fused runtime plays"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(SeedbedError, match=words):
        make()


def test_a_task_without_a_time_limit_is_refused():
    with pytest.raises(SeedbedError, match="Aim has no time limit .* give --env.episode-steps"):
        Program(Aim(episode_steps=0), ES, FusedConfig(steps=100))


@dataclasses.dataclass(frozen=True)
class Broken(Aim):
    """In the third step the observation of one environment is not finite, and all rewards are."""

    def step(self, state, action):
        after = super().step(state, action)
        bad = (after.inner[0] == 3) & (after.inner[1] == 5)
        shown = jnp.where(bad, jnp.nan, after.timestep.observation)
        return after._replace(timestep=after.timestep._replace(observation=shown))


def test_an_observation_in_the_middle_of_an_episode_that_is_not_finite_is_told():
    _, _, (report,) = run(Broken(), ES, 1)
    assert not report.finite
    _, _, (report,) = run(Aim(), ES, 1)
    assert report.finite


def test_images_are_refused():
    spec = EnvSpec(ArraySpec((84, 84, 1), "uint8"), Box((1,), (-1.0,), (1.0,)))
    with pytest.raises(SeedbedError, match="Es sees vectors but the environment shows an image"):
        bind(ES, spec)
