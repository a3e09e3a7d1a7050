"""Kernels for NVIDIA GPUs, without one: the entry function on this CPU, its PTX, and XLA's custom call."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import composer as fuzz
from control_flow import PROGRAMS, batch
from gpu_host import assert_same_bits, host_kernel, host_vectorize, run
from seedbed import llvm
from seedbed.simd import vectorize
from seedbed.simd.frontend import memory
from seedbed.simd.frontend.trace import trace
from seedbed.simd.gpu.compiler import compile_program, entry_name
from seedbed.simd.gpu.kernel import kernel_ir
from seedbed.simd.store import build
from seedbed.simd.store.function import Function
from seedbed.simd.vectorize import trace_example


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def ptx_of(fn, *one):
    closed = jax.make_jaxpr(fn)(*one)
    return compile_program(trace(closed, [False] * len(one)))


# The entry function, with loops instead of blocks and threads


@pytest.mark.parametrize("function", PROGRAMS)
def test_control_flow_is_that_of_the_cpu(function):
    x, n = batch(37)
    assert_same_bits(host_vectorize(function)(x, n), vectorize(function)(x, n))


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(max(4, fuzz.EXAMPLES // 3)))
def test_programs_composed_at_random(seed):
    tape, rng = rng_tape(seed), np.random.default_rng(seed)
    x = rng.integers(-50, 50, (fuzz.ROWS, 3)).astype(np.int32)
    n, shared = rng.integers(-9, 99, fuzz.ROWS).astype(np.int32), np.int32(rng.integers(0, 9))
    closed = jax.make_jaxpr(fuzz.Composer(tape).program)(x[0], n[0], shared)
    got = run(host_kernel(closed, [False, False, True]), [x, n, shared], fuzz.ROWS)

    def all_rows(x, n, shared):
        return vectorize(lambda x, n: fuzz.Composer(tape).program(x, n, shared))(x, n)

    assert_same_bits(got, jax.tree.leaves(jax.jit(all_rows)(x, n, shared)))


def rng_tape(seed):
    return np.random.default_rng(seed).bytes(300)


def mixed(x, flag, nothing, table, again):
    """Reads and writes every type, rank and size, zero too; `table` is shared."""
    matrix = jnp.outer(x, table[:2])
    picked = jnp.where(flag[0], x + again, x * 2)
    return picked, ~flag, nothing, matrix, jnp.sum(x) > table[2], x.astype(jnp.int32) + 1


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 70])
def test_rows_and_tails(rows):
    rng = np.random.default_rng(rows)
    x, flag = rng.normal(size=(rows, 3)).astype(np.float32), rng.integers(0, 2, (rows, 2)) > 0
    nothing, table = np.zeros((rows, 0, 4), np.float32), np.float32([1.5, -2, 0.25])
    closed = jax.make_jaxpr(mixed)(x[0], flag[0], nothing[0], table, x[0])
    kernel = host_kernel(closed, [False, False, False, True, False])
    want = jax.vmap(mixed, in_axes=(0, 0, 0, None, 0))(x, flag, nothing, table, x)
    assert_same_bits(run(kernel, [x, flag, nothing, table, x], rows), want)
    # More threads than rows: they do nothing.
    many = kernel.run([x, flag, nothing, table, x], rows, blocks=5, threads=32)
    assert_same_bits(many, want)
    # Other blocks, the same rows.
    assert_same_bits(kernel.run([x, flag, nothing, table, x], rows, blocks=rows, threads=1), want)


def test_keys_cross():
    keys = jax.random.split(jax.random.key(3), 9)

    def draw(key):
        key, own = jax.random.split(key)
        return key, jax.random.uniform(own, (3,))

    assert_same_bits(host_vectorize(draw)(keys), vectorize(draw)(keys))


def test_remainders_are_exact():
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 2**32, 20_000, np.uint32).view(np.float32) for _ in range(2))
    special = np.float32([0, -0.0, 1, -1.5, np.inf, -np.inf, np.nan, 1e-45, 2e-38, 3e38])
    x[:100], y[:100] = np.repeat(special, 10), np.tile(special, 10)
    with np.errstate(all="ignore"):
        y[200:9000] = np.abs(x[200:9000]) * rng.uniform(1e-3, 1, 8800).astype(np.float32)
        want = np.fmod(x, y)
    normal = ~((np.abs(x) < 1.2e-38) | (np.abs(y) < 1.2e-38) | (np.abs(want) < 1.2e-38)) | (x == 0)
    got = host_vectorize(lax.rem)(x, y)
    assert_same_bits(got[normal], want[normal])
    # A uniform remainder is the same function.
    table = np.float32([7.5, 3.25])

    def rows(x):
        return lax.fori_loop(0, 2, lambda i, t: t + lax.rem(jnp.asarray(table)[i], 2.5) * x, x)

    assert_same_bits(host_vectorize(rows)(x[:40]), vectorize(rows)(x[:40]))


# Memory of a thread


def test_arrays_of_a_program_share_places():
    def twice(x):
        """Two arrays, each with the numbers it begins with, one after the other."""
        for start in (x, -x):

            def body(i, y, start=start):
                return y.at[i + 1].set(y[i] * 0.9 + start[0])

            y = lax.fori_loop(0, 60, body, jnp.zeros(61) + start[1])
            x = x + y[60]
        return x

    closed = jax.make_jaxpr(twice)(np.ones(3, np.float32))
    ir = kernel_ir(trace(closed, [False]))
    (size,) = re.findall(r"%local = alloca \[(\d+) x i8\]", ir)
    assert int(size) <= 3 * 4 * 61
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    assert_same_bits(host_vectorize(twice)(x), vectorize(twice)(x))


# PTX


def arithmetic(x, y):
    q = x * y + jnp.sqrt(x) / y - jnp.abs(y)
    return q, jnp.floor(q) + lax.round(q, lax.RoundingMethod.TO_NEAREST_EVEN), (x - y) * (x + y)


def test_every_sum_and_product_is_rounded_for_itself():
    text = ptx_of(arithmetic, np.float32(1), np.float32(2))
    lines = re.findall(r"^\s+((?:add|sub|mul|fma|mad|div|sqrt|ex2|rcp|rsqrt)\.\S*f32)", text, re.M)
    assert {*lines} == {f"{op}.rn.ftz.f32" for op in ("add", "sub", "mul", "fma", "div", "sqrt")}
    # The graph has one multiply-add, x * y + ..., and products of sums stay two instructions.
    assert lines.count("fma.rn.ftz.f32") == 1
    assert "approx" not in text
    assert ".version 6.3" in text
    assert ".target sm_75" in text


def test_random_bits_are_frozen_before_ptx_is_made(monkeypatch):
    """LLVM else looks for proofs for minutes, with quadratic effort; `freeze` is no instruction."""
    seen = []
    frozen = llvm._frozen
    monkeypatch.setattr(llvm, "_frozen", lambda text: seen.append(frozen(text)) or seen[-1])
    text = ptx_of(lambda key: jax.random.bits(key), jax.random.key(0))
    (passed,) = seen
    mixed = re.findall(r"%mixed\.\S+ = (xor|tail call i32 @llvm.fshl)", passed)
    assert len(mixed) == passed.count(" = freeze i32 %mixed.") > 20
    assert len(re.findall(r"\bxor\.b32", text)) == mixed.count("xor")


def signs(x, y):
    """Operations that a CPU does on the bits; those of denormal numbers stay as they are."""
    chosen = jnp.where(x < 0, -x, x), jnp.maximum(x, y), jnp.minimum(jnp.abs(x), 1.0)
    return (
        -x,
        jnp.abs(x),
        -jnp.abs(y),
        x * -1.0,
        jnp.copysign(x, y),
        lax.clamp(-1.0, x, 1.0),
        *chosen,
    )


def test_signs_of_denormal_numbers():
    special = np.float32(
        [0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1.2e-38, -1.2e-38, 1, -1, np.inf, -np.inf]
    )
    x, y = (a.ravel() for a in np.meshgrid(special, special))
    got = host_vectorize(signs)(x, y)
    assert_same_bits(got, vectorize(signs)(x, y))
    assert_same_bits(got[:3], (-x, np.abs(x), -np.abs(y)))
    text = ptx_of(signs, np.float32(1), np.float32(2))
    # No instruction but comparisons may count a denormal number as zero here.
    assert {*re.findall(r"^\s+(\w+)\S*\.ftz\S*", text, re.M)} == {"setp"}
    assert {"abs.f32", "neg.f32"} <= {*re.findall(r"^\s+(\S+)", text, re.M)}


def test_tables_are_constant_memory_as_long_as_it_lasts():
    small, large = np.arange(100, dtype=np.float32), np.arange(20_000, dtype=np.float32)

    def total(x):
        def body(i, t):
            return t * 0.5 + jnp.asarray(small)[i % 100] + jnp.asarray(large)[i]

        return lax.fori_loop(0, 20_000, body, x)

    text = ptx_of(total, np.float32(0))
    assert re.search(r"^\.const \.align 4 \.b8 table\d+\[400\]", text, re.M)
    assert re.search(r"^\.global \.align 4 \.b8 table\d+\[80000\]", text, re.M)
    assert "ld.const.b32" in text
    assert "ld.global.nc.b32" in text


def test_operands_are_read_through_the_cache_that_is_not_coherent():
    text = ptx_of(mixed_free, np.ones(3, np.float32), np.ones(2, np.bool_))
    loads = re.findall(r"ld\.global\S*", text)
    assert loads
    assert all(load.startswith("ld.global.nc.") for load in loads)
    assert ".local" not in text


def mixed_free(x, flag):
    return jnp.where(flag[0] & flag[1], x, -x), ~flag


@pytest.mark.slow
def test_too_large_for_a_thread():
    def large(x):
        return lax.fori_loop(0, 70_000, lambda i, y: y.at[i].set(x + i), jnp.zeros(70_000))[7]

    with pytest.raises(build.Unsupported, match="256 KiB"):
        ptx_of(large, np.float32(0))


def test_ptx_is_kept_on_disk(cache_folder, monkeypatch):
    closed = jax.make_jaxpr(lambda x: jnp.sqrt(x) + 31.5)(np.float32(1))
    text = build.ptx(Function.of(closed), [False])
    assert len([*cache_folder.iterdir()]) == 1
    build.target(Function.of(closed), [False])
    assert len([*cache_folder.iterdir()]) == 2
    monkeypatch.setattr(build, "_BUILDS", {})
    monkeypatch.setattr(build.gpu, "compile_program", None)
    assert build.ptx(Function.of(closed), [False]) == text


# The custom call


def lowered(fn, *args):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


GOLDEN = (
    "%0:2 = stablehlo.custom_call @__gpu$xla.gpu.ptx(%arg0, %arg1, %cst, %c) "
    '{backend_config = "", mhlo.backend_config = {block_x = 32 : i32, block_y = 1 : i32, '
    "block_z = 1 : i32, grid_x = 3 : i32, grid_y = 1 : i32, grid_z = 1 : i32, "
    'kernel_data = "PTX", kernel_type = "ptx", name = "NAME", '
    "output_indices = [4 : i32, 5 : i32], shared_mem_bytes = 0 : i32}, "
    "operand_layouts = [dense<[0, 2, 1]> : tensor<3xindex>, dense<0> : tensor<1xindex>, "
    "dense<0> : tensor<1xindex>, dense<0> : tensor<1xindex>], "
    "result_layouts = [dense<[0, 2, 1]> : tensor<3xindex>, dense<0> : tensor<1xindex>]} : "
    "(tensor<70x4x3xf32>, tensor<70xi1>, tensor<600xf32>, tensor<1xi32>) "
    "-> (tensor<70x4x3xf32>, tensor<70xi1>)"
)


def call_of(text):
    """The custom call, with NAME and PTX in place of the kernel's."""
    (line,) = (line for line in text.splitlines() if "@__gpu$xla.gpu.ptx" in line)
    line = re.sub(r'kernel_data = "(?:[^"\\]|\\.)*"', 'kernel_data = "PTX"', line)
    return re.sub(r'name = "seedbed_\w+"', 'name = "NAME"', line).strip()


def test_the_custom_call():
    table = jnp.arange(600, dtype=jnp.float32)

    def fn(x, flag):
        return jnp.where(flag, x + table[599], x[::-1]), flag

    x, flag = np.zeros((70, 4, 3), np.float32), np.zeros(70, np.bool_)
    text = lowered(vectorize(fn), x, flag)
    assert call_of(text) == GOLDEN
    example = trace_example(fn, "fn", ((x[0], flag[0]), {}))
    ptx = build.ptx(Function.of(example.closed), [False, False, True])
    (data,) = re.findall(r'kernel_data = "((?:[^"\\]|\\.)*)"', text)
    assert re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), data) == ptx
    assert f'name = "{entry_name(ptx)}"' in text
    assert "dense<70> : tensor<1xi32>" in text
    # what XLA's own compiler begins with
    hlo = jax.jit(vectorize(fn)).trace(x, flag).lower(lowering_platforms=("cuda",)).as_text("hlo")
    (call,) = (line for line in hlo.splitlines() if "custom-call(" in line)
    assert " = (f32[70,4,3]{0,2,1}, pred[70]{0}) custom-call(" in call
    layouts = "{f32[70,4,3]{0,2,1}, pred[70]{0}, f32[600]{0}, s32[1]{0}}"
    assert f"operand_layout_constraints={layouts}" in call


def test_an_operand_that_is_given_twice_is_passed_twice():
    text = lowered(lambda x: vectorize(lambda a, b: a * b)(x, x), np.zeros((5, 3), np.float32))
    assert "@__gpu$xla.gpu.ptx(%arg0, %arg0, %c)" in text
    assert text.count(".param .u64") == 4
    assert "output_indices = [3 : i32]" in text


def test_one_text_serves_all_batches():
    fn = vectorize(lambda x: x * 2 + 1)
    texts = [lowered(fn, np.zeros((rows, 3), np.float32)) for rows in (1, 64, 65)]
    data = {re.findall(r'kernel_data = "((?:[^"\\]|\\.)*)"', text)[0] for text in texts}
    assert len(data) == 1
    assert [re.findall(r"grid_x = (\d+)", t) for t in texts] == [["1"], ["2"], ["3"]]


def test_each_device_has_a_grid_of_its_own_inside_shard_map():
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("devices")
    fn = jax.shard_map(vectorize(lambda x: x * 2), mesh=mesh, in_specs=spec, out_specs=spec)
    text = lowered(fn, np.zeros((256, 3), np.float32))
    assert "dense<64> : tensor<1xi32>" in text
    assert "grid_x = 2" in text


@pytest.mark.parametrize("rows", [0, 3])
def test_without_ptx_it_is_vmap(rows):
    fn = (lambda x: jnp.sort(x)) if rows else (lambda x: x * 2)
    x = np.zeros((rows, 3), np.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        text = lowered(vectorize(fn), x)
    assert "ptx" not in text
    assert len(said) == (1 if rows else 0)


def test_an_unknown_batch_is_vmap():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3"), np.float32)
    exported = jax.export.export(jax.jit(vectorize(lambda x: x * 2)), platforms=("cuda",))(x)
    assert "ptx" not in exported.mlir_module()


def test_derivatives_are_kernels_too():
    def loss(x):
        return jnp.sum(vectorize(lambda v: v * v * 0.5)(x))

    text = lowered(jax.grad(loss), np.ones((5, 3), np.float32))
    assert "@__gpu$xla.gpu.ptx" in text


def test_an_index_of_an_example_reaches_long_arrays():
    """One lane loads from a plain address where a CPU's lanes gather; a table this long has no nodes."""
    table = np.sqrt(np.arange(9000, dtype=np.float32))
    assert table.size > 2 * memory.LARGE

    def f(x, i):
        return jnp.asarray(x)[i % 400] * 2 + jnp.asarray(table)[i]

    rng = np.random.default_rng(0)
    x = rng.normal(size=(37, 400)).astype(np.float32)
    i = rng.integers(0, 9000, 37).astype(np.int32)
    (got,) = run(host_kernel(jax.make_jaxpr(f)(x[0], i[0]), [False, False]), [x, i], 37)
    want = np.asarray(jax.vmap(f)(x, i))
    np.testing.assert_array_equal(np.asarray(got).ravel(), want)
