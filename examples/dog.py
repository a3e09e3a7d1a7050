"""A robot of your own: a quadruped with servos that learns to walk at a speed that it is told.

    python examples/dog.py

The model is dog.xml, in MuJoCo's format; docs/train-your-robot.md goes through both. From the command line:
`cd examples; seedbed train dog:Dog --steps 6e6 --agent.initial-scale 0.1 --agent.least-scale 0.01`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import seedbed
from seedbed import physics
from seedbed.config.resolve import train_config
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, moved, noisy_rest, squares


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dog(MujocoTask):
    """The task; its fields are options, and `seedbed train` takes them as `--env.NAME`."""

    xml_file: str = str(Path(__file__).with_name("dog.xml"))
    frame_skip: int = 5  # 0.02 s a step
    episode_steps: int = 500
    speed: float = 0.8
    """The speed forward in m/s that is paid best."""

    def initial(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where an episode begins: positions and velocities, about those of standing."""
        return noisy_rest(self.physics_model(), key, scale=0.03)

    def observe(self, now: physics.Data) -> jax.Array:
        """What the robot can measure: its turning, where up is, and its joints."""
        read = [physics.sensor(self.physics_model(), now, name) for name in ("gyro", "up")]
        return jnp.concatenate([*read, now.qpos[7:], 0.1 * now.qvel[6:]])

    def judge(self, before: TaskState, now: physics.Data, action: jax.Array) -> Verdict:
        """What a step is worth, and whether the episode ends: if the trunk is low or leans."""
        forward, aside = (moved(before, now, k) / self.dt for k in (0, 1))
        up = physics.sensor(self.physics_model(), now, "up")
        error = jnp.square(forward - self.speed) + jnp.square(aside)
        turning = jnp.square(now.qvel[5])
        reward = jnp.exp(-4 * error) - 0.05 * turning - 0.2 * squares(up[:2])
        reward = reward - 2e-5 * squares(now.actuator_force) - 0.01 * squares(action)
        fallen = (now.qpos[2] < 0.15) | (up[2] < 0.6)
        return Verdict(reward, terminated=fallen, metrics={"speed": forward})


if __name__ == "__main__":
    config = train_config("dog:Dog")
    agent: Any = config.agent
    quiet = dataclasses.replace(agent, initial_scale=0.1, least_scale=0.01)
    summary = seedbed.train(dataclasses.replace(config, agent=quiet), steps=6_000_000)
    print(f"trained; look at it with: seedbed evaluate {summary['run']} --html dog.html")
