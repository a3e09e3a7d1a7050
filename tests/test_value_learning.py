"""Learning of action values against published numbers, slow references and rlax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.ops import returns, value_learning
from seedbed.types import Timestep, trajectory_masks

ROWS = 9
SEEDS = st.integers(0, 2**32 - 1)

ACTION = jnp.array([[0, 1, 0, 0], [1, 0, 0, 1]])

OPENING = jax.jit(value_learning.opening_return)
N_STEP = jax.jit(returns.n_step_returns, static_argnums=4)
RESCALED_N_STEP = jax.jit(value_learning.rescaled_n_step_returns, static_argnums=4)


def check_close(actual, expected, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=rtol, atol=atol)


@pytest.mark.quick("2")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_rescaled_double_q_equals_rlax(n):
    rng = np.random.default_rng(n)
    q, target_q, selector = jnp.asarray(3 * rng.normal(size=(3, ROWS + 1, 4)), jnp.float32)
    action = jnp.asarray(rng.integers(0, 4, ROWS + 1))
    r, discount = jnp.asarray(rng.uniform(size=(2, ROWS)), jnp.float32)
    expected = rlax.transformed_n_step_q_learning(
        q[:-1],
        action[:-1],
        target_q[1:],
        jnp.argmax(selector[1:], -1),
        r,
        discount,
        n,
        tx_pair=rlax.SIGNED_HYPERBOLIC_PAIR,
    )
    best = value_learning.double_q_values(target_q[1:], selector[1:])
    targets = RESCALED_N_STEP(best, r, discount, jnp.ones(ROWS), n)
    check_close(targets - value_learning.chosen_values(q, action)[:-1], expected, rtol=1e-3)


def episodes(seed):
    """Values and rewards of random episodes that end in either way, with their masks."""
    rng = np.random.default_rng(seed)
    first, terminated, truncated = (np.zeros(ROWS + 1, bool) for _ in range(3))
    for t in range(1, ROWS + 1):
        first[t] = terminated[t - 1] or truncated[t - 1]
        if not first[t]:
            terminated[t], truncated[t] = rng.random(2) < 0.2
    reward = np.where(first, 0, rng.normal(size=ROWS + 1)).astype(np.float32)
    steps = Timestep((), reward, terminated, truncated, first)
    value = (5 * rng.normal(size=ROWS + 1)).astype(np.float32)
    return value, steps, trajectory_masks(steps, 0.9, 1.0)


def slow_return(value, steps, start, n):
    """The n-step return of row `start`: step by step until n rewards, an end, or the last row."""
    total, weight, t = 0.0, 1.0, start
    while True:
        total += weight * steps.reward[t + 1]
        weight *= 0.9
        t += 1
        if steps.terminated[t]:
            return total
        if steps.truncated[t] or t == start + n or t == ROWS:
            return total + weight * value[t]


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.sampled_from([1, 3, 5]))
def test_rescaled_returns_stay_within_their_episode(seed, n):
    value, steps, masks = episodes(seed)
    v_t = returns.rescale_value(jnp.asarray(value[1:]))
    rows = (steps.reward[1:], masks.discount, masks.trace)
    actual = RESCALED_N_STEP(v_t, *map(jnp.asarray, rows), n)
    for t in np.flatnonzero(masks.valid):
        expected = slow_return(value, steps, t, n)
        check_close(returns.unrescale_value(actual[t]), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_the_opening_return_needs_one_value(seed):
    value, steps, masks = episodes(seed)
    rows = [jnp.asarray(x) for x in (steps.reward[1:], masks.discount, masks.trace)]
    opening = OPENING(*rows)
    actual = opening.rewards + opening.discount * value[opening.last + 1]
    check_close(actual, slow_return(value, steps, 0, ROWS))
    check_close(actual, N_STEP(jnp.asarray(value[1:]), *rows, ROWS)[0])


def test_huber_equals_rlax_and_has_clipped_gradients():
    error = jnp.linspace(-4.0, 4.0, 33)
    check_close(value_learning.huber_losses(error, 1.5), rlax.huber_loss(error, 1.5))
    gradient = jax.vmap(jax.grad(lambda x: value_learning.huber_losses(x, 1.3)))(error)
    check_close(gradient, jnp.clip(error, -1.3, 1.3))
    check_close(value_learning.huber_losses(error, jnp.inf), 0.5 * error**2)


def test_priorities_mix_the_largest_and_the_mean_of_what_is_valid():
    error, valid = jnp.array([1.0, -3.0, 2.0, 99.0]), jnp.array([True, True, True, False])
    check_close(value_learning.mixed_priority(error, valid, 0.9), 0.9 * 3 + 0.1 * 2)
    check_close(value_learning.mixed_priority(error, valid, 0.0), 2)
    assert value_learning.mixed_priority(error, jnp.zeros(4, bool), 0.9) == 0
