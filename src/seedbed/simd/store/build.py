"""Turns a jaxpr into a CPU's custom call or a GPU's PTX: found in this process, else on disk, else compiled.

The key on disk consists of the jaxpr with its constants, the flags of its shared operands, the source of
the compiler, and the versions of jax, jaxlib, llvmlite and LLVM; for a CPU also of the width, and the CPU
with its features. A jaxpr with a parameter that another process cannot name, such as a function made inside
a function, is not kept on disk.
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
from seedbed.simd.gpu import compiler as gpu
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
    "simd/gpu",
    "simd/store/digest.py",
)
"""The files and folders that make machine code or PTX of a jaxpr, or that decide which jaxprs are equal."""
_PACKAGE = Path(__file__).parents[2]
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

    def make(key: str | None) -> str:
        code = _code(closed, key, lambda: compile_program(trace(closed, shared), width).code)
        name = register_object("seedbed_vectorize", code)
        if not any(shared):
            jax.ffi.register_ffi_target_as_batch_partitionable(name)
        return name

    return _once(closed, shared, f"{width}\n{toolchain(width)}", make)


def ptx(closed: core.ClosedJaxpr, shared: Sequence[bool]) -> str:
    """Returns the PTX that applies a jaxpr of one example to rows on an NVIDIA GPU.

    `shared` is as for `target`. Any thread may call this; the same jaxpr is built once.

    Raises Unsupported as `target` does.
    """

    def make(key: str | None) -> str:
        program = functools.partial(trace, closed, shared)
        return _code(closed, key, lambda: gpu.compile_program(program()).encode()).decode()

    return _once(closed, shared, f"ptx\n{gpu.toolchain()}", make)


def _once(
    closed: core.ClosedJaxpr,
    shared: Sequence[bool],
    processor: str,
    make: Callable[[str | None], str],
) -> str:
    """Returns what `make` returns for a key on disk; calls it once for the same jaxpr and processor."""
    key = _key(closed, shared, processor)
    with _LOCK:
        name = key or f"{id(closed)} {tuple(shared)} {processor}"
        build = _BUILDS.get(name)
        if build is None:
            build = _BUILDS[name] = _Build(lambda: make(key))
    return build.made()


def _code(closed: core.ClosedJaxpr, key: str | None, compiled: Callable[[], bytes]) -> bytes:
    """Returns the code that is kept under a key, or that `compiled` returns, which is then kept."""
    for variable in (*closed.jaxpr.invars, *closed.jaxpr.outvars):
        if str(variable.aval.dtype) not in DTYPES:
            raise Unsupported(f"an operand or result is {variable.aval.dtype}; use one of {DTYPES}")
    code = cache.load(key) if key else None
    if code is None:
        code = compiled()
        if key:
            cache.save(key, code)
    return code


def _key(closed: core.ClosedJaxpr, shared: Sequence[bool], processor: str) -> str | None:
    """Returns a text of everything that the code for a processor depends on.

    Returns None if the jaxpr contains something that another process cannot name.
    """
    try:
        jaxpr = digest(closed)
    except Indescribable:
        return None
    versions = f"jax {jax.__version__}, jaxlib {version('jaxlib')}"
    flags = "".join("01"[s] for s in shared)
    return "\n".join([jaxpr, flags, _compiler(), versions, processor])


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
