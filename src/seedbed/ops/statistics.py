"""Running mean and variance of trees of arrays, for normalising observations and returns.

A batch is reduced to sums of its deviations from an origin. Such sums can be added over devices and
minibatches without approximation. Statistics can absorb them without approximation even if the mean of the
statistics has moved in the meantime.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from seedbed.spaces import Reflection
from seedbed.types import Tree

_BYTES = (127.0, 64.0**2)
"""Mean and variance that are assumed for bytes before any data."""
_FARTHEST = 1e15
"""The largest deviation that counts: float32 holds the sum of 10^8 such squares. Environments may say with
the largest float32 that they see nothing."""


class RunningStatistics(NamedTuple):
    """Mean and population variance of the data so far; start from `initial`."""

    weight: Array  # float32 scalar: weight (rows) of all data so far
    mean: Tree  # leaves [*shape]
    variance: Tree  # leaves [*shape]


class Deviations(NamedTuple):
    """Sums over rows of data about an origin; sums about the same origin are added leaf by leaf."""

    weight: Array  # float32 scalar: number of rows
    origin: Tree  # leaves [*shape]
    first: Tree  # sums of x - origin, leaves [*shape]
    second: Tree  # sums of (x - origin) ** 2, leaves [*shape]

    def times(self, factor: Array) -> Deviations:
        """Multiplies the weight and the sums by a scalar; the origin does not change."""
        first, second = jax.tree.map(lambda leaf: leaf * factor, (self.first, self.second))
        return Deviations(self.weight * factor, self.origin, first, second)


def initial(spec: Tree) -> RunningStatistics:
    """Makes statistics of weight 0, which the first data replaces. Leaves of `spec` have `shape` and `dtype`.

    Before the first data, numbers have mean 0 and variance 1, and bytes (uint8) have mean 127 and standard
    deviation 64, so that pixels are scaled well from the start.
    """

    def moment(index: int) -> Tree:
        plain = (0.0, 1.0)[index]

        def known(leaf: Any) -> Array:
            value = _BYTES[index] if leaf.dtype == "uint8" else plain
            return jnp.full(leaf.shape, value, jnp.float32)

        return jax.tree.map(known, spec)

    return RunningStatistics(weight=jnp.zeros(()), mean=moment(0), variance=moment(1))


def symmetrised(statistics: RunningStatistics, reflections: Tree) -> RunningStatistics:
    """Returns the statistics of data and its reflections; leaves of `reflections` are `Reflection`s."""

    def mean(mean: Array, of: Reflection) -> Array:
        return 0.5 * (mean + _reflected(mean, of))

    def variance(mean: Array, variance: Array, of: Reflection) -> Array:
        apart = 0.5 * (mean - _reflected(mean, of))
        return 0.5 * (variance + variance[np.array(of.order)]) + jnp.square(apart)

    return RunningStatistics(
        weight=statistics.weight,
        mean=jax.tree.map(mean, statistics.mean, reflections),
        variance=jax.tree.map(variance, statistics.mean, statistics.variance, reflections),
    )


def _reflected(x: Array, of: Reflection) -> Array:
    return x[np.array(of.order)] * np.array(of.signs, np.float32)


def no_deviations(statistics: RunningStatistics) -> Deviations:
    """Makes sums of zero rows about the statistics' mean."""
    first, second = (jax.tree.map(jnp.zeros_like, statistics.mean) for _ in range(2))
    # The origin is a copy: a donated array must not share a buffer with the statistics.
    return Deviations(jnp.zeros(()), jax.tree.map(jnp.copy, statistics.mean), first, second)


def apart(x: Array, mean: Array) -> Array:
    """Returns how far rows `[N, *shape]` are from a mean, float32, and at most `_FARTHEST`."""
    far = x.astype(jnp.float32) - mean[None]
    # Bytes are near, and many.
    return far if x.dtype == jnp.uint8 else jnp.clip(far, -_FARTHEST, _FARTHEST)


def deviations(statistics: RunningStatistics, x: Tree, counts: Array | None = None) -> Deviations:
    """Sums the deviations from the statistics' mean of those rows of `x` that count.

    Leaves of `x` are `[N, *shape]`, `counts` is bool `[N]`; without it all rows count.
    """
    if counts is None:
        counts = jnp.ones(jax.tree.leaves(x)[0].shape[0], jnp.bool_)

    def sums(leaf: Array, mean: Array) -> tuple[Array, Array]:
        centred = apart(leaf, mean)
        centred = jnp.where(counts.reshape(-1, *(1,) * mean.ndim), centred, 0.0)
        zero = jnp.float32(0.0)
        # One reduction computes both sums: on CPU, XLA gives a plain sum to threads, which costs up to
        # fifty times as much.
        return jax.lax.reduce(
            (centred, jnp.square(centred)),
            (zero, zero),
            lambda a, b: (a[0] + b[0], a[1] + b[1]),
            dimensions=(0,),
        )

    both = jax.tree.map(sums, x, statistics.mean)
    first, second = jax.tree.transpose(jax.tree.structure(x), jax.tree.structure((0, 0)), both)
    return Deviations(
        weight=counts.sum(dtype=jnp.float32),
        origin=statistics.mean,
        first=first,
        second=second,
    )


def add(a: Deviations, b: Deviations) -> Deviations:
    """Adds the sums of two sets of rows. The result is about the origin of `a`.

    There is no approximation, even if the origins differ.
    """
    shift = jax.tree.map(jnp.subtract, b.origin, a.origin)
    return Deviations(
        weight=a.weight + b.weight,
        origin=a.origin,
        first=jax.tree.map(lambda one, two, d: one + two + b.weight * d, a.first, b.first, shift),
        second=jax.tree.map(
            lambda one, two, first, d: one + two + 2.0 * d * first + b.weight * jnp.square(d),
            a.second,
            b.second,
            b.first,
            shift,
        ),
    )


def absorb(statistics: RunningStatistics, sums: Deviations) -> RunningStatistics:
    """Adds summed rows to the statistics. The sums may be about any origin; zero rows change nothing.

    Source: Chan, Golub and LeVeque (1983), equation 2.1.
    """
    count, total = _positive(sums.weight), statistics.weight + sums.weight
    share = sums.weight / _positive(total)

    def apart(mean: Array, origin: Array, first: Array) -> Array:
        return (origin - mean) + first / count

    def variance(old: Array, first: Array, second: Array, apart: Array) -> Array:
        # Rounding may make the difference negative.
        new = jnp.maximum(second / count - jnp.square(first / count), 0.0)
        return (1.0 - share) * old + share * new + share * (1.0 - share) * jnp.square(apart)

    distance = jax.tree.map(apart, statistics.mean, sums.origin, sums.first)
    return RunningStatistics(
        weight=total,
        mean=jax.tree.map(lambda mean, d: mean + share * d, statistics.mean, distance),
        variance=jax.tree.map(variance, statistics.variance, sums.first, sums.second, distance),
    )


def _positive(total: Array) -> Array:
    """Replaces a divisor of 0 by 1. In that case the dividend is 0 too."""
    return jnp.where(total > 0, total, 1.0)
