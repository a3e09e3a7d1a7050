"""Loss rows, and the means that leave out rows which are not transitions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def masked_mean(x: Array, valid: Array) -> Array:
    """Mean of `x` where `valid` (bool, same shape); 0 where nothing is valid."""
    return jnp.where(valid, x, 0.0).sum() / jnp.maximum(valid.sum(), 1)


def policy_gradient_losses(log_prob: Array, advantage: Array) -> Array:
    """Rows whose gradient is the policy gradient's, shape of `log_prob`; Sutton et al. (2000)."""
    return -log_prob * lax.stop_gradient(advantage)


def value_losses(value: Array, target: Array) -> Array:
    """Half the squared distance to a fixed target, shape of `value`."""
    return 0.5 * jnp.square(value - lax.stop_gradient(target))


def global_norm(tree: Any) -> Array:
    """Euclidean norm of all leaves together."""
    return jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(tree)))


def explained_variance(value: Array, target: Array, valid: Array) -> Array:
    """Share of the valid targets' variance that the values explain; 0 of constant targets."""

    def variance(x: Array) -> Array:
        return masked_mean(jnp.square(x - masked_mean(x, valid)), valid)

    total = variance(target)
    # A constant's variance is not exactly 0 in float32.
    threshold = 1e-10 * masked_mean(jnp.square(target), valid)
    informative = total > threshold
    return jnp.where(
        informative, 1.0 - variance(target - value) / jnp.where(informative, total, 1.0), 0.0
    )
