"""V-MPO: its losses against slow ones, the better half of a batch on all devices, and what it learns."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trajectories
from fused_runs import same
from seedbed.agents.acting import Behaviour
from seedbed.agents.vmpo import Vmpo
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.fused.program import Program
from seedbed.ops import returns
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig
from seedbed.testing.probes import Aim, Match
from seedbed.testing.trainers import Trainer
from seedbed.types import Box, Discrete, SeedbedError, trajectory_masks

KEY = jax.random.key(0)
SMALL = Vmpo(
    unroll=6, batch=8, epochs=1, hidden_sizes=(8,), gamma=0.9, trace_decay=0.8, temperature_bound=0.2,
    kl_bound=0.02, scale_kl_bound=0.02, initial_temperature=0.7, initial_penalty=2.0,
)  # fmt: skip
BOX = Box((2,), (-1.0, -2.0), (1.0, 2.0))
actions = pytest.mark.parametrize("action", [Discrete(3), BOX], ids=["discrete", "box"])


def case(action):
    """An agent, a state whose policy is not the one that acted, and a trajectory."""
    agent = trajectories.bound(SMALL, action)
    state, trajectory = jax.jit(agent.init)(KEY), trajectories.trajectory_of(agent)
    moved = jax.tree.map(
        lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), state.params.weights
    )
    rng = np.random.default_rng(1)
    size = 3 if isinstance(action, Discrete) else 4
    parameters = 0.3 * rng.normal(size=(agent.unroll, agent.batch, size)).astype(np.float32)
    draw = trajectory.extras.draw
    log_prob = agent._policy(parameters).log_prob(draw)
    trajectory = trajectory._replace(extras=Behaviour(log_prob, draw, parameters))
    return agent, state._replace(params=state.params._replace(weights=moved)), trajectory


@functools.partial(jax.jit, static_argnums=0)
def gradients(agent, state, trajectory):
    return agent.gradients(state, agent.prepare(state, trajectory, KEY), KEY)


def slow_loss(learnt, agent, state, trajectory):
    """The paper's losses row by row; also the means that the multipliers see."""
    weights, duals = learnt
    steps, acted = trajectory.timesteps, trajectory.extras
    with_grad = state.params._replace(weights=weights)
    parameters, values, _ = agent._evaluate(with_grad, steps, (), ())
    _, fixed, _ = agent._evaluate(state.params, steps, (), ())
    old_parameters, _, _ = agent._evaluate(state.params, steps, (), ())
    masks = trajectory_masks(steps, agent.gamma, agent.trace_decay)
    new, old = agent._policy(parameters[:-1]), agent._policy(acted.parameters)
    current = agent._policy(old_parameters[:-1]).log_prob(acted.draw)
    rho = jnp.where(masks.valid, jnp.exp(current - acted.log_prob), 0)
    temperature, penalties = jnp.exp(duals.log_temperature), jnp.exp(duals.log_penalty)
    advantage, target, rows = [], [], []
    for b in range(agent.batch):
        found = returns.vtrace(fixed[:-1, b], fixed[1:, b], steps.reward[1:, b],
                               masks.discount[:, b], masks.trace[:, b], rho[:, b])  # fmt: skip
        for t in range(agent.unroll):
            if masks.valid[t, b]:
                rows.append((t, b))
                advantage.append(float(found.pg_advantage[t]))
                target.append(float(found.targets[t]))
    better = np.array(advantage) >= np.median(advantage)
    exponent = [a / temperature for a, use in zip(advantage, better, strict=True) if use]
    weight = jax.lax.stop_gradient(jax.nn.softmax(jnp.stack(exponent)))
    log_probs = new.log_prob(acted.draw)
    chosen = [log_probs[row] for row, use in zip(rows, better, strict=True) if use]
    loss = -(weight * jnp.stack(chosen)).sum()
    mean_exp = jax.nn.logsumexp(jnp.stack(exponent)) - np.log(better.sum())
    loss += temperature * agent.temperature_bound + temperature * mean_exp

    def divergences(t, b):
        if isinstance(agent.spec.action, Discrete):
            p, q = (jax.nn.log_softmax(x[t, b]) for x in (acted.parameters, parameters))
            return [(jnp.exp(p) * (p - q)).sum()]
        m, s, n, r = old.mean[t, b], old.scale[t, b], new.mean[t, b], new.scale[t, b]
        means = (jnp.square(m - n) / (2 * s**2)).sum()
        return [means, (jnp.log(r / s) + s**2 / (2 * r**2) - 0.5).sum()]

    kl = jnp.stack([jnp.stack(divergences(*row)) for row in rows]).mean(0)
    bounds = jnp.array([agent.kl_bound, agent.scale_kl_bound][: len(kl)])
    held = jax.lax.stop_gradient
    loss += (penalties * (bounds - held(kl)) + held(penalties) * kl).sum()
    errors = [0.5 * jnp.square(values[row] - v) for row, v in zip(rows, target, strict=True)]
    return loss + agent.value_cost * jnp.stack(errors).mean()


@pytest.mark.slow
@actions
def test_the_gradient_is_that_of_the_paper_s_losses_written_row_by_row(action):
    agent, state, trajectory = case(action)
    grads, output = gradients(agent, state, trajectory)
    learnt = state.params.weights, state.auxiliary.duals
    with jax.numpy_rank_promotion("allow"):
        slow = jax.grad(slow_loss)(learnt, agent, state, trajectory)
    same((grads.weights, grads.duals), slow, rtol=2e-3, atol=2e-5)
    assert output.weight == (~trajectory.timesteps.first[1:]).sum()


@actions
def test_multipliers_rise_where_a_divergence_is_above_its_bound_and_fall_below(action):
    agent, state, trajectory = case(action)
    grads, output = gradients(agent, state, trajectory)
    after = jax.jit(agent.apply)(state, grads, output)
    assert output.metrics["kl"] > agent.kl_bound
    assert (after.auxiliary.duals.log_penalty > state.auxiliary.duals.log_penalty).all()
    # The policy that acts is the one that learns: it has not diverged.
    same_policy = trajectory.extras._replace(
        parameters=agent._evaluate(state.params, trajectory.timesteps, (), ())[0][:-1]
    )
    grads, output = gradients(agent, state, trajectory._replace(extras=same_policy))
    after = jax.jit(agent.apply)(state, grads, output)
    assert output.metrics["kl"] < 1e-6
    assert (after.auxiliary.duals.log_penalty < state.auxiliary.duals.log_penalty).all()


@actions
def test_the_first_gradient_of_two_passes_is_that_of_one(action):
    """With one pass the loss estimates what the batch is worth, with two it is estimated before."""
    agent, state, trajectory = case(action)
    once = gradients(agent, state, trajectory)
    same(
        gradients(dataclasses.replace(agent, epochs=2), state, trajectory),
        once,
        rtol=1e-4,
        atol=1e-6,
    )


def prepared(agent, state, trajectory):
    """The batch with its estimates, and the agent that learns from it twice."""
    agent = dataclasses.replace(agent, epochs=2)
    return agent, jax.jit(agent.prepare)(state, trajectory, KEY)


def test_only_the_better_half_is_imitated():
    _, batch = prepared(*case(Discrete(3)))
    valid = np.asarray(batch.estimates.valid)
    advantage = np.asarray(batch.estimates.advantage)[valid]
    better = np.asarray(batch.estimates.better)
    assert better[valid].sum() == (valid.sum() + 1) // 2 and not better[~valid].any()
    assert advantage[better[valid]].min() >= advantage[~better[valid]].max()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_the_better_half_is_that_of_all_devices(devices):
    agent = dataclasses.replace(
        SMALL, batch=16, normalise_observations=True, normalise_returns=True
    )

    def run(**options):
        program = Program(CartPole(), agent, FusedConfig(steps=100_000, **options))
        carry = program.place(program.first())
        program.compile(carry)
        for _ in range(3):
            carry, report = program.run(carry, [0])
        return jax.device_get(carry.learner), report

    (one, alone), (several, together) = run(), run(devices=tuple(range(devices)))
    same(several, one, rtol=1e-3, atol=1e-4)
    for name in ("kl", "temperature", "loss/policy"):
        np.testing.assert_allclose(
            together.metrics[name], alone.metrics[name], rtol=1e-3, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(("probe", "recurrent"), [(Match, False), (Match, True), (Aim, False)])
def test_it_learns_probes(probe, recurrent):
    agent = Vmpo(
        unroll=8, batch=32, epochs=1, hidden_sizes=(32,), learning_rate=1e-2,
        kl_bound=0.1, scale_kl_bound=0.05, lstm_size=16, recurrent=recurrent,
    )  # fmt: skip
    assert Trainer(agent, probe, updates=300).train().mean_reward(20) > 0.8


def test_a_minibatch_far_below_the_best_of_the_batch_learns_too():
    agent, state, trajectory = case(Discrete(3))
    agent, batch = prepared(agent, state, trajectory)
    loss = jax.jit(lambda batch: agent.gradients(state, batch, KEY)[1].metrics["loss/policy"])
    # The size of advantages is no matter, only how far apart they are.
    lower = batch.estimates._replace(advantage=batch.estimates.advantage - 1e3)
    far = batch._replace(estimates=lower)
    np.testing.assert_allclose(loss(far), loss(batch), rtol=1e-3)
    assert loss(batch) > 0


def test_several_updates_of_a_batch_are_refused_with_parameter_servers():
    with pytest.raises(SeedbedError, match="Vmpo makes 2 x 1 updates of a batch"):
        ParamServerConfig().fitted(Vmpo())
    ParamServerConfig().fitted(Vmpo(epochs=1))
    with pytest.raises(
        SeedbedError, match="Vmpo makes 1 update of a batch, and in the fused runti"
    ):
        FusedConfig().fitted(Vmpo(epochs=1))
    FusedConfig().fitted(Vmpo())


def test_acting_waits_for_several_updates_of_a_batch():
    """So all of a batch is of one policy; with one update, actors may be on other machines."""
    assert Vmpo(epochs=1, minibatches=2).experience.synchronous
    assert not Vmpo(epochs=1).experience.synchronous
    listening = CentralConfig(listen="127.0.0.1:0")
    listening.fitted(Vmpo(epochs=1))
    with pytest.raises(SeedbedError, match="takes this one with --agent.epochs 1 --agent.mini"):
        listening.fitted(Vmpo())


def test_what_cannot_be_is_refused():
    for options in ({"temperature_bound": 0.0}, {"kl_bound": -1.0}, {"epochs": 0}):
        ((name, value),) = options.items()
        with pytest.raises(SeedbedError, match=f"Vmpo.{name} is {value}"):
            Vmpo(**options)
    with pytest.raises(
        SeedbedError, match="minibatches is 3; give a number that divides batch, 32"
    ):
        Vmpo(minibatches=3)
