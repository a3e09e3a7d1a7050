"""Compares the derivative of a return through the physics with what a change of the policy brings.

For a few tasks with an untrained policy: windows of 4 and of 16 steps after 112 steps of play, with the same
noise before and after. The policy's weights move along random directions, by so much that its mean actions
change by a given root mean square, and the change of the return is compared with what the derivative says.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from _stamp import write_result
from seedbed.agents.apg import Apg
from seedbed.envs.host.registry import resolve
from seedbed.fused.program import Program
from seedbed.fused.rollout import moves, unroll
from seedbed.nets.policy import join_networks, separate_networks
from seedbed.run.options import FusedConfig
from seedbed.types import Trajectory

RESULT = Path(__file__).parent / "results" / "slopes.json"
TASKS = ("pendulum", "inverted_double_pendulum", "half_cheetah", "hopper", "ant")
SIZES = (0.001, 0.01, 0.1)
WINDOWS, SETTLING, DIRECTIONS = (4, 16), 112, 32


def compared(task: str, window: int, envs: int) -> list[dict[str, Any]]:
    """Returns for each size of change how well the derivative predicts what it brings."""
    agent = Apg(
        unroll=window,
        batch=envs,
        entropy_cost=0.0,
        normalise_observations=False,
        normalise_returns=False,
        max_action_slope=1e30,
    )
    program = Program(resolve(task), agent, FusedConfig(steps=1))
    carry, move = program.place(program.first()), moves(program.env, None, np.bool_(False))
    key = jax.random.key(1)

    def played(carry: Any, policy: Any) -> tuple[Any, Trajectory, Any]:
        learner = carry.learner
        _, value = separate_networks(learner.params.weights)
        params = learner.params._replace(weights=join_networks(policy, value))
        now = carry._replace(learner=learner._replace(params=params))
        after, rows, _, _ = unroll(program.agent, move, program.plan, None, key, now)
        steps = jax.tree.map(
            lambda x, end: jnp.concatenate([x, end[None]]), rows.timesteps, after.env.timestep
        )
        return params, Trajectory(steps, rows.action, rows.extras, carry.actor, ()), after

    policy, _ = separate_networks(carry.learner.params.weights)
    settle = jax.jit(lambda carry: played(carry, policy)[2]._replace(learner=carry.learner))
    for _ in range(SETTLING // window):
        carry = settle(carry)
    flat, unravel = ravel_pytree(policy)

    @jax.jit
    def slope(carry: Any) -> jax.Array:
        def play(params: Any) -> tuple[Trajectory, Any]:
            return played(carry, separate_networks(params.weights)[0])[1], ()

        return -ravel_pytree(program.agent.slope(carry.learner, play)[0])[0]

    @jax.jit
    def outlook(carry: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The return, and the mean actions before they are squashed."""
        params, trajectory, _ = played(carry, unravel(weights))
        means = program.agent._evaluate(params, carry_rows(trajectory), (), ())[0]
        return program.agent._outlook(carry.learner, params, trajectory), means

    def carry_rows(trajectory: Trajectory) -> Any:
        return jax.tree.map(lambda x: x[:1], trajectory.timesteps)

    derivative = np.asarray(slope(carry), np.float64)
    rng = np.random.default_rng(0)
    sides: dict[float, list[tuple[float, float]]] = {size: [] for size in SIZES}
    actions = program.env.spec.action.shape[0]  # type: ignore[union-attr]
    for _ in range(DIRECTIONS):
        way = rng.normal(size=flat.size)
        _, before = outlook(carry, flat)
        _, after = outlook(carry, flat + 1e-3 * way)
        moved = np.asarray(after - before)[..., :actions]
        way /= np.sqrt(np.square(moved).mean()) / 1e-3
        for size in SIZES:
            up, down = (float(outlook(carry, flat + sign * size * way)[0]) for sign in (1, -1))
            sides[size].append((derivative @ way, (up - down) / (2 * size)))
    rows = []
    for size, pairs in sides.items():
        told, found = np.array(pairs).T
        rows.append(
            {
                "task": task,
                "window": window,
                "size": size,
                "per_mille": round(1000 * size),
                "correlation": float(np.corrcoef(told, found)[0, 1]),
                # Of the line through 0 from what the derivative says to what came of the change.
                "share": float(told @ found / (told @ told)),
                "rms_derivative": float(np.sqrt(np.square(told).mean())),
                "rms_difference": float(np.sqrt(np.square(found).mean())),
            }
        )
    return rows


def main() -> None:
    """Compares, prints and saves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS)
    parser.add_argument("--envs", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for task, window in itertools.product(args.tasks, args.windows):
        rows += compared(task, window, args.envs)
        for row in rows[-len(SIZES) :]:
            print(
                f"{row['task']}, {row['window']} steps: actions change by {row['size']:g}: "
                f"correlation {row['correlation']:.2f}, {row['share']:.2f} of what the derivative says",
                flush=True,
            )
        write_result(args.out, {"envs": args.envs, "rows": rows})


if __name__ == "__main__":
    main()
