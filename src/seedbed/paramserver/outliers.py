"""Losses that are far from the usual: a learner does not push their gradients.

Source: Nair et al. (2015), "Massively parallel methods for deep reinforcement learning", section 4.
"""

from __future__ import annotations

import math

# The share that a new loss has in the running mean and deviation, and the losses before the first verdict.
_SHARE, _FIRST = 0.001, 100


class Outliers:
    """The running mean and deviation of the absolute loss. For one thread."""

    def __init__(self, deviations: float) -> None:
        """A loss more than `deviations` above the mean is an outlier; with 0 none is."""
        self.deviations = deviations
        self._mean = self._square = 0.0
        self._seen = 0
        self.discarded = 0

    def discards(self, loss: float) -> bool:
        """Counts a loss; returns whether its gradient is to be discarded."""
        size = abs(loss)
        deviation = math.sqrt(max(0.0, self._square - self._mean**2))
        far = size > self._mean + self.deviations * deviation
        outlier = bool(self.deviations) and self._seen >= _FIRST and far
        self._seen += 1
        self.discarded += outlier
        # All alike at first, or the zeros of the beginning would count.
        share = max(_SHARE, 1.0 / self._seen)
        self._mean += share * (size - self._mean)
        self._square += share * (size**2 - self._square)
        return outlier
