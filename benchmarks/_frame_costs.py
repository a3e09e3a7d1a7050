"""What frames cost at given prices, how large networks are, and where one curve crosses another."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

PRICES = {
    # Google Cloud, one core of a CPU for an hour: as in the table of prices of Espeholt et al. (2020), "SEED
    # RL". From memory (shared/facts/published_numbers.md, B1: "[K]"): its table was not read again.
    "cpu_core_hour": 0.0475,
    # Google Cloud, between virtual machines of one zone (cloud.google.com/vpc/pricing, read 2026-11).
    "gb_within_a_zone": 0.0,
    # The same between zones of a region, each direction; about, by cloudwebschool.com, read 2026-11.
    "gb_between_zones": 0.01,
}
"""US dollars. There is no accelerator in this comparison: both sides act and learn on CPU cores."""
FRAMES = 1e9
FRAME_SKIP = 4
PLACES = ("within a zone", "between zones")
FARTHEST = 10.0  # times the smallest or largest network, beyond which nothing is extrapolated


def costs(row: dict[str, Any]) -> dict[str, float]:
    """Returns the dollars of a billion frames by what was measured of a step: CPU time and bytes."""
    steps = FRAMES / FRAME_SKIP
    cpu = steps * row["cpu_ms"] / 3.6e6 * PRICES["cpu_core_hour"]
    gigabytes = steps * (row["up_bytes"] + row["down_bytes"]) / 1e9
    return {
        "within a zone": cpu + gigabytes * PRICES["gb_within_a_zone"],
        "between zones": cpu + gigabytes * PRICES["gb_between_zones"],
    }


def sizes(options: dict[str, Any]) -> dict[str, float]:
    """Returns a network's bytes of parameters, and the FLOPs of acting in one environment.

    XLA counts the FLOPs of the program. It is that of bfloat16, whose convolutions are XLA's and not ours.
    """
    import jax

    from seedbed.config import resolve
    from seedbed.run.stacking import stacked_spec, zero_timesteps
    from seedbed.types import bind

    config: Any = resolve.train_config("pong")
    host = config.env.make(1, 0)
    spec = stacked_spec(host.spec, config.env.frame_stack)
    host.close()
    agent = bind(dataclasses.replace(config.agent, **options, compute_dtype="bfloat16"), spec)
    key = jax.random.key(0)
    params = jax.eval_shape(agent.init, key).params
    state, keys = agent.actor_state(np.arange(1), 1), jax.random.split(key, 1)

    def act(params: Any, state: Any, timestep: Any) -> Any:
        return agent.act(params, state, timestep, keys, evaluate=False)

    lowered: Any = jax.jit(act).lower(params, state, zero_timesteps(spec, (1,)))
    return {
        "params_bytes": float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))),
        "flops": float(lowered.cost_analysis()["flops"]),
    }


def crossing(size: Sequence[float], ratio: Sequence[float]) -> dict[str, Any] | None:
    """Returns the size at which a ratio is 1, how it was found, and whether it is below 1 for smaller sizes.

    It interpolates between neighbours, both axes logarithmic. If no pair of neighbours has 1 between them, it
    extrapolates the line through all points (least squares), at most to `FARTHEST`. Returns None if there is
    no such size.
    """
    points = sorted((math.log(s), math.log(r)) for s, r in zip(size, ratio, strict=True))
    for (left, low), (right, high) in itertools.pairwise(points):
        if low * high <= 0 and low != high:
            at = left + (right - left) * low / (low - high)
            return {"size": math.exp(at), "how": "interpolated", "less_below": low < high}
    x, y = (np.array(each) for each in zip(*points, strict=True))
    if len(points) < 2 or np.ptp(x) == 0:
        return None
    slope, offset = np.polyfit(x, y, 1)
    at = -offset / slope if slope else math.inf
    if not x[0] - math.log(FARTHEST) < at < x[-1] + math.log(FARTHEST) or x[0] <= at <= x[-1]:
        return None
    factor = math.exp(max(x[0] - at, at - x[-1]))
    how = f"extrapolated by a factor of {factor:.1f}"
    return {"size": math.exp(at), "how": how, "less_below": bool(slope > 0)}


def bytes_break_even(
    params: Sequence[float], acting: Sequence[dict[str, Any]], central: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Returns the bytes of parameters at which both sides send as many bytes; None if one always sends more.

    Model: what comes down to actors that act is proportional to the parameters, the rest does not depend on
    the network. The factor and the rest are medians of what was measured.
    """
    factor = np.median([row["down_bytes"] / p for row, p in zip(acting, params, strict=True)])
    theirs = np.median([row["up_bytes"] + row["down_bytes"] for row in central])
    up = np.median([row["up_bytes"] for row in acting])
    size = float((theirs - up) / factor)
    if size <= 0:
        return None
    return {
        "size": size,
        "how": "model: bytes down in proportion to parameters",
        "less_below": True,
    }
