"""Normal draws for exploration: independent, or pink, which is alike from step to step and goes somewhere.

Sources: Eberhard et al. (2023), "Pink Noise Is All You Need: Colored Noise Exploration in Deep Reinforcement
Learning". The generator is that of Voss, a sum of normals of which the k-th is drawn anew every 2**k steps.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

NoiseName: TypeAlias = Literal["white", "pink"]
_OCTAVES = 10
"""Number of normals in the sum; the slowest is drawn anew every 512 steps."""
_FRESH = np.uint32(0xFFFFFFFF)


class PinkNoise(NamedTuple):
    """The state of the noise of B environments. It is the same size for every action."""

    seed: Array  # uint32 [B], of an episode
    step: Array  # uint32 [B], counted from a random start; `_FRESH` before an environment has any


def initial_noise(noise: NoiseName, env_ids: Array) -> PinkNoise | tuple[()]:
    """Makes the state for environments `env_ids` `[B]`; () for white noise.

    Every episode begins a noise of its own, and so does every state that this makes, in its next step.
    """
    if noise == "white":
        return ()
    return PinkNoise(
        jnp.zeros_like(env_ids, jnp.uint32), jnp.full_like(env_ids, _FRESH, jnp.uint32)
    )


def next_noise(
    state: PinkNoise | tuple[()], first: Array, keys: Array, size: int
) -> tuple[Array, PinkNoise | tuple[()]]:
    """Returns noise `[B, size]` of mean 0 and deviation 1 for the next step, and the state after it.

    Rows in which `first` `[B]` is set begin anew. The elements of a row are independent. Consumes `keys`
    `[B]`.
    """
    if not isinstance(state, PinkNoise):
        return jax.vmap(lambda key: jax.random.normal(key, (size,)))(keys), ()
    drawn = jax.vmap(lambda key: jax.random.bits(key, (2,)))(keys)
    anew = first | (state.step == _FRESH)
    seed = jnp.where(anew, drawn[:, 0], state.seed)
    step = jnp.where(anew, drawn[:, 1] >> (32 - _OCTAVES), state.step)

    def row(seed: Array, step: Array) -> Array:
        key = jax.random.key(seed)

        def octave(k: Array) -> Array:
            own = jax.random.fold_in(jax.random.fold_in(key, k), step >> k)
            return jax.random.normal(own, (size,))

        return jax.vmap(octave)(jnp.arange(_OCTAVES, dtype=jnp.uint32)).sum(0) / _OCTAVES**0.5

    return jax.vmap(row)(seed, step), PinkNoise(seed, step + 1)
