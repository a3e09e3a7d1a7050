"""The data of a simulation: Model, State, Data and Kinematics.

A `Model` holds MuJoCo's own fields as numpy arrays, so that topology and parameters are constants of the
traced function. A leaf given to `Model.replace` may be a JAX array; it becomes an input of the function.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.physics import math
from seedbed.physics.leaves import leaf, replaced
from seedbed.physics.rigid import Parts, Welds
from seedbed.types import Array

FREE, BALL, SLIDE, HINGE = 0, 1, 2, 3
"""MuJoCo's numbers for the joint types (mjtJoint)."""
EULER, RK4, IMPLICITFAST = 0, 1, 3
"""MuJoCo's numbers for the integrators (mjtIntegrator)."""


class Option(NamedTuple):
    """The fields of MuJoCo's mjOption that this engine reads."""

    timestep: float  # s
    gravity: Array  # [3] m/s^2
    density: float  # kg/m^3, of the medium
    viscosity: float  # kg/(m s)
    wind: np.ndarray  # [3] m/s
    integrator: int  # EULER, RK4 or IMPLICITFAST
    iterations: int  # most iterations of the solver; ours, not the file's
    eulerdamp: bool  # Euler treats joint damping implicitly
    impratio: float  # how much harder friction is than the normal
    refsafe: bool  # springs of constraints are not stiffer than the time step allows
    filterparent: bool  # a body does not touch its parent
    hardens: bool  # replaced leaves may make contacts harder than the dtype resolves


class Keyframe(NamedTuple):
    """A state of the file (mjModel's key_qpos and so on), with the inputs of `step` that belong to it."""

    name: str
    time: float  # s
    qpos: np.ndarray  # [nq]
    qvel: np.ndarray  # [nv]
    act: np.ndarray  # [na]
    ctrl: np.ndarray  # [nu]
    mocap_pos: np.ndarray  # [nmocap, 3] m
    mocap_quat: np.ndarray  # [nmocap, 4]


class Names(NamedTuple):
    """The names of a model's elements, by number; "" for those without one."""

    body: tuple[str, ...]
    joint: tuple[str, ...]
    geom: tuple[str, ...]
    site: tuple[str, ...]
    actuator: tuple[str, ...]


class Sensor(NamedTuple):
    """A sensor of the file, with mjModel's numbers of kinds and objects."""

    name: str
    kind: int  # mjtSensor
    objtype: int
    objid: int
    reftype: int
    refid: int  # -1: none
    adr: int  # its first number in sensordata
    dim: int
    cutoff: float  # 0: none
    clipped: bool  # whether the cutoff is of both signs
    simulated: bool  # False for what its objects or delays keep from being computed
    intprm: tuple[int, int]  # of a contact sensor: its data, and how it reduces contacts
    of_forces: bool  # whether it reads forces or accelerations


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A compiled MJCF model. Its fields are those of mjModel, except for those marked "ours".

    Units are SI. Where there are two, the first is of sliding and the second of turning joints.
    """

    opt: Option  # options of the simulation
    nq: int  # numbers in qpos
    nv: int  # degrees of freedom
    nu: int  # controls
    na: int  # activations
    nbody: int  # bodies, with the world as body 0
    njnt: int  # joints
    ngeom: int  # geoms
    nsite: int  # sites
    nmocap: int  # bodies that are placed from outside
    qpos0: Array  # [nq] m and rad, the pose of the file
    qpos_spring: Array  # [nq] m and rad, where springs rest
    body_parentid: np.ndarray  # [nbody]
    body_rootid: np.ndarray  # [nbody] the child of the world above it
    body_treeid: np.ndarray  # [nbody] its tree of moving bodies; -1: static
    body_weldid: np.ndarray  # [nbody] the moving body that carries a body; 0: static
    body_carrierid: np.ndarray  # [nbody] the same, and the mocap body that carries it; ours
    body_mocapid: np.ndarray  # [nbody] number of a mocap body; -1: it is none
    body_simple: np.ndarray  # [nbody] 2: alone, and slides along its own axes
    body_jntnum: np.ndarray  # [nbody] number of its joints
    body_jntadr: np.ndarray  # [nbody] its first joint; -1: none
    body_dofnum: np.ndarray  # [nbody]
    body_dofadr: np.ndarray  # [nbody] its first degree of freedom; -1: none
    body_pos: np.ndarray  # [nbody, 3] m, in the parent's frame
    body_quat: np.ndarray  # [nbody, 4] in the parent's frame
    body_ipos: Array  # [nbody, 3] m, centre of mass in the body's frame
    body_iquat: np.ndarray  # [nbody, 4] axes of the inertia in the body's frame
    body_mass: Array  # [nbody] kg
    body_gravcomp: np.ndarray  # [nbody] share of its weight that is carried
    body_inertia: Array  # [nbody, 3] kg m^2, about those axes
    body_invweight0: Array  # [nbody, 2] 1/kg and 1/(kg m^2)
    jnt_type: np.ndarray  # [njnt] FREE, BALL, SLIDE or HINGE
    jnt_qposadr: np.ndarray  # [njnt] its first number in qpos
    jnt_dofadr: np.ndarray  # [njnt] its first degree of freedom
    jnt_bodyid: np.ndarray  # [njnt]
    jnt_limited: np.ndarray  # [njnt] bool
    jnt_solref: np.ndarray  # [njnt, 2] s and 1, of limits
    jnt_solimp: np.ndarray  # [njnt, 5] of limits
    jnt_pos: np.ndarray  # [njnt, 3] m, anchor in the body's frame
    jnt_axis: np.ndarray  # [njnt, 3] in the body's frame
    jnt_stiffness: Array  # [njnt] N/m, or N m/rad
    jnt_range: np.ndarray  # [njnt, 2] m or rad
    jnt_margin: np.ndarray  # [njnt] m or rad
    jnt_actfrclimited: np.ndarray  # [njnt] bool
    jnt_actfrcrange: np.ndarray  # [njnt, 2] N, or N m, of all actuators of the joint
    dof_bodyid: np.ndarray  # [nv]
    dof_jntid: np.ndarray  # [nv]
    dof_parentid: np.ndarray  # [nv] the one before it in its tree; -1: none
    dof_armature: Array  # [nv] kg, or kg m^2
    dof_damping: Array  # [nv] N s/m, or N m s/rad
    dof_invweight0: Array  # [nv] 1/kg, or 1/(kg m^2)
    dof_frictionloss: Array  # [nv] N, or N m
    dof_rubs: np.ndarray  # [nv] bool: it has a friction loss, whatever its size; ours
    dof_solref: np.ndarray  # [nv, 2] s and 1, of friction losses
    dof_solimp: np.ndarray  # [nv, 5] of friction losses
    geom_type: np.ndarray  # [ngeom] mjtGeom
    geom_contype: np.ndarray  # [ngeom] bits
    geom_conaffinity: np.ndarray  # [ngeom] bits
    geom_condim: np.ndarray  # [ngeom] 1 or 3
    geom_bodyid: np.ndarray  # [ngeom]
    geom_priority: np.ndarray  # [ngeom]
    geom_solmix: np.ndarray  # [ngeom]
    geom_solref: np.ndarray  # [ngeom, 2] s and 1
    geom_solimp: np.ndarray  # [ngeom, 5]
    geom_size: Array  # [ngeom, 3] m
    geom_lever: Array  # [ngeom] m, its body's centre of mass to its farthest point, at most; ours
    geom_extent: Array  # [ngeom] m, from the root of its tree to its farthest point, at most; ours
    geom_rbound: Array  # [ngeom] m, radius of a sphere around it; 0: plane
    geom_pos: Array  # [ngeom, 3] m, in the body's frame
    geom_quat: np.ndarray  # [ngeom, 4] in the body's frame
    geom_friction: Array  # [ngeom, 3] sliding (1), torsional and rolling (m); the first is used
    geom_margin: np.ndarray  # [ngeom] m
    geom_gap: np.ndarray  # [ngeom] m
    site_bodyid: np.ndarray  # [nsite]
    site_type: np.ndarray  # [nsite] mjtGeom
    site_size: np.ndarray  # [nsite, 3] m
    site_pos: np.ndarray  # [nsite, 3] m, in the body's frame
    site_quat: np.ndarray  # [nsite, 4] in the body's frame
    exclude_signature: np.ndarray  # [k] pairs of bodies that do not touch
    pair_geom1: np.ndarray  # [npair] pairs of geoms that may touch, with constants of their own
    pair_geom2: np.ndarray  # [npair]
    pair_dim: np.ndarray  # [npair] 1 or 3
    pair_solref: np.ndarray  # [npair, 2] s and 1
    pair_solimp: np.ndarray  # [npair, 5]
    pair_margin: np.ndarray  # [npair] m
    pair_gap: np.ndarray  # [npair] m
    pair_friction: Array  # [npair, 5] sliding (1), twice, torsional, rolling (m); the first is used
    tendon_moment: np.ndarray  # [ntendon, nv] weights of a fixed one's joints; ours
    tendon_limited: np.ndarray  # [ntendon] bool
    tendon_range: np.ndarray  # [ntendon, 2] m or rad
    tendon_margin: np.ndarray  # [ntendon] m or rad
    tendon_solref_lim: np.ndarray  # [ntendon, 2] s and 1, of limits
    tendon_solimp_lim: np.ndarray  # [ntendon, 5] of limits
    tendon_invweight0: Array  # [ntendon] 1/kg, or 1/(kg m^2)
    tendon_stiffness: np.ndarray  # [ntendon] N/m, or N m/rad
    tendon_damping: np.ndarray  # [ntendon] N s/m, or N m s/rad
    tendon_lengthspring: np.ndarray  # [ntendon, 2] m or rad, between which its spring rests
    actuator_moment: np.ndarray  # [nu, nv] the same, of what it drives; ours
    actuator_site: np.ndarray  # [nu] the site that it pushes; -1: none; ours
    actuator_gear: Array  # [nu, 6]; a joint uses the first, a site has force and torque
    actuator_gainprm: Array  # [nu, 3] force per control: fixed, per length, per velocity
    actuator_biasprm: Array  # [nu, 3] force without control: fixed, per length, per velocity
    actuator_used: np.ndarray  # [2, nu, 3] bool: those of gains, biases that the kind uses; ours
    actuator_dyntype: np.ndarray  # [nu] mjtDyn: kind of activation
    actuator_dynprm: np.ndarray  # [nu, 1] s, time constant of a filter
    actuator_actadr: np.ndarray  # [nu] its activation; -1: none
    actuator_actlimited: np.ndarray  # [nu] bool
    actuator_actrange: np.ndarray  # [nu, 2]
    actuator_actearly: np.ndarray  # [nu] bool: forces are of the next activation
    actuator_ctrllimited: np.ndarray  # [nu] bool
    actuator_ctrlrange: np.ndarray  # [nu, 2]
    actuator_forcelimited: np.ndarray  # [nu] bool
    actuator_forcerange: np.ndarray  # [nu, 2] N, or N m
    eq_type: np.ndarray  # [neq] mjtEq, of equalities that are active; ours
    eq_objtype: np.ndarray  # [neq] mjtObj, bodies or sites
    eq_obj1id: np.ndarray  # [neq] joints, bodies or sites that are held
    eq_obj2id: np.ndarray  # [neq] those that they follow; -1: none
    eq_data: np.ndarray  # [neq, 11] coefficients of the polynomial, or anchors and pose
    eq_solref: np.ndarray  # [neq, 2] s and 1
    eq_solimp: np.ndarray  # [neq, 5]
    names: Names  # of its elements; ours
    keyframes: tuple[Keyframe, ...]  # states with a name; ours
    sensors: tuple[Sensor, ...]  # in the order of sensordata; ours
    welds: Welds  # which bodies are fixed to which; ours
    parts: Parts  # inertias of bodies with all that is fixed to them; ours

    def replace(self, **leaves: Array) -> Model:
        """Returns a new model in which `leaves` are replaced by arrays of the same shape, traced or not.

        They are those of `seedbed.physics.leaves.LEAVES`; of gains and biases three columns, of which those
        that their kind does not use stay 0. Dofs without friction loss stay without.

        What follows from sizes, places and masses is kept consistent, but for the constants that MuJoCo
        derives at qpos0 when it compiles: `physics.set_const` computes them anew.

        Raises:
            SeedbedError: a leaf is not replaceable, not of floats or of another shape, or `load` refuses it.
        """
        return Model(**replaced(self._by_name, leaves))

    def leaf(self, name: str) -> Array:
        """Returns a leaf that `replace` takes, by its name."""
        return leaf(self._by_name, name)

    @property
    def _by_name(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def astype(self, dtype: Any) -> Model:
        """Returns the model with every floating-point array cast to `dtype`; numpy arrays stay numpy.

        What rounding takes from positions in the static world is kept beside them.
        """
        rest, geom = self.welds.rest_pos, self.welds.geom_pos
        welds = self.welds._replace(
            rest_low=rest - rest.astype(dtype), geom_low=geom - geom.astype(dtype)
        )
        leaves: dict[str, Any] = {**self._by_name, "welds": welds}
        texts = {name: leaves.pop(name) for name in ("names", "keyframes", "sensors")}
        cast: Any = jax.tree.map(lambda leaf: math.constant(leaf, dtype), leaves)
        return Model(**cast, **texts)

    @functools.cached_property
    def moving(self) -> tuple[int, ...]:
        """Lists the bodies with joints, parents first."""
        return tuple(b for b in range(1, self.nbody) if self.body_jntnum[b])

    @functools.cached_property
    def mocaps(self) -> tuple[int, ...]:
        """Lists the mocap bodies, in the order of their numbers."""
        return tuple(int(b) for b in np.argsort(self.body_mocapid)[self.nbody - self.nmocap :])

    @functools.cached_property
    def tree_parent(self) -> tuple[int, ...]:
        """Lists, for each body, the moving body that carries its parent; 0: static."""
        return tuple(int(self.body_weldid[p]) for p in self.body_parentid)

    def carrier_above(self, body: int) -> int:
        """Returns the moving or mocap body that carries a body's parent; 0: the world."""
        return int(self.body_carrierid[self.body_parentid[body]])

    @functools.cached_property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """Lists the quaternions of free joints and balls: the first number in qpos, and in qvel."""
        found = []
        for j in range(self.njnt):
            i, d = int(self.jnt_qposadr[j]), int(self.jnt_dofadr[j])
            if self.jnt_type[j] in (FREE, BALL):
                first = 3 if self.jnt_type[j] == FREE else 0
                found.append((i + first, d + first))
        return tuple(found)

    def joints(self, body: int) -> range:
        """Returns the joints of a body, in order."""
        first = int(self.body_jntadr[body])
        return range(first, first + int(self.body_jntnum[body]))

    @functools.cached_property
    def roots(self) -> tuple[int, ...]:
        """Lists the root of each tree of moving bodies: the body whose parent is static."""
        return tuple(b for b in self.moving if self.tree_parent[b] == 0)

    @functools.cached_property
    def root_dofs(self) -> tuple[int, ...]:
        """Lists the dofs that translate the roots of the trees, and with them their reference points."""
        dofs: list[int] = []
        for root in self.roots:
            for j in self.joints(root):
                address = int(self.jnt_dofadr[j])
                if self.jnt_type[j] == FREE:
                    dofs += [address, address + 1, address + 2]
                if self.jnt_type[j] != SLIDE:
                    break
                dofs.append(address)
        return tuple(dofs)


class Inputs(NamedTuple):
    """Inputs of a step of one environment, by mjData's names; those that are not given are None."""

    ctrl: Array  # [nu] in the units of the actuators
    qfrc_applied: Array | None = None  # [nv] N and N m
    xfrc_applied: Array | None = None  # [nbody, 6] N and N m in world axes, at centres of mass
    mocap_pos: Array | None = None  # [nmocap, 3] m, of mocap bodies in the world
    mocap_quat: Array | None = None  # [nmocap, 4] w, x, y, z; of any length but 0


class State(NamedTuple):
    """One environment's state between steps: fields of mjData, and those marked "ours".

    All leaves are float32 (or float64, if `qpos` is) but `diverged`. Units are SI, as in the model's file.
    """

    time: Array  # s
    qpos: Array  # [nq] m and rad; quaternions of free joints and balls
    qpos_low: Array  # [n] m, rounding residues of the roots' translations (`Model.root_dofs`); ours
    qvel: Array  # [nv] m/s and rad/s
    qvel_low: Array  # [nv] m/s and rad/s, rounding residues of qvel; ours
    act: Array  # [na] activations of actuators
    qacc_warmstart: Array  # [nv] m/s^2 and rad/s^2, where the solver starts
    diverged: Array  # bool: frozen, because MuJoCo would have warned and reset; ours


class Data(NamedTuple):
    """A state and what was computed on the way to it: fields of mjData, and those marked "ours".

    After `forward`, the derived fields (from `ncon` on) belong to `qpos` and `qvel`. After a step with Euler
    they belong to the forward pass at the start of the step; after a step with RK4, to its last stage. They
    are zero where `diverged` is set.
    """

    time: Array  # s
    qpos: Array  # [nq] m and rad; quaternions of free joints
    qpos_low: Array  # [n] m, rounding residues of the roots' translations (`Model.root_dofs`); ours
    qvel: Array  # [nv] m/s and rad/s
    qvel_low: Array  # [nv] m/s and rad/s, rounding residues of qvel; ours
    act: Array  # [na] activations of actuators
    qacc_warmstart: Array  # [nv] m/s^2 and rad/s^2, where the solver starts
    diverged: Array  # bool: frozen, because MuJoCo would have warned and reset; ours
    ncon: Array  # int32, contacts
    solver_niter: Array  # int32, iterations of the solver
    solver_error: Array  # float, estimated error of qacc over its size; ours
    qacc: Array  # [nv] m/s^2 and rad/s^2
    qfrc_actuator: Array  # [nv] N and N m
    actuator_force: Array  # [nu] N and N m
    act_dot: Array  # [na] 1/s, rates of the activations
    qfrc_constraint: Array  # [nv] N and N m, of limits and contacts
    xpos: Array  # [nbody, 3] m, in world axes
    xquat: Array  # [nbody, 4] w, x, y, z
    xipos: Array  # [nbody, 3] m, centres of mass
    site_xpos: Array  # [nsite, 3] m
    subtree_com: Array  # [nbody, 3] m, centre of mass of a body and its descendants
    cvel: Array  # [nbody, 6] rad/s and m/s, about subtree_com of the body's tree
    cinert: Array  # [nbody, 10] kg m^2, kg m and kg, about the same point
    cfrc_ext: Array  # [nbody, 6] N m and N, of contacts, about it, as after mj_rnePostConstraint
    sensordata: Array  # [nsensordata] in MuJoCo's order; NaN for what is not simulated

    @property
    def state(self) -> State:
        """Returns what the next step needs."""
        return State(*self[: len(State._fields)])


class Origin(NamedTuple):
    """A point in the world in two floats, and its rounding residue."""

    high: Array  # [3] m
    low: Array  # [3] m


class Kinematics(NamedTuple):
    """Positions and orientations, in world axes.

    Positions and motions are about the reference point of the body's tree, or of the world if it is static.
    """

    origins: tuple[Origin, ...]  # the reference point of each tree, in the order of `Model.roots`
    xpos: jax.Array  # [nbody, 3]
    xquat: jax.Array  # [nbody, 4]
    xmat: jax.Array  # [nbody, 3, 3]
    xipos: jax.Array  # [nbody, 3]
    ximat: jax.Array  # [nbody, 3, 3]
    geom_xpos: jax.Array  # [ngeom, 3]
    geom_xmat: jax.Array  # [ngeom, 3, 3]
    site_xpos: jax.Array  # [nsite, 3]
    cdof: jax.Array  # [nv, 6] motion per unit velocity of each dof
    point: jax.Array  # [nbody, 3] the last joint's anchor if it turns, otherwise the position
    axis: jax.Array  # [nv, 6] as cdof, but about the point of the body that the dof moves
    inertia: jax.Array  # [nbody, 10] of each moving body with all welded to it, about its point
