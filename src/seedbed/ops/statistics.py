"""Running mean and variance of trees of arrays, for normalising observations and returns.

A batch is summed as deviations from an origin. Such sums add up exactly over devices and minibatches, and
statistics absorb them exactly wherever their own mean has moved meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Tree = Any

_BYTES = (127.0, 64.0**2)
"""Mean and variance that bytes are taken to have before any were seen."""


class RunningStatistics(NamedTuple):
    """Mean and population variance of the data so far; start from `initial`."""

    weight: Array  # float32 scalar: of all data so far
    mean: Tree  # leaves [*shape]
    variance: Tree  # leaves [*shape]


class Deviations(NamedTuple):
    """Sums over rows of data about an origin; sums about one origin add up leaf by leaf."""

    weight: Array  # float32 scalar: rows
    origin: Tree  # leaves [*shape]
    first: Tree  # of x - origin, leaves [*shape]
    second: Tree  # of (x - origin) ** 2, leaves [*shape]

    def times(self, factor: Array) -> Deviations:
        """Multiplies weight and sums by a scalar; the origin stays."""
        first, second = jax.tree.map(lambda leaf: leaf * factor, (self.first, self.second))
        return Deviations(self.weight * factor, self.origin, first, second)


def initial(spec: Tree) -> RunningStatistics:
    """Makes statistics of weight 0, which the first data replaces; leaves have `shape` and `dtype`.

    Until then numbers count as having mean 0 and variance 1, and bytes as having mean 127 and deviation
    64, so that pixels are scaled sensibly before any were seen.
    """

    def moment(index: int) -> Tree:
        plain = (0.0, 1.0)[index]

        def known(leaf: Any) -> Array:
            value = _BYTES[index] if leaf.dtype == "uint8" else plain
            return jnp.full(leaf.shape, value, jnp.float32)

        return jax.tree.map(known, spec)

    return RunningStatistics(weight=jnp.zeros(()), mean=moment(0), variance=moment(1))


def no_deviations(statistics: RunningStatistics) -> Deviations:
    """Makes the sums of no rows about the statistics' mean."""
    first, second = (jax.tree.map(jnp.zeros_like, statistics.mean) for _ in range(2))
    # A copy, because what is donated must not share the buffers of the statistics.
    return Deviations(jnp.zeros(()), jax.tree.map(jnp.copy, statistics.mean), first, second)


def deviations(statistics: RunningStatistics, x: Tree) -> Deviations:
    """Sums the deviations of leaves `[N, *shape]` from the statistics' mean."""

    def sums(leaf: Array, mean: Array) -> tuple[Array, Array]:
        centred = leaf.astype(jnp.float32) - mean[None]
        zero = jnp.float32(0.0)
        # Both at once: a sum of its own XLA gives, on CPU, to threads that cost up to fifty times as much.
        return jax.lax.reduce(
            (centred, jnp.square(centred)),
            (zero, zero),
            lambda a, b: (a[0] + b[0], a[1] + b[1]),
            dimensions=(0,),
        )

    both = jax.tree.map(sums, x, statistics.mean)
    first, second = jax.tree.transpose(jax.tree.structure(x), jax.tree.structure((0, 0)), both)
    return Deviations(
        weight=jnp.float32(jax.tree.leaves(x)[0].shape[0]),
        origin=statistics.mean,
        first=first,
        second=second,
    )


def add(a: Deviations, b: Deviations) -> Deviations:
    """Joins the sums of two sets of rows, about the origin of the first; exact for any two origins."""
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
    """Adds the rows that were summed, about whatever origin; sums of no rows change nothing.

    Source: Chan, Golub and LeVeque (1983), equation 2.1.
    """
    count, total = _positive(sums.weight), statistics.weight + sums.weight
    share = sums.weight / _positive(total)

    def apart(mean: Array, origin: Array, first: Array) -> Array:
        return (origin - mean) + first / count

    def variance(old: Array, first: Array, second: Array, apart: Array) -> Array:
        # The difference may round to below 0.
        new = jnp.maximum(second / count - jnp.square(first / count), 0.0)
        return (1.0 - share) * old + share * new + share * (1.0 - share) * jnp.square(apart)

    distance = jax.tree.map(apart, statistics.mean, sums.origin, sums.first)
    return RunningStatistics(
        weight=total,
        mean=jax.tree.map(lambda mean, d: mean + share * d, statistics.mean, distance),
        variance=jax.tree.map(variance, statistics.variance, sums.first, sums.second, distance),
    )


def _positive(total: Array) -> Array:
    """Keeps a divisor from 0; what is divided is then 0 itself."""
    return jnp.where(total > 0, total, 1.0)
