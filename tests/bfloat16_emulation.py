"""The instructions of bfloat16 kernels in plain LLVM IR, for CPUs without them.

`emulate` replaces the intrinsics in a kernel's text by functions that do the same; tiles are eight in a
stack buffer of the task. They follow Intel's description (Software Developer's Manual, TDPBF16PS and
VDPBF16PS): only the configured rows and bytes of tiles are loaded and stored, the others become zero; a
product of tiles sums even and odd numbers of pairs apart, in float32. Where a CPU would raise a fault,
because tiles of a product do not fit or are not configured, results become NaN or are not stored. CPUs take
denormal numbers for zero, and these functions do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import pytest

from seedbed import ffi
from seedbed.nets import convolution, convolution_vjp, pooling, products, residual
from seedbed.nets.native.bfloat16.instructions import Name

_STATE = 8 * 1024 + 64
_TILES = re.compile(r"@llvm\.x86\.(ldtilecfg|tile\w+|tdpbf16ps)\(")
_DECLARATION = re.compile(r"^declare .*@llvm\.x86\..*\n", re.MULTILINE)
_FUNCTION = re.compile(r"define internal void @(\w+)\(")


def emulate(text: str) -> str:
    """Returns the text of a kernel, which defines `task`, with its instructions for bfloat16 emulated."""
    if "@llvm.x86." not in text:
        return text
    tiles = _TILES.search(text)
    text = _DECLARATION.sub("", text)
    text = text.replace("@llvm.x86.avx512bf16.cvtneps2bf16.512(", "@emulated.narrow(")
    text = text.replace("@llvm.x86.avx512bf16.dpbf16ps.512(", "@emulated.dpbf16ps(")
    if not tiles:
        return _VECTORS + text
    text = _TILES.sub(r"@emulated.\1(ptr %tile_state, ", text).replace(
        "%tile_state, )", "%tile_state)"
    )
    for name in _FUNCTION.findall(text):
        if name != "task":
            text = text.replace(f"@{name}(", f"@{name}(ptr %tile_state, ")
    head, task = text.split("define internal void @task(")
    start = f"entry:\n%tile_state = alloca [{_STATE} x i8], align 64\n"
    start += f"call void @llvm.memset.p0.i64(ptr %tile_state, i8 0, i64 {_STATE}, i1 false)\n"
    task = task.replace("entry:\n", start, 1)
    return _VECTORS + head + _EMULATION + "define internal void @task(" + task


@contextmanager
def emulation(unit: Name) -> Iterator[None]:
    """While it is open, kernels are for a CPU with the instructions called `unit`, which are emulated."""

    def register(prefix: str, text: str, **options: int) -> str:
        return ffi.register_kernel(prefix, emulate(text), **options)

    with _new_kernels(register) as patch:
        for module in (convolution, products, pooling, residual):
            patch.setattr(module, "host_instructions", lambda: unit)
        yield


@contextmanager
def real_kernels() -> Iterator[None]:
    """While it is open, kernels are for this CPU; if it multiplies bfloat16 fast, one must be made.

    Raises AssertionError at the end if none was.
    """
    made = []

    def register(prefix: str, text: str, **options: int) -> str:
        made.append("bfloat" in text)
        return ffi.register_kernel(prefix, text, **options)

    with _new_kernels(register):
        yield
    assert any(made) or convolution.host_instructions() is None, "no kernel in bfloat16 was made"


@contextmanager
def _new_kernels(register: Callable[..., str]) -> Iterator[pytest.MonkeyPatch]:
    """Makes kernels by another function, and none that are there already are used, by JAX neither."""

    def forget() -> None:
        convolution_vjp.kernel_target.cache_clear()
        jax.clear_caches()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_vjp, "register_kernel", register)
        forget()
        try:
            yield patch
        finally:
            forget()


# LLVM 22 makes a masked store of one truncated number as wide as it was before: narrow is not inlined.
_VECTORS = """
define internal <16 x bfloat> @emulated.narrow(<16 x float> %value) noinline {
  %bits = bitcast <16 x float> %value to <16 x i32>
  %high = lshr <16 x i32> %bits, splat (i32 16)
  %odd = and <16 x i32> %high, splat (i32 1)
  %half = add <16 x i32> %odd, splat (i32 32767)
  %sum = add <16 x i32> %bits, %half
  %rounded = lshr <16 x i32> %sum, splat (i32 16)
  %quiet = or <16 x i32> %high, splat (i32 64)
  %nan = fcmp uno <16 x float> %value, zeroinitializer
  %chosen = select <16 x i1> %nan, <16 x i32> %quiet, <16 x i32> %rounded
  %words = trunc <16 x i32> %chosen to <16 x i16>
  %result = bitcast <16 x i16> %words to <16 x bfloat>
  ret <16 x bfloat> %result
}

define internal <16 x float> @emulated.dpbf16ps(<16 x float> %sum, <32 x bfloat> %a, <32 x bfloat> %b) {
  %aw = bitcast <32 x bfloat> %a to <16 x i32>
  %bw = bitcast <32 x bfloat> %b to <16 x i32>
  %ae = shl <16 x i32> %aw, splat (i32 16)
  %ao = and <16 x i32> %aw, splat (i32 -65536)
  %be = shl <16 x i32> %bw, splat (i32 16)
  %bo = and <16 x i32> %bw, splat (i32 -65536)
  %aef = bitcast <16 x i32> %ae to <16 x float>
  %aof = bitcast <16 x i32> %ao to <16 x float>
  %bef = bitcast <16 x i32> %be to <16 x float>
  %bof = bitcast <16 x i32> %bo to <16 x float>
  %odd = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %aof, <16 x float> %bof, <16 x float> %sum)
  %both = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %aef, <16 x float> %bef, <16 x float> %odd)
  ret <16 x float> %both
}

"""

_EMULATION = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define internal void @emulated.ldtilecfg(ptr %s, ptr %from) {
  call void @llvm.memset.p0.i64(ptr %s, i8 0, i64 8192, i1 false)
  %to = getelementptr i8, ptr %s, i64 8192
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 64, i1 false)
  ret void
}

define internal void @emulated.tilerelease(ptr %s) {
  call void @llvm.memset.p0.i64(ptr %s, i8 0, i64 8256, i1 false)
  ret void
}

define internal ptr @emulated.tile(ptr %s, i8 %t) alwaysinline {
  %n = zext i8 %t to i64
  %tile = getelementptr [1024 x i8], ptr %s, i64 %n
  ret ptr %tile
}

define internal i64 @emulated.rows(ptr %s, i8 %t) alwaysinline {
  %n = zext i8 %t to i64
  %place = getelementptr i8, ptr %s, i64 8240
  %at = getelementptr i8, ptr %place, i64 %n
  %rows = load i8, ptr %at
  %result = zext i8 %rows to i64
  ret i64 %result
}

define internal i64 @emulated.bytes(ptr %s, i8 %t) alwaysinline {
  %n = zext i8 %t to i64
  %place = getelementptr i8, ptr %s, i64 8208
  %at = getelementptr i16, ptr %place, i64 %n
  %bytes = load i16, ptr %at
  %result = zext i16 %bytes to i64
  ret i64 %result
}

define internal void @emulated.tilezero(ptr %s, i8 %t) {
  %tile = call ptr @emulated.tile(ptr %s, i8 %t)
  call void @llvm.memset.p0.i64(ptr %tile, i8 0, i64 1024, i1 false)
  ret void
}

define internal void @emulated.copy(
    ptr %to, i64 %to_stride, ptr %from, i64 %from_stride, i64 %rows, i64 %bytes) {
entry:
  br label %head
head:
  %r = phi i64 [0, %entry], [%next, %body]
  %more = icmp slt i64 %r, %rows
  br i1 %more, label %body, label %done
body:
  %to_offset = mul i64 %r, %to_stride
  %from_offset = mul i64 %r, %from_stride
  %to_row = getelementptr i8, ptr %to, i64 %to_offset
  %from_row = getelementptr i8, ptr %from, i64 %from_offset
  call void @llvm.memcpy.p0.p0.i64(ptr %to_row, ptr %from_row, i64 %bytes, i1 false)
  %next = add i64 %r, 1
  br label %head
done:
  ret void
}

define internal void @emulated.tileloadd64(ptr %s, i8 %t, ptr %base, i64 %stride) {
  call void @emulated.tilezero(ptr %s, i8 %t)
  %tile = call ptr @emulated.tile(ptr %s, i8 %t)
  %rows = call i64 @emulated.rows(ptr %s, i8 %t)
  %bytes = call i64 @emulated.bytes(ptr %s, i8 %t)
  call void @emulated.copy(ptr %tile, i64 64, ptr %base, i64 %stride, i64 %rows, i64 %bytes)
  ret void
}

define internal void @emulated.tilestored64(ptr %s, i8 %t, ptr %base, i64 %stride) {
  %tile = call ptr @emulated.tile(ptr %s, i8 %t)
  %rows = call i64 @emulated.rows(ptr %s, i8 %t)
  %bytes = call i64 @emulated.bytes(ptr %s, i8 %t)
  call void @emulated.copy(ptr %base, i64 %stride, ptr %tile, i64 64, i64 %rows, i64 %bytes)
  ret void
}

define internal void @emulated.tdpbf16ps(ptr %s, i8 %c, i8 %a, i8 %b) {
entry:
  %ct = call ptr @emulated.tile(ptr %s, i8 %c)
  %at = call ptr @emulated.tile(ptr %s, i8 %a)
  %bt = call ptr @emulated.tile(ptr %s, i8 %b)
  %rows = call i64 @emulated.rows(ptr %s, i8 %c)
  %arows = call i64 @emulated.rows(ptr %s, i8 %a)
  %pairs = call i64 @emulated.rows(ptr %s, i8 %b)
  %cbytes = call i64 @emulated.bytes(ptr %s, i8 %c)
  %abytes = call i64 @emulated.bytes(ptr %s, i8 %a)
  %bbytes = call i64 @emulated.bytes(ptr %s, i8 %b)
  %apairs = lshr i64 %abytes, 2
  %f1 = icmp eq i64 %rows, %arows
  %f2 = icmp eq i64 %cbytes, %bbytes
  %f3 = icmp eq i64 %apairs, %pairs
  %f4 = icmp ne i64 %pairs, 0
  %f12 = and i1 %f1, %f2
  %f34 = and i1 %f3, %f4
  %fits = and i1 %f12, %f34
  br i1 %fits, label %head, label %fault
fault:
  call void @llvm.memset.p0.i64(ptr %ct, i8 -1, i64 1024, i1 false)
  ret void
head:
  %r = phi i64 [0, %entry], [%rnext, %store]
  %more = icmp slt i64 %r, %rows
  br i1 %more, label %row, label %done
row:
  %cr = getelementptr [16 x i32], ptr %ct, i64 %r
  %ar = getelementptr [16 x i32], ptr %at, i64 %r
  br label %pair
pair:
  %k = phi i64 [0, %row], [%knext, %pair]
  %even = phi <16 x float> [zeroinitializer, %row], [%even2, %pair]
  %odd = phi <16 x float> [zeroinitializer, %row], [%odd2, %pair]
  %ak = getelementptr i32, ptr %ar, i64 %k
  %bk = getelementptr [16 x i32], ptr %bt, i64 %k
  %av = load i32, ptr %ak
  %bv = load <16 x i32>, ptr %bk, align 64
  %a0 = insertelement <16 x i32> poison, i32 %av, i32 0
  %a1 = shufflevector <16 x i32> %a0, <16 x i32> poison, <16 x i32> zeroinitializer
  %ae = shl <16 x i32> %a1, splat (i32 16)
  %ao = and <16 x i32> %a1, splat (i32 -65536)
  %be = shl <16 x i32> %bv, splat (i32 16)
  %bo = and <16 x i32> %bv, splat (i32 -65536)
  %aef = bitcast <16 x i32> %ae to <16 x float>
  %aof = bitcast <16 x i32> %ao to <16 x float>
  %bef = bitcast <16 x i32> %be to <16 x float>
  %bof = bitcast <16 x i32> %bo to <16 x float>
  %even2 = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %aef, <16 x float> %bef, <16 x float> %even)
  %odd2 = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %aof, <16 x float> %bof, <16 x float> %odd)
  %knext = add i64 %k, 1
  %again = icmp ult i64 %knext, %pairs
  br i1 %again, label %pair, label %store
store:
  %old = load <16 x float>, ptr %cr, align 64
  %both = fadd <16 x float> %even2, %odd2
  %new = fadd <16 x float> %old, %both
  store <16 x float> %new, ptr %cr, align 64
  %rnext = add i64 %r, 1
  br label %head
done:
  ret void
}

"""
