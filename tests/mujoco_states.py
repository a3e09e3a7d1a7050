"""MuJoCo as the oracle: the eleven models, states along its rollouts and what it makes of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from seedbed import physics

ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
MODELS = (
    "ant",
    "half_cheetah",
    "hopper",
    "walker2d_v5",
    "swimmer",
    "reacher",
    "inverted_pendulum",
    "inverted_double_pendulum",
    "pusher_v5",
    "humanoid",
    "humanoidstandup",
)
EULER, RK4 = int(mujoco.mjtIntegrator.mjINT_EULER), int(mujoco.mjtIntegrator.mjINT_RK4)


class Cases(NamedTuple):
    """States and controls that float32 holds exactly, as float64 [n, ...]."""

    qpos: np.ndarray
    qvel: np.ndarray
    ctrl: np.ndarray
    qacc_warmstart: np.ndarray


def path(name: str) -> Path:
    return ASSETS / f"{name}.xml"


def oracle(source: Path | str, integrator: int | None = None) -> Any:
    """Compiles a model whose constraint problem is solved as far as MuJoCo goes."""
    is_xml = isinstance(source, str)
    compile_ = mujoco.MjModel.from_xml_string if is_xml else mujoco.MjModel.from_xml_path
    model = compile_(str(source))
    model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    model.opt.tolerance, model.opt.iterations = 1e-12, 100
    if integrator is not None:
        model.opt.integrator = integrator
    return model


@functools.cache
def cases(source: Path | str, count: int, seed: int = 0) -> Cases:
    """States along MuJoCo rollouts of 300 steps under random controls beyond their range."""
    model, rng = oracle(source), np.random.default_rng(seed)
    data, found = mujoco.MjData(model), []
    span = np.where(model.actuator_ctrllimited, model.actuator_ctrlrange[:, 1], 1)
    while len(found) < count:
        mujoco.mj_resetData(model, data)
        mujoco.mj_integratePos(model, data.qpos, rng.normal(size=model.nv), 0.05)
        data.qvel = rng.normal(size=model.nv)
        for t in range(300):
            if t % 5 == 0:
                data.ctrl = span * rng.uniform(-1.3, 1.3, model.nu)
            if t % 15 == 14:
                fields = data.qpos, data.qvel, data.ctrl, data.qacc_warmstart
                found.append([np.float64(np.float32(x)) for x in fields])
            mujoco.mj_step(model, data)
    return Cases(*(np.stack(column) for column in zip(*found[:count], strict=True)))


def after_forward(model: Any, cases: Cases, fields: Sequence[str]) -> dict[str, np.ndarray]:
    """Fields of mjData [n, ...] after mj_forward; "M" is the full mass matrix."""
    rows = []
    data = mujoco.MjData(model)
    for qpos, qvel, ctrl, warmstart in zip(*cases, strict=True):
        _set(model, data, qpos, qvel, ctrl, warmstart)
        mujoco.mj_forward(model, data)
        row = {name: np.array(getattr(data, name)) for name in fields if name != "M"}
        if "M" in fields:
            row["M"] = np.zeros((model.nv, model.nv))
            mujoco.mj_fullM(model, data, row["M"])
        rows.append(row)
    return {name: np.stack([row[name] for row in rows]) for name in fields}


def after_step(
    model: Any,
    cases: Cases,
    fields: Sequence[str],
    acting: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Fields of mjData [n, ...] after mj_step and mj_rnePostConstraint, under inputs by their names."""
    rows = []
    data = mujoco.MjData(model)
    for i, (qpos, qvel, ctrl, warmstart) in enumerate(zip(*cases, strict=True)):
        _set(model, data, qpos, qvel, ctrl, warmstart)
        for name, value in (acting or {}).items():
            getattr(data, name)[:] = value[i]
        mujoco.mj_step(model, data)
        mujoco.mj_rnePostConstraint(model, data)
        rows.append({name: np.array(getattr(data, name)) for name in fields})
    return {name: np.stack([row[name] for row in rows]) for name in fields}


def step_error(model: Any, cases: Cases, qvel: np.ndarray) -> np.ndarray:
    """Error [n] of the velocity after a step relative to max(|dv|, h |qacc_smooth|, 0.02 |v|)."""
    wanted = after_step(model, cases, ["qvel"])["qvel"]
    smooth = after_forward(model, cases, ["qacc_smooth"])["qacc_smooth"]
    scales = wanted - cases.qvel, model.opt.timestep * smooth, 0.02 * cases.qvel
    scale = np.max([np.linalg.norm(x, axis=1) for x in scales], axis=0)
    error = np.linalg.norm(qvel - wanted, axis=1)
    # A body may be at rest in both.
    return np.where(error == 0, 0, error / np.where(error == 0, 1, scale))


def _set(model: Any, data: Any, *fields: np.ndarray) -> None:
    mujoco.mj_resetData(model, data)
    data.qpos, data.qvel, data.ctrl, data.qacc_warmstart = fields


def states(model: physics.Model, qpos: np.ndarray, qvel: np.ndarray) -> physics.State:
    blank = physics.init(model)
    batch = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(qpos), *x.shape)), blank)
    return batch._replace(qpos=jnp.asarray(qpos, jnp.float32), qvel=jnp.asarray(qvel, jnp.float32))
