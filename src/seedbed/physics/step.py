"""The simulation of one environment: forward and step, with a named scope for each stage (mj_step)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import named_scope

from seedbed.arguments import checked, shown
from seedbed.nearest import did_you_mean
from seedbed.physics import linear
from seedbed.physics.actuators import Acting, actuation
from seedbed.physics.assembly import equality_force, raised
from seedbed.physics.collision import detect
from seedbed.physics.constraint import make_rows
from seedbed.physics.dynamics import (
    Matrix,
    applied,
    applied_wrench,
    bias,
    is_sane,
    mass_matrix,
    passive,
    velocity,
)
from seedbed.physics.equality import Moving, held, holds_bodies
from seedbed.physics.implicit import Smooth, divide, solve
from seedbed.physics.integrate import euler, require_integrator, runge_kutta, where
from seedbed.physics.kinematics import kinematics
from seedbed.physics.model import RK4, Data, Inputs, Keyframe, Model, State
from seedbed.physics.problem import pose
from seedbed.physics.readout import energy as energy_of
from seedbed.physics.readout import readout
from seedbed.physics.sensors import Moment, sensordata
from seedbed.physics.solver import relative_error
from seedbed.types import Array, SeedbedError

_PLACES = ("xpos", "xquat", "xipos", "site_xpos", "subtree_com")
_ONE = "step is for one environment; batch it with simd.vectorize or jax.vmap"


@checked
def init(
    model: Model,
    qpos: Array | None = None,
    qvel: Array | None = None,
    *,
    keyframe: str | int | None = None,
) -> State:
    """Makes the state of a `model` at `qpos` [nq] (m, rad) and `qvel` [nv] (m/s, rad/s).

    The default is that of the `keyframe` with a name or a number, or qpos0 at rest, at time 0. The poses that
    a keyframe gives to mocap bodies are no part of the state: give `step` the `mocap_pos` and `mocap_quat` of
    `model.keyframes`. The precision is that of `qpos`, or JAX's default. Raises SeedbedError if an array is
    not of floats or has another shape, or if there is no such keyframe.
    """
    begin = at_rest(model) if keyframe is None else _keyframe(model, keyframe)
    dtype = jnp.result_type(float) if qpos is None else _array("qpos", qpos).dtype
    start = jnp.asarray(begin.qpos, dtype) if qpos is None else qpos
    speed = np.asarray(begin.qvel, dtype) if qvel is None else qvel
    return State(
        time=jnp.asarray(begin.time, dtype),
        qpos=_floats("qpos", start, (model.nq,), dtype),
        qpos_low=jnp.zeros(len(model.root_dofs), dtype),
        qvel=_floats("qvel", speed, (model.nv,), dtype),
        qvel_low=jnp.zeros(model.nv, dtype),
        act=jnp.asarray(begin.act, dtype),
        qacc_warmstart=jnp.zeros(model.nv, dtype),
        diverged=jnp.bool_(False),
    )


def at_rest(model: Model) -> Keyframe:
    """Returns the state in which the file has the model, qpos0 without velocities or controls."""
    bodies = np.array(model.mocaps, int)
    return Keyframe(
        name="",
        time=0.0,
        qpos=model.qpos0,
        qvel=np.zeros(model.nv),
        act=np.zeros(model.na),
        ctrl=np.zeros(model.nu),
        mocap_pos=model.body_pos[bodies],
        mocap_quat=model.body_quat[bodies],
    )


def _keyframe(model: Model, wanted: str | int) -> Keyframe:
    names = [each.name for each in model.keyframes]
    if isinstance(wanted, str) and wanted in names:
        return model.keyframes[names.index(wanted)]
    if isinstance(wanted, int | np.integer) and 0 <= wanted < len(names):
        return model.keyframes[wanted]
    known = ", ".join(name or str(i) for i, name in enumerate(names)) or "none"
    raise SeedbedError(
        f"init: the model has no keyframe {shown(wanted)}: give one of those that it has: {known}"
    )


@checked
def make_data(model: Model, state: State) -> Data:
    """Makes the data of a `state` before any forward pass (mj_makeData): the derived fields are zero.

    Shapes are those of one environment of the `model`.

    Raises SeedbedError if the state does not fit the model, or is a batch.
    """
    dtype = _check(model, state)
    nv, nbody = model.nv, model.nbody

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros(shape, dtype)

    return Data(
        *state,
        ncon=jnp.int32(0),
        solver_niter=jnp.int32(0),
        solver_error=zeros(),
        qacc=zeros(nv),
        qfrc_actuator=zeros(nv),
        actuator_force=zeros(model.nu),
        act_dot=zeros(model.na),
        qfrc_constraint=zeros(nv),
        xpos=zeros(nbody, 3),
        xquat=zeros(nbody, 4),
        xipos=zeros(nbody, 3),
        site_xpos=zeros(model.nsite, 3),
        subtree_com=zeros(nbody, 3),
        cvel=zeros(nbody, 6),
        cinert=zeros(nbody, 10),
        cfrc_ext=zeros(nbody, 6),
        sensordata=zeros(sum(sensor.dim for sensor in model.sensors)),
    )


@checked
def forward(model: Model, state: State, **given: Array) -> Data:
    """Computes the derived fields at the `state` of a `model` (mj_forward).

    `given` are inputs, by the names of `step`'s; control is zero without one.
    Returns the data of one environment, whose state is the one given.

    Raises SeedbedError if the state or an input does not fit the model, or is a batch.
    """
    dtype = _check(model, state)
    return _forward(model.astype(dtype), state, _inputs(model, given, dtype))[0]


@checked
def step(model: Model, state: State, ctrl: Array, **given: Array) -> State:
    """Advances one environment by the time step of the `model` under `ctrl` [nu].

    `ctrl` has the unit that the model's actuators give it, and is clipped to their `ctrlrange`. What else
    acts is `given` by MuJoCo's names: `qfrc_applied` [nv] in N and N m, `xfrc_applied` [nbody, 6], forces
    and torques at the centres of mass in world axes, and the poses of mocap bodies, `mocap_pos` [nmocap, 3]
    and `mocap_quat` [nmocap, 4]; without them, forces are zero, and mocap bodies where the file has them.

    Returns the next state. If MuJoCo would warn of a bad position, velocity or acceleration and reset, the
    environment keeps its `state` and `diverged` is set; it then stays frozen. Raises SeedbedError if the
    state or `ctrl` does not fit the model, or is a batch.
    """
    return step_data(model, state, ctrl, **given).state


@checked
def step_data(model: Model, state: State, ctrl: Array, **given: Array) -> Data:
    """Advances one environment as `step` does, and returns what mjData holds after mj_step.

    `model`, `state`, `ctrl` [nu] and what else is `given` are those of `step`. In a kernel, fields that
    nobody reads cost nothing; those that it returns are written for each step.
    Raises SeedbedError as `step` does.
    """
    dtype = _check(model, state)
    inputs = _inputs(model, given | {"ctrl": ctrl}, dtype)
    model = model.astype(dtype)
    bad = state.diverged | ~(is_sane(state.qpos).all() & is_sane(state.qvel).all())
    begun = _harmless(model, state, bad)
    if model.opt.integrator != RK4:
        done, mass, force, slope = _forward(model, begun, inputs)
        with named_scope("integration"):
            done = euler(model, done, mass, force, slope)
    else:
        begun_data = make_data(model, begun)
        done = runge_kutta(model, begun_data, lambda at: _forward(model, at, inputs)[0])
    kept = where(done.diverged, make_data(model, state), done)
    return kept._replace(diverged=done.diverged)


def _harmless(model: Model, state: State, bad: jax.Array) -> State:
    """Puts a model's rest into the place of a bad state, so that its lane's loops end when the others end."""
    return state._replace(
        qpos=jnp.where(bad, model.qpos0, state.qpos),
        qpos_low=jnp.where(bad, 0, state.qpos_low),
        qvel=jnp.where(bad, 0, state.qvel),
        qvel_low=jnp.where(bad, 0, state.qvel_low),
        act=jnp.where(bad, 0, state.act),
        qacc_warmstart=jnp.where(bad, 0, state.qacc_warmstart),
        diverged=bad,
    )


@checked
def refresh(model: Model, data: Data, **given: Array) -> Data:
    """Computes positions and velocities of bodies of one environment anew, as mj_step1 after mj_step.

    `data` is what a step of the `model` returned, and `given` its inputs. Forces, accelerations and the
    sensors of them stay those of the step; dm_control sees a step so. Where `diverged` is set, all stays 0.

    Raises SeedbedError as `forward` does.
    """
    dtype, bad = _check(model, data.state), data.diverged
    new = forward(model, _harmless(model.astype(dtype), data.state, bad), **given)
    new = where(bad, jax.tree.map(jnp.zeros_like, new), new)
    late = np.concatenate([[s.of_forces] * s.dim for s in model.sensors] or [[]]).astype(bool)
    moved = {name: getattr(new, name) for name in ("ncon", "cinert", "cvel", *_PLACES)}
    return data._replace(
        sensordata=jnp.where(late, data.sensordata, new.sensordata),
        **moved,
    )


@checked
def energy(model: Model, state: State, **given: Array) -> jax.Array:
    """Computes the potential and kinetic energy [2] in J of a `model` at a `state`.

    They are mjData.energy after mj_forward. `given` are inputs as `forward` takes them, of which the poses of
    mocap bodies count.

    Raises SeedbedError if the state or an input does not fit the model, or is a batch.
    """
    dtype = _check(model, state)
    model, inputs = model.astype(dtype), _inputs(model, given, dtype)
    kin = kinematics(model, state.qpos, state.qpos_low, inputs)
    motion, _ = velocity(model, kin.cdof, state.qvel)
    return energy_of(model, kin, state.qpos, motion, state.qvel)


def _forward(
    model: Model, state: State, inputs: Inputs
) -> tuple[Data, Matrix, jax.Array, tuple[Array, ...]]:
    """Runs one forward pass; returns the data, the mass matrix M, M qacc [nv], and the actuators' slopes."""
    qpos, qvel = state.qpos, state.qvel
    with named_scope("kinematics"):
        kin = kinematics(model, qpos, state.qpos_low, inputs)
    with named_scope("inertia"):
        mass = mass_matrix(model, kin)
    with named_scope("velocity"):
        motion, before = velocity(model, kin.cdof, qvel)
    with named_scope("smooth_forces"):
        acting = Acting(kin, motion, qpos, qvel, state.act)
        actuated = actuation(model, inputs.ctrl, acting)
        smooth = actuated.force + passive(model, kin, qpos, qvel, motion)
        smooth = smooth - bias(model, kin, qvel, motion, before)
        pushed = None
        if inputs.xfrc_applied is not None:
            pushed = applied_wrench(model, kin, inputs.xfrc_applied)
            smooth = smooth + applied(model, kin, pushed)
        if inputs.qfrc_applied is not None:
            smooth = smooth + inputs.qfrc_applied
        qacc_smooth = divide(linear.pattern(model.nv, set(mass)), mass, smooth)
    with named_scope("collision"):
        contacts = detect(model, kin)
    with named_scope("constraint"):
        rows = make_rows(model, kin, contacts, qpos, Moving(qvel, motion, before), mass)
    with named_scope("solver"):
        start = Smooth(smooth, qacc_smooth), state.qacc_warmstart
        solution = solve(model, kin, mass, *start, contacts, rows)
        error = relative_error(model, solution, qacc_smooth, qvel)
        if isinstance(contacts.lost, jax.Array):
            error = jnp.where(contacts.lost, 1, error)
        if not model.opt.hardens:
            error = jnp.where(rows.compliant, 1, error)
    with named_scope("readout"):
        problem = raised(pose(model, kin, mass, contacts, rows), solution.compensation)
        wrench = solution.wrench if pushed is None else solution.wrench + pushed
        if holds_bodies(model):
            wrench = wrench + held(model, kin, equality_force(problem, solution.qacc))
        derived = readout(model, kin, motion, wrench)
        com = derived["subtree_com"]
        now = kin, state.time, qpos, qvel, solution.qacc, motion, before, actuated
        read = Moment(*now, subtree_com=com, contacts=contacts, wrench=wrench, problem=problem)
        derived["sensordata"] = sensordata(model, read)
    done = Data(
        *state,
        ncon=contacts.ncon,
        solver_niter=solution.niter,
        solver_error=error,
        qacc=solution.qacc,
        qfrc_actuator=actuated.force,
        actuator_force=actuated.output,
        act_dot=actuated.act_dot,
        qfrc_constraint=solution.qfrc_constraint,
        **derived,
    )
    return done, mass, smooth + solution.force, actuated.slope


def _inputs(model: Model, given: Mapping[str, Array], dtype: Any) -> Inputs:
    """Returns the inputs of a step, by name; what is not given is None, or what the file has.

    Raises SeedbedError, with its name, if one is unknown or does not fit the model.
    """
    shapes = {
        "ctrl": (model.nu,),
        "qfrc_applied": (model.nv,),
        "xfrc_applied": (model.nbody, 6),
        "mocap_pos": (model.nmocap, 3),
        "mocap_quat": (model.nmocap, 4),
    }
    for name in given:
        if name not in shapes:
            hint = did_you_mean(name, shapes) or f": inputs are {', '.join(shapes)}"
            raise SeedbedError(f"{name} is no input of a step{hint}")
    found = {name: _floats(name, value, shapes[name], dtype) for name, value in given.items()}
    found.setdefault("ctrl", jnp.zeros(model.nu, dtype))
    if found.keys() & {"mocap_pos", "mocap_quat"}:
        rest = at_rest(model)
        found.setdefault("mocap_pos", jnp.asarray(rest.mocap_pos, dtype))
        found.setdefault("mocap_quat", jnp.asarray(rest.mocap_quat, dtype))
    return Inputs(**found)


def _check(model: Model, state: State) -> Any:
    """Returns the dtype of a state.

    Raises SeedbedError if its sizes are not the model's, if it is a batch, or if the model has an integrator
    that is not simulated.
    """
    require_integrator(model)
    dtype = _array("qpos", state.qpos).dtype
    _floats("qpos", state.qpos, (model.nq,), dtype)
    _floats("qpos_low", state.qpos_low, (len(model.root_dofs),), dtype)
    _floats("act", state.act, (model.na,), dtype)
    for name in ("qvel", "qvel_low", "qacc_warmstart"):
        _floats(name, getattr(state, name), (model.nv,), dtype)
    for name in ("time", "diverged"):
        if (shape := _array(name, getattr(state, name)).shape) != ():
            raise SeedbedError(f"{name} has shape {shape} instead of (): {_ONE}")
    return dtype


def _floats(name: str, value: Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Casts an array to `dtype`. Raises SeedbedError, with `name`, unless it holds floats in a `shape`."""
    array = _array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise SeedbedError(f"{name} holds {array.dtype}: give floating-point numbers")
    if array.shape != shape:
        raise SeedbedError(f"{name} has shape {array.shape} instead of {shape}: {_ONE}")
    return array.astype(dtype)


def _array(name: str, value: Array) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise SeedbedError(f"{name} is {shown(value)}: give an array of numbers") from error
