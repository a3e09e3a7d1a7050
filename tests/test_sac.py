"""SAC: its three losses against slow ones, ends, targets, actions at the bounds, and what it learns."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from seedbed.agents.sac import Sac
from seedbed.ops.distributions import squash
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
BOX = Box((3,), (-2.0, -1.0, 0.0), (2.0, 3.0, 0.5))
UNIT = Box((1,), (-1.0,), (1.0,))
SMALL = Sac(
    batch=12, hidden_sizes=(16, 16), reward_scale=0.5, gamma=0.9, tau=0.1, target_entropy=-0.5
)
PROBE = Sac(batch=64, hidden_sizes=(32, 32), learning_rate=3e-3, gamma=0.9, target_entropy=-2.0)


def bound(agent=SMALL, action=BOX, size=4):
    return bind(agent, EnvSpec(ArraySpec((size,), "float32"), action))


@functools.partial(jax.jit, static_argnums=0)
def init(agent, key=KEY):
    return agent.init(key)


def trained(agent):
    """A state whose log temperature is not 0 and whose targets are not the critics."""
    state, other = init(agent), init(agent, jax.random.key(1))
    auxiliary = state.auxiliary._replace(
        targets=other.auxiliary.critics, log_temperature=jnp.float32(-0.7)
    )
    params = jax.tree.map(lambda x: x + 0.05, state.params)  # moves the head away from 0
    return state._replace(params=params, auxiliary=auxiliary)


def policy_of(state, mean, log_scale):
    """A policy that says these of each number, whatever it sees."""
    policy = jax.tree.map(jnp.zeros_like, state.params)
    policy["params"]["PolicyHead_0"]["Dense_0"]["bias"] = jnp.array([mean] * 3 + [log_scale] * 3)
    return policy


def factorised(jaxpr):
    """Returns the shapes that are factorised in a jaxpr and in those inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "qr":
            yield equation.invars[0].aval.shape
        for inner in jaxprs_in_params(equation.params):
            yield from factorised(inner)


def test_initial_parameters_are_drawn_without_batches_that_wait_for_one_another():
    # Two batches of factorisations at once hang on two threads, about once in ten starts.
    shapes = list(factorised(jax.make_jaxpr(bound().init)(KEY).jaxpr))
    assert len(shapes) > 3 and all(len(shape) == 2 for shape in shapes)


def items_of(agent, seed=0):
    """Random items: a third terminated, a third truncated, and two that are no transitions."""
    rng = np.random.default_rng(seed)
    shape, box = (2, agent.batch), agent.spec.action
    observation = rng.normal(size=(*shape, *agent.spec.observation.shape)).astype(np.float32)
    reward = rng.normal(size=shape).astype(np.float32)
    terminated, truncated, first = (np.zeros(shape, bool) for _ in range(3))
    terminated[1, ::3], truncated[1, 1::3] = True, True
    first[1, -2:], terminated[1, -2:], truncated[1, -2:] = True, False, False
    action = rng.uniform(box.low, box.high, (1, agent.batch, len(box.low))).astype(np.float32)
    return Trajectory(
        timesteps=Timestep(observation, reward, terminated, truncated, first),
        action=action.reshape(1, agent.batch, *box.shape),
        extras=(),
        actor_state=ActorState((), ()),
        params_version=np.zeros((1, agent.batch), np.int32),
        importance=rng.uniform(0.2, 1.0, agent.batch).astype(np.float32),
    )


@functools.partial(jax.jit, static_argnums=0)
def gradients(agent, state, items, key=KEY):
    return agent.gradients(state, agent.prepare(state, items, KEY), key)


apply = jax.jit(lambda agent, *rest: agent.apply(*rest), static_argnums=0)


def dense(weights, x):
    return x @ weights["kernel"] + weights["bias"][None]


def layers(weights, x, head):
    """Two layers and a head, by hand."""
    for name in ("Dense_0", "Dense_1"):
        x = jnp.maximum(dense(weights["Mlp_0"][name], x), 0.0)
    return dense(weights[head]["Dense_0"], x)


@functools.partial(jax.jit, static_argnums=1)
def critic_of(critics, i, observation, unit):
    """Values [B] of critic i."""
    (twins,) = critics["params"].values()
    weights = jax.tree.map(lambda leaf: leaf[i], twins)
    return layers(weights, jnp.concatenate([observation, unit], -1), "ValueHead_0")[:, 0]


def noise_of(key, items, size):
    """Normal numbers [items, size], each item's from a key of its own."""
    keys = [jax.random.fold_in(key, number) for number in range(items)]
    return jnp.stack([jax.random.normal(each, (1, size))[0] for each in keys])


@jax.jit
def draw_of(policy, observation, key):
    """Actions [B, A] between -1 and 1 and their log-densities [B], from densities as defined."""
    mean, log_scale = jnp.split(layers(policy["params"], observation, "PolicyHead_0"), 2, -1)
    scale = jnp.exp(log_scale)
    x = mean + scale * noise_of(key, *mean.shape)
    log_prob = jax.scipy.stats.norm.logpdf(x, mean, scale) - jnp.log(1 - jnp.tanh(x) ** 2)
    return jnp.tanh(x), log_prob.sum(-1)


def slow_losses(agent, state, items, key):
    """The three losses as functions of what each learns: critics, policy, log temperature."""
    policy_key, target_key = jax.random.split(key)
    steps, box = items.timesteps, agent.spec.action
    low, high = np.array(box.low, np.float32)[None], np.array(box.high, np.float32)[None]
    unit = 2 * (items.action[0] - low) / (high - low) - 1
    s, s_next = steps.observation
    rows = np.flatnonzero(~steps.first[1])
    share = items.importance[rows] / len(rows)
    temperature = np.exp(-0.7)

    action_t, log_prob_t = map(np.asarray, draw_of(state.params, s_next, target_key))
    values_t = [critic_of(state.auxiliary.targets, i, s_next, action_t) for i in (0, 1)]
    targets = np.zeros(agent.batch, np.float32)
    for b in rows:
        targets[b] = agent.reward_scale * steps.reward[1, b]
        if not steps.terminated[1, b]:
            soft = min(values_t[0][b], values_t[1][b]) - temperature * log_prob_t[b]
            targets[b] += agent.gamma * soft

    def critics_loss(critics):
        errors = [critic_of(critics, i, s, unit) - targets for i in (0, 1)]
        return sum((share * 0.5 * error[rows] ** 2).sum() for error in errors)

    def policy_loss(policy):
        action, log_prob = draw_of(policy, s, policy_key)
        values = [critic_of(state.auxiliary.critics, i, s, action) for i in (0, 1)]
        return (share * (temperature * log_prob - jnp.minimum(*values))[rows]).sum()

    def temperature_loss(log_temperature):
        _, log_prob = draw_of(state.params, s, policy_key)
        aim = agent.target_entropy * unit.shape[-1]
        return (share * log_temperature * (-log_prob - aim)[rows]).sum()

    return critics_loss, policy_loss, temperature_loss


def test_the_gradients_are_those_of_slow_losses():
    agent = bound()
    state, items = trained(agent), items_of(agent)
    grads, output = gradients(agent, state, items)
    losses = slow_losses(agent, state, items, KEY)
    auxiliary = state.auxiliary
    at = (auxiliary.critics, state.params, auxiliary.log_temperature)
    expected = jax.jit(
        lambda at: [jax.value_and_grad(loss)(x) for loss, x in zip(losses, at, strict=True)]
    )(at)
    found = (grads.critics, grads.policy, grads.log_temperature)
    for ours, (_, slow) in zip(found, expected, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), ours, slow
        )
        assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(slow))
    np.testing.assert_allclose(output.metrics["loss/critic"], expected[0][0], rtol=1e-4)
    np.testing.assert_allclose(output.metrics["loss/policy"], expected[1][0], rtol=1e-4)
    total = sum(float(loss) for loss, _ in expected)
    np.testing.assert_allclose(output.metrics["loss/total"], total, rtol=1e-4)
    assert output.weight == agent.batch - 2
    assert output.priorities.shape == (agent.batch,)
    assert (output.priorities > 0).all()


def test_items_that_are_no_transitions_count_for_nothing():
    agent = bound()
    state, items = trained(agent), items_of(agent)
    steps = jax.tree.map(np.copy, items.timesteps)
    steps.observation[:, -2:] += 3.0
    steps.reward[:, -2:] -= 5.0
    action = items.action.copy()
    action[:, -2:] = 0.1
    changed = items._replace(timesteps=steps, action=action)
    (grads, output), (others, other) = (gradients(agent, state, x) for x in (items, changed))
    jax.tree.map(np.testing.assert_array_equal, (grads, output), (others, other))


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_only_termination_keeps_a_target_from_what_comes_next(end):
    agent = bound()
    state, items = trained(agent), items_of(agent)
    none, every = np.zeros((2, agent.batch), bool), np.ones((2, agent.batch), bool)
    ends = {"terminated": none, "truncated": none, "first": none} | {end: every}
    steps = items.timesteps._replace(**ends)
    later = steps._replace(observation=steps.observation + np.array([0.0, 1.0])[:, None, None])
    grads, others = (
        gradients(agent, state, items._replace(timesteps=x))[0] for x in (steps, later)
    )
    same = jax.tree.map(lambda a, b: bool((a == b).all()), grads, others)
    assert all(jax.tree.leaves(same.critics)) == (end == "terminated")
    assert all(jax.tree.leaves((same.policy, same.log_temperature)))


def test_rewards_teach_the_critics_alone():
    agent = bound()
    state, items = trained(agent), items_of(agent)
    steps = items.timesteps._replace(reward=items.timesteps.reward + 1.0)
    grads, others = (
        gradients(agent, state, x)[0] for x in (items, items._replace(timesteps=steps))
    )
    same = jax.tree.map(lambda a, b: bool((a == b).all()), grads, others)
    assert not any(jax.tree.leaves(same.critics))
    assert all(jax.tree.leaves((same.policy, same.log_temperature)))


@pytest.mark.quick("0.0--1")
@pytest.mark.parametrize(("log_scale", "sign"), [(0.0, -1), (-5.0, 1)])
def test_temperature_falls_while_entropy_is_more_than_its_aim(log_scale, sign):
    agent = bound()
    state = init(agent)
    state = state._replace(params=policy_of(state, 0.0, log_scale))
    later = apply(agent, state, *gradients(agent, state, items_of(agent)))
    change = later.auxiliary.log_temperature - state.auxiliary.log_temperature
    np.testing.assert_allclose(change, sign * agent.learning_rate, rtol=1e-3)  # Adam's first step


@pytest.mark.slow
def test_an_update_moves_everything_learned_and_the_targets_after_the_critics():
    agent = bound()
    state = trained(agent)
    later = apply(agent, state, *gradients(agent, state, items_of(agent)))
    before, after = state.auxiliary, later.auxiliary
    jax.tree.map(
        lambda old, critic, new: np.testing.assert_allclose(
            new, 0.9 * old + 0.1 * critic, rtol=1e-5, atol=1e-7
        ),
        before.targets,
        after.critics,
        after.targets,
    )
    moved = jax.tree.map(
        lambda a, b: 0 < np.abs(a - b).max() < 1.01 * agent.learning_rate,
        (state.params, before.critics),
        (later.params, after.critics),
    )
    assert all(jax.tree.leaves(moved))
    assert later.updates == state.updates + 1


@pytest.mark.slow
def test_no_two_parts_of_the_state_share_memory():
    agent = bound()
    state = init(agent)
    later = apply(agent, state, *gradients(agent, state, items_of(agent)))
    for whole in (state, later, agent.init(KEY)):
        places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(whole)]
        assert len(set(places)) == len(places)


def test_the_twins_are_not_alike():
    critics = init(bound()).auxiliary.critics
    kernels = [leaf for leaf in jax.tree.leaves(critics) if leaf.ndim == 3]
    assert len(kernels) == 3
    assert all(np.abs(leaf[0] - leaf[1]).max() > 0.01 for leaf in kernels)


def acting(agent, params, observation, keys, evaluate):
    flags = np.zeros(len(observation), bool)
    timestep = Timestep(observation, np.zeros(len(observation), np.float32), flags, flags, flags)
    actor_state = agent.actor_state(jnp.arange(len(observation)), len(observation))
    return jax.jit(agent.act, static_argnums=4)(params, actor_state, timestep, keys, evaluate)


@pytest.mark.slow
def test_actions_spread_over_their_bounds_and_are_the_middle_ones_to_evaluate():
    box = dataclasses.replace(BOX, shape=(1, 3))
    agent = bound(action=box)
    state = init(agent)
    observation = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
    keys = jax.random.split(KEY, 500)
    action, extras, _ = acting(agent, state.params, observation, keys, False)
    assert action.shape == (500, 1, 3)
    assert extras == ()
    action = np.asarray(action)
    low, high = np.array(box.low), np.array(box.high)
    assert ((action >= low) & (action <= high)).all()
    tenths = np.quantile((action[:, 0] - low) / (high - low), [0.1, 0.9], axis=0)
    assert (tenths[0] < 0.2).all()
    assert (tenths[1] > 0.8).all()
    # Each environment has a key of its own, whatever the order.
    reverse, _, _ = acting(agent, state.params, observation[::-1], keys[::-1], False)
    np.testing.assert_allclose(reverse[::-1], action, rtol=1e-5, atol=1e-6)
    mode, _, _ = acting(agent, state.params, observation, keys, True)
    head = layers(state.params["params"], observation, "PolicyHead_0")
    np.testing.assert_allclose(mode, squash(box, head[:, :3], "tanh"), rtol=1e-4, atol=1e-5)


@pytest.mark.quick("-1000000.0")
@pytest.mark.parametrize("mean", [0.3, 8.0, 200.0, -1e6])
def test_log_densities_are_right_where_the_tanh_is_flat(mean):
    agent = bound()
    policy = policy_of(init(agent), mean, -1.0)

    def log_densities(policy):
        return agent._sample(policy, jnp.ones((1, 5, 4)), KEY)[1]

    found, back = jax.vjp(log_densities, policy)
    noise = np.asarray(noise_of(KEY, 5, 3), np.float64)
    x = mean + np.exp(-1.0) * noise
    log_slope = 2 * (np.log(2) - np.abs(x) - np.log1p(np.exp(-2 * np.abs(x))))
    expected = (-0.5 * noise**2 + 1.0 - 0.5 * np.log(2 * np.pi) - log_slope).sum(-1)
    np.testing.assert_allclose(found[0], expected, rtol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(back(jnp.ones((1, 5)))))


@pytest.mark.parametrize(
    ("action", "remedy"),
    [
        (Discrete(2), "dqn"),
        (Box((1,), (-np.inf,), (np.inf,)), "bound"),
        (Box((2,), (-1.0, -np.inf), (1.0, 1.0)), "bound"),
        (Box((1,), (1.0,), (1.0,)), "low < high"),
    ],
)
def test_actions_it_cannot_take_are_refused_when_it_is_bound(action, remedy):
    with pytest.raises(SeedbedError, match=remedy):
        bound(action=action)


def test_images_are_refused_when_it_is_bound():
    spec = {"arm": ArraySpec((4,), "float32"), "camera": ArraySpec((24, 24, 3), "uint8")}
    with pytest.raises(
        SeedbedError, match=r"Sac .* image of shape \(24, 24, 3\); choose agent ppo"
    ):
        bind(SMALL, EnvSpec(spec, BOX))
    assert bind(SMALL, EnvSpec({"keys": ArraySpec((8,), "uint8")}, BOX)).spec is not None


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 0},
        {"tau": 0.0},
        {"tau": 1.5},
        {"gamma": 1.1},
        {"ratio": 0.0},
        {"hidden_sizes": ()},
        {"capacity": 100, "min_size": 101},
        {"initial_temperature": 0.0},
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options):
    with pytest.raises(SeedbedError, match=f"Sac.{list(options)[-1]} is"):
        Sac(**options)


def learn(agent, make_items, updates):
    """Updates on items that `make_items(params, key)` makes each time, as one compiled scan."""

    def step(state, key):
        items_key, key = jax.random.split(key)
        batch = agent.prepare(state, make_items(state.params, items_key), key)
        grads, output = agent.gradients(state, batch, key)
        return agent.apply(state, grads, output), output.metrics

    keys = jax.random.split(KEY, updates)
    return jax.jit(functools.partial(jax.lax.scan, step))(agent.init(KEY), keys)


def transitions(observation_tm1, action, reward, observation_t, terminated):
    """Items of rows `[B, ...]`."""
    count = len(reward)
    zeros = jnp.zeros((2, count), bool)
    timesteps = Timestep(
        observation=jnp.stack([observation_tm1, observation_t]),
        reward=jnp.stack([jnp.zeros(count), reward]),
        terminated=jnp.stack([zeros[0], terminated]),
        truncated=zeros,
        first=zeros,
    )
    version, ones = jnp.zeros((1, count), jnp.int32), jnp.ones(count)
    return Trajectory(timesteps, action[None], (), ActorState((), ()), version, ones)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_it_learns_the_action_that_an_observation_asks_for(dtype):
    agent = dataclasses.replace(PROBE, compute_dtype=dtype)
    agent = bound(agent, dataclasses.replace(UNIT, low=(-2.0,), high=(2.0,)), 1)

    def items(params, key):
        state_key, key = jax.random.split(key)
        s = jax.random.uniform(state_key, (agent.batch, 1), minval=-1.5, maxval=1.5)
        action, _, _ = acting(agent, params, s, jax.random.split(key, agent.batch), False)
        reward = -jnp.square(action - s)[:, 0]
        return transitions(s, action, reward, s, jnp.ones(agent.batch, bool))

    state, metrics = learn(agent, items, 1500)
    s = np.linspace(-1.4, 1.4, 8, dtype=np.float32)[:, None]
    action, _, _ = acting(agent, state.params, s, jax.random.split(KEY, 8), True)
    assert np.abs(action - s).max() < 0.3
    assert metrics["temperature"][-1] < 0.2


@pytest.mark.slow
def test_it_learns_a_first_action_from_the_reward_after_the_second():
    agent = bound(PROBE, UNIT, 2)

    def items(params, key):
        keys = jax.random.split(key, 2 * agent.batch)
        half = agent.batch // 2
        start = jnp.zeros((half, 2))
        one, _, _ = acting(agent, params, start, keys[:half], False)
        middle = jnp.concatenate([jnp.ones((half, 1)), one], -1)
        two, _, _ = acting(agent, params, middle, keys[half : 2 * half], False)
        reward = -jnp.square(one - 0.5)[:, 0]
        return transitions(
            jnp.concatenate([start, middle]),
            jnp.concatenate([one, two]),
            jnp.concatenate([jnp.zeros(half), 4.0 * reward]),
            jnp.concatenate([middle, middle]),
            jnp.arange(agent.batch) >= half,
        )

    state, _ = learn(agent, items, 1500)
    start = np.zeros((1, 2), np.float32)
    action, _, _ = acting(agent, state.params, start, jax.random.split(KEY, 1), True)
    assert abs(float(action[0, 0]) - 0.5) < 0.2
