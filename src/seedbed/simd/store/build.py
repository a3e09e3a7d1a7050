"""Turns a jaxpr into a CPU's custom call or a GPU's PTX: found in this process, else on disk, else compiled.

The key on disk consists of the function's name (its jaxpr with its constants, or the recipe of a derivative),
the flags of its shared operands, the source of the compiler, and the versions of jax, jaxlib, llvmlite and
LLVM; for a CPU also of the width, and the CPU with its features. A jaxpr with a parameter that another
process cannot name, such as a function made inside a function, is not kept on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import jax

from seedbed import cache
from seedbed.ffi import Refused, register_object
from seedbed.jaxprs import without_collector
from seedbed.llvm import toolchain
from seedbed.simd.cpu.compiler import compile_program, lanes
from seedbed.simd.frontend.trace import trace
from seedbed.simd.gpu import compiler as gpu
from seedbed.simd.ir.program import DTYPES, Unsupported
from seedbed.simd.store.function import Function
from seedbed.simd.store.sources import COMPILER, fingerprint

_LOCK = threading.Lock()
_BUILDS: dict[str, _Build] = {}


class _Build:
    """What one thread makes while others wait. An Unsupported or Refused error is kept, too."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: str | None = None
        self._error: Exception | None = None

    def made(self) -> str:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._made is None:
                try:
                    self._made = self._make()
                except (Unsupported, Refused) as error:
                    # A copy, because the traceback of the original keeps its frames alive.
                    self._error = type(error)(str(error))
                    raise
            return self._made


def target(function: Function, shared: Sequence[bool]) -> str:
    """Returns the name of the custom-call target that applies a function of one example to rows.

    `shared` flags each operand: an operand that all examples share has no leading row axis. Any thread may
    call this; the same function is built once.

    Raises:
        Unsupported: the function contains an operation that has no scalar form, or an operand or result whose
            type is not in DTYPES; or the kernel is too large.
        Refused: XLA does not accept the kernel.
    """
    width = lanes()

    def make(key: str | None) -> str:
        code = _code(
            function, key, lambda: compile_program(trace(function.closed, shared), width).code
        )
        name = register_object("seedbed_vectorize", code)
        if not any(shared):
            jax.ffi.register_ffi_target_as_batch_partitionable(name)
        return name

    return _once(function, shared, f"{width}\n{toolchain(width)}", make)


def ptx(function: Function, shared: Sequence[bool]) -> str:
    """Returns the PTX that applies a function of one example to rows on an NVIDIA GPU.

    `shared` is as for `target`. Any thread may call this; the same function is built once.

    Raises Unsupported as `target` does.
    """

    def compiled() -> bytes:
        return gpu.compile_program(trace(function.closed, shared)).encode()

    def make(key: str | None) -> str:
        return _code(function, key, compiled).decode()

    return _once(function, shared, f"ptx\n{gpu.toolchain()}", make)


def _once(
    function: Function,
    shared: Sequence[bool],
    processor: str,
    make: Callable[[str | None], str],
) -> str:
    """Returns what `make` returns for a key on disk; calls it once for the same function and processor."""
    key = _key(function, shared, processor)
    with _LOCK:
        name = key or f"{id(function)} {tuple(shared)} {processor}"
        build = _BUILDS.get(name)
        if build is None:
            build = _BUILDS[name] = _Build(lambda: make(key))
    return build.made()


@without_collector
def _code(function: Function, key: str | None, compiled: Callable[[], bytes]) -> bytes:
    """Returns the code that is kept under a key, or that `compiled` returns, which is then kept."""
    for aval in (*function.in_avals, *function.out_avals):
        if str(aval.dtype) not in DTYPES:
            raise Unsupported(f"an operand or result is {aval.dtype}; use one of {DTYPES}")
    code = cache.load(key) if key else None
    if code is None:
        code = compiled()
        if key:
            cache.save(key, code)
    return code


def _key(function: Function, shared: Sequence[bool], processor: str) -> str | None:
    """Returns a text of all that a processor's code depends on; None if no other process can name it."""
    if function.name is None:
        return None
    flags = "".join("01"[s] for s in shared)
    return "\n".join([function.name, flags, fingerprint(COMPILER), processor])
