"""Rolls the scenes of conservation.py with MJX or one of Brax's back ends; runs in its own environment.

    python brax_conservation.py generalized SCENE.npz OUT.npz

SCENE holds the model's text, velocities, torques and step sizes; OUT gets for each step size either positions
and velocities after a second or, from back ends with coordinates of each body, momentum, angular momentum
and energy before and after, with the masses that the back end moves. Everything is float32. The spring and
positional back ends have the settings of Brax's own humanoid: springs and dampers that hold bodies, and
inertias of 1 kg m2. Its dampers of angles are off: they act along the joints, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CUSTOM = """<custom><numeric name="constraint_stiffness" data="27000"/>
<numeric name="constraint_ang_damping" data="0"/><numeric name="constraint_vel_damping" data="80"/>
<numeric name="joint_scale_pos" data="0.5"/><numeric name="joint_scale_ang" data="0.1"/>
<numeric name="ang_damping" data="0"/><numeric name="vel_damping" data="0"/>
<numeric name="spring_mass_scale" data="0"/><numeric name="spring_inertia_scale" data="1"/></custom>"""


def roll(
    step: Callable[[Any, jax.Array, jax.Array], Any],
    begun: Any,
    scene: dict[str, Any],
    ms: jax.Array,
) -> Any:
    """Runs a second of all seeds; `step` takes a state, the step size in s and a torque of each dof.

    The step size in ms is an input, so that all sizes share a program.
    """
    held = jnp.asarray(scene["torque"], jnp.float32)

    def one(number: jax.Array, state: Any) -> Any:
        interval = (number * (ms / scene["held_ms"]) + 1e-4).astype(jnp.int32)
        torque = jax.lax.dynamic_index_in_dim(held, interval, 1, keepdims=False)
        return jax.vmap(step, (0, None, 0))(state, ms / 1000, torque)

    return jax.lax.fori_loop(0, jnp.round(1000 / ms).astype(jnp.int32), one, begun)


def mjx_steps(scene: dict[str, Any]) -> tuple[Callable[..., Any], Any, Callable[[Any], Any]]:
    """Returns a step of MJX's, the states at the start, and what reads a state."""
    import mujoco
    from mujoco import mjx

    text, kind = str(scene["xml"]), str(scene["integrator"])
    plain = mujoco.MjModel.from_xml_string(text)
    plain.opt.integrator = getattr(mujoco.mjtIntegrator, f"mjINT_{kind.upper()}")
    model = mjx.put_model(plain)
    data = mjx.make_data(model)

    def step(state: Any, dt: jax.Array, torque: jax.Array) -> Any:
        timed = model.tree_replace({"opt.timestep": dt})
        return mjx.step(timed, state.replace(qfrc_applied=torque))

    qvel = jnp.asarray(scene["qvel"], jnp.float32)
    begun = jax.vmap(lambda v: data.replace(qvel=v))(qvel)
    return step, begun, lambda state: {"qpos": state.qpos, "qvel": state.qvel}


def brax_steps(
    engine: str, scene: dict[str, Any]
) -> tuple[Callable[..., Any], Any, Callable[[Any], Any]]:
    """Returns a step of a back end of Brax's, the states at the start, and what reads a state."""
    import importlib

    from brax import math
    from brax.io import mjcf

    text = str(scene["xml"]).replace("<worldbody>", CUSTOM + "<worldbody>", 1)
    system = mjcf.loads(text)
    pipeline: Any = importlib.import_module(f"brax.{engine}.pipeline")

    def step(state: Any, dt: jax.Array, torque: jax.Array) -> Any:
        timed = system.tree_replace({"opt.timestep": dt})
        drive = system.actuator
        action = torque[drive.qd_id] / drive.gear if drive.qd_id.size else jnp.zeros(0)
        return pipeline.step(timed, state, action)

    place = jnp.asarray(scene["qpos"], jnp.float32)
    begun = jax.vmap(lambda v: pipeline.init(system, place, v))(
        jnp.asarray(scene["qvel"], jnp.float32)
    )

    def of_bodies(state: Any) -> jax.Array:
        """Returns momentum, angular momentum about the centre of mass and kinetic energy [7]."""
        place, moved, mass = state.x_i.pos, state.xd_i, state.mass[:, None]
        turned = jax.vmap(math.quat_to_3x3)(
            jax.vmap(math.quat_mul)(state.x_i.rot, system.link.inertia.transform.rot)
        )
        own = system.link.inertia.i ** (1 - system.spring_inertia_scale) * jnp.eye(3)
        inertia = turned @ own @ jnp.swapaxes(turned, 1, 2)
        spin = jnp.einsum("nij,nj->ni", inertia, moved.ang)
        momentum = (mass * moved.vel).sum(0)
        arm = place - (mass * place).sum(0) / mass.sum()
        turn = (mass * jnp.cross(arm, moved.vel) + spin).sum(0)
        energy = 0.5 * ((mass * moved.vel**2).sum() + (spin * moved.ang).sum())
        return jnp.concatenate([momentum, turn, energy[None]])

    if engine == "generalized":
        return step, begun, lambda state: {"qpos": state.q, "qvel": state.qd}
    return step, begun, lambda state: {"conserved": jax.vmap(of_bodies)(state)}


def main() -> None:
    """Rolls each step size and writes the ends."""
    engine, given, out = sys.argv[1:]
    scene = dict(np.load(given))
    step, begun, read = mjx_steps(scene) if engine == "mjx" else brax_steps(engine, scene)
    found = {f"before.{name}": np.asarray(x) for name, x in read(begun).items()}
    run = jax.jit(lambda state, ms: read(roll(step, state, scene, ms)))
    for ms in scene["steps_ms"]:
        ends = jax.device_get(run(begun, np.float32(ms)))
        found |= {f"{ms:g}.{name}": np.asarray(x) for name, x in ends.items()}
    np.savez(Path(out), **found)


if __name__ == "__main__":
    main()
