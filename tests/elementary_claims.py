"""The error that each elementary function claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jax import lax
from scipy import special


class Claim(NamedTuple):
    """The result is within `ulps` of the truth on both ranges: evenly drawn, and by magnitude."""

    function: Callable
    truth: Callable
    even: tuple[float, float]
    scaled: tuple[float, float] | None  # least and largest size; both signs where `even` has both
    ulps: float


def logistic(x):
    return 1 / (1 + np.exp(-x))


CLAIMS = [
    Claim(lax.exp, np.exp, (-86.9, 88.7), (1e-30, 80), 1.3),
    Claim(lax.exp2, np.exp2, (-125.4, 127.9), (1e-30, 120), 1.1),
    Claim(lax.expm1, np.expm1, (-3, 3), (1e-30, 88), 1.6),
    Claim(lax.log, np.log, (0.5, 2), (1.2e-38, 3e38), 1.0),
    Claim(lax.log1p, np.log1p, (0, 3), (1e-30, 3e38), 1.5),
    Claim(lambda x: lax.log1p(-x), lambda x: np.log1p(-x), (0, 0.999), (1e-30, 0.999), 1.5),
    Claim(lax.logistic, logistic, (-5, 5), (1e-30, 80), 2.6),
    Claim(lax.tanh, np.tanh, (-10, 10), (1e-30, 1), 2.5),
    Claim(lax.sinh, np.sinh, (-5, 5), (1e-30, 89), 1.8),
    Claim(lax.cosh, np.cosh, (-5, 5), (1e-30, 89), 1.6),
    Claim(lax.asinh, np.arcsinh, (-5, 5), (1e-30, 3e38), 1.9),
    Claim(lax.acosh, np.arccosh, (1, 10), (1, 3e38), 3.0),
    Claim(lax.atanh, np.arctanh, (-1, 1), (1e-30, 0.999), 2.2),
    Claim(lax.erf, special.erf, (-4, 4), (1e-30, 1), 2.4),
    Claim(lax.erfc, special.erfc, (-4, 9), (1e-30, 9), 4.2),
    Claim(lax.erf_inv, special.erfinv, (-0.9999, 0.9999), (1e-30, 1), 3.2),
    Claim(lax.cbrt, np.cbrt, (-10, 10), (1.2e-38, 3e38), 0.9),
    Claim(lax.rsqrt, lambda x: 1 / np.sqrt(x), (0.1, 10), (1.2e-38, 3e38), 1.5),
    Claim(lax.sin, np.sin, (-10, 10), (1e-30, 300), 2.4),
    Claim(lax.cos, np.cos, (-10, 10), (1e-30, 300), 2.4),
    Claim(lax.tan, np.tan, (-10, 10), (1e-30, 300), 3.1),
    Claim(lax.asin, np.arcsin, (-1, 1), (1e-30, 1), 2.5),
    Claim(lax.acos, np.arccos, (-1, 1), (1e-30, 1), 1.3),
    Claim(lax.atan, np.arctan, (-2, 2), (1e-30, 1e30), 1.5),
]
