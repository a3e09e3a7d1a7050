"""Learning of action values: targets, errors and priorities of one sequence `[T]`.

Callers vmap over the batch. Names and masks are those of `ops.returns`: `discount_t` is 0 on a step that
terminates the episode, `trace_t` is 0 on a step that ends it in any way, and a truncated step bootstraps
from the values of the true last observation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from seedbed.ops import returns


def chosen_values(q: Array, action: Array) -> Array:
    """Picks the values `[...]` of actions int32 `[...]` from `q` `[..., A]`."""
    # No gather: its gradient is a scatter, which XLA runs row by row on CPU.
    return (q * jax.nn.one_hot(action, q.shape[-1])).sum(-1)


def double_q_values(q_t: Array, selector_t: Array) -> Array:
    """Picks from `q_t` the values of the actions that are best in `selector_t`, without gradient.

    Both arguments are `[..., A]`, the result is `[...]`. Source: van Hasselt, Guez and Silver (2016),
    equation 4.
    """
    return lax.stop_gradient(chosen_values(q_t, jnp.argmax(selector_t, axis=-1)))


class OpeningReturn(NamedTuple):
    """The return of a sequence's first row, in scalars: `rewards + discount * v[last + 1]`.

    `v` has a value for each of the T + 1 observations; `v[last + 1]` is `v_t[last]`.
    """

    rewards: Array  # float32: discounted sum of the rewards
    discount: Array  # float32: factor of the value from which the return bootstraps
    last: Array  # int32: index of the last row in the return


def opening_return(r_t: Array, discount_t: Array, trace_t: Array) -> OpeningReturn:
    """Computes the return of the first row over all `[T]` rewards, or fewer if the episode ends before.

    It equals row 0 of `returns.n_step_returns` with n = T, but needs the value of one row only.
    `trace_t` must be 0 or 1. Source: Sutton and Barto (2018), equation 7.1.
    """
    reached = jnp.cumprod(jnp.append(1.0, trace_t[:-1]))
    # Rows after the end do not change the product.
    discounts = jnp.cumprod(jnp.where(reached > 0, discount_t, 1.0))
    before = jnp.append(1.0, discounts[:-1])
    last = reached.sum().astype(jnp.int32) - 1
    return OpeningReturn((reached * before * r_t).sum(), discounts[-1], last)


def rescaled_n_step_returns(
    v_t: Array, r_t: Array, discount_t: Array, trace_t: Array, n: int
) -> Array:
    """Computes `returns.n_step_returns` for rescaled values `v_t` `[T]`; the result `[T]` is rescaled too.

    Source: Kapturowski et al. (2019), equation 1 of section 2.3.
    """
    plain = returns.n_step_returns(returns.unrescale_value(v_t), r_t, discount_t, trace_t, n)
    return returns.rescale_value(plain)


def huber_losses(error: Array, bound: float) -> Array:
    """Computes half the squared error `[...]`; the loss is linear if the size of the error is above `bound`.

    Source: Huber (1964). The gradient is the clipped error of Mnih et al. (2015).
    """
    clipped = jnp.clip(error, -bound, bound)
    return clipped * (error - 0.5 * clipped)


def mixed_priority(error: Array, valid: Array, largest_share: float) -> Array:
    """Computes the priority of a sequence: a mix of the largest and the mean size of its valid errors.

    `error` and `valid` are `[T]`; `largest_share` is the weight of the largest. The priority is a scalar
    without gradient, and 0 if no error is valid. Source: Kapturowski et al. (2019), section 2.3.
    """
    size = jnp.where(valid, jnp.abs(error), 0.0)
    mean = size.sum() / jnp.maximum(valid.sum(), 1)
    return lax.stop_gradient(largest_share * size.max() + (1.0 - largest_share) * mean)
