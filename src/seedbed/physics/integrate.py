"""Integrators, from accelerations to the next state: semi-implicit Euler and classical Runge-Kutta."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from seedbed.physics import linear, math
from seedbed.physics.actuators import next_activation
from seedbed.physics.dynamics import Matrix, is_sane
from seedbed.physics.implicit import divide
from seedbed.physics.model import BALL, EULER, FREE, IMPLICITFAST, RK4, Data, Model, State
from seedbed.simd.derivative import recomputed
from seedbed.types import Array, SeedbedError

TABLEAU = {
    # Share of the time step from the start to the next stage; the last stage has no next one.
    "reach": np.array([0.5, 0.5, 1.0, 0.0]),
    "weight": np.array([1, 2, 2, 1]) / 6,
    "first": np.array([True, False, False, False]),
}
"""Constants of the four Runge-Kutta stages, by column."""


def require_integrator(model: Model) -> None:
    """Raises SeedbedError if `opt.integrator` is one that `load` refuses for such a model."""
    option = model.opt
    if option.integrator not in (EULER, RK4, IMPLICITFAST):
        raise SeedbedError(
            f"opt.integrator is {option.integrator}: give {EULER} (Euler), {RK4} (RK4) or {IMPLICITFAST} "
            "(implicitfast)"
        )
    shared = (model.actuator_site >= 0) | ((np.asarray(model.actuator_moment) != 0).sum(1) > 1)
    servos = [
        each
        for each in (model.actuator_gainprm, model.actuator_biasprm)
        if isinstance(each, np.ndarray)
    ]
    left_out = {
        "density or viscosity": option.density or option.viscosity,
        "damping of a tendon": model.tendon_damping.any(),
        "damping of a servo of a tendon or site": any(x[shared, 2].any() for x in servos),
    }
    for what, found in left_out.items():
        if option.integrator == IMPLICITFAST and found:
            raise SeedbedError(
                f"opt.integrator is implicitfast, and the model has {what}: use Euler"
            )


def euler(model: Model, data: Data, mass: Matrix, force: jax.Array, slope: Sequence[Array]) -> Data:
    """Advances by one time step (mj_Euler, mj_implicit).

    Euler treats joint damping implicitly if `opt.eulerdamp` is set; `implicitfast` does so always, and also
    the forces of actuators that depend on velocity. `data` must be the result of a forward pass; its `qacc`
    does not change. `force` [nv] is M qacc, which is qfrc_smooth + qfrc_constraint, and `slope` the
    derivative of each dof's actuator force by its velocity.
    """
    h = model.opt.timestep
    qacc = data.qacc
    damping = model.dof_damping
    fast = model.opt.integrator == IMPLICITFAST
    damped = not (isinstance(damping, np.ndarray) and (damping <= 0).all())
    driven = fast and any(isinstance(x, jax.Array) or x for x in slope)
    if driven or (damped and (fast or model.opt.eulerdamp)):
        matrix = dict(mass)
        for i, d in enumerate(math.unstack(damping)):
            implicit = d - slope[i] if fast else d
            matrix[i, i] = matrix[i, i] + h * implicit
        qacc = divide(linear.pattern(model.nv, set(matrix)), matrix, force)
    if fast:
        qacc = _lone_bodies(model, data, mass, force, qacc)
    qvel, qvel_low = math.two_sum(data.qvel, data.qvel_low + h * qacc)
    qpos, qpos_low = integrate_pos(model, data.qpos, data.qpos_low, qvel, h)
    return data._replace(
        time=data.time + h,
        qpos=qpos,
        qpos_low=qpos_low,
        qvel=qvel,
        qvel_low=qvel_low,
        act=next_activation(model, data.act, data.act_dot),
        qacc_warmstart=data.qacc,
        diverged=data.diverged | ~is_sane(data.qacc).all(),
    )


def _lone_bodies(
    model: Model, data: Data, mass: Matrix, force: jax.Array, qacc: jax.Array
) -> jax.Array:
    """Replaces the accelerations of trees of one free body: gyroscopic forces are implicit, too.

    What is welded to it counts as the body. Source: mjd_freeMhat, whose part of the matrix is not symmetric,
    and apart from the others.
    """
    h, found = model.opt.timestep, math.unstack(qacc)
    for b in model.roots:
        joint = int(model.body_jntadr[b])
        carries = any(model.tree_parent[c] == b for c in model.moving)
        if model.jnt_type[joint] != FREE or model.body_jntnum[b] != 1 or carries:
            continue
        d = int(model.jnt_dofadr[joint])
        spin, turn = data.qvel[d + 3 : d + 6], math.quat_to_mat(data.xquat[b])
        columns = _gyroscopic(model, b, spin, turn)
        rows = []
        for i in range(6):
            row = [mass.get((d + max(i, k), d + min(i, k)), 0) for k in range(6)]
            row[i] = row[i] + h * model.dof_damping[d + i]
            rows.append([*row[:3], *(row[3 + k] + h * columns[k][i] for k in range(3))])
        found[d : d + 6] = linear.eliminate(rows, [force[d + i] for i in range(6)])
    return jnp.stack(found)


def _gyroscopic(model: Model, body: int, spin: jax.Array, turn: jax.Array) -> list[list[Array]]:
    """Returns the derivative of the inertial forces [6] of a free body by each component of its spin."""
    parts = model.parts
    columns = []
    for e in np.eye(3, dtype=spin.dtype):
        push, twist = jnp.zeros(3, spin.dtype), jnp.zeros(3, spin.dtype)
        for k in (k for k, carrier in enumerate(parts.body) if carrier == body):
            mass, arm, (base, *excess) = parts.mass[k], parts.pos[k], math.unstack(parts.inertia[k])
            moments = jnp.stack([jnp.asarray(base), *(base + x for x in excess)])
            square = math.dot(arm, arm) * np.eye(3) - arm[:, None] * arm[None]
            inertia = (parts.axes[k] * moments[None]) @ parts.axes[k].T + mass * square
            lean = math.cross(e, math.cross(spin, arm)) + math.cross(spin, math.cross(e, arm))
            push = push + mass * math.apply(turn, lean)
            momentum = math.apply(inertia, spin)
            twist = twist + math.cross(e, momentum) + math.cross(spin, math.apply(inertia, e))
        columns.append([*math.unstack(push), *math.unstack(twist)])
    return columns


def runge_kutta(model: Model, data: Data, forward: Callable[[State], Data]) -> Data:
    """Advances by one time step through four forward passes, in a `lax.scan` (mj_RungeKutta).

    The derived fields of `data` must be zero. Those of the result are of the last stage, except that `qacc`
    is the weighted mean of the stages and `sensordata` is of the first, as in MuJoCo, and that `solver_niter`
    and `solver_error` are those of the worst stage. As in MuJoCo, a bad acceleration of the first stage sets
    `diverged`. So does what MuJoCo would find at the next step, as float32 may have no number for it then: a
    later stage that begins with a bad position or velocity, or whose acceleration is not finite.
    """
    h, dtype = model.opt.timestep, data.qpos.dtype

    def move(velocity: jax.Array, qacc: jax.Array, act: jax.Array) -> State:
        qpos, low = integrate_pos(model, data.qpos, data.qpos_low, velocity, h)
        moved = data.qvel + h * qacc
        return data.state._replace(qpos=qpos, qpos_low=low, qvel=moved, act=act)

    def stage(carry: Any, row: Any) -> tuple[Any, None]:
        begun, way, mean_velocity, mean_qacc, mean_rate = carry
        diverged = begun.diverged | ~(is_sane(begun.qpos).all() & is_sane(begun.qvel).all())
        # A lane that has diverged goes on with harmless numbers: in derivatives, 0 times infinity is no 0.
        done = forward(where(diverged, data.state, begun.state))
        velocity = _on_the_way(model, done.qvel, h * way)
        mean_velocity = mean_velocity + row["weight"] * velocity
        mean_qacc = mean_qacc + row["weight"] * done.qacc
        mean_rate = mean_rate + row["weight"] * done.act_dot
        way = row["reach"] * velocity
        act = data.act + h * row["reach"] * done.act_dot
        target = move(way, row["reach"] * done.qacc, act)
        after = done._replace(
            qpos=target.qpos,
            qpos_low=target.qpos_low,
            qvel=target.qvel,
            act=act,
            qacc_warmstart=done.qacc,
            sensordata=jnp.where(row["first"], done.sensordata, begun.sensordata),
            solver_niter=jnp.maximum(begun.solver_niter, done.solver_niter),
            solver_error=jnp.maximum(begun.solver_error, done.solver_error),
            diverged=diverged
            | (row["first"] & ~is_sane(done.qacc).all())
            | ~jnp.isfinite(done.qacc).all(),
        )
        return (after, way, mean_velocity, mean_qacc, mean_rate), None

    none, still = jnp.zeros(model.nv, dtype), jnp.zeros(model.na, dtype)
    rows = {name: math.constant(column, dtype) for name, column in TABLEAU.items()}
    begin = data, none, none, none, still
    (last, _, *means), _ = lax.scan(recomputed(stage), begin, rows)
    velocity, qacc, act_dot = where(last.diverged, [none, none, still], means)
    target = move(velocity, qacc, next_activation(model, data.act, act_dot))
    qvel, qvel_low = math.two_sum(data.qvel, data.qvel_low + h * qacc)
    return last._replace(
        time=data.time + h,
        qpos=target.qpos,
        qpos_low=target.qpos_low,
        qvel=qvel,
        qvel_low=qvel_low,
        act=target.act,
        qacc=qacc,
    )


def where(found: Array, these: Any, others: Any) -> Any:
    """Returns a tree of `these` arrays where a bool is true, of `others` elsewhere."""
    return jax.tree.map(lambda this, other: jnp.where(found, this, other), these, others)


def _on_the_way(model: Model, qvel: jax.Array, way: jax.Array) -> jax.Array:
    """Turns the velocity [nv] at the end of a move by `way` [nv] into the rate of change of `way` itself.

    The two differ only in the rotation of a free joint or a ball: by the inverse of the exponential map's
    derivative. Source: Munthe-Kaas (1998), Runge-Kutta methods on Lie groups.
    """
    v = math.unstack(qvel)
    for _, d in model.turns:
        w, turn = qvel[d : d + 3], way[d : d + 3]
        square = math.dot(turn, turn)
        wide = square > 1
        half = 0.5 * jnp.sqrt(jnp.where(wide, square, 1))
        closed = (1 - half * jnp.cos(half) / jnp.sin(half)) / (4 * half * half)
        # The same number for small turns, for which the closed form would cancel.
        series = 1 / 12 + square * (1 / 720 + square * (1 / 30240 + square / 1209600))
        factor = series + jnp.where(wide, closed - series, 0)
        across = math.cross(turn, w)
        v[d : d + 3] = math.unstack(w + 0.5 * across + factor * math.cross(turn, across))
    return jnp.stack(v)


def integrate_pos(
    model: Model, qpos: jax.Array, qpos_low: jax.Array, qvel: jax.Array, h: float
) -> tuple[jax.Array, jax.Array]:
    """Moves qpos [nq] along qvel [nv] for h seconds (mj_integratePos).

    Returns the new qpos, and the rounding residues of the roots' translations.
    """
    q, low, v = math.unstack(qpos), math.unstack(qpos_low), math.unstack(qvel)
    for j in range(model.njnt):
        i, d = int(model.jnt_qposadr[j]), int(model.jnt_dofadr[j])
        slides = {FREE: 3, BALL: 0}.get(int(model.jnt_type[j]), 1)
        for k in range(slides):
            if d + k in model.root_dofs:
                root = model.root_dofs.index(d + k)
                q[i + k], low[root] = math.two_sum(q[i + k], low[root] + h * v[d + k])
            else:
                q[i + k] = q[i + k] + h * v[d + k]
    for i, d in model.turns:
        q[i : i + 4] = math.unstack(_turn(qpos[i : i + 4], qvel[d : d + 3], h))
    return jnp.stack(q), jnp.stack(low) if low else qpos_low


def _turn(quat: jax.Array, velocity: jax.Array, h: float) -> jax.Array:
    """Rotates a quaternion [4] by an angular velocity [3] in its own frame for h seconds."""
    return math.quat_mul(math.normalize_quat(quat), _spin(velocity, h))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _spin(velocity: jax.Array, h: float) -> jax.Array:
    """Returns the rotation [4] by an angular velocity [3] for h seconds; none if it is nearly zero."""
    square = math.dot(velocity, velocity)
    turning = square > math.MIN_SQUARE
    speed = jnp.sqrt(jnp.where(turning, square, 1))
    half = 0.5 * h * speed
    sine = jnp.where(turning, jnp.sin(half) / speed, 0)
    cosine = jnp.where(turning, jnp.cos(half), 1)
    return jnp.concatenate([cosine[None], sine * velocity])


@_spin.defjvp
def _spin_tangent(h: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Differentiates `_spin`, also at rest, where the rotation is 0.5 h times the velocity."""
    (velocity,), (move,) = primals, tangents
    square = math.dot(velocity, velocity)
    turning = square > math.MIN_SQUARE
    square = jnp.where(turning, square, 1)
    speed = jnp.sqrt(square)
    half = 0.5 * h * speed
    sine = jnp.where(turning, jnp.sin(half) / speed, 0.5 * h)
    bend = jnp.where(turning, (0.5 * h * jnp.cos(half) - sine) / square, 0)
    along = math.dot(velocity, move)
    turn = sine * move + bend * along * velocity
    return _spin(velocity, h), jnp.concatenate([(-0.5 * h * sine * along)[None], turn])
