"""IMPALA: loss against a slow reference, masks, command line, and probe environments."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedbed.agents.impala import Impala
from seedbed.testing.probes import Aim, Choice, Match, Memory
from seedbed.testing.trainers import Trainer
from seedbed.types import Box, Discrete, MultiDiscrete, SeedbedError, Timestep, Trajectory
from trajectories import bound, trajectory_of

KEY = jax.random.key(0)
SMALL = Impala(unroll=6, batch=3, hidden_sizes=(16,), lstm_size=8)
PROBE = Impala(
    unroll=8, batch=32, hidden_sizes=(32,), lstm_size=32, optimizer="adam", learning_rate=3e-3
)


def initial(agent):
    return jax.jit(agent.init)(KEY)


def gradient_function(agent):
    def function(state, trajectory):
        return agent.gradients(state, agent.prepare(state, trajectory, KEY), KEY)

    return jax.jit(function)


def slow_targets(value, ratio, steps, agent):
    """Targets and advantages [T, B] by walking each episode backwards; nan on auto-resets."""
    targets, advantages = np.full((2, agent.unroll, agent.batch), np.nan)
    reward = np.clip(steps.reward, -agent.reward_clip, agent.reward_clip)
    for b in range(agent.batch):
        target_t = value[-1, b]
        for t in reversed(range(agent.unroll)):
            if steps.first[t + 1, b]:
                continue
            if steps.terminated[t + 1, b] or steps.truncated[t + 1, b]:
                target_t = value[t + 1, b]
            discount = 0.0 if steps.terminated[t + 1, b] else agent.gamma
            error_t = agent.trace_decay * (target_t - value[t + 1, b])
            delta = reward[t + 1, b] + discount * value[t + 1, b] - value[t, b]
            advantages[t, b] = ratio[t, b] * (delta + discount * error_t)
            # With all bounds 1 and lambda <= 1: c = lambda * rho.
            target_t = targets[t, b] = value[t, b] + ratio[t, b] * (delta + discount * error_t)
    return targets, advantages


def test_the_gradient_is_that_of_a_slow_loss():
    agent = bound(dataclasses.replace(SMALL, trace_decay=0.9, reward_clip=0.8, gamma=0.95))
    state, trajectory = initial(agent), trajectory_of(agent)
    state = state._replace(params=jax.tree.map(lambda x: x + 0.1, state.params))
    grads, output = gradient_function(agent)(state, trajectory)
    steps, valid = trajectory.timesteps, ~trajectory.timesteps.first[1:]

    def outputs(params):
        network = agent._network()
        logits, value, _ = network.apply(
            params.weights, steps.observation, (), steps.reward, steps.first, ()
        )
        log_probs = jax.nn.log_softmax(logits[:-1])
        chosen = jnp.take_along_axis(log_probs, trajectory.action[..., None], -1)[..., 0]
        return value, chosen, -(jnp.exp(log_probs) * log_probs).sum(-1)

    value, chosen, _ = map(np.asarray, jax.jit(outputs)(state.params))
    ratio = np.minimum(np.exp(chosen - trajectory.extras.log_prob), 1)
    targets, advantages = slow_targets(value, ratio, steps, agent)

    def loss(params):
        value, chosen, entropy = (x[: agent.unroll][valid] for x in outputs(params))
        policy = -(chosen * advantages[valid]).sum()
        baseline = 0.5 * ((value - targets[valid]) ** 2).sum()
        return (policy + 0.5 * baseline - 0.01 * entropy.sum()) / valid.sum()

    expected_loss, expected = jax.jit(jax.value_and_grad(loss))(state.params)
    np.testing.assert_allclose(output.metrics["loss/total"], expected_loss, rtol=1e-5)
    assert output.weight == valid.sum() and not valid.all()
    for mine, theirs in zip(
        jax.tree.leaves(grads.weights), jax.tree.leaves(expected.weights), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_rows_weigh_the_same_however_devices_share_them():
    agent = bound(dataclasses.replace(SMALL, batch=4))
    state, trajectory = initial(agent), trajectory_of(agent)
    batch = agent.prepare(state, trajectory, KEY)
    whole, output = gradient_function(agent)(state, trajectory)
    gradients = jax.jit(agent.gradients)
    parts = [
        gradients(state, jax.tree.map(lambda x, i=i: x[:, i : i + 1], batch), KEY) for i in range(4)
    ]
    weight = sum(part.weight for _, part in parts)
    assert weight == output.weight
    pooled = jax.tree.map(
        lambda *g: sum(x * p.weight for x, (_, p) in zip(g, parts, strict=True)) / weight,
        *(g for g, _ in parts),
    )
    for mine, theirs in zip(jax.tree.leaves(pooled), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    for name in ("loss/total", "loss/policy", "loss/value", "entropy", "rho_mean"):
        mean = sum(part.metrics[name] * part.weight for _, part in parts) / weight
        np.testing.assert_allclose(mean, output.metrics[name], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "recurrent"),
    [
        (Discrete(3), True),
        (MultiDiscrete((2, 3)), False),
        (Box((2,), (-1.0, 0.0), (1.0, 4.0)), False),
    ],
    ids=str,
)
def test_acting_is_on_policy_and_depends_on_each_key_alone(action, recurrent):
    agent = bound(dataclasses.replace(SMALL, recurrent=recurrent), action=action)
    state, n = initial(agent), 5
    act = jax.jit(agent.act, static_argnums=4)
    actor_state = agent.actor_state(jnp.arange(n), n)
    zeros, observation = np.zeros(n, np.float32), np.random.default_rng(0).normal(size=(n, 4))
    timestep = Timestep(observation.astype(np.float32), zeros, zeros > 0, zeros > 0, zeros > -1)
    keys = jax.random.split(KEY, n)
    chosen, behaviour, after = act(state.params, actor_state, timestep, keys, False)
    order = np.array([3, 0, 4, 1, 2])
    shuffled, _, _ = act(
        state.params,
        actor_state,
        jax.tree.map(lambda x: x[order], timestep),
        keys[order],
        False,
    )
    np.testing.assert_allclose(shuffled, chosen[order], rtol=1e-5)
    assert jax.tree.structure(after) == jax.tree.structure(actor_state)
    # The learner, with the same parameters, finds the same probabilities.
    batch = Trajectory(
        jax.tree.map(lambda x: np.stack([x, x]), timestep)._replace(first=np.zeros((2, n), bool)),
        chosen[None],
        jax.tree.map(lambda x: x[None], behaviour),
        actor_state,
        np.zeros((1, n), np.int32),
    )
    _, output = gradient_function(agent)(state, batch)
    np.testing.assert_allclose(output.metrics["rho_mean"], 1, rtol=1e-4)
    evaluated = [act(state.params, actor_state, timestep, k, True)[0] for k in (keys, keys[::-1])]
    assert bool((evaluated[0] == evaluated[1]).all()) == isinstance(action, Box)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_the_step_size_falls_with_progress_to_zero(optimizer):
    agent = bound(dataclasses.replace(SMALL, optimizer=optimizer))
    state = initial(agent)
    grads, output = gradient_function(agent)(state, trajectory_of(agent))
    sizes = []
    for progress in (0.0, 0.25, 0.5, 1.0):
        before = state._replace(progress=jnp.float32(progress))
        after = jax.jit(agent.apply)(before, grads, output)
        moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), after.params, before.params)
        sizes.append(float(max(jax.tree.leaves(moved))))
        assert after.updates == 1 and after.progress == progress
    np.testing.assert_allclose(np.array(sizes) / sizes[0], [1, 0.75, 0.5, 0], rtol=1e-2)
    if optimizer == "adam":
        np.testing.assert_allclose(sizes[0], 6e-4, rtol=1e-2)
    constant = dataclasses.replace(agent, learning_rate_decay=False)
    late = state._replace(progress=jnp.float32(0.9))
    after = jax.jit(constant.apply)(late, grads, output)
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), after.params, state.params)
    np.testing.assert_allclose(max(jax.tree.leaves(moved)), sizes[0], rtol=1e-3)


@pytest.mark.quick("10.0")
@pytest.mark.parametrize("scale", [0.0, 1e-3, 10.0])
def test_rmsprop_is_that_of_the_paper(scale):
    """TensorFlow 1's: the average of squares begins at 1, and epsilon is added below the root."""
    agent = bound(dataclasses.replace(SMALL, learning_rate_decay=False))
    state = initial(agent)
    grads, output = gradient_function(agent)(state, trajectory_of(agent))
    grads = grads._replace(weights=jax.tree.map(lambda x: scale * x, grads.weights))
    step = jax.jit(lambda *given: agent.apply(given[0], agent.clip_gradient(given[1]), given[2]))
    after = step(state, grads, output)
    summed = jax.tree.map(lambda x: x * agent.unroll * agent.batch, grads.weights)
    norm = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(summed)))
    for new, old, g in zip(
        *(jax.tree.leaves(x) for x in (after.params.weights, state.params.weights, summed)),
        strict=True,
    ):
        g = g * min(1.0, 40.0 / max(norm, 1e-9))
        expected = 6e-4 * g / np.sqrt(0.99 * 1.0 + 0.01 * g**2 + 0.01)
        np.testing.assert_allclose(old - new, expected, rtol=1e-3, atol=3e-7)


@pytest.mark.slow
def test_the_score_of_a_squashed_action_has_mean_0():
    """Far out, where a tanh rounds to its bound: a policy gradient of equal advantages is then 0."""
    n = 4096
    agent = dataclasses.replace(SMALL, unroll=1, batch=n, gamma=0.0, entropy_cost=0.0)
    agent = bound(agent, Box((1,), (-1.0,), (1.0,)))
    state = jax.tree.map(jnp.zeros_like, initial(agent))
    head = {
        "PolicyHead_0": {"Dense_0": {"kernel": jnp.zeros((16, 2)), "bias": jnp.array([9.0, 0])}}
    }
    weights = {"params": state.params.weights["params"] | head}
    state = state._replace(params=state.params._replace(weights=weights))
    actor_state, zeros = agent.actor_state(jnp.arange(n), n), np.zeros(n, np.float32)
    step = Timestep(np.zeros((n, 4), np.float32), zeros, zeros > 0, zeros > 0, zeros > 0)
    keys = jax.random.split(KEY, n)
    action, extras, _ = jax.jit(agent.act, static_argnums=4)(
        state.params, actor_state, step, keys, False
    )
    timesteps = jax.tree.map(lambda x: np.stack([x, x]), step)
    timesteps = timesteps._replace(reward=timesteps.reward + 1)  # advantages of 1
    extras = jax.tree.map(lambda x: x[None], extras)
    version = np.zeros((1, n), np.int32)
    trajectory = Trajectory(timesteps, action[None], extras, actor_state, version)
    grads, _ = gradient_function(agent)(state, trajectory)
    score = -grads.weights["params"]["PolicyHead_0"]["Dense_0"]["bias"][0]
    assert abs(float(score)) < 4 / 0.7 / np.sqrt(n)


def test_a_gradient_that_is_not_finite_shows_in_the_metrics():
    agent = bound(SMALL)
    trajectory = trajectory_of(agent)
    steps = trajectory.timesteps
    broken = trajectory._replace(timesteps=steps._replace(observation=steps.observation * np.nan))
    _, output = gradient_function(agent)(initial(agent), broken)
    assert not np.isfinite(output.metrics["loss/total"])
    assert not np.isfinite(output.metrics["gradient_norm"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 1.1),
        ("unroll", 0),
        ("learning_rate", 0.0),
        ("reward_clip", -1.0),
        ("hidden_sizes", ()),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(field, value):
    with pytest.raises(SeedbedError, match=f"Impala.{field} is .*; give"):
        Impala(**{field: value})


def value_at(trainer, observation):
    """Value of one opening observation."""
    agent, x = trainer.agent, jnp.asarray(observation, jnp.float32)[None, None]
    network = agent._network()
    return float(
        network.apply(
            trainer.state.params.weights, x, (), jnp.zeros((1, 1)), jnp.ones((1, 1), bool), ()
        )[1][0, 0]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "updates", "threshold"), [(Choice, 300, 0.9), (Match, 300, 0.9), (Aim, 400, 0.75)]
)
def test_probe_action_dependent_reward(probe, updates, threshold):
    trainer = Trainer(PROBE, probe, updates).train()
    assert trainer.mean_reward(20) > threshold


@pytest.mark.slow
def test_probe_published_optimizer_learns_too():
    agent = dataclasses.replace(PROBE, optimizer="rmsprop", learning_rate=2e-3)
    assert Trainer(agent, Match, updates=400).train().mean_reward(20) > 0.9


@pytest.mark.slow
def test_probe_memory_needs_the_recurrent_agent():
    agent = dataclasses.replace(PROBE, unroll=10, recurrent=True, learning_rate=1e-2)
    assert Trainer(agent, Memory, updates=200).train().mean_reward(25) > 0.8
    forgetful = dataclasses.replace(agent, recurrent=False)
    assert Trainer(forgetful, Memory, updates=40).train().mean_reward(25) < 0.6
