"""Derivatives of a step: against differences in double precision, MuJoCo's own, and those of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import directional
import mujoco_states as oracle
import numpy_jaxpr
from directional import Inputs, Pieces
from seedbed import physics, simd
from seedbed.physics import slots

CONTACTS, ACTUATORS, LIMITS = (
    ("hopper", oracle.EULER),
    ("reacher", oracle.RK4),
    ("inverted_double_pendulum", oracle.EULER),
)
"""What the default suite is made of: contacts, two actuators in a scheme of four stages, and limits."""
STEPS = 20


def runs(*quick: tuple[str, int]) -> list[Any]:
    """(model, integrator): Euler, and the model's own; slow, but for those named."""
    found = []
    for name in oracle.MODELS:
        own = int(oracle.oracle(oracle.path(name)).opt.integrator)
        for run in sorted({(name, oracle.EULER), (name, own)}):
            found.append(pytest.param(*run, marks=() if run in quick else pytest.mark.slow))
    return found


EULER_RUNS = [
    pytest.param(name, marks=() if (name, oracle.EULER) in (CONTACTS, LIMITS) else pytest.mark.slow)
    for name in oracle.MODELS
]


def count(name: str) -> int:
    return 40 if name.startswith("humanoid") else 100


def classes(model: physics.Model, pieces: Pieces) -> dict[str, np.ndarray]:
    """Which cases [n] have contacts, limits or neither; only the classes that the model can have."""
    # Pusher's object never leaves its table.
    found = {"free": pieces.free} if pieces.free.any() else {}
    if any(slots.pairs(model)):
        found["contact"] = pieces.touching
    if any(model.jnt_limited):
        found["limit"] = pieces.limited
    return found


def report(what: str, kept: np.ndarray, of: dict[str, np.ndarray]) -> None:
    """Prints how many cases are left, and asserts that they are most, and some of every class."""
    parts = [f"{(kept & here).sum()} of {here.sum()} {name}" for name, here in of.items()]
    print(f"{what}: {kept.sum()} of {len(kept)} cases, {', '.join(parts)}")
    assert kept.mean() >= 0.7, what
    for name, here in of.items():
        assert (kept & here).any(), f"{what}: no case of {name}"


# In double precision


@pytest.mark.slow
@pytest.mark.parametrize(("name", "integrator"), runs(CONTACTS))
def test_directional_derivatives_are_differences(name, integrator):
    """Forward mode against differences, and reverse mode against forward mode."""
    model = directional.load(name, integrator)
    given = directional.inputs_of(model, oracle.cases(oracle.path(name), count(name)))
    ways = {kind: directional.directions(model, given, kind) for kind in directional.SIZES}
    wanted, pieces = directional.differences(model, given, ways)
    found = directional.pushed(model, given, ways)
    cotangent = np.random.default_rng(5).normal(size=(len(given.qpos), model.nq + model.nv))
    back = directional.pulled(model, given, cotangent)
    assert not back.qacc_warmstart.any()
    for kind, way in ways.items():
        same, of = wanted[kind].same, classes(model, pieces)
        report(f"{name} {kind}", same, of)
        size = np.linalg.norm(wanted[kind].value, axis=1)
        error = np.linalg.norm(found[kind] - wanted[kind].value, axis=1)
        print(f"    error {(error / np.maximum(size, 1e-300))[same].max():.1e}")
        assert (error <= 1e-6 * size + wanted[kind].rounding)[same].all()
        move = getattr(directional.tangent(model, given, kind, way), kind)
        terms = (getattr(back, kind) * move).reshape(len(move), -1)
        there = cotangent * found[kind]
        scale = np.abs(terms).sum(1) + np.abs(there).sum(1)
        assert (np.abs(terms.sum(1) - there.sum(1)) <= 1e-9 * scale).all()


def transitions(name: str, cases: oracle.Cases, size: float) -> np.ndarray:
    """MuJoCo's derivatives [n, 2 nv, 2 nv + nu] of Euler's steps, by central differences of `size`."""
    compiled = oracle.oracle(oracle.path(name), oracle.EULER)
    data, rows, nv = mujoco.MjData(compiled), [], compiled.nv
    for qpos, qvel, ctrl, warmstart in zip(*cases, strict=True):
        mujoco.mj_resetData(compiled, data)
        data.qpos, data.qvel, data.ctrl, data.qacc_warmstart = qpos, qvel, ctrl, warmstart
        by_state, by_ctrl = np.zeros((2 * nv, 2 * nv)), np.zeros((2 * nv, compiled.nu))
        mujoco.mjd_transitionFD(compiled, data, size, 1, by_state, by_ctrl, None, None)
        rows.append(np.concatenate([by_state, by_ctrl], axis=1))
    return np.stack(rows)


@pytest.mark.quick("inverted_double_pendulum")
@pytest.mark.parametrize("name", EULER_RUNS)
def test_transitions_are_mujocos(name):
    model, size = directional.load(name, oracle.EULER), 1e-6
    cases = oracle.cases(oracle.path(name), 8 if name.startswith("humanoid") else 24)
    given = directional.inputs_of(model, cases, varied=False)
    wanted = transitions(name, cases, size)
    kinds = [("qpos", model.nv), ("qvel", model.nv), ("ctrl", model.nu)]
    n = len(given.qpos)
    columns = [
        (kind, np.tile(np.eye(length)[k], (n, 1))) for kind, length in kinds for k in range(length)
    ]
    tangents = [directional.tangent(model, given, *column) for column in columns]
    ends = [
        directional.moved(model, given, *column, t) for column in columns for t in (size, -size)
    ]
    after, pieces = directional.stepped(model, directional.joined([given, *ends]))
    same = (pieces.flags.reshape(1 + len(ends), n, -1) == pieces.flags[:n]).all(axis=(0, 2))
    change = directional.pushed_along(model, given, tangents)
    found = np.stack([directional.tangent_of(model, after[:n], x) for x in change], axis=2)
    report(name, same, classes(model, Pieces(*(x[:n] for x in pieces))))
    error = np.linalg.norm(found - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))
    print(f"    error {error[same].max():.1e}")
    assert (error <= 1e-4)[same].all()


# Kernels, in single precision


def singles(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def doubles(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x, np.float64), tree)


def shares(found: Any, wanted: Any, kept: np.ndarray) -> np.ndarray:
    """Errors [n, ...] of all elements over their leaf's maximum in their environment, of those `kept`."""
    errors = []
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        rows = [np.asarray(x, np.float64)[kept] for x in (ours, theirs)]
        error, size = (x.reshape(len(x), -1) for x in (np.abs(rows[0] - rows[1]), np.abs(rows[1])))
        most = size.max(axis=1, keepdims=True)
        assert not error[most[:, 0] == 0].any()  # what has no derivative has none here
        errors.append(error / np.where(most > 0, most, 1))
    return np.concatenate(errors, axis=1)


def check_shares(errors: np.ndarray, nearby: Callable[[], np.ndarray]) -> None:
    """99 % within 1e-3, all within 1e-2, but where rounding changes the derivative itself more.

    `nearby` returns, like `errors` [n, ...], what rounding of positions and axes changes in double precision.
    """
    quantile, most = np.quantile(errors, 0.99), errors.max()
    beyond = (errors > 1e-2).any(axis=1)
    print(f"    99 % within {quantile:.1e}, all within {most:.1e}; {beyond.sum()} cases beyond 1 %")
    assert quantile <= 1e-3
    assert beyond.sum() <= 1 and most <= 5e-2
    if beyond.any():
        rounding = nearby().max(axis=1)[beyond]
        print(f"    where rounding alone changes {', '.join(f'{x:.1e}' for x in rounding)}")
        assert (errors[beyond].max(axis=1) <= 4 * rounding).all()


def rounded(model: physics.Model, given: Inputs) -> tuple[physics.Model, Inputs]:
    """Positions, and axes of geoms, moved by a rounding error of single precision.

    A capsule that stands upright on a plane has a tangent that hangs on the last digits of its axis.
    """
    rng, mat = np.random.default_rng(7), model.welds.geom_mat
    welds = model.welds._replace(geom_mat=mat + 6e-8 * rng.normal(size=mat.shape))
    qpos = given.qpos + 6e-8 * rng.normal(size=given.qpos.shape)
    return dataclasses.replace(model, welds=welds), given._replace(qpos=qpos)


def agreeing(model: physics.Model, given: Inputs) -> tuple[np.ndarray, Pieces]:
    """Where single and double precision are on the same piece [n], and the piece of the latter."""
    single = directional.stepped(model, Inputs(*(np.float32(x) for x in given)))[1]
    double = directional.stepped(model, given)[1]
    return (single.flags == double.flags).all(axis=1), double


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("name", "integrator"), runs(ACTUATORS))
def test_a_kernels_gradient_is_that_in_double(name, integrator):
    model = directional.load(name, integrator)
    given = directional.inputs_of(model, oracle.cases(oracle.path(name), count(name)))
    rng = np.random.default_rng(5)
    cotangent = np.float64(np.float32(rng.normal(size=(len(given.qpos), model.nq + model.nv))))
    step = simd.vectorize(directional.stepper(model))
    pull = jax.jit(lambda given, cotangent: jax.vjp(step, given)[1](cotangent)[0])
    found = pull(*singles((given, cotangent)))
    wanted = directional.pulled(model, given, cotangent)
    same, pieces = agreeing(model, given)
    report(name, same, classes(model, pieces))

    def nearby() -> np.ndarray:
        return shares(directional.pulled(*rounded(model, given), cotangent), wanted, same)

    check_shares(shares(found, wanted, same), nearby)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("name", "integrator"), runs(LIMITS))
def test_a_rollouts_gradient_is_that_in_double(name, integrator):
    """Twenty steps: the chain of what double precision makes of the same states."""
    model = directional.load(name, integrator)
    cases = oracle.cases(oracle.path(name), 16 if name.startswith("humanoid") else 48)
    given, rng, n = directional.inputs_of(model, cases), np.random.default_rng(6), len(cases.qpos)
    ctrl = np.float64(np.float32(rng.uniform(-1, 1, (STEPS, n, model.nu))))
    cotangent = np.float64(np.float32(rng.normal(size=(n, model.nq + model.nv))))
    found, states = kernel_rollout(model, given, ctrl, cotangent)
    position, low = doubles(states.qpos), doubles(states.qpos_low)
    position[..., : low.shape[-1]] += low
    states = doubles(states._replace(qpos=position))
    steps = [
        given._replace(
            qpos=states.qpos[t],
            qvel=states.qvel[t],
            ctrl=ctrl[t],
            qacc_warmstart=states.qacc_warmstart[t],
        )
        for t in range(STEPS)
    ]
    wanted = chained(model, steps, cotangent)
    same, pieces = agreeing(model, directional.joined(steps))
    same = same.reshape(STEPS, n).all(axis=0)
    of = classes(model, pieces)
    report(name, same, {k: here.reshape(STEPS, n).any(axis=0) for k, here in of.items()})
    found = *found[:4], np.moveaxis(np.asarray(found[4]), 1, 0)

    def nearby() -> np.ndarray:
        moved = [rounded(model, step) for step in steps]
        near = chained(moved[0][0], [each for _, each in moved], cotangent)
        return shares(near, wanted, same)

    check_shares(shares(found, wanted, same), nearby)


def chained(
    model: physics.Model, steps: list[Inputs], cotangent: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The gradients of `kernel_rollout` by the pull-backs of its steps; by controls they are [n, T, nu]."""
    pull = numpy_jaxpr.prepare(jax.vmap(directional.puller(model)), steps[0], cotangent)
    total, by_ctrl = Inputs(*(np.zeros_like(x) for x in steps[0])), []
    for step in reversed(steps):
        back = pull(step, cotangent)
        total = Inputs(*(a + b for a, b in zip(total, back, strict=True)))
        by_ctrl.insert(0, back.ctrl)
        cotangent = np.concatenate([back.qpos, back.qvel], axis=1)
    by_start = back.qpos, back.qvel, total.body_mass, total.geom_friction
    return *by_start, np.stack(by_ctrl, axis=1)


def kernel_rollout(
    model: physics.Model, given: Inputs, ctrl: np.ndarray, cotangent: np.ndarray
) -> tuple[tuple[jax.Array, ...], physics.State]:
    """Gradients of a loss of the last state, and the states [T, n, ...] before the steps.

    The gradients are by qpos, qvel, masses, frictions and controls [T, n, nu].
    """

    def one(state: physics.State, ctrl: Any, mass: Any, friction: Any) -> physics.State:
        return physics.step(model.replace(body_mass=mass, geom_friction=friction), state, ctrl)

    step = simd.vectorize(one)
    given, ctrl, cotangent = singles((given, ctrl, cotangent))
    blank = jax.vmap(lambda qpos: physics.init(model, qpos))(given.qpos)

    def loss(qpos: Any, qvel: Any, mass: Any, friction: Any, ctrl: Any) -> tuple[Any, Any]:
        start = blank._replace(qpos=qpos, qvel=qvel, qacc_warmstart=given.qacc_warmstart)
        last, states = jax.lax.scan(
            lambda state, ctrl: (step(state, ctrl, mass, friction), state), start, ctrl
        )
        return (jnp.concatenate([last.qpos, last.qvel], axis=1) * cotangent).sum(), states

    by = given.qpos, given.qvel, given.body_mass, given.geom_friction, ctrl
    return jax.jit(jax.grad(loss, argnums=range(5), has_aux=True))(*by)
