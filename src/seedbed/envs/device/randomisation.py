"""Domain randomisation: a wrapper that draws a task's model anew for each episode."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.envs.device.wrappers import Wrapper, reopen_child, step_child, unwrapped, wrapped
from seedbed.nearest import did_you_mean
from seedbed.physics.constants import DERIVED, set_const
from seedbed.physics.leaves import LEAVES
from seedbed.physics.model import Model
from seedbed.physics.slots import candidates, slots, stays_soft
from seedbed.types import Array, Environment, EnvState, SeedbedError

SERVOS = {"kp": 1, "kv": 2}
"""Names in MJCF of what servos do for each unit of position and of velocity: column of the bias.

The gain of a position servo is kp, and that of a velocity servo kv; it changes with them.
"""
_POSITIVE = ("body_mass", "body_inertia", "geom_size")
_SIGNED = ("gravity", "qpos0", "qpos_spring", "body_ipos", "geom_pos")
_SIGNED += tuple(name for name in LEAVES if name.startswith("actuator"))
_INERT = ("body_mass", "body_inertia", "body_ipos", "dof_armature", "qpos0")
"""The leaves from which MuJoCo derives how hard limits, contacts and friction losses are."""


@dataclasses.dataclass(frozen=True)
class _Draw:
    """What a draw changes, and between which bounds its numbers are."""

    leaf: str
    """One of the leaves that `Model.replace` accepts, or kp or kv of servos."""
    low: float
    """The least number: a factor, which is positive, or one in the unit of the leaf."""
    high: float
    """The largest number."""
    of: str = "*"
    """The names of the elements (bodies, joints, geoms, actuators), with * and ? for parts of them."""


@dataclasses.dataclass(frozen=True)
class Scale(_Draw):
    """A random factor, uniform between two bounds, for each of some elements of a leaf of the model."""

    log: bool = False
    """Whether the logarithm of the factor is uniform, instead of the factor."""

    def drawn(self, key: Array, base: Array) -> Array:
        """Returns `base` [n, ...], or [3], times one factor a row; consumes the key."""
        low, high = (math.log(x) if self.log else x for x in (self.low, self.high))
        shape = () if self.leaf == "gravity" else (base.shape[0], *(1,) * (base.ndim - 1))
        factor = jax.random.uniform(key, shape, jnp.float32, low, high)
        return base * (jnp.exp(factor) if self.log else factor)

    def at(self, bound: float, base: np.ndarray) -> np.ndarray:
        """Returns what `drawn` returns if each number that it draws is at a bound."""
        return base * bound


@dataclasses.dataclass(frozen=True)
class Offset(_Draw):
    """A random number, uniform between two bounds, that is added to some elements of a leaf of the model."""

    def drawn(self, key: Array, base: Array) -> Array:
        """Returns `base` plus a number of its own for each of its numbers; consumes the key.

        The two coefficients of sliding of a contact pair, which must be equal, share one.
        """
        more = jax.random.uniform(key, base.shape, jnp.float32, self.low, self.high)
        return base + (more.at[:, 1].set(more[:, 0]) if self.leaf == "pair_friction" else more)

    def at(self, bound: float, base: np.ndarray) -> np.ndarray:
        """Returns what `drawn` returns if each number that it draws is at a bound."""
        return base + bound


def randomise(env: Environment, *draws: Scale | Offset) -> Environment:
    """Draws new physics for each episode: each draw changes a leaf of the model, in the order given.

    For example `Scale("body_mass", 0.9, 1.1)`, `Offset("body_ipos", -0.05, 0.05, of="trunk")` and
    `Scale("geom_friction", 0.4, 1)`. The model stays consistent: inertias change with their masses, both
    numbers of a servo's stiffness together, and how hard limits and contacts are follows
    (`physics.set_const`). A contact has the larger friction of both geoms, or that of the geom with the
    higher priority. This must be the innermost wrapper.

    Raises SeedbedError if `env` is not a MuJoCo task, a leaf cannot be varied, nothing has a name, if
    bounds are out of order or make a number negative that cannot be, or if no contact has the friction drawn.
    """
    if not hasattr(env, "physics_model"):
        raise SeedbedError(
            f"randomise: {type(env).__name__} has no physics_model(); wrap a MuJoCo task, and wrap it "
            "in this before anything else"
        )
    model: Model = env.physics_model()  # type: ignore[attr-defined]
    least: dict[str, np.ndarray] = {}
    for draw in draws:
        _check(model, draw, least)
    _require_contacts(model, [draw for draw in draws if draw.leaf == "geom_friction"])
    friction = {name: x for name, x in least.items() if name in ("geom_friction", "pair_friction")}
    return _Randomise(env, draws, stays_soft(model, friction, jnp.float32))


def _check(model: Model, draw: Scale | Offset, least: dict[str, np.ndarray]) -> None:
    """Raises SeedbedError for a draw that cannot be; puts the least numbers of its leaf into `least`."""
    if not isinstance(draw, Scale | Offset):
        raise SeedbedError(
            f"randomise: {draw!r} is no draw; give Scale(leaf, low, high) or Offset(leaf, low, high)"
        )
    known = [*LEAVES, *SERVOS]
    if draw.leaf not in known:
        raise SeedbedError(
            f"randomise: the model's {draw.leaf!r} cannot be varied{did_you_mean(draw.leaf, known)} "
            f"Known are {', '.join(known)}"
        )
    bounds = f"the bounds of {draw.leaf!r} are {draw.low} and {draw.high}"
    if not -math.inf < draw.low <= draw.high < math.inf:
        raise SeedbedError(f"randomise: {bounds}; give two finite numbers, the lower first")
    if isinstance(draw, Scale) and draw.low <= 0:
        raise SeedbedError(f"randomise: {bounds}; factors are positive")
    if not _chosen(model, draw).any():
        hint = did_you_mean(draw.of, [name for name in _names(model, draw.leaf) if name])
        raise SeedbedError(f"randomise: {draw.leaf!r} has no element named {draw.of!r}{hint}")
    base = least.get(draw.leaf, np.asarray(_base(model, draw.leaf), np.float64))
    changed, most = (_at(model, draw, bound, base) for bound in (draw.low, draw.high))
    if draw.leaf not in _SIGNED:
        least[draw.leaf] = changed
        if (changed < 0).any() or (draw.leaf in _POSITIVE and ((changed <= 0) & (base > 0)).any()):
            raise SeedbedError(f"randomise: {bounds}, which may make it {changed.min():.4g}")
    if draw.leaf in LEAVES:  # raises if it refuses them
        model.replace(**{draw.leaf: changed})
        model.replace(**{draw.leaf: most})


def _at(model: Model, draw: Scale | Offset, bound: float, base: np.ndarray) -> np.ndarray:
    """Returns a leaf, which was `base`, after a draw whose numbers are all at a bound."""
    chosen = _chosen(model, draw).reshape(-1, *(1,) * (base.ndim - 1))
    return np.where(chosen, draw.at(bound, base), base)


def _require_contacts(model: Model, draws: list[Scale | Offset]) -> None:
    """Raises SeedbedError for a draw of friction that no contact has, whatever the other draws are."""
    kinds = candidates(model)

    def friction(bounds: list[float | None]) -> np.ndarray:
        leaf = np.asarray(model.geom_friction, np.float64)
        for draw, bound in zip(draws, bounds, strict=True):
            leaf = leaf if bound is None else _at(model, draw, bound, leaf)
        tables = [slots(model.replace(geom_friction=leaf), each) for each in kinds]
        return np.concatenate([table.friction[table.condim == 3] for table in tables])

    for i, draw in enumerate(draws):
        for others in ([each.low for each in draws], [each.high for each in draws]):
            without, *given = (
                friction([*others[:i], bound, *others[i + 1 :]])
                for bound in (None, draw.low, draw.high)
            )
            if any((each != without).any() for each in given):
                break
        else:
            raise SeedbedError(
                f"randomise: no contact has the friction of {draw.of!r} from {draw.low} to {draw.high}: it "
                "has the larger of both geoms', or that of a <pair>; give these geoms a priority in the "
                'file, or vary all (of="*")'
            )


def _names(model: Model, name: str) -> tuple[str, ...]:
    """Returns the names of the rows of a leaf."""
    kind = "actuator" if name in SERVOS else LEAVES[name]
    joints = model.names.joint
    if kind == "dof":
        return tuple(joints[j] for j in model.dof_jntid)
    if kind == "qpos":
        ends = [*model.jnt_qposadr[1:], model.nq]
        return tuple(
            joints[j] for j, end in enumerate(ends) for _ in range(end - model.jnt_qposadr[j])
        )
    return getattr(model.names, kind) if kind else ("",) * len(model.leaf(name))


def _chosen(model: Model, draw: Scale | Offset) -> np.ndarray:
    """Returns which rows of its leaf a draw changes, [n] bool."""
    found = np.array([fnmatch.fnmatchcase(n, draw.of) for n in _names(model, draw.leaf)], bool)
    return found & (_base(model, draw.leaf) > 0) if draw.leaf in SERVOS else found


def _base(model: Model, name: str) -> Array:
    """Returns a leaf of the model, or how large kp or kv of each actuator is."""
    return np.abs(model.actuator_biasprm[:, SERVOS[name]]) if name in SERVOS else model.leaf(name)


@dataclasses.dataclass(frozen=True)
class _Randomise(Wrapper):
    """The wrapper of `randomise`; its state is the leaves of this episode, by name."""

    draws: tuple[Scale | Offset, ...]
    soft: bool  # no contact can be harder than float32 resolves, which is faster
    shows_the_task: ClassVar[bool] = True

    def reopen(self, key: Array, last: EnvState | None) -> EnvState:
        key, drawing = jax.random.split(key)
        leaves = self._drawn(drawing)
        return wrapped(reopen_child(self._varied(leaves), key, None), leaves)

    def step(self, state: EnvState, action: Array) -> EnvState:
        child, leaves = unwrapped(state)
        return wrapped(step_child(self._varied(leaves), child, action), leaves)

    def _drawn(self, key: Array) -> dict[str, Array]:
        """Draws the leaves of an episode; consumes the key."""
        model: Model = self.env.physics_model()  # type: ignore[attr-defined]
        leaves: dict[str, Array] = {}

        def now(name: str) -> jax.Array:
            return jnp.asarray(leaves.get(name, model.leaf(name)), jnp.float32)

        for key_of_draw, draw in zip(
            jax.random.split(key, len(self.draws)), self.draws, strict=True
        ):
            chosen = _chosen(model, draw)
            if draw.leaf in SERVOS:
                _vary_servos(model, draw, key_of_draw, leaves, now)
                continue
            base = now(draw.leaf)
            new = draw.drawn(key_of_draw, base)
            new = jnp.where(chosen.reshape(-1, *(1,) * (base.ndim - 1)), new, base)
            if draw.leaf == "body_mass":
                heavier = jnp.where(base > 0, new / jnp.where(base > 0, base, 1), 1)
                leaves["body_inertia"] = now("body_inertia") * heavier[:, None]
            leaves[draw.leaf] = new
        if leaves.keys() & set(_INERT):
            varied = set_const(model.replace(**leaves))
            for name in DERIVED:
                if len(varied.leaf(name)):
                    leaves.setdefault(name, varied.leaf(name))
            for body in getattr(self.env, "weighed", ()):
                number = model.names.body.index(body)
                weights = jnp.asarray(leaves["body_invweight0"])
                given = jnp.asarray(model.body_invweight0[number], weights.dtype)
                leaves["body_invweight0"] = weights.at[number].set(given)
        return leaves

    def _varied(self, leaves: dict[str, Array]) -> Environment:
        """Returns the task with these leaves in its model."""
        model: Model = self.env.physics_model()  # type: ignore[attr-defined]
        opt = model.opt._replace(hardens=not self.soft)
        model = dataclasses.replace(model, opt=opt).replace(**leaves)
        return dataclasses.replace(self.env, model=model)  # type: ignore[type-var]


def _vary_servos(
    model: Model, draw: Scale | Offset, key: Array, leaves: dict[str, Array], now: Any
) -> None:
    """Changes kp or kv of servos in `leaves`, of which `now` returns one by name; consumes the key."""
    column, rows = SERVOS[draw.leaf], _chosen(model, draw)
    own_gain, own_bias = model.actuator_gainprm[:, 0], model.actuator_biasprm
    gain, bias = now("actuator_gainprm"), now("actuator_biasprm")
    size = jnp.abs(bias[:, column])
    ratio = jnp.where(rows, draw.drawn(key, size) / jnp.where(rows, size, 1), 1)
    same = rows & (own_gain == -own_bias[:, column])
    if draw.leaf == "kv":
        # A position servo's gain is its kp, and may be as large as its kv.
        same &= own_bias[:, 1] == 0
    ones = jnp.ones_like(ratio)
    factors = [ratio if k == column else ones for k in range(3)]
    leaves["actuator_biasprm"] = bias * jnp.stack(factors, axis=1)
    leaves["actuator_gainprm"] = gain * jnp.stack([jnp.where(same, ratio, 1), ones, ones], axis=1)
