"""A sum tree: weights of slots, set and drawn in proportion many at a time."""

from __future__ import annotations

import numpy as np

from seedbed.replay import kernels


class SumTree:
    """Weights, 0 or above, of `capacity` slots; `set` and `sample` cost O(log capacity) each.

    An inner node is the sum of its two children as they are, so the whole is a function of the leaves:
    a tree that is set from saved weights draws the same slots.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._first = 1 << max(capacity - 1, 0).bit_length()  # node of slot 0
        self._nodes = np.zeros(2 * self._first, np.float64)
        self.weights = self._nodes[self._first : self._first + capacity]
        self.weights.flags.writeable = False

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._nodes[1])

    def set(self, slots: np.ndarray, weights: np.ndarray) -> None:
        """Sets the weights `[k]` of slots `[k]`; of a slot that is named twice the last counts."""
        slots, weights = (np.ascontiguousarray(*x) for x in ((slots, np.int64), (weights, float)))
        kernels.weigh(self._nodes, slots, weights)

    def sample(self, uniforms: np.ndarray) -> np.ndarray:
        """Returns slots `[k]` int64 for `uniforms` `[k]` in [0, 1); never one of weight 0.

        The total must be above 0.
        """
        return kernels.draw(self._nodes, uniforms)

    def check_valid(self) -> None:
        """Raises AssertionError where an inner node is not the sum of its children."""
        assert (self._nodes[self._first :] >= 0).all(), "a weight is negative or not a number"
        inner = np.arange(1, self._first)
        sums = self._nodes[2 * inner] + self._nodes[2 * inner + 1]
        assert (self._nodes[inner] == sums).all(), "an inner node is not the sum of its children"
