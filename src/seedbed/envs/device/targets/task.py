"""The base of tasks with a target that is drawn anew when it is reached, as Brax v1 had them.

The target is the mocap body `target` of the MJCF file. An observation shows the target that was sought in
the step; if the step reached it, the next one is seen a step later.

All of these tasks differ from Brax v1's in three ways: MuJoCo's physics is in place of position-based
dynamics (joints are exact, inertia depends on the pose, free bodies are not damped), the first target is
drawn, too, and the ground and the target are no bodies of the observation.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import MujocoTask
from seedbed.physics.math import quat_to_mat
from seedbed.types import Array


class Sought(NamedTuple):
    """The target of an episode, the key of the next ones, and the place of the body that seeks it."""

    target: Array  # [3] m
    key: Array
    count: Array  # int32: targets reached in this episode
    seeker: Array  # [3] m, at the last forward pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetTask(MujocoTask, abc.ABC):
    """A base of the tasks in which a body must reach one target after the other."""

    target_radius: float
    """Distance in m below which a target is reached."""
    target_distances: tuple[float, float]
    """Smallest and largest distance of a target from the origin along the ground, in m."""
    limbs: ClassVar[tuple[str, ...]]
    """Bodies that are observed; each has a sensor of its linear velocity, with its name."""
    seeking_body: ClassVar[str]
    """Body that must reach the target."""

    @abc.abstractmethod
    def height(self, key: Array) -> Array | float:
        """Draws the height of a target in m; consumes the key."""

    def begin(self, key: Array) -> Sought:
        """Draws the first target; consumes the key."""
        first = self._draw(jax.random.fold_in(key, 0))
        return Sought(first, key, jnp.int32(0), jnp.zeros(3, jnp.float32))

    def keep(self, now: physics.Data, kept: Sought, action: Array | None = None) -> Sought:
        """Returns the target of the next step: another one if this step reached its own."""
        seeker = self.place(now, self.seeking_body)
        reached = self._reaches(seeker, kept.target)
        count = kept.count + reached
        drawn = self._draw(jax.random.fold_in(kept.key, count))
        return Sought(jnp.where(reached, drawn, kept.target), kept.key, count, seeker)

    def mocap(self, kept: Sought) -> dict[str, Array]:
        """Puts the target where it was drawn."""
        return {"mocap_pos": kept.target[None]}

    def place(self, now: physics.Data, body: str) -> Array:
        """Returns where a body is [3], in m; for `target`, the one that was sought in the step."""
        return now.xpos[self.body(body)]

    def axes(self, now: physics.Data, body: str) -> jax.Array:
        """Returns the axes [3, 3] of a body in the world, one in each column."""
        return quat_to_mat(now.xquat[self.body(body)])

    def velocity(self, now: physics.Data, body: str) -> Array:
        """Returns the velocity [3] of the centre of a body of `limbs`, in m/s."""
        return physics.sensor(self.physics_model(), now, body)

    def hit(self, now: physics.Data) -> jax.Array:
        """Returns 1 if the step reached its target, else 0, as float32."""
        seeker, target = self.place(now, self.seeking_body), self.place(now, "target")
        return self._reaches(seeker, target).astype(jnp.float32)

    def approach(self, kept: Sought, now: physics.Data) -> jax.Array:
        """Returns how far the step's move led towards the target, in m."""
        seeker = self.place(now, self.seeking_body)
        return (seeker - kept.seeker) @ direction(self.place(now, "target") - seeker)

    def touched(self, now: physics.Data, bodies: tuple[str, ...]) -> jax.Array:
        """Returns for each body 1 if a contact acts on it, else 0, as float32."""
        forces = [jnp.square(now.cfrc_ext[self.body(name)]).sum() for name in bodies]
        return (jnp.stack(forces) > 0).astype(jnp.float32)

    def egocentric(self, now: physics.Data) -> list[Array]:
        """Returns what the seeking body sees, the parts of an observation.

        They are its x and z axes in the world; then, in its own frame, the target's distance in m and
        direction, the places of `limbs` in m and their velocities in m/s.
        """
        seeker, axes = self.place(now, self.seeking_body), self.axes(now, self.seeking_body)
        target = polar((self.place(now, "target") - seeker) @ axes)
        places = [(self.place(now, name) - seeker) @ axes for name in self.limbs]
        speeds = [self.velocity(now, name) @ axes for name in self.limbs]
        return [axes[:, 0], axes[:, 2], target, *places, *speeds]

    def _reaches(self, seeker: Array, target: Array) -> jax.Array:
        return length(target - seeker) < self.target_radius

    def _draw(self, key: Array) -> jax.Array:
        far, turn, high = jax.random.split(key, 3)
        nearest, farthest = self.target_distances
        distance = nearest + (farthest - nearest) * jax.random.uniform(far)
        angle = 2 * math.pi * jax.random.uniform(turn)
        place = distance * jnp.cos(angle), distance * jnp.sin(angle), self.height(high)
        return jnp.stack([jnp.float32(x) for x in place])


def length(vector: Array) -> jax.Array:
    """Returns the length of a vector."""
    return jnp.sqrt(jnp.square(vector).sum())


def direction(vector: Array) -> jax.Array:
    """Returns the unit vector along a vector; almost 0 for a vector of 0."""
    return vector / (1e-6 + length(vector))


def polar(vector: Array) -> jax.Array:
    """Returns the length and the direction of a vector, together [4]."""
    return jnp.concatenate([length(vector)[None], direction(vector)])
