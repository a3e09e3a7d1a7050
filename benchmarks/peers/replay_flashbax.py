"""Items a second through flashbax's prioritised trajectory buffer: JAX on the CPU, its state donated.

    python replay_flashbax.py ITEMS.npz --seconds 5

Runs in the environment of replay_setup.sh. Prints one JSON object.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
import replay_common as common

ROWS = 8  # sequences added at a time


def main() -> None:
    """Measures and prints."""
    args = common.arguments().parse_args()
    items = common.load(args.items)
    buffer = flashbax.make_prioritised_trajectory_buffer(
        add_batch_size=ROWS,
        sample_batch_size=common.BATCH,
        sample_sequence_length=common.STEPS,
        period=common.STEPS,
        min_length_time_axis=common.STEPS,
        max_length_time_axis=common.STEPS * common.CAPACITY // ROWS,
        priority_exponent=common.PRIORITY_EXPONENT,
        device="cpu",
    )
    add = jax.jit(buffer.add, donate_argnums=0)
    weigh = jax.jit(buffer.set_priorities, donate_argnums=0)

    @jax.jit
    def draw(state: Any, turn: Any) -> Any:
        return buffer.sample(state, jax.random.fold_in(jax.random.key(0), turn))

    blocks = [
        [
            {k: jnp.asarray(v[i, j : j + ROWS]) for k, v in items._asdict().items()}
            for j in range(0, common.BATCH, ROWS)
        ]
        for i in range(len(items.observation))
    ]
    state = buffer.init(jax.tree.map(lambda x: x[0, 0], blocks[0][0]))
    rng, turns = np.random.default_rng(0), 0

    def insert(block: int) -> None:
        nonlocal state
        state = functools.reduce(add, blocks[block], state)
        jax.block_until_ready(state)

    def sample() -> Any:
        nonlocal state, turns
        turns += 1
        drawn = jax.block_until_ready(draw(state, turns))
        priorities = jnp.asarray(rng.uniform(0.1, 1.0, common.BATCH), jnp.float32)
        state = weigh(state, drawn.indices, priorities)
        return drawn

    figures = common.alternate(insert, sample, len(blocks), args.seconds)
    drawn = sample().experience
    common.check(items, np.asarray(drawn["observation"]), np.asarray(drawn["action"]))
    common.finish(figures, {name: version(name) for name in ("flashbax", "jax", "numpy")})


if __name__ == "__main__":
    main()
