"""Every elementwise rule against jax.vmap of the primitive, by the reference evaluator and by the kernel.

Primitives of the same types of operands are tested by one function, to save compilations.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import primitives

from scalar_rules import CASES, DTYPES, SPECIAL, TINY, Case
from seedbed.simd import vectorize
from seedbed.simd.frontend.rules import RULES
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import Unsupported
from simd_reference import evaluate

pytestmark = pytest.mark.usefixtures("no_fallback")

ROWS = 1024
VALUES = {
    "float32": st.floats(width=32, allow_subnormal=False) | st.sampled_from(SPECIAL["float32"]),
    "int32": st.integers(-(2**31), 2**31 - 1) | st.sampled_from(SPECIAL["int32"]),
    "uint32": st.integers(0, 2**32 - 1) | st.sampled_from(SPECIAL["uint32"]),
    "bool": st.booleans(),
    "index": st.sampled_from(SPECIAL["index"]),
}


FLOAT, INT, UINT, BOOL = "float32", "int32", "uint32", "bool"


def add(functions, *signatures, rtol=None, **params):
    for function in functions:
        for dtypes in signatures:
            case = Case(functools.partial(function, **params), dtypes, rtol)
            CASES["-".join([function.__name__, *map(str, params.values()), *dtypes])] = case


def pairs(*kinds):
    return [(kind, kind) for kind in kinds]


def singles(*kinds):
    return [(kind,) for kind in kinds]


def total_eq(a, b):
    """Comparisons in which -0 is before 0, and a NaN behind infinity: sorted searches have them."""
    return primitives.eq_to_p.bind(a, b)


def total_lt(a, b):
    return primitives.lt_to_p.bind(a, b)


def total_le(a, b):
    return primitives.le_to_p.bind(a, b)


def within(largest, function):
    """The same function, of 1 where the argument is larger."""

    @functools.wraps(function)
    def bounded(x):
        return function(jnp.where(abs(x) <= largest, x, 1.0))

    return bounded


def gradient(x, y):
    """Holds `add_any`."""
    return jax.vjp(lambda x: (x, x), x)[1]((x, y))[0]


add([lax.add, lax.sub, lax.mul, lax.div, lax.rem], *pairs(FLOAT, INT, UINT))
add([lax.max, lax.min], *pairs(FLOAT, INT, UINT, BOOL))
add([lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge], *pairs(FLOAT, INT, UINT, BOOL))
add([total_eq, total_lt, total_le], *pairs(FLOAT, INT))
add([lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor], *pairs(INT, UINT, BOOL))
add([lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic], *pairs(INT, UINT))
add([lax.mulhi], *pairs(INT, UINT))
add([lax.neg, lax.sign, lax.square], *singles(FLOAT, INT, UINT))
add([lax.abs], *singles(FLOAT, INT))
add([lax.bitwise_not], *singles(INT, UINT, BOOL))
add([lax.population_count, lax.clz], *singles(INT, UINT))
add([lax.stop_gradient, jnp.copy], *singles(FLOAT, INT, UINT, BOOL))
for kind in (FLOAT, INT, UINT, BOOL):
    add([lax.convert_element_type], *singles(FLOAT, INT, UINT, BOOL), new_dtype=kind)
    add([lax.select_n], (BOOL, kind, kind), ("index", kind, kind, kind))
for kind in (FLOAT, INT, UINT):
    add([lax.bitcast_convert_type], *singles(FLOAT, INT, UINT), new_dtype=kind)
    add([lax.clamp], (kind, kind, kind))
for method in lax.RoundingMethod:
    add([lax.round], (FLOAT,), rounding_method=method)
for exponent in (-3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 10):
    add([lax.integer_pow], (FLOAT,), rtol=1e-6, y=exponent)
for exponent in (0, 1, 2, 3, 5, 10):
    add([lax.integer_pow], (INT,), y=exponent)
add([lax.floor, lax.ceil, lax.is_finite, lax.sqrt], (FLOAT,))
add([lax.reduce_precision], (FLOAT,), exponent_bits=8, mantissa_bits=23)
add([lax.nextafter, gradient], (FLOAT, FLOAT))
add([lax.pow], (FLOAT, FLOAT), (FLOAT, INT), rtol=1e-6)
add([lax.atan2], (FLOAT, FLOAT), rtol=1e-6)
add([lax.rsqrt, lax.cbrt, lax.asin, lax.acos, lax.atan], (FLOAT,), rtol=1e-6)
add([lax.expm1, lax.log, lax.log1p, lax.logistic, lax.tanh, lax.erf], (FLOAT,), rtol=1e-6)
add([lax.exp, lax.exp2, lax.sinh, lax.cosh], (FLOAT,), rtol=1e-5)
add([lax.asinh, lax.acosh, lax.atanh, lax.erfc, lax.erf_inv], (FLOAT,), rtol=1e-5)
add([within(1e5, f) for f in (lax.sin, lax.cos, lax.tan)], (FLOAT,), rtol=1e-5)
# JAX 0.10 lacks these.
if hasattr(lax, "one_minus_square"):
    add([lax.one_minus_square], *singles(FLOAT, INT, UINT))
if hasattr(lax, "log2"):
    add([lax.log2], (FLOAT,), rtol=1e-6)

SIGNATURES = sorted({case.dtypes for case in CASES.values()})


def by_reference(function, dtypes):
    structs = [jax.ShapeDtypeStruct((), d) for d in dtypes]
    program = trace(jax.make_jaxpr(function)(*structs), [False] * len(dtypes), limit=10_000)
    return lambda *columns: evaluate(program, columns)


def by_kernel(function, dtypes):
    return vectorize(function)


ENGINES = {"reference": by_reference, "kernel": by_kernel}


def flushed(array):
    """Subnormal numbers are zero, and so is the least normal one where it was one before rounding."""
    return np.where(np.abs(array) <= TINY, np.float32(0), array)


def assert_same(got, want, columns, name):
    """Compares results with the case's tolerance."""
    rtol = CASES[name].rtol
    assert got.dtype == want.dtype
    if want.dtype != np.float32:
        wrong = got != want
    elif rtol is None:
        wrong = ~((flushed(got) == flushed(want)) | (np.isnan(got) & np.isnan(want)))
    else:
        # XLA halves the argument of asin on the way, so up to twice the least normal number becomes 0.
        close = np.isclose(got, want, rtol=rtol, atol=2.4e-38, equal_nan=True)
        wrong = ~close | (np.isinf(want) != np.isinf(got))
    if wrong.any():
        i = int(np.argmax(wrong))
        given = ", ".join(repr(c[i]) for c in columns)
        raise AssertionError(f"{name}({given}) is {got[i]!r}, should be {want[i]!r}")


@pytest.mark.quick("*-kernel")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kinds", SIGNATURES, ids="-".join)
def test_rules(kinds, engine):
    cases = {name: case.function for name, case in CASES.items() if case.dtypes == kinds}
    dtypes = [DTYPES.get(kind, kind) for kind in kinds]

    def function(*args):
        return [f(*args) for f in cases.values()]

    fast, slow = ENGINES[engine](function, dtypes), jax.jit(jax.vmap(function))

    def check(columns):
        for name, got, want in zip(cases, fast(*columns), slow(*columns), strict=True):
            assert_same(np.asarray(got), np.asarray(want), columns, name)

    rng = np.random.default_rng(0)
    some = [np.array(SPECIAL[kind], dtype) for kind, dtype in zip(kinds, dtypes, strict=True)]
    if len(some) == 3:  # too many for all combinations
        check([rng.choice(values, ROWS) for values in some])
    else:
        check([np.resize(values, ROWS) for values in np.meshgrid(*some)])

    @settings(max_examples=20, deadline=None)
    @given(st.tuples(*(st.lists(VALUES[kind], min_size=20, max_size=30) for kind in kinds)))
    def drawn(lists):
        check([np.resize(np.array(x, d), ROWS) for x, d in zip(lists, dtypes, strict=True)])

    drawn()


def test_every_rule_is_tested():
    met = set()
    for case in CASES.values():
        structs = [jax.ShapeDtypeStruct((), DTYPES.get(kind, kind)) for kind in case.dtypes]
        jaxpr = jax.make_jaxpr(case.function)(*structs)
        met |= {equation.primitive.name for equation in jaxpr.eqns}
    missing = {name for name in ("one_minus_square", "log2") if not hasattr(lax, name)}
    # pvary is met inside shard_map: tests/test_vectorize.py
    assert set(RULES) - met == {"pvary"} | missing


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: lax.reduce_precision(x, 5, 10),
            "reduce_precision to 5 exponent and 10 mantissa",
        ),
        (lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), "bfloat16"),
    ],
)
def test_what_has_no_scalar_form_is_named(function, message):
    with pytest.raises(Unsupported, match=message):
        by_reference(function, [FLOAT])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_literal_zero_is_divided_as_ieee_says(engine):
    values = np.array([0.0, -0.0, np.nan, np.inf, 5.0, -5.0], np.float32)
    with np.errstate(invalid="ignore"):
        want = np.float32(0) / values
    (got,) = ENGINES[engine](lambda x: [0.0 / x], [FLOAT])(values)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got[3:]), np.signbit(want[3:]))


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_literal_zero_annihilates(zero):
    run = by_reference(lambda x: [x * zero, zero * x + 1.0], [FLOAT])
    product, total = run(np.array([np.nan, np.inf, 1.0], np.float32))
    assert (product == 0).all()
    assert (total == 1).all()
