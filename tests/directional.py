"""Directional derivatives of physics steps in double precision, and central differences beside them.

A case is comparable if the same piece of the step is taken at all points that its difference needs: the same
contacts and limits exist, the same rows push, on the same pieces of their impedance, and the same controls
are clamped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import mujoco_states as oracle
import numpy_jaxpr
from seedbed import physics
from seedbed.physics.assembly import at_rows, over_slots, raised
from seedbed.physics.collision import Contacts
from seedbed.physics.cone import push
from seedbed.physics.constraint import groups, limit_table, motion_of, velocity
from seedbed.physics.model import FREE
from seedbed.physics.problem import Problem, contact_motion, pose
from seedbed.physics.softness import softness

SIZES = {
    "ctrl": 1e-3,
    "qpos": 1e-5,
    "qvel": 1e-4,
    "body_mass": 1e-3,
    "geom_friction": 1e-4,
}
"""By what a step is differentiated, and the size of the larger of two differences."""
STEP = importlib.import_module("seedbed.physics.step")
"""The module, whose name in the package is that of its function."""
PIECE = "piece"
"""Name of the booleans that tell which piece of the solver's problem a forward pass is on."""
BEND = "bend"
"""Name of those that tell which pieces of their impedance a forward pass's rows are on."""


class Inputs(NamedTuple):
    """What a step is a function of, one environment's or a batch [n, ...]."""

    qpos: Any
    qvel: Any
    ctrl: Any
    qacc_warmstart: Any
    body_mass: Any
    geom_friction: Any


class Pieces(NamedTuple):
    """The piece of the step that each of n cases is on."""

    flags: np.ndarray  # [n, k] bool: all of it
    touching: np.ndarray  # [n] bool: there is a contact
    limited: np.ndarray  # [n] bool: a joint is at a limit

    @property
    def free(self) -> np.ndarray:
        """Whether there is neither."""
        return ~self.touching & ~self.limited


def load(name: str, integrator: int) -> physics.Model:
    """One of the eleven models under an integrator."""
    model = physics.load(oracle.path(name))
    return dataclasses.replace(model, opt=model.opt._replace(integrator=integrator))


def inputs_of(model: physics.Model, cases: oracle.Cases, *, varied: bool = True) -> Inputs:
    """The inputs [n, ...] of cases; masses and frictions differ from the model's if `varied`.

    All are numbers that float32 holds. Different frictions have no ties.
    """
    rng, n = np.random.default_rng(3), len(cases.qpos)

    def around(value: np.ndarray) -> np.ndarray:
        spread = rng.uniform(0.8, 1.25, (n, *value.shape)) if varied else np.ones((n, *value.shape))
        return np.float64(np.float32(value * spread))

    return Inputs(*cases, around(model.body_mass), around(model.geom_friction))


def stepper(model: physics.Model) -> Callable[[Inputs], jax.Array]:
    """The function of one environment's inputs to qpos and qvel after a step, [nq + nv]."""

    def step(given: Inputs) -> jax.Array:
        changed = model.replace(body_mass=given.body_mass, geom_friction=given.geom_friction)
        begun = physics.init(changed, given.qpos, given.qvel)
        begun = begun._replace(qacc_warmstart=given.qacc_warmstart)
        after = physics.step(changed, begun, given.ctrl)
        return jnp.concatenate([after.qpos, after.qvel])

    return step


# Which piece of the step


def pieces_of(problem: Problem, qacc: jax.Array) -> jax.Array:
    """Flags: limits that exist, their sides and whether they push; and the same of contacts, with frames."""
    dofs = problem.dofs
    exists = dofs.stiffness > 0
    slack = at_rows(problem, qacc) - dofs.aref
    flags = [exists, exists & (dofs.sign > 0), exists & dofs.inside(slack)]
    motion = contact_motion(problem, qacc)

    def slot(_: None, point: Any, stiffness: Any, row: Any, aref: Any) -> tuple[None, jax.Array]:
        slack = velocity(point, row, motion_of(point, row, motion)) - aref
        return None, point.active & push(stiffness, row["mu"], slack).rows

    for side in problem.sides:
        _, pushes = over_slots(side, slot, None, side.aref)
        flags += [side.points.active, pushes.ravel()]
        if side.points.frame.ndim == 3:  # the default tangent is one of two axes
            flags.append(side.points.active & (jnp.abs(side.points.frame[:, 0, 1]) < 0.5))
    return jnp.concatenate(flags)


def bends_of(model: physics.Model, contacts: Contacts, qpos: jax.Array) -> jax.Array:
    """Flags: rows beyond the middle of their impedance's width, where its curvature jumps, and beyond it."""
    table, flags = limit_table(model), [jnp.zeros(1, bool)]
    if len(table["dof"]):
        q = qpos[table["address"]]
        excess = jnp.minimum(q - table["low"], table["high"] - q) - table["margin"]
        flags += bends(table, excess, excess < 0)
    for group, points in zip(groups(model), (contacts.fixed, contacts.moving), strict=True):
        if len(group.slots.geom):
            row = softness(model, group.slots.solref, group.slots.solimp)
            flags += bends(row, points.dist - group.slots.margin, points.active)
    return jnp.concatenate(flags)


def bends(row: dict[str, np.ndarray], excess: jax.Array, there: jax.Array) -> list[jax.Array]:
    share = jnp.abs(excess) / row["width"]
    return [there & (share > row["middle"]), there & (share > 1)]


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, np.ndarray]]]:
    """While it is open, steps that numpy evaluates put the flags of their forward passes into a list."""
    solve, make_rows = STEP.solve, STEP.make_rows

    def bending(model: Any, kin: Any, contacts: Any, qpos: Any, *rest: Any) -> Any:
        rows = make_rows(model, kin, contacts, qpos, *rest)
        flags = bends_of(model, contacts, qpos)
        return jax.lax.optimization_barrier((rows, checkpoint_name(flags, BEND)))[0]

    def watching(
        model: Any, kin: Any, mass: Any, smooth: Any, start: Any, contacts: Any, rows: Any
    ) -> Any:
        found = solve(model, kin, mass, smooth, start, contacts, rows)
        problem = raised(pose(model, kin, mass, contacts, rows), found.compensation)
        active = jnp.concatenate([contacts.fixed.active, contacts.moving.active])
        some = jnp.stack([active.any(), (rows.dofs.stiffness > 0).any()])
        flags = jnp.concatenate([some, pieces_of(problem, found.qacc)])
        return jax.lax.optimization_barrier((found, checkpoint_name(flags, PIECE)))[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STEP, "solve", watching)
        patch.setattr(STEP, "make_rows", bending)
        numpy_jaxpr.NAMED.clear()
        yield numpy_jaxpr.NAMED
        numpy_jaxpr.NAMED.clear()


def stepped(model: physics.Model, given: Inputs) -> tuple[np.ndarray, Pieces]:
    """qpos and qvel after a step [n, nq + nv], in the precision of the inputs, and the pieces."""
    with watched() as named:
        result = numpy_jaxpr.evaluate(jax.vmap(stepper(model)), given)
        passes = [np.asarray(flags) for name, flags in named if name == PIECE]
        bent = [np.asarray(flags) for name, flags in named if name == BEND]
    low, high = model.actuator_ctrlrange.T
    clamped = [(given.ctrl < low) & model.actuator_ctrllimited, given.ctrl > high]
    clamped[1] &= np.asarray(model.actuator_ctrllimited, bool)
    flags = np.concatenate([*passes, *bent, *clamped], axis=1).astype(bool)
    touching, limited = (np.any([p[:, k] for p in passes], axis=0) for k in (0, 1))
    return result, Pieces(flags, touching, limited)


# Differences


def turned(quat: np.ndarray, spin: np.ndarray) -> np.ndarray:
    """Quaternions [n, 4] after rotations by vectors [n, 3] in their own frames; their lengths stay."""
    angle = np.linalg.norm(spin, axis=1, keepdims=True)
    half = 0.5 * angle
    vector = 0.5 * np.sinc(half / np.pi) * spin
    return multiplied(quat, np.concatenate([np.cos(half), vector], axis=1))


def multiplied(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Hamilton products [n, 4]."""
    w = a[:, :1] * b[:, :1] - (a[:, 1:] * b[:, 1:]).sum(1, keepdims=True)
    v = a[:, :1] * b[:, 1:] + b[:, :1] * a[:, 1:] + np.cross(a[:, 1:], b[:, 1:])
    return np.concatenate([w, v], axis=1)


def places(model: physics.Model) -> list[tuple[int, int, bool]]:
    """(address in qpos, address in qvel, whether it is free) of each joint."""
    columns = model.jnt_qposadr, model.jnt_dofadr, model.jnt_type == FREE
    return [(int(q), int(v), bool(free)) for q, v, free in zip(*columns, strict=True)]


def along(model: physics.Model, qpos: np.ndarray, way: np.ndarray, t: float) -> np.ndarray:
    """qpos [n, nq] moved along velocities `way` [n, nv] for t seconds."""
    moved = qpos.copy()
    for q, v, free in places(model):
        size = 3 if free else 1
        moved[:, q : q + size] += t * way[:, v : v + size]
        if free:
            moved[:, q + 3 : q + 7] = turned(qpos[:, q + 3 : q + 7], t * way[:, v + 3 : v + 6])
    return moved


def rate(model: physics.Model, qpos: np.ndarray, way: np.ndarray) -> np.ndarray:
    """The derivative [n, nq] of `along` by t at 0."""
    moved = np.zeros_like(qpos)
    for q, v, free in places(model):
        size = 3 if free else 1
        moved[:, q : q + size] = way[:, v : v + size]
        if free:
            spin = np.pad(0.5 * way[:, v + 3 : v + 6], ((0, 0), (1, 0)))
            moved[:, q + 3 : q + 7] = multiplied(qpos[:, q + 3 : q + 7], spin)
    return moved


def tangent_of(model: physics.Model, after: np.ndarray, change: np.ndarray) -> np.ndarray:
    """Changes [n, nq + nv] of a step's result as velocities and changes of qvel, [n, 2 nv]."""
    way = np.zeros((len(change), model.nv))
    for q, v, free in places(model):
        size = 3 if free else 1
        way[:, v : v + size] = change[:, q : q + size]
        if free:
            back = after[:, q + 3 : q + 7] * [1, -1, -1, -1]
            way[:, v + 3 : v + 6] = 2 * multiplied(back, change[:, q + 3 : q + 7])[:, 1:]
    return np.concatenate([way, change[:, model.nq :]], axis=1)


def directions(model: physics.Model, given: Inputs, kind: str) -> np.ndarray:
    """Random directions [n, ...]: of qpos velocities [n, nv], of positive numbers in proportion."""
    rng, value = np.random.default_rng(4), getattr(given, kind)
    if kind == "qpos":
        return rng.normal(size=given.qvel.shape)
    scale = value if kind in ("body_mass", "geom_friction") else 1
    return scale * rng.normal(size=value.shape)


def moved(model: physics.Model, given: Inputs, kind: str, way: np.ndarray, t: float) -> Inputs:
    """The inputs a little further along a direction of one kind."""
    value = getattr(given, kind)
    new = along(model, value, way, t) if kind == "qpos" else value + t * way
    return given._replace(**{kind: new})


def tangent(model: physics.Model, given: Inputs, kind: str, way: np.ndarray) -> Inputs:
    """The derivative of `moved` by t at 0."""
    none = Inputs(*(np.zeros_like(x) for x in given))
    return none._replace(**{kind: rate(model, given.qpos, way) if kind == "qpos" else way})


def joined(parts: list[Inputs]) -> Inputs:
    """One batch of several."""
    return Inputs(*(np.concatenate(leaves) for leaves in zip(*parts, strict=True)))


class Differences(NamedTuple):
    """Central differences of n cases along one direction each."""

    value: np.ndarray  # [n, nq + nv] extrapolated from two differences
    rounding: np.ndarray  # [n] what rounding can do to the norm of `value`
    same: np.ndarray  # [n] bool: all points are on the same piece


def differences(
    model: physics.Model, given: Inputs, ways: dict[str, np.ndarray]
) -> tuple[dict[str, Differences], Pieces]:
    """Differences by kind, extrapolated as Richardson did, and the pieces of the cases themselves."""
    shares = (1, -1, 0.5, -0.5)
    points = [
        moved(model, given, kind, way, SIZES[kind] * share)
        for kind, way in ways.items()
        for share in shares
    ]
    result, pieces = stepped(model, joined([given, *points]))
    n = len(given.qpos)
    centre = Pieces(*(column[:n] for column in pieces))
    found, size = {}, len(shares)
    ends = result[n:].reshape(len(ways), size, n, -1)
    flags = pieces.flags[n:].reshape(len(ways), size, n, -1)
    for kind, (far, back, near, near_back), there in zip(ways, ends, flags, strict=True):
        coarse, fine = (far - back) / (2 * SIZES[kind]), (near - near_back) / SIZES[kind]
        same = (there == centre.flags).all(axis=(0, 2))
        rounding = 4 * np.finfo(np.float64).eps * np.linalg.norm(result[:n], axis=1) / SIZES[kind]
        found[kind] = Differences((4 * fine - coarse) / 3, rounding, same)
    return found, centre


# Derivatives


def pushed(model: physics.Model, given: Inputs, ways: dict[str, np.ndarray]) -> dict[str, Any]:
    """Directional derivatives [n, nq + nv] by kind, forward mode."""
    tangents = [tangent(model, given, kind, way) for kind, way in ways.items()]
    return dict(zip(ways, pushed_along(model, given, tangents), strict=True))


def pushed_along(model: physics.Model, given: Inputs, tangents: list[Inputs]) -> np.ndarray:
    """Derivatives [k, n, nq + nv] along k tangents of all cases, forward mode."""
    step = stepper(model)

    def along_way(given: Inputs, way: Inputs) -> jax.Array:
        return jax.jvp(step, (given,), (way,))[1]

    many = joined([given] * len(tangents)), joined(tangents)
    result = numpy_jaxpr.evaluate(jax.vmap(along_way), *many)
    return result.reshape(len(tangents), len(given.qpos), -1)


def pulled(model: physics.Model, given: Inputs, cotangent: np.ndarray) -> Inputs:
    """Cotangents of the inputs, for cotangents [n, nq + nv] of the result: reverse mode."""
    return numpy_jaxpr.evaluate(jax.vmap(puller(model)), given, cotangent)


def puller(model: physics.Model) -> Callable[[Inputs, jax.Array], Inputs]:
    """The function of one environment's inputs and cotangent to the cotangents of the inputs."""
    return lambda given, cotangent: jax.vjp(stepper(model), given)[1](cotangent)[0]
