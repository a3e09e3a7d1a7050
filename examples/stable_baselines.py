"""Trains our Ant with Stable-Baselines3's PPO.

    pip install stable-baselines3
    python examples/stable_baselines.py --steps 2000000

`seedbed.make_sb3` makes the environments; everything else is Stable-Baselines3's. SBX takes them, too.
"""

from __future__ import annotations

import argparse

from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

import seedbed


def main() -> None:
    """Trains, and plays ten episodes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--envs", type=int, default=64)
    args = parser.parse_args()
    env = VecNormalize(seedbed.make_sb3("ant", args.envs, seed=0))
    options = {"n_steps": 64, "batch_size": 512, "n_epochs": 4, "learning_rate": 3e-4}
    model = PPO("MlpPolicy", env, device="cpu", seed=0, verbose=1, **options)
    model.learn(args.steps)
    env.training, env.norm_reward = False, False
    mean, deviation = evaluate_policy(model, env, 10, warn=False)
    print(f"{mean:.0f} ± {deviation:.0f} in 10 episodes")


if __name__ == "__main__":
    main()
