"""One case for each rule of the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

TINY = np.finfo(np.float32).tiny


SPECIAL = {
    "float32": [
        0.0,
        -0.0,
        1.0,
        -1.0,
        np.inf,
        -np.inf,
        np.nan,
        3.4028235e38,
        -3.4028235e38,
        1.2e-38,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        3.0,
        -3.0,
        0.49999997,
        0.99999994,
        8388609.0,
        2147483648.0,
        4294967296.0,
        -1e10,
        88.7,
        88.73,
        -87.2,
        -104.0,
        1.5707964,
        3.1415927,
        100000.0,
    ],
    "int32": [0, 1, -1, 2, -2, 3, 7, 31, 32, 33, -31, 65535, -65536, 2**31 - 1, -(2**31)],
    "uint32": [0, 1, 2, 3, 7, 31, 32, 33, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1],
    "bool": [False, True],
    "index": [0, 1, 2],
}


DTYPES = {"index": "int32"}


class Case(NamedTuple):
    """A function of scalars of some types; the tolerance is relative, and none means every bit."""

    function: Callable
    dtypes: tuple[str, ...]
    rtol: float | None = None


CASES: dict[str, Case] = {}
