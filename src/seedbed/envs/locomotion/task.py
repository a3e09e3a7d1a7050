"""Tasks on MuJoCo models: reset and step of one environment, around what a task says of itself.

A task subclasses `MujocoTask`, names its MJCF file and writes `initial`, `observe` and `judge`. As in
Gymnasium, what a forward pass leaves (`xpos`, `cvel`, ...) is that of the step's last forward pass.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.physics.model import EULER
from seedbed.types import Array, ArraySpec, Box, EnvSpec, EnvState, SeedbedError, Timestep, Tree

mujoco: Any = importlib.import_module("mujoco")  # a package without types

ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"


class Carried(NamedTuple):
    """What an environment keeps between two steps."""

    qpos: Array  # [nq]
    qpos_low: Array  # [nq] see physics.State
    qvel: Array  # [nv]
    qacc_warmstart: Array  # [nv]
    kept: Tree  # what the task's `keep` returned


class Verdict(NamedTuple):
    """What a step was worth."""

    reward: Array  # float32
    terminated: Array  # bool
    metrics: dict[str, Array]  # float32 scalars, the terms of the reward for instance


@dataclasses.dataclass(frozen=True, kw_only=True)
class MujocoTask(abc.ABC):
    """An on-device environment made of a MuJoCo model; options are named as Gymnasium's."""

    xml_file: str  # a path, or the name of a file installed with Gymnasium
    frame_skip: int  # simulation steps of one environment step
    episode_steps: int = 1000
    integrator: Literal["euler", "xml"] = "xml"  # euler: faster; xml: what the file says, exact
    # In place of the file's model; its leaves may be traced (domain randomisation).
    model: physics.Model | None = dataclasses.field(default=None, compare=False, repr=False)

    @abc.abstractmethod
    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv] at the start of an episode; consumes the key."""

    @abc.abstractmethod
    def observe(self, now: physics.State) -> Tree:
        """Shows a state."""

    @abc.abstractmethod
    def judge(self, before: Carried, now: physics.State, action: Array) -> Verdict:
        """Rewards the step from `before` to `now` under the action [nu] as it was given."""

    def keep(self, now: physics.State) -> Tree:
        """What `judge` will need to know of this state beyond its positions and velocities."""
        return ()

    def physics_model(self) -> physics.Model:
        """The model that is simulated."""
        if self.model is not None:
            return self.model
        return _load(self.xml_file)[self.integrator]

    @property
    def model_path(self) -> Path:
        """Where the MJCF file is."""
        return _path(self.xml_file)

    @property
    def dt(self) -> float:
        """Seconds of one environment step."""
        return self.physics_model().opt.timestep * self.frame_skip

    def body(self, name: str) -> int:
        """The number of a body, by its name in the file."""
        found = _bodies(self.xml_file)
        if name not in found:
            raise SeedbedError(f"{self.xml_file} has no body {name!r}; it has {', '.join(found)}")
        return found[name]

    @property
    def spec(self) -> EnvSpec:
        """The observation's shapes and the actuators' control ranges."""
        return self._spec

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        model = self.physics_model()
        blank = physics.init(model, model.qpos0.astype(np.float32))
        shown = jax.eval_shape(self.observe, blank)
        limited = model.actuator_ctrllimited[:, None] != 0
        bounds = np.where(limited, model.actuator_ctrlrange, [-np.inf, np.inf])
        low, high = np.asarray(bounds, np.float32).T.tolist()
        return EnvSpec(
            jax.tree.map(lambda leaf: ArraySpec(leaf.shape, str(leaf.dtype)), shown),
            Box((model.nu,), tuple(low), tuple(high)),
        )

    def gymnasium_options(self) -> dict[str, Any]:
        """The options that change the observation, for `gymnasium.make`."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name.endswith("_observation")}

    def reset(self, key: Array) -> EnvState:
        """Opens an episode: mj_forward, without contact forces in `cfrc_ext`, as in Gymnasium."""
        model = self.physics_model()
        now = physics.forward(model, physics.init(model, *self.initial(key)))
        now = now._replace(cfrc_ext=jnp.zeros_like(now.cfrc_ext))
        carried = self._carry(now)
        verdict = self.judge(carried, now, jnp.zeros(model.nu, jnp.float32))
        no = jnp.bool_(False)
        timestep = Timestep(self.observe(now), jnp.float32(0), no, no, jnp.bool_(True))
        return EnvState(carried, timestep, jax.tree.map(jnp.zeros_like, verdict.metrics))

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Holds the action for `frame_skip` simulation steps.

        A diverged simulation ends the episode, with reward 0 and an observation of zeros.
        """
        model, before = self.physics_model(), state.inner
        start = physics.init(model, before.qpos, before.qvel)._replace(
            qpos_low=before.qpos_low, qacc_warmstart=before.qacc_warmstart
        )

        def substep(now: physics.State, _: None) -> tuple[physics.State, None]:
            return physics.step(model, now, action), None

        now, _ = jax.lax.scan(substep, start, None, length=self.frame_skip)
        verdict = self.judge(before, now, action)

        def unless_diverged(tree: Tree) -> Tree:
            return jax.tree.map(lambda x: jnp.where(now.diverged, jnp.zeros_like(x), x), tree)

        no = jnp.bool_(False)
        timestep = Timestep(
            unless_diverged(self.observe(now)),
            unless_diverged(verdict.reward),
            verdict.terminated | now.diverged,
            no,
            no,
        )
        return EnvState(self._carry(now), timestep, unless_diverged(verdict.metrics))

    def _carry(self, now: physics.State) -> Carried:
        return Carried(now.qpos, now.qpos_low, now.qvel, now.qacc_warmstart, self.keep(now))


def noise(key: Array, size: int, scale: float) -> jax.Array:
    """Uniform float32 [size] in [-scale, scale); consumes the key."""
    return jax.random.uniform(key, (size,), jnp.float32, -scale, scale)


def normal_noise(key: Array, size: int, scale: float) -> jax.Array:
    """Normal float32 [size] of standard deviation `scale`; consumes the key."""
    return scale * jax.random.normal(key, (size,), jnp.float32)


def noisy_rest(
    model: physics.Model,
    key: Array,
    scale: float,
    velocity_noise: Callable[[Array, int, float], jax.Array] = noise,
) -> tuple[Array, Array]:
    """The model's own position and rest with noise on both, qpos [nq] and qvel [nv]."""
    position, velocity = jax.random.split(key)
    qpos = model.qpos0.astype(np.float32) + noise(position, model.nq, scale)
    return qpos, velocity_noise(velocity, model.nv, scale)


def within(x: Array, bounds: tuple[float, float]) -> jax.Array:
    """Whether each number is truly between the bounds."""
    return (bounds[0] < x) & (x < bounds[1])


def moved(before: Carried, now: physics.State, i: int) -> jax.Array:
    """The way that the root's translation qpos[i] has come, exact however far from the origin."""
    return (now.qpos[i] - before.qpos[i]) + (now.qpos_low[i] - before.qpos_low[i])


def squares(x: Array) -> jax.Array:
    """The sum of squares."""
    return jnp.square(x).sum()


@functools.cache
def _load(xml_file: str) -> dict[str, physics.Model]:
    """A file's model, by integrator."""
    model = physics.load(_path(xml_file))
    euler = dataclasses.replace(model, opt=model.opt._replace(integrator=EULER))
    return {"xml": model, "euler": euler}


@functools.cache
def _bodies(xml_file: str) -> dict[str, int]:
    compiled = mujoco.MjModel.from_xml_path(str(_path(xml_file)))
    return {compiled.body(i).name: i for i in range(compiled.nbody)}


def _path(xml_file: str) -> Path:
    """A file's path; a bare name is one of Gymnasium's, as in its own constructors."""
    path = Path(xml_file).expanduser()
    path = path if path.is_absolute() or xml_file.startswith(".") else ASSETS / path
    if not path.is_file():
        raise SeedbedError(f"there is no MJCF file {path}; give an absolute path, or one in ./")
    return path
