"""What IMPALA and PPO share: clipping, memory, statistics of observations and of returns."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajectories
from seedbed.agents.acting import Behaviour
from seedbed.agents.impala import Impala
from seedbed.agents.learning_statistics import sampled_row
from seedbed.agents.ppo import Ppo
from seedbed.agents.vmpo import Vmpo
from seedbed.ops import return_scale, statistics
from seedbed.ops.distributions import Normal
from seedbed.ops.return_scale import ReturnScale
from seedbed.testing.probes import Aim, Match
from seedbed.testing.trainers import Trainer
from seedbed.types import ArraySpec, Box, Discrete, EnvSpec, Timestep, Trajectory, bind

KEY = jax.random.key(0)
AGENTS = (
    Impala(unroll=6, batch=8, hidden_sizes=(16,), lstm_size=8),
    Ppo(
        unroll=6, batch=8, epochs=1, minibatches=1, hidden_sizes=(16,), lstm_size=8,
        normalise_advantages=False,
    ),
    Vmpo(unroll=6, batch=8, epochs=1, hidden_sizes=(16,), lstm_size=8),
)  # fmt: skip
agents = pytest.mark.parametrize("agent", AGENTS, ids=["impala", "ppo", "vmpo"])


def bound(agent, **changes):
    spec = EnvSpec(ArraySpec((4,), "float32"), Discrete(3))
    return bind(dataclasses.replace(agent, **changes), spec)


@functools.partial(jax.jit, static_argnums=0)
def init(agent):
    return agent.init(KEY)


@functools.partial(jax.jit, static_argnums=0)
def gradient(agent, state, trajectory):
    return agent.gradients(state, agent.prepare(state, trajectory, KEY), KEY)


@functools.partial(jax.jit, static_argnums=0)
def apply(agent, state, grads, output):
    return agent.apply(state, agent.clip_gradient(grads), output)


def trajectory_of(agent, seed=0, mean=0.0):
    """Random rows of which every third begins an episode."""
    rng = np.random.default_rng(seed)
    rows, batch = agent.unroll, agent.batch
    flags = np.zeros((rows + 1, batch), bool)
    terminated, first = flags.copy(), flags.copy()
    terminated[2::3], first[3::3] = True, True
    observation = mean + rng.normal(size=(rows + 1, batch, 4))
    reward = np.where(first, 0, rng.normal(size=(rows + 1, batch)))
    numbers = (x.astype(np.float32) for x in (observation, reward))
    action = rng.integers(0, 3, (rows, batch)).astype(np.int32)
    log_prob = np.full((rows, batch), np.log(1 / 3), np.float32)
    return Trajectory(
        timesteps=Timestep(*numbers, terminated, flags, first),
        action=action,
        extras=Behaviour(log_prob, action, np.zeros((rows, batch, 3), np.float32)),
        actor_state=agent.actor_state(jnp.arange(batch), batch),
        params_version=np.zeros((rows, batch), np.int32),
    )


def assert_close(actual, expected, tolerance=1e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=tolerance), actual, expected
    )


@pytest.mark.slow
@agents
def test_a_memory_knows_the_action_before_and_learning_sees_what_acting_saw(agent):
    agent = bound(agent, recurrent=True, batch=32)
    state, n = init(agent), 32
    # A policy whose numbers differ visibly: the head is nearly 0 at the start.
    weights = jax.tree.map(lambda x: x + 0.5 * jnp.cos(jnp.arange(x.size)).reshape(x.shape),
                           state.params.weights)  # fmt: skip
    state = state._replace(params=state.params._replace(weights=weights))
    act = jax.jit(agent.act, static_argnums=4)
    zeros = np.zeros(n, np.float32)
    actor_state = opening = agent.actor_state(jnp.arange(n), n)
    steps, taken = [], []
    for t in range(agent.unroll + 1):
        first = np.full(n, t in (0, 4))
        step = Timestep(
            np.ones((n, 4), np.float32), zeros, np.full(n, t == 3), first & False, first
        )
        # Different draws at first, then the same noise for all: only their actions tell them apart.
        key = jax.random.fold_in(KEY, t)
        keys = jax.random.split(key, n) if t in (0, 4) else jnp.broadcast_to(key, (n,))
        action, extras, actor_state = act(state.params, actor_state, step, keys, False)
        steps.append(step)
        taken.append((np.asarray(action), extras))
    first_action, log_prob = taken[0][0], np.asarray(taken[1][1].log_prob)
    assert set(first_action) == {0, 1, 2}
    assert len({float(x) for x in log_prob}) == 3
    for choice in range(3):
        assert len({float(x) for x in log_prob[first_action == choice]}) == 1
    action, extras = jax.tree.map(lambda *x: np.stack(x), *taken[: agent.unroll])
    timesteps = jax.tree.map(lambda *x: np.stack(x), *steps)
    version = np.zeros(action.shape, np.int32)
    _, output = gradient(agent, state, Trajectory(timesteps, action, extras, opening, version))
    name, equal = ("rho_mean", 1) if isinstance(agent, Impala) else ("kl", 0)
    np.testing.assert_allclose(output.metrics[name], equal, atol=1e-5)


@pytest.mark.slow
# V-MPO weighs each row by what all others returned.
@pytest.mark.parametrize("agent", AGENTS[:2], ids=["impala", "ppo"])
@pytest.mark.parametrize("recurrent", [False, True])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), end=st.integers(1, 4), truncated=st.booleans())
def test_nothing_after_a_reset_changes_a_gradient_before_it(agent, recurrent, seed, end, truncated):
    """Observations have separate entries before (0, 1) and after (2, 3) the reset."""
    agent = bound(agent, recurrent=recurrent, batch=1)
    state, trajectory = init(agent), trajectories.trajectory_of(agent, seed)
    flags = np.zeros((4, agent.unroll + 1, 1), bool)
    flags[0 if truncated else 1, end], flags[2, end + 1] = True, True

    def variant(draw, bootstrap):
        """Rows after the end vary with `draw`; `bootstrap` is seen in the last observation."""
        rng = np.random.default_rng((seed, draw))
        observation = np.array(trajectory.timesteps.observation)
        observation[: end + 1, :, 2:], observation[end + 1 :, :, :2] = 0, 0
        observation[end + 1 :, :, 2:] = rng.normal(size=(agent.unroll - end, 1, 2))
        observation[end, 0, 0] += bootstrap
        reward = np.array(trajectory.timesteps.reward)
        reward[end + 1 :] = rng.normal(size=(agent.unroll - end, 1))  # even on the reset itself
        timesteps = Timestep(observation, reward, flags[1], flags[0], flags[2])
        # Near enough that no ratio is clipped, which would hide what the advantage depends on.
        log_prob, chosen = (np.array(x) for x in trajectory.extras[:2])
        log_prob[:end] = -1.1 + 0.02 * log_prob[:end]
        chosen[end:] = rng.integers(0, 3, chosen[end:].shape)
        log_prob[end:] = rng.normal(size=log_prob[end:].shape)
        changed = trajectory._replace(
            timesteps=timesteps, action=chosen, extras=Behaviour(log_prob, chosen)
        )
        grads, output = gradient(agent, state, changed)
        assert output.weight == agent.unroll - 1
        return np.asarray(grads.weights["params"]["Torso_0"]["Mlp_0"]["Dense_0"]["kernel"][:2])

    reference = variant(0, 0.0)
    assert np.abs(reference).max() > 0
    np.testing.assert_allclose(variant(1, 0.0), reference, rtol=1e-5, atol=1e-6)
    # The last observation itself counts if, and only if, the episode was cut short.
    assert (variant(0, 1.0) != reference).any() == truncated


def normalising(agent):
    """One that normalises everything, and whose steps are of no size."""
    options = {"normalise_observations": True, "normalise_returns": True, "entropy_cost": 0.0}
    return bound(agent, **options, learning_rate=1e-20)


@pytest.mark.slow
@agents
def test_observation_statistics_are_exact_however_old_the_gradients_are(agent):
    """Eight gradients of the same version, of data N(100, 1), applied one after the other."""
    agent = normalising(agent)
    version_0 = state = init(agent)
    seen = []
    for seed in range(8):
        trajectory = trajectory_of(agent, seed, mean=100.0)
        learned = ~trajectory.timesteps.first[1:]
        seen.append(trajectory.timesteps.observation[:-1][learned])
        state = apply(agent, state, *gradient(agent, version_0, trajectory))
    seen = np.concatenate(seen)
    np.testing.assert_allclose(state.params.seen.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(state.params.seen.variance, seen.var(0), rtol=0.05)
    # An unroll counts as much as one row.
    np.testing.assert_allclose(state.params.seen.weight, len(seen) / agent.unroll, rtol=1e-5)


@pytest.mark.slow
@agents
def test_the_noise_of_resets_is_not_taken_for_the_deviation_of_observations(agent):
    """Each environment begins within 0.001 of the same state, and soon deviates by 1."""
    agent = normalising(agent)
    state, trajectory = init(agent), trajectory_of(agent)
    steps = trajectory.timesteps
    observation = np.concatenate([0.001 * steps.observation[:1], steps.observation[1:]])
    first = trajectory._replace(timesteps=steps._replace(observation=observation))
    state = apply(agent, state, *gradient(agent, state, first))
    deviation = np.sqrt(state.params.seen.variance)
    assert (deviation > 0.5).all() and (deviation < 1.5).all()
    # Later batches count by one row of each unroll.
    later = trajectory_of(agent, 1, mean=3.0)
    row = sampled_row(state.updates, agent.unroll)
    counts = ~later.timesteps.first[row + 1]
    after = apply(agent, state, *gradient(agent, state, later))
    old = np.asarray(state.params.seen.mean) * state.params.seen.weight
    both = old + later.timesteps.observation[row][counts].sum(0)
    both = both / (state.params.seen.weight + counts.sum())
    np.testing.assert_allclose(after.params.seen.mean, both, rtol=1e-4)


@pytest.mark.slow
@agents
@pytest.mark.parametrize("recurrent", [False, True])
def test_an_error_of_the_value_does_not_shrink_the_policy_s_step(agent, recurrent):
    """Each of two networks has the bound of the gradient for itself."""
    agent = bound(
        agent, value_sizes=(8,), recurrent=recurrent, max_gradient_norm=1e-3, entropy_cost=0.0
    )
    state, trajectory = init(agent), trajectory_of(agent)
    grads, _ = gradient(agent, state, trajectory)

    mine = {"Torso_0", "PolicyHead_0"} | ({"LSTM_0"} if recurrent else set())

    def parts(grads):
        layers = agent.clip_gradient(grads).weights["params"]
        assert set(layers) == mine | {name.replace("0", "1") for name in mine} - {
            "PolicyHead_1"
        } | {"ValueHead_0"}
        value = {name: layer for name, layer in layers.items() if name not in mine}
        return {name: layers[name] for name in mine}, value

    layers = grads.weights["params"]
    wrong = {
        name: layer if name in mine else jax.tree.map(lambda x: 1e4 * x, layer)
        for name, layer in layers.items()
    }
    wrong = grads._replace(weights={"params": wrong})
    (policy, value), (same, too_large) = parts(grads), parts(wrong)
    jax.tree.map(np.testing.assert_array_equal, policy, same)
    for part in (policy, value, too_large):
        np.testing.assert_allclose(optax.tree.norm(part), 1e-3, rtol=1e-4)


@pytest.mark.quick("ppo")
@agents
def test_values_stay_what_they_are_when_their_scale_moves(agent):
    agent = normalising(agent)
    state, trajectory = init(agent), trajectory_of(agent)
    steps = trajectory.timesteps

    @jax.jit
    def values(state, seen):
        params = state.params._replace(seen=seen)
        _, output, _ = agent._evaluate(params, steps, (), ())
        return agent._return_scale(state).values(output)

    def learn(state, factor, offset):
        reward = np.float32(factor) * steps.reward + np.float32(offset)
        changed = trajectory._replace(timesteps=steps._replace(reward=reward))
        grads, output = gradient(agent, state, changed)
        return apply(agent, state, grads, output), grads

    # Without any reward there is no scale, and nothing to learn.
    state, grads = learn(state, 0, 0)
    assert not agent._return_scale(state).known and (values(state, state.params.seen) == 0).all()
    if not isinstance(agent, Vmpo):  # which stays near what acted
        assert not any(leaf.any() for leaf in jax.tree.leaves(grads.weights))
    state, _ = learn(state, 1, 0)
    assert agent._return_scale(state).known
    after, grads = learn(state, 30, 7)
    assert any(leaf.any() for leaf in jax.tree.leaves(grads.weights))
    assert after.auxiliary.returns.mean > state.auxiliary.returns.mean + 1
    assert after.auxiliary.returns.variance > 10 * state.auxiliary.returns.variance
    seen = state.params.seen
    np.testing.assert_allclose(values(after, seen), values(state, seen), rtol=1e-4, atol=1e-4)


LEARNERS = {
    "impala": Impala(
        unroll=8, batch=32, hidden_sizes=(32,), optimizer="adam", learning_rate=1e-2,
        entropy_cost=0.001,
    ),
    "ppo": Ppo(unroll=8, batch=32, epochs=2, minibatches=2, hidden_sizes=(32,), learning_rate=1e-2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "probe"), [("impala", Match), ("ppo", Aim)])
def test_learning_is_the_same_whatever_the_size_of_rewards(name, probe):
    """Bit for bit where it is a power of two, since every size enters as a ratio."""

    def trained(size):
        class Sized(probe):
            def reward(self, action):
                return size * super().reward(action)

        agent = dataclasses.replace(LEARNERS[name], normalise_returns=True)
        return Trainer(agent, Sized, updates=60).train()

    one = trained(1.0)
    assert one.mean_reward(20) > 0.8
    for size in (2.0**-10, 2.0**10):
        other = trained(size)
        jax.tree.map(np.testing.assert_array_equal, other.state.params, one.state.params)
        spread = other.state.auxiliary.returns.variance
        assert spread == size**2 * one.state.auxiliary.returns.variance


def test_the_scale_follows_returns_that_grow_and_keeps_still_afterwards():
    size = np.where(np.arange(600) < 200, 1, 100)[:, None]
    returns = size * (3 + np.random.default_rng(0).normal(size=(600, 64)))

    def step(seen, rows):
        seen = return_scale.absorb(seen, statistics.deviations(seen, rows))
        return seen, return_scale.scale_of(seen).deviation

    run = jax.jit(functools.partial(jax.lax.scan, step))
    _, deviation = run(return_scale.initial(), returns.astype(np.float32))
    np.testing.assert_allclose(deviation[199], 1, rtol=0.05)
    assert deviation[210] > 30  # soon of the right size
    np.testing.assert_allclose(deviation[599], 100, rtol=0.25)
    assert np.abs(np.diff(np.log(deviation)))[-100:].max() < 0.01


def test_returns_that_hardly_differ_are_not_blown_up():
    seen = return_scale.initial()
    seen = return_scale.absorb(seen, statistics.deviations(seen, np.full(5, -500.0, np.float32)))
    scale = return_scale.scale_of(seen)
    assert scale.deviation == 5
    assert ReturnScale(*scale).outputs(jnp.float32(-490.0)) == 2


@pytest.mark.slow
@agents
def test_the_entropy_of_a_squashed_action_is_greatest_where_actions_are_spread_evenly(agent):
    """Its gradient by the policy's scale agrees with the integral's, and changes sign near 0.87."""
    spec = EnvSpec(ArraySpec((4,), "float32"), Box((1,), (-3.0,), (5.0,)))
    agent = bind(agent, spec)
    noise = jax.random.normal(KEY, (20_000, 1))
    grid = np.linspace(-9, 9, 100_001)
    weight = np.exp(-np.square(grid) / 2)
    weight /= weight.sum()

    def entropy(scale, mean, draw):
        policy = Normal(jnp.full((1, 1), mean), jnp.full((1, 1), scale))
        return agent._entropy(policy, draw).mean()

    for mean, scale in ((0.0, 0.3), (0.0, 0.8), (0.0, 0.95), (0.5, 1.5), (-1.0, 3.0)):
        draw = mean + scale * noise
        value, slope = jax.value_and_grad(entropy)(scale, mean, draw)
        x = mean + scale * grid
        bend = weight * 2 * (np.log(2) - x - np.logaddexp(0, -2 * x))
        wanted = 0.5 * np.log(2 * np.pi * np.e) + np.log(scale) + bend.sum()
        np.testing.assert_allclose(value, wanted, atol=0.05)
        np.testing.assert_allclose(
            slope, 1 / scale - (weight * 2 * np.tanh(x) * grid).sum(), atol=0.03
        )
    assert jax.grad(entropy)(0.8, 0.0, 0.8 * noise) > 0 > jax.grad(entropy)(1.0, 0.0, noise)
    # The gradient by the mean leads away from a bound.
    assert jax.grad(entropy, 1)(1.0, 1.0, 1.0 + noise) < 0
