"""Exponentials, logarithms and related functions in float32, written in plain arithmetic.

Range reduction is Cody and Waite's: constants are split into parts whose products with small integers are
exact. Polynomials and rational functions are our own minimax fits (Remez's algorithm, relative error), unless
another source is named. Every formula is valid whether or not its products and sums are fused. If one side of
a select is rare, it comes first: guards skip that side, and the other side can be scheduled among its
neighbours. Measured errors are in tests/test_simd_elementary.py. Trigonometry is in trigonometry.py.
"""

from __future__ import annotations

import math

from seedbed.simd.ir.scalar import Scalar, copysign, polynomial

INFINITY, NAN = math.inf, math.nan
LEAST_NORMAL = 2.0**-126
# The sum of a number and 1.5 * 2^23 is rounded to an integer, which is in the low bits of the sum.
ROUNDER = 12582912.0
_LN2 = math.log(2)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.1219444005469057e-4  # the first has 9 significant bits
_LOG2E = 1 / _LN2
_SQRT_HALF = 0x3F3504F3  # bits of sqrt(1/2)

# Coefficients of polynomials, constant first. Comments give the function, its range and the error of the fit.
# (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2; 3.1e-9
_EXP = (0.49999994, 0.166665226, 0.0416682921, 0.00836853404, 0.00138183124)
# (ln(1 + f) - f + f^2 / 2) / f^3 for sqrt(1/2) - 1 <= f <= sqrt(2) - 1; 5.9e-9
_LOG = (
    0.333333313,
    -0.250008225,
    0.200012594,
    -0.16623345,
    0.142010719,
    -0.131595463,
    0.12765716,
    -0.076411657,
)
# (sinh(x) - x) / x^3 for |x| <= 1, in x^2; 3e-10
_SINH = (0.166666672, 0.00833331048, 0.000198428956, 2.78221319e-06)
# erf(x) / x - 1 for |x| <= 1/2, in x^2; 1.5e-9
_ERF = (0.128379166, -0.376126111, 0.112828508, -0.0267582592, 0.00471916003)
# (1 + 2 x) exp(x^2) erfc(x) for 0.45 <= x <= 10.1, in (x - 4) / (x + 4); 2.9e-8
_ERFC = (
    1.23299515,
    -0.139620945,
    0.0153747173,
    0.0680863336,
    -0.100930154,
    0.0939566121,
    -0.0670503974,
    0.0353736766,
    -0.0153129473,
    0.009704303,
    0.00246369257,
)
# erf_inv(x) / x - 1 in w - 2.5 for w = -ln(1 - x^2) < 5; 3.4e-8. For w >= 5, erf_inv(x) / x in sqrt(w) - 3;
# 1.3e-7. The range is divided as in M. Giles, "Approximating the erfinv function", 2012.
_ERF_INV = (
    0.501409352,
    0.246640131,
    -0.00417734776,
    -0.00125242246,
    0.000218312329,
    -5.14304475e-06,
    -3.45420858e-06,
    5.03903493e-07,
    2.2532328e-08,
    -1.14471366e-08,
)
_ERF_INV_TAIL = (
    2.83297682,
    1.00167179,
    0.00944362022,
    -0.00759063801,
    0.00570013374,
    -0.00378054916,
    0.00146106933,
    0.000203038944,
    -0.000301910855,
)


def _expm1_near_zero(r: Scalar) -> Scalar:
    return r * r * polynomial(r, _EXP) + r


def _reduce_exp(x: Scalar) -> tuple[Scalar, Scalar]:
    """Returns r = x - k ln 2 with |r| <= ln 2 / 2, and k + ROUNDER, for the integer k nearest x / ln 2."""
    rounded = x * _LOG2E + ROUNDER
    k = rounded - ROUNDER
    return (x - k * _LN2_HIGH) - k * _LN2_LOW, rounded


def _power_of_two(rounded: Scalar, offset: int) -> Scalar:
    """Returns 2^(k + offset), but 0 for k + offset = -127; k is in the low bits of `rounded`."""
    return ((rounded.bits() << 23) + ((127 + offset) << 23)).bits("float32")


def _exp_of_reduced(r: Scalar, rounded: Scalar) -> Scalar:
    """Returns e^r 2^k for -126 <= k <= 128, but 0 for k = -126."""
    # 2^128 is not a float32, so 2^k is halved and e^r doubled.
    return (_expm1_near_zero(r) * 2.0 + 2.0) * _power_of_two(rounded, -1)


def exp(x: Scalar) -> Scalar:
    """Returns e^x; results below 1.7e-38 are 0."""
    return _exp_of_reduced(*_reduce_exp(x.clamp(-87.3, 89.0)))


def exp2(x: Scalar) -> Scalar:
    """Returns 2^x; results below 1.7e-38 are 0."""
    return _exp2_of_sum(x, x.like(0.0))


def _exp2_of_sum(high: Scalar, low: Scalar) -> Scalar:
    """Returns 2^(high + low)."""
    rounded = (high + low).clamp(-126.0, 128.4) + ROUNDER
    r = ((high - (rounded - ROUNDER)) + low).clamp(-0.6, 0.6)
    return _exp_of_reduced(r * _LN2, rounded)


def _half_expm1(x: Scalar) -> Scalar:
    """Returns (e^x - 1) / 2 for -80 <= x <= 89."""
    r, rounded = _reduce_exp(x)
    half = _power_of_two(rounded, -1)
    return half * _expm1_near_zero(r) - (0.5 - half)  # this order keeps the sign of a zero


def expm1(x: Scalar) -> Scalar:
    """Returns e^x - 1."""
    half = _half_expm1(x.clamp(-30.0, 89.0))  # outside, the result is constant
    return half + half


def _reduce_log(x: Scalar) -> tuple[Scalar, Scalar]:
    """Returns m and an int32 e with x = m 2^e, sqrt(1/2) <= m < sqrt(2), for a positive normal x."""
    offset = x.bits() - _SQRT_HALF
    e = offset.apply("shift_right_arithmetic", 23)
    return ((offset & 0x007FFFFF) + _SQRT_HALF).bits("float32"), e


def _log_of_reduced(f: Scalar, e: Scalar) -> Scalar:
    """Returns ln((1 + f) 2^e)."""
    minus_e = (-e).to("float32")  # if e is 0, this is +0, so that f = -0 gives -0
    z = f * f
    y = f * z * polynomial(f, _LOG) - minus_e * _LN2_LOW
    return (f + (y - 0.5 * z)) - minus_e * _LN2_HIGH


def _log_beyond(x: Scalar, y: Scalar) -> Scalar:
    """Returns y, a logarithm of x, if x is a positive normal number, and its limit for other x.

    That is -inf for 0 (denormals count as 0 in kernels), NaN for negative numbers, and x itself for infinity
    and NaN.
    """
    limit = x.equals(0.0).where(x.like(-INFINITY), (x < 0.0).where(NAN, x))
    rare = (x.bits("uint32") - 0x00800000) >= 0x7F000000
    return rare.where(limit, y)


def log(x: Scalar) -> Scalar:
    """Returns ln x."""
    m, e = _reduce_log(x)
    return _log_beyond(x, _log_of_reduced(m - 1.0, e))


def log2(x: Scalar) -> Scalar:
    """Returns the logarithm of x to base 2, as JAX defines it: a multiple of ln x."""
    return log(x) * _LOG2E


def log1p(x: Scalar) -> Scalar:
    """Returns ln(1 + x)."""
    u = x + 1.0
    # The part of x that the rounding of u loses. If u is so large that this is 0, it does not matter.
    lost = x - (u - 1.0)
    m, e = _reduce_log(u)
    scale = ((127 - e.apply("min", 127)) << 23).bits("float32")  # 2^-e
    f = lost * scale - (1.0 - m)  # this order keeps the sign of a zero
    return _log_beyond(u, _log_of_reduced(f, e))


def logistic(x: Scalar) -> Scalar:
    """Returns 1 / (1 + e^-x)."""
    return 1.0 / (exp(-x) + 1.0)


def tanh(x: Scalar) -> Scalar:
    """Returns the hyperbolic tangent; its absolute value never exceeds 1."""
    size = abs(x).apply("min", 20.0)
    half = _half_expm1(size + size)
    return copysign(half / (half + 1.0), x)


def _half_exp(x: Scalar) -> Scalar:
    """Returns e^x / 2 for x >= 0; infinity only if the half itself is too large."""
    r, rounded = _reduce_exp(x.apply("min", 89.6))
    return (_expm1_near_zero(r) * 2.0 + 2.0) * _power_of_two(rounded, -2)


def sinh(x: Scalar) -> Scalar:
    """Returns (e^x - e^-x) / 2."""
    z, half = x * x, _half_exp(abs(x))
    near = x * z * polynomial(z, _SINH) + x
    return (abs(x) < 1.0).where(near, copysign(half - 0.25 / half, x))


def cosh(x: Scalar) -> Scalar:
    """Returns (e^x + e^-x) / 2."""
    half = _half_exp(abs(x))
    return half + 0.25 / half


def asinh(x: Scalar) -> Scalar:
    """Returns ln(x + sqrt(x^2 + 1))."""
    size = abs(x)
    z, large = size * size, size > 2.0**28
    rest = z / ((z + 1.0).apply("sqrt") + 1.0)
    y = log1p(large.where(size, size + rest)) + large.where(x.like(_LN2), 0.0)
    return copysign(y, x)


def acosh(x: Scalar) -> Scalar:
    """Returns ln(x + sqrt(x^2 - 1))."""
    t, large = x - 1.0, x > 2.0**28
    rest = t.apply("sqrt") * (t + 2.0).apply("sqrt")
    return log1p(large.where(t, t + rest)) + large.where(x.like(_LN2), 0.0)


def atanh(x: Scalar) -> Scalar:
    """Returns ln((1 + x) / (1 - x)) / 2."""
    size = abs(x)
    return copysign(0.5 * log1p((size + size) / (1.0 - size)), x)


def _erf_near_zero(x: Scalar) -> Scalar:
    return x * polynomial(x * x, _ERF) + x


def _erf_tail(size: Scalar) -> Scalar:
    """Returns 1 - erf(size) for size >= 1/2."""
    size = size.apply("min", 11.0)
    # e^(-x^2) needs more bits of x^2 than one float32 has.
    high = leading_bits(size)
    r, rounded = _reduce_exp((-(high * high)).apply("max", -87.3))
    power = _exp_of_reduced(r + (high - size) * (high + size), rounded)
    return power * polynomial((size - 4.0) / (size + 4.0), _ERFC) / (size + size + 1.0)


def erf(x: Scalar) -> Scalar:
    """Returns the error function; its absolute value never exceeds 1."""
    size = abs(x)
    return (size < 0.5).where(_erf_near_zero(x), copysign(1.0 - _erf_tail(size), x))


def erfc(x: Scalar) -> Scalar:
    """Returns 1 - erf(x)."""
    size, tail = abs(x), _erf_tail(abs(x))
    return (size < 0.5).where(1.0 - _erf_near_zero(x), (x < 0.0).where(2.0 - tail, tail))


def erf_inv(x: Scalar) -> Scalar:
    """Returns the inverse of the error function."""
    size = abs(x)
    w = -log((1.0 - size) * (size + 1.0))
    tail = polynomial(w.apply("sqrt") - 3.0, _ERF_INV_TAIL)
    y = (w >= 5.0).where(size * tail, size * polynomial(w - 2.5, _ERF_INV) + size)
    return copysign(size.equals(1.0).where(INFINITY, y), x)


def cbrt(x: Scalar) -> Scalar:
    """Returns the cube root."""
    size = abs(x)
    # The bits of the number give an estimate of 1 / root within 4 %; each Newton step squares the error.
    third = size.bits("uint32").apply("div", 3).bits()
    inverse = (0x54A2FA8C - third).bits("float32")
    for _ in range(2):
        cube = size * inverse * inverse * inverse
        inverse = inverse * (4.0 / 3.0 - cube * (1.0 / 3.0))
    root = size * inverse * inverse
    root = root - (root - size / (root * root)) * (1.0 / 3.0)
    root = size.equals(INFINITY).where(size, root)
    # Numbers below the least normal one count as zero, as in XLA's kernels.
    return copysign((size < LEAST_NORMAL).where(0.0, root), x)


def remainder(x: Scalar, y: Scalar) -> Scalar:
    """Returns x - n y exactly, where n is x / y cut to an integer. The sign is that of x."""
    a, b = abs(x), abs(y)
    quotient = (a / b).apply("floor")  # below 2^22 it is off by at most 1
    # Products of 12-bit numbers are exact, and so is the rest after each subtraction.
    q_high, b_high = leading_bits(quotient), leading_bits(b)
    q_low, b_low = quotient - q_high, b - b_high
    rest = ((a - q_high * b_high) - q_high * b_low) - q_low * b_high - q_low * b_low
    rest = rest + (rest < 0.0).where(b, 0.0)
    rest = rest - (rest >= b).where(b, 0.0)
    rest = (a < b).where(a, rest)
    hard = (a >= b * 2.0**22) | (b < 1e-30)
    return copysign(hard.where(a.apply("rem", b), rest), x)


def leading_bits(x: Scalar) -> Scalar:
    """Returns a number cut to 12 significant bits: the product of two such numbers is exact."""
    return (x.bits() & ~0xFFF).bits("float32")


def _log2_in_two(x: Scalar) -> tuple[Scalar, Scalar]:
    """Returns log2 of a positive normal number as a 12-bit number and the rest, with an error below 2^-32.

    The series in s = (m - 1) / (m + 1) is that of FreeBSD's e_powf.c; its leading terms are each kept in two
    numbers.
    """
    m, exponent = _reduce_log(x)
    e = exponent.to("float32")
    f, d = m - 1.0, m + 1.0
    s = f / d
    s_high, d_high = leading_bits(s), leading_bits(d)
    d_low = f - (d_high - 2.0)
    s_low = ((f - s_high * d_high) - s_high * d_low) / d
    z, z_high = s * s, s_high * s_high
    rest = z * z * polynomial(z, (3 / 5, 3 / 7, 3 / 9, 3 / 11)) + s_low * (s_high + s)
    t_high = leading_bits(z_high + 3.0 + rest)  # 3 ln(m) / (2 s)
    t_low = rest - ((t_high - 3.0) - z_high)
    u, v = s_high * t_high, s_low * t_high + t_low * s
    p_high = leading_bits(u + v)
    p_low = v - (p_high - u)
    # Times 2 / (3 ln 2), in two parts; the first part fits into 12 bits.
    w_high = p_high * 0.9619140625
    w_low = p_high * -1.1736857402e-4 + p_low * 0.9617966939
    high = leading_bits(w_high + w_low + e)
    return high, w_low - ((high - e) - w_high)


def power(x: Scalar, y: Scalar) -> Scalar:
    """Returns x^y with the special cases of IEEE 754's pow."""
    size = abs(x)
    log_high, log_low = _log2_in_two(size)
    # Beyond these exponents, every power is 0, 1 or infinite.
    bounded = y.clamp(-(2.0**33), 2.0**33)
    y_high = leading_bits(bounded)
    high = y_high * log_high
    low = (bounded - y_high) * log_high + bounded * log_low
    finite = _exp2_of_sum(high, low)

    rises = y > 0.0
    at_zero = rises.where(x.like(0.0), INFINITY)
    at_infinity = rises.where(x.like(INFINITY), 0.0)
    magnitude = size.equals(INFINITY).where(at_infinity, size.equals(1.0).where(1.0, finite))
    magnitude = size.equals(0.0).where(at_zero, magnitude)

    half = y * 0.5
    whole = y.apply("floor").equals(y)
    odd = whole & half.apply("floor").differs(half)
    signed = odd.where(copysign(magnitude, x), magnitude)
    is_root_of_negative = (x < 0.0) & (size < INFINITY) & ~whole
    unknown = x.differs(x) | y.differs(y) | is_root_of_negative
    return (y.equals(0.0) | x.equals(1.0)).where(1.0, unknown.where(NAN, signed))
