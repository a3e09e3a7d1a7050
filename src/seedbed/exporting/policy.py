"""A policy as a function of arrays: the evaluating `act` of an agent, with its frames and memory outside."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import onnx
from jax import export

from seedbed import trees
from seedbed.exporting.graph import Graph
from seedbed.exporting.translate import MOST_ROUNDS, Held, constants, translate
from seedbed.ops.tracing import naming
from seedbed.run.deployed import Policy, initial_memory, input_specs, step_of
from seedbed.run.leaves import array_of, named_leaves
from seedbed.run.operations import Operand, Program, Value, flatten
from seedbed.types import ArraySpec, SeedbedError, Tree

ACTION, OBSERVATION, REWARD, FIRST, NEXT = "action", "observation", "reward", "first", "next"
"""Names of arrays; the arrays of a tree are named `observation.part`, the next memory `next.part`."""


class MemoryEntry(NamedTuple):
    """An array of the memory, which a graph both takes and gives."""

    name: str
    initial: np.ndarray  # of one environment, without a batch axis
    is_action: bool  # the next one is the action


class PolicyGraph(NamedTuple):
    """An exported policy."""

    model: onnx.ModelProto
    inputs: dict[str, ArraySpec]  # without memory, and without what the policy does not read
    memory: tuple[MemoryEntry, ...]
    outputs: dict[str, ArraySpec]  # without memory
    draws: bool  # evaluations draw the action; the graph takes the median of every random number
    single: str  # why the graph takes one environment at a time; "" if it takes any number


class Step(NamedTuple):
    """A traced step of a policy."""

    program: Program
    params: list[tuple[Value, str, np.ndarray]]
    memory: dict[str, Value]
    given: dict[str, Value]
    action: dict[str, Operand]
    following: dict[str, Operand]  # the next memory


def trace(policy: Policy, batch: Any, platform: str = "") -> Step:
    """Traces a policy's step for a batch, which may be symbolic, on a platform, or "" for any."""

    def shaped(array: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *shape), array.dtype)

    memory = jax.tree.map(lambda x: shaped(x, x.shape[1:]), initial_memory(policy, 1))
    given = trees.map(lambda leaf: shaped(leaf, leaf.shape), input_specs(policy))
    closed, shapes = jax.make_jaxpr(step_of(policy), return_shape=True)(
        policy.params, memory, given
    )
    program = flatten(closed, platform, MOST_ROUNDS)
    values, results = iter(program.inputs), iter(program.outputs)
    params = [
        (next(values), name, np.asarray(array_of(leaf)))
        for name, leaf in named_leaves(policy.params)
    ]
    actions = dict(zip(_names(shapes[0], ACTION), results, strict=False))
    return Step(
        program=program,
        params=params,
        memory={name: next(values) for name in _names(memory)},
        given={name: next(values) for name in input_names(policy)},
        action=actions,
        following=dict(zip(_names(shapes[1]), results, strict=True)),
    )


def input_names(policy: Policy) -> list[str]:
    """Returns the names of the arrays of a `PolicyInput`, in its order."""
    return [*_names(policy.spec.observation, OBSERVATION), REWARD, FIRST]


def _names(tree: Tree, part: str = "") -> list[str]:
    return [name for name, _ in named_leaves(tree, part)]


def build(policy: Policy, properties: Mapping[str, str] = MappingProxyType({})) -> PolicyGraph:
    """Makes the graph of a policy; raises SeedbedError if a part of `act` has no form in ONNX.

    The model carries `properties`. The graph takes any number of environments. If `act` cannot be traced so,
    it takes one at a time.
    """
    (batch,), single = export.symbolic_shape("batch"), ""
    try:
        step = trace(policy, batch)
    except SeedbedError:
        raise
    except Exception as error:
        batch, single = 1, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        with naming(f"{type(policy.agent).__name__}.act", "docs/export.md"):
            step = trace(policy, batch)
    wanted = {**step.action, **_named_outputs(step.program, batch)}
    following, needed = _needed_memory(step, wanted)
    graph = Graph(batch)
    inputs: dict[Value, Held] = constants(
        graph, [each for each in step.params if each[0] in needed]
    )
    read = {name: value for name, value in step.given.items() if value in needed}
    held = {name: value for name, value in step.memory.items() if name in following}
    if not read:
        raise SeedbedError(
            f"{type(policy.agent).__name__}.act reads no observation: nothing to export"
        )
    for name, value in {**read, **held}.items():
        inputs[value] = graph.input(name, value.shape, value.dtype)
    later = {f"{NEXT}.{name}": operand for name, operand in following.items()}
    translate(graph, step.program, inputs, {**wanted, **later})
    chosen, _ = step.program.needed(step.action.values())
    return PolicyGraph(
        model=graph.model({"batch": "1" if single else "any", **properties}),
        inputs={name: _spec(value) for name, value in read.items()},
        memory=_entries(policy, step, following),
        outputs={name: _spec(operand) for name, operand in wanted.items()},
        draws=any(operation.primitive.name == "random_bits" for operation in chosen),
        single=single,
    )


def _needed_memory(step: Step, wanted: dict[str, Operand]) -> tuple[dict[str, Operand], set[Value]]:
    """Returns the next memory, by name, of what acting ever reads, and all values that are read."""
    following: dict[str, Operand] = {}
    while True:
        _, needed = step.program.needed([*wanted.values(), *following.values()])
        missing = [
            name for name, value in step.memory.items() if value in needed and name not in following
        ]
        if not missing:
            return following, needed
        following.update((name, step.following[name]) for name in missing)


def _named_outputs(program: Program, batch: Any) -> dict[str, Operand]:
    """Returns what the agent has named with `checkpoint_name`, if its first axis is the batch."""
    reserved = {ACTION, OBSERVATION, REWARD, FIRST, NEXT}
    if taken := reserved & program.names.keys():
        raise SeedbedError(
            f"the agent's act names a value {min(taken)!r}, which is a name of Seedbed's: choose another"
        )
    return {
        name: operand
        for name, operand in program.names.items()
        if operand.shape and operand.shape[0] == batch
    }


def _entries(policy: Policy, step: Step, following: dict[str, Operand]) -> tuple[MemoryEntry, ...]:
    initial = dict(named_leaves(initial_memory(policy, 1)))
    actions = [operand for operand in step.action.values() if isinstance(operand, Value)]
    return tuple(
        MemoryEntry(name, np.asarray(initial[name])[0], any(operand is x for x in actions))
        for name, operand in following.items()
    )


def _spec(operand: Operand) -> ArraySpec:
    return ArraySpec(tuple(operand.shape[1:]), str(operand.dtype))
