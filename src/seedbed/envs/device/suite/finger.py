"""dm_control's finger: two links spin a free body, or turn it to a target.

The friction cone is a pyramid, where dm_control has an ellipse: the engine has no other. The cylinders that
decorate the hinges touch nothing; in dm_control, other bodies keep everything away from them. Contacts of
the spun body are as soft as in MuJoCo before 4.0, with which the task was published.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.mujoco import mujoco
from seedbed.envs.device.suite.task import SuiteTask, part, tolerance
from seedbed.types import Array, Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Finger(SuiteTask):
    """A base of the finger's tasks."""

    xml_file: str = "dm_control/finger.xml"
    frame_skip: int = 2
    starts_apart: ClassVar[bool] = True
    weighed: ClassVar[tuple[str, ...]] = ("spinner",)

    def edit(self, spec: Any) -> None:
        """Leaves out what the engine does not simulate."""
        spec.option.cone = mujoco.mjtCone.mjCONE_PYRAMIDAL
        for name in ("proximal_decoration", "spinner_decoration"):
            decoration = part(spec, "geom", name, self.xml_file)
            decoration.contype = decoration.conaffinity = 0

    def compiled(self) -> Any:
        """Returns what is simulated as MuJoCo's MjModel, with all that pictures show."""
        model = super().compiled()
        # The body turns about its centre of mass, which nothing can move: its inverse weight there is 0 since
        # MuJoCo 4.0, and was that of turning before.
        for name in self.weighed:
            weights = model.body_invweight0[model.body(name).id]
            weights[0] = weights[1]
        return model

    def observe(self, now: physics.Data) -> Tree:
        """Returns joints and the tip of the body, velocities, and what the finger feels."""
        joints = [self.read(now, name) for name in ("proximal", "distal")]
        names = ("proximal_velocity", "distal_velocity", "hinge_velocity")
        felt = [self.read(now, name) for name in ("touchtop", "touchbottom")]
        return {
            "position": jnp.concatenate([*joints, self.tip(now)]),
            "velocity": jnp.concatenate([self.read(now, name) for name in names]),
            "touch": jnp.log1p(jnp.concatenate(felt)),
        }

    def tip(self, now: physics.Data) -> jax.Array:
        """Returns x and z of the body's tip from its hinge, in m."""
        return (self.read(now, "tip") - self.read(now, "spinner"))[::2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FingerSpin(_Finger):
    """dm_control's finger spins a free body."""

    def edit(self, spec: Any) -> None:
        """Makes the body turn more easily, and hides what only the other tasks need."""
        super().edit(spec)
        part(spec, "joint", "hinge", self.xml_file).damping[0] = 0.03
        for name in ("target", "tip"):
            site = part(spec, "site", name, self.xml_file)
            site.material, site.rgba = "", [0, 0, 0, 0]

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a body that turns at 15 rad/s or more."""
        return {"fast": tolerance(self.read(now, "hinge_velocity")[0], (-math.inf, -15.0))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FingerTurnEasy(_Finger):
    """dm_control's finger turns a free body to a target."""

    radius: float = 0.07
    """Radius of the target, in m."""
    targets: ClassVar[tuple[str, ...]] = ("target",)

    def edit(self, spec: Any) -> None:
        """Gives the target its size."""
        super().edit(spec)
        for kind in ("site", "geom"):
            part(spec, kind, "target", self.xml_file).size[0] = self.radius

    def begin(self, key: Array) -> Array:
        """Draws where the target is [1, 3], in m; consumes the key."""
        model = self.physics_model()
        angle = jax.random.uniform(key, (), jnp.float32, -math.pi, math.pi)
        hinge = model.body_pos[self.body("spinner")]
        reach = model.geom_size[self.geom("cap1")].sum()
        x, z = hinge[0] + reach * jnp.sin(angle), hinge[2] + reach * jnp.cos(angle)
        return jnp.stack([x, jnp.float32(0.0), z])[None].astype(jnp.float32)

    def observe(self, now: physics.Data) -> Tree:
        """Returns what the finger sees and feels, the target, and how far the tip is from it."""
        goal = self._goal(now)
        return super().observe(now) | {"target_position": goal, "dist_to_target": self._off(now)}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a tip in the target."""
        return {"in_target": tolerance(self._off(now), (-math.inf, 0.0))}

    def _goal(self, now: physics.Data) -> jax.Array:
        return (self.read(now, "target") - self.read(now, "spinner"))[::2]

    def _off(self, now: physics.Data) -> jax.Array:
        way = self._goal(now) - self.tip(now)
        return jnp.sqrt(jnp.square(way).sum()) - self.radius


@dataclasses.dataclass(frozen=True, kw_only=True)
class FingerTurnHard(FingerTurnEasy):
    """dm_control's finger turns a free body to a small target."""

    radius: float = 0.03
