"""Networks in bfloat16: products, gradients of whole losses, ratios of probabilities, and learning."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from seedbed import api
from seedbed.agents.dqn import Dqn
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.agents.r2d2 import R2d2
from seedbed.agents.sac import Sac
from seedbed.config import resolve
from seedbed.nets.products import multiply, sum_of_products
from seedbed.nets.recurrent import LSTM, initial_lstm_state
from seedbed.testing.probes import Aim, Memory
from seedbed.testing.trainers import ReplayTrainer, Trainer, to_trajectory
from seedbed.types import SeedbedError, learns_from_replay

KEY = jax.random.key(0)
AGENTS = {
    "impala": Impala(unroll=6, batch=8, hidden_sizes=(32, 32), recurrent=True, lstm_size=16),
    "ppo": Ppo(unroll=6, batch=8, minibatches=1, hidden_sizes=(32, 32), value_sizes=(32,)),
    "dqn": Dqn(batch=32, n_step=3, hidden_sizes=(32, 32), dueling=True, head_size=32),
    "r2d2": R2d2(
        batch=16, burn_in=2, sequence=4, n_step=2, hidden_sizes=(32,), lstm_size=16, head_size=32,
    ),
    "sac": Sac(batch=32, hidden_sizes=(32, 32)),
}  # fmt: skip


def rounded(x):
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32), np.float64)


def test_products_round_what_they_multiply_and_nothing_else():
    rng = np.random.default_rng(0)
    x, kernel, dy = (
        rng.normal(size=shape).astype(np.float32) for shape in ((3, 5, 300), (300, 7), (3, 5, 7))
    )
    y, pull = jax.vjp(functools.partial(multiply, dtype=jnp.bfloat16), x, kernel)
    dx, dkernel = pull(jnp.asarray(dy))
    assert {a.dtype for a in (y, dx, dkernel)} == {jnp.dtype(jnp.float32)}
    x, kernel, dy = map(rounded, (x, kernel, dy))
    np.testing.assert_allclose(y, x @ kernel, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, dy @ kernel.T, rtol=1e-5, atol=1e-5)
    expected = np.einsum("tbk,tbn->kn", x, dy)
    np.testing.assert_allclose(dkernel, expected, rtol=1e-5, atol=1e-5)
    # Sums in bfloat16 would be wrong by far more.
    assert np.abs(rounded(expected) - expected).max() > 1e-2
    np.testing.assert_array_equal(
        sum_of_products(x.astype(np.float32), dy.astype(np.float32), jnp.bfloat16), dkernel
    )


def in_bfloat16(agent):
    return dataclasses.replace(agent, compute_dtype="bfloat16")


@functools.cache
def recorded(name):
    """An agent in bfloat16, a learner that acted in a probe, and the trajectory that it recorded."""
    agent = in_bfloat16(AGENTS[name])
    probe = Aim if name == "sac" else Memory
    if not learns_from_replay(agent):
        trainer = Trainer(agent, probe, updates=0)
        actor_state = trainer.agent.actor_state(jnp.arange(agent.batch), agent.batch)
        trajectory, _, _ = trainer.collect(actor_state, trainer.env.reset(), 0)
        return trainer.agent, trainer.state, trajectory
    # It never learns: `min_size` is out of reach.
    trainer = ReplayTrainer(agent, probe, steps=30).train()
    items = [trainer.items[i] for i in range(agent.batch)]
    return trainer.agent, trainer.state, to_trajectory(items, np.ones(agent.batch))


@functools.partial(jax.jit, static_argnums=0)
def gradient(agent, state, trajectory):
    grads, _ = agent.gradients(state, agent.prepare(state, trajectory, KEY), KEY)
    return grads if isinstance(agent, Sac) else grads.weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "impala",
        "sac",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ppo", "dqn", "r2d2")),
    ],
)
def test_gradients_of_whole_losses_are_those_of_float32(name):
    agent, state, trajectory = recorded(name)
    plain = dataclasses.replace(agent, compute_dtype="float32")
    half, full = (gradient(each, state, trajectory) for each in (agent, plain))
    assert {x.dtype for x in jax.tree.leaves(half)} == {np.dtype(np.float32)}
    half, full = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (half, full)
    )
    assert (half != full).mean() > 0.5, "the option must reach the network"
    norms = np.linalg.norm(half), np.linalg.norm(full)
    assert half @ full / np.prod(norms) >= 0.999
    assert norms[0] / norms[1] == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_learning_has_the_probabilities_of_acting():
    """The ratios of V-trace are 1, to the last bit, where nothing was learned."""
    agent, state, trajectory = recorded("impala")
    previous, core = agent._memory(trajectory.actor_state.core, trajectory.action)
    parameters, _, _ = jax.jit(agent._evaluate)(state.params, trajectory.timesteps, previous, core)
    log_prob = agent._policy(parameters[:-1]).log_prob(trajectory.extras.draw)
    np.testing.assert_array_equal(log_prob, trajectory.extras.log_prob)
    plain = dataclasses.replace(agent, compute_dtype="float32")
    parameters, _, _ = jax.jit(plain._evaluate)(state.params, trajectory.timesteps, previous, core)
    other = plain._policy(parameters[:-1]).log_prob(trajectory.extras.draw)
    assert np.abs(other - log_prob).max() > 1e-6, "another precision has others"


@pytest.mark.slow
def test_products_with_their_own_gradients_on_several_devices():
    rng = np.random.default_rng(0)
    x, first = rng.normal(size=(5, 4, 3)).astype(np.float32), rng.random((5, 4)) < 0.3
    state, weight = initial_lstm_state(4, 4), rng.normal(size=(5, 4, 4)).astype(np.float32)
    mesh, rows = Mesh(np.array(jax.devices()[:2]), ("i",)), P(None, "i")
    specs = (P(), rows, rows, P("i"), rows)
    module = LSTM(4, jnp.bfloat16)
    params = jax.jit(module.init)(KEY, x, first, state)

    def total(params, x, first, state, weight):
        return (weight * module.apply(params, x, first, state)[0]).sum()

    one = jax.grad(total)
    two = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P())
    one, two = (jax.jit(f)(params, x, first, state, weight) for f in (one, two))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, two)


def test_an_agent_must_know_its_dtype():
    agent = dataclasses.replace(AGENTS["sac"], compute_dtype="auto", spec=Aim.spec)
    with pytest.raises(SeedbedError, match="compute_dtype is auto, which only .*; give float32 or"):
        agent.init(KEY)


@pytest.mark.slow
def test_cartpole_is_solved_in_bfloat16(run_folder):
    config = resolve.train_config("cartpole/ppo")
    config = dataclasses.replace(config, agent=in_bfloat16(config.agent))
    summary = api.train(config, run=run_folder)
    assert summary["evaluation/episode_return_mean"] >= 475
