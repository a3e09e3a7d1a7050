"""Turns a jaxpr into the name of a custom call: found in this process, else on disk, else compiled.

The key on disk consists of the function's name (its jaxpr with its constants, or the recipe of a derivative),
the flags of its shared operands, the width, the source of the compiler, the versions of jax, jaxlib, llvmlite
and LLVM, and the CPU with its features. A jaxpr with a parameter that another process cannot name, such as a
function made inside a function, is not kept on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import jax

from seedbed.ffi import Refused, register_object
from seedbed.llvm import toolchain
from seedbed.simd.cpu.compiler import compile_program, lanes
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import DTYPES, Unsupported
from seedbed.simd.store import cache
from seedbed.simd.store.function import Function
from seedbed.simd.store.sources import COMPILER, fingerprint

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
    key = _key(function, shared, width)
    with _LOCK:
        name = key or f"{id(function)} {tuple(shared)} {width}"
        build = _BUILDS.get(name)
        if build is None:
            build = _BUILDS[name] = _Build(lambda: _make(function, shared, width, key))
    return build.target()


def _make(function: Function, shared: Sequence[bool], width: int, key: str | None) -> str:
    for aval in (*function.in_avals, *function.out_avals):
        if str(aval.dtype) not in DTYPES:
            raise Unsupported(f"an operand or result is {aval.dtype}; use one of {DTYPES}")
    code = cache.load(key) if key else None
    if code is None:
        code = compile_program(trace(function.closed, shared), width).code
        if key:
            cache.save(key, code)
    name = register_object("seedbed_vectorize", code)
    if not any(shared):
        jax.ffi.register_ffi_target_as_batch_partitionable(name)
    return name


def _key(function: Function, shared: Sequence[bool], width: int) -> str | None:
    """Returns a text of everything that the machine code depends on; None if no other process can name it."""
    if function.name is None:
        return None
    flags = "".join("01"[s] for s in shared)
    return "\n".join([function.name, flags, str(width), fingerprint(COMPILER), toolchain(width)])
