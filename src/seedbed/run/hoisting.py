"""Functions of parameters and more, in which what depends on the parameters alone is computed once for them.

So a matrix of weights is packed for our kernels when it is published, and not at each call.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from seedbed.run.operations import Operand, Operation, Program, Value, flatten
from seedbed.types import Array, Tree

# What is more than so many times as large as the parameters that it is made of is made at each call.
_GROWTH = 4


class Derived(NamedTuple):
    """Parameters, and what was computed from them alone."""

    params: Tree
    platform: str | None  # of the device that holds them; None if there are none
    values: dict[int, Array]  # by number


class Hoisted:
    """A function `(params, *arguments)`, compiled in two parts: of parameters alone, and the rest.

    The function is traced anew for arguments of other shapes, dtypes or structure, as by `jax.jit`. Any
    thread may call `derive`. Several threads may call the function, each with a `Derived` of its own.
    """

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> None:
        """Compiles nothing yet. `donate` has the places of arguments to donate, without the parameters."""
        self._function, self._donate = function, donate
        self._lock = threading.Lock()  # is held while the function is traced
        self._numbers = _Numbers()
        self._derivations: list[_Derivation] = []
        self._rests: dict[Hashable, list[_Rest]] = {}

    def derive(self, params: Tree) -> Derived:
        """Returns parameters for calls. They are arrays, and always of the same structure.

        It computes what has to be computed once, for all calls that were compiled by then.
        """
        leaves = jax.tree.leaves(params)
        platform = next((d.platform for leaf in leaves for d in leaf.devices()), None)
        values = {self._numbers.of(("leaf", i)): leaf for i, leaf in enumerate(leaves)}
        derived = Derived(params, platform, values)
        for derivation in list(self._derivations):
            derivation.add(derived)
        return derived

    def __call__(self, size: int, derived: Derived, *arguments: Any) -> Any:
        """Returns the function's result.

        `size` tells quickly which of the compiled programs is for these arguments. Several may be: each
        checks its arguments while it is traced.
        """
        rests = self._rests.setdefault((size, derived.platform), [])
        for rest in rests:
            try:
                return self._run(rest, derived, arguments)
            except _UnlikeError:
                continue
        with self._lock:
            rest = self._compiled(derived, arguments)
        rests.append(rest)
        return self._run(rest, derived, arguments)

    def _run(self, rest: _Rest, derived: Derived, arguments: tuple[Any, ...]) -> Any:
        """Runs the rest; raises _UnlikeError if it is for other arguments."""
        try:
            values = [derived.values[number] for number in rest.numbers]
        except KeyError:
            for derivation in list(self._derivations):
                derivation.add(derived)
            values = [derived.values[number] for number in rest.numbers]
        return rest.compute(values, *arguments)

    def _compiled(self, derived: Derived, arguments: tuple[Any, ...]) -> _Rest:
        """Returns the program for arguments like these; adds a derivation of what no other one computes."""
        closed, results = jax.make_jaxpr(self._function, return_shape=True)(
            derived.params, *arguments
        )
        # Kernels are in the branch of a platform. JAX's names of GPUs differ: there, nothing of ours is.
        program = flatten(closed, "cpu" if derived.platform == "cpu" else None)
        count = len(jax.tree.leaves(derived.params))
        params, others = program.inputs[:count], program.inputs[count:]
        division = _divide(program, params, bool(closed.effects))
        numbers = self._numbers.of_values(params, division)
        known = {n for derivation in self._derivations for n in derivation.numbers}
        new = {
            value: number
            for value, number in zip(division.values, numbers, strict=True)
            if value not in params and number not in known
        }
        if new:
            operations, _ = program.needed(new)

            def derive(leaves: list[Array]) -> list[Any]:
                return _computed(operations, dict(zip(params, leaves, strict=True)), new)

            self._derivations.append(_Derivation(list(new.values()), jax.jit(derive)))
        structure, expected = jax.tree.structure(arguments), _kinds(arguments)
        tree = jax.tree.structure(results)

        def compute(values: list[Array], *arguments: Any) -> Any:
            if jax.tree.structure(arguments) != structure or _kinds(arguments) != expected:
                raise _UnlikeError
            held = dict(zip(division.values, values, strict=True))
            held.update(zip(others, jax.tree.leaves(arguments), strict=True))
            return tree.unflatten(_computed(division.rest, held, program.outputs))

        donated = [1 + place for place in self._donate]
        return _Rest(numbers, jax.jit(compute, donate_argnums=donated))


class _UnlikeError(Exception):
    """A program was called with arguments of other shapes, dtypes or structure than it was made for."""


class _Derivation(NamedTuple):
    """A compiled program of parameters alone."""

    numbers: list[int]
    compute: Callable[[list[Array]], list[Array]]

    def add(self, derived: Derived) -> None:
        """Computes the values with these numbers."""
        # A NaN that is chosen by no call is no error.
        with jax.debug_nans(False):
            made = self.compute(jax.tree.leaves(derived.params))
        derived.values.update(zip(self.numbers, made, strict=True))


class _Rest(NamedTuple):
    """The compiled rest of a function, for arguments of one kind."""

    numbers: list[int]  # of the derived values that it takes
    compute: Callable[..., Any]  # (values, *arguments); raises _UnlikeError


class _Numbers:
    """Numbers of values, by how they are made of parameters: equal ones have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._count = itertools.count()

    def of(self, recipe: Hashable) -> int:
        """Returns the number of a recipe, a new one if it is new."""
        found = self._numbers.get(recipe)
        return self._numbers.setdefault(recipe, next(self._count)) if found is None else found

    def of_values(self, params: Iterable[Value], division: _Division) -> list[int]:
        """Returns the numbers of a division's values."""
        held = {value: self.of(("leaf", i)) for i, value in enumerate(params)}
        for operation in division.derivation:
            operands = tuple(
                held[x] if isinstance(x, Value) else self._constant(x) for x in operation.operands
            )
            settings = tuple((k, type(v), v) for k, v in sorted(operation.params.items()))
            recipe = (operation.primitive, settings, operation.context, operands)
            try:
                number = self.of(recipe)
            except TypeError:
                # Settings that cannot be compared, such as arrays: it is like no other one.
                number = next(self._count)
            held.update((x, self.of((number, i))) for i, x in enumerate(operation.results))
        return [held[value] for value in division.values]

    def _constant(self, array: Any) -> int:
        if not isinstance(array, np.ndarray):
            return next(self._count)
        content = hashlib.blake2b(array.tobytes()).digest()
        return self.of((array.dtype, array.shape, content))


class _Division(NamedTuple):
    """The operations of a program, in two parts."""

    values: list[Value]  # what the rest reads of the parameters and of what depends on them alone
    derivation: list[Operation]
    rest: list[Operation]


def _divide(program: Program, params: Iterable[Value], effects: bool) -> _Division:
    """Divides a program into what depends on `params` alone and the rest: all of it if it has effects."""
    # The parameters of each value that depends on them and constants alone.
    sources: dict[Value, frozenset[Value]] = {value: frozenset([value]) for value in params}
    makers: dict[Value, Operation] = {}
    moving: list[Operation] = []
    for operation in program.operations:
        read = [x for x in operation.operands if isinstance(x, Value)]
        makers.update(dict.fromkeys(operation.results, operation))
        if effects or not operation.results or not all(x in sources for x in read):
            moving.append(operation)
        else:
            source = frozenset[Value]().union(*(sources[x] for x in read))
            sources.update(dict.fromkeys(operation.results, source))
    values: dict[Value, None] = {}
    again: set[Value] = set()
    reads: list[Operand] = [x for operation in moving for x in operation.operands]
    reads += program.outputs
    while reads:
        value = reads.pop()
        if not isinstance(value, Value) or value not in sources or value in again:
            continue
        maker = makers.get(value)
        made_of = sum(map(_size, sources[value]))
        if maker is None or (made_of and _size(value) <= _GROWTH * made_of):
            values[value] = None
        else:
            again.update(maker.results)
            reads += maker.operands
    needed, _ = program.needed(values)
    late = {x for operation in moving for x in operation.results} | again
    rest = [o for o in program.operations if not o.results or not late.isdisjoint(o.results)]
    return _Division(list(values), needed, rest)


def _size(value: Value) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _kinds(arguments: Any) -> list[tuple[Any, Any]]:
    """Returns the shapes and dtypes of arrays."""
    kinds = map(jax.typeof, jax.tree.leaves(arguments))
    return [(kind.shape, kind.dtype) for kind in kinds]


def _computed(
    operations: Iterable[Operation], held: dict[Value, Any], wanted: Iterable[Operand]
) -> list[Any]:
    """Computes operations in their order, from the values that are held; returns those that are wanted."""

    def array(operand: Operand) -> Any:
        return held[operand] if isinstance(operand, Value) else operand

    for operation in operations:
        made = operation.apply(map(array, operation.operands))
        held.update(zip(operation.results, made, strict=True))
    return [array(operand) for operand in wanted]
