"""Weights of items in prioritised replay, and the importance weights that correct a loss for them.

Source: Schaul et al. (2016), "Prioritized experience replay", sections 3.3 and 3.4. The functions take
numpy and JAX arrays, and any thread may call them.
"""

from __future__ import annotations

from seedbed.types import Array, Replay


def is_prioritised(experience: Replay) -> bool:
    """Returns whether priorities count; if not, all items are drawn with equal probabilities."""
    return experience.priority_exponent > 0


def draw_weights(experience: Replay, priorities: Array) -> Array:
    """Returns the weights `[N]`, to which drawing is proportional, for priorities `[N]` above 0."""
    return priorities**experience.priority_exponent


def importance_weights(experience: Replay, drawn: Array) -> Array:
    """Returns importance weights `[B]`, at most 1, of items that were drawn with weights `drawn` `[B]`.

    They are divided by the batch's largest, so the total weight of all items cancels.
    """
    return (drawn / drawn.min()) ** -experience.importance_exponent
