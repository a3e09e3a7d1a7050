"""What a page runs: a task and a policy as functions of a WebAssembly module, and where their numbers are.

Each function takes a block of four-byte words, the leaves of its arguments one after another, and writes such
a block. The state of the environment is one block of them, which the page carries from step to step.
"""

from __future__ import annotations

import collections
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.envs.device.mujoco import MujocoTask
from seedbed.run.deployed import Policy, PolicyInput, initial_memory, step_of
from seedbed.run.leaves import array_of, shape_and_dtype
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import Program
from seedbed.simd.schedule.plan import Liveness
from seedbed.simd.vectorize import trace_example
from seedbed.spaces import PRIVILEGED, action_array, without
from seedbed.types import Array, EnvState, Tree

mujoco: Any = importlib.import_module("mujoco")  # a package without types
_OF_JOINT = mujoco.mjtTrn.mjTRN_JOINT.value


class Part(NamedTuple):
    """A function of a module, and the arrays that it reads from elsewhere."""

    program: Program
    shared: list[np.ndarray]
    reads: int  # words of its arguments
    writes: int  # words of its result


class Look(NamedTuple):
    """The numbers of a state that a page draws."""

    position: Array  # [bodies, 3] m, of the bodies that are drawn
    quaternion: Array  # [bodies, 4] w x y z
    target: Array  # [3] m, where the camera looks
    centre: Array  # [nbody, 3] m, of mass
    force: Array  # [nbody, 3] N, of contacts, and of equality constraints that hold bodies
    point: Array  # [nbody, 3] m, of a line along which the force acts
    sensors: Array  # [nsensordata]
    actuators: Array  # [nu] N and N m
    command: Array  # [commands] what the task has been told


class Played(NamedTuple):
    """A task and a policy to be compiled."""

    parts: dict[str, Part]
    layout: dict[str, Any]  # JSON: where the page finds what it shows
    memory: np.ndarray  # uint32 words of the policy's memory at the start


def played(env: MujocoTask, policy: Policy | None, bodies: Sequence[int], followed: int) -> Played:
    """Traces a task, and the policy that acts in it.

    `bodies` are the numbers of those that are drawn, and the camera follows the subtree of `followed`, or
    nothing for -1. Raises Unsupported if a function has no kernel.
    """
    key = jax.random.key(0)
    state = jax.eval_shape(env.reset, key)
    action = _struct(action_array(env.spec.action))
    model = env.physics_model()
    pull = jax.ShapeDtypeStruct((model.nbody, 6), jnp.float32)

    def look(state: EnvState, before: EnvState, action: Array, pull: Array) -> Look:
        return _look(env, (state, before, action, pull), bodies, followed)

    parts = {
        "reset": _part("reset", env.reset, [key]),
        "step": _part("step", env.pulled, [state, action, pull]),
        "look": _part("look", look, [state, state, action, pull]),
    }
    if env.commands:
        command = jax.ShapeDtypeStruct((len(env.commands),), jnp.float32)
        parts["command"] = _part("command", env.commanded, [state, command])
    memory: Tree = ()
    if policy is not None:
        memory = initial_memory(policy, 1)
        parts["act"] = _act(policy, memory, state)
    seen = jax.eval_shape(look, state, state, action, pull)
    return Played(parts, _layout(env, state, seen), words(memory))


def words(tree: Tree) -> np.ndarray:
    """Returns the words of a tree's leaves, uint32; bools are 0 or 1, and keys are their data."""
    leaves = [_data(leaf) for leaf in jax.tree.leaves(tree)]
    parts = [
        leaf.astype(np.uint32) if leaf.dtype == bool else leaf.view(np.uint32) for leaf in leaves
    ]
    return np.concatenate([np.zeros(0, np.uint32), *(part.reshape(-1) for part in parts)])


def with_params(act: Part, params: Tree) -> list[np.ndarray]:
    """Returns what the part `act` reads from elsewhere if the policy has other parameters."""
    leaves = map(_data, jax.tree.leaves(params))
    fresh = [leaf if old.size else old for leaf, old in zip(leaves, act.shared, strict=False)]
    return [*fresh, *act.shared[len(fresh) :]]


def _part(name: str, function: Callable[..., Tree], arguments: list[Any], shared: int = 0) -> Part:
    """Traces a function; the leaves of its first `shared` arguments are not in its block."""
    example = trace_example(function, name, (tuple(arguments), {}))
    first = len(jax.tree.leaves(arguments[:shared]))
    mine = len(example.closed.in_avals) - first - len(example.shared)
    flags = [True] * first + [False] * mine + [True] * len(example.shared)
    program = trace(example.closed, flags)
    read = {node.value[0] for node in Liveness(program).nodes if node.op in ("input", "operand")}
    outside = [*jax.tree.leaves(arguments[:shared]), *example.shared]
    numbers = [*range(first), *range(first + mine, len(flags))]
    outside = [
        _data(x) if i in read else np.zeros(0) for i, x in zip(numbers, outside, strict=True)
    ]
    reads = sum(operand.nodes.size for operand in program.inputs if not operand.shared)
    writes = sum(operand.nodes.size for operand in program.outputs)
    return Part(program, outside, reads, writes)


def _act(policy: Policy, memory: Tree, state: EnvState) -> Part:
    step = step_of(policy)

    def act(params: Tree, memory: Tree, state: EnvState) -> tuple[Tree, Tree]:
        now = state.timestep
        seen = without(now.observation, PRIVILEGED)
        given = jax.tree.map(lambda x: x[None], PolicyInput(seen, now.reward, now.first))
        chosen, memory = step(params, memory, given)
        return chosen[0], memory

    return _part("act", act, [policy.params, memory, state], shared=1)


def _look(
    env: MujocoTask,
    given: tuple[EnvState, EnvState, Array, Array],
    bodies: Sequence[int],
    followed: int,
) -> Look:
    model, (now, applied) = env.physics_model(), env.look(*given)
    roots = np.asarray(model.body_rootid)
    # Of the bodies' forces from outside, without what a player or the task applies.
    force = now.cfrc_ext[:, 3:] - applied[:, :3]
    arm = now.xipos - now.subtree_com[roots]
    torque = now.cfrc_ext[:, :3] - applied[:, 3:] - jnp.cross(arm, applied[:, :3])
    size = jnp.square(force).sum(axis=1, keepdims=True)
    offset = jnp.cross(force, torque) / jnp.maximum(size, 1e-12)
    still = jnp.zeros(3, jnp.float32)
    drawn = np.asarray(bodies, int)
    return Look(
        position=now.xpos[drawn],
        quaternion=now.xquat[drawn],
        target=now.subtree_com[followed] if followed >= 0 else still,
        centre=now.xipos,
        force=force,
        point=now.subtree_com[roots] + offset,
        sensors=now.sensordata,
        actuators=now.actuator_force,
        command=env.command_of(given[0]),
    )


def _layout(env: MujocoTask, state: EnvState, look: Look) -> dict[str, Any]:
    """Returns where in the blocks of a state and of a look is what the page reads, in words."""
    at, seen = _places(state), _places(look)
    model = env.physics_model()
    channels = [{"name": "reward", "block": "state", "at": int(at.timestep.reward)}]
    for name, place in sorted(at.metrics.items()):
        channels.append({"name": name, "block": "state", "at": int(place)})
    taken = {channel["name"] for channel in channels}
    for number, sensor in enumerate(model.sensors):
        own = sensor.name if sensor.name and sensor.name not in taken else f"sensor {number}"
        for k in range(sensor.dim if sensor.simulated else 0):
            name = f"{own}{f'[{k}]' if sensor.dim > 1 else ''}"
            place = int(seen.sensors[sensor.adr + k])
            channels.append({"name": name, "block": "look", "at": place})
    for i, name in enumerate(actuator_names(env)):
        place = int(seen.actuators[i])
        channels.append({"name": f"force of {name}", "block": "look", "at": place})
    first = {name: int(places.flat[0]) for name, places in seen._asdict().items() if places.size}
    return {
        "terminated": int(at.timestep.terminated),
        "reward": int(at.timestep.reward),
        "look": first,
        "channels": channels,
    }


def actuator_names(env: MujocoTask) -> list[str]:
    """Returns the names of the actuators; of one without a name, that of its joint, or its number.

    Where several would have one name, such as a servo and a damper of one joint, it has their numbers, too.
    """
    compiled = env.compiled()
    named = []
    for i in range(compiled.nu):
        joint = compiled.actuator_trntype[i] == _OF_JOINT
        of = compiled.joint(int(compiled.actuator_trnid[i, 0])).name if joint else ""
        named.append(compiled.actuator(i).name or of or f"actuator {i}")
    many = collections.Counter(named)
    return [f"{name} ({i})" if many[name] > 1 else name for i, name in enumerate(named)]


def _places(tree: Tree) -> Any:
    """Returns a tree of the numbers of the words of a tree of structs, in a block of its leaves."""
    leaves, form = jax.tree.flatten(tree)
    found, begin = [], 0
    for leaf in leaves:
        shape, _ = shape_and_dtype(leaf)
        size = int(np.prod(shape, dtype=int))
        found.append(np.arange(begin, begin + size).reshape(shape))
        begin += size
    return jax.tree.unflatten(form, found)


def _data(leaf: Any) -> np.ndarray:
    return np.ascontiguousarray(array_of(leaf))


def _struct(spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
