"""Trains our Ant with TorchRL's collector, advantage and loss.

    pip install torchrl
    python examples/torchrl_ppo.py --steps 2000000

TorchRL resets ended environments itself, so ours are made without auto-reset.
"""

from __future__ import annotations

import argparse

import torch
from gymnasium.vector import AutoresetMode
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import seedbed

UNROLL, EPOCHS, MINIBATCH, RATE, GAMMA = 64, 4, 512, 3e-4, 0.99


def main() -> None:
    """Trains, and prints the mean return of episodes that have ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--envs", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(
        1
    )  # these networks are small, and waiting threads would hold up the physics
    # 27 numbers of joints, as our preset sees them: none of their size needs normalising.
    envs = seedbed.make_gymnasium(
        "ant",
        num_envs=args.envs,
        seed=0,
        autoreset_mode=AutoresetMode.DISABLED,
        include_cfrc_ext_in_observation=False,
    )
    env = TransformedEnv(GymWrapper(envs))
    env.append_transform(RewardSum())
    env.append_transform(StepCounter())
    size, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    layers = {"num_cells": (64, 64), "activation_class": nn.Tanh}
    mean = nn.Sequential(
        MLP(size, actions, **layers), AddStateIndependentNormalScale(actions, scale_mapping="exp")
    )
    policy = ProbabilisticActor(
        TensorDictModule(mean, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    value = ValueOperator(MLP(size, 1, **layers))
    rows = UNROLL * args.envs
    collector = Collector(
        env,
        policy,
        frames_per_batch=rows,
        total_frames=args.steps // rows * rows,
        auto_register_policy_transforms=True,
    )
    advantage = GAE(gamma=GAMMA, lmbda=0.95, value_network=value)
    loss = ClipPPOLoss(policy, value, entropy_bonus=False, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=RATE, eps=1e-5)
    steps, ended = 0, []
    for update, batch in enumerate(collector):
        steps += batch.numel()
        over = batch["next", "done"]
        ended = [*ended, *batch["next", "episode_reward"][over].tolist()][-100:]
        for _ in range(EPOCHS):
            with torch.no_grad():
                advantage(batch)
            data = batch.reshape(-1)
            for some in torch.randperm(rows).split(MINIBATCH):
                parts = loss(data[some])
                optimizer.zero_grad()
                (parts["loss_objective"] + parts["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        if update % 20 == 19 and ended:
            print(f"{steps:,} steps, return {sum(ended) / len(ended):.0f}", flush=True)
    collector.shutdown()


if __name__ == "__main__":
    main()
