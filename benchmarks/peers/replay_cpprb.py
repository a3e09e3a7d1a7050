"""Items a second through cpprb's prioritised buffer, in process, a row a whole item.

    python replay_cpprb.py ITEMS.npz --seconds 5

Runs in the environment of replay_setup.sh. Prints one JSON object.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import replay_common as common
from cpprb import PrioritizedReplayBuffer


def main() -> None:
    """Measures and prints."""
    args = common.arguments().parse_args()
    items = common.load(args.items)
    fields = {k: {"shape": v.shape[2:], "dtype": v.dtype} for k, v in items._asdict().items()}
    replay = PrioritizedReplayBuffer(common.CAPACITY, fields, alpha=common.PRIORITY_EXPONENT)
    blocks = [{k: v[i] for k, v in items._asdict().items()} for i in range(len(items.observation))]
    rng = np.random.default_rng(0)

    def insert(block: int) -> None:
        replay.add(**blocks[block])

    def sample() -> dict[str, np.ndarray]:
        drawn = replay.sample(common.BATCH, beta=common.IMPORTANCE_EXPONENT)
        replay.update_priorities(drawn["indexes"], rng.uniform(0.1, 1.0, common.BATCH))
        return drawn

    figures = common.alternate(insert, sample, len(blocks), args.seconds)
    drawn = sample()
    common.check(items, drawn["observation"], drawn["action"])
    common.finish(figures, {name: version(name) for name in ("cpprb", "numpy")})


if __name__ == "__main__":
    main()
