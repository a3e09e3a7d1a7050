"""What a simulation is given and what it carries: Model, State and Kinematics.

A `Model` holds MuJoCo's own fields as numpy arrays, so that topology and parameters are constants of the
traced program. A leaf given to `Model.replace` may be a JAX array and becomes an input.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.physics import math
from seedbed.physics.rigid import Parts, Welds, parts_of
from seedbed.types import Array, SeedbedError

FREE, SLIDE, HINGE = 0, 2, 3
"""MuJoCo's numbers of the joint types (mjtJoint)."""
EULER, RK4 = 0, 1
"""MuJoCo's numbers of the integrators (mjtIntegrator)."""

REPLACEABLE = (
    "body_mass",
    "body_inertia",
    "body_ipos",
    "jnt_stiffness",
    "qpos_spring",
    "dof_armature",
    "dof_damping",
    "geom_friction",
    "actuator_gear",
)


class Option(NamedTuple):
    """MuJoCo's mjOption, as far as it is read here."""

    timestep: float  # s
    gravity: np.ndarray  # [3] m/s^2
    density: float  # kg/m^3, of the medium
    viscosity: float  # kg/(m s)
    wind: np.ndarray  # [3] m/s
    integrator: int  # EULER or RK4
    iterations: int  # of the solver, at most; ours, not the file's
    eulerdamp: bool  # Euler treats joint damping implicitly


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A compiled MJCF model; fields are mjModel's unless said otherwise."""

    opt: Option
    nq: int
    nv: int
    nu: int
    nbody: int
    njnt: int
    ngeom: int
    nsite: int
    qpos0: np.ndarray  # [nq]
    qpos_spring: Array  # [nq]
    body_parentid: np.ndarray
    body_rootid: np.ndarray
    body_weldid: np.ndarray  # the moving body that carries a body; 0: static
    body_jntnum: np.ndarray
    body_jntadr: np.ndarray
    body_dofnum: np.ndarray
    body_dofadr: np.ndarray
    body_pos: np.ndarray
    body_quat: np.ndarray
    body_ipos: Array
    body_iquat: np.ndarray
    body_mass: Array
    body_inertia: Array
    body_invweight0: np.ndarray  # [nbody, 2]
    jnt_type: np.ndarray
    jnt_qposadr: np.ndarray
    jnt_dofadr: np.ndarray
    jnt_bodyid: np.ndarray
    jnt_limited: np.ndarray
    jnt_solref: np.ndarray
    jnt_solimp: np.ndarray
    jnt_pos: np.ndarray
    jnt_axis: np.ndarray
    jnt_stiffness: Array
    jnt_range: np.ndarray
    jnt_margin: np.ndarray
    dof_bodyid: np.ndarray
    dof_jntid: np.ndarray
    dof_parentid: np.ndarray
    dof_armature: Array
    dof_damping: Array
    dof_invweight0: np.ndarray
    geom_type: np.ndarray
    geom_contype: np.ndarray
    geom_conaffinity: np.ndarray
    geom_condim: np.ndarray
    geom_bodyid: np.ndarray
    geom_priority: np.ndarray
    geom_solmix: np.ndarray
    geom_solref: np.ndarray
    geom_solimp: np.ndarray
    geom_size: np.ndarray
    geom_rbound: np.ndarray
    geom_pos: np.ndarray
    geom_quat: np.ndarray
    geom_friction: Array
    geom_margin: np.ndarray
    geom_gap: np.ndarray
    site_bodyid: np.ndarray
    site_pos: np.ndarray
    exclude_signature: np.ndarray
    actuator_trnid: np.ndarray  # [nu, 2] joint, unused
    actuator_gear: Array  # [nu, 6] of which a joint uses the first
    actuator_gainprm: np.ndarray  # [nu, k] of which the first is force per control
    actuator_ctrllimited: np.ndarray
    actuator_ctrlrange: np.ndarray
    actuator_forcelimited: np.ndarray
    actuator_forcerange: np.ndarray
    welds: Welds  # ours
    parts: Parts  # ours

    def replace(self, **leaves: Array) -> Model:
        """Swaps leaves for arrays of the same shape, traced or not; a new model.

        Constants that MuJoCo derives at compile time (invweight0 of bodies and dofs) stay, as they do in
        MuJoCo when its fields are changed without mj_setConst.

        Raises:
            SeedbedError: a leaf is not replaceable, not of floats, or of another shape.
        """
        for name, value in leaves.items():
            if name not in REPLACEABLE:
                known = ", ".join(REPLACEABLE)
                raise SeedbedError(f"model.replace: {name} is not replaceable; these are: {known}")
            kind = getattr(value, "dtype", type(value).__name__)
            if not (hasattr(value, "dtype") and jnp.issubdtype(kind, jnp.floating)):
                raise SeedbedError(
                    f"model.replace: {name} is of type {kind}: give an array of floating-point numbers"
                )
            have, given = np.shape(getattr(self, name)), np.shape(value)
            if have != given:
                raise SeedbedError(
                    f"model.replace: {name} has shape {given} instead of {have}: give one"
                    " environment's, and batch with simd.vectorize or jax.vmap"
                )
        model = dataclasses.replace(self, **leaves)
        return dataclasses.replace(model, parts=parts_of(vars(model)))

    def astype(self, dtype: Any) -> Model:
        """Casts every floating-point leaf; numpy constants stay numpy."""
        leaves = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        cast = jax.tree.map(lambda leaf: math.constant(leaf, dtype), leaves)
        return Model(**cast)

    @functools.cached_property
    def moving(self) -> tuple[int, ...]:
        """Bodies with joints, parents first."""
        return tuple(b for b in range(1, self.nbody) if self.body_jntnum[b])

    @functools.cached_property
    def tree_parent(self) -> tuple[int, ...]:
        """The moving body that carries each body's parent; 0: static."""
        return tuple(int(self.body_weldid[p]) for p in self.body_parentid)

    def joints(self, body: int) -> range:
        """Joints of a body, in their order."""
        first = int(self.body_jntadr[body])
        return range(first, first + int(self.body_jntnum[body]))

    @functools.cached_property
    def root_dofs(self) -> tuple[int, ...]:
        """Dofs whose joints translate the first tree's root, which is the reference point; may be none."""
        first = next((b for b in self.moving if self.tree_parent[b] == 0), 0)
        dofs: list[int] = []
        for j in self.joints(first):
            address = int(self.jnt_dofadr[j])
            if self.jnt_type[j] == FREE:
                return (address, address + 1, address + 2)
            if self.jnt_type[j] != SLIDE:
                break
            dofs.append(address)
        return tuple(dofs)


class State(NamedTuple):
    """One environment; what `mj_step` leaves in mjData.

    After a step with Euler the derived fields belong to the forward pass that the step began with, after
    one with RK4 to its last stage; after `forward` to `qpos` and `qvel`.
    """

    time: Array  # s
    qpos: Array  # [nq]
    qpos_low: Array  # [nq] what float rounding took from qpos of the root's translation; ours
    qvel: Array  # [nv]
    qacc_warmstart: Array  # [nv]
    diverged: Array  # bool: frozen where MuJoCo would have warned and reset; ours
    ncon: Array  # int32
    solver_niter: Array  # int32
    residual: Array  # scaled gradient norm that the solver left; ours
    qacc: Array  # [nv]
    qfrc_actuator: Array  # [nv]
    qfrc_constraint: Array  # [nv]
    xpos: Array  # [nbody, 3]
    xquat: Array  # [nbody, 4]
    xipos: Array  # [nbody, 3]
    site_xpos: Array  # [nsite, 3]
    subtree_com: Array  # [nbody, 3]
    cvel: Array  # [nbody, 6] about subtree_com of the body's tree
    cinert: Array  # [nbody, 10] about the same point
    cfrc_ext: Array  # [nbody, 6] contact wrench about the same point, as after mj_rnePostConstraint


class Kinematics(NamedTuple):
    """Where everything is, world axes; positions are relative to the reference point `origin`."""

    origin: tuple[jax.Array, jax.Array]  # [3] the point in the world, its rounding residue
    xpos: jax.Array  # [nbody, 3]; static bodies have minus the origin in it
    xquat: jax.Array  # [nbody, 4]
    xmat: jax.Array  # [nbody, 3, 3]
    xipos: jax.Array  # [nbody, 3]
    ximat: jax.Array  # [nbody, 3, 3]
    geom_xpos: jax.Array  # [ngeom, 3]
    geom_xmat: jax.Array  # [ngeom, 3, 3]
    site_xpos: jax.Array  # [nsite, 3]
    cdof: jax.Array  # [nv, 6] motion per unit velocity of each dof, about the reference point
    point: jax.Array  # [nbody, 3] a point of each moving body at its last joint
    axis: jax.Array  # [nv, 6] what cdof is about the point of the body that the dof moves
    inertia: jax.Array  # [nbody, 10] of all that each moving body carries, about its point
