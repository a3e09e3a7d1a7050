"""Learning of action values: targets, errors and priorities of one sequence `[T]`.

Callers vmap over the batch. Names and masks are those of `ops.returns`: `discount_t` is 0 where an
episode terminated, `trace_t` where it ended in any way, and a truncated step bootstraps from the
values of the true last observation.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from seedbed.ops import returns


def chosen_values(q: Array, action: Array) -> Array:
    """Values `[...]` of actions `[...]` int32 out of `[..., A]`."""
    # A gather's gradient is a scatter, which XLA does row by row on CPU.
    return (q * jax.nn.one_hot(action, q.shape[-1])).sum(-1)


def double_q_values(q_t: Array, selector_t: Array) -> Array:
    """Values `[...]` in `q_t` `[..., A]` of the actions that `selector_t` prefers, without gradient.

    Source: van Hasselt, Guez and Silver (2016), equation 4.
    """
    return lax.stop_gradient(chosen_values(q_t, jnp.argmax(selector_t, axis=-1)))


class OpeningReturn(NamedTuple):
    """The return of a sequence's first row: `rewards + discount * v[last + 1]`; scalars."""

    rewards: Array  # float32: their discounted sum
    discount: Array  # float32: of the value from which it bootstraps
    last: Array  # int32: the row whose arrival has that value


def opening_return(r_t: Array, discount_t: Array, trace_t: Array) -> OpeningReturn:
    """Return of the first row over all `[T]` rewards, fewer if the episode ends before.

    It equals row 0 of `returns.n_step_returns` with n = T, but needs the value of one row only.
    `trace_t` is 0 or 1. Source: Sutton and Barto (2018), equation 7.1.
    """
    reached = jnp.cumprod(jnp.append(1.0, trace_t[:-1]))
    # Rows that are not reached leave the product as it is.
    discounts = jnp.cumprod(jnp.where(reached > 0, discount_t, 1.0))
    before = jnp.append(1.0, discounts[:-1])
    last = reached.sum().astype(jnp.int32) - 1
    return OpeningReturn((reached * before * r_t).sum(), discounts[-1], last)


def rescaled_n_step_returns(
    v_t: Array, r_t: Array, discount_t: Array, trace_t: Array, n: int
) -> Array:
    """As `returns.n_step_returns`, of values `[T]` that are rescaled, and so is the result.

    Source: Kapturowski et al. (2019), equation 1 of section 2.3.
    """
    plain = returns.n_step_returns(returns.unrescale_value(v_t), r_t, discount_t, trace_t, n)
    return returns.rescale_value(plain)


def retrace_returns(q_t: Array, v_t: Array, r_t: Array, discount_t: Array, c_t: Array) -> Array:
    """Retrace targets `[T]`, without gradient.

    `q_t` is the value of the action taken next, `v_t` the expected value under the target policy, and
    `c_t` the trace lambda * min(1, pi / mu) of that action, 0 where an episode ended; the last row
    has no action after it, and bootstraps from `v_t`. Source: Munos et al. (2016), equation 4.
    """
    c_t = c_t.at[-1].set(0.0)
    # A lambda-return whose rewards also make up for having taken q_t rather than v_t.
    return returns.lambda_returns(v_t, r_t + discount_t * c_t * (v_t - q_t), discount_t, c_t)


def huber_losses(error: Array, bound: float) -> Array:
    """Half the squared error, `[...]`, and linear where its gradient would be beyond `bound`.

    Source: Huber (1964); its gradient is that of the clipped errors of Mnih et al. (2015).
    """
    clipped = jnp.clip(error, -bound, bound)
    return clipped * (error - 0.5 * clipped)


def mixed_priority(error: Array, valid: Array, largest_share: float) -> Array:
    """Priority of a sequence: largest and mean size of its valid errors, mixed; 0 without any.

    `error` and `valid` are `[T]`. Source: Kapturowski et al. (2019), section 2.3.
    """
    size = jnp.where(valid, jnp.abs(error), 0.0)
    mean = size.sum() / jnp.maximum(valid.sum(), 1)
    return lax.stop_gradient(largest_share * size.max() + (1.0 - largest_share) * mean)
