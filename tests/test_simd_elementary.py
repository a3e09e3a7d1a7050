"""How far the elementary functions are from the truth, in units in the last place, and their limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from elementary_claims import CLAIMS, Claim
from seedbed.llvm import host_vector_unit
from seedbed.simd import vectorize
from seedbed.simd.frontend.trace import trace
from seedbed.simd.frontend.trigonometry import LARGEST_ANGLE
from seedbed.simd.store import build
from simd_reference import evaluate

pytestmark = pytest.mark.usefixtures("no_fallback")

WIDTHS = [w for w in (4, 8, 16) if w <= host_vector_unit().width]
SAMPLES = 20_000


PAIRS = [
    Claim(lax.atan2, np.arctan2, (-2, 2), (1e-10, 1e10), 1.7),
    Claim(lax.pow, np.power, (0.1, 10), (1e-4, 1e4), 1.2),
    Claim(lambda x, y: lax.pow(x, 32 * y), lambda x, y: x ** (32 * y), (0.5, 2), None, 1.2),
]


def traced(function, *dtypes):
    structs = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
    return trace(jax.make_jaxpr(function)(*structs), [False] * len(dtypes), limit=10_000)


def by_reference(function):
    def run(*columns):
        return evaluate(traced(function, *(c.dtype for c in columns)), columns)

    return run


ENGINES = [by_reference, vectorize]


def samples(claim, rng):
    even = rng.uniform(*claim.even, SAMPLES).astype(np.float32)
    if claim.scaled is None:
        return np.concatenate([even, even[::-1]])
    size = np.exp(rng.uniform(*np.log(claim.scaled), SAMPLES))
    sign = rng.choice([-1, 1], SAMPLES) if claim.even[0] < 0 else 1
    return np.concatenate([even, np.clip(size, *claim.scaled) * sign]).astype(np.float32)


def errors(got, true):
    """Distance in units in the last place of the rounded truth."""
    with np.errstate(all="ignore"):
        ulp = np.spacing(np.abs(true.astype(np.float32))).astype(np.float64)
        return np.abs(np.asarray(got, np.float64) - true) / ulp


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("claims", [CLAIMS, PAIRS], ids=["one operand", "two operands"])
def test_errors_are_as_claimed(claims, engine):
    rng = np.random.default_rng(0)
    operands = 1 if claims is CLAIMS else 2
    columns = [[samples(claim, rng) for _ in range(operands)] for claim in claims]

    def function(*args):
        return [c.function(*a) for c, a in zip(claims, args, strict=True)]

    def flat(*args):
        return function(*(args[i : i + operands] for i in range(0, len(args), operands)))

    results = engine(flat)(*(column for group in columns for column in group))
    for number, (claim, group, got) in enumerate(zip(claims, columns, results, strict=True)):
        with np.errstate(over="ignore"):
            true = claim.truth(*(c.astype(np.float64) for c in group))
        normal = (np.abs(true) < 3.4e38) & (np.abs(true) > 2e-38)
        error = np.where(normal, errors(got, true), 0)
        worst = int(np.argmax(error))
        assert error[worst] <= claim.ulps, (number, claim, [c[worst] for c in group], error[worst])


@pytest.mark.parametrize("engine", ENGINES)
def test_large_angles_keep_their_absolute_error(engine):
    x = np.random.default_rng(0).uniform(-1e5, 1e5, SAMPLES).astype(np.float32)
    sine, cosine = engine(lambda x: [lax.sin(x), lax.cos(x)])(x)
    np.testing.assert_allclose(sine, np.sin(x.astype(np.float64)), rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(cosine, np.cos(x.astype(np.float64)), rtol=0, atol=1.5e-7)


@pytest.mark.parametrize("engine", ENGINES)
def test_angles_too_large_to_tell_are_zero(engine):
    x = np.array([LARGEST_ANGLE * 1.01, -1e30, np.inf, np.nan], np.float32)
    sine, cosine = engine(lambda x: [lax.sin(x), lax.cos(x)])(x)
    np.testing.assert_array_equal(sine, [0, 0, np.nan, np.nan])
    np.testing.assert_array_equal(cosine, [1, 1, np.nan, np.nan])


@pytest.mark.parametrize("engine", ENGINES)
def test_results_stay_within_one(engine):
    x = np.linspace(-12, 12, 200_001, dtype=np.float32)
    for function in (lax.tanh, lax.erf, lax.sin, lax.cos, lax.logistic):
        (result,) = engine(lambda x, f=function: [f(x)])(x)
        assert np.abs(result).max() <= 1, function


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("function", "last", "first"),
    [
        (lax.exp, 88.72283, 88.72284),
        (lax.exp2, 127.99999, 128.0),
        (lax.expm1, 88.72283, 88.72284),
        (lax.sinh, 89.41598, 89.416),
        (lax.cosh, 89.41598, 89.416),
    ],
)
def test_overflow_where_the_result_is_too_large(function, last, first, engine):
    (result,) = engine(lambda x: [function(x)])(np.array([last, first, 1e30], np.float32))
    assert 3.3e38 < result[0] < np.inf
    assert (np.asarray(result[1:]) == np.inf).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_remainders_are_exact(engine):
    rng = np.random.default_rng(0)
    y = np.exp(rng.uniform(-30, 30, SAMPLES)) * rng.choice([-1, 1], SAMPLES)
    x = y * np.exp(rng.uniform(-3, 18, SAMPLES)) * rng.choice([-1, 1], SAMPLES)
    x, y = x.astype(np.float32), y.astype(np.float32)
    x[::4] = (np.rint(x[::4] / y[::4]) * y[::4]).astype(np.float32)  # whole quotients, or nearly
    (result,) = engine(lambda x, y: [lax.rem(x, y)])(x, y)
    np.testing.assert_array_equal(result, np.fmod(x, y))


@pytest.mark.parametrize("engine", ENGINES)
def test_powers_in_special_cases(engine):
    values = [0.0, 0.5, 1.0, 2.0, 3.0, 5.5, 1e10, 1e30, np.inf]
    values = np.array([*values, *(-v for v in values), np.nan], np.float32)
    x, y = (a.reshape(-1) for a in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        true = np.power(x, y)
    (result,) = engine(lambda x, y: [lax.pow(x, y)])(x, y)
    np.testing.assert_allclose(result, true, rtol=2e-7)
    np.testing.assert_array_equal(np.signbit(result), np.signbit(true) & ~np.isnan(true))


@pytest.mark.skipif(len(WIDTHS) < 2, reason="one width only")
def test_widths_agree_bit_for_bit(monkeypatch):
    x = np.concatenate([np.linspace(-3, 3, 999), np.geomspace(1e-37, 1e38, 999)]).astype(np.float32)

    def function(x):
        return [claim.function(x) for claim in CLAIMS] + [lax.pow(jnp.abs(x), x)]

    results = []
    for width in WIDTHS:
        monkeypatch.setattr(build, "lanes", lambda width=width: width)
        results.append(vectorize(function)(x))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_float64_is_evaluated_in_float64():
    x = np.concatenate([np.linspace(0.01, 0.99, 99), 1 - np.geomspace(1e-15, 1e-3, 9)])
    with jax.enable_x64(True):
        functions = [claim.function for claim in CLAIMS if claim.function is not lax.acosh]
        results = by_reference(lambda x: [f(x) for f in functions])(x)
        (power,) = by_reference(lambda x, y: [lax.pow(x, y)])(x, x[::-1].copy())
        (acosh,) = by_reference(lambda x: [lax.acosh(x)])(x + 1)
    truths = [claim.truth for claim in CLAIMS if claim.function is not lax.acosh]
    for truth, result in zip(truths, results, strict=True):
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, truth(x), rtol=1e-14)
    np.testing.assert_allclose(power, x ** x[::-1], rtol=1e-14)
    np.testing.assert_allclose(acosh, np.arccosh(x + 1), rtol=1e-14)


def test_cube_roots_of_denormal_numbers_are_zero():
    x = jnp.asarray([1e-40, -1e-40, 0.0, -0.0, 2.0**-126, -8.0, np.inf, np.nan], jnp.float32)
    found = np.asarray(vectorize(jnp.cbrt)(x))
    np.testing.assert_allclose(found, [0, 0, 0, 0, 2.0**-42, -2, np.inf, np.nan], rtol=1e-6)
    np.testing.assert_array_equal(np.signbit(found[:4]), [False, True, False, True])
