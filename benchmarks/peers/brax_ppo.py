"""Environment steps per second of Brax's own PPO on its Ant; runs in the environment of brax_setup.sh.

    python brax_ppo.py                                  # the published hyperparameters
    python brax_ppo.py --num-envs 2048 --unroll 16 --batch 128 --minibatches 16 --updates 4 \
        --policy 64 64 --value 64 64 --activation tanh  # those of another

The published ones are of Brax's notebooks/training.ipynb; the back end is spring, Brax's fastest. A step is
one action, 0.05 s of simulation. Seconds are Brax's own count (training/walltime) of whole iterations, from
the first one in which nothing is compiled. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

# Brax 0.14.2 calls what jax 0.10 no longer has: this is the one line without which PPO does not start.
jax.device_put_replicated = lambda tree, devices: jax.tree.map(
    lambda x: jnp.stack([x] * len(devices)), tree
)

from brax import envs  # noqa: E402
from brax.training.agents.ppo import networks  # noqa: E402
from brax.training.agents.ppo import train as ppo  # noqa: E402

COMPILED = "/jax/core/compile/backend_compile_duration"
PACKAGES = ("brax", "jax", "mujoco", "mujoco-mjx")


class TargetReached(Exception):
    """The window has been measured."""


class Meter:
    """Marks the ends of iterations until `seconds` of them were measured."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.compiled = 0.0  # seconds, in all
        self.marks: list[tuple[int, float, float, float]] = []  # steps, wall, CPU, compiled
        jax.monitoring.register_event_duration_secs_listener(self.listen)

    def listen(self, event: str, duration: float, **_: Any) -> None:
        """Counts seconds of compilation."""
        if event == COMPILED:
            self.compiled += duration

    def progress(self, steps: int, metrics: dict[str, Any]) -> None:
        """Takes the end of an iteration; raises TargetReached."""
        mark = (steps, float(metrics["training/walltime"]), time.process_time(), self.compiled)
        if self.marks and mark[3] > self.marks[-1][3]:
            self.marks.clear()  # what was compiled is no training
        self.marks.append(mark)
        if mark[1] - self.marks[0][1] >= self.seconds:
            raise TargetReached

    def report(self) -> dict[str, Any]:
        """Returns the figures of the window."""
        (steps, wall, cpu, _), last = self.marks[0], self.marks[-1]
        return {
            "env_steps_per_s": (last[0] - steps) / (last[1] - wall),
            "iterations": len(self.marks) - 1,
            "window_s": last[1] - wall,
            "cpu_seconds": last[2] - cpu,
            "compile_s": self.compiled,
        }


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--environment", default="ant")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training that count")
    parser.add_argument("--num-envs", type=int, default=4096)
    parser.add_argument("--unroll", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2048, help="unrolls of a minibatch")
    parser.add_argument("--minibatches", type=int, default=32)
    parser.add_argument("--updates", type=int, default=4, help="passes over the data")
    parser.add_argument("--policy", type=int, nargs="+", default=[32] * 4, help="layers")
    parser.add_argument("--value", type=int, nargs="+", default=[256] * 5, help="layers")
    parser.add_argument("--activation", choices=["swish", "tanh", "relu"], default="swish")
    args = parser.parse_args()
    iteration, meter, many = (
        args.batch * args.minibatches * args.unroll,
        Meter(args.seconds),
        10_000,
    )
    try:
        ppo.train(
            envs.get_environment(args.environment, backend="spring"),
            num_timesteps=many * iteration,
            num_evals=many + 1,  # Brax reports after each of so many equal parts: one iteration
            run_evals=False,
            progress_fn=meter.progress,
            num_envs=args.num_envs,
            episode_length=1000,
            unroll_length=args.unroll,
            batch_size=args.batch,
            num_minibatches=args.minibatches,
            num_updates_per_batch=args.updates,
            normalize_observations=True,
            reward_scaling=10,
            discounting=0.97,
            learning_rate=3e-4,
            entropy_cost=1e-2,
            network_factory=functools.partial(
                networks.make_ppo_networks,
                policy_hidden_layer_sizes=tuple(args.policy),
                value_hidden_layer_sizes=tuple(args.value),
                activation={"swish": jax.nn.swish, "tanh": jnp.tanh, "relu": jax.nn.relu}[
                    args.activation
                ],
            ),
        )
    except TargetReached:
        versions = {package: version(package) for package in PACKAGES}
        options = {k: v for k, v in vars(args).items() if k != "seconds"}
        steps = {"gradient_steps": args.updates * args.minibatches, "rows": iteration}
        print(json.dumps({**meter.report(), **steps, "options": options, "versions": versions}))


if __name__ == "__main__":
    main()
