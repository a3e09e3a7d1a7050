"""Normalisation of values by the running mean and deviation of returns, for rewards of any size.

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
"""Share of the weight of all earlier returns that each batch removes: about 100 batches count."""
_LEAST_DEVIATION = 0.01
"""Smallest deviation of returns, as a share of the size of their mean."""


class ReturnScale(NamedTuple):
    """The scale of values: the network's output u stands for the value `deviation * u + mean`.

    A deviation of 0 means that the scale is not known yet. Values are then 0.
    """

    mean: Array  # float32 scalar
    deviation: Array  # float32 scalar

    @property
    def known(self) -> Array:
        """Returns whether the scale is known; bool scalar."""
        return self.deviation > 0

    def values(self, output: Array) -> Array:
        """Returns the values for outputs of the network, of any shape."""
        return output * self.deviation + self.mean

    def outputs(self, value: Array) -> Array:
        """Returns the outputs that stand for values, of any shape; 0 if the scale is not known."""
        return self.scaled(value - self.mean)

    def scaled(self, difference: Array) -> Array:
        """Divides differences of values by the deviation, any shape; 0 if the scale is not known."""
        return jnp.where(self.known, difference / jnp.where(self.known, self.deviation, 1.0), 0.0)

    def change(self, to: ReturnScale) -> tuple[Array, Array]:
        """Returns the factor and offset that turn outputs in this scale into outputs in scale `to`.

        `factor * output + offset` stands for the same value in the new scale. If either scale is unknown,
        outputs do not change: values then begin near the mean return.
        """
        both = self.known & to.known
        divisor = jnp.where(both, to.deviation, 1.0)
        factor = jnp.where(both, self.deviation / divisor, 1.0)
        return factor, jnp.where(both, (self.mean - to.mean) / divisor, 0.0)


def initial() -> RunningStatistics:
    """Makes the statistics of returns before any return was seen."""
    return statistics.initial(ArraySpec((), "float32"))


def scale_of(seen: RunningStatistics | tuple[()]) -> ReturnScale:
    """Returns the scale that statistics of returns give; for (), values are the network's outputs."""
    if not isinstance(seen, RunningStatistics):
        return ReturnScale(jnp.float32(0.0), jnp.float32(1.0))
    # The deviation is at least a hundredth of the mean: returns that hardly differ are not blown up.
    least = jnp.square(_LEAST_DEVIATION * seen.mean)
    deviation = jnp.sqrt(jnp.maximum(seen.variance, least))
    return ReturnScale(seen.mean, jnp.where(seen.weight > 0, deviation, 0.0))


def return_sums(
    seen: RunningStatistics | tuple[()], returns: Array, valid: Array
) -> Deviations | tuple[()]:
    """Sums over the returns `[T, B]` of valid rows for the statistics, divided by their number.

    Returns () if there are no statistics.
    """
    if not isinstance(seen, RunningStatistics):
        return ()
    sums = statistics.deviations(seen, returns.reshape(-1), valid.reshape(-1))
    return sums.times(1.0 / jnp.maximum(sums.weight, 1.0))


def absorb(
    seen: RunningStatistics | tuple[()], sums: Deviations | tuple[()]
) -> RunningStatistics | tuple[()]:
    """Adds a batch's sums to the statistics and removes a share of the earlier weight (`FORGOTTEN`).

    Returns grow while an agent learns, so their mean and deviation must follow. The result is () if there
    are no statistics or no sums.
    """
    if not (isinstance(seen, RunningStatistics) and isinstance(sums, Deviations)):
        return ()
    return statistics.absorb(seen._replace(weight=(1.0 - FORGOTTEN) * seen.weight), sums)
