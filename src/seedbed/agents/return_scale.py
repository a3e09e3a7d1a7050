"""Values learned in running deviations of the return, whatever the size of rewards.

Source: van Hasselt et al. (2016), "Learning values across many orders of magnitude" (PopArt).
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from seedbed.ops import statistics
from seedbed.ops.statistics import Deviations, RunningStatistics
from seedbed.types import ArraySpec

FORGOTTEN = 0.01
"""Share of the past that a batch replaces once a hundred were seen; before, all batches count alike."""
_LEAST_DEVIATION = 0.01


class ReturnScale(NamedTuple):
    """Where values lie: the network's output u stands for the value `deviation * u + mean`.

    A deviation of 0 says that nothing is known yet; values are then 0.
    """

    mean: Array  # float32 scalar
    deviation: Array  # float32 scalar

    @property
    def known(self) -> Array:
        """Whether there is a scale; bool scalar."""
        return self.deviation > 0

    def values(self, output: Array) -> Array:
        """Returns the values that outputs of the network stand for, of any shape."""
        return output * self.deviation + self.mean

    def outputs(self, value: Array) -> Array:
        """Returns the outputs that stand for values, of any shape; 0 while nothing is known."""
        return self.scaled(value - self.mean)

    def scaled(self, difference: Array) -> Array:
        """Returns differences of values in deviations, of any shape; 0 while nothing is known."""
        return jnp.where(self.known, difference / jnp.where(self.known, self.deviation, 1.0), 0.0)

    def change(self, to: ReturnScale) -> tuple[Array, Array]:
        """Returns the factor and offset that let outputs stand for the same values in another scale.

        Where either scale is unknown, outputs stay as they are: values then begin near the mean return.
        """
        both = self.known & to.known
        divisor = jnp.where(both, to.deviation, 1.0)
        factor = jnp.where(both, self.deviation / divisor, 1.0)
        return factor, jnp.where(both, (self.mean - to.mean) / divisor, 0.0)


def initial() -> RunningStatistics:
    """Makes statistics of no returns."""
    return statistics.initial(ArraySpec((), "float32"))


def scale_of(seen: RunningStatistics | tuple[()]) -> ReturnScale:
    """Reads the scale off statistics of returns; without any, values are the network's outputs."""
    if not isinstance(seen, RunningStatistics):
        return ReturnScale(jnp.float32(0.0), jnp.float32(1.0))
    # Returns that hardly differ are not blown up beyond a hundredth of their size.
    least = jnp.square(_LEAST_DEVIATION * seen.mean)
    deviation = jnp.sqrt(jnp.maximum(seen.variance, least))
    return ReturnScale(seen.mean, jnp.where(seen.weight > 0, deviation, 0.0))


def return_sums(
    seen: RunningStatistics | tuple[()], returns: Array, valid: Array
) -> Deviations | tuple[()]:
    """Sums what the returns `[T, B]` of the valid rows add to the statistics, divided by their number."""
    if not isinstance(seen, RunningStatistics):
        return ()
    count = valid.sum(dtype=jnp.float32)
    # An invalid row may hold anything; at the mean it adds nothing.
    rows = jnp.where(valid, returns, seen.mean).reshape(-1)
    sums = statistics.deviations(seen, rows)._replace(weight=count)
    return sums.times(1.0 / jnp.maximum(count, 1.0))


def absorb(
    seen: RunningStatistics | tuple[()], sums: Deviations | tuple[()]
) -> RunningStatistics | tuple[()]:
    """Adds a batch's sums, where there are any, and forgets a share of what came before.

    Returns grow while an agent learns, so their mean and deviation must follow.
    """
    if not (isinstance(seen, RunningStatistics) and isinstance(sums, Deviations)):
        return ()
    return statistics.absorb(seen._replace(weight=(1.0 - FORGOTTEN) * seen.weight), sums)
