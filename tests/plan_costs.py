"""Costs of a made-up machine, for tests of the model of `seedbed plan`."""

from __future__ import annotations

from seedbed.plan.costs import (
    ActingCosts,
    Calibration,
    CallCost,
    FusedCosts,
    Linear,
    ReplayCosts,
    ReplayTrip,
    ShardCosts,
    StreamCosts,
)
from seedbed.plan.engine import NOTHING, Cost


def acting(step_s: float = 1e-3, call_s: float = 1e-3, update_s: float = 1e-2) -> ActingCosts:
    """Returns costs that do not depend on the number of groups."""
    calls = tuple(CallCost(n, NOTHING, Cost(call_s), NOTHING) for n in (1, 8))
    return ActingCosts(Cost(step_s), 0.0, 0.0, calls, Cost(update_s), Cost(1e-5), Cost(1e-4))


def calibration(acts: ActingCosts) -> Calibration:
    """Returns the calibration of a machine of two cores."""
    shards = ShardCosts(*[Linear(1e-3, 1e-4, 1e-3)] * 4)
    stream = StreamCosts(*[Cost(1e-4)] * 4, up_bytes=1e4, down_bytes=100.0)
    fused = FusedCosts(Cost(0.02, 2.0), Cost(0.04, 2.0), 1000)
    replay = ReplayCosts(ReplayTrip(1e-5, 1e-4, 1e-4), ReplayTrip(1e-5, 2e-4, 3e-4))
    costs = acts, stream, shards, replay, replay, fused
    return Calibration("cpu", 2.0, "cpu", "cpu", "0", *costs)
