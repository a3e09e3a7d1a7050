"""Sine, cosine, tangent and their inverses in float32, written out in plain arithmetic.

Angles are in radians. The polynomials are our own minimax fits (Remez's algorithm, relative error). The
special cases of the inverse functions are those of IEEE 754. Measured errors are in
tests/test_simd_elementary.py.
"""

from __future__ import annotations

import math

from seedbed.simd.frontend.elementary import INFINITY, ROUNDER
from seedbed.simd.ir.scalar import Scalar, copysign, polynomial

LARGEST_ANGLE = 6.5e6
"""The largest angle that sine, cosine and tangent reduce; a larger one has the results of 0.

Neighbouring float32 angles are half a radian apart here.
"""

# pi / 2 in four parts: three of 8 bits, whose products with 16-bit integers are exact, and the rest
_QUARTER = (1.5703125, 4.825592041015625e-4, 1.2665987014770508e-6, 9.92093629470503e-10)
_PI, _PI_LOW = 3.1415927410125732, -8.742278000372485e-08

# For |r| <= pi / 4, in r^2: (sin(r) - r) / r^3, error 4e-9; and cos(r), of which the last three terms come
# from (cos(r) - 1 + r^2 / 2) / r^4, error 1.2e-10.
_SIN = (-0.166666552, 0.00833218917, -0.000195182845)
_COS = (1.0, -0.5, 0.0416666456, -0.00138873095, 2.44323273e-05)
# (tan(r) - r) / r^3 for |r| <= pi / 4, in r^2; error 1.3e-9
_TAN = (
    0.333333492,
    0.133326754,
    0.0540589131,
    0.0212862082,
    0.0108274436,
    9.82467827e-05,
    0.00437269546,
)
# (atan(t) - t) / t^3 for |t| <= 1, in t^2; error 2.6e-9
_ATAN = (
    -0.333332986,
    0.199985296,
    -0.142640159,
    0.109508812,
    -0.0839931443,
    0.0578817166,
    -0.0310976002,
    0.0108692329,
    -0.00178300741,
)
# (asin(t) - t) / t^3 for |t| <= 1/2, in t^2; error 4.9e-9
_ASIN = (0.166667521, 0.0749530941, 0.0454691537, 0.0241847429, 0.0421583876)


def _reduce(x: Scalar) -> tuple[Scalar, Scalar]:
    """Returns r = x - k pi / 2, with |r| <= pi / 4, and k modulo 4, for an angle x >= 0.

    The parts of k pi / 2 are subtracted exactly for x up to 1e5 without fused multiply-adds, and up to
    LARGEST_ANGLE with them.
    """
    # x - x is 0, or NaN if x is not finite
    r = (x <= LARGEST_ANGLE).where(x, x - x)
    rounded = r * (2 / math.pi) + ROUNDER
    k = rounded - ROUNDER
    for part in _QUARTER:
        r = r - k * part
    return r, rounded.bits() & 3


def _sine_and_cosine(r: Scalar) -> tuple[Scalar, Scalar]:
    z = r * r
    return r * z * polynomial(z, _SIN) + r, polynomial(z, _COS)


def _turned(x: Scalar, quarters: Scalar, sign: Scalar | int) -> Scalar:
    """Flips the sign of x if bit 1 of `quarters` (a half turn) is set, and again if `sign` is a sign bit."""
    return (x.bits() ^ ((quarters & 2) << 30) ^ sign).bits("float32")


def _sign_bit(x: Scalar) -> Scalar:
    return x.bits() & -0x80000000


def sin(x: Scalar) -> Scalar:
    """Returns the sine of x for |x| <= LARGEST_ANGLE, 0 beyond it, and NaN if x is not finite."""
    r, quadrant = _reduce(abs(x))
    sine, cosine = _sine_and_cosine(r)
    return _turned((quadrant & 1).equals(0).where(sine, cosine), quadrant, _sign_bit(x))


def cos(x: Scalar) -> Scalar:
    """Returns the cosine of x for |x| <= LARGEST_ANGLE, 1 beyond it, and NaN if x is not finite."""
    r, quadrant = _reduce(abs(x))
    sine, cosine = _sine_and_cosine(r)
    return _turned((quadrant & 1).equals(0).where(cosine, sine), quadrant + 1, 0)


def tan(x: Scalar) -> Scalar:
    """Returns the tangent of x for |x| <= LARGEST_ANGLE, 0 beyond it, and NaN if x is not finite."""
    r, quadrant = _reduce(abs(x))
    z = r * r
    tangent = r * z * polynomial(z, _TAN) + r
    tangent = (quadrant & 1).equals(0).where(tangent, -1.0 / tangent)
    return (tangent.bits() ^ _sign_bit(x)).bits("float32")


def _from(whole: float, angle: Scalar) -> Scalar:
    """Returns `whole` - `angle`; `whole` is pi or pi / 2, taken with more digits than a float32 has."""
    return whole - (angle - whole * (_PI_LOW / _PI))


def _atan_in_unit(t: Scalar) -> Scalar:
    z = t * t
    return t * z * polynomial(z, _ATAN) + t


def atan(x: Scalar) -> Scalar:
    """Returns the angle in [-pi / 2, pi / 2] whose tangent is x."""
    size = abs(x)
    steep = size > 1.0
    angle = _atan_in_unit(steep.where(1.0 / size, size))
    return copysign(steep.where(_from(_PI / 2, angle), angle), x)


def atan2(y: Scalar, x: Scalar) -> Scalar:
    """Returns the angle of the point (x, y), in [-pi, pi]."""
    width, height = abs(x), abs(y)
    low, high = width.apply("min", height), width.apply("max", height)
    slope = low / high.equals(0.0).where(1.0, high)
    angle = _atan_in_unit(low.equals(INFINITY).where(1.0, slope))
    angle = (height > width).where(_from(_PI / 2, angle), angle)
    leftward = (x.bits() < 0).where(_from(_PI, angle), angle)
    return copysign(leftward, y)


def _asin_terms(size: Scalar) -> tuple[Scalar, Scalar]:
    """Returns whether `size`, a sine >= 0, is above 1/2; and half its arccosine if so, else its arcsine."""
    large = size > 0.5
    z = large.where(0.5 * (1.0 - size), size * size)
    t = large.where(z.apply("sqrt"), size)
    return large, t * z * polynomial(z, _ASIN) + t


def asin(x: Scalar) -> Scalar:
    """Returns the angle in [-pi / 2, pi / 2] whose sine is x."""
    large, angle = _asin_terms(abs(x))
    return copysign(large.where(_from(_PI / 2, angle + angle), angle), x)


def acos(x: Scalar) -> Scalar:
    """Returns the angle in [0, pi] whose cosine is x."""
    large, angle = _asin_terms(abs(x))
    positive = x >= 0.0
    double = angle + angle
    near = positive.where(double, _from(_PI, double))
    signed = copysign(angle, x)
    return large.where(near, _from(_PI / 2, signed))
