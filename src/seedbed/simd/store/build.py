"""Turns a jaxpr into the name of a custom call: found in this process, else on disk, else compiled.

The key on disk consists of the jaxpr with its constants, the flags of its shared operands, the width, the
source of the compiler, the versions of jax, jaxlib, llvmlite and LLVM, and the CPU with its features. A jaxpr
with a parameter that another process cannot name, such as a function made inside a function, is not kept on
disk.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import jax
from jax.extend import core

from seedbed.ffi import Refused, register_object
from seedbed.llvm import toolchain
from seedbed.simd.cpu.compiler import compile_program, lanes
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import DTYPES, Unsupported
from seedbed.simd.store import cache
from seedbed.simd.store.digest import Indescribable, digest

COMPILER = (
    "llvm.py",
    "ffi.py",
    "simd/ir",
    "simd/frontend",
    "simd/schedule",
    "simd/cpu",
    "simd/store/digest.py",
)
"""The files and folders that make machine code of a jaxpr, or that decide which jaxprs are equal."""
_PACKAGE = Path(__file__).parents[2]
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
    """Returns the SHA-256, in hex, of the sources of the compiler."""
    total = hashlib.sha256()
    for path in compiler_sources():
        name = path.relative_to(_PACKAGE).as_posix()
        total.update(name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def compiler_sources() -> list[Path]:
    """Returns the source files of the compiler, in the same order in every process."""
    found: list[Path] = []
    for path in (_PACKAGE / name for name in COMPILER):
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found
