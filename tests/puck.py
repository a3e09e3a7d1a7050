"""A small task with a joystick: a puck that glides on the ground, for pages and whatever else steers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import Command, MujocoTask, TaskState, Verdict, squares
from seedbed.spaces import PRIVILEGED
from seedbed.types import Array, EnvState, Tree

FILE = Path(__file__).with_name("puck.xml")


class Told(NamedTuple):
    """What the puck tells itself, and what it was told."""

    own: Array  # [4]
    now: Array  # [4]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Puck(MujocoTask):
    """The puck is paid for the speed that it was told, and falls over the edge after a few metres."""

    xml_file: str = str(FILE)
    frame_skip: int = 2
    edge: float = 4.0

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws a place near the origin; consumes the key."""
        place = jax.random.uniform(key, (3,), jnp.float32, -0.1, 0.1)
        return jnp.concatenate([place, jnp.zeros(1)]), jnp.zeros(4, jnp.float32)

    def begin(self, key: Array) -> Told:
        """Draws what it tells itself; consumes the key."""
        drawn = jax.random.uniform(key, (4,), jnp.float32, -1.0, 1.0)
        drawn = drawn.at[3].set(0.6 + 0.3 * drawn[3])
        return Told(drawn, drawn)

    def keep(self, now: physics.Data, kept: Told, action: Array | None = None) -> Told:
        """Tells itself the same as ever."""
        return Told(kept.own, kept.own)

    def observe(self, now: physics.Data) -> Array:
        """Returns places and speeds."""
        return jnp.concatenate([now.qpos, now.qvel])

    def shown(self, now: physics.Data, kept: Told) -> Tree:
        """Returns what it does and what it was told; critics see the contact force."""
        state = jnp.concatenate([self.observe(now), kept.now])
        return {"state": state, PRIVILEGED: now.cfrc_ext[1]}

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for the speed that was told, before friction."""
        off = squares(now.qvel[:2] - before.kept.now[:2])
        terms = {"reward_tracking": jnp.exp(-off), "reward_ctrl": -0.01 * squares(action)}
        return Verdict(sum(terms.values()), jnp.abs(now.qpos[0]) > self.edge, terms)

    @property
    def commands(self) -> tuple[Command, ...]:
        """Returns its three speeds, and what no joystick steers and is never 0."""
        units = {"forward": "m/s", "left": "m/s", "turn left": "rad/s"}
        speeds = tuple(Command(name, unit, -2.0, 1.0) for name, unit in units.items())
        return (*speeds, Command("height", "m", 0.2, 0.9))

    def command_of(self, state: EnvState) -> Array:
        """Returns what it was told."""
        return state.inner.kept.now

    def commanded(self, state: EnvState, command: Array) -> EnvState:
        """Tells it something else, for a step."""
        shown = state.timestep.observation
        policy = {"state": jnp.concatenate([shown["state"][:8], command])}
        kept = state.inner.kept._replace(now=command)
        return state._replace(
            inner=state.inner._replace(kept=kept),
            timestep=state.timestep._replace(observation=shown | policy),
        )
