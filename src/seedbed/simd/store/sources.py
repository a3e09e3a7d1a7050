"""The sources on which what is kept on disk depends."""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import version
from pathlib import Path

import jax

COMPILER = (
    "jaxprs.py",
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
DERIVATION = (
    "simd/accumulate.py",
    "simd/derivative.py",
    "jaxprs.py",
    "simd/store/digest.py",
    "simd/store/function.py",
)
"""The files that make derivatives of a jaxpr, or that decide which derivatives are equal."""
_PACKAGE = Path(__file__).parents[2]


@functools.cache
def fingerprint(names: tuple[str, ...]) -> str:
    """Describes what makes something of a jaxpr: the SHA-256 of our sources, in hex, and JAX's versions."""
    total = hashlib.sha256()
    for path in sources(names):
        name = path.relative_to(_PACKAGE).as_posix()
        total.update(name.encode() + b"\0" + path.read_bytes())
    return f"{total.hexdigest()}, jax {jax.__version__}, jaxlib {version('jaxlib')}"


def sources(names: tuple[str, ...]) -> list[Path]:
    """Returns the source files in files and folders, in the same order in every process."""
    found: list[Path] = []
    for path in (_PACKAGE / name for name in names):
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found
