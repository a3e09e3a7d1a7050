"""Environment steps per second of Stable-Baselines3's PPO over Gymnasium's AsyncVectorEnv, MuJoCo's C code.

    python sb3_ppo.py --env Ant-v5 --seconds 40 --options '{"include_cfrc_ext_in_observation": false}'
    python sb3_ppo.py --unroll 1024 --batch 2048 --epochs 3 \
        --policy 128 128 --value 64 64 --activation tanh  # the hyperparameters of another

Stable-Baselines3's default hyperparameters unless named; runs in the environment of sb3_setup.sh. The window
is of whole iterations, acting and learning, after the first. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
import psutil
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

ACTIVATIONS = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "swish": torch.nn.SiLU}
PACKAGES = ("stable-baselines3", "gymnasium", "mujoco", "torch", "numpy")


class Adapter(VecEnv):
    """Shows an AsyncVectorEnv that resets in the same step as Stable-Baselines3's kind of environment."""

    def __init__(self, envs: AsyncVectorEnv) -> None:
        self.envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> np.ndarray:
        return self.envs.reset()[0]

    def step_async(self, actions: np.ndarray) -> None:
        self.envs.step_async(actions)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observation, reward, terminated, truncated, info = self.envs.step_wait()
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in done]
        for i in np.flatnonzero(done):
            infos[i]["terminal_observation"] = info["final_obs"][i]
            infos[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
        return observation, reward, done, infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return list(self.envs.get_attr(attr_name))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        self.envs.set_attr(attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        return list(self.envs.call(method_name, *args, **kwargs))

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class Meter(BaseCallback):
    """Marks where iterations begin, and ends training after `seconds` of them."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.iterations, self.done = seconds, 0, False
        self.first = self.last = (0, 0.0, 0.0)  # steps, clock, CPU

    def _on_rollout_start(self) -> None:
        tree = (psutil.Process(), *psutil.Process().children(recursive=True))
        cpu = sum(sum(each.cpu_times()[:2]) for each in tree)
        self.last = (self.num_timesteps, time.perf_counter(), cpu)
        self.iterations += 1
        if self.iterations <= 2:  # the first iteration warms up
            self.first = self.last
        self.done = self.iterations > 2 and self.last[1] - self.first[1] >= self.seconds

    def _on_step(self) -> bool:
        return not self.done

    def report(self) -> dict[str, float]:
        steps, wall, cpu = (b - a for a, b in zip(self.first, self.last, strict=True))
        return {
            "env_steps_per_s": steps / wall,
            "iterations": self.iterations - 2,
            "window_s": wall,
            "cpu_seconds": cpu,
        }


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", default="Ant-v5")
    parser.add_argument("--options", type=json.loads, default={}, help="of gymnasium.make, in JSON")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--unroll", type=int, default=2048, help="steps of each, an iteration")
    parser.add_argument("--batch", type=int, default=64, help="rows of a minibatch")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the rows")
    parser.add_argument("--policy", type=int, nargs="+", default=[64, 64], help="layers")
    parser.add_argument("--value", type=int, nargs="+", default=[64, 64], help="layers")
    parser.add_argument("--activation", choices=ACTIVATIONS, default="tanh")
    parser.add_argument("--seconds", type=float, default=40.0, help="of training that count")
    args = parser.parse_args()
    rows = args.num_envs * args.unroll
    make = functools.partial(gymnasium.make, args.env, **args.options)
    envs = Adapter(AsyncVectorEnv([make] * args.num_envs, autoreset_mode=AutoresetMode.SAME_STEP))
    try:
        meter = Meter(args.seconds)
        network = {
            "net_arch": {"pi": args.policy, "vf": args.value},
            "activation_fn": ACTIVATIONS[args.activation],
        }
        agent = PPO(
            "MlpPolicy",
            envs,
            n_steps=args.unroll,
            batch_size=args.batch,
            n_epochs=args.epochs,
            policy_kwargs=network,
            device="cpu",
        )
        agent.learn(10**12, callback=meter)
    finally:
        envs.close()
    options = {k: v for k, v in vars(args).items() if k != "seconds"}
    versions = {package: version(package) for package in PACKAGES}
    steps = {"gradient_steps": args.epochs * (rows // args.batch), "rows": rows}
    print(json.dumps({**meter.report(), **steps, "options": options, "versions": versions}))


if __name__ == "__main__":
    main()
