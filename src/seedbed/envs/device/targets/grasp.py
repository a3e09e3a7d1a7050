"""Grasp: a hand with four fingers must carry an object to one target after the other; after Brax v1's."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import TaskState, Verdict
from seedbed.envs.device.targets.task import TargetTask, direction, length, polar
from seedbed.types import Array

_FINGERS = ("thumb", "second", "third", "fourth")
_TIPS = tuple(f"{finger}_distal" for finger in _FINGERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grasp(TargetTask):
    """Brax's Grasp: a hand with four fingers that must carry an object to one target after the other.

    Reward and observation are Brax v1's, with these differences. The palm moves on three slides, and an
    action asks for its speed, of up to 10 m/s along each axis; Brax's asks for a place up to 10 m away, and
    the palm is put there by steps, so that what it holds feels no speed. An action has 19 numbers and not 39,
    as 20 of Brax's move joints by 0.1 degrees. All four finger tips are paid for touching; Brax counts other
    bodies for three of them. Episodes begin with the fingers bent around the object; Brax's are straight.
    """

    xml_file: str = "grasp.xml"
    frame_skip: int = 4
    target_radius: float = 1.1
    target_distances: tuple[float, float] = (1.1, 11.1)
    target_height: float = 8.0
    """Largest height of a target, in m."""
    limbs: ClassVar[tuple[str, ...]] = (
        "object",
        "palm",
        *(f"{finger}_{part}" for finger in _FINGERS for part in ("proximal", "middle", "distal")),
    )
    seeking_body: ClassVar[str] = "object"

    def height(self, key: Array) -> Array:
        """Draws the height of a target in m; consumes the key."""
        return self.target_height * jax.random.uniform(key)

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Returns the hand around the object, at rest; does not consume the key."""
        del key
        model = self.physics_model()
        qpos = physics.init(model, keyframe="around").qpos.astype(np.float32)
        return qpos, jnp.zeros(model.nv, jnp.float32)

    def observe(self, now: physics.Data) -> Array:
        """Returns the hand, the object and the target, as the palm sees them; the palm never turns.

        They are the object's and the target's distance and direction, the places of `limbs` and of the
        ground's origin, the velocities of `limbs`; the way to the object, the thumb's velocity and its
        speed towards the object; the target's distance and direction from the object, the object's speed
        towards it; and for the object, the palm and the finger tips whether they touch. In m and m/s.
        """
        palm, thing = self.place(now, "palm"), self.place(now, "object")
        target, thumb = self.place(now, "target"), self.velocity(now, "thumb_proximal")
        onward = polar(target - thing)
        return jnp.concatenate(
            [
                polar(thing - palm),
                polar(target - palm),
                *(self.place(now, name) - palm for name in self.limbs if name != "palm"),
                -palm,
                *(self.velocity(now, name) for name in self.limbs),
                thing - palm,
                thumb,
                (direction(thing - palm) @ thumb)[None],
                onward,
                (onward[1:] @ self.velocity(now, "object"))[None],
                self.touched(now, ("object", "palm", *_TIPS)),
            ]
        )

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays for an object at its target, and less for moving it there, touching it and being near."""
        del before, action
        way = self.place(now, "object") - self.place(now, "palm")
        onward = direction(self.place(now, "target") - self.place(now, "object"))
        thumb = self.velocity(now, "thumb_proximal")
        hits = self.hit(now)
        terms = {
            "moving_to_object": 0.1 * self.dt * (thumb @ direction(way)),
            "close_to_object": 0.1 * self.dt / (1 + length(way[:2])),
            "touching_object": 0.2 * self.dt * self.touched(now, _TIPS).sum(),
            "moving_object_to_target": 1.5 * self.dt * (self.velocity(now, "object") @ onward),
        }
        return Verdict(sum(terms.values()) + 5 * hits, jnp.bool_(False), terms | {"hits": hits})
