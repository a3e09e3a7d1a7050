"""dm_control's bodies that move to a target: reacher, point mass, fish and swimmer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mujoco import mujoco
from seedbed.envs.device.suite.task import SuiteTask, hide, part, small_control, tolerance
from seedbed.physics.math import quat_to_mat
from seedbed.types import Array, Tree

_JOINTS = 7  # of the fish
_MOVING = np.array([0, 1, 5])  # of a segment's velocity: along x and y, and about z


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReacherEasy(SuiteTask):
    """dm_control's reacher: an arm of two links reaches a target in the plane."""

    xml_file: str = "dm_control/reacher.xml"
    frame_skip: int = 1
    radius: float = 0.05
    """Radius of the target, in m."""
    targets: ClassVar[tuple[str, ...]] = ("target",)

    def edit(self, spec: Any) -> None:
        """Gives the target its size."""
        part(spec, "geom", "target", self.xml_file).size[0] = self.radius

    def begin(self, key: Array) -> Array:
        """Draws where the target is [1, 3], in m; consumes the key."""
        turn, far = jax.random.split(key)
        angle = jax.random.uniform(turn, (), jnp.float32, 0, 2 * math.pi)
        reach = jax.random.uniform(far, (), jnp.float32, 0.05, 0.2)
        return jnp.stack([reach * jnp.sin(angle), reach * jnp.cos(angle), jnp.float32(0.01)])[None]

    def observe(self, now: physics.Data) -> Tree:
        """Returns positions, the way to the target, and velocities."""
        return {"position": now.qpos, "to_target": self._way(now), "velocity": now.qvel}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a finger that touches the target."""
        reach = self.radius + self.size("finger")
        return {"near": tolerance(jnp.sqrt(jnp.square(self._way(now)).sum()), (0.0, reach))}

    def _way(self, now: physics.Data) -> jax.Array:
        return (self.place(now, "target") - self.place(now, "finger"))[:2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReacherHard(ReacherEasy):
    """dm_control's reacher: an arm of two links reaches a small target in the plane."""

    radius: float = 0.015


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointMassEasy(SuiteTask):
    """dm_control's point mass, which is to be in the middle."""

    xml_file: str = "dm_control/point_mass.xml"
    frame_skip: int = 1

    def observe(self, now: physics.Data) -> Tree:
        """Returns positions and velocities."""
        return {"position": now.qpos, "velocity": now.qvel}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for being near the target, and for small control."""
        radius = self.size("target")
        off = self.place(now, "target") - self.place(now, "pointmass")
        near = tolerance(jnp.sqrt(jnp.square(off).sum()), (0.0, radius), radius)
        return {"near": near, "small_control": small_control(action)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FishUpright(SuiteTask):
    """dm_control's fish turns upright in the water."""

    xml_file: str = "dm_control/fish.xml"
    frame_skip: int = 10

    def edit(self, spec: Any) -> None:
        """Hides the target, unless there is one."""
        if not self.targets:
            hide(spec, "target", self.xml_file)

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws any orientation, and joints near straight, at rest; consumes the key."""
        model, (turn, bend) = self.physics_model(), jax.random.split(key)
        quat = jax.random.normal(turn, (4,), jnp.float32)
        quat = quat / jnp.sqrt(jnp.square(quat).sum())
        joints = jax.random.uniform(bend, (_JOINTS,), jnp.float32, -0.2, 0.2)
        place = jnp.asarray(model.qpos0[:3], jnp.float32)
        return jnp.concatenate([place, quat, joints]), jnp.zeros(model.nv, jnp.float32)

    def observe(self, now: physics.Data) -> Tree:
        """Returns joints, how far up the back points, and velocities."""
        return {"joint_angles": now.qpos[7:], "upright": self._up(now), "velocity": now.qvel}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a back that points upwards."""
        return {"upright": tolerance(self._up(now), (1.0, 1.0), 1.0)}

    def _up(self, now: physics.Data) -> jax.Array:
        return self.axes(now, "torso")[2, 2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FishSwim(FishUpright):
    """dm_control's fish swims to a target."""

    targets: ClassVar[tuple[str, ...]] = ("target",)

    def begin(self, key: Array) -> Array:
        """Draws where the target is [1, 3], in m; consumes the key."""
        low, high = np.array([[-0.4, -0.4, 0.1], [0.4, 0.4, 0.3]], np.float32)
        return (low + (high - low) * jax.random.uniform(key, (3,), jnp.float32))[None]

    def observe(self, now: physics.Data) -> Tree:
        """Returns what the upright fish sees, and the way from the mouth to the target in its frame."""
        return super().observe(now) | {"target": self._way(now)}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a mouth near the target, and a little for being upright."""
        reach = self.size("mouth") + self.size("target")
        off = jnp.sqrt(jnp.square(self._way(now)).sum())
        near = tolerance(off, (0.0, reach), 2 * reach)
        return {"swim": (7 * near + (self._up(now) + 1) / 2) / 8}

    def _way(self, now: physics.Data) -> jax.Array:
        model, mouth = self.physics_model(), self.geom("mouth")
        body = now.xquat[int(model.geom_bodyid[mouth])]
        own = quat_to_mat(jnp.asarray(model.geom_quat[mouth], jnp.float32))
        way = self.place(now, "target") - self.place(now, "mouth")
        return way @ quat_to_mat(body) @ own


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwimmerSwimmer6(SuiteTask):
    """dm_control's swimmer of six links swims to a target."""

    xml_file: str = "dm_control/swimmer.xml"
    frame_skip: int = 15
    links: int = 6
    """Links in a row."""
    targets: ClassVar[tuple[str, ...]] = ("target",)
    smallest: ClassVar[dict[str, float]] = {"links": 3}

    def edit(self, spec: Any) -> None:
        """Adds the links behind the head, with motors and sensors."""
        parent, looks = part(spec, "body", "head", self.xml_file), spec.find_default
        reach = 360 / self.links
        for i in range(self.links - 1):
            parent = parent.add_body(name=f"segment_{i}", pos=[0, 0.1, 0])
            for kind in ("visual", "inertial"):
                parent.add_geom(looks(kind), name=f"{kind}_{i}")
            parent.add_site(looks("swimmer"), name=f"site_{i}")
            parent.add_joint(looks("swimmer"), name=f"joint_{i}", range=[-reach, reach])
            motor = spec.add_actuator(spec.default, name=f"motor_{i}", target=f"joint_{i}")
            motor.trntype = mujoco.mjtTrn.mjTRN_JOINT
            for kind in ("velocimeter", "gyro"):
                spec.add_sensor(
                    name=f"{kind}_{i}",
                    type=getattr(mujoco.mjtSensor, f"mjSENS_{kind.upper()}"),
                    objtype=mujoco.mjtObj.mjOBJ_SITE,
                    objname=f"site_{i}",
                )

    def begin(self, key: Array) -> Array:
        """Draws where the target is [1, 3], near the start once in five times; consumes the key."""
        near, where = jax.random.split(key)
        box = jnp.where(jax.random.uniform(near) < 0.2, 0.3, 2.0)
        place = box * jax.random.uniform(where, (2,), jnp.float32, -1, 1)
        return jnp.concatenate([place, jnp.full(1, 0.05, jnp.float32)])[None]

    def observe(self, now: physics.Data) -> Tree:
        """Returns joints, the way to the target in the head's frame, and velocities of the links."""
        names = ["head_vel", "head_gyro"]
        names += [f"{kind}_{i}" for i in range(self.links - 1) for kind in ("velocimeter", "gyro")]
        speeds = jnp.concatenate([self.read(now, name) for name in names]).reshape(-1, 6)
        return {
            "joints": now.qpos[3:],
            "to_target": self._way(now),
            "body_velocities": speeds[:, _MOVING].ravel(),
        }

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a nose near the target."""
        radius = self.size("target")
        off = jnp.sqrt(jnp.square(self._way(now)).sum())
        return {"near": tolerance(off, (0.0, radius), 5 * radius, "long_tail")}

    def _way(self, now: physics.Data) -> jax.Array:
        way = self.place(now, "target") - self.place(now, "nose")
        return (way @ self.axes(now, "head"))[:2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwimmerSwimmer15(SwimmerSwimmer6):
    """dm_control's swimmer of fifteen links swims to a target."""

    links: int = 15
