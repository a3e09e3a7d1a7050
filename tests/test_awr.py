"""AWR: its losses against slow ones, bootstrapping, memory, and what it learns from replay."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trajectories
from fused_runs import same
from seedbed.agents.awr import Awr
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.probes import DelayProbe, RepeatProbe, TruncationProbe
from seedbed.fused.program import Program
from seedbed.ops.keys import normal_rows
from seedbed.run.options import FusedConfig
from seedbed.testing.probes import Aim, Match
from seedbed.testing.trainers import ReplayTrainer
from seedbed.types import Box, Discrete, SeedbedError

KEY = jax.random.key(0)
SMALL = Awr(
    unroll=6, batch=8, hidden_sizes=(8,), gamma=0.9, trace_decay=0.8, temperature=0.5, largest_weight=3.0,
    lstm_size=8, entropy_cost=0.1, normalise_observations=False, normalise_returns=False,
)  # fmt: skip
BOX = Box((2,), (-1.0, -2.0), (1.0, 2.0))
actions = pytest.mark.parametrize("action", [Discrete(3), BOX], ids=["discrete", "box"])


@functools.partial(jax.jit, static_argnums=0)
def gradients(agent, state, trajectory):
    return agent.gradients(state, agent.prepare(state, trajectory, KEY), KEY)


def case(action, **changes):
    """An agent, a state whose policy is not uniform, and a replayed trajectory."""
    agent = trajectories.bound(dataclasses.replace(SMALL, **changes), action)
    state, trajectory = jax.jit(agent.init)(KEY), trajectories.trajectory_of(agent)
    moved = jax.tree.map(
        lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), state.params.weights
    )
    trajectory = trajectory._replace(params_version=(), importance=np.ones(agent.batch, np.float32))
    return agent, state._replace(params=state.params._replace(weights=moved)), trajectory


def slow_targets(agent, fixed, steps):
    """The rows (t, b) that are transitions, and the paper's weight and target of each, one by one."""
    rows, targets = [], []
    for b in range(agent.batch):
        for t in range(agent.unroll):
            if steps.first[t + 1, b]:
                continue
            total, weight = fixed[t, b], 1.0
            for k in range(t, agent.unroll):
                discount = agent.gamma * (not steps.terminated[k + 1, b])
                total += weight * (
                    steps.reward[k + 1, b] + discount * fixed[k + 1, b] - fixed[k, b]
                )
                weight *= discount * agent.trace_decay
                if steps.terminated[k + 1, b] or steps.truncated[k + 1, b]:
                    break
            rows.append((t, b))
            targets.append(total)
    advantage = np.array(targets) - np.array([fixed[row] for row in rows])
    normal = (advantage - advantage.mean()) / advantage.std()
    likeness = np.minimum(np.exp(normal / agent.temperature), agent.largest_weight)
    assert (likeness == agent.largest_weight).any()
    return tuple(np.array(rows).T), np.float32(likeness), np.float32(targets)


@pytest.mark.quick("discrete")
@actions
def test_the_gradient_is_that_of_the_paper_s_losses_written_row_by_row(action):
    agent, state, trajectory = case(action)
    grads, output = gradients(agent, state, trajectory)
    draw = trajectory.extras.draw

    def evaluate(weights):
        params = state.params._replace(weights=weights)
        return agent._evaluate(params, trajectory.timesteps, (), ())

    fixed = np.asarray(jax.jit(evaluate)(state.params.weights)[1], np.float64)
    rows, likeness, target = slow_targets(agent, fixed, trajectory.timesteps)

    def loss(weights):
        parameters, values, _ = evaluate(weights)
        policy = agent._policy(parameters[:-1])
        own = draw
        if isinstance(action, Box):
            own = policy.mean + policy.scale * normal_rows(KEY, policy.mean.shape)
        log_prob, entropy = policy.log_prob(draw), agent._entropy(policy, own)
        of_values = agent.value_cost * 0.5 * jnp.square(values[rows] - target)
        return (of_values - likeness * log_prob[rows] - agent.entropy_cost * entropy[rows]).mean()

    with jax.numpy_rank_promotion("allow"):
        slow = jax.jit(jax.grad(loss))(state.params.weights)
    same(grads.weights, slow, rtol=2e-3, atol=2e-5)
    assert output.weight == (~trajectory.timesteps.first[1:]).sum()
    assert output.priorities.shape == (agent.batch,)


def test_the_entropy_is_that_of_the_newest_policy():
    """What was drawn long ago says nothing about it."""
    agent, state, trajectory = case(BOX)
    extras = trajectory.extras._replace(draw=np.asarray(trajectory.extras.draw) + 2.0)
    found = [
        gradients(agent, state, each)[1].metrics["entropy"]
        for each in (trajectory, trajectory._replace(extras=extras))
    ]
    parameters, *_ = jax.jit(agent._evaluate)(state.params, trajectory.timesteps, (), ())
    policy = agent._policy(parameters[:-1])
    noise = jax.random.normal(KEY, (1000, *policy.mean.shape))
    with jax.numpy_rank_promotion("allow"):
        actions = jnp.tanh(policy.mean + policy.scale * noise)
        density = policy.log_prob(policy.mean + policy.scale * noise)
        wanted = (-density + jnp.log1p(-jnp.square(actions)).sum(-1)).mean(0)
    rows = ~np.asarray(trajectory.timesteps.first[1:])
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0], np.asarray(wanted)[rows].mean(), atol=0.2)


def test_what_is_no_transition_changes_nothing():
    agent, state, trajectory = case(Discrete(3))
    steps = trajectory.timesteps
    reset = np.asarray(steps.first[1:])
    assert reset.any()
    reward = np.concatenate([steps.reward[:1], np.where(reset, 1e6, steps.reward[1:])])
    draw = np.where(reset, 0, trajectory.extras.draw)
    other = trajectory._replace(
        timesteps=steps._replace(reward=reward), extras=trajectory.extras._replace(draw=draw)
    )
    same(*(gradients(agent, state, each)[0].weights for each in (trajectory, other)))


def test_a_memory_begins_where_acting_had_it():
    agent, state, trajectory = case(Discrete(3), recurrent=True)
    core = trajectory.actor_state.core
    begun = core._replace(lstm=jax.tree.map(lambda x: x + 1.0, core.lstm))
    other = trajectory._replace(actor_state=trajectory.actor_state._replace(core=begun))
    losses = [
        gradients(agent, state, each)[1].metrics["loss/value"] for each in (trajectory, other)
    ]
    assert abs(losses[0] - losses[1]) > 1e-4


def learned(env, agent, steps, **options):
    """Trains in the fused runtime; returns the mean return of an evaluation."""
    program = Program(env, agent, FusedConfig(steps=steps, envs=16, unroll=16, **options))
    carry, done = program.place(program.first()), 0
    program.compile(carry)
    while done < steps:
        carry, report = program.run(carry, [done])
        done += int(report.transitions)
    return program.evaluate(carry, 0)[0]["episode_return_mean"]


PROBING = Awr(
    unroll=8, batch=32, min_size=50, capacity=2000, gamma=0.9, hidden_sizes=(32,), value_sizes=(32,),
    activation="tanh", learning_rate=3e-3,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probe", "best"), [(DelayProbe(), 7.0), (TruncationProbe(), -0.8)], ids=["delay", "truncation"]
)
def test_it_learns_the_probes(probe, best):
    assert abs(learned(probe, PROBING, 60_000) - best) < 0.1 * abs(best)


@pytest.mark.slow
def test_it_remembers():
    agent = dataclasses.replace(PROBING, recurrent=True, lstm_size=32, unroll=16)
    probe = RepeatProbe(delay=2, choices=2, length=12)
    # Without a memory, 5 of the 10 are right.
    assert learned(probe, agent, 150_000) > 8.5


@pytest.mark.slow
@pytest.mark.parametrize(("probe", "least"), [(Match, 0.9), (Aim, 0.8)])
def test_it_learns_in_a_plain_loop_too(probe, least):
    assert ReplayTrainer(PROBING, probe, 300).train().mean_reward(50) > least


@pytest.mark.slow
def test_it_balances_a_pole():
    agent = Awr(activation="tanh", learning_rate=1e-3)
    assert learned(CartPole(), agent, 300_000) > 475


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "Awr.temperature is 0.0; give more than 0"),
        ({"largest_weight": -1.0}, "Awr.largest_weight is -1.0; give more than 0"),
        ({"min_size": 20_000}, "Awr.min_size is 20000; give at most capacity, 10000"),
        ({"ratio": 0.0}, "Awr.ratio is 0.0; give more than 0"),
        ({"unroll": 0}, "Awr.unroll is 0; give at least 1"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(SeedbedError, match=words):
        Awr(**options)
