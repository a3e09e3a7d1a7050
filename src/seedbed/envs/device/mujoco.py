"""Tasks on MuJoCo models: the reset and step that all of them share, for one environment.

A task subclasses `MujocoTask`, names its MJCF file and defines `initial`, `observe` and `judge`. After a
step the derived fields (`xpos`, `cvel`, ...) are those of its last forward pass, as in Gymnasium: a little
older than `qpos` and `qvel` (see `physics.Data`), unless the task says `refreshes`, as in dm_control.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.arguments import require_fields, require_ranges
from seedbed.envs.device.given_model import require_like
from seedbed.envs.device.mjcf_files import Version, mjcf_file
from seedbed.physics.model import EULER
from seedbed.spaces import Mirror
from seedbed.types import Array, ArraySpec, Box, EnvSpec, EnvState, SeedbedError, Tree

mujoco: Any = importlib.import_module("mujoco")  # a package without types

_CLOCK = int(mujoco.mjtSensor.mjSENS_CLOCK)
_SIZES = ("reset_noise_scale", "target_radius")


class TaskState(NamedTuple):
    """The state that an environment keeps between two steps."""

    qpos: Array  # [nq]
    qpos_low: Array  # [n] see physics.Data
    qvel: Array  # [nv]
    qacc_warmstart: Array  # [nv]
    kept: Tree  # the task's `keep` of the state
    act: Tree = ()  # [na]; () if no actuator has an activation
    time: Tree = ()  # s since the episode began; () if the task does not read it


class Command(NamedTuple):
    """A number that a player tells a task, such as how fast a robot is to walk."""

    name: str
    unit: str
    low: float
    high: float


class Verdict(NamedTuple):
    """The result of judging a step."""

    reward: Array  # float32
    terminated: Array  # bool
    metrics: dict[str, Array]  # float32 scalars, for example the terms of the reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class MujocoTask(abc.ABC):
    """An on-device environment made of a MuJoCo model. Options have Gymnasium's names."""

    xml_file: str
    """MJCF file: an absolute path, one that starts with `.`, or the name of a file of Gymnasium's or ours.

    Names that begin with `dm_control/` and `playground/` are of files in packages of those projects.
    """
    frame_skip: int
    """Simulation steps in one environment step."""
    episode_steps: int = 1000
    """Steps after which an episode is truncated; 0 is never."""
    integrator: Literal["euler", "xml"] = "xml"
    """Integrator: xml is the one that the MJCF file names (exact), euler is faster."""
    model: physics.Model | None = dataclasses.field(default=None, compare=False, repr=False)
    """Model that replaces the file's; its leaves may be traced, for domain randomisation."""
    refreshes: ClassVar[bool] = False
    """Whether places and velocities of bodies are computed anew after a step, for what is seen and paid."""

    weighed: ClassVar[tuple[str, ...]] = ()
    """Bodies whose `body_invweight0` the task has set itself: `randomise` leaves it."""
    least_frame_skip: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be. Those of subclasses call it first."""
        require_fields(self)
        self.require_no_less("frame_skip", least=self.least_frame_skip)
        self.require_no_less("episode_steps", *(name for name in _SIZES if hasattr(self, name)))
        require_ranges(self)
        require_like(self, "integrator")

    def require_no_less(self, *names: str, least: float = 0) -> None:
        """Raises SeedbedError if one of these options is less than `least`, or not finite."""
        for name in names:
            if not least <= (value := getattr(self, name)) < math.inf:
                raise SeedbedError(
                    f"{type(self).__name__}.{name} is {value}; give {least:g} or more"
                )

    @abc.abstractmethod
    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws qpos [nq] and qvel [nv] for the start of an episode; consumes the key."""

    @abc.abstractmethod
    def observe(self, now: physics.Data) -> Tree:
        """Returns the observation; `now` is what mjData holds after a step."""

    @abc.abstractmethod
    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Judges the step from `before` to `now`; `action` [nu] is the agent's, before any clipping."""

    def begin(self, key: Array) -> Tree:
        """Draws what an episode keeps besides positions and velocities, `()` if nothing; consumes the key."""
        return ()

    def keep(self, now: physics.Data, kept: Tree, action: Array | None = None) -> Tree:
        """Returns what is kept of a state besides positions and velocities, for the next `judge`.

        `kept` is what was kept before, and `action` [nu] the agent's in between; at the start of an episode
        they are what `begin` drew, and None.
        """
        return kept

    def shown(self, now: physics.Data, kept: Tree) -> Tree:
        """Returns what an agent sees, of what mjData holds and of what `keep` has returned since."""
        return self.observe(now)

    def control(self, kept: Tree, action: Array) -> Array:
        """Returns what the actuators are told [nu] for an action of the agent."""
        return action

    def opening_control(self, kept: Tree, qpos: Array) -> Array:
        """Returns what the actuators are told [nu] when an episode opens at qpos [nq]."""
        return self.control(kept, jnp.zeros(self.physics_model().nu, jnp.float32))

    def mocap(self, kept: Tree) -> dict[str, Array]:
        """Returns where mocap bodies are in the step after a state, as arguments of `physics.step`."""
        return {}

    def applied(self, before: TaskState, action: Array) -> dict[str, Array]:
        """Returns what acts besides the action in a step from `before`, as arguments of `physics.step`."""
        return {}

    def velocities(self, before: TaskState) -> Array:
        """Returns the velocities [nv] with which the step from `before` begins; a task may add a kick."""
        return before.qvel

    @property
    def commands(self) -> tuple[Command, ...]:
        """Returns what a player may tell the task; `()` if nothing."""
        return ()

    def command_of(self, state: EnvState) -> Array:
        """Returns what the task has been told [n], by a player or by itself."""
        return jnp.zeros(len(self.commands), jnp.float32)

    def commanded(self, state: EnvState, command: Array) -> EnvState:
        """Returns the state in which a player has told the task `command` [n], for the next step.

        After that step, if the player tells nothing more, the task tells itself what to do.
        """
        return state

    def physics_model(self) -> physics.Model:
        """Returns the model to simulate: `model` if it is given, else that of the MJCF file."""
        return self._model if self.model is None else self.model

    @functools.cached_property
    def _model(self) -> physics.Model:
        """The model of the file, as it is when this is first asked for, with what the task changes in it."""
        return _load(Version.of(self.model_path))[self.integrator]

    @property
    def model_path(self) -> Path:
        """Returns the path of the MJCF file; raises SeedbedError if there is no such file."""
        return mjcf_file(self.xml_file)

    def compiled(self) -> Any:
        """Returns what is simulated as MuJoCo's MjModel, with all that pictures show."""
        return mujoco.MjModel.from_xml_path(str(self.model_path))

    @property
    def dt(self) -> float:
        """Returns the duration of one environment step in seconds."""
        return self.physics_model().opt.timestep * self.frame_skip

    def body(self, name: str) -> int:
        """Returns the number of the body with this name; raises SeedbedError if there is none."""
        return self.numbered("body", name)

    def numbered(self, kind: Literal["body", "geom", "site"], name: str) -> int:
        """Returns the number of what has this name; raises SeedbedError if there is nothing."""
        found = getattr(self.physics_model().names, kind)
        if name not in found:
            known = ", ".join(each for each in found if each)
            raise SeedbedError(f"{self.xml_file} has no {kind} {name!r}; it has {known}")
        return found.index(name)

    def read(self, now: physics.Data, sensor: str) -> jax.Array:
        """Returns the value of a sensor of the model, by its name."""
        return physics.sensor(self.physics_model(), now, sensor)

    @property
    def spec(self) -> EnvSpec:
        """Returns the shapes of the observation and the actuators' control ranges."""
        return self._spec

    @functools.cached_property
    def _spec(self) -> EnvSpec:
        model = self.physics_model()
        blank = physics.make_data(model, physics.init(model, model.qpos0.astype(np.float32)))
        shown = jax.eval_shape(lambda now: self.shown(now, self.begin(jax.random.key(0))), blank)
        low, high = np.asarray(self.action_bounds(), np.float32).T.tolist()
        return EnvSpec(
            jax.tree.map(lambda leaf: ArraySpec(leaf.shape, str(leaf.dtype)), shown),
            Box((model.nu,), tuple(low), tuple(high)),
            self.mirror(),
        )

    def mirror(self) -> Mirror | None:
        """Returns the task's symmetry, which agents may use; None if none is known."""
        return None

    def action_bounds(self) -> np.ndarray:
        """Returns the bounds [nu, 2] of actions: those of the actuators' controls."""
        model = self.physics_model()
        limited = model.actuator_ctrllimited[:, None] != 0
        return np.where(limited, model.actuator_ctrlrange, [-np.inf, np.inf])

    def gymnasium_options(self) -> dict[str, Any]:
        """Returns the options for `gymnasium.make` that change the observation."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name.endswith("_observation")}

    def reset(self, key: Array) -> EnvState:
        """Opens an episode with mj_forward; as in Gymnasium, `cfrc_ext` is 0. Consumes the key."""
        model = self.physics_model()
        begun = self.begin(key_of_kept(key))
        qpos, qvel = self.initial(key)
        given = {"ctrl": self.opening_control(begun, qpos)} | self.mocap(begun)
        now = physics.forward(model, physics.init(model, qpos, qvel), **given)
        now = now._replace(cfrc_ext=jnp.zeros_like(now.cfrc_ext))
        carried = self._carry(now, begun)
        verdict = self.judge(carried, now, jnp.zeros(model.nu, jnp.float32))
        metrics = jax.tree.map(jnp.zeros_like, verdict.metrics | {"solver_error": now.solver_error})
        return EnvState.opening(carried, self.shown(now, carried.kept), metrics)

    def step(self, state: EnvState, action: Array) -> EnvState:
        """Applies the action for `frame_skip` simulation steps.

        If the simulation diverges, the episode terminates; reward, metrics and observation are then 0.
        """
        return self.pulled(state, action, None)

    def pulled(self, state: EnvState, action: Array, pull: Array | None) -> EnvState:
        """Steps as `step` does, while a player pulls at the bodies with `pull` [nbody, 6], in N and N m."""
        model, before = self.physics_model(), state.inner
        acting = self._acting(before, action, pull)
        ctrl = self.control(before.kept, action)

        def substep(carry: tuple[physics.Data, Array], _: None) -> Any:
            now = physics.step_data(model, carry[0].state, ctrl, **acting)
            return (now, jnp.maximum(carry[1], now.solver_error)), None

        begun = physics.make_data(model, self._simulated(before)), jnp.float32(0)
        (now, error), _ = jax.lax.scan(substep, begun, None, length=self.frame_skip)
        if self.refreshes:
            now = physics.refresh(model, now, **self.mocap(before.kept))
        verdict = self.judge(before, now, action)

        def unless_diverged(tree: Tree) -> Tree:
            return jax.tree.map(lambda x: jnp.where(now.diverged, jnp.zeros_like(x), x), tree)

        carried = self._carry(now, before.kept, action)
        return EnvState.after(
            carried,
            unless_diverged(self.shown(now, carried.kept)),
            unless_diverged(verdict.reward),
            verdict.terminated | now.diverged,
            unless_diverged(verdict.metrics | {"solver_error": error}),
        )

    def look(
        self, state: EnvState, before: EnvState, action: Array, pull: Array
    ) -> tuple[physics.Data, Array]:
        """Returns what mjData holds in a state, as mj_forward computes it, and what acts on the bodies.

        `action` and `pull` are those of the step from `before` to `state`, in which the actuators were told
        what they are told here. What acts is `xfrc_applied` [nbody, 6], in N and N m.
        """
        now, acting = self._simulated(state.inner), self._acting(state.inner, action, pull)
        given = {"ctrl": self.control(before.inner.kept, action)} | acting
        return physics.forward(self.physics_model(), now, **given), acting["xfrc_applied"]

    def _acting(self, before: TaskState, action: Array, pull: Array | None) -> dict[str, Array]:
        """Returns what acts besides the control in a step, as arguments of `physics.step`."""
        acting = self.mocap(before.kept) | self.applied(before, action)
        if pull is not None:
            acting["xfrc_applied"] = pull + acting.get("xfrc_applied", 0.0)
        return acting

    def _simulated(self, carried: TaskState) -> physics.State:
        """Returns the state of the simulation, of what was carried."""
        model = self.physics_model()
        state = physics.init(model, carried.qpos, self.velocities(carried))._replace(
            qpos_low=carried.qpos_low, qacc_warmstart=carried.qacc_warmstart
        )
        if model.na:
            state = state._replace(act=carried.act)
        return state._replace(time=carried.time) if self._reads_time else state

    def _carry(self, now: physics.Data, kept: Tree, action: Array | None = None) -> TaskState:
        act = now.act if self.physics_model().na else ()
        time = now.time if self._reads_time else ()
        kept = self.keep(now, kept, action)
        return TaskState(now.qpos, now.qpos_low, now.qvel, now.qacc_warmstart, kept, act, time)

    @functools.cached_property
    def _reads_time(self) -> bool:
        """Whether an output of the task depends on the time; if not, the time is not carried."""
        model = self.physics_model()
        if any(sensor.kind == _CLOCK for sensor in model.sensors):
            return True
        blank = physics.make_data(model, physics.init(model, model.qpos0.astype(np.float32)))
        action, act = jnp.zeros(model.nu, jnp.float32), blank.act if model.na else ()

        def outputs(time: Array) -> Tree:
            now = blank._replace(time=time)
            state = now.qpos, now.qpos_low, now.qvel, now.qacc_warmstart
            before = TaskState(*state, self.keep(now, self.begin(jax.random.key(0))), act, time)
            judged, kept = self.judge(before, now, action), self.keep(now, before.kept, action)
            given = self.applied(before, action), self.velocities(before)
            return self.shown(now, kept), judged, kept, given

        traced = jax.make_jaxpr(outputs)(np.float32(0)).jaxpr
        used = [variable for line in traced.eqns for variable in line.invars]
        return any(traced.invars[0] is variable for variable in [*used, *traced.outvars])


def key_of_kept(key: Array) -> Array:
    """Returns the key that `begin` gets in a reset: by no small number, which give the keys of `split`."""
    return jax.random.fold_in(key, 0x6B657074)


def noise(key: Array, size: int, scale: float) -> jax.Array:
    """Draws uniform float32 [size] in [-scale, scale); consumes the key."""
    return jax.random.uniform(key, (size,), jnp.float32, -scale, scale)


def normal_noise(key: Array, size: int, scale: float) -> jax.Array:
    """Draws normal float32 [size] with mean 0 and standard deviation `scale`; consumes the key."""
    return scale * jax.random.normal(key, (size,), jnp.float32)


def noisy_rest(
    model: physics.Model,
    key: Array,
    scale: float,
    velocity_noise: Callable[[Array, int, float], jax.Array] = noise,
    keyframe: str | int | None = None,
) -> tuple[Array, Array]:
    """Draws qpos [nq] and qvel [nv] near the `keyframe`'s pose, or qpos0, at rest; consumes the key.

    The noise on qpos is uniform in [-scale, scale); `velocity_noise` draws that on qvel. Raises SeedbedError
    if there is no such keyframe.
    """
    position, velocity = jax.random.split(key)
    rest = model.qpos0 if keyframe is None else physics.init(model, keyframe=keyframe).qpos
    qpos = rest.astype(np.float32) + noise(position, model.nq, scale)
    return qpos, velocity_noise(velocity, model.nv, scale)


def within(x: Array, bounds: tuple[float, float]) -> jax.Array:
    """Returns whether each number is strictly between the bounds."""
    return (bounds[0] < x) & (x < bounds[1])


def moved(before: TaskState, now: physics.Data, i: int) -> jax.Array:
    """Returns how far qpos[i] of the first tree's root has moved in m, exactly, by what `qpos_low` keeps."""
    way = now.qpos[i] - before.qpos[i]
    return way + (now.qpos_low[i] - before.qpos_low[i]) if i < now.qpos_low.size else way


def squares(x: Array) -> jax.Array:
    """Returns the sum of the squares of all elements, a scalar."""
    return jnp.square(x).sum()


@functools.cache
def _load(file: Version) -> dict[str, physics.Model]:
    """Loads a file's model once, and returns a dict of models by the option `integrator`."""
    model = physics.load(file.path)
    euler = dataclasses.replace(model, opt=model.opt._replace(integrator=EULER))
    return {"xml": model, "euler": euler}
