"""Simulated seconds per second of Brax's spring back end or of MJX; runs in its own environment.

    python brax_physics.py spring ant                 # Brax's own model
    python brax_physics.py mjx path/to/ant.xml        # one Newton iteration, four of the line search
    python brax_physics.py mjx path/to/ant.xml 8192   # of so many at once, instead of 512

MJX is set up as its documentation advises for speed: Euler, one Newton iteration. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

SECONDS, CALL = 12.0, 20


def measure(step: Callable[[Any, Any], Any], state: Any, draw: Any, dt: float, n: int) -> dict:
    """Steps a batch of n under fresh random controls, CALL at a time, in one program."""

    @jax.jit
    def run(state: Any, key: jax.Array) -> Any:
        keys = jax.random.split(key, CALL)
        return jax.lax.scan(lambda s, k: (step(s, draw(k)), None), state, keys)[0]

    state = jax.block_until_ready(run(state, jax.random.key(0)))
    calls, cpu, start = 0, time.process_time(), time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        state = jax.block_until_ready(run(state, jax.random.key(calls)))
        calls += 1
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    steps = calls * CALL * n
    return {
        "simulated_s_per_s": steps * dt / wall,
        "steps_per_s": steps / wall,
        "cpu_s": cpu / wall,
    }


def spring(name: str, n: int) -> dict:
    """Measures an environment of Brax's."""
    from brax import envs

    env = envs.get_environment(name, backend="spring")
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(1), n))

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (n, env.action_size), minval=-1.0, maxval=1.0)

    return measure(jax.vmap(env.step), state, draw, float(env.dt), n)


def mjx(path: str, n: int) -> dict:
    """Measures a model in MJX."""
    import mujoco
    from mujoco import mjx

    model = mujoco.MjModel.from_xml_path(path)
    model.opt.integrator = mujoco.mjtIntegrator.mjINT_EULER
    model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    model.opt.iterations, model.opt.ls_iterations = 1, 4
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_EULERDAMP
    on_device = mjx.put_model(model)
    data = mjx.make_data(model)
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), data)

    def step(data: Any, ctrl: jax.Array) -> Any:
        return jax.vmap(lambda d, c: mjx.step(on_device, d.replace(ctrl=c)))(data, ctrl)

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (n, model.nu), minval=-1.0, maxval=1.0)

    return measure(step, state, draw, float(model.opt.timestep), n)


if __name__ == "__main__":
    kind, what, *count = sys.argv[1:]
    print(json.dumps({"spring": spring, "mjx": mjx}[kind](what, int(*count or [512]))))
