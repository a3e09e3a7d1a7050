"""Runs of the fused runtime, and carries compared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from saved import config_of
from seedbed.fused.program import Program
from seedbed.run.restoring import restore


def same(a, b, **tolerance):
    """Compares trees of arrays, keys too, bit for bit or to a tolerance."""

    def compare(x, y):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if tolerance:
            np.testing.assert_allclose(x, y, **tolerance)
        else:
            np.testing.assert_array_equal(x, y)

    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(compare, a, b)


def saved(folder):
    """The newest checkpoint of a run, whole."""
    config = config_of(folder)
    program = Program(config.env, config.agent, config.runtime)
    return restore(folder / "checkpoints", jax.eval_shape(program.first))
