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

# rlax's inputs, a batch of two sequences of four rows.
REWARD = jnp.array([[-1.3, -1.3, 2.3, 42.0], [1.3, 5.3, -3.3, -5.0]])
DISCOUNT = jnp.array([[0.0, 0.89, 0.85, 0.99], [0.88, 1.0, 0.83, 0.95]])
Q = jnp.array(
    [
        [[1.1, 2.1], [-1.1, 1.1], [3.1, -3.1], [-1.2, 0.0]],
        [[2.1, 3.1], [9.5, 0.1], [-2.1, -1.1], [0.1, 7.4]],
    ]
)
TARGET_Q = jnp.array(
    [
        [[1.2, 2.2], [-1.2, 0.2], [2.2, -1.2], [-2.25, -6.0]],
        [[4.2, 2.2], [1.2, 1.2], [-1.2, -2.2], [1.5, 1.0]],
    ]
)
ACTION = jnp.array([[0, 1, 0, 0], [1, 0, 0, 1]])
PI = jnp.array(
    [
        [[0.5, 0.5], [0.2, 0.8], [0.6, 0.4], [0.9, 0.1]],
        [[0.1, 0.9], [1.0, 0.0], [0.3, 0.7], [0.7, 0.3]],
    ]
)
MU = jnp.array([[0.5, 0.1, 0.9, 0.3], [0.4, 0.6, 1.0, 0.9]])

OPENING = jax.jit(value_learning.opening_return)
N_STEP = jax.jit(returns.n_step_returns, static_argnums=4)
RESCALED_N_STEP = jax.jit(value_learning.rescaled_n_step_returns, static_argnums=4)


def check_close(actual, expected, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=rtol, atol=atol)


def test_transformed_n_step_case():
    @jax.vmap
    def errors(q, q_t, a, r, discount):
        bootstrap = value_learning.chosen_values(q_t, a)
        targets = RESCALED_N_STEP(bootstrap, r, discount, jnp.ones(3), 2)
        return targets - value_learning.chosen_values(q, a)

    # This case of rlax's has one value of its own, and targets that are not a row later.
    q = Q.at[1, 1, 0].set(-1.1)
    expected = [[-1.61788, 0.85601, -0.75763], [-0.87689, 0.62464, 0.35981]]
    actual = errors(*(x[:, :3] for x in (q, TARGET_Q, ACTION, REWARD, DISCOUNT)))
    check_close(actual, expected, rtol=1e-4)


def test_double_q_case():
    q = jnp.array([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0]])
    target_q = jnp.array([[99.0, 1.0, 98.0], [91.0, 2.0, 66.0]])
    selector = jnp.array([[2.0, 10.0, 1.0], [11.0, 20.0, 1.0]])
    best = value_learning.double_q_values(target_q, selector)
    chosen = value_learning.chosen_values(q, jnp.array([0, 1]))
    check_close(1.0 + jnp.array([0.0, 1.0]) * best - chosen, [0.0, 1.0])
    gradient = jax.grad(lambda q, s: value_learning.double_q_values(q, s).sum(), argnums=(0, 1))
    assert not any(g.any() for g in gradient(target_q, selector))


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


def test_opening_return_cases():
    """SEED's: three steps of rewards 1 to 7 that end at the fourth, values 100 to 700."""
    r, v = np.arange(1.0, 8), 100.0 * np.arange(1, 8)
    live = np.ones(7)
    live[3] = 0
    expected = [1 + 1.8 + 0.81 * 3 + 0.729 * 300, 2 + 2.7 + 0.81 * 4, 3 + 3.6, 4]
    expected += [5 + 5.4 + 0.81 * 7 + 0.729 * 700, 6 + 6.3 + 0.81 * 700, 7 + 630]
    for t, target in enumerate(expected):
        part = [jnp.asarray(x[t : t + 3], jnp.float32) for x in (r, 0.9 * live, live)]
        opening = value_learning.opening_return(*part)
        assert opening.last == min(2, 3 - t if t <= 3 else 2, 6 - t)
        check_close(opening.rewards + opening.discount * v[t + opening.last], target)


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
