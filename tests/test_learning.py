"""The update loop: minibatches, devices, donation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from counting_agent import CountingAgent
from seedbed.runtime.inference import Unroll
from seedbed.runtime.learning import Learner
from seedbed.types import ActorState, ArraySpec, Discrete, EnvSpec, Timestep

SPEC = EnvSpec(ArraySpec((3,), "float32"), Discrete(7))


def make_unroll(envs, unroll=5, seed=0, version=0):
    rng = np.random.default_rng(seed)
    shape = (unroll + 1, envs)
    flag = np.zeros(shape, bool)
    timesteps = Timestep(
        rng.normal(size=(*shape, 3)).astype(np.float32),
        rng.normal(size=shape).astype(np.float32),
        flag,
        flag,
        rng.random(shape) < 0.3,
    )
    rows = (unroll, envs)
    extras = {name: np.zeros(rows, np.int32) for name in ("count", "env", "draw")}
    state = ActorState(np.zeros(envs, np.int32), np.arange(envs, dtype=np.int32))
    versions = np.full(rows, version, np.int32)
    unroll_ = Unroll(timesteps, np.zeros(rows, np.int32), extras, state, versions)
    return jax.tree.map(jnp.asarray, unroll_)


@dataclasses.dataclass(frozen=True)
class Momentum(CountingAgent):
    """Also moves the optimizer state by the gradient, so that donation matters."""

    def apply(self, state, grads, output):
        after = super().apply(state, grads, output)
        return after._replace(
            optimizer_state={"seen": state.optimizer_state["seen"] * 0.5 + grads["mean"]}
        )


def run(agent, devices, batches=4):
    learner = Learner(agent, 1, jax.devices()[:devices], jax.random.key(1))
    state = learner.place(agent.init(jax.random.key(0)))
    metrics = {}
    for seed in range(batches):
        parts = [make_unroll(4, seed=2 * seed), make_unroll(4, seed=2 * seed + 1)]
        state, metrics, _ = learner.update(state, learner.assemble(parts))
    return jax.device_get(state), jax.device_get(metrics)


@pytest.mark.parametrize("agent", [CountingAgent(batch=8), Momentum(batch=8)])
def test_one_and_several_devices_agree(agent):
    """Valid rows differ from device to device, so a plain mean of means would fail here."""
    one, metrics = run(agent, 1)
    for devices in (2, 8):
        several, metrics_several = run(agent, devices)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), one, several)
        for name in metrics:
            np.testing.assert_allclose(metrics[name], metrics_several[name], rtol=1e-5)


def test_every_epoch_visits_every_environment_once():
    agent = CountingAgent(batch=8, epochs=3, minibatches=4)
    state, metrics = run(agent, 1, batches=2)
    valid = 0
    for seed in range(4):
        valid += int((~np.asarray(make_unroll(4, seed=seed).timesteps.first[1:])).sum())
    assert state.updates == 2 * 3 * 4
    assert state.optimizer_state["seen"] == 3 * valid
    assert np.isfinite(metrics["loss/total"])


def test_published_parameters_survive_the_next_update():
    agent = CountingAgent(batch=8)
    learner = Learner(agent, 1, jax.devices()[:1], jax.random.key(1))
    initial = agent.init(jax.random.key(0))
    state = learner.place(initial)
    published = [np.array(state.params["mean"])]
    kept = [state.params]
    for seed in range(3):
        state, _, _ = learner.update(state, learner.assemble([make_unroll(8, seed=seed)]))
        kept.append(state.params)
        published.append(np.array(state.params["mean"]))
    for params, value in zip(kept, published, strict=True):
        np.testing.assert_array_equal(params["mean"], value)
    assert initial.optimizer_state["seen"] == 0.0, "placing must copy what will be donated"


def test_lag_counts_updates_since_acting():
    agent = CountingAgent(batch=4)
    learner = Learner(agent, 1, jax.devices()[:1], jax.random.key(1))
    state = learner.place(agent.init(jax.random.key(0)))
    for _ in range(3):
        state, metrics, _ = learner.update(state, learner.assemble([make_unroll(4)]))
    assert metrics["lag_mean"] == 2.0
    assert metrics["lag_max"] == 2


def test_statistics_are_those_of_all_devices():
    from seedbed.agents.actor_critic import Behaviour
    from seedbed.agents.impala import Impala

    spec = EnvSpec(ArraySpec((3,), "float32"), Discrete(7))
    agent = Impala(
        spec=spec, unroll=5, batch=8, normalise_observations=True, normalise_returns=True
    )

    def learn(devices):
        learner = Learner(agent, 1, jax.devices()[:devices], jax.random.key(1))
        state, opening = learner.place(agent.init(jax.random.key(0))), []
        for seed in range(3):
            unroll = make_unroll(8, seed=seed)._replace(
                extras=Behaviour(jnp.full((5, 8), -1.9), jnp.zeros((5, 8), jnp.int32)),
                actor_state=ActorState((), ()),
            )
            opening.append(unroll.timesteps.observation[0])
            state, _, _ = learner.update(state, learner.assemble([unroll]))
        return jax.device_get(state), np.concatenate(opening)

    one, opening = learn(1)
    seen = one.params.seen
    np.testing.assert_allclose(seen.weight, 24, rtol=1e-6)
    assert one.auxiliary.returns.variance > 0
    np.testing.assert_allclose(seen.mean, opening.mean(0), atol=1e-5)
    np.testing.assert_allclose(seen.variance, opening.var(0), rtol=1e-4)
    two, _ = learn(2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, two)
