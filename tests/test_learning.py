"""The update loop: minibatches, devices, donation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from counting_agent import CountingAgent
from recorded import SPEC, record
from seedbed.agents.dqn import Dqn
from seedbed.agents.impala import Impala
from seedbed.agents.ppo import Ppo
from seedbed.agents.r2d2 import R2d2
from seedbed.agents.sac import Sac
from seedbed.central.gate import Gate
from seedbed.central.learning import Learner, mean_metrics
from seedbed.central.updater import LocalUpdater
from seedbed.run.stacking import FrameTrajectory
from seedbed.run.update import learn
from seedbed.types import (
    ActorState,
    Box,
    Discrete,
    EnvSpec,
    Timestep,
    Trajectory,
    bind,
    learns_from_replay,
)


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
    unroll_ = FrameTrajectory(timesteps, np.zeros(rows, np.int32), extras, state, versions)
    return jax.tree.map(jnp.asarray, unroll_)


@dataclasses.dataclass(frozen=True)
class Momentum(CountingAgent):
    """Also moves the optimizer state by the gradient, so that donation matters."""

    def apply(self, state, grads, output):
        after = super().apply(state, grads, output)
        return after._replace(
            optimizer_state={"seen": state.optimizer_state["seen"] * 0.5 + grads["mean"]}
        )


def make_learner(agent, devices=1, state=None, key=1, gate=None):
    """Makes a learner with parameters of its own."""
    chosen = jax.devices()[:devices]
    state = agent.init(jax.random.key(0)) if state is None else state
    updater = LocalUpdater(agent, state, chosen)
    return Learner(agent, 1, chosen, jax.random.key(key), updater, gate)


def run(agent, devices, batches=4, gate=None):
    learner = make_learner(agent, devices, gate=gate)
    metrics = []
    for seed in range(batches):
        parts = [make_unroll(4, seed=2 * seed), make_unroll(4, seed=2 * seed + 1)]
        metrics, _, transitions = learner.update(learner.assemble(parts), np.float32(0.5))
        first = np.concatenate([part.timesteps.first[1:] for part in parts])
        assert transitions == (~first).sum()
        assert learner.updater.state.progress == 0.5
    state, found = jax.device_get((learner.updater.state, metrics))
    return state, mean_metrics(found)


@pytest.mark.quick("agent1")
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


class Strict(Gate):
    """A gate that sees whether the program before has ended."""

    def __init__(self):
        super().__init__(())
        self.names, self._before = [], ()

    def run(self, name, program, *operands):
        # Keys come with the rest of their program, and cannot be asked.
        leaves = jax.tree.leaves(self._before)
        assert all(x.is_ready() for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key))
        self.names.append(name)
        self._before = super().run(name, program, *operands)
        if name == "minibatch":
            # The count of updates is given to the next one.
            self._before = self._before[0]
        return self._before if name != "minibatch" else (self._before, ())


@pytest.mark.parametrize("devices", [1, 2])
def test_a_gate_changes_no_bit_and_starts_one_program_at_a_time(devices):
    agent, gate = Momentum(batch=8, epochs=2, minibatches=2), Strict()
    gated, plain = run(agent, devices, gate=gate), run(agent, devices)
    jax.tree.map(np.testing.assert_array_equal, gated, plain)
    epoch = ["shuffle", "minibatch", "minibatch"]
    assert gate.names == 4 * ["prepare", *epoch, *epoch]


def test_published_parameters_survive_the_next_update():
    agent = CountingAgent(batch=8)
    initial = agent.init(jax.random.key(0))
    learner = make_learner(agent, state=initial)
    kept = [learner.updater.pull().params]
    published = [np.array(kept[0]["mean"])]
    for seed in range(3):
        learner.update(learner.assemble([make_unroll(8, seed=seed)]), np.float32(0))
        kept.append(learner.updater.pull().params)
        published.append(np.array(kept[-1]["mean"]))
    for params, value in zip(kept, published, strict=True):
        np.testing.assert_array_equal(params["mean"], value)
    assert initial.optimizer_state["seen"] == 0.0, "an updater must copy what will be donated"


def test_lag_counts_updates_since_acting():
    agent = CountingAgent(batch=4)
    learner = make_learner(agent)
    for _ in range(3):
        metrics, _, _ = learner.update(learner.assemble([make_unroll(4)]), np.float32(0))
    metrics = mean_metrics(metrics)
    assert metrics["lag_mean"] == 2.0
    assert metrics["lag_max"] == 2


@pytest.mark.slow
def test_statistics_are_those_of_all_devices():
    from seedbed.agents.acting import Behaviour

    agent = Impala(
        spec=SPEC, unroll=5, batch=8, normalise_observations=True, normalise_returns=True
    )

    def learn(devices):
        learner, rows = make_learner(agent, devices), []
        for seed in range(3):
            unroll = make_unroll(8, seed=seed)._replace(
                extras=Behaviour(jnp.full((5, 8), -1.9), jnp.zeros((5, 8), jnp.int32)),
                actor_state=ActorState((), ()),
            )
            # Of the first batch all rows count, so much together as the opening rows of a later one.
            observation = unroll.timesteps.observation
            rows.append(observation[:-1] if seed == 0 else observation[:1].repeat(5, axis=0))
            learner.update(learner.assemble([unroll]), np.float32(0))
        return jax.device_get(learner.updater.state), np.concatenate(rows, axis=1).reshape(-1, 3)

    one, rows = learn(1)
    seen = one.params.seen
    np.testing.assert_allclose(seen.weight, 24, rtol=1e-6)
    assert one.auxiliary.returns.variance > 0
    np.testing.assert_allclose(seen.mean, rows.mean(0), atol=1e-5)
    np.testing.assert_allclose(seen.variance, rows.var(0), rtol=1e-4)
    two, _ = learn(2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, two)


@pytest.mark.quick("impala")
@pytest.mark.parametrize(
    "agent",
    [
        Ppo(unroll=6, batch=8, epochs=2, minibatches=2, hidden_sizes=(8,), recurrent=True,
            lstm_size=8, normalise_observations=True),
        Impala(unroll=6, batch=8, hidden_sizes=(8,), normalise_observations=True),
        Sac(batch=8, hidden_sizes=(8, 8)),
        Dqn(batch=8, n_step=6, hidden_sizes=(8,), dueling=True),
        R2d2(batch=8, burn_in=2, sequence=4, n_step=2, hidden_sizes=(8,), lstm_size=8, head_size=8),
    ],
    ids=["ppo", "impala", "sac", "dqn", "r2d2"],
)  # fmt: skip
def test_a_recorded_trajectory_gives_equal_parameters_in_both_runtimes(agent):
    bounds = Box((2,), (-1.0, -1.0), (1.0, 1.0))
    action_spec = bounds if isinstance(agent, Sac) else Discrete(7)
    agent = bind(agent, EnvSpec(SPEC.observation, action_spec))
    initial, key = jax.jit(agent.init)(jax.random.key(0)), jax.random.key(1)
    progress = np.float32(0.25)
    timesteps, action, extras, memory = record(agent, initial, 8)
    version, importance = np.zeros((6, 8), np.int32), ()
    if learns_from_replay(agent):
        version, importance = (), np.linspace(0.5, 1, 8, dtype=np.float32)
    fused = jax.jit(learn, static_argnums=(0, 4))(
        agent,
        initial._replace(progress=progress),
        Trajectory(timesteps, action, extras, memory, version, importance),
        jax.random.fold_in(key, 0),
        None,
    )
    learner = make_learner(agent, state=initial, key=1)
    frames = FrameTrajectory(timesteps, action, extras, memory, version, importance)
    metrics, _, transitions = learner.update(frames, progress)
    assert transitions == (~timesteps.first[1:]).sum()
    fused, state, found = jax.device_get((fused, learner.updater.state, metrics))
    metrics = mean_metrics(found)
    assert state.updates == fused.state.updates == agent.epochs * agent.minibatches
    learner.update(frames, np.float32(0.5))
    for compiled in (learner._open, learner._step.args[0]):
        assert compiled._cache_size() == 1, "compiled once for all updates"
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), initial.params, fused.state.params)
    assert max(jax.tree.leaves(moved)) > 1e-5
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), fused.state, state
    )
    for name, value in fused.metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6)
