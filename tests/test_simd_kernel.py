"""The part of a kernel around its program: rows to lanes and back, chunks, buffers' bounds."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seedbed import ffi, llvm
from seedbed.llvm import compile_object, host_target, host_vector_unit, load_object
from seedbed.simd import inspect, vectorize
from seedbed.simd.cpu import compiler
from seedbed.simd.cpu.kernel import ENTRY, HEAD, Port, kernel_ir
from seedbed.simd.cpu.stack_budget import Room
from seedbed.simd.ir.program import Unsupported

HOST = host_target().architecture
WIDTHS = [w for w in (4, 8, 16) if w <= host_vector_unit().width]
WIDEST = WIDTHS[-1]
DTYPES = ("float32", "int32", "uint32", "bool")
PROGRAM = HEAD + ENTRY


def copy_program(inputs, outputs, width):
    """Result element i is operand element i; shared operands are read as their first number."""
    slots = sum(p.size for p in inputs if not p.shared)
    lines, at, vector = [], 0, f"<{width} x i32>"
    for port in outputs:
        for _ in range(port.size):
            source, here = at % slots, at * width
            lines += [
                f"%p{at} = getelementptr i32, ptr %in, i64 {source * width}",
                f"%v{at} = load {vector}, ptr %p{at}, align {4 * width}",
                f"%q{at} = getelementptr i32, ptr %out, i64 {here}",
                f"store {vector} %v{at}, ptr %q{at}, align {4 * width}",
            ]
            at += 1
    body = "\n".join(lines)
    return f"{PROGRAM}\n{body}\nret void\n}}\n"


def random_rows(rng, rows, port):
    if port.dtype == "bool":
        return rng.integers(0, 2, (rows, port.size)).astype(bool)
    return rng.integers(-(2**31), 2**31, (rows, port.size)).astype(np.int32).view(port.dtype)


def alone(text):
    """The kernel as a module, with `@task` to be called."""
    return "declare void @free(ptr)\n" + text.replace("internal void @task", "void @task")


def compile_task(program, inputs, outputs, width, tiles):
    text = alone(kernel_ir(program, inputs, outputs, width, tiles, Room(), HOST))
    code = compile_object(text, host_target(width))
    pointer = ctypes.POINTER(ctypes.c_void_p)
    kind = ctypes.CFUNCTYPE(None, pointer, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return kind(load_object(code, "task"))


class Fenced:
    """An array that ends (or begins) where memory that no one may touch begins (ends)."""

    def __init__(self, array, at_end):
        page = mmap.PAGESIZE
        size = -(-array.nbytes // page) * page
        self.map = mmap.mmap(-1, size + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        libc = ctypes.CDLL(None, use_errno=True)
        for fence in (start, start + page + size):
            assert libc.mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
        self.address = start + page + (size - array.nbytes if at_end else 0)
        self.shape, self.dtype = array.shape, array.dtype
        ctypes.memmove(self.address, array.ctypes.data, array.nbytes)

    def read(self):
        data = ctypes.string_at(self.address, int(np.prod(self.shape)) * self.dtype.itemsize)
        return np.frombuffer(data, self.dtype).reshape(self.shape)


def run_task(task, arrays, rows, chunk_rows):
    data = (ctypes.c_void_p * len(arrays))(*(a.address for a in arrays))
    dims = np.full(len(arrays), rows, np.int64)
    chunks = -(-rows // chunk_rows)
    for chunk in range(chunks):
        task(data, dims.ctypes.data, chunk, chunks)


@pytest.mark.quick("8-*", f"{WIDEST}-True")
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_reach_their_lanes_and_no_byte_beyond(width, at_end):
    rng = np.random.default_rng(0)
    ports = [Port(n, DTYPES[i % 4]) for i, n in enumerate((1, 2, 3, 4, 5, 7, 16, 17, 33, 1, 4, 6))]
    ports += [Port(n, "bool") for n in (1, 2, 3, 4, 9, 16, 35)]
    task = compile_task(copy_program(ports, ports, width), ports, ports, width, 2)
    for rows in (1, 2, width - 1, width, width + 1, 2 * width, 3 * width + 5):
        given = [random_rows(rng, rows, p) for p in ports]
        results = [np.full_like(a, 1) for a in given]
        fenced = [Fenced(a, at_end) for a in (*given, *results)]
        run_task(task, fenced, rows, 2 * width)
        for array, result in zip(given, fenced[len(given) :], strict=True):
            np.testing.assert_array_equal(array.view(np.uint8), result.read().view(np.uint8))


def double_program(width):
    """Two results: the operand plus the shared number; 1e-30 * 1e-30 * the operand."""
    vector = f"<{width} x float>"
    one = f"<{', '.join(['float 0x39B4484C00000000'] * width)}>"
    return f"""
{PROGRAM}
%s = load ptr, ptr %shared
%k = load float, ptr %s
%a = insertelement {vector} poison, float %k, i32 0
%b = shufflevector {vector} %a, {vector} poison, <{width} x i32> zeroinitializer
%x = load {vector}, ptr %in, align {4 * width}
%y = fadd {vector} %x, %b
store {vector} %y, ptr %out, align {4 * width}
%z = fmul {vector} %x, {one}
%q = getelementptr {vector}, ptr %out, i64 1
store {vector} %z, ptr %q, align {4 * width}
ret void
}}
"""


INPUTS = [Port(1, "float32", shared=True), Port(1, "float32")]
OUTPUTS = [Port(1, "float32"), Port(1, "float32")]


@pytest.mark.quick("0-8", f"1-{WIDEST}", "17-4", f"17-{WIDEST}")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 2, 15, 17, 4096])
def test_inside_jit(width, rows):
    text = kernel_ir(double_program(width), INPUTS, OUTPUTS, width, 2, Room(), HOST)
    module = ffi.kernel_module(text, arguments=2, results=2, chunks=ffi.Chunks(2, 2 * width))
    target = ffi.register_object("test", compile_object(module, host_target(width)))
    kinds = [jax.ShapeDtypeStruct((rows, 1), np.float32)] * 2
    x = np.arange(rows, dtype=np.float32)[:, None]
    shared = np.array([0.5], np.float32)
    y, _ = jax.jit(lambda s, x: jax.ffi.ffi_call(target, kinds)(s, x))(shared, x)
    np.testing.assert_array_equal(y, x + np.float32(0.5))


@pytest.mark.skipif(HOST != "x86_64", reason="reads x86's control register")
def test_the_caller_keeps_its_rounding_mode():
    get, put = (
        "define i32 @get() {\n%s = alloca i32\ncall void @llvm.x86.sse.stmxcsr(ptr %s)\n"
        "%v = load i32, ptr %s\nret i32 %v\n}\ndeclare void @llvm.x86.sse.stmxcsr(ptr)\n",
        "define void @put(i32 %v) {\n%s = alloca i32\nstore i32 %v, ptr %s\n"
        "call void @llvm.x86.sse.ldmxcsr(ptr %s)\nret void\n}\n"
        "declare void @llvm.x86.sse.ldmxcsr(ptr)\n",
    )
    read = ctypes.CFUNCTYPE(ctypes.c_uint32)(
        load_object(compile_object(get, host_target(4)), "get")
    )
    write = ctypes.CFUNCTYPE(None, ctypes.c_uint32)(
        load_object(compile_object(put, host_target(4)), "put")
    )
    task = compile_task(double_program(4), INPUTS, OUTPUTS, 4, 1)
    rows = np.float32([[1e-9], [2e-9], [3e-9], [1e9]])
    arrays = [np.float32([2.0**-30]), rows, np.zeros_like(rows), np.zeros_like(rows)]
    fenced = [Fenced(a, True) for a in arrays]
    before = read()
    up = 0x5F80  # towards plus infinity, denormals kept
    try:
        write(up)
        run_task(task, fenced, 4, 4)
        after = read()
    finally:
        write(before)
    assert after == up
    assert fenced[2].read()[3] == rows[3]  # to nearest, not up
    tiny = fenced[3].read()
    assert np.all(tiny[:3] == 0)  # 1e-30 * 1e-9 is denormal
    assert tiny[3] > 0


def test_emission_is_deterministic():
    ports = [Port(5, "bool"), Port(7, "float32"), Port(3, "int32", shared=True)]
    program = copy_program(ports, ports[:2], 8)
    texts = {kernel_ir(program, ports, ports[:2], 8, 3, Room(), HOST) for _ in range(2)}
    assert len(texts) == 1
    module = alone(next(iter(texts)))
    assert compile_object(module, host_target(8)) == compile_object(module, host_target(8))


# The stack

MORE = 16 // WIDTHS[-1]  # times the numbers that fill a small stack with vectors of 16


def copy_wide_rows():
    """A whole and a partial tile of rows of which the kernel keeps 1.5 MiB."""
    width, ports = WIDTHS[-1], [Port(12_000 * MORE, "float32")]
    program = f"""
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
{PROGRAM}
call void @llvm.memcpy.p0.p0.i64(ptr %out, ptr %in, i64 {4 * width * ports[0].size}, i1 false)
ret void
}}
"""
    task = compile_task(program, ports, ports, width, 2)
    given = np.arange((width + 3) * ports[0].size, dtype=np.float32).reshape(width + 3, -1)
    arrays = [Fenced(a, True) for a in (given, np.zeros_like(given))]
    run_task(task, arrays, len(given), 2 * width)
    np.testing.assert_array_equal(arrays[1].read(), given)


def add_to_wide_rows():
    """A function of rows of which a tile's copies are larger than the stack."""
    x = np.ones((40, 4_500 * MORE), np.float32)
    np.testing.assert_array_equal(vectorize(lambda row: row + 1)(x), x + 1)


def record_much():
    """An array of 1.25 MiB for each vector of examples, which the second loop reads."""

    def function(x):
        _, ys = jax.lax.scan(lambda c, _: (c * 0.5 + x, c), x, None, length=20_000 * MORE)
        return jax.lax.scan(lambda s, y: (s * 0.5 + y, None), x, ys)[0]

    x = np.linspace(0, 1, 40, dtype=np.float32)
    for _ in range(3):  # XLA may run the first call elsewhere
        got = vectorize(function)(x)
    np.testing.assert_array_equal(got, jax.vmap(function)(x))


def on_a_small_stack():
    """Run in a process of its own, which a full stack ends."""
    threading.stack_size(1 << 20)
    for work in (copy_wide_rows, add_to_wide_rows, record_much):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        print("after", work.__name__)


@pytest.mark.slow
def test_large_rows_and_arrays_do_not_fill_the_stack(tmp_path):
    command = "import test_simd_kernel as test; test.on_a_small_stack()"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", command],
        env=os.environ | {"PYTHONPATH": paths, "SEEDBED_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "after copy_wide_rows\nafter add_to_wide_rows\nafter record_much\n"


@pytest.mark.slow
def test_what_registers_do_not_hold_counts(monkeypatch):
    def function(x):
        many = jnp.sqrt(x + np.arange(600, dtype=np.float32))
        return (many * many.sum() + many).max()  # all are needed after the sum

    monkeypatch.setattr(compiler, "MOST_STACK", 600 * 2 * WIDTHS[-1])  # they take twice that
    with pytest.raises(Unsupported, match=r"takes \d+ KiB of stack, more than.*lax\.scan"):
        inspect(function, jax.ShapeDtypeStruct((), np.float32))


@pytest.mark.parametrize("width", [4, 8])
def test_narrower_kernels_use_no_wider_registers(width):
    ports = [Port(16, "float32")]
    text = kernel_ir(copy_program(ports, ports, width), ports, ports, width, 1, Room(), HOST)
    code = compile_object(alone(text), host_target(width))
    flags = host_target(width).features
    assert not re.search(r"\+avx512", flags)
    assert ("+avx2" in flags) <= (width == 8)
    assert code


def test_long_modules_are_simplified_only_and_compute_the_same(monkeypatch, no_fallback):
    def function(x):
        def step(carry, _):
            carry = 0.9 * jnp.sin(carry) + x / (1 + carry * carry)
            return carry, carry.sum()

        carry, sums = jax.lax.scan(step, x, None, length=5)
        return jnp.cumsum(carry), jnp.where(sums > 0, sums, jnp.exp(-sums)), carry @ x

    rows = np.random.default_rng(0).normal(size=(33, 7)).astype(np.float32)
    found, simplified, real = [], [], llvm._simplify
    monkeypatch.setattr(llvm, "_simplify", lambda *given: simplified.append(real(*given)))
    for long in (llvm._LONG, 0):
        monkeypatch.setattr(llvm, "_LONG", long)
        found.append(jax.jit(vectorize(lambda x: function(x)))(rows))
    assert len(simplified) == 1
    jax.tree.map(np.testing.assert_array_equal, *found)
