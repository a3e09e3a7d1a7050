"""Translates a program into an ONNX graph; what is known at export becomes constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from seedbed.exporting.folding import FOLDED, chosen, fold
from seedbed.exporting.graph import Graph, Known, Tensor, compact, is_static
from seedbed.exporting.pointwise import POINTWISE
from seedbed.exporting.primitives import RULES, refused
from seedbed.run.operations import Operand, Operation, Program, Value

MOST_ROUNDS = 64
"""The most rounds of a `scan`: each becomes nodes of its own."""
_UNKNOWN = "not one that Seedbed can write as ONNX"
_REASONS = {
    "cond": "a branch that is chosen while it runs: use jnp.where",
    "reduce_precision": "a rounding, as in networks that compute in bfloat16: a graph has only float32",
    "scan": f"a loop of more than {MOST_ROUNDS} rounds, or of none",
    "while": "a loop whose number of rounds is found while it runs",
}
"""Why primitives that programs have are refused."""


class Key:
    """A key of random numbers, which are at their median in a graph."""


Held = Tensor | Known | Key


class _Translation:
    """The values of a program so far."""

    def __init__(self, graph: Graph, inputs: Mapping[Value, Held]) -> None:
        self._graph, self._held = graph, dict(inputs)

    def value(self, operand: Operand) -> Held:
        """Returns the value of an operand."""
        if isinstance(operand, Value):
            return self._held[operand]
        return Known(operand, operand.shape)

    def run(self, operation: Operation) -> None:
        """Adds the nodes of an operation whose operands are there, if its results are not known."""
        made = self._results(operation, [self.value(operand) for operand in operation.operands])
        self._held.update(zip(operation.results, made, strict=True))

    def _results(self, operation: Operation, given: list[Held]) -> Iterable[Held]:
        name, results = operation.primitive.name, operation.results
        if all(jnp.issubdtype(result.dtype, jax.dtypes.prng_key) for result in results):
            return [Key() for _ in results]
        if name == "random_bits":
            return [_median_bits(results[0])]
        known = [x for x in given if isinstance(x, Known)]
        if len(known) == len(given) and (folded := fold(operation, known)) is not None:
            return folded
        if (case := chosen(operation, given)) is not None:
            return [case]
        arrays = [x for x in given if not isinstance(x, Key)]
        if len(arrays) < len(given) or not (name in POINTWISE or name in RULES):
            raise refused(name, _REASONS.get(name, _UNKNOWN), operation.place)
        tensors = self._tensors(operation, arrays)
        if name in POINTWISE:
            names = [self._pointwise(operation, arrays, tensors)]
        else:
            names = RULES[name](self._graph, operation, tensors)
        return [
            Tensor(name, result.shape, result.dtype)
            for name, result in zip(names, results, strict=True)
        ]

    def _tensors(self, operation: Operation, given: list[Tensor | Known]) -> list[Tensor]:
        # ONNX broadcasts elements by itself, if one operand has the whole shape.
        shape = operation.results[0].shape
        whole = any(isinstance(x, Tensor) and x.shape == shape for x in given)
        expand = not (whole and operation.primitive.name in FOLDED)
        return [Tensor(self._graph.tensor(x, expand), x.shape, x.dtype) for x in given]

    def _pointwise(
        self, operation: Operation, given: list[Tensor | Known], tensors: list[Tensor]
    ) -> str:
        name, names = operation.primitive.name, [x.name for x in tensors]
        floats = operation.results[0].dtype == np.float32
        for i, x in enumerate(given):
            other = given[1 - i] if len(given) == 2 else None
            zero = isinstance(x, Known) and x.array.size == 1 and not x.array.any()
            whole = isinstance(other, Tensor) and other.shape == operation.results[0].shape
            if name == "max" and floats and zero and whole:
                return self._graph.node("Relu", names[1 - i])
        return POINTWISE[name](self._graph, operation.params, *names)


def translate(
    graph: Graph, program: Program, inputs: Mapping[Value, Held], outputs: Mapping[str, Operand]
) -> None:
    """Adds the part of a program that outputs depend on, and the outputs by name, to a graph.

    `inputs` has the values of the program's inputs that this part reads. Raises SeedbedError, with the name
    and the place, for a primitive that cannot be translated.
    """
    translation = _Translation(graph, inputs)
    for operation in program.needed(outputs.values())[0]:
        translation.run(operation)
    for name, operand in outputs.items():
        value = translation.value(operand)
        assert not isinstance(value, Key), "a key is no output"
        graph.output(name, value)


def _median_bits(result: Value) -> Known:
    width = np.iinfo(result.dtype).bits
    array = np.full(compact(result.shape), 1 << (width - 1), result.dtype)
    return Known(array, result.shape)


def constants(graph: Graph, values: Iterable[tuple[Value, str, np.ndarray]]) -> dict[Value, Held]:
    """Returns the values of inputs that are constants: (input, name, array). The names enter the graph."""
    held: dict[Value, Held] = {}
    for value, name, array in values:
        assert is_static(value.shape)
        graph.constant(array, name)
        held[value] = Known(array, value.shape)
    return held
