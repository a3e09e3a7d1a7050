"""Kernels of every width, and those for aarch64, agree bit for bit; only the payloads of NaN may differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import composer as fuzz
import elementary_claims as elementary
import elsewhere
import mujoco_states as oracle
import scalar_rules as rules
from seedbed import physics
from seedbed.ffi import register_object
from seedbed.llvm import Target, compile_object, host_target
from seedbed.simd.cpu.compiler import compile_program, lanes, program_module
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import Program
from seedbed.simd.vectorize import trace_example

ROWS = 37  # two tiles of 16 and a part of one
TAPES = 12  # of fuzzed programs
on_aarch64 = pytest.mark.skipif(
    bool(elsewhere.MISSING), reason=f"needs the Debian packages {' '.join(elsewhere.MISSING)}"
)
fused = pytest.mark.skipif(
    not host_target().fused_multiply_add, reason="this CPU rounds multiply-adds twice"
)


class Case(NamedTuple):
    """A program and the operands of all its rows."""

    program: Program
    operands: list[np.ndarray]


def traced(function: Callable[..., Any], rows: Any, shared: Any = ()) -> Case:
    """The program of a function of (one row of `rows`, `shared`)."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    all_rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shared)
    example = trace_example(function, "function", ((*one, *all_rows), {}))
    operands = [*map(np.asarray, jax.tree.leaves((rows, shared)))]
    flags = [False] * len(jax.tree.leaves(rows)) + [True] * len(jax.tree.leaves(shared))
    assert not example.shared
    return Case(trace(example.closed, flags), operands)


def of_physics(name: str) -> Case:
    """A step of a model from states of its rollouts, with contacts and joints at their limits."""
    model, cases = physics.load(oracle.path(name)), oracle.cases(oracle.path(name), ROWS)
    blank = physics.init(model)
    state = jax.tree.map(lambda x: np.broadcast_to(x, (ROWS, *x.shape)), blank)
    qpos, qvel, ctrl, warmstart = (np.asarray(x, np.float32) for x in cases)
    state = state._replace(qpos=qpos, qvel=qvel, qacc_warmstart=warmstart)
    return traced(lambda state, ctrl: physics.step(model, state, ctrl), (state, ctrl))


def of_fuzz(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    tape = rng.bytes(300)
    x = rng.integers(-50, 50, (ROWS, 3)).astype(np.int32)
    n, shared = rng.integers(-9, 99, ROWS).astype(np.int32), np.int32(rng.integers(0, 9))
    with fuzz.addresses(seed):
        return traced(lambda x, n, s: fuzz.Composer(tape).program(x, n, s), (x, n), (shared,))


def of_elementary_functions() -> Case:
    x = np.concatenate([np.linspace(-3, 3, 999), np.geomspace(1e-37, 1e38, 999)]).astype(np.float32)

    def function(x):
        return [c.function(x) for c in elementary.CLAIMS] + [lax.pow(jnp.abs(x), x)]

    return traced(function, (x,))


def of_rules(subnormal: bool) -> Case:
    """All elementwise rules on special values and on drawn ones; or on subnormal ones, which count as zero.

    The remainder of floats is the C library's, and not every library sees zero in a subnormal number.
    """
    cases = {
        n: c for n, c in rules.CASES.items() if not (subnormal and n.startswith("rem-float32"))
    }
    rng, count, columns = np.random.default_rng(0), 2000, {}
    for kind, values in rules.SPECIAL.items():
        dtype = np.dtype(rules.DTYPES.get(kind, kind))
        drawn = rng.choice(np.array(values, dtype), (3, count))
        if dtype.itemsize == 4 and kind != "index":
            bits = rng.integers(0, 2**32, (3, count), np.uint32).view(dtype)
            if kind == "float32":
                small = (bits.view(np.uint32) & 0x807FFFFF).view(dtype)
                bits = small if subnormal else np.where(np.abs(bits) > rules.TINY, bits, drawn)
            drawn = np.where(rng.random((3, count)) < 0.5, bits, drawn)
        columns[kind] = list(drawn)

    def function(columns):
        made = []
        for case in cases.values():
            places = [case.dtypes[:i].count(kind) for i, kind in enumerate(case.dtypes)]
            given = [columns[k][p] for k, p in zip(case.dtypes, places, strict=True)]
            made.append(case.function(*given))
        return made

    return traced(function, (columns,))


CASES: dict[str, Callable[[], Case]] = {
    "rules": functools.partial(of_rules, subnormal=False),
    "subnormal": functools.partial(of_rules, subnormal=True),
    "elementary": of_elementary_functions,
    **{f"fuzz-{seed}": functools.partial(of_fuzz, seed) for seed in range(TAPES)},
    **{name: functools.partial(of_physics, name) for name in oracle.MODELS},
}
QUICK = ("elementary", "fuzz-0", "fuzz-1", "inverted_double_pendulum")
every_case = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)


@functools.cache
def case(name: str) -> Case:
    return CASES[name]()


@functools.cache
def here(name: str, width: int) -> list[np.ndarray]:
    """Runs a program on this machine at a width; vectors that are wider than registers are several."""
    program, operands = case(name)
    types = elsewhere.results(program, len(operands[0]))
    target = register_object("test", compile_program(program, width).code)
    run = jax.ffi.ffi_call(target, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in types])
    return [*map(np.asarray, jax.jit(run)(*operands))]


def assert_same_bits(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        kind = np.uint8 if a.dtype == bool else np.uint32
        same = (a.view(kind) == b.view(kind)) | ((a != a) & (b != b))
        assert same.all(), f"result {i}: {a[~same][:5]} is not {b[~same][:5]}"


@pytest.mark.quick("fuzz-0")
@every_case
def test_widths_agree(name):
    for width in (8, 16):
        assert_same_bits(here(name, width), here(name, 4))


@on_aarch64
@fused
@every_case
def test_aarch64_agrees(name, tmp_path):
    program, operands = case(name)
    got = elsewhere.on_aarch64(program, operands, len(operands[0]), tmp_path)
    assert_same_bits(got, here(name, lanes()))


def test_macs_get_an_object_file():
    target = Target("arm64-apple-darwin", "apple-m1")
    code = compile_object(program_module(case("fuzz-0").program, 4, target), target)
    magic, cpu = np.frombuffer(code[:8], np.uint32)
    assert (magic, cpu) == (0xFEEDFACF, 0x0100000C)  # Mach-O of 64 bits, arm64
