"""DQN: loss against a slow reference, masks, exploration, targets, priorities, and probes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedbed.agents.dqn import Dqn
from seedbed.agents.q_learning import ActingValues
from seedbed.testing.probes import Choice, Delay, Endless, Match
from seedbed.testing.trainers import ReplayTrainer, initial_priorities, learn_replayed
from seedbed.types import (
    ActorState,
    ArraySpec,
    Box,
    Discrete,
    EnvSpec,
    SeedbedError,
    Timestep,
    Trajectory,
    bind,
)

KEY = jax.random.key(0)
SMALL = Dqn(
    n_step=3, batch=8, hidden_sizes=(16,), head_size=8, reward_clip=0.8, gamma=0.9, error_clip=0.7
)
PROBE = Dqn(
    batch=32,
    hidden_sizes=(32,),
    learning_rate=3e-3,
    min_size=64,
    capacity=2_000,
    target_period=20,
    epsilon_power=1.0,
    gamma=0.5,
)


def bound(agent, action=None, observation=None):
    spec = EnvSpec(observation or ArraySpec((4,), "float32"), action or Discrete(3))
    return bind(agent, spec)


def items_of(agent, seed=0):
    """Random items: whole ones, ones cut by an end of either kind and padded, and no transition."""
    rng = np.random.default_rng(seed)
    rows, batch = agent.n_step, agent.batch
    terminated, truncated, first = (np.zeros((rows + 1, batch), bool) for _ in range(3))
    for b in range(batch):
        end = rng.integers(1, rows + 3)
        if end <= rows:
            (terminated if rng.random() < 0.5 else truncated)[end, b] = True
            first[end + 1 :, b] = True
    first[1:, -1], terminated[:, -1], truncated[:, -1] = True, False, False
    observation = rng.normal(size=(rows + 1, batch, 4)).astype(np.float32)
    reward = rng.normal(size=(rows + 1, batch)).astype(np.float32)
    timesteps = Timestep(observation, reward, terminated, truncated, first)
    action = rng.integers(0, 3, (rows, batch)).astype(np.int32)
    values = rng.normal(size=(2, rows, batch)).astype(np.float32)
    return Trajectory(
        timesteps=timesteps,
        action=action,
        extras=ActingValues(values[0], values.max(0)),
        actor_state=ActorState((), ()),
        params_version=np.zeros((rows, batch), np.int32),
        importance=rng.uniform(0.3, 1.0, batch).astype(np.float32),
    )


def disturbed(agent, seed=0):
    """A learner whose target network is not the one that learns."""
    state = jax.jit(agent.init)(jax.random.key(seed))
    return state._replace(auxiliary=jax.tree.map(lambda x: x + 0.1, state.auxiliary))


@jax.jit
def flat(tree):
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


def gradient_function(agent):
    def function(state, trajectory):
        return agent.gradients(state, agent.prepare(state, trajectory, KEY), KEY)

    return jax.jit(function)


def slow_target(agent, steps, values, b):
    """The return of an item's opening step, reward by reward; `values` [T + 1, B] bootstrap it."""
    total, weight, t = 0.0, 1.0, 0
    while True:
        total += weight * np.clip(steps.reward[t + 1, b], -agent.reward_clip, agent.reward_clip)
        weight *= agent.gamma
        t += 1
        if steps.terminated[t, b]:
            return total
        if steps.truncated[t, b] or t == agent.n_step:
            return total + weight * values[t, b]


@pytest.mark.quick("{}", "*dueling*")
@pytest.mark.parametrize(
    "options",
    [{}, {"double": False}, {"dueling": True, "error_clip": 0.0}, {"n_step": 1}],
    ids=str,
)
def test_the_gradient_is_that_of_a_slow_loss(options):
    agent = bound(dataclasses.replace(SMALL, **options))
    state, trajectory = disturbed(agent), items_of(agent)
    grads, output = gradient_function(agent)(state, trajectory)
    steps, batch = trajectory.timesteps, agent.batch
    valid = [b for b in range(batch) if not steps.first[1, b]]
    assert output.weight == len(valid) == batch - 1

    network = agent._network()
    values = jax.jit(jax.vmap(network.apply, (None, 0)))
    online, target = (
        np.asarray(values(w, steps.observation)) for w in (state.params.weights, state.auxiliary)
    )
    selector = (online if agent.double else target).argmax(-1)
    best = np.take_along_axis(target, selector[..., None], -1)[..., 0]
    targets = np.array([slow_target(agent, steps, best, b) for b in valid])

    def loss(weights):
        total = 0.0
        for b, goal in zip(valid, targets, strict=True):
            q = network.apply(weights, steps.observation[0, b : b + 1])[0]
            size = jnp.abs(q[trajectory.action[0, b]] - goal)
            bound = agent.error_clip or np.inf
            linear = bound * (size - 0.5 * bound) if agent.error_clip else 0.0
            part = jnp.where(size <= bound, 0.5 * size**2, linear)
            total += trajectory.importance[b] * part / len(valid)
        return total

    expected_loss, expected = jax.jit(jax.value_and_grad(loss))(state.params.weights)
    np.testing.assert_allclose(output.metrics["loss/total"], expected_loss, rtol=1e-5)
    np.testing.assert_allclose(flat(grads.weights), flat(expected), rtol=1e-4, atol=1e-6)
    errors = np.zeros(batch)
    chosen = online[0, np.arange(batch), trajectory.action[0]]
    errors[valid] = np.abs(targets - chosen[valid])
    np.testing.assert_allclose(output.priorities, errors + 1e-6, rtol=1e-4, atol=1e-6)
    assert (output.priorities > 0).all()


def test_nothing_after_an_end_counts():
    agent = bound(dataclasses.replace(SMALL, batch=3, error_clip=0.0))
    state, gradients = disturbed(agent), gradient_function(agent)
    trajectory = items_of(agent)
    flags = np.zeros((3, agent.n_step + 1, 3), bool)
    flags[0, 1, 0] = flags[1, 1, 1] = True  # terminated, truncated
    flags[2, 2:, :2] = flags[2, 1:, 2] = True  # first: padding, and no transition at all
    steps = trajectory.timesteps._replace(
        terminated=flags[0], truncated=flags[1], first=flags[2], reward=np.ones((4, 3), np.float32)
    )

    def gradient(change):
        observation, reward = steps.observation.copy(), steps.reward.copy()
        change(observation, reward)
        changed = steps._replace(observation=observation, reward=reward)
        grads, output = gradients(state, trajectory._replace(timesteps=changed))
        assert output.weight == 2
        return np.asarray(flat(grads.weights))

    reference = gradient(lambda observation, reward: None)
    assert np.abs(reference).max() > 0

    def after_the_end(observation, reward):
        observation[2:], observation[:, 2], reward[2:], reward[:, 2] = 9, -9, 9, -9
        observation[1, 0] = 9  # what a terminated episode showed last

    np.testing.assert_array_equal(gradient(after_the_end), reference)

    def at_the_truncation(observation, reward):
        observation[1, 1] += 1

    assert (gradient(at_the_truncation) != reference).any()


@pytest.mark.slow
def test_items_weigh_the_same_however_devices_share_them():
    agent = bound(SMALL)
    state, trajectory = disturbed(agent), items_of(agent)
    batch = agent.prepare(state, trajectory, KEY)
    whole, output = gradient_function(agent)(state, trajectory)
    gradients = jax.jit(agent.gradients)
    parts = [
        gradients(state, jax.tree.map(lambda x, i=i: x[:, i : i + 4], batch), KEY) for i in (0, 4)
    ]
    weight = sum(part.weight for _, part in parts)
    pooled = sum(flat(g.weights) * part.weight for g, part in parts) / weight
    np.testing.assert_allclose(pooled, flat(whole.weights), rtol=1e-4, atol=1e-6)
    priorities = np.concatenate([part.priorities for _, part in parts])
    np.testing.assert_allclose(priorities, output.priorities, rtol=1e-5)


def act_often(agent, epsilon, evaluate, times=4_000):
    """Actions of one state, drawn `times` times at one exploration rate; and the best action."""
    state = jax.jit(agent.init)(KEY)
    observation = np.broadcast_to(np.float32([1, -1, 0.5, 2]), (times, 4))
    zeros = np.zeros(times, np.float32)
    timestep = Timestep(observation, zeros, zeros > 0, zeros > 0, zeros > 0)
    actor_state = ActorState((), jnp.full(times, epsilon))
    keys = jax.random.split(jax.random.key(3), times)
    act = jax.jit(agent.act, static_argnums=4)
    action, extras, after = act(state.params, actor_state, timestep, keys, evaluate)
    q = np.asarray(agent._values(state.params.weights, (), observation[:1]))[0]
    np.testing.assert_allclose(extras.best, q.max(), rtol=1e-5)
    np.testing.assert_allclose(extras.chosen, q[np.asarray(action)], rtol=1e-5)
    assert action.dtype == jnp.int32 and (after.per_env == actor_state.per_env).all()
    return np.asarray(action), int(q.argmax())


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_actions_are_random_as_often_as_epsilon_says(epsilon):
    action, best = act_often(bound(SMALL), epsilon, evaluate=False)
    counts = np.bincount(action, minlength=3)
    share = np.full(3, epsilon / 3)
    share[best] += 1 - epsilon
    # Four deviations of a binomial.
    allowed = 4 * np.sqrt(len(action) * share * (1 - share))
    assert (np.abs(counts - len(action) * share) <= allowed).all()


def test_evaluations_have_an_epsilon_of_their_own():
    agent = bound(SMALL)
    greedy, best = act_often(dataclasses.replace(agent, evaluation_epsilon=0.0), 1.0, True)
    assert (greedy == best).all()
    usual, best = act_often(agent, 1.0, True)
    assert 0 < (usual != best).sum() < 12  # 1e-3 of 4,000, two thirds of which differ


def test_environments_explore_on_a_ladder():
    agent = bound(SMALL)
    ladder = agent.actor_state(jnp.arange(256), 256).per_env
    np.testing.assert_allclose([ladder[0], ladder[-1]], [0.4, 0.4**8], rtol=0.02)
    ratio = np.asarray(ladder[1:] / ladder[:-1])
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)
    some = agent.actor_state(jnp.array([7, 200], jnp.uint32), 256).per_env
    np.testing.assert_allclose(some, ladder[jnp.array([7, 200])])
    few = [agent.actor_state(jnp.arange(n), n).per_env for n in (1, 2)]
    # Neither one that acts almost at random for ever nor one that never explores.
    np.testing.assert_allclose(few[0], [0.4**4.5], rtol=1e-5)
    np.testing.assert_allclose(few[1], [0.4**2.75, 0.4**6.25], rtol=1e-5)


def test_the_target_is_copied_when_it_is_due():
    agent = bound(dataclasses.replace(SMALL, target_period=3))
    state, trajectory = jax.jit(agent.init)(KEY), items_of(agent)
    kept = flat(state.auxiliary)
    np.testing.assert_array_equal(kept, flat(state.params.weights))
    for update in range(1, 7):
        state, _ = learn_replayed(agent, state, trajectory)
        if update % 3 == 0:
            kept = flat(state.params.weights)
        assert state.updates == update
        np.testing.assert_array_equal(flat(state.auxiliary), kept)
        assert update % 3 == 0 or (flat(state.params.weights) != kept).any()


@pytest.mark.slow
def test_what_is_donated_shares_nothing_with_the_parameters():
    agent = bound(dataclasses.replace(SMALL, target_period=1))
    state = agent.init(KEY)
    for _ in range(2):
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
        assert len(set(pointers)) == len(pointers)
        state, _ = learn_replayed(agent, state, items_of(agent))


@pytest.mark.parametrize("n_step", [1, 3])
def test_initial_priorities_are_those_of_learning(n_step):
    """While the target network equals the one that acts, both know the same."""
    agent = bound(dataclasses.replace(SMALL, n_step=n_step))
    state, trajectory = jax.jit(agent.init)(KEY), items_of(agent)
    steps = trajectory.timesteps
    values = jax.jit(jax.vmap(agent._network().apply, (None, 0)))
    q = values(state.params.weights, steps.observation)
    action = np.concatenate([trajectory.action, trajectory.action[:1]])
    chosen = np.take_along_axis(np.asarray(q), action[..., None], -1)[..., 0]
    priorities = initial_priorities(
        agent, steps._replace(observation=()), ActingValues(chosen, q.max(-1))
    )
    _, output = learn_replayed(agent, state, trajectory)
    valid = ~steps.first[1]
    np.testing.assert_allclose(priorities[valid], output.priorities[valid], rtol=1e-4)
    assert (priorities > 0).all()


@pytest.mark.slow
def test_normalised_observations_are_those_of_the_items():
    agent = bound(dataclasses.replace(SMALL, normalise_observations=True))
    state, trajectory = jax.jit(agent.init)(KEY), items_of(agent)
    state, _ = learn_replayed(agent, state, trajectory)
    opening = trajectory.timesteps.observation[0][~trajectory.timesteps.first[1]]
    np.testing.assert_allclose(state.params.seen.mean, opening.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state.params.seen.variance, opening.var(0), rtol=1e-4)
    scaled = (opening - opening.mean(0)) / opening.std(0)
    expected = agent._values(state.params.weights, (), scaled)
    actual = agent._values(state.params.weights, state.params.seen, opening)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 1.5),
        ("n_step", 0),
        ("min_size", 2_000_000),
        ("error_clip", -1.0),
        ("ratio", 0),
        ("epsilon_final", 0.01),
        ("importance_exponent", 0.5),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(field, value):
    with pytest.raises(SeedbedError, match=f"Dqn.{field} is .*give"):
        Dqn(**{field: value})


def test_environments_that_do_not_fit_are_refused():
    with pytest.raises(SeedbedError, match="Dqn learns values of one choice .* Box.*; choose ppo"):
        bound(Dqn(), action=Box((1,), (-1.0,), (1.0,)))
    with pytest.raises(SeedbedError, match=r"Dqn.torso is small .* choose auto or mlp"):
        bound(Dqn(torso="small"))


def values_at(trainer, observation):
    """Action values [A] of one observation."""
    x = jnp.asarray(observation, jnp.float32)[None]
    return np.asarray(trainer.agent._values(trainer.state.params.weights, (), x))[0]


@pytest.mark.slow
@pytest.mark.parametrize("probe", [Choice, Match])
def test_probe_action_dependent_reward(probe):
    assert ReplayTrainer(PROBE, probe, steps=400).train().mean_reward(20) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"n_step": 3, "dueling": True}], ids=str)
def test_probe_delayed_reward_is_discounted(options):
    trainer = ReplayTrainer(dataclasses.replace(PROBE, **options), Delay, steps=500).train()
    np.testing.assert_allclose(values_at(trainer, [0, 1]), 0.5, atol=0.07)
    np.testing.assert_allclose(values_at(trainer, [1, 1]), 1.0, atol=0.07)


@pytest.mark.slow
@pytest.mark.parametrize("n_step", [1, 3])
def test_probe_truncation_bootstraps(n_step):
    agent = dataclasses.replace(PROBE, n_step=n_step)
    trainer = ReplayTrainer(agent, Endless, steps=500).train()
    np.testing.assert_allclose(values_at(trainer, [1, 1]), 2.0, atol=0.1)


@pytest.mark.slow
def test_probe_with_all_of_ape_x():
    agent = dataclasses.replace(
        PROBE, n_step=3, dueling=True, priority_exponent=0.6, importance_exponent=0.4
    )
    assert ReplayTrainer(agent, Match, steps=400).train().mean_reward(20) > 0.95
