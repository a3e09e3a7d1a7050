"""dm_control's planar bodies: walker, hopper and cheetah."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.suite.task import SuiteTask, random_pose, small_control, tolerance
from seedbed.types import Array, Tree

_SETTLING = 200  # steps of the simulation


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkerStand(SuiteTask):
    """dm_control's walker, a planar body with two legs, stands."""

    xml_file: str = "dm_control/walker.xml"
    frame_skip: int = 10
    speed: float = 0.0
    """Speed in m/s from which on the reward is whole; 0 is standing."""

    def observe(self, now: physics.Data) -> Tree:
        """Returns where the bodies point, the torso's height, and velocities."""
        names = [name for name in self.physics_model().names.body if name != "world"]
        points = [self.axes(now, name)[0, ::2] for name in names]
        height = now.xpos[self.body("torso"), 2]
        return {"orientations": jnp.concatenate(points), "height": height, "velocity": now.qvel}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a torso that is high and upright, and for its speed."""
        standing = tolerance(now.xpos[self.body("torso"), 2], (1.2, math.inf), 0.6)
        upright = (1 + self.axes(now, "torso")[2, 2]) / 2
        terms: dict[str, Array] = {"stand": (3 * standing + upright) / 4}
        if self.speed:
            along = self.read(now, "torso_subtreelinvel")[0]
            fast = tolerance(along, (self.speed, math.inf), self.speed / 2, "linear", 0.5)
            terms["move"] = (5 * fast + 1) / 6
        return terms


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkerWalk(WalkerStand):
    """dm_control's walker, a planar body with two legs, walks."""

    speed: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkerRun(WalkerStand):
    """dm_control's walker, a planar body with two legs, runs."""

    speed: float = 8.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperStand(SuiteTask):
    """dm_control's hopper, a planar body with one leg, stands."""

    xml_file: str = "dm_control/hopper.xml"
    frame_skip: int = 4
    speed: float = 0.0
    """Speed in m/s from which on the reward is whole; 0 is standing."""

    def observe(self, now: physics.Data) -> Tree:
        """Returns positions but x, velocities, and what toe and heel feel."""
        felt = [self.read(now, name) for name in ("touch_toe", "touch_heel")]
        touch = jnp.log1p(jnp.concatenate(felt))
        return {"position": now.qpos[1:], "velocity": now.qvel, "touch": touch}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a torso high over the foot, and for speed or small control."""
        height = now.xipos[self.body("torso"), 2] - now.xipos[self.body("foot"), 2]
        terms = {"standing": tolerance(height, (0.6, 2.0))}
        if not self.speed:
            return terms | {"small_control": small_control(action)}
        along = self.read(now, "torso_subtreelinvel")[0]
        hop = tolerance(along, (self.speed, math.inf), self.speed / 2, "linear", 0.5)
        return terms | {"hopping": hop}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperHop(HopperStand):
    """dm_control's hopper, a planar body with one leg, hops."""

    speed: float = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheetahRun(SuiteTask):
    """dm_control's cheetah, a planar body with two legs, runs."""

    xml_file: str = "dm_control/cheetah.xml"
    frame_skip: int = 1
    speed: float = 10.0
    """Speed in m/s from which on the reward is whole."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws the joints, and lets the body come to rest for two seconds; consumes the key."""
        model = self.physics_model()
        idle = jnp.zeros(model.nu, jnp.float32)
        rest = jnp.asarray(model.qpos0, jnp.float32)
        qpos = jnp.where(np.asarray(model.jnt_limited, bool), random_pose(model, key), rest)

        def settle(state: physics.State, _: None) -> tuple[physics.State, None]:
            return physics.step(model, state, idle), None

        begun = physics.init(model, qpos)
        state: Any = jax.lax.scan(settle, begun, None, length=_SETTLING)[0]
        return state.qpos, state.qvel

    def observe(self, now: physics.Data) -> Tree:
        """Returns positions but x, and velocities."""
        return {"position": now.qpos[1:], "velocity": now.qvel}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for speed along x."""
        along = self.read(now, "torso_subtreelinvel")[0]
        return {"speed": tolerance(along, (self.speed, math.inf), self.speed, "linear", 0.0)}
