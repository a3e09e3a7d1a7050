"""Returns against published numbers, slow references after the papers, and rlax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.ops import losses, returns
from seedbed.types import Timestep, trajectory_masks

ROWS = 12
SEEDS = st.integers(0, 2**32 - 1)


def check_close(actual, expected, rtol=1e-5, atol=1e-5):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=rtol, atol=atol)


def batched_vtrace(*arrays, clips=None):
    """V-trace of time-major [T, B]."""
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    return BATCHED_VTRACE(*arrays, clips or returns.VtraceClips())


ADVANTAGES = jax.jit(returns.generalised_advantages)
LAMBDA_RETURNS = jax.jit(returns.lambda_returns)
RLAX_VTRACE = jax.jit(rlax.vtrace_td_error_and_advantage)
BATCHED_VTRACE = jax.jit(jax.vmap(returns.vtrace, (1,) * 6 + (None,), 1))


def episodes(seed, rows=ROWS):
    """A sequence of random episodes, some ending at once, with the masks that losses use."""
    rng = np.random.default_rng(seed)
    first, terminated, truncated = (np.zeros(rows + 1, bool) for _ in range(3))
    for t in range(1, rows + 1):
        first[t] = terminated[t - 1] or truncated[t - 1]
        if not first[t]:
            terminated[t], truncated[t] = rng.random(2) < 0.2
    reward = np.where(first, 0, rng.normal(size=rows + 1)).astype(np.float32)
    timesteps = Timestep(np.zeros(rows + 1), reward, terminated, truncated, first)
    lambda_ = float(rng.choice([1.0, 0.9]))
    masks = trajectory_masks(timesteps, 0.97, lambda_)
    v = rng.normal(size=rows + 1).astype(np.float32)
    rho = np.where(masks.valid, np.exp(rng.normal(size=rows)), 0).astype(np.float32)
    return v, reward[1:], masks, rho, lambda_


def slow_vtrace(v, r, masks, rho, clips, lambda_):
    """Equation 1 of Espeholt et al. (2018), summed term by term, O(T^2); ends cut the products."""
    rows = len(r)
    ended = masks.trace == 0
    delta = np.minimum(clips.rho, rho) * (r + masks.discount * v[1:] - v[:-1])
    c = lambda_ * np.minimum(clips.c, rho)
    vs = np.append(v[:-1].astype(np.float64), v[-1])
    for s in range(rows):
        product = 1.0
        for t in range(s, rows):
            vs[s] += product * delta[t]
            if ended[t]:
                break
            product *= masks.discount[t] * c[t]
    blended = np.where(ended, v[1:], (1 - lambda_) * v[1:] + lambda_ * vs[1:])
    advantage = np.minimum(clips.pg_rho, rho) * (r + masks.discount * blended - v[:-1])
    return vs[:-1], advantage


@pytest.mark.parametrize(
    ("middle_discount", "targets", "advantages"),
    [(0.9, [2.6535, 4.23, 4.7], [2.1535, 3.23, 5.2]), (0.0, [0.75, 0, 4.7], [0.25, -1, 5.2])],
)
def test_vtrace_case_with_and_without_an_end(middle_discount, targets, advantages):
    v = jnp.array([0.5, 1.0, -0.5, 3.0])
    discount = jnp.array([0.9, middle_discount, 0.9])
    r, rho = jnp.array([1.0, 0.0, 2.0]), jnp.array([0.5, 2.0, 1.0])
    result = returns.vtrace(v[:-1], v[1:], r, discount, jnp.ones(3), rho)
    check_close(result.targets, targets)
    check_close(result.pg_advantage, advantages)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.sampled_from([(1.0, 1.0, 1.0), (3.7, 1.5, 2.2), (0.5, 0.9, 0.7)]))
def test_vtrace_against_the_sum_of_the_paper(seed, thresholds):
    clips = returns.VtraceClips(*thresholds)
    v, r, masks, rho, lambda_ = episodes(seed)
    arrays = [x[:, None] for x in (v[:-1], v[1:], r, masks.discount, masks.trace, rho)]
    result = batched_vtrace(*arrays, clips=clips)
    targets, advantages = slow_vtrace(v, r, masks, rho, clips, lambda_)
    check_close(result.targets[:, 0], targets)
    check_close(result.pg_advantage[:, 0], advantages)
    assert (np.asarray(result.errors[:, 0])[~masks.valid] == 0).all()


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.floats(0.0, 1.0))
def test_vtrace_equals_rlax(seed, lambda_):
    rng = np.random.default_rng(seed)
    v, r, rho = rng.normal(size=(3, ROWS)).astype(np.float32)
    rho, v_t = np.exp(rho), np.append(v[1:], np.float32(0.3))
    discount = np.where(rng.random(ROWS) < 0.2, 0, 0.97).astype(np.float32)
    trace = np.full(ROWS, lambda_, np.float32)
    clips = returns.VtraceClips(rho=1.3, c=1.0, pg_rho=1.1)
    result = jax.tree.map(
        lambda x: x[:, 0],
        batched_vtrace(*(x[:, None] for x in (v, v_t, r, discount, trace, rho)), clips=clips),
    )
    theirs = RLAX_VTRACE(v, v_t, r, discount, rho, trace, 1.3, 1.1)
    check_close(result.errors, theirs.errors, atol=1e-4)
    # rlax's advantage takes the next target and the next value by lambda_t, as here.
    check_close(result.pg_advantage[:-1], theirs.pg_advantage[:-1], atol=1e-4)


def test_on_policy_vtrace_is_the_return_and_the_bootstrap_passes_through():
    rng = np.random.default_rng(0)
    v, r = jnp.asarray(rng.normal(size=(2, ROWS + 1)), jnp.float32)
    ones = jnp.ones(ROWS)
    result = returns.vtrace(v[:-1], v[1:], r[1:], 0.9 * ones, ones, ones)
    expected = returns.n_step_returns(v[1:], r[1:], 0.9 * ones, ones, ROWS)
    check_close(result.targets, expected)
    advantages = returns.generalised_advantages(v[:-1], v[1:], r[1:], 0.9 * ones, ones)
    check_close(result.errors, advantages)
    result = returns.vtrace(v[:-1], v[1:], 0 * ones, ones, ones, ones)
    check_close(result.targets, np.full(ROWS, v[-1]))


def test_truncation_bootstraps_from_the_last_observation_and_termination_does_not():
    v = jnp.array([1.0, 2.0, 40.0, 8.0])  # of observations: start, last, opening, next
    r, valid = jnp.array([0.5, 0.0, 0.7]), jnp.array([1.0, 0.0, 1.0])
    discount, trace = jnp.array([0.9, 0.9, 0.9]), jnp.array([0.0, 1.0, 1.0])
    result = returns.vtrace(v[:-1], v[1:], r, discount, trace, valid)
    check_close(result.targets, [0.5 + 0.9 * 2.0, 2.0, 0.7 + 0.9 * 8.0])
    check_close(result.pg_advantage, [1.3, 0.0, 0.7 + 7.2 - 40.0])
    result = returns.vtrace(v[:-1], v[1:], r, discount.at[0].set(0.0), trace, valid)
    check_close(result.targets[0], 0.5)


def test_n_step_cases():
    q = np.arange(100.0, 800, 100)
    r = jnp.arange(1.0, 8)

    def target(rows, n, done=None):
        live = np.ones(rows, np.float32)
        if done is not None:
            live[done] = 0
        return returns.n_step_returns(jnp.asarray(q[:rows]), r[:rows], 0.9 * live, live, n)

    check_close(target(3, 1), [91, 182, 273])
    check_close(target(3, 1, done=1), [91, 2, 273])
    check_close(target(3, 2), [1 + 1.8 + 162, 2 + 2.7 + 243, 273])
    expected = [
        1 + 1.8 + 0.81 * 3 + 0.729 * 300,
        2 + 2.7 + 0.81 * 4,
        3 + 3.6,
        4,
        5 + 5.4 + 0.81 * 7 + 0.729 * 700,
        6 + 6.3 + 0.81 * 700,
        7 + 630,
    ]
    check_close(target(7, 3, done=3), expected)


def test_n_step_case_of_truncation():
    """SEED's case: a flag at index i is here an end of row i, or of row i - 1 if abandoned."""
    d, values = 0.99, np.arange(1.0, 12)
    r = 0.1 * jnp.asarray(values[:10], jnp.float32)
    v_t = jnp.asarray(values[1:], jnp.float32)
    live = np.ones(10, np.float32)
    live[[1, 3, 8, 9]] = 0
    terminated = returns.n_step_returns(v_t, r, d * live, jnp.asarray(live), 3)
    check_close(terminated[jnp.array([0, 1, 8])], [0.1 + 0.2 * d, 0.2, 0.9])
    live = np.ones(10, np.float32)
    live[[0, 2, 7, 8]] = 0
    truncated = returns.n_step_returns(v_t, r, jnp.full(10, d), jnp.asarray(live), 3)
    check_close(truncated[jnp.array([0, 7])], [0.1 + 2 * d, 0.8 + 9 * d])


@pytest.mark.slow
def test_generalised_advantage_cases():
    r, v = jnp.array([0.0, 0, 1, 0, -0.5]), jnp.array([1.0, 4, -3, -2, -1, -1])
    discount, ones = jnp.full(5, 0.99), jnp.ones(5)
    full = returns.generalised_advantages(v[:-1], v[1:], r, discount, ones)
    check_close(full, [-1.45118, -4.4557, 2.5396, 0.5249, -0.49], atol=1e-4)
    part = returns.generalised_advantages(v[:-1], v[1:], r, discount, 0.7 * ones)
    check_close(part, [-0.676979, -5.248167, 2.4846, 0.6704, -0.49], atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_advantages_and_returns_stay_within_their_episode(seed):
    v, r, masks, _, lambda_ = episodes(seed)
    arrays = [jnp.asarray(x) for x in (v[:-1], v[1:], r, masks.discount, masks.trace)]
    advantages = ADVANTAGES(*arrays)
    targets = LAMBDA_RETURNS(*arrays[1:])
    for start in np.flatnonzero(masks.valid):
        stops = np.flatnonzero(masks.trace[start:] == 0)
        stop = start + stops[0] + 1 if len(stops) else ROWS
        total, weight = 0.0, 1.0
        for t in range(start, stop):
            total += weight * (r[t] + masks.discount[t] * v[t + 1] - v[t])
            weight *= masks.discount[t] * lambda_
        check_close(advantages[start], total, atol=1e-4)
        check_close(targets[start], total + v[start], atol=1e-4)


def test_targets_carry_no_gradient():
    ones = jnp.ones(ROWS)

    def total(v):
        result = returns.vtrace(v[:-1], v[1:], ones, ones, ones, ones)
        others = (
            returns.generalised_advantages(v[:-1], v[1:], ones, ones, ones),
            returns.n_step_returns(v[1:], ones, ones, ones, 3),
        )
        return sum(x.sum() for x in (*result, *others))

    assert not jax.grad(total)(jnp.arange(ROWS + 1.0)).any()


@pytest.mark.slow
def test_rescaling_cases_and_round_trip():
    x = jnp.array([1.0, 3, 10, 100, 1000, 1e6])
    expected = [0.41521356, 1.003, 2.32662479, 9.14987562, 31.63858404, 1999.0005]
    check_close(returns.rescale_value(x), expected, rtol=2e-7, atol=0)
    assert returns.rescale_value(jnp.zeros(())) == 0 == returns.unrescale_value(jnp.zeros(()))
    line = jnp.linspace(-100, 100, 2001)
    for epsilon in (1e-3, 1e-2):
        scaled = returns.rescale_value(line, epsilon)
        check_close(scaled, -returns.rescale_value(-line, epsilon), rtol=0, atol=0)
        check_close(returns.unrescale_value(scaled, epsilon), line, rtol=1e-6, atol=1e-7)
    large = jnp.array([1e3, 1e4, 1e6])
    check_close(returns.unrescale_value(returns.rescale_value(large)), large, rtol=1e-6)
    check_close(jax.grad(returns.rescale_value)(0.0), 0.501)
    check_close(jax.grad(returns.unrescale_value)(0.0), 1 / 0.501)


def test_rescaling_equals_rlax():
    x = jnp.linspace(-300, 300, 101)
    check_close(returns.rescale_value(x), rlax.signed_hyperbolic(x), rtol=1e-6)
    check_close(returns.unrescale_value(x), rlax.signed_parabolic(x), rtol=1e-4)


@pytest.mark.slow
def test_masked_mean_ignores_what_is_not_valid():
    x, valid = jnp.array([1.0, jnp.nan, 3.0]), jnp.array([True, False, True])
    assert losses.masked_mean(x, valid) == 2.0
    assert losses.masked_mean(x, jnp.zeros(3, bool)) == 0.0
    assert (jax.grad(losses.masked_mean)(x, valid) == jnp.array([0.5, 0.0, 0.5])).all()


def test_explained_variance():
    target, valid = np.float32([1.0, 2.0, 3.0, 99.0]), np.array([True, True, True, False])
    explained = jax.jit(losses.explained_variance)
    check_close(explained(target, target, valid), 1.0)
    check_close(explained(np.full(4, 7.0, np.float32), target, valid), 0.0)
    check_close(explained(target, np.full(4, 0.1, np.float32), valid), 0.0)
