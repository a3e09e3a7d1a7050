"""Choices at random, of those that the masks of observations allow."""

from __future__ import annotations

import numpy as np

from seedbed import trees
from seedbed.spaces import ACTION_MASK, entry
from seedbed.types import Discrete, MultiDiscrete, Tree


def random_choices(
    action: Discrete | MultiDiscrete, observation: Tree, size: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws choices, int32 `[size]` or `[size, sets]`, for observations `[size, ...]`, numpy or JAX.

    A mask that forbids all choices of a set forbids none, as in `ops.masks`.
    """
    sets = (action.n,) if isinstance(action, Discrete) else action.nvec
    lots, mask = rng.random((size, sum(sets))), entry(observation, ACTION_MASK)
    if mask is not None:
        parts = [np.reshape(leaf, (size, -1)) for leaf in trees.leaves(mask)]
        lots[np.concatenate(parts, axis=-1) == 0] -= 1.0
    parts = np.split(lots, np.cumsum(sets)[:-1], axis=-1)
    chosen = np.stack([part.argmax(-1) for part in parts], axis=-1).astype(np.int32)
    return chosen[:, 0] if isinstance(action, Discrete) else chosen
