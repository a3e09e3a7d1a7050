"""A sum tree over numpy: weights of slots, set and drawn in proportion many at a time."""

from __future__ import annotations

import numpy as np


class SumTree:
    """Weights, 0 or above, of `capacity` slots; `set` and `sample` cost O(log capacity) each.

    An inner node is the sum of its two children as they are, so the whole is a function of the leaves:
    a tree that is set from saved weights draws the same slots.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._depth = max(capacity - 1, 0).bit_length()
        self._first = (
            1 << self._depth
        )  # node of slot 0; node 1 is the root, node k has 2k and 2k + 1
        self._nodes = np.zeros(2 * self._first, np.float64)
        self.weights = self._nodes[self._first : self._first + capacity]
        self.weights.flags.writeable = False

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._nodes[1])

    def set(self, slots: np.ndarray, weights: np.ndarray) -> None:
        """Sets the weights `[k]` of slots `[k]`; of a slot that is named twice the last counts."""
        nodes = slots.astype(np.int64) + self._first
        self._nodes[nodes] = weights
        for _ in range(self._depth):
            nodes >>= 1
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def sample(self, uniforms: np.ndarray) -> np.ndarray:
        """Returns slots `[k]` int64 for `uniforms` `[k]` in [0, 1); never one of weight 0.

        The total must be above 0.
        """
        nodes = np.ones(uniforms.shape, np.int64)
        left_over = uniforms * self._nodes[1]
        for _ in range(self._depth):
            nodes <<= 1
            left = self._nodes[nodes]
            # Rounding may leave as much as a node holds: an empty right child is never entered.
            right = (left_over >= left) & (self._nodes[nodes + 1] > 0)
            left_over -= np.where(right, left, 0.0)
            nodes += right
        return nodes - self._first

    def check_valid(self) -> None:
        """Raises AssertionError where an inner node is not the sum of its children."""
        assert (self._nodes[self._first :] >= 0).all(), "a weight is negative or not a number"
        inner = np.arange(1, self._first)
        sums = self._nodes[2 * inner] + self._nodes[2 * inner + 1]
        assert (self._nodes[inner] == sums).all(), "an inner node is not the sum of its children"
