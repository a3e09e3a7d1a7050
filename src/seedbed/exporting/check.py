"""Compares an exported graph, run by onnxruntime, with the policy in JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import onnxruntime

from seedbed.exporting.policy import (
    FIRST,
    NEXT,
    OBSERVATION,
    REWARD,
    PolicyGraph,
    input_names,
    trace,
)
from seedbed.ops.masks import FORBIDDEN
from seedbed.run.deployed import (
    Policy,
    PolicyInput,
    PolicyMemory,
    initial_memory,
    input_specs,
    step_of,
)
from seedbed.run.leaves import array_of, named_leaves
from seedbed.run.operations import Program, Value
from seedbed.spaces import ACTION_MASK
from seedbed.types import ArraySpec, SeedbedError, Tree

TOLERANCE = 1e-5
"""The largest error of an output, relative to its largest number."""
_STEPS, _BATCH = 6, 5
"""The steps of the check at export, and the environments in each."""

Arrays = dict[str, np.ndarray]
"""The arrays of one step by name: input, memory or output."""


class Difference(NamedTuple):
    """How far the outputs of a graph were from those of JAX."""

    largest: dict[str, float]  # largest error of each output; 1 if a whole number differs
    # The largest number of each output, but for the scores of forbidden choices; 1 for whole numbers.
    scale: dict[str, float]

    def relative(self) -> dict[str, float]:
        """Returns the largest error of each output, relative to the output's largest number."""
        return {name: error / max(self.scale[name], 1e-30) for name, error in self.largest.items()}


def open_session(model: bytes) -> onnxruntime.InferenceSession:
    """Opens a model on the CPU; raises SeedbedError if onnxruntime cannot run it."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise SeedbedError(f"onnxruntime cannot run the exported graph: {text}") from error


class Reference:
    """The policy in JAX, with every random number at its median, on arrays by name.

    For one thread at a time.
    """

    def __init__(self, policy: Policy, batch: int) -> None:
        self._policy, self._batch = policy, batch
        self._step = step_of(policy)
        # Named values exist only inside `act`. Here they are computed on this machine's own way, while a
        # graph is translated from the way of all other machines.
        traced = trace(policy, batch, jax.default_backend())
        self._names = {
            name: operand
            for name, operand in traced.program.names.items()
            if operand.shape and operand.shape[0] == batch
        }
        self._program = traced.program
        self._run = jax.jit(self._outputs)

    def __call__(self, memory: Arrays, given: Arrays) -> Arrays:
        """Returns the actions, the named values and the next memory, by their names in a graph."""
        memory_tree = _tree(initial_memory(self._policy, self._batch), memory, "")
        specs = input_specs(self._policy)
        values = [given[name] for name in input_names(self._policy)]
        given_tree = jax.tree.unflatten(jax.tree.structure(specs, is_leaf=_is_spec), values)
        made = self._run(self._policy.params, memory_tree, given_tree)
        return {name: np.asarray(array_of(x)) for name, x in made.items()}

    def initial(self) -> Arrays:
        """Returns the memory before the first step, by name."""
        return {
            name: np.asarray(array_of(x))
            for name, x in named_leaves(initial_memory(self._policy, self._batch))
        }

    def _outputs(self, params: Tree, memory: PolicyMemory, given: PolicyInput) -> dict[str, Any]:
        action, following = self._step(params, memory, given)
        inputs = jax.tree.leaves((params, memory, given))
        named = _evaluate(self._program, inputs, self._names)
        return {
            **named,
            **dict(named_leaves(action, "action")),
            **dict(named_leaves(following, NEXT)),
        }


def _evaluate(program: Program, inputs: list[Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    held: dict[Value, Any] = dict(zip(program.inputs, inputs, strict=True))

    def value(operand: Any) -> Any:
        return held[operand] if isinstance(operand, Value) else operand

    for operation in program.needed(wanted.values())[0]:
        made = operation.primitive.bind(*map(value, operation.operands), **operation.params)
        made = made if operation.primitive.multiple_results else [made]
        held.update(zip(operation.results, made, strict=True))
    return {name: value(operand) for name, operand in wanted.items()}


def _tree(template: Tree, arrays: Arrays, part: str) -> Tree:
    leaves = [arrays[name] for name, _ in named_leaves(template, part)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _is_spec(node: Any) -> bool:
    return isinstance(node, ArraySpec)


def compare(
    session: onnxruntime.InferenceSession,
    reference: Callable[[Arrays, Arrays], Arrays],
    memory: Arrays,
    inputs: Iterator[Arrays],
) -> Difference:
    """Runs a graph and JAX on the same inputs, each step from the memory that JAX has reached."""
    largest: dict[str, float] = {}
    scale: dict[str, float] = {}
    names = [output.name for output in session.get_outputs()]
    for given in inputs:
        expected = reference(memory, given)
        fed = {each.name: {**given, **memory}[each.name] for each in session.get_inputs()}
        made = dict(zip(names, session.run(names, fed), strict=True))
        for name in names:
            a, b = np.asarray(made[name]), expected[name]
            if a.shape != b.shape or a.dtype != b.dtype:
                raise SeedbedError(
                    f"the exported graph gives {name} as {a.dtype}{list(a.shape)}, JAX as "
                    f"{b.dtype}{list(b.shape)}"
                )
            if a.dtype.kind == "f":
                error = np.abs(np.float64(a) - b)
                size = np.abs(np.float64(b[b > FORBIDDEN / 2]))
            else:
                error, size = np.float64(a != b), np.ones(1)
            # A number that is not finite fails every comparison.
            error = np.where(np.isfinite(error), error, np.inf)
            largest[name] = max(largest.get(name, 0.0), float(error.max(initial=0.0)))
            scale[name] = max(scale.get(name, 0.0), float(size.max(initial=0.0)))
        memory = {name: expected[f"{NEXT}.{name}"] for name in memory}
    return Difference(largest, scale)


def require_equal(policy: Policy, graph: PolicyGraph) -> dict[str, float]:
    """Compares a graph with JAX on random inputs; returns the relative error of each output.

    Raises SeedbedError if one is larger than `TOLERANCE`, or if a whole number differs.
    """
    session = open_session(graph.model.SerializeToString())
    batch = 1 if graph.single else _BATCH
    reference = Reference(policy, batch)
    inputs = _random_inputs(policy, batch)
    found = compare(session, reference, reference.initial(), inputs).relative()
    for name, error in found.items():
        if not error <= TOLERANCE:
            raise SeedbedError(
                f"the exported graph is not the policy: {name} differs from JAX's by {error:.1e} of its "
                f"largest number (at most {TOLERANCE:.0e}); tell us the agent, or play it with "
                "seedbed.load"
            )
    return found


def _random_inputs(policy: Policy, batch: int) -> Iterator[Arrays]:
    """Yields random inputs; the first opens an episode everywhere, later ones in some environments."""
    rng = np.random.default_rng(0)
    specs = jax.tree.leaves(input_specs(policy), is_leaf=_is_spec)
    for step in range(_STEPS):
        given = {
            name: _random(rng, (batch, *spec.shape), np.dtype(spec.dtype), name)
            for name, spec in zip(input_names(policy), specs, strict=True)
        }
        given[FIRST] = rng.random(batch) < (0.2 if step else 2.0)
        given[REWARD] = np.where(given[FIRST], np.float32(0), given[REWARD])
        yield given


def _random(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, name: str
) -> np.ndarray:
    if name.startswith(f"{OBSERVATION}.{ACTION_MASK}"):
        return (rng.random(shape) < 0.5).astype(dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    return rng.integers(0, min(int(np.iinfo(dtype).max), 255), shape, endpoint=True).astype(dtype)
