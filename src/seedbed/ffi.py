"""Turns LLVM IR into an XLA custom call for CPU that shares XLA's own thread pool.

A kernel has no threads of its own. A call is cut into chunks. The calling thread and the threads of the pool
take chunks from one atomic counter. The calling thread waits only for chunks that another thread has begun.

The byte offsets below are those of `xla/ffi/api/c_api.h`, API version 0.1 and later: new fields are only
appended to its structs.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from seedbed import cache
from seedbed.llvm import compile_object, host_target, host_vector_unit, load_object, toolchain

_LOCK = threading.RLock()
_REGISTERED: dict[str, str] = {}  # module text -> target name
_TARGETS: set[str] = set()

# A worker that starts late must find its context alive although the call has returned. So the context
# {references, next chunk, finished chunks, chunks, data, dims} is on the heap and counts its references.
# Waiting is safe on any thread, because a running thread has claimed every chunk that is waited for.
_RUNTIME = """
declare ptr @malloc(i64)
declare void @free(ptr)
declare i32 @sched_yield()

%context = type { i64, i64, i64, i64, ptr, ptr }

define internal void @release(ptr %c) {
  %old = atomicrmw sub ptr %c, i64 1 acq_rel
  %last = icmp eq i64 %old, 1
  br i1 %last, label %drop, label %done
drop:
  call void @free(ptr %c)
  br label %done
done:
  ret void
}

define internal void @drain(ptr %c) {
entry:
  %pnext = getelementptr %context, ptr %c, i32 0, i32 1
  %pdone = getelementptr %context, ptr %c, i32 0, i32 2
  %pchunks = getelementptr %context, ptr %c, i32 0, i32 3
  %pdata = getelementptr %context, ptr %c, i32 0, i32 4
  %pdims = getelementptr %context, ptr %c, i32 0, i32 5
  %chunks = load i64, ptr %pchunks
  %data = load ptr, ptr %pdata
  %dims = load ptr, ptr %pdims
  br label %claim
claim:
  %chunk = atomicrmw add ptr %pnext, i64 1 acq_rel
  %some = icmp slt i64 %chunk, %chunks
  br i1 %some, label %work, label %exit
work:
  call void @task(ptr %data, ptr %dims, i64 %chunk, i64 %chunks)
  %ignored = atomicrmw add ptr %pdone, i64 1 acq_rel
  br label %claim
exit:
  ret void
}

define internal void @worker(ptr %c) {
  call void @drain(ptr %c)
  call void @release(ptr %c)
  ret void
}

define internal void @forget(ptr %api, ptr %error) {
  %args = alloca [3 x ptr]
  %p2 = getelementptr ptr, ptr %args, i64 2
  store i64 24, ptr %args
  %p1 = getelementptr ptr, ptr %args, i64 1
  store ptr null, ptr %p1
  store ptr %error, ptr %p2
  %slot = getelementptr i8, ptr %api, i64 64
  %destroy = load ptr, ptr %slot
  call void %destroy(ptr %args)
  ret void
}

define internal i64 @pool_size(ptr %api, ptr %ctx) {
  %count = alloca i64
  store i64 1, ptr %count
  %args = alloca [4 x ptr]
  %p1 = getelementptr ptr, ptr %args, i64 1
  %p2 = getelementptr ptr, ptr %args, i64 2
  %p3 = getelementptr ptr, ptr %args, i64 3
  store i64 32, ptr %args
  store ptr null, ptr %p1
  store ptr %ctx, ptr %p2
  store ptr %count, ptr %p3
  %slot = getelementptr i8, ptr %api, i64 144
  %query = load ptr, ptr %slot
  %error = call ptr %query(ptr %args)
  %fine = icmp eq ptr %error, null
  br i1 %fine, label %answer, label %none
none:
  call void @forget(ptr %api, ptr %error)
  ret i64 1
answer:
  %n = load i64, ptr %count
  ret i64 %n
}

define internal void @schedule(ptr %api, ptr %ctx, ptr %c) {
  %args = alloca [5 x ptr]
  %p1 = getelementptr ptr, ptr %args, i64 1
  %p2 = getelementptr ptr, ptr %args, i64 2
  %p3 = getelementptr ptr, ptr %args, i64 3
  %p4 = getelementptr ptr, ptr %args, i64 4
  store i64 40, ptr %args
  store ptr null, ptr %p1
  store ptr %ctx, ptr %p2
  store ptr @worker, ptr %p3
  store ptr %c, ptr %p4
  %slot = getelementptr i8, ptr %api, i64 136
  %submit = load ptr, ptr %slot
  %error = call ptr %submit(ptr %args)
  %fine = icmp eq ptr %error, null
  br i1 %fine, label %done, label %failed
failed:
  call void @forget(ptr %api, ptr %error)
  call void @release(ptr %c)
  br label %done
done:
  ret void
}

define internal void @run(ptr %api, ptr %ctx, ptr %data, ptr %dims, i64 %chunks) {
entry:
  %pool = call i64 @pool_size(ptr %api, ptr %ctx)
  %fewer = icmp slt i64 %chunks, %pool
  %threads = select i1 %fewer, i64 %chunks, i64 %pool
  %alone = icmp sle i64 %threads, 1
  br i1 %alone, label %serial, label %allocate
allocate:
  %c = call ptr @malloc(i64 48)
  %failed = icmp eq ptr %c, null
  br i1 %failed, label %serial, label %share
serial:
  br label %shead
shead:
  %i = phi i64 [0, %serial], [%i1, %sbody]
  %smore = icmp slt i64 %i, %chunks
  br i1 %smore, label %sbody, label %done
sbody:
  call void @task(ptr %data, ptr %dims, i64 %i, i64 %chunks)
  %i1 = add i64 %i, 1
  br label %shead
share:
  %v0 = insertvalue %context zeroinitializer, i64 %threads, 0
  %v1 = insertvalue %context %v0, i64 %chunks, 3
  %v2 = insertvalue %context %v1, ptr %data, 4
  %v3 = insertvalue %context %v2, ptr %dims, 5
  store %context %v3, ptr %c
  br label %submit
submit:
  %t = phi i64 [1, %share], [%t1, %submit]
  call void @schedule(ptr %api, ptr %ctx, ptr %c)
  %t1 = add i64 %t, 1
  %tmore = icmp slt i64 %t1, %threads
  br i1 %tmore, label %submit, label %help
help:
  call void @drain(ptr %c)
  %pdone = getelementptr %context, ptr %c, i32 0, i32 2
  br label %check
check:
  %finished = load atomic i64, ptr %pdone acquire, align 8
  %all = icmp sge i64 %finished, %chunks
  br i1 %all, label %leave, label %wait
wait:
  %ignored = call i32 @sched_yield()
  br label %check
leave:
  call void @release(ptr %c)
  br label %done
done:
  ret void
}
"""

_ENTRY_HEAD = """
define ptr @ffi_entry(ptr %frame) {
entry:
  %pext = getelementptr i8, ptr %frame, i64 8
  %ext = load ptr, ptr %pext
  %plain = icmp eq ptr %ext, null
  br i1 %plain, label %execute, label %extension
extension:
  %pkind = getelementptr i8, ptr %ext, i64 8
  %kind = load i32, ptr %pkind
  %metadata = icmp eq i32 %kind, 1
  br i1 %metadata, label %describe, label %execute
describe:
  %pmeta = getelementptr i8, ptr %ext, i64 24
  %meta = load ptr, ptr %pmeta
  %pmajor = getelementptr i8, ptr %meta, i64 24
  store i32 0, ptr %pmajor
  %pminor = getelementptr i8, ptr %meta, i64 28
  store i32 1, ptr %pminor
  ret ptr null
execute:
  %papi = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %papi
  %pctx = getelementptr i8, ptr %frame, i64 24
  %ctx = load ptr, ptr %pctx
  %pargs = getelementptr i8, ptr %frame, i64 72
  %args = load ptr, ptr %pargs
  %prets = getelementptr i8, ptr %frame, i64 112
  %rets = load ptr, ptr %prets
"""


def _entry(arguments: int, results: int, chunks: Chunks) -> str:
    """Returns the IR of the handler: it collects data pointers and leading dimensions and runs the chunks."""
    total = arguments + results
    lines = [f"  %data = alloca [{total} x ptr]", f"  %dims = alloca [{total} x i64]"]
    for i in range(total):
        array, j = ("%args", i) if i < arguments else ("%rets", i - arguments)
        lines += [
            f"  %slot{i} = getelementptr ptr, ptr {array}, i64 {j}",
            f"  %buffer{i} = load ptr, ptr %slot{i}",
            f"  %pdata{i} = getelementptr i8, ptr %buffer{i}, i64 24",
            f"  %data{i} = load ptr, ptr %pdata{i}",
            f"  %keep{i} = getelementptr ptr, ptr %data, i64 {i}",
            f"  store ptr %data{i}, ptr %keep{i}",
            f"  %prank{i} = getelementptr i8, ptr %buffer{i}, i64 32",
            f"  %rank{i} = load i64, ptr %prank{i}",
            f"  %scalar{i} = icmp eq i64 %rank{i}, 0",
            f"  %pdims{i} = getelementptr i8, ptr %buffer{i}, i64 40",
            f"  %shape{i} = load ptr, ptr %pdims{i}",
            f"  %first{i} = select i1 %scalar{i}, ptr %prank{i}, ptr %shape{i}",
            f"  %dim{i} = load i64, ptr %first{i}",
            f"  %note{i} = getelementptr i64, ptr %dims, i64 {i}",
            f"  store i64 %dim{i}, ptr %note{i}",
        ]
    lines += [
        f"  %whole = add i64 %dim{chunks.buffer}, {chunks.rows - 1}",
        f"  %chunks = sdiv i64 %whole, {chunks.rows}",
        "  call void @run(ptr %api, ptr %ctx, ptr %data, ptr %dims, i64 %chunks)",
    ]
    return _ENTRY_HEAD + "\n".join([*lines, "  ret ptr null", "}", ""])


class Chunks(NamedTuple):
    """The division of a call into chunks: each has `rows` rows of the leading axis of buffer `buffer`."""

    buffer: int
    rows: int = 1


class Refused(RuntimeError):
    """Raised when XLA does not accept a kernel: its foreign function interface has another version."""


def kernel_module(text: str, *, arguments: int, results: int, chunks: Chunks) -> str:
    """Returns the IR of a complete custom call, in which `text` defines `task`.

    `task` is `void (ptr data, ptr dims, i64 chunk, i64 chunks)`. `data` points to the addresses of the
    buffers, first the arguments, then the results. `dims` points to their leading dimensions (0 for a
    scalar). `task` runs once for each chunk, on the calling thread and XLA's pool at the same time.

    Raises:
        ValueError: `chunks.buffer` is not one of the buffers.
    """
    if not 0 <= chunks.buffer < arguments + results:
        raise ValueError(
            f"chunk_buffer {chunks.buffer} must index one of {arguments} + {results} buffers"
        )
    return _RUNTIME + text + _entry(arguments, results, chunks)


def register_kernel(
    prefix: str, text: str, *, arguments: int, results: int, chunk_buffer: int
) -> str:
    """Compiles IR that defines `task` and returns the name of its CPU custom-call target.

    `kernel_module` describes `task`. The number of chunks is the leading dimension of buffer `chunk_buffer`.
    Registering the same text again costs nothing and returns the first name. Machine code is kept on disk for
    later processes. Any thread may call this.

    Raises:
        ValueError: `chunk_buffer` is not one of the buffers.
        RuntimeError: the text is not valid LLVM IR.
        Refused: XLA does not accept the kernel.
    """
    chunks = Chunks(chunk_buffer)
    module = kernel_module(text, arguments=arguments, results=results, chunks=chunks)
    with _LOCK:
        if module not in _REGISTERED:
            code = _compiled(module)
            _REGISTERED[module] = register_object(prefix, code)
        return _REGISTERED[module]


def _compiled(module: str) -> bytes:
    """Returns the machine code of a module for this machine, which is kept on disk."""
    key = f"{toolchain(host_vector_unit().width)}\n{module}"
    code = cache.load(key)
    if code is None:
        code = compile_object(module, host_target())
        cache.save(key, code)
    return code


def register_object(prefix: str, code: bytes) -> str:
    """Loads the machine code of a kernel's module and returns the name of its CPU custom-call target.

    The name is `prefix` and the hash of the code. Any thread may call this.

    Raises:
        RuntimeError: the code is not that of a kernel.
        Refused: XLA does not accept the kernel.
    """
    name = f"{prefix}_{hashlib.sha256(code).hexdigest()[:20]}"
    with _LOCK:
        if name not in _TARGETS:
            capsule = _capsule(load_object(code, "ffi_entry"))
            try:
                jax.ffi.register_ffi_target(name, capsule, platform="cpu", api_version=1)
            except jax.errors.JaxRuntimeError as error:
                raise Refused(f"XLA does not accept a kernel: {error}") from error
            _TARGETS.add(name)
    return name


def _capsule(address: int) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return new(address, None, None)


def varying_axes(array: jax.Array) -> frozenset[str]:
    """Returns the manual mesh axes (inside shard_map) over which an array varies."""
    return jax.typeof(array).manual_axis_type.varying


def varying_like(result: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the type of a result that varies over every mesh axis over which one of the arrays varies."""
    axes = frozenset[str]().union(*map(varying_axes, arrays))
    if not axes:
        return result
    sharding: Any = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
    kind = jax.sharding.ManualAxisType(varying=axes)
    return jax.ShapeDtypeStruct(
        result.shape, result.dtype, sharding=sharding, manual_axis_type=kind
    )
