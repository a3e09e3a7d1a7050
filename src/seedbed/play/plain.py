"""A task made of any MJCF file, in which a player moves the actuators and nothing is rewarded."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict
from seedbed.physics.model import Keyframe
from seedbed.physics.step import at_rest
from seedbed.types import Array, EnvState

_STEP = 0.02  # s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(MujocoTask):
    """A model that begins in its first keyframe, or at qpos0, and takes its controls as actions."""

    episode_steps: int = 0
    frame_skip: int = 0
    """Simulation steps in one environment step; 0 is as many as 0.02 s have."""

    def __post_init__(self) -> None:
        """Settles the length of a step."""
        if not self.frame_skip:
            steps = max(1, round(_STEP / self.physics_model().opt.timestep))
            object.__setattr__(self, "frame_skip", steps)

    @property
    def begins(self) -> Keyframe:
        """Returns the file's first keyframe; without one, qpos0 with no control."""
        model = self.physics_model()
        return model.keyframes[0] if model.keyframes else at_rest(model)

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Returns qpos [nq] and qvel [nv] where the file begins; does not use the key."""
        at = self.begins
        return jnp.asarray(at.qpos, jnp.float32), jnp.asarray(at.qvel, jnp.float32)

    def reset(self, key: Array) -> EnvState:
        """Opens an episode where the file begins; does not use the key."""
        opened = super().reset(key)
        if not self.physics_model().na:
            return opened
        act = jnp.asarray(self.begins.act, jnp.float32)
        return opened._replace(inner=opened.inner._replace(act=act))

    def observe(self, now: physics.Data) -> Array:
        """Returns positions and velocities."""
        return jnp.concatenate([now.qpos, now.qvel])

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays nothing and never terminates."""
        return Verdict(jnp.float32(0), jnp.bool_(False), {})
