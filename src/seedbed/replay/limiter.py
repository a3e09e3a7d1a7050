"""The balance between adding items to a replay and drawing them."""

from __future__ import annotations

from seedbed.types import Replay

SLACK_BATCHES = 8
"""Batches by which drawing may be behind `ratio` before acting must wait."""


class RatioLimiter:
    """Ties drawing to adding, so that an item is drawn `Replay.ratio` times on average.

    Whoever changes the replay calls `added` and `drawn` under one lock; any thread may ask the rest.
    """

    def __init__(self, experience: Replay) -> None:
        self._experience = experience
        # Draws that `ratio` has asked for as items were added, minus the draws that were made.
        self.owed = 0.0

    def added(self, items: int, held: int) -> None:
        """Counts items that are added to the `held` ones; those up to `min_size` ask for no draws."""
        missing = max(0, self._experience.min_size - held)
        self.owed += max(0, items - missing) * self._experience.ratio

    def drawn(self, items: int) -> None:
        """Counts items that were drawn."""
        self.owed -= items

    def may_draw(self, batch: int, held: int) -> bool:
        """Returns whether the `held` items are `min_size`, and `ratio` asks for `batch` more draws."""
        return held >= max(1, self._experience.min_size) and self.owed >= batch

    def may_add(self, held: int) -> bool:
        """Returns whether acting may go on: there are fewer than `min_size` items, or drawing keeps up.

        Drawing keeps up while it is less than `SLACK_BATCHES` batches behind `ratio`.
        """
        few = held < self._experience.min_size
        return few or self.owed < SLACK_BATCHES * self._experience.batch
