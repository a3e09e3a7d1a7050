"""A task of your own: a body with one arm that is paid for pulling itself along.

    python examples/custom_task.py

The model is crawler.xml, in MuJoCo's format. The same task trains from the command line, with every option:
`cd examples; seedbed train custom_task:Crawler --steps 2e6 --env.ctrl-cost 0.1`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

import seedbed
from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, moved, noisy_rest, squares


@dataclasses.dataclass(frozen=True, kw_only=True)
class Crawler(MujocoTask):
    """The task; its fields are options, and `seedbed train` takes them as `--env.NAME`."""

    xml_file: str = str(Path(__file__).with_name("crawler.xml"))
    frame_skip: int = 5  # 0.05 s a step
    episode_steps: int = 200
    ctrl_cost: float = 0.05

    def initial(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where an episode begins: positions and velocities."""
        return noisy_rest(self.physics_model(), key, scale=0.05)

    def observe(self, now: physics.Data) -> jax.Array:
        """What the policy sees: all but how far it has come."""
        return jnp.concatenate([now.qpos[1:], now.qvel])

    def judge(self, before: TaskState, now: physics.Data, action: jax.Array) -> Verdict:
        """What a step is worth, and whether the episode ends."""
        speed = moved(before, now, 0) / self.dt
        reward = speed - self.ctrl_cost * squares(action)
        return Verdict(reward, terminated=jnp.bool_(False), metrics={"speed": speed})


if __name__ == "__main__":
    summary = seedbed.train("custom_task:Crawler", steps=2_000_000)
    print(f"trained; look at it with: seedbed evaluate {summary['run']} --html crawler.html")
