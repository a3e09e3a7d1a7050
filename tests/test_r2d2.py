"""R2D2: loss against a slow reference, memory, masks, priorities, and probes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.agents import base
from seedbed.agents.dqn import Dqn
from seedbed.agents.r2d2 import R2d2
from seedbed.nets.recurrent import LSTMState
from seedbed.ops import returns
from seedbed.testing.probes import Delay, Memory
from seedbed.testing.trainers import ReplayTrainer, initial_priorities, learn_replayed
from seedbed.types import (
    ActorState,
    ArraySpec,
    Discrete,
    EnvSpec,
    SeedbedError,
    Timestep,
    Trajectory,
    bind,
)

KEY = jax.random.key(0)
SMALL = R2d2(
    burn_in=3,
    sequence=5,
    n_step=3,
    batch=4,
    gamma=0.9,
    hidden_sizes=(8,),
    head_size=8,
    lstm_size=8,
    min_size=10,
    capacity=100,
)
PROBE = R2d2(
    burn_in=2,
    sequence=4,
    n_step=2,
    batch=16,
    gamma=0.5,
    hidden_sizes=(16,),
    head_size=16,
    lstm_size=16,
    learning_rate=5e-3,
    min_size=64,
    capacity=1_000,
    ratio=16.0,
    target_period=20,
    epsilon_power=1.0,
)


def bound(agent):
    return bind(agent, EnvSpec(ArraySpec((4,), "float32"), Discrete(3)))


def items_of(agent, seed=0):
    """Random items with ends of both kinds anywhere, and random memories before them."""
    rng = np.random.default_rng(seed)
    rows, batch = agent.burn_in + agent.sequence, agent.batch
    first, terminated, truncated = (np.zeros((rows + 1, batch), bool) for _ in range(3))
    first[0] = rng.random(batch) < 0.5
    for t in range(1, rows + 1):
        first[t] = terminated[t - 1] | truncated[t - 1]
        kind = np.where(first[t], 1.0, rng.random(batch))
        terminated[t], truncated[t] = kind < 0.1, (kind >= 0.1) & (kind < 0.2)
    observation = rng.normal(size=(rows + 1, batch, 4)).astype(np.float32)
    reward = 3 * rng.normal(size=(rows + 1, batch)).astype(np.float32)
    lstm = rng.normal(size=(2, batch, agent.lstm_size)).astype(np.float32)
    action = rng.integers(0, 3, (rows + 1, batch)).astype(np.int32)
    memory = base.Memory(LSTMState(*lstm), action[-1])
    return Trajectory(
        timesteps=Timestep(observation, reward, terminated, truncated, first),
        action=action[:-1],
        extras=(),
        actor_state=ActorState(memory, ()),
        params_version=np.zeros((rows, batch), np.int32),
        importance=rng.uniform(0.3, 1.0, batch).astype(np.float32),
    )


@jax.jit
def flat(tree):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


@functools.cache
def disturbed(agent):
    """A learner whose target network is not the one that learns."""
    state = jax.jit(agent.init)(KEY)
    return state._replace(auxiliary=jax.tree.map(lambda x: x + 0.1, state.auxiliary))


@functools.partial(jax.jit, static_argnums=0)
def gradients(agent, state, trajectory):
    return agent.gradients(state, agent.prepare(state, trajectory, KEY), KEY)


def step_by_step(agent, weights, trajectory):
    """Action values [T + 1, B, A], one row at a time, with what precedes each told explicitly."""
    module, steps, memory = agent._network(), trajectory.timesteps, trajectory.actor_state.core
    lstm, values = memory.lstm, []
    for t in range(len(steps.first)):
        if t == agent.burn_in:
            lstm = jax.lax.stop_gradient(lstm)
        opening = steps.first[t]
        lstm = jax.tree.map(lambda x, o=opening: jnp.where(o[:, None], 0.0, x), lstm)
        previous = memory.action if t == 0 else trajectory.action[t - 1]
        q, lstm = module.apply(
            weights, steps.observation[t][None], jnp.eye(3)[previous][None], steps.reward[t][None],
            opening[None], lstm,
        )  # fmt: skip
        values.append(q[0])
    return jnp.stack(values)


def slow_targets(agent, steps, values):
    """Rescaled n-step returns [T, B] of the learned rows, nan elsewhere; `values` bootstrap."""
    rows, batch = len(steps.first) - 1, agent.batch
    targets = np.full((rows, batch), np.nan)
    plain = np.asarray(returns.unrescale_value(values), np.float64)
    for b in range(batch):
        for start in range(agent.burn_in, rows):
            if steps.first[start + 1, b]:
                continue
            total, weight, t = 0.0, 1.0, start
            while True:
                total += weight * steps.reward[t + 1, b]
                weight *= agent.gamma
                t += 1
                if steps.terminated[t, b]:
                    break
                if steps.truncated[t, b] or t == start + agent.n_step or t == rows:
                    total += weight * plain[t, b]
                    break
            targets[start, b] = np.sign(total) * (np.sqrt(abs(total) + 1) - 1) + 1e-3 * total
    return targets


@pytest.mark.quick("*burn_in*")
@pytest.mark.parametrize(
    "options", [{}, {"burn_in": 0, "n_step": 1, "largest_share": 0.5}], ids=str
)
def test_the_gradient_is_that_of_a_slow_loss(options):
    agent = bound(dataclasses.replace(SMALL, **options))
    state, trajectory = disturbed(agent), items_of(agent)
    grads, output = gradients(agent, state, trajectory)
    unroll = jax.jit(functools.partial(step_by_step, agent))
    online, target = (unroll(w, trajectory) for w in (state.params.weights, state.auxiliary))
    best = np.take_along_axis(np.asarray(target), np.asarray(online).argmax(-1)[..., None], -1)
    targets = slow_targets(agent, trajectory.timesteps, best[..., 0])
    valid = ~np.isnan(targets)
    assert output.weight == valid.sum() and not valid[agent.burn_in :].all()
    goals = np.where(valid, targets, 0)

    @jax.jit
    def loss(weights):
        q = step_by_step(agent, weights, trajectory)[:-1]
        error = goals - jnp.take_along_axis(q, trajectory.action[..., None], -1)[..., 0]
        rows = 0.5 * trajectory.importance[None] * error**2
        return jnp.where(valid, rows, 0.0).sum() / valid.sum(), error

    (expected_loss, error), expected = jax.value_and_grad(loss, has_aux=True)(state.params.weights)
    np.testing.assert_allclose(output.metrics["loss/total"], expected_loss, rtol=1e-4)
    np.testing.assert_allclose(flat(grads.weights), flat(expected), rtol=1e-3, atol=1e-5)
    norm = np.linalg.norm(flat(expected)) * agent.sequence
    np.testing.assert_allclose(output.metrics["gradient_norm"], norm, rtol=1e-4)
    sizes = [np.abs(np.asarray(error)[valid[:, b], b]) for b in range(agent.batch)]
    share = agent.largest_share
    priorities = [share * x.max() + (1 - share) * x.mean() for x in sizes]
    np.testing.assert_allclose(output.priorities, priorities, rtol=1e-3)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), end=st.integers(3, 6), truncated=st.booleans())
def test_nothing_after_an_end_changes_a_gradient_before_it(seed, end, truncated):
    """The rest of the item is either padding or, where items run on, another episode."""
    agent = bound(dataclasses.replace(SMALL, batch=1))
    state, trajectory = disturbed(agent), items_of(agent, seed)
    rows = agent.burn_in + agent.sequence
    flags = np.zeros((3, rows + 1, 1), bool)
    flags[1 if truncated else 0, end], flags[2, end + 1 :] = True, True

    def variant(draw, bootstrap):
        rng = np.random.default_rng((seed, draw))
        observation, reward = (np.array(x) for x in trajectory.timesteps[:2])
        observation[end + 1 :] = rng.normal(size=(rows - end, 1, 4))
        observation[end, 0, 0] += bootstrap
        reward[end + 1 :] = rng.normal(size=(rows - end, 1))
        action = np.array(trajectory.action)
        action[end:] = rng.integers(0, 3, action[end:].shape)
        timesteps = Timestep(observation, reward, *flags)
        changed = trajectory._replace(timesteps=timesteps, action=action)
        grads, output = gradients(agent, state, changed)
        assert output.weight == max(end - agent.burn_in, 0)
        return np.asarray(flat(grads.weights)), np.asarray(output.priorities)

    reference, priority = variant(0, 0.0)
    assert (np.abs(reference).max() > 0) == (end > agent.burn_in)
    again, same = variant(1, 0.0)
    np.testing.assert_array_equal(again, reference)
    np.testing.assert_array_equal(same, priority)
    # The last observation itself counts if, and only if, the episode was cut short.
    if end > agent.burn_in:
        assert (variant(0, 1.0)[0] != reference).any() == truncated


@pytest.mark.slow
def test_padding_before_an_episode_does_not_reach_its_memory():
    agent = bound(SMALL)
    state, trajectory = disturbed(agent), items_of(agent)
    steps = trajectory.timesteps
    first = np.zeros_like(steps.first)
    first[: agent.burn_in] = True  # two rows of padding, then the opening observation

    def gradient(seed):
        rng = np.random.default_rng(seed)
        observation, action = steps.observation.copy(), trajectory.action.copy()
        observation[:2] = rng.normal(size=observation[:2].shape)
        action[:2] = rng.integers(0, 3, action[:2].shape)
        lstm = LSTMState(*rng.normal(size=(2, agent.batch, 8)).astype(np.float32))
        core = base.Memory(lstm, rng.integers(0, 3, agent.batch).astype(np.int32))
        changed = steps._replace(observation=observation, first=first)
        changed = trajectory._replace(timesteps=changed, action=action)
        grads, _ = gradients(agent, state, changed._replace(actor_state=ActorState(core, ())))
        return flat(grads.weights)

    np.testing.assert_array_equal(gradient(0), gradient(1))


def play(agent, params, steps):
    """Acts along given timesteps [T, B]; returns actions, extras [T, B] and the memory before row 0."""
    batch = steps.first.shape[1]
    actor_state = agent.actor_state(jnp.arange(batch), batch)
    act, opening, taken = jax.jit(agent.act, static_argnums=4), actor_state.core, []
    for t in range(len(steps.first)):
        row = jax.tree.map(lambda x, t=t: x[t], steps)
        keys = jax.random.split(jax.random.fold_in(KEY, t), batch)
        action, extras, actor_state = act(params, actor_state, row, keys, False)
        taken.append((action, extras))
    action, extras = jax.tree.map(lambda *x: np.stack(x), *taken)
    return action, extras, opening


@pytest.mark.slow
def test_learning_sees_what_acting_saw():
    """Memory, previous actions and rewards agree, and so do priorities while the target is fresh."""
    agent, burn_in = bound(dataclasses.replace(SMALL, epsilon=1.0, epsilon_power=0.0)), 3
    state, trajectory = jax.jit(agent.init)(KEY), items_of(agent)
    steps = trajectory.timesteps
    action, extras, opening = play(agent, state.params, steps)
    assert len(set(action.ravel())) == 3
    item = trajectory._replace(action=action[:-1], actor_state=ActorState(opening, ()))
    batch = agent.prepare(state, item, KEY)
    q = np.asarray(agent._sequence_values(state.params.weights, (), batch))
    np.testing.assert_allclose(q.max(-1), extras.best[burn_in:], rtol=1e-4, atol=1e-5)
    chosen = np.take_along_axis(q, action[burn_in:, :, None], -1)[..., 0]
    np.testing.assert_allclose(chosen, extras.chosen[burn_in:], rtol=1e-4, atol=1e-5)
    priorities = initial_priorities(agent, steps._replace(observation=()), extras)
    _, output = learn_replayed(agent, state, item)
    np.testing.assert_allclose(priorities, output.priorities, rtol=1e-3)


@pytest.mark.slow
def test_the_first_step_of_an_episode_forgets_everything():
    agent = bound(SMALL)
    state, trajectory = disturbed(agent), items_of(agent)
    act = jax.jit(agent.act, static_argnums=4)
    row = jax.tree.map(lambda x: x[0], trajectory.timesteps)
    keys = jax.random.split(KEY, agent.batch)
    empty = agent.actor_state(jnp.arange(agent.batch), agent.batch)
    full = empty._replace(core=trajectory.actor_state.core)

    def values(actor_state, first, reward):
        step = row._replace(first=np.full(agent.batch, first), reward=np.full(agent.batch, reward))
        return act(state.params, actor_state, step, keys, True)[1].best

    np.testing.assert_array_equal(values(full, True, np.float32(0.7)), values(empty, True, 0.0))
    assert (values(full, False, 0.0) != values(empty, False, 0.0)).all()
    other = full._replace(core=full.core._replace(action=(full.core.action + 1) % 3))
    assert (values(full, False, 0.0) != values(other, False, 0.0)).all()
    assert (values(full, False, 0.0) != values(full, False, 0.5)).all()
    # As in SEED RL, the reward that is fed is not clipped.
    assert (values(full, False, 1.0) != values(full, False, 2.0)).all()


@pytest.mark.slow
def test_an_item_without_transitions_teaches_nothing():
    agent = bound(SMALL)
    state, trajectory = disturbed(agent), items_of(agent)
    steps = trajectory.timesteps._replace(first=np.ones_like(trajectory.timesteps.first))
    grads, output = gradients(agent, state, trajectory._replace(timesteps=steps))
    assert output.weight == 0 and not flat(grads.weights).any()
    np.testing.assert_allclose(output.priorities, 1e-6)


@pytest.mark.parametrize(
    ("field", "value"), [("burn_in", -1), ("sequence", 0), ("lstm_size", 0), ("largest_share", 2.0)]
)
def test_values_that_cannot_work_are_refused_by_name(field, value):
    with pytest.raises(SeedbedError, match=f"R2d2.{field} is .*; give"):
        R2d2(**{field: value})


def opening_values(trainer, observation):
    """Action values [A] of an opening observation."""
    agent, x = trainer.agent, jnp.asarray(observation, jnp.float32)[None, None]
    row, lstm = jnp.zeros((1, 1)), agent._initial_memory(1).lstm
    action, weights = jnp.zeros((1, 1, 2)), trainer.state.params.weights
    return np.asarray(agent._network().apply(weights, x, action, row, row == 0, lstm)[0][0, 0])


@pytest.mark.slow
def test_probe_delayed_reward_is_discounted():
    trainer = ReplayTrainer(PROBE, Delay, steps=400).train()
    values = returns.unrescale_value(opening_values(trainer, [0, 1]))
    np.testing.assert_allclose(values, 0.5, atol=0.1)


@pytest.mark.slow
def test_probe_memory_needs_the_recurrent_agent():
    agent = dataclasses.replace(PROBE, gamma=0.9)
    assert ReplayTrainer(agent, Memory, steps=900).train().mean_reward(25) > 0.9
    forgetful = Dqn(
        batch=32, hidden_sizes=(32,), learning_rate=3e-3, min_size=64, capacity=1_000,
        target_period=20, epsilon_power=1.0, gamma=0.9,
    )  # fmt: skip
    assert ReplayTrainer(forgetful, Memory, steps=300).train().mean_reward(25) < 0.6
