"""The data of a simulation: Model, State, Data and Kinematics.

A `Model` holds MuJoCo's own fields as numpy arrays, so that topology and parameters are constants of the
traced function. A leaf given to `Model.replace` may be a JAX array; it becomes an input of the function.
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
"""MuJoCo's numbers for the joint types (mjtJoint)."""
EULER, RK4 = 0, 1
"""MuJoCo's numbers for the integrators (mjtIntegrator)."""

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
"""Fields that `Model.replace` accepts."""


class Option(NamedTuple):
    """The fields of MuJoCo's mjOption that this engine reads."""

    timestep: float  # s
    gravity: np.ndarray  # [3] m/s^2
    density: float  # kg/m^3, of the medium
    viscosity: float  # kg/(m s)
    wind: np.ndarray  # [3] m/s
    integrator: int  # EULER or RK4
    iterations: int  # most iterations of the solver; ours, not the file's
    eulerdamp: bool  # Euler treats joint damping implicitly


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A compiled MJCF model. Its fields are those of mjModel, except for those marked "ours"."""

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
    actuator_gear: Array  # [nu, 6]; a joint uses the first
    actuator_gainprm: np.ndarray  # [nu, k]; the first is the force per control
    actuator_ctrllimited: np.ndarray
    actuator_ctrlrange: np.ndarray
    actuator_forcelimited: np.ndarray
    actuator_forcerange: np.ndarray
    welds: Welds  # ours
    parts: Parts  # ours

    def replace(self, **leaves: Array) -> Model:
        """Returns a new model in which leaves are replaced by arrays of the same shape, traced or not.

        Constants that MuJoCo derives at compile time (invweight0 of bodies and dofs) do not change, just as
        in MuJoCo if a field is changed without mj_setConst.

        Raises:
            SeedbedError: a leaf cannot be replaced, or its array is not of floats or has another shape.
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
        """Returns the model with every floating-point array cast to `dtype`; numpy arrays stay numpy."""
        leaves = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        cast = jax.tree.map(lambda leaf: math.constant(leaf, dtype), leaves)
        return Model(**cast)

    @functools.cached_property
    def moving(self) -> tuple[int, ...]:
        """Lists the bodies with joints, parents first."""
        return tuple(b for b in range(1, self.nbody) if self.body_jntnum[b])

    @functools.cached_property
    def tree_parent(self) -> tuple[int, ...]:
        """Lists, for each body, the moving body that carries its parent; 0: static."""
        return tuple(int(self.body_weldid[p]) for p in self.body_parentid)

    def joints(self, body: int) -> range:
        """Returns the joints of a body, in order."""
        first = int(self.body_jntadr[body])
        return range(first, first + int(self.body_jntnum[body]))

    @functools.cached_property
    def root_dofs(self) -> tuple[int, ...]:
        """Lists the dofs that translate the first tree's root, the reference point; the list may be empty."""
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
    """What a step carries to the next one, of one environment: fields of mjData, and those marked "ours"."""

    time: Array  # s
    qpos: Array  # [nq]
    qpos_low: (
        Array  # [n] rounding residue of the first n numbers of qpos, the root's translation; ours
    )
    qvel: Array  # [nv]
    qacc_warmstart: Array  # [nv]
    diverged: Array  # bool: frozen, because MuJoCo would have warned and reset; ours


class Data(NamedTuple):
    """A state and what was computed on the way to it: fields of mjData, and those marked "ours".

    After `forward`, the derived fields (from `ncon` on) belong to `qpos` and `qvel`. After a step with Euler
    they belong to the forward pass at the start of the step; after a step with RK4, to its last stage. They
    are zero where `diverged` is set.
    """

    time: Array  # s
    qpos: Array  # [nq]
    qpos_low: (
        Array  # [n] rounding residue of the first n numbers of qpos, the root's translation; ours
    )
    qvel: Array  # [nv]
    qacc_warmstart: Array  # [nv]
    diverged: Array  # bool: frozen, because MuJoCo would have warned and reset; ours
    ncon: Array  # int32
    solver_niter: Array  # int32
    residual: Array  # scaled norm of the gradient at the end of the solver; ours
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

    @property
    def state(self) -> State:
        """Returns what the next step needs."""
        return State(*self[: len(State._fields)])


class Kinematics(NamedTuple):
    """Positions and orientations, in world axes. Positions are relative to the reference point `origin`."""

    origin: tuple[jax.Array, jax.Array]  # [3] the point in the world; [3] its rounding residue
    xpos: jax.Array  # [nbody, 3]; for static bodies, their world position minus the origin
    xquat: jax.Array  # [nbody, 4]
    xmat: jax.Array  # [nbody, 3, 3]
    xipos: jax.Array  # [nbody, 3]
    ximat: jax.Array  # [nbody, 3, 3]
    geom_xpos: jax.Array  # [ngeom, 3]
    geom_xmat: jax.Array  # [ngeom, 3, 3]
    site_xpos: jax.Array  # [nsite, 3]
    cdof: jax.Array  # [nv, 6] motion per unit velocity of each dof, about the reference point
    # [nbody, 3] of moving bodies: the anchor of the last joint if it is a hinge, otherwise the position
    point: jax.Array
    axis: jax.Array  # [nv, 6] as cdof, but about the point of the body that the dof moves
    inertia: jax.Array  # [nbody, 10] of each moving body with all welded to it, about its point
