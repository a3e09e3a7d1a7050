"""Turns a jaxpr into the name of a custom call: found in this process, else on disk, else compiled.

The key on disk consists of the jaxpr with its constants, the flags of its shared operands, the width, the
source of this package, the versions of jax, jaxlib, llvmlite and LLVM, and the CPU with its features. A jaxpr
with a parameter that another process cannot name, such as a function made inside a function, is not kept on
disk.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
from jax.extend import core

from seedbed import ffi, llvm
from seedbed.ffi import Chunks, Refused, kernel_module, register_object
from seedbed.llvm import (
    architecture,
    compile_object,
    fused_multiply_add,
    host_vector_unit,
    load_object,
    toolchain,
)
from seedbed.simd import cache
from seedbed.simd.codegen import emit
from seedbed.simd.digest import Indescribable, digest
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import DTYPES, Program, Unsupported
from seedbed.simd.kernel import ARCHITECTURES, Port, kernel_ir
from seedbed.simd.room import MOST_STACK, Room
from seedbed.simd.schedule.measure import work
from seedbed.simd.schedule.plan import Liveness

OLDEST_LLVMLITE = (0, 45)  # earlier versions do not parse opaque pointers
# The time that a chunk should take: to hand one out costs about 0.2 us.
_CHUNK_SECONDS = 20e-6
_OPERATION_SECONDS = 0.3e-9  # rough time of one vector operation
_MOST_TILES = 64  # in one chunk

_LOCK = threading.Lock()
_BUILDS: dict[str, _Build] = {}


class _Build:
    """A target that one thread makes while others wait. An Unsupported or Refused error is kept too."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._target: str | None = None
        self._error: Exception | None = None

    def target(self) -> str:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._target is None:
                try:
                    self._target = self._make()
                except (Unsupported, Refused) as error:
                    # A copy, because the traceback of the original keeps its frames alive.
                    self._error = type(error)(str(error))
                    raise
            return self._target


class CompiledKernel(NamedTuple):
    """The machine code of a kernel, its LLVM IR, and the seconds that each took to make."""

    code: bytes
    text: str  # LLVM IR
    emit_seconds: float
    compile_seconds: float


def lanes() -> int:
    """Returns the number of examples that a kernel works on at once."""
    return host_vector_unit().width


def unsupported() -> str | None:
    """Returns why kernels do not run on this machine, or None if they do."""
    name, found = architecture(), version("llvmlite")
    if name not in ARCHITECTURES:
        return f"there is no code generator for {name} CPUs"
    if tuple(map(int, found.split(".")[:2])) < OLDEST_LLVMLITE:
        return (
            f"llvmlite {found} is too old; install {'.'.join(map(str, OLDEST_LLVMLITE))} or later"
        )
    return None


def target(closed: core.ClosedJaxpr, shared: Sequence[bool]) -> str:
    """Returns the name of the custom-call target that applies a jaxpr of one example to rows.

    `shared` flags each operand: an operand that all examples share has no leading row axis. Any thread may
    call this; the same jaxpr is built once.

    Raises:
        Unsupported: the jaxpr contains an operation that has no scalar form, or an operand or result whose
            type is not in DTYPES; or the kernel is too large.
        Refused: XLA does not accept the kernel.
    """
    width = lanes()
    key = _key(closed, shared, width)
    with _LOCK:
        name = key or f"{id(closed)} {tuple(shared)} {width}"
        build = _BUILDS.get(name)
        if build is None:
            build = _BUILDS[name] = _Build(lambda: _make(closed, shared, width, key))
    return build.target()


def _make(closed: core.ClosedJaxpr, shared: Sequence[bool], width: int, key: str | None) -> str:
    for variable in (*closed.jaxpr.invars, *closed.jaxpr.outvars):
        if str(variable.aval.dtype) not in DTYPES:
            raise Unsupported(f"an operand or result is {variable.aval.dtype}; use one of {DTYPES}")
    code = cache.load(key) if key else None
    if code is None:
        code = compile_program(trace(closed, shared), width).code
        if key:
            cache.save(key, code)
    name = register_object("seedbed_vectorize", code)
    if not any(shared):
        jax.ffi.register_ffi_target_as_batch_partitionable(name)
    return name


def compile_program(program: Program, width: int) -> CompiledKernel:
    """Compiles a program for vectors of `width` lanes.

    Raises:
        Unsupported: the kernel needs more stack than a thread has to spare, or too much memory for its
            arrays, or the program contains other types than DTYPES.
    """
    begin = time.perf_counter()
    read = {node.value[0] for node in Liveness(program).nodes if node.op == "input"}
    inputs, outputs = (
        [Port(o.nodes.size, o.dtype, o.shared, i in read) for i, o in enumerate(side)]
        for side in (program.inputs, program.outputs)
    )
    seconds = work(program.graph) * _OPERATION_SECONDS
    tiles = max(1, min(_MOST_TILES, round(_CHUNK_SECONDS / max(seconds, 1e-9))))
    room = Room()
    ir = emit(program, width, fma=fused_multiply_add(), room=room)
    text = kernel_module(
        kernel_ir(ir, inputs, outputs, width, tiles, room),
        arguments=len(inputs),
        results=len(outputs),
        chunks=Chunks(len(inputs), tiles * width),
    )
    middle = time.perf_counter()
    code = compile_object(text, width)
    _check_stack(code)
    return CompiledKernel(code, text, middle - begin, time.perf_counter() - middle)


def _check_stack(code: bytes) -> None:
    """Raises Unsupported if a kernel takes more than MOST_STACK bytes of the stack."""
    measure = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(load_object(code, "stack_use"))
    used = measure(None)
    if used > MOST_STACK:
        raise Unsupported(
            f"the kernel takes {used >> 10} KiB of stack, more than {MOST_STACK >> 10}, for numbers that it "
            "needs all at once: keep them in an array that lax.scan or lax.fori_loop goes through"
        )


def _key(closed: core.ClosedJaxpr, shared: Sequence[bool], width: int) -> str | None:
    """Returns a text of everything that the machine code depends on.

    Returns None if the jaxpr contains something that another process cannot name.
    """
    try:
        jaxpr = digest(closed)
    except Indescribable:
        return None
    versions = f"jax {jax.__version__}, jaxlib {version('jaxlib')}"
    flags = "".join("01"[s] for s in shared)
    return "\n".join([jaxpr, flags, str(width), _compiler(), versions, toolchain(width)])


@functools.cache
def _compiler() -> str:
    """Returns the SHA-256, in hex, of the sources of this package and of the two modules below it."""
    total, folder = hashlib.sha256(), Path(__file__).parent
    for path in (Path(llvm.__file__), Path(ffi.__file__), *sorted(folder.rglob("*.py"))):
        name = path.relative_to(folder).as_posix() if folder in path.parents else path.name
        total.update(name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()
