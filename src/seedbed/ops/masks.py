"""Masks of actions: choices that an environment forbids in a step are never taken and never counted on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from seedbed.spaces import ACTION_MASK, entry, num_choices
from seedbed.types import ActionSpec, MultiDiscrete, Tree

# Far below all logits and values, and finite: a probability of exactly 0, and no inf - inf in a divergence.
FORBIDDEN = -1e9
"""The score of a forbidden choice."""


def masked(action: ActionSpec, scores: Array, observation: Tree) -> Array:
    """Returns scores `[..., A]` of an action's choices, in which those of forbidden ones are the lowest.

    Scores are logits or action values. The mask is in the observation, leaves `[..., *shape]` (see
    `EnvSpec`); without one, scores are returned as they are. A mask that forbids all choices of a set, as at
    the end of a game, forbids none.
    """
    mask = entry(observation, ACTION_MASK)
    if mask is None:
        return scores
    lead = scores.shape[:-1]
    allowed = jnp.concatenate(
        [(leaf != 0).reshape(*lead, -1) for leaf in jax.tree.leaves(mask)], axis=-1
    )
    sets = action.nvec if isinstance(action, MultiDiscrete) else (num_choices(action),)
    parts = jnp.split(allowed, np.cumsum(sets)[:-1].tolist(), axis=-1)
    parts = [part | ~part.any(-1, keepdims=True) for part in parts]
    return jnp.where(jnp.concatenate(parts, axis=-1), scores, FORBIDDEN)


def random_allowed(scores: Array, uniform: Array) -> Array:
    """Draws one of the choices that are not forbidden, int32 `[...]`, with equal probabilities.

    `scores` `[..., A]` are those of `masked`; `uniform` `[...]` are numbers from 0 to below 1.
    """
    allowed = scores > FORBIDDEN
    place = jnp.floor(uniform * allowed.sum(-1)).astype(jnp.int32)
    return jnp.argmax(jnp.cumsum(allowed, axis=-1) > place[..., None], axis=-1).astype(jnp.int32)
