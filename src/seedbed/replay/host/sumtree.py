"""A sum tree: sets weights of slots, and draws slots in proportion to them, many at a time."""

from __future__ import annotations

import numpy as np

from seedbed.replay.host import kernels


class SumTree:
    """A binary tree over the weights (0 or above) of `capacity` slots.

    `set` and `sample` cost O(log capacity) for each slot. An inner node is always computed as the sum of its
    two children, so the tree depends on its leaves only: a tree that is set from saved weights draws the same
    slots. `weights` is a read-only view `[capacity]`, float64. Use it under the storage's lock.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # The node of slot 0.
        self._first = 1 << max(capacity - 1, 0).bit_length()
        self._nodes = np.zeros(2 * self._first, np.float64)
        self.weights = self._nodes[self._first : self._first + capacity]
        self.weights.flags.writeable = False

    @property
    def total(self) -> float:
        """Returns the sum of all weights. Call under the storage's lock."""
        return float(self._nodes[1])

    def set(self, slots: np.ndarray, weights: np.ndarray) -> None:
        """Sets the weights `[k]` of slots `[k]`. If a slot occurs twice, its last weight counts.

        Call under the storage's lock.
        """
        slots, weights = (np.ascontiguousarray(*x) for x in ((slots, np.int64), (weights, float)))
        kernels.weigh(self._nodes, slots, weights)

    def sample(self, uniforms: np.ndarray) -> np.ndarray:
        """Returns slots `[k]` int64, drawn in proportion to their weights by `uniforms` `[k]` in [0, 1).

        `uniforms` is float64. The total must be above 0; then no slot of weight 0 is returned. Call under
        the storage's lock.
        """
        return kernels.draw(self._nodes, uniforms)

    def check_valid(self) -> None:
        """Raises AssertionError if a weight is negative, or an inner node is not the sum of its children.

        Call under the storage's lock.
        """
        assert (self._nodes[self._first :] >= 0).all(), "a weight is negative or not a number"
        inner = np.arange(1, self._first)
        sums = self._nodes[2 * inner] + self._nodes[2 * inner + 1]
        assert (self._nodes[inner] == sums).all(), "an inner node is not the sum of its children"
