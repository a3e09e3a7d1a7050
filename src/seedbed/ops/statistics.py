"""Running mean and variance of trees of arrays, for normalising observations and values.

Batches may arrive in any order and in any division: merging is associative up to rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Tree = Any


class RunningStatistics(NamedTuple):
    """Mean and population variance of what has been seen; start from `initial`."""

    weight: Array  # float32 scalar: of all data so far
    mean: Tree  # leaves [*shape]
    variance: Tree  # leaves [*shape]


def initial(spec: Tree) -> RunningStatistics:
    """Statistics of nothing, which normalise to the identity; `spec` has leaves with a `shape`."""
    return RunningStatistics(
        weight=jnp.zeros(()),
        mean=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), spec),
        variance=jax.tree.map(lambda leaf: jnp.ones(leaf.shape), spec),
    )


def of_batch(x: Tree, weights: Array) -> RunningStatistics:
    """Statistics of leaves `[*N, *shape]` with non-negative `weights` `[*N]`, or a mask."""
    weights = weights.astype(jnp.float32)
    total = weights.sum()
    share = weights / _positive(total)
    axes = tuple(range(weights.ndim))

    def average(leaf: Array) -> Array:
        aligned = share.reshape(share.shape + (1,) * (leaf.ndim - share.ndim))
        # A row of weight 0 may hold anything, also infinities.
        return jnp.where(aligned > 0, aligned * leaf, 0.0).sum(axes)

    def spread(leaf: Array, mean: Array) -> Array:
        return average(jnp.square(leaf - mean.reshape((1,) * weights.ndim + mean.shape)))

    mean = jax.tree.map(lambda leaf: average(leaf.astype(jnp.float32)), x)
    variance = jax.tree.map(spread, x, mean)
    return RunningStatistics(total, mean, variance)


def merge(a: RunningStatistics, b: RunningStatistics) -> RunningStatistics:
    """Statistics of both sets of data together; Chan, Golub and LeVeque (1983), equation 2.1."""
    total = a.weight + b.weight
    share = b.weight / _positive(total)

    def mean(mean_a: Array, mean_b: Array) -> Array:
        return mean_a + share * (mean_b - mean_a)

    def variance(var_a: Array, var_b: Array, mean_a: Array, mean_b: Array) -> Array:
        spread = share * (1.0 - share) * jnp.square(mean_b - mean_a)
        return (1.0 - share) * var_a + share * var_b + spread

    return RunningStatistics(
        weight=total,
        mean=jax.tree.map(mean, a.mean, b.mean),
        variance=jax.tree.map(variance, a.variance, b.variance, a.mean, b.mean),
    )


def update(statistics: RunningStatistics, x: Tree, weights: Array) -> RunningStatistics:
    """Adds a batch, leaves `[*N, *shape]`, weights `[*N]`."""
    return merge(statistics, of_batch(x, weights))


class Deviations(NamedTuple):
    """Sums over a batch about a fixed mean; unlike statistics they add up exactly over devices."""

    first: Tree  # of x - mean, leaves [*shape]
    second: Tree  # of (x - mean) ** 2, leaves [*shape]


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
    return Deviations(*jax.tree.transpose(jax.tree.structure(x), jax.tree.structure((0, 0)), both))


def absorb(statistics: RunningStatistics, sums: Deviations, count: Array) -> RunningStatistics:
    """Adds `count` observations whose deviations were summed about these statistics' mean."""
    first = jax.tree.map(lambda leaf: leaf / count, sums.first)
    batch = RunningStatistics(
        weight=count,
        mean=jax.tree.map(jnp.add, statistics.mean, first),
        variance=jax.tree.map(lambda two, one: two / count - jnp.square(one), sums.second, first),
    )
    return merge(statistics, batch)


def normalise(
    statistics: RunningStatistics, x: Tree, clip: float = 10.0, min_variance: float = 1e-6
) -> Tree:
    """Centres and scales leaves `[..., *shape]` to unit variance, clipped to [-clip, clip]."""

    def leaf(value: Array, mean: Array, variance: Array) -> Array:
        lead = (1,) * (value.ndim - mean.ndim)
        scale = jax.lax.rsqrt(jnp.maximum(variance, min_variance))
        centred = value - mean.reshape(lead + mean.shape)
        return jnp.clip(centred * scale.reshape(lead + scale.shape), -clip, clip)

    return jax.tree.map(leaf, x, statistics.mean, statistics.variance)


def _positive(total: Array) -> Array:
    """Keeps a divisor from 0; what is divided is then 0 itself."""
    return jnp.where(total > 0, total, 1.0)
