"""Trains our Ant with PPO in one file of PyTorch, in the manner of CleanRL's ppo_continuous_action.py.

    pip install torch
    python examples/one_file_ppo.py --steps 2000000

An environment of ours, like Gymnasium's since version 1.0, resets itself in the step after an end: that step
is no experience, and is left out here. CleanRL's own file is written for environments that reset at once.
"""

from __future__ import annotations

import argparse
import time

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import vector
from torch import nn
from torch.distributions import Normal

import seedbed

UNROLL, EPOCHS, MINIBATCH, RATE, GAMMA, DECAY, CLIP = 64, 4, 512, 3e-4, 0.99, 0.95, 0.2


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Makes a network of two hidden layers with orthogonal weights."""
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    network = nn.Sequential(*layers, nn.Linear(64, outputs))
    for layer, scale in zip(network[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return network


class Agent(nn.Module):
    """A policy with one deviation for each action, and a value."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.mean, self.value = mlp(inputs, actions, 0.01), mlp(inputs, 1, 1.0)
        self.log_scale = nn.Parameter(torch.zeros(actions))

    def policy(self, x: torch.Tensor) -> Normal:
        """Returns the distribution of actions for observations [..., D]."""
        mean = self.mean(x)
        return Normal(mean, self.log_scale.exp().expand_as(mean))


def main() -> None:
    """Trains, and prints the mean return of the last 100 episodes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--envs", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(
        1
    )  # these networks are small, and waiting threads would hold up the physics
    envs: gymnasium.vector.VectorEnv = seedbed.make_gymnasium("ant", num_envs=args.envs)
    envs = vector.RecordEpisodeStatistics(envs)
    envs = vector.NormalizeReward(vector.NormalizeObservation(envs), gamma=GAMMA)
    size, actions = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
    agent, began, returns = Agent(size, actions), time.perf_counter(), []
    optimizer = torch.optim.Adam(agent.parameters(), lr=RATE, eps=1e-5)
    low, high = envs.single_action_space.low, envs.single_action_space.high
    observation, _ = envs.reset(seed=0)
    over = np.zeros(args.envs, bool)
    for update in range(args.steps // (UNROLL * args.envs)):
        rows = []
        for _ in range(UNROLL):
            x = torch.as_tensor(observation, dtype=torch.float32)
            with torch.no_grad():
                policy, value = agent.policy(x), agent.value(x)[:, 0]
                action = policy.sample()
            observation, reward, terminated, truncated, info = envs.step(
                np.clip(action.numpy(), low, high)
            )
            valid, over = ~over, terminated | truncated
            after = torch.as_tensor(observation, dtype=torch.float32)
            numbers = (
                torch.as_tensor(part, dtype=torch.float32)
                for part in (reward, terminated, over, valid)
            )
            rows.append((x, action, policy.log_prob(action).sum(-1), value, after, *numbers))
            if "episode" in info:
                returns = [*returns, *info["episode"]["r"][info["_episode"]]][-100:]
        x, action, before, value, after, reward, terminated, ended, valid = map(
            torch.stack, zip(*rows, strict=True)
        )
        with torch.no_grad():
            following = agent.value(after)[..., 0]
        error = reward + GAMMA * (1 - terminated) * following - value
        advantage = torch.zeros_like(value)
        carried = torch.zeros(args.envs)
        for t in reversed(range(UNROLL)):
            carried = error[t] + GAMMA * DECAY * (1 - ended[t]) * carried
            advantage[t] = carried
        kept = valid.flatten() > 0
        data = [
            part.flatten(0, 1)[kept] for part in (x, action, before, advantage, advantage + value)
        ]
        for _ in range(EPOCHS):
            for rows_of in torch.randperm(len(data[0])).split(MINIBATCH):
                x_b, action_b, before_b, advantage_b, target_b = (part[rows_of] for part in data)
                ratio = (agent.policy(x_b).log_prob(action_b).sum(-1) - before_b).exp()
                gain = (advantage_b - advantage_b.mean()) / (advantage_b.std() + 1e-8)
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = -torch.min(ratio * gain, clipped * gain).mean()
                loss = loss + 0.5 * (agent.value(x_b)[:, 0] - target_b).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        steps = (update + 1) * UNROLL * args.envs
        if update % 20 == 19 and returns:
            pace = steps / (time.perf_counter() - began)
            print(
                f"{steps:,} steps, return {np.mean(returns):.0f}, {pace:,.0f} steps/s", flush=True
            )


if __name__ == "__main__":
    main()
