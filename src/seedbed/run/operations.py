"""A jaxpr as one straight list of operations: calls are inlined, scans unrolled, and dead parts dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.extend.source_info_util import summarize

from seedbed.jaxprs import called, interpret, scan_parts

_NAME = "name"
"""The primitive of `jax.ad_checkpoint.checkpoint_name`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A result of an operation, or an input of the program."""

    shape: tuple[Any, ...]  # integers, and symbolic dimensions
    dtype: Any  # numpy's, or that of keys


Operand: TypeAlias = Value | np.ndarray
"""A value, or a constant, which is an array of JAX's if it is one of keys."""


class Operation(NamedTuple):
    """An application of a primitive."""

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[Value, ...]
    place: str  # file and line that asked for it
    context: Any  # JAX's settings there, such as how random numbers are drawn

    def apply(self, operands: Iterable[Any]) -> Sequence[Any]:
        """Returns the results for operands, which are arrays, also of JAX's while it traces."""
        params = self.primitive.get_bind_params(self.params)
        with self.context.manager:
            made = self.primitive.bind(*operands, **params)
        return made if self.primitive.multiple_results else [made]


class Program(NamedTuple):
    """Operations in the order in which they can be done."""

    inputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Operand, ...]
    names: dict[str, Operand]  # what `checkpoint_name` has named, by name

    def needed(self, wanted: Iterable[Operand]) -> tuple[list[Operation], set[Value]]:
        """Returns the operations that values depend on, and all values that those read."""
        read = {operand for operand in wanted if isinstance(operand, Value)}
        kept: list[Operation] = []
        for operation in reversed(self.operations):
            if not read.isdisjoint(operation.results):
                kept.append(operation)
                read.update(x for x in operation.operands if isinstance(x, Value))
        return kept[::-1], read


def flatten(closed: ClosedJaxpr, platform: str | None, most_rounds: int = 0) -> Program:
    """Makes a program of a jaxpr. Where the jaxpr differs between platforms, it takes that of `platform`.

    "" stands for all platforms that are not named; with None, such places stay as they are. So does control
    flow that is no straight list: `while`, `cond`, and scans of more than `most_rounds` rounds.
    """
    reader = _Reader(platform, most_rounds)
    inputs = tuple(_value(var) for var in closed.jaxpr.invars)
    outputs = reader.read(closed, inputs)
    return Program(inputs, tuple(reader.operations), tuple(outputs), reader.names)


class _Reader:
    """Reads jaxprs, inner ones within outer ones, into one list of operations."""

    def __init__(self, platform: str | None, most_rounds: int) -> None:
        self.operations: list[Operation] = []
        self.names: dict[str, Operand] = {}
        self._platform, self._most_rounds = platform, most_rounds
        self._outer = ""  # place of the call that is being read: what JAX calls has none of its own

    def read(self, closed: Any, operands: Sequence[Operand]) -> list[Operand]:
        """Adds the operations of a jaxpr that is called with these operands; returns its results."""
        return interpret(closed, operands, self._equation, _constant)

    def _equation(self, equation: Any, given: list[Operand]) -> Sequence[Operand]:
        name, params = equation.primitive.name, equation.params
        if (inner := called(equation)) is not None:
            outer, self._outer = self._outer, self._place(equation)
            results = self.read(inner, given)
            self._outer = outer
            return results
        if name == "scan" and 0 < params["length"] <= self._most_rounds:
            return self._scan(equation, given)
        if name == "cond" and (branch := self._branch(equation, given[0])) is not None:
            return self.read(branch, given[1:])
        if name == "platform_index" and self._platform is not None:
            # The `cond` that reads it is told the platforms, too.
            return [np.array(0, np.int32)]
        if name == _NAME:
            self.names[params["name"]] = given[0]
            return given
        results = tuple(_value(var) for var in equation.outvars)
        self.operations.append(
            Operation(
                equation.primitive,
                params,
                tuple(given),
                results,
                self._place(equation),
                equation.ctx,
            )
        )
        return results

    def _branch(self, equation: Any, index: Operand) -> Any:
        """Returns the branch of the platform, or of a constant index; None if it is chosen at run time."""
        branches = equation.params["branches"]
        platforms = equation.params.get("branches_platforms")
        if platforms is None:
            return None if isinstance(index, Value) else branches[int(index)]
        if self._platform is None:
            return None
        named = [i for i, each in enumerate(platforms) if each and self._platform in each]
        others = [i for i, each in enumerate(platforms) if each is None]
        return branches[(named + others)[0]] if named + others else None

    def _scan(self, equation: Any, given: list[Operand]) -> Sequence[Operand]:
        """Unrolls a loop; its rounds read slices of the operands, and their results are joined."""
        params, length = equation.params, equation.params["length"]
        constants, carried = scan_parts(equation)
        fixed, carry = given[:constants], given[constants : constants + carried]
        sequences = given[constants + carried :]
        rounds: list[list[Operand]] = [[] for _ in range(length)]
        for i in reversed(range(length)) if params["reverse"] else range(length):
            row = [self._row(sequence, i) for sequence in sequences]
            results = self.read(params["jaxpr"], [*fixed, *carry, *row])
            carry, rounds[i] = results[:carried], results[carried:]
        stacked = [self._stacked(list(column)) for column in zip(*rounds, strict=True)]
        return [*carry, *stacked]

    def _row(self, sequence: Operand, i: int) -> Operand:
        if isinstance(sequence, np.ndarray):
            return sequence[i]
        return self._traced(lambda x: jax.lax.index_in_dim(x, i, keepdims=False), [sequence])

    def _stacked(self, rows: list[Operand]) -> Operand:
        def stack(*rows: Any) -> Any:
            return jax.lax.concatenate([jax.lax.expand_dims(row, (0,)) for row in rows], 0)

        return self._traced(stack, rows)

    def _place(self, equation: Any) -> str:
        return summarize(equation.source_info) or self._outer

    def _traced(self, function: Any, operands: list[Operand]) -> Operand:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        return self.read(jax.make_jaxpr(function)(*shapes), operands)[0]


def _value(var: Any) -> Value:
    return Value(tuple(var.aval.shape), var.aval.dtype)


def _constant(value: Any, aval: Any) -> Any:
    keys = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return value if keys else np.asarray(value, aval.dtype)
