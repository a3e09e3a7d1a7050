"""Action distributions against scipy, numerical integrals and samples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from seedbed.ops.distributions import (
    Scales,
    action_vector,
    distribution,
    log_slope,
    parameter_size,
    squash,
    squashed_entropy,
)
from seedbed.types import Box, Discrete, MultiDiscrete, SeedbedError, action_array

INF = float("inf")
LINE = Box((3,), (-INF,) * 3, (INF,) * 3)
BOUNDED = Box((2,), (-2.0, 0.0), (1.0, 10.0))
MIXED = Box((2,), (-1.0, -INF), (1.0, INF))
SQUARE = Box((2, 2), (-1.0,) * 4, (1.0,) * 4)
ONE_SIDED = Box((4,), (2.0, -INF, 0.0, -INF), (INF, 3.0, 1.0, INF))
SPECS = (
    Discrete(5),
    MultiDiscrete((2, 3, 4)),
    LINE,
    BOUNDED,
    MIXED,
    SQUARE,
    ONE_SIDED,
    Box((), (0.0,), (1.0,)),
)
SCALES = Scales(initial=0.7, least=0.001)
LOGITS = st.lists(st.floats(-30, 30, width=32), min_size=9, max_size=9)


def policy_of(spec, parameters):
    return distribution(spec, parameters, SCALES)


def parameters(spec, seed=0, batch=()):
    size = (*batch, parameter_size(spec))
    return jnp.asarray(np.random.default_rng(seed).normal(size=size), jnp.float32)


@pytest.mark.quick("Disc*", "Multi*", "*low=(2.0, -inf*")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shapes_dtypes_and_bounds_for_every_action(spec):
    array = action_array(spec)

    @jax.jit
    def describe(parameters):
        policy = policy_of(spec, parameters)
        draws = policy.sample(jax.random.key(0)), policy.mode()
        log_probs = [policy.log_prob(draw) for draw in draws]
        box = isinstance(spec, Box)
        actions = [squash(spec, draw, "tanh") if box else draw for draw in draws]
        return actions, [*log_probs, policy.entropy()], policy.kl(policy)

    for batch in ((), (2, 3)):
        actions, numbers, kl = describe(parameters(spec, batch=batch))
        for action in actions:
            assert action.shape == batch + array.shape
            assert action.dtype == array.dtype
            if isinstance(spec, Box):
                flat = np.asarray(action).reshape(*batch, -1)
                assert (flat >= np.array(spec.low)).all() and (flat <= np.array(spec.high)).all()
        assert {number.shape for number in (*numbers, kl)} == {batch}
        np.testing.assert_allclose(kl, 0, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_entropy_is_the_mean_of_minus_log_prob(spec):
    one = parameters(spec)

    @jax.jit
    def estimates(parameters):
        policy = policy_of(spec, parameters)
        return policy.log_prob(policy.sample(jax.random.key(1))), policy.entropy()[0]

    log_prob, entropy = estimates(jnp.broadcast_to(one, (20_000, *one.shape)))
    error = 4 * float(log_prob.std()) / 20_000**0.5
    assert abs(float(entropy + log_prob.mean())) < error + 0.02


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(LOGITS, st.integers(0, 8))
def test_categorical_against_scipy(logits, action):
    policy = policy_of(Discrete(9), jnp.asarray(logits, jnp.float32))
    p = scipy.special.softmax(np.asarray(logits, np.float64))
    log_p = scipy.special.log_softmax(np.asarray(logits, np.float64))
    np.testing.assert_allclose(
        policy.log_prob(jnp.asarray(action)), log_p[action], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(policy.entropy(), scipy.stats.entropy(p), rtol=1e-4, atol=1e-5)
    uniform = policy_of(Discrete(9), jnp.zeros(9))
    np.testing.assert_allclose(
        policy.kl(uniform), scipy.stats.entropy(p, np.ones(9) / 9), rtol=1e-4, atol=1e-5
    )
    parts = [np.asarray(logits[:2]), np.asarray(logits[2:5]), np.asarray(logits[5:])]
    multi = policy_of(MultiDiscrete((2, 3, 4)), jnp.asarray(logits, jnp.float32))
    expected = sum(scipy.special.log_softmax(x)[i] for i, x in enumerate(parts))
    np.testing.assert_allclose(multi.log_prob(jnp.array([0, 1, 2])), expected, rtol=1e-4, atol=1e-5)
    entropy = sum(scipy.stats.entropy(scipy.special.softmax(x)) for x in parts)
    np.testing.assert_allclose(multi.entropy(), entropy, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_normal_against_scipy(seed):
    policy = policy_of(LINE, 3 * parameters(LINE, seed))
    reference = scipy.stats.norm(np.asarray(policy.mean, float), np.asarray(policy.scale, float))
    x = np.asarray(policy.mean) + np.array([0.5, -3.0, 0.0], np.float32)
    np.testing.assert_allclose(policy.log_prob(x), reference.logpdf(x).sum(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(policy.entropy(), reference.entropy().sum(), rtol=1e-4, atol=1e-4)


def test_kl_of_normals_is_the_integral():
    p, q = (policy_of(LINE, parameters(LINE, seed)) for seed in (1, 2))
    total = 0.0
    for m, s, m2, s2 in zip(p.mean, p.scale, q.mean, q.scale, strict=True):
        x = np.linspace(m - 12 * s, m + 12 * s, 20_001)
        log_p = scipy.stats.norm.logpdf(x, m, s)
        total += np.trapezoid(np.exp(log_p) * (log_p - scipy.stats.norm.logpdf(x, m2, s2)), x)
    np.testing.assert_allclose(p.kl(q), total, rtol=1e-4)


@jax.jit
def saturated(one):
    """The scales of a policy, numbers that must be finite, and actions."""
    policy, key = policy_of(BOUNDED, one), jax.random.key(0)
    draws = policy.sample(key), policy.mode()
    scored = jax.value_and_grad(lambda p, draw: policy_of(BOUNDED, p).log_prob(draw), (0, 1))
    entropy = jax.value_and_grad(lambda p: policy_of(BOUNDED, p).entropy())(one)
    actions = [squash(BOUNDED, draw, by) for draw in draws for by in ("tanh", "clip")]
    return policy.scale, ([scored(one, draw) for draw in draws], entropy), actions


@pytest.mark.parametrize("mean", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("raw_scale", [-30.0, 30.0])
def test_saturated_policies_stay_finite_and_within_their_bounds(mean, raw_scale):
    scale, finite, actions = saturated(np.float32([mean, mean, raw_scale, raw_scale]))
    assert (scale >= SCALES.least).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(finite))
    for action in actions:
        assert (action >= np.array(BOUNDED.low)).all()
        assert (action <= np.array(BOUNDED.high)).all()


def test_scales_begin_where_they_should():
    policy = policy_of(BOUNDED, jnp.zeros(4))
    np.testing.assert_allclose(policy.scale, SCALES.initial, rtol=1e-6)


def test_networks_are_fed_actions_as_vectors():
    def vector(spec, action):
        return np.asarray(action_vector(spec, jnp.asarray(action)))

    np.testing.assert_array_equal(vector(Discrete(3), [2, 0]), [[0, 0, 1], [1, 0, 0]])
    np.testing.assert_array_equal(
        vector(MultiDiscrete((2, 3)), [[[1, 0], [0, 2]]]), [[[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]]
    )
    # Where the bounds are -1 and 1; an element without bounds stays as it is.
    np.testing.assert_allclose(vector(BOUNDED, [[-2.0, 10.0], [-0.5, 5.0]]), [[-1, 1], [0, 0]])
    np.testing.assert_allclose(vector(MIXED, [0.5, 7.0]), [0.5, 7.0])
    assert vector(SQUARE, np.zeros((5, 2, 2), np.float32)).shape == (5, 4)
    assert vector(Box((), (0.0,), (1.0,)), np.zeros(5, np.float32)).shape == (5, 1)


def test_an_impossible_choice_is_never_taken_and_spoils_no_gradient():
    logits = jnp.array([0.0, -jnp.inf, 1.0])

    def entropy(x):
        return policy_of(Discrete(3), x).entropy()

    draws = policy_of(Discrete(3), jnp.tile(logits, (500, 1))).sample(jax.random.key(0))
    assert 1 not in draws
    np.testing.assert_allclose(entropy(logits), scipy.stats.entropy([1, np.e]), rtol=1e-5)
    assert jnp.isfinite(jax.grad(entropy)(logits)).all()


def test_squashing_reaches_each_bound_and_nothing_beyond():
    x = jnp.array([[-60.0] * 4, [-1.0] * 4, [0.0] * 4, [1.0] * 4, [60.0] * 4])
    clipped = squash(ONE_SIDED, x, "clip")
    assert clipped[1:4].tolist() == [[2, 1, 0, -1], [3, 2, 0.5, 0], [4, 3, 1, 1]]
    soft = squash(ONE_SIDED, x, "tanh")
    np.testing.assert_allclose(soft[2], [2 + np.log(2), 3 - np.log(2), 0.5, 0], rtol=1e-6)
    for y in (clipped, soft):
        np.testing.assert_allclose(y[0, [0, 2]], [2, 0], atol=1e-6)
        np.testing.assert_allclose(y[-1, [1, 2]], [3, 1], atol=1e-6)
        assert (np.diff(y, axis=0) >= 0).all() and (y[-1, [0, 3]] > 50).all()


@pytest.mark.quick("spec0", "spec1", "spec3")
@pytest.mark.parametrize("spec", [BOUNDED, MIXED, ONE_SIDED, LINE])
def test_the_slope_of_squashing_is_its_derivative(spec):
    size = len(spec.low)
    x = jnp.linspace(-3, 3, 7)[:, None] + 0.1 * jnp.arange(size)[None]
    slopes = jax.vmap(jax.jacfwd(lambda row: squash(spec, row, "tanh")))(x)
    both = np.isfinite(spec.low) & np.isfinite(spec.high)
    half = np.where(both, (np.asarray(spec.high) - spec.low) / 2, 1.0)
    each = np.log(np.diagonal(slopes, axis1=1, axis2=2) / half)
    np.testing.assert_allclose(log_slope(spec, x), each.sum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.quick("spec1")
@pytest.mark.parametrize("spec", [BOUNDED, MIXED, ONE_SIDED, LINE])
def test_the_entropy_of_squashed_draws_moves_with_the_policy(spec):
    """It is that at draws which keep their noise, and has the gradient of that by mean and scale."""
    size = len(spec.low)
    parameters = 0.3 * jax.random.normal(jax.random.key(0), (5, 2 * size))
    draw = policy_of(spec, 1.1 * parameters).sample(jax.random.key(1))

    def plain(parameters):
        policy = policy_of(spec, parameters)
        noise = jax.lax.stop_gradient((draw - policy.mean) / policy.scale)
        moved = policy.mean + policy.scale * noise
        return (policy.entropy() + log_slope(spec, moved)) @ jnp.arange(1.0, 6.0)

    def found(parameters):
        entropy = squashed_entropy(spec, policy_of(spec, parameters), draw, "tanh")
        return entropy @ jnp.arange(1.0, 6.0)

    (a, da), (b, db) = (jax.value_and_grad(f)(parameters) for f in (plain, found))
    np.testing.assert_allclose(b, a, rtol=1e-5)
    np.testing.assert_allclose(db, da, rtol=1e-4, atol=1e-5)


def test_empty_bounds_are_refused():
    for low, high in ((1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0), (1e9, 1e9 + 1)):
        with pytest.raises(
            SeedbedError, match="give every element low < high|is no range of numbers"
        ):
            policy_of(Box((1,), (low,), (high,)), jnp.zeros(2))
