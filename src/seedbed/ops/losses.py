"""Losses of single rows, and means that leave out rows which are not transitions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from seedbed.ops.collectives import mean_over_devices


def masked_mean(x: Array, valid: Array) -> Array:
    """Returns the mean of the elements of `x` that `valid` (bool, same shape) marks; 0 if it marks none."""
    return jnp.where(valid, x, 0.0).sum() / jnp.maximum(valid.sum(), 1)


def policy_gradient_losses(log_prob: Array, advantage: Array) -> Array:
    """Returns rows, in the shape of `log_prob`, whose gradient is minus the policy gradient.

    No gradient flows through the advantage. Source: Sutton et al. (2000).
    """
    return -log_prob * lax.stop_gradient(advantage)


def value_losses(value: Array, target: Array) -> Array:
    """Returns half the squared distance to a target, in the shape of `value`.

    No gradient flows through the target.
    """
    return 0.5 * jnp.square(value - lax.stop_gradient(target))


def global_norm(tree: Any) -> Array:
    """Returns the Euclidean norm of all leaves together."""
    return jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(tree)))


def normalised_advantages(advantage: Array, target: Array, valid: Array) -> Array:
    """Scales advantages to mean 0 and deviation 1 over the valid rows of all devices.

    The result is 0 if all advantages are equal.
    """
    count = mean_over_devices(valid.mean(dtype=jnp.float32))
    weight = valid / jnp.maximum(count, 1e-6)

    def mean(x: Array) -> Array:
        return mean_over_devices((weight * x).mean())

    centred = advantage - mean(advantage)
    # Advantages below a hundred-thousandth of the values' size are only rounding errors.
    least = jnp.maximum(1e-10 * mean(jnp.square(target)), 1e-30)
    return centred * jax.lax.rsqrt(mean(jnp.square(centred)) + least)


def explained_variance(value: Array, target: Array, valid: Array) -> Array:
    """Returns the share, at most 1, of the valid targets' variance that the values explain.

    It is negative if the errors vary more than the targets, and 0 if the targets are constant.
    """

    def variance(x: Array) -> Array:
        return masked_mean(jnp.square(x - masked_mean(x, valid)), valid)

    total = variance(target)
    # In float32 the variance of a constant is not exactly 0.
    threshold = 1e-10 * masked_mean(jnp.square(target), valid)
    informative = total > threshold
    return jnp.where(
        informative, 1.0 - variance(target - value) / jnp.where(informative, total, 1.0), 0.0
    )
