"""Programs as functions of a WebAssembly module: their bits are those of this CPU's kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import composer as fuzz
from control_flow import PROGRAMS, batch
from gpu_host import assert_same_bits
from seedbed.llvm import compile_foreign, host_target
from seedbed.simd import vectorize
from seedbed.simd.frontend.trace import trace
from seedbed.simd.wasm.linking import link
from seedbed.simd.wasm.module import PROCESSOR
from seedbed.simd.wasm.pieces import in_pieces
from wasm_host import Module, unpack, wasm_vectorize

needs_fma = pytest.mark.skipif(
    not host_target().fused_multiply_add, reason="this CPU rounds a product before it adds"
)
SPECIAL = np.float32([0, -0.0, 1, -1.5, np.inf, -np.inf, np.nan, 1.2e-38, -1.2e-38, 3e38])


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))


def triples(count, spread):
    """Three columns of floats with exponents within `spread` of each other."""
    rng = np.random.default_rng(spread)
    sizes = np.exp2(rng.uniform(-spread, spread, (count, 3)))
    return (rng.choice([-1, 1], (count, 3)) * sizes).astype(np.float32).T


@needs_fma
@pytest.mark.parametrize("spread", [1, 12, 60, 120])
def test_arithmetic(spread):
    a, b, c = triples(2000, spread)
    # Sums that end half-way between two floats, or just beside.
    with np.errstate(over="ignore"):
        c[::5] = np.nextafter(-a[::5] * b[::5], np.float32(np.inf))
    a[1::5], b[1::5] = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    c[1::5] = np.float32(2.0**-26) * np.float32([1, -1, 2**-40, -(2**-40)])[np.arange(400) % 4]
    # A denormal operand is no result of a program.
    c[np.abs(c) < np.finfo(np.float32).tiny] = 0
    every = np.stack(np.meshgrid(SPECIAL, SPECIAL, SPECIAL), -1).reshape(-1, 3)
    a, b, c = (np.concatenate([x, y]) for x, y in zip((a, b, c), every.T, strict=True))

    def arithmetic(a, b, c):
        return a * b + c, c - a * b, a * b - c, a + b, a - b, a * b, a / b, jnp.sqrt(jnp.abs(a))

    assert_same_bits(wasm_vectorize(arithmetic)(a, b, c), vectorize(arithmetic)(a, b, c))


@needs_fma
def test_functions_and_conversions():
    a, b, _ = triples(1000, 8)
    a[:10], b[:10] = SPECIAL, SPECIAL[::-1]

    def functions(a, b):
        whole = (a * 100).astype(jnp.int32)
        return (
            [f(a) for f in (jnp.exp, jnp.log, jnp.sin, jnp.cos, jnp.tanh, jnp.floor, jnp.round)],
            (
                lax.rem(a, b),
                jnp.maximum(a, b),
                jnp.minimum(a, b),
                jnp.arctan2(a, b),
                a > b,
                ~(a < b),
            ),
            (whole // 7, whole % 5, whole << 3, whole >> 2, whole.astype(jnp.float32) * 0.1),
            (a.astype(jnp.uint32), lax.bitcast_convert_type(b, jnp.int32)),
        )

    assert_same_bits(wasm_vectorize(functions)(a, b), vectorize(functions)(a, b))


@needs_fma
@pytest.mark.parametrize("function", PROGRAMS)
def test_control_flow(function):
    x, n = batch(11)
    assert_same_bits(wasm_vectorize(function)(x, n), vectorize(function)(x, n))


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(max(3, fuzz.EXAMPLES // 4)))
def test_programs_composed_at_random(seed):
    tape, rng = np.random.default_rng(seed).bytes(300), np.random.default_rng(seed)
    x = rng.integers(-50, 50, (fuzz.ROWS, 3)).astype(np.int32)
    n = rng.integers(-9, 99, fuzz.ROWS).astype(np.int32)

    def program(x, n):
        return fuzz.Composer(tape).program(x, n, jnp.int32(4))

    assert_same_bits(wasm_vectorize(program)(x, n), vectorize(program)(x, n))


@needs_fma
@pytest.mark.parametrize("function", [*PROGRAMS, "composed"])
def test_pieces_have_the_bits_of_the_whole(function, monkeypatch):
    """Every few lines become a function of their own, in loops and branches, too."""
    passed = []

    def cut(module, functions):
        text, size = in_pieces(module, functions, most=3)
        passed.append(size)
        return text, size

    monkeypatch.setattr("seedbed.simd.wasm.module.in_pieces", cut)
    # What is passed has no other room than what was asked for.
    monkeypatch.setattr("seedbed.simd.wasm.module._SPARE", 0)
    x, n = batch(11)
    if function == "composed":
        tape = np.random.default_rng(0).bytes(300)

        def function(x, n):
            return fuzz.Composer(tape).program(x.astype(jnp.int32), n, jnp.int32(4))

    assert_same_bits(wasm_vectorize(function)(x, n), vectorize(function)(x, n))
    assert min(passed) > 0


def test_keys_cross():
    keys = jax.random.split(jax.random.key(3), 5)

    def draw(key):
        key, own = jax.random.split(key)
        return key, jax.random.uniform(own, (3,))

    assert_same_bits(wasm_vectorize(draw)(keys), vectorize(draw)(keys))


def test_programs_of_one_module_keep_their_tables_and_operands_apart():
    """Large constants, shared arrays in memory, and arrays on the stack, in two functions."""
    rng = np.random.default_rng(0)
    tables = rng.normal(size=(2, 5000)).astype(np.float32)
    weights = rng.normal(size=(96, 64)).astype(np.float32)

    def picks(number):
        def pick(i):
            found = lax.fori_loop(
                0, 9, lambda k, a: a.at[k].set(jnp.asarray(tables[number])[i + k]), jnp.zeros(9)
            )
            return found, found[i % 9]

        return trace(jax.make_jaxpr(pick)(jnp.int32(0)), [False])

    def product(weights, x):
        return x @ weights

    many = trace(jax.make_jaxpr(product)(weights, weights[:, 0]), [True, False])
    programs = {"first": picks(0), "second": picks(1), "product": many}
    module = Module(programs)
    for name, table in zip(programs, tables, strict=False):
        for i in (0, 17, 4990):
            got = unpack(module.call(name, np.uint32([i])), programs[name])
            np.testing.assert_array_equal(got[0], table[i : i + 9])
            assert got[1] == table[i + i % 9]
    x = weights[:, 3].copy()
    (got,) = unpack(module.call("product", x.view(np.uint32), [weights]), many)
    np.testing.assert_allclose(got, x @ weights, rtol=1e-4, atol=1e-4)


def test_a_large_matrix_becomes_a_loop():
    """A policy's layer, whose weights are in memory, does not grow with its size."""

    def nodes(size):
        weights = np.zeros((size, size), np.float32)
        program = trace(jax.make_jaxpr(jnp.dot)(weights[0], weights), [False, True])
        return len(program.graph.nodes)

    assert nodes(512) < 3 * nodes(256) < 30_000


def test_a_function_from_outside_is_refused():
    text = """declare float @sinf(float)
    define float @f(float %x) {
      %y = call float @sinf(float %x)
      ret float %y
    }"""
    with pytest.raises(ValueError, match="imports env.sinf"):
        link(compile_foreign(text, PROCESSOR), ["f"], 0)
