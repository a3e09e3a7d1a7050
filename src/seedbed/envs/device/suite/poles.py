"""dm_control's poles: pendulum, acrobot, and a cart with poles; each is to be swung up, or balanced."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from seedbed import physics
from seedbed.envs.device.suite.task import SuiteTask, part, small_noise, tolerance
from seedbed.types import Array, Tree

_UPRIGHT = math.cos(math.radians(8))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendulumSwingup(SuiteTask):
    """dm_control's pendulum: a pole whose motor is too weak must come to stand upright."""

    xml_file: str = "dm_control/pendulum.xml"
    frame_skip: int = 1

    def observe(self, now: physics.Data) -> Tree:
        """Returns where the pole points, and how fast it turns."""
        axes = self.axes(now, "pole")
        return {"orientation": jnp.stack([axes[2, 2], axes[0, 2]]), "velocity": now.qvel}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for standing within 8 degrees of upright."""
        return {"upright": tolerance(self.axes(now, "pole")[2, 2], (_UPRIGHT, 1.0))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcrobotSwingup(SuiteTask):
    """dm_control's acrobot: two links with a motor at the elbow must point upwards."""

    xml_file: str = "dm_control/acrobot.xml"
    frame_skip: int = 1
    sparse: bool = False
    """Whether only the target itself is paid."""

    def observe(self, now: physics.Data) -> Tree:
        """Returns where the links point, and how fast they turn."""
        links = [self.axes(now, name) for name in ("upper_arm", "lower_arm")]
        points = [axes[0, 2] for axes in links] + [axes[2, 2] for axes in links]
        return {"orientations": jnp.stack(points), "velocity": now.qvel}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for a tip near the target."""
        tip, target = (self.numbered("site", name) for name in ("tip", "target"))
        way = now.site_xpos[target] - now.site_xpos[tip]
        radius = float(self.physics_model().site_size[target, 0])
        off = jnp.sqrt(jnp.square(way).sum())
        return {"near": tolerance(off, (0.0, radius), 0.0 if self.sparse else 1.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcrobotSwingupSparse(AcrobotSwingup):
    """dm_control's acrobot, paid at the target only."""

    sparse: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cartpole(SuiteTask):
    """A base of the tasks with a cart."""

    xml_file: str = "dm_control/cartpole.xml"
    frame_skip: int = 1
    poles: int = 1
    """Poles, one on the other."""
    sparse: bool = False
    """Whether only standing upright in the middle is paid."""

    smallest: ClassVar[dict[str, float]] = {"poles": 1}

    def edit(self, spec: Any) -> None:
        """Puts more poles on the first."""
        parent = part(spec, "body", "pole_1", self.xml_file)
        look = part(spec, "find_default", "pole", self.xml_file)
        for number in range(2, self.poles + 1):
            parent = parent.add_body(name=f"pole_{number}", pos=[0, 0, 1])
            parent.add_joint(look, name=f"hinge_{number}")
            parent.add_geom(look, name=f"pole_{number}")
        if self.poles > 1:
            part(spec, "geom", "floor", self.xml_file).pos = [0, 0, 1 - self.poles - 0.05]

    def observe(self, now: physics.Data) -> Tree:
        """Returns the cart's place, where the poles point, and all velocities."""
        poles = [self.axes(now, f"pole_{i + 1}") for i in range(self.poles)]
        points = [x for axes in poles for x in (axes[2, 2], axes[0, 2])]
        return {"position": jnp.stack([now.qpos[0], *points]), "velocity": now.qvel}

    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Pays for poles upright and still, the cart in the middle, and small control."""
        up = jnp.stack([self.axes(now, f"pole_{i + 1}")[2, 2] for i in range(self.poles)])
        place = now.qpos[0]
        if self.sparse:
            upright = tolerance(up, (0.995, 1.0)).min()
            return {"in_middle": tolerance(place, (-0.25, 0.25)), "upright": upright}
        control = tolerance(action[0], margin=1, shape="quadratic", at_margin=0)
        return {
            "upright": ((up + 1) / 2).mean(),
            "centred": (1 + tolerance(place, margin=2)) / 2,
            "small_control": (4 + control) / 5,
            "small_velocity": (1 + tolerance(now.qvel[1:], margin=5).min()) / 2,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartpoleBalance(_Cartpole):
    """dm_control's cart, whose pole opens near upright."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws a place near the middle and poles near upright, almost at rest; consumes the key."""
        model, (slide, turn, move) = self.physics_model(), jax.random.split(key, 3)
        place = jax.random.uniform(slide, (1,), jnp.float32, -0.1, 0.1)
        angles = jax.random.uniform(turn, (self.poles,), jnp.float32, -0.034, 0.034)
        return jnp.concatenate([place, angles]), small_noise(model, move)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartpoleBalanceSparse(CartpoleBalance):
    """dm_control's cart, whose pole opens near upright, paid for standing in the middle only."""

    sparse: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartpoleSwingup(_Cartpole):
    """dm_control's cart, whose pole opens hanging."""

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws a hanging pole, and others straight under it, almost at rest; consumes the key."""
        model, (turn, move) = self.physics_model(), jax.random.split(key)
        spread = jnp.array([0.01, 0.01] + [0.1] * (self.poles - 1), jnp.float32)
        off = spread * jax.random.normal(turn, (self.poles + 1,), jnp.float32)
        return off.at[1].add(math.pi), small_noise(model, move)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartpoleSwingupSparse(CartpoleSwingup):
    """dm_control's cart, whose pole opens hanging, paid for standing in the middle only."""

    sparse: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartpoleTwoPoles(CartpoleSwingup):
    """dm_control's cart with two poles, which open hanging."""

    poles: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartpoleThreePoles(CartpoleSwingup):
    """dm_control's cart with three poles, which open hanging."""

    poles: int = 3
