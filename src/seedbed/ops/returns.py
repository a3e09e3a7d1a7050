"""Returns, advantages and value targets of one sequence `[T]`; callers vmap over the batch.

Names follow the field. `v_tm1` is the value of the observation in which the action was taken. `r_t`,
`discount_t` and `v_t` are the reward, discount and value that follow the action. `trace_t` is lambda, and 0
on steps that end an episode, so that no recursion crosses an end. A truncated step keeps gamma as its
discount and bootstraps from `v_t` of the true last observation.

Recursions are `lax.scan`s. On CPU they are faster than `associative_scan` and than an unrolled loop at
every size that was tried, and they compile in 0.1 s.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class VtraceClips(NamedTuple):
    """Upper bounds of the importance weights, named as in Espeholt et al. (2018)."""

    rho: float = 1.0  # for the temporal differences; decides the fixed point
    c: float = 1.0  # for the traces; decides the speed of contraction
    pg_rho: float = 1.0  # for the advantage of the policy gradient


_UNIT_CLIPS = VtraceClips()


class VtraceReturn(NamedTuple):
    """The result of V-trace: arrays `[T]` without gradient. Errors and advantages are 0 if rho is 0."""

    errors: Array  # vs - v_tm1
    pg_advantage: Array
    targets: Array  # vs


def vtrace(
    v_tm1: Array,
    v_t: Array,
    r_t: Array,
    discount_t: Array,
    trace_t: Array,
    rho_tm1: Array,
    clips: VtraceClips = _UNIT_CLIPS,
) -> VtraceReturn:
    """Computes V-trace targets and advantages of one sequence; all arrays are `[T]`.

    `rho_tm1` is pi(a) / mu(a), and 0 on rows that are auto-resets. Source: Espeholt et al. (2018),
    equations 1 and 2. As in rlax, the advantage blends `v_t` with the next target by `trace_t`; at
    lambda = 1 this is the paper's definition.
    """
    c_tm1 = trace_t * jnp.minimum(clips.c, rho_tm1)
    delta_t = jnp.minimum(clips.rho, rho_tm1) * (r_t + discount_t * v_t - v_tm1)
    errors = _reverse_linear_recurrence(delta_t, discount_t * c_tm1, jnp.zeros_like(delta_t[0]))
    errors_t = jnp.append(errors[1:], jnp.zeros_like(errors[:1]))
    # v_t + errors_t is the target of the next row, unless the trace is cut.
    q_t = r_t + discount_t * (v_t + trace_t * errors_t)
    pg_advantage = jnp.minimum(clips.pg_rho, rho_tm1) * (q_t - v_tm1)
    return lax.stop_gradient(VtraceReturn(errors, pg_advantage, v_tm1 + errors))


def generalised_advantages(
    v_tm1: Array, v_t: Array, r_t: Array, discount_t: Array, trace_t: Array
) -> Array:
    """Computes generalised advantage estimates `[T]`, without gradient.

    Values on auto-reset rows have no meaning. Source: Schulman et al. (2016), equation 16.
    """
    delta_t = r_t + discount_t * v_t - v_tm1
    start = jnp.zeros_like(delta_t[0])
    return lax.stop_gradient(_reverse_linear_recurrence(delta_t, discount_t * trace_t, start))


def lambda_returns(v_t: Array, r_t: Array, discount_t: Array, trace_t: Array) -> Array:
    """Computes lambda-returns `[T]`, through which gradients flow. The last row bootstraps from `v_t[-1]`.

    Source: Sutton and Barto (2018), equation 12.2 in recursive form.
    """
    offset = r_t + discount_t * (1.0 - trace_t) * v_t
    return _reverse_linear_recurrence(offset, discount_t * trace_t, v_t[-1])


def n_step_returns(v_t: Array, r_t: Array, discount_t: Array, trace_t: Array, n: int) -> Array:
    """Computes n-step returns `[T]`, without gradient.

    A return has fewer than `n` rewards if its episode or the sequence ends before. With `trace_t` between
    0 and 1 each step blends `v_t` with the longer return. Source: Sutton and Barto (2018), equation 7.1.
    """
    returns = r_t + discount_t * v_t
    for _ in range(n - 1):
        longer = jnp.append(returns[1:], v_t[-1:])
        returns = r_t + discount_t * ((1.0 - trace_t) * v_t + trace_t * longer)
    return lax.stop_gradient(returns)


def rescale_value(x: Array, epsilon: float = 1e-3) -> Array:
    """Computes h(x) = sign(x)(sqrt(|x| + 1) - 1) + epsilon x, for any shape.

    The code avoids the difference, which would cancel near 0: float32 is precise there, and the function is
    differentiable at 0. Source: Pohlen et al. (2018), proposition A.2.
    """
    return x / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + epsilon * x


def unrescale_value(y: Array, epsilon: float = 1e-3) -> Array:
    """Computes the inverse of `rescale_value`, for any shape.

    With u = sqrt(|x| + 1) - 1, |y| = epsilon u^2 + (1 + 2 epsilon) u. The code takes the root in the form
    that does not cancel, so that a float32 round trip is wrong by a few units in the last place only.
    Source: Pohlen et al. (2018), proposition A.2.
    """
    linear = 1.0 + 2.0 * epsilon
    u = 2.0 * y / (linear + jnp.sqrt(linear**2 + 4.0 * epsilon * jnp.abs(y)))
    return u * (jnp.abs(u) + 2.0)


def _reverse_linear_recurrence(offset: Array, factor: Array, start: Array) -> Array:
    """Solves y_t = offset_t + factor_t y_{t+1} backwards over `[T]`; y_T is `start`."""

    def step(y: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        y = row[0] + row[1] * y
        return y, y

    return jax.lax.scan(step, start, (offset, factor), reverse=True)[1]
