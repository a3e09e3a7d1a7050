"""APG: its gradient against differences, what bounds it, devices, and what it learns."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fused_runs import same
from seedbed import simd
from seedbed.agents.apg import Apg
from seedbed.config.presets import PRESETS
from seedbed.envs.device.classic.cartpole import CartPole
from seedbed.envs.device.classic.pendulum import Pendulum
from seedbed.envs.device.wrappers import episode_statistics, training
from seedbed.fused.program import Program
from seedbed.fused.rollout import first_carry, unroll
from seedbed.nets.policy import join_networks, separate_networks
from seedbed.run.checking import check_agent
from seedbed.run.options import CentralConfig, FusedConfig, ParamServerConfig
from seedbed.types import (
    ArraySpec,
    Box,
    EnvSpec,
    EnvState,
    OnPolicy,
    SeedbedError,
    Trajectory,
    bind,
    differentiates,
)

KEY = jax.random.key(0)
APG = Apg(
    unroll=10, batch=8, hidden_sizes=(8,), value_sizes=(8,), gamma=0.9, entropy_cost=0.1,
    normalise_observations=False, normalise_returns=False, max_action_slope=1e9,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Drift:
    """The action moves a point that falls back by a half; near 0 is best. Some episodes end, others are cut.

    Environments whose second number is below `steep` have rewards a million times as large.
    """

    episode_steps: int = 6
    frame_skip: int = 1
    steep: float = -1.0

    @property
    def spec(self):
        return EnvSpec(ArraySpec((2,), "float32"), Box((1,), (-2.0,), (2.0,)))

    def reset(self, key):
        place, end = jax.random.uniform(key, (2,), jnp.float32, -1, 1)
        return EnvState.opening((place, end, jnp.int32(0)), jnp.stack([place, end]), {})

    def step(self, state, action):
        place, end, count = state.inner
        place = 0.5 * place + action[0]
        factor = jnp.where(end < self.steep, 1e6, 1.0)
        inner = place, end, count + 1
        ended = (end > 0) & (count >= 3)
        return EnvState.after(inner, jnp.stack([place, end]), -factor * place**2, ended, {})


def played(agent, carry, weights):
    """An unroll in Drift with these weights of the policy, without a gradient."""
    move = simd.vectorize(episode_statistics(training(Drift())).step)
    plan = Program(Drift(), agent, FusedConfig(steps=100)).plan
    params = carry.learner.params
    _, value = separate_networks(params.weights)
    params = params._replace(weights=join_networks(weights, value))
    now = carry._replace(learner=carry.learner._replace(params=params))
    after, rows, _, _ = unroll(agent, move, plan, None, KEY, now)
    steps = jax.tree.map(
        lambda x, end: jnp.concatenate([x, end[None]]), rows.timesteps, after.env.timestep
    )
    return params, Trajectory(steps, rows.action, rows.extras, carry.actor, ())


def slow_outlook(agent, params, trajectory):
    """What the windows' episodes bring, one after the other, in float64."""
    steps = jax.device_get(trajectory.timesteps)
    parameters, values, _ = agent._evaluate(params, trajectory.timesteps, (), ())
    values = np.asarray(values, np.float64)
    total = 0.0
    for b in range(agent.batch):
        for t in range(agent.unroll):
            if steps.first[t + 1, b] or not (t == 0 or steps.first[t, b]):
                continue
            weight = 1.0
            for k in range(t + 1, agent.unroll + 1):
                total += weight * float(steps.reward[k, b])
                weight *= agent.gamma
                if steps.terminated[k, b]:
                    break
                if steps.truncated[k, b] or k == agent.unroll:
                    total += weight * values[k, b]
                    break
    valid = ~steps.first[1:]
    entropy = agent._entropy(agent._policy(parameters[:-1]), trajectory.extras.draw)
    entropy = np.asarray(entropy, np.float64)[valid].mean()
    return total / agent.batch + agent.entropy_cost * entropy


def test_the_slope_is_that_of_differences_through_ends_of_episodes():
    agent = bind(APG, Drift().spec)
    plan = Program(Drift(), agent, FusedConfig(steps=100)).plan
    carry = jax.jit(
        lambda key: first_carry(agent, episode_statistics(training(Drift())), plan, key)
    )(KEY)
    policy, _ = separate_networks(carry.learner.params.weights)
    # The heads are nearly 0 at the start.
    policy = jax.tree.map(lambda x: x + 0.3 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), policy)
    weights = carry.learner.params.weights
    value = jax.tree.map(
        lambda x: x + 0.3 * jnp.sin(jnp.arange(x.size)).reshape(x.shape),
        separate_networks(weights)[1],
    )
    params = carry.learner.params._replace(weights=join_networks(policy, value))
    carry = carry._replace(learner=carry.learner._replace(params=params))

    @jax.jit
    def slope(state):
        def play(params):
            weights, _ = separate_networks(params.weights)
            _, trajectory = played(agent, carry, weights)
            return trajectory, trajectory.timesteps

        return agent.slope(state, play)

    found, steps = slope(carry.learner)
    first, over = np.asarray(steps.first[1:]), np.asarray(steps.terminated)
    cut = np.asarray(steps.truncated)
    assert first.any() and over.any() and cut.any() and (cut & ~over).any()
    flat, unravel = ravel_pytree(policy)
    direction = np.cos(3.0 * np.arange(flat.size))
    outlooks = []
    evaluate = jax.jit(lambda weights: played(agent, carry, weights))
    for size in (1e-3, -1e-3):
        moved, trajectory = evaluate(unravel(flat + size * direction))
        outlooks.append(slow_outlook(agent, moved, trajectory))
    difference = (outlooks[0] - outlooks[1]) / 2e-3
    assert abs(difference) > 0.1
    np.testing.assert_allclose(-ravel_pytree(found)[0] @ direction, difference, rtol=2e-3)


def run(agent, iterations, env=None, **options):
    program = Program(env or Drift(), agent, FusedConfig(steps=100_000, **options))
    carry = program.place(program.first())
    program.compile(carry)
    done, report = [0] * program.members, None
    for _ in range(iterations):
        carry, report = program.run(carry, done)
    return program, carry, report


@pytest.mark.slow
def test_a_few_steep_environments_do_not_decide_for_all():
    free = dataclasses.replace(APG, entropy_cost=0.0)
    slopes = []
    for agent in (free, dataclasses.replace(free, max_action_slope=1.0)):
        _, _, report = run(agent, 1, Drift(steep=-0.5))
        slopes.append(float(report.metrics["slope"]))
    assert slopes[0] > 1e4 and slopes[1] < 10


def test_what_comes_back_through_the_memory_is_bounded_too():
    agent = bind(dataclasses.replace(APG, recurrent=True, max_action_slope=1.0), Drift().spec)
    opening = jax.jit(jax.vmap(Drift().reset))(jax.random.split(KEY, 4)).timestep
    params, keys = jax.jit(agent.init)(KEY).params, jax.random.split(KEY, 4)

    @jax.jit
    @jax.grad
    def slope(weights, steep):
        before = agent.actor_state(jnp.arange(4), 4)
        now = params._replace(weights=weights)
        _, _, after = agent.act(now, before, opening, keys, False)
        return steep * after.core.action.sum()

    large, larger = (ravel_pytree(slope(params.weights, x))[0] for x in (1e6, 1e8))
    np.testing.assert_allclose(larger, large, rtol=1e-5)
    assert 0 < np.abs(large).max() < 10


def test_a_step_of_the_policy_leaves_the_value_alone_and_the_other_way_round():
    agent = bind(dataclasses.replace(APG, normalise_returns=True), Drift().spec)
    state = jax.jit(agent.init)(KEY)
    policy, value = separate_networks(state.params.weights)
    after, metrics = jax.jit(agent.ascend)(state, jax.tree.map(jnp.ones_like, policy))
    moved, kept = separate_networks(after.params.weights)
    same(kept, value)
    np.testing.assert_allclose(metrics["slope"], np.sqrt(ravel_pytree(policy)[0].size), rtol=1e-5)
    assert after.updates == state.updates
    for new, old in zip(jax.tree.leaves(moved), jax.tree.leaves(policy), strict=True):
        np.testing.assert_allclose(new, old - agent.learning_rate, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_one_and_several_devices_agree(devices):
    agent = dataclasses.replace(APG, normalise_observations=True, normalise_returns=True, epochs=2)
    _, one, alone = run(agent, 4)
    _, several, together = run(agent, 4, devices=tuple(range(devices)))
    same(jax.device_get(several.learner), jax.device_get(one.learner), rtol=1e-3, atol=2e-5)
    for name in ("slope", "loss/value"):
        np.testing.assert_allclose(together.metrics[name], alone.metrics[name], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [False, True])
def test_it_learns_and_goes_on_from_a_carry_bit_for_bit(recurrent):
    agent = dataclasses.replace(
        APG,
        recurrent=recurrent,
        lstm_size=8,
        entropy_cost=0.0,
        max_action_slope=1.0,
        learning_rate=1e-2,
    )
    program, carry, _ = run(agent, 0)
    before = program.evaluate(carry, 3)[0]["episode_return_mean"]
    for _ in range(150):
        carry, _ = program.run(carry, [0])
    held = jax.device_get(carry)
    again, _ = program.run(program.place(held), [0])
    carry, _ = program.run(carry, [0])
    same(jax.device_get(again), jax.device_get(carry))
    after = program.evaluate(carry, 3)[0]["episode_return_mean"]
    assert before < -0.05 and after > -0.01, (before, after)


@pytest.mark.slow
def test_a_population_is_its_seeds_one_by_one():
    program, carry, _ = run(APG, 3, seeds=2)
    for seed in range(2):
        _, alone, _ = run(APG, 3, seed=seed)
        member = jax.tree.map(lambda x, i=seed: x[i], carry.learner)
        same(jax.device_get(member), jax.device_get(alone.learner), rtol=1e-4, atol=1e-6)
    assert program.members == 2


@pytest.mark.slow
def test_its_options_can_be_swept():
    program, _, report = run(APG, 2, sweep="max_action_slope=0.1,1e9")
    assert program.members == 2 and report.metrics["slope"].shape == (2,)
    assert report.metrics["slope"][0] < report.metrics["slope"][1]


@pytest.mark.slow
def test_it_swings_a_pendulum_up():
    config = PRESETS["pendulum/apg"]()
    program = Program(Pendulum(), config.agent, config.runtime)
    carry, done = program.place(program.first()), 0
    program.compile(carry)
    while done < config.runtime.steps:
        carry, report = program.run(carry, [done])
        done += int(report.transitions)
    assert program.evaluate(carry, 0)[0]["episode_return_mean"] > -220


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Apg(value_sizes=()),
            "value_sizes is .*; give sizes: the value has its own network",
        ),
        (lambda: Apg(minibatches=3), "Apg.minibatches is 3; give a number that divides batch, 16"),
        (lambda: Apg(max_action_slope=0.0), "Apg.max_action_slope is 0.0; give more than 0"),
        (lambda: bind(Apg(), CartPole().spec), "real vectors .* choose agent ppo"),
        (lambda: CentralConfig().fitted(Apg()), "differentiates .* only the fused runtime can"),
        (lambda: ParamServerConfig().fitted(Apg()), "differentiates .* only the fused runtime can"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(SeedbedError, match=words):
        make()


class Lame(Apg):
    """Its step changes the shape of the learner state."""

    def ascend(self, state, slope):
        after, metrics = super().ascend(state, slope)
        return after._replace(progress=after.progress[None]), metrics


@dataclasses.dataclass(frozen=True)
class Halved(Drift):
    """A loop of unknown length has no derivative backwards."""

    def step(self, state, action):
        small = jax.lax.while_loop(lambda x: jnp.abs(x) > 0.1, lambda x: x / 2, action[0])
        return super().step(state, small[None])


def test_what_a_user_s_agent_or_task_does_wrong_is_named():
    check_agent(bind(APG, Drift().spec))
    with pytest.raises(
        SeedbedError, match=r"Lame.ascend returned float32\[1\] as learner state.pro"
    ):
        check_agent(bind(Lame(**vars(APG)), Drift().spec))

    class Without:
        experience = OnPolicy(2, 2, differentiated=True)

    with pytest.raises(SeedbedError, match="Without.experience .* no method slope"):
        differentiates(Without())
    with pytest.raises(SeedbedError, match=r"Apg.slope failed: .*while"):
        run(APG, 1, Halved())
