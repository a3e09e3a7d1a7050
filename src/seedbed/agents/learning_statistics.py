"""What actor-critic agents keep for normalisation while they learn, and the sums that a batch adds to it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from seedbed.agents.base import ObservationStats, Sums
from seedbed.ops import return_scale, statistics
from seedbed.ops.statistics import Deviations, RunningStatistics
from seedbed.types import Tree


class LearningStatistics(NamedTuple):
    """The state of normalisation while learning; () for statistics that are not kept."""

    returns: RunningStatistics | tuple[()]  # of value targets
    sums: Sums  # from this batch's minibatches so far
    parts: Array  # int32 scalar: minibatches of this batch that were applied
    duals: Tree = ()  # an agent's multipliers


def add_minibatch(
    held: LearningStatistics,
    seen: ObservationStats,
    new: Sums,
    weight: Array,
    passes: tuple[int, int],
) -> tuple[ObservationStats, LearningStatistics]:
    """Adds the sums of a minibatch of `weight` rows; returns the statistics of observations and the rest.

    `passes` are the numbers of epochs and minibatches. Statistics absorb a batch after its last minibatch.
    Until then, all its minibatches, advantages and targets use the statistics of the policy that acted. Only
    the first epoch is summed, because it has every row once.
    """
    epochs, minibatches = passes
    factor = jnp.where(held.parts < minibatches, weight, 0.0)
    sums = Sums(
        observations=_add_sums(held.sums.observations, new.observations, factor),
        returns=_add_sums(held.sums.returns, new.returns, factor),
    )
    over = held.parts + 1 == epochs * minibatches

    def select(new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda a, b: jnp.where(over, a, b), new, old)

    seen = select(absorb(seen, sums.observations, jnp.float32(1.0)), seen)
    returns = select(return_scale.absorb(held.returns, sums.returns), held.returns)
    return seen, held._replace(
        returns=returns,
        sums=select(zero_sums(seen, returns), sums),
        parts=jnp.where(over, 0, held.parts + 1),
    )


def unroll_sums(
    seen: ObservationStats, observation: Tree, valid: Array, updates: Array
) -> Deviations | tuple[()]:
    """Sums over T rows of observations for the statistics, each unroll with the weight of one row.

    One row is a large enough sample of an unroll (`sampled_row`), except in the first batch: all its unrolls
    are as far from a reset. All rows of the first batch count. Rows that are not valid never do.
    """
    if not isinstance(seen, RunningStatistics):
        return ()
    rows, batch = valid.shape
    weight = valid.sum(dtype=jnp.float32)

    def whole() -> Deviations | tuple[()]:
        folded = jax.tree.map(lambda x: x[:rows].reshape(rows * batch, *x.shape[2:]), observation)
        return observation_sums(seen, folded, valid.reshape(-1), weight * rows)

    def one() -> Deviations | tuple[()]:
        row = sampled_row(updates, rows)
        return observation_sums(
            seen, jax.tree.map(lambda x: x[row], observation), valid[row], weight
        )

    return jax.lax.cond(seen.weight > 0, one, whole)


def sampled_row(updates: Array, rows: int) -> Array:
    """Returns the row, int32, that stands for each unroll in the update after `updates` others.

    Over updates every row has its turn, in an order without a period. A fixed one would always show the same
    moment if episodes are as long as unrolls, or if the items of a replay begin where episodes begin: the
    state after a reset, whose deviation is that of the noise of resets.
    """
    # Multiples of the golden ratio fill the unit interval evenly (Weyl).
    turned = updates.astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    return (((turned >> 16) * jnp.uint32(rows)) >> 16).astype(jnp.int32)


def zero_sums(seen: RunningStatistics | tuple[()], returns: RunningStatistics | tuple[()]) -> Sums:
    """Makes the sums of no rows, for the statistics of observations and of returns."""

    def none(of: RunningStatistics | tuple[()]) -> Deviations | tuple[()]:
        return statistics.no_deviations(of) if isinstance(of, RunningStatistics) else ()

    return Sums(observations=none(seen), returns=none(returns))


def _add_sums(
    held: Deviations | tuple[()], new: Deviations | tuple[()], factor: Array
) -> Deviations | tuple[()]:
    """Adds `factor` times new sums to those held; returns () if either is ()."""
    if isinstance(held, Deviations) and isinstance(new, Deviations):
        return statistics.add(held, new.times(factor))
    return ()


def observation_sums(
    seen: ObservationStats, observation: Tree, counts: Array, weight: Array
) -> Deviations | tuple[()]:
    """Sums over those rows `[N, ...]` of observations that count, bool `[N]`, divided by `weight`.

    `weight` is the number of valid rows, by which the learner averages gradients. The sums are averaged
    with them. They are divided by the weight of a part here, and multiplied by that of the whole batch in
    `absorb`; so the result is the same for every division of the batch into parts. Returns () if there are no
    statistics.
    """
    if not isinstance(seen, RunningStatistics):
        return ()
    return statistics.deviations(seen, observation, counts).times(1.0 / jnp.maximum(weight, 1.0))


def absorb(seen: ObservationStats, sums: Deviations | tuple[()], weight: Array) -> ObservationStats:
    """Multiplies sums by `weight` and adds them to the statistics; returns () if there are none."""
    if isinstance(seen, RunningStatistics) and isinstance(sums, Deviations):
        return statistics.absorb(seen, sums.times(weight))
    return ()
