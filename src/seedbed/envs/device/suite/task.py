"""The base of dm_control's tasks: how episodes open, and how closeness to a goal is paid.

A reward is at most 1 in each of an episode's 1,000 steps, and no episode ends early. What is seen and paid
belongs to the state after a step: dm_control computes the positions and velocities of the bodies anew.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import warnings
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from seedbed import physics
from seedbed.envs.device.mjcf_files import Version
from seedbed.envs.device.mujoco import MujocoTask, TaskState, Verdict, mujoco, normal_noise
from seedbed.physics.math import quat_to_mat
from seedbed.physics.model import EULER, FREE, HINGE
from seedbed.types import Array, SeedbedError, Tree

_MOST_DRAWS = 1000
Shape = Literal["gaussian", "linear", "quadratic", "long_tail"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteTask(MujocoTask, abc.ABC):
    """A base of dm_control's tasks."""

    refreshes: ClassVar[bool] = True
    starts_apart: ClassVar[bool] = False
    """Whether the drawn start of an episode is drawn again until nothing touches."""
    targets: ClassVar[tuple[str, ...]] = ()
    """Geoms or sites of the file that an episode moves: mocap bodies of the same names are in their place."""
    smallest: ClassVar[dict[str, float]] = {}
    """Smallest values of options that are numbers, by name; of the others it is 0."""

    def __post_init__(self) -> None:
        """Raises SeedbedError for an option that cannot be."""
        super().__post_init__()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.require_no_less(field.name, least=self.smallest.get(field.name, 0))

    @abc.abstractmethod
    def terms(self, now: physics.Data, action: Array) -> dict[str, Array]:
        """Returns what the reward is the product of, by name, each from 0 to 1."""

    def edit(self, spec: Any) -> None:
        """Changes the file's MjSpec, before it is compiled."""

    @functools.cached_property
    def _model(self) -> physics.Model:
        return _loaded(Version.of(self.model_path), self)

    def compiled(self) -> Any:
        """Returns what is simulated as MuJoCo's MjModel, with all that pictures show."""
        spec = mujoco.MjSpec.from_file(str(self.model_path))
        for name in self.targets:
            _free(spec, name, self.xml_file)
        self.edit(spec)
        with warnings.catch_warnings():
            # Who trains on these files cannot change what MuJoCo would have written otherwise in them.
            warnings.simplefilter("ignore", UserWarning)
            return spec.compile()

    def initial(self, key: Array) -> tuple[Array, Array]:
        """Draws every limited or turning joint within its range, at rest; consumes the key."""
        model = self.physics_model()
        still = jnp.zeros(model.nv, jnp.float32)
        if not self.starts_apart:
            return random_pose(model, key), still

        def touches(drawn: tuple[Array, Array, Array]) -> Array:
            _, qpos, count = drawn
            begun = physics.forward(model, physics.init(model, qpos))
            return (begun.ncon > 0) & (count < _MOST_DRAWS)

        def again(drawn: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            key, drawing = jax.random.split(drawn[0])
            return key, random_pose(model, drawing), drawn[2] + 1

        first = key, random_pose(model, jax.random.fold_in(key, 0x706F7365)), jnp.int32(1)
        return jax.lax.while_loop(touches, again, first)[1], still

    def judge(self, before: TaskState, now: physics.Data, action: Array) -> Verdict:
        """Pays the product of the terms; no episode ends before its time."""
        terms = self.terms(now, action)
        metrics = {f"reward_{name}": jnp.float32(term) for name, term in terms.items()}
        return Verdict(jnp.float32(math.prod(terms.values())), jnp.bool_(False), metrics)

    def mocap(self, kept: Tree) -> dict[str, Array]:
        """Puts the targets where the episode has drawn them: `kept` is [n, 3], in m."""
        return {"mocap_pos": kept} if self.targets else {}

    def axes(self, now: physics.Data, body: str) -> jax.Array:
        """Returns the axes [3, 3] of a body in the world, one in each column."""
        return quat_to_mat(now.xquat[self.body(body)])

    def geom(self, name: str) -> int:
        """Returns the number of a geom with a name; raises SeedbedError if there is none."""
        return self.numbered("geom", name)

    def size(self, geom: str) -> Array:
        """Returns the radius of a geom, in m."""
        return self.physics_model().geom_size[self.geom(geom), 0]

    def place(self, now: physics.Data, geom: str) -> jax.Array:
        """Returns where the centre of a geom is [3], in m."""
        model, number = self.physics_model(), self.geom(geom)
        body = int(model.geom_bodyid[number])
        local = jnp.asarray(model.geom_pos[number], jnp.float32)
        return now.xpos[body] + quat_to_mat(now.xquat[body]) @ local


@functools.lru_cache(maxsize=64)
def _loaded(_: Version, task: SuiteTask) -> physics.Model:
    model = physics.load(task.compiled())
    if task.integrator == "xml":
        return model
    return dataclasses.replace(model, opt=model.opt._replace(integrator=EULER))


def part(spec: Any, kind: str, name: str, xml_file: str) -> Any:
    """Returns a part of an MjSpec, such as the geom `floor`; raises SeedbedError if the file has none."""
    found = getattr(spec, kind)(name)
    if found is None:
        raise SeedbedError(
            f"{xml_file} has no {kind.removeprefix('find_')} {name!r}, which the task needs: give it the "
            "parts of dm_control's file"
        )
    return found


def _free(spec: Any, name: str, xml_file: str) -> None:
    """Puts a mocap body in the place of a geom or site of the world, with the same look."""
    is_site = spec.geom(name) is None
    old = part(spec, "site" if is_site else "geom", name, xml_file)
    body = spec.worldbody.add_body(name=name, mocap=True, pos=old.pos)
    looks = {"size": old.size, "type": old.type, "material": old.material, "rgba": old.rgba}
    spec.delete(old)
    if is_site:
        body.add_site(name=name, **looks)
    # Pages draw no sites.
    body.add_geom(name=name, contype=0, conaffinity=0, **looks)


def hide(spec: Any, geom: str, xml_file: str) -> None:
    """Makes a geom invisible."""
    hidden = part(spec, "geom", geom, xml_file)
    hidden.material, hidden.rgba = "", [0, 0, 0, 0]


def random_pose(model: physics.Model, key: Array) -> jax.Array:
    """Draws qpos [nq]: limited joints within their range, turning ones anywhere; consumes the key.

    Numbers of a free joint's quaternion are drawn from 0 to 1 before it is normalised, as in dm_control; its
    place, and sliding joints without limits, are those of qpos0.
    """
    low = np.zeros(model.nq, np.float32)
    high, drawn = low.copy(), np.zeros(model.nq, bool)
    quats = []
    for j in range(model.njnt):
        at = int(model.jnt_qposadr[j])
        if model.jnt_type[j] == FREE:
            high[at + 3 : at + 7], drawn[at + 3 : at + 7] = 1, True
            quats.append(at + 3)
        elif model.jnt_limited[j]:
            (low[at], high[at]), drawn[at] = model.jnt_range[j], True
        elif model.jnt_type[j] == HINGE:
            low[at], high[at], drawn[at] = -math.pi, math.pi, True
    share = jax.random.uniform(key, (model.nq,), jnp.float32)
    rest = jnp.asarray(model.qpos0, jnp.float32)
    qpos = jnp.where(drawn, low + (high - low) * share, rest)
    for at in quats:
        quat = qpos[at : at + 4]
        qpos = qpos.at[at : at + 4].set(quat / jnp.sqrt(jnp.square(quat).sum()))
    return qpos


def small_noise(model: physics.Model, key: Array) -> jax.Array:
    """Draws small velocities [nv], which break symmetry; consumes the key."""
    return normal_noise(key, model.nv, 0.01)


def tolerance(
    x: Array,
    bounds: tuple[Array | float, Array | float] = (0.0, 0.0),
    margin: Array | float = 0.0,
    shape: Shape = "gaussian",
    at_margin: float = 0.1,
) -> jax.Array:
    """Returns 1 where `x` is within the bounds; outside, what falls with the distance from them.

    It is `at_margin` at a distance of `margin`; with a margin of the number 0 it is 0 outside. Linear and
    quadratic shapes reach 0.
    """
    low, high = bounds
    if isinstance(margin, int | float) and not margin:
        return ((low <= x) & (x <= high)).astype(jnp.float32)
    # Nothing here is infinite times 0, of which gradients would be NaN.
    off = jnp.maximum(jnp.maximum(low - x, x - high), 0.0) / margin
    if shape == "gaussian":
        return jnp.exp(jnp.square(off) * math.log(at_margin))
    if shape == "long_tail":
        return 1 / (jnp.square(off) * (1 / at_margin - 1) + 1)
    fall = off if shape == "linear" else jnp.square(off)
    return jnp.maximum(1 - fall * (1 - at_margin), 0.0)


def small_control(action: Array) -> jax.Array:
    """Returns from 0.8 to 1, the more the smaller the action [nu] is."""
    return (4 + tolerance(action, margin=1, shape="quadratic", at_margin=0).mean()) / 5
