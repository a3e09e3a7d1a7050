"""lz4 block compression from and to memory that is there already, by the library in the package lz4."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import lz4.block
import numpy as np

from seedbed.types import SeedbedError

ACCELERATION = 1
"""The acceleration argument of lz4. 1 compresses best; on images it is hardly slower than larger values."""


@functools.cache
def lz4_address(name: str) -> int:
    """Returns the address of a C function of the lz4 library, which the package lz4 contains or links to.

    Raises SeedbedError if the package does not export the function.
    """
    library = ctypes.CDLL(lz4.block._block.__file__)  # type: ignore[attr-defined]
    try:
        function = getattr(library, name)
    except AttributeError:
        raise SeedbedError(
            f"the package lz4 {lz4.__version__} does not show its function {name}: "
            "install it from PyPI: pip install --force-reinstall lz4"
        ) from None
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def compress(source: np.ndarray, result: np.ndarray) -> int:
    """Compresses bytes into `result`, and returns how many there are; 0 if they do not fit.

    Any thread may call this, as long as no other one uses `result`.
    """
    return _functions()[0](
        source.ctypes.data, result.ctypes.data, source.nbytes, result.nbytes, ACCELERATION
    )


def decompress(source: np.ndarray, result: np.ndarray) -> int:
    """Decompresses bytes into `result`, and returns how many there are; less than 0 for what is no block.

    Nothing is written behind `result`, whatever the source is. Any thread may call this, as long as no other
    one uses `result`.
    """
    return _functions()[1](source.ctypes.data, result.ctypes.data, source.nbytes, result.nbytes)


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    p, n = ctypes.c_void_p, ctypes.c_int
    return (
        ctypes.CFUNCTYPE(n, p, p, n, n, n)(lz4_address("LZ4_compress_fast")),
        ctypes.CFUNCTYPE(n, p, p, n, n)(lz4_address("LZ4_decompress_safe")),
    )
