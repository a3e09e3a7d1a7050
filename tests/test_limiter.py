"""The ratio limiter and the weights of priorities, against their definitions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedbed.ops import priorities
from seedbed.replay.limiter import SLACK_BATCHES, RatioLimiter
from seedbed.types import Replay


def experience(**changes):
    given = {"batch": 4, "sequence": 1, "period": 1, "capacity": 50, "min_size": 10, "ratio": 2.0}
    return Replay(**given | changes)


@given(
    events=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60),
    min_size=st.integers(0, 20),
    ratio=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_items_are_drawn_as_often_as_the_ratio_says(events, min_size, ratio):
    """Items beyond the first `min_size` ask for `ratio` draws each; nothing is drawn or added too early."""
    limiter = RatioLimiter(experience(min_size=min_size, ratio=ratio))
    added = drawn = 0
    for adds, count in events:
        if adds and limiter.may_add(added):
            limiter.added(count, added)
            added += count
        elif not adds and limiter.may_draw(4, added):
            limiter.drawn(4)
            drawn += 4
        asked = ratio * max(0, added - min_size)
        assert limiter.owed == pytest.approx(asked - drawn)
        assert drawn <= asked, "drawn more often than the ratio allows"
        assert limiter.may_draw(4, added) == (added >= max(1, min_size) and asked - drawn >= 4)
        behind = asked - drawn >= 4 * SLACK_BATCHES
        assert limiter.may_add(added) == (added < min_size or not behind)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_weights_are_those_of_the_paper(array):
    chosen = experience(priority_exponent=0.6, importance_exponent=0.4)
    weights = priorities.draw_weights(chosen, array([0.5, 1.0, 4.0]))
    np.testing.assert_allclose(weights, [0.5**0.6, 1.0, 4.0**0.6], rtol=1e-6)
    # Equations 1 and 2 for N items: P = weight / total, importance = (N P)^-beta / max.
    share = np.asarray(weights) / 7.0  # any total
    expected = (3 * share) ** -0.4
    found = priorities.importance_weights(chosen, weights)
    np.testing.assert_allclose(found, expected / expected.max(), rtol=1e-6)
    assert priorities.is_prioritised(chosen)
    assert not priorities.is_prioritised(experience())
