"""The slots of contacts: the pairs of geoms that may touch, and the constants of each of their contacts.

MuJoCo's filters (engine_collision_driver.c) choose the candidate pairs from constants of the model, while a
function is traced.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from seedbed.physics.colliders import COLLIDERS
from seedbed.physics.model import Model
from seedbed.physics.narrow import PLANE
from seedbed.types import Array

mujoco: Any = importlib.import_module("mujoco")  # a package without types

HARDEST = 0.01
"""Most stiffness of a contact along an axis, times the dtype's eps, times what a unit of force accelerates.

Beyond it, the rounding of an acceleration would be more than a hundredth of the force (see
docs/physics.md).
"""
TOUCH = 0.3
"""A contact that may be harder touches below this share of eps times the reach of both trees.

A body that rests on it sinks in less than that, and MuJoCo's force begins at once with the touch.
"""


HEADROOM = 10
"""By so much contacts must be softer than what the dtype resolves, if derived leaves are to change."""


class PairKind(NamedTuple):
    """The candidate pairs [n, 2] of geoms, in MuJoCo's order, that use the same collider."""

    types: tuple[int, int]
    pairs: np.ndarray


class Candidates(NamedTuple):
    """Pairs of a static and a moving geom (`fixed`), and pairs of two moving geoms (`moving`)."""

    fixed: tuple[PairKind, ...]
    moving: tuple[PairKind, ...]


class Slots(NamedTuple):
    """Constants of the slots [n]. A slot is the place of one contact; a pair has one for each touch."""

    geom: np.ndarray  # [n, 2]
    body: np.ndarray  # [n, 2] the bodies of the geoms
    mover: np.ndarray  # [n, 2] the moving bodies that carry the geoms; 0: static
    frame: np.ndarray  # [n] the moving body whose reference point the contact is relative to
    basis: np.ndarray | None  # [n, 3, 3] z, x and y axes of the first geoms, if all are planes
    condim: np.ndarray
    margin: np.ndarray  # m; a contact is a constraint if its distance is below this
    reach: np.ndarray  # m, margin plus gap; a contact counts in ncon up to this distance
    solref: np.ndarray  # [n, 2]
    solimp: np.ndarray  # [n, 5]
    friction: Array  # sliding
    # for translation, sum of both bodies, over `impratio` where there is friction
    invweight: np.ndarray
    response: np.ndarray  # 1/kg, about the most acceleration that a unit of force can cause

    @property
    def rows(self) -> int:
        """Returns the number of constraint rows of each slot.

        It is 4, the edges of the friction pyramid, if any contact of the group has friction, otherwise 1.
        """
        return 4 if (self.condim == 3).any() else 1

    @property
    def weight(self) -> Array:
        """Returns what a row's D is inverse to, 1/kg [n]: MuJoCo's approximation of its J M^-1 J'.

        If a group has friction, a slot without friction has four equal rows with a quarter of its D each.
        """
        mu, sliding = self.friction, self.condim == 3
        pyramid = 2 * mu * mu * (1 + mu * mu)
        return self.invweight * (pyramid * sliding + self.rows * (~sliding))

    @property
    def hardness(self) -> Array:
        """Returns the most that a contact's D may be, times about what a unit of force accelerates, [n]."""
        most = np.clip(self.solimp[:, :2], 1e-4, 0.9999).max(1)
        weight = (1 - most) * self.weight
        xp: Any = np if isinstance(weight, np.ndarray) else jnp
        # A body that only spins about its centre of mass has no weight; MuJoCo's mjMINVAL.
        return self.rows * most / xp.maximum(weight, 1e-15) * self.response


def pairs(model: Any) -> Iterator[tuple[int, int]]:
    """Yields the pairs of geoms that pass MuJoCo's filters, the geom of the lower type first.

    Pairs that the model names come first, and pass all filters, unless they cannot move apart.
    `model` is a Model or MuJoCo's MjModel.
    """
    named = named_pairs(model)
    weld = model.body_carrierid if isinstance(model, Model) else model.body_weldid
    above, moves = weld[model.body_parentid], model.body_dofnum[weld] > 0
    for pair in named:
        b1, b2 = (int(model.geom_bodyid[g]) for g in pair)
        if weld[b1] != weld[b2] and (moves[b1] or moves[b2]):
            yield pair
    filters = _filters_parents(model)
    excluded = {int(signature) for signature in model.exclude_signature}
    for i in range(model.ngeom):
        for j in range(i + 1, model.ngeom):
            b1, b2 = int(model.geom_bodyid[i]), int(model.geom_bodyid[j])
            w1, w2 = weld[b1], weld[b2]
            masks = (model.geom_contype[i] & model.geom_conaffinity[j]) | (
                model.geom_contype[j] & model.geom_conaffinity[i]
            )
            related = filters and w1 and w2 and (w1 == above[w2] or w2 == above[w1])
            met = w1 != w2 and (moves[b1] or moves[b2]) and not related
            if masks and met and (b1 << 16) + b2 not in excluded:
                pair = _ordered(model, i, j)
                if pair not in named:
                    yield pair


def named_pairs(model: Any) -> dict[tuple[int, int], int]:
    """Returns the pairs that the model names, which pass all filters, with their numbers."""
    ends = zip(model.pair_geom1, model.pair_geom2, strict=True)
    return {_ordered(model, int(i), int(j)): k for k, (i, j) in enumerate(ends)}


def _ordered(model: Any, i: int, j: int) -> tuple[int, int]:
    i, j = min(i, j), max(i, j)
    return (j, i) if model.geom_type[i] > model.geom_type[j] else (i, j)


def _filters_parents(model: Any) -> bool:
    if isinstance(model, Model):
        return model.opt.filterparent
    return not model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_FILTERPARENT


def candidates(model: Model) -> Candidates:
    """Groups the candidate pairs by kind."""
    kinds: dict[tuple[bool, tuple[int, int]], list[tuple[int, int]]] = {}
    for pair in pairs(model):
        types = int(model.geom_type[pair[0]]), int(model.geom_type[pair[1]])
        moving = bool(model.body_weldid[model.geom_bodyid[list(pair)]].all())
        kinds.setdefault((moving, types), []).append(pair)
    fixed, moving = (
        tuple(
            PairKind(types, np.array(kinds[m, types])) for m, types in sorted(kinds) if m == wanted
        )
        for wanted in (False, True)
    )
    return Candidates(fixed, moving)


def slots(model: Model, kinds: tuple[PairKind, ...]) -> Slots:
    """Makes the slots of the pairs."""
    geom = np.concatenate(
        [np.zeros((0, 2), int)]
        + [np.repeat(kind.pairs, COLLIDERS[kind.types][1], axis=0) for kind in kinds]
    )
    body = model.geom_bodyid[geom]
    mover = model.body_weldid[body]
    parameters = _parameters(model, geom)
    xp: Any = np if isinstance(parameters.friction, np.ndarray) else jnp
    return Slots(
        geom=geom,
        body=body,
        mover=mover,
        frame=np.where(mover[:, 1] > 0, mover[:, 1], mover[:, 0]),
        basis=_plane_basis(model, geom[:, 0]),
        condim=parameters.condim,
        margin=parameters.margin,
        reach=parameters.margin + parameters.gap,
        solref=parameters.solref,
        solimp=parameters.solimp,
        friction=xp.maximum(parameters.friction, 1e-5),
        invweight=_invweight(model, body, parameters.condim),
        response=(
            model.body_invweight0[body, 0]
            + model.geom_lever[geom] ** 2 * model.body_invweight0[body, 1]
        ).sum(1),
    )


def may_harden(model: Model, table: Slots, dtype: Any) -> Array:
    """Returns which contacts may be harder than the dtype resolves, [n] bool."""
    hard = table.hardness > HARDEST / float(jnp.finfo(dtype).eps)
    constant = isinstance(hard, np.ndarray) or model.opt.hardens
    return hard if constant else np.zeros(len(table.geom), bool)


def stays_soft(model: Model, friction: dict[str, np.ndarray], dtype: Any) -> bool:
    """Returns whether no contact is near what the dtype resolves, with these least leaves of `friction`.

    The room left is for masses and what else is derived; a step whose contacts need more says so.
    """
    model = model.replace(**friction)
    limit = HARDEST / float(jnp.finfo(dtype).eps) / HEADROOM
    tables = (slots(model, kinds) for kinds in candidates(model))
    return all((table.hardness < limit).all() for table in tables)


def _invweight(model: Model, body: np.ndarray, condim: Array) -> Any:
    weight = model.body_invweight0[body, 0].sum(1)
    if model.opt.impratio == 1:
        return weight
    return weight / np.where(condim == 3, model.opt.impratio, 1)


class _Parameters(NamedTuple):
    """Parameters of contacts [n]; see `Slots`."""

    condim: Array
    margin: Array
    gap: Array
    solref: Array
    solimp: Array
    friction: Array


def _parameters(model: Model, geom: np.ndarray) -> _Parameters:
    """Returns the parameters of pairs [n, 2]: their own, or those of both geoms, mixed (mj_contactParam)."""
    mixed, named = _mixed(model, geom), named_pairs(model)
    numbers = np.array([named.get((int(i), int(j)), -1) for i, j in geom], np.int32)
    if not (numbers >= 0).any():
        return mixed
    own = _Parameters(
        condim=model.pair_dim,
        margin=model.pair_margin,
        gap=model.pair_gap,
        solref=model.pair_solref,
        solimp=model.pair_solimp,
        friction=model.pair_friction[:, 0],
    )

    def choose(mine: Array, of_geoms: Array) -> Array:
        constant = isinstance(mine, np.ndarray) and isinstance(of_geoms, np.ndarray)
        xp: Any = np if constant else jnp
        here = (numbers >= 0).reshape(-1, *(1,) * (np.ndim(of_geoms) - 1))
        return xp.where(here, mine[numbers], of_geoms)

    return _Parameters(*map(choose, own, mixed))


def _mixed(model: Model, geom: np.ndarray) -> _Parameters:
    priority, mix = model.geom_priority[geom], np.maximum(model.geom_solmix[geom], 0)
    mix = np.where(mix < 1e-15, 0, mix)
    mix = np.where(mix.sum(1) > 0, mix[:, 0] / np.maximum(mix.sum(1), 1e-15), 0.5)
    # 1: the first geom has priority and its parameters are used; -1: the second; 0: they are mixed.
    lead = np.sign(priority[:, 0] - priority[:, 1])[:, None]
    share = np.where(lead == 0, mix[:, None], (lead + 1) / 2)

    def mixed(field: np.ndarray) -> np.ndarray:
        first, second = np.asarray(field[geom], np.float64).swapaxes(0, 1)
        return share * first + (1 - share) * second

    ref = model.geom_solref[geom]
    direct = (lead == 0) & (ref[:, :, 0] <= 0).any(1, keepdims=True)
    condim = model.geom_condim[geom]
    sliding = model.geom_friction[:, 0]
    first, second = sliding[geom[:, 0]], sliding[geom[:, 1]]
    xp = np if isinstance(sliding, np.ndarray) else jnp
    winner = xp.where(lead[:, 0] > 0, first, second)
    return _Parameters(
        condim=np.where(
            lead[:, 0] == 0, condim.max(1), np.where(lead[:, 0] > 0, condim[:, 0], condim[:, 1])
        ),
        margin=model.geom_margin[geom].sum(1),
        gap=model.geom_gap[geom].sum(1),
        solref=np.where(direct, ref.min(1), mixed(model.geom_solref)),
        solimp=mixed(model.geom_solimp),
        friction=xp.where(lead[:, 0] == 0, xp.maximum(first, second), winner),
    )


def _plane_basis(model: Model, geoms: np.ndarray) -> np.ndarray | None:
    """Returns the axes z, x and y [n, 3, 3] of geoms in the world, or None if not all are planes.

    Planes are static, so the axes are constant, unless a mocap body carries one: then it is None, too.
    """
    placed = model.body_carrierid[model.geom_bodyid[geoms]] > 0
    if not len(geoms) or placed.any() or (model.geom_type[geoms] != PLANE).any():
        return None
    return model.welds.geom_mat[geoms].swapaxes(1, 2)[:, [2, 0, 1]]
