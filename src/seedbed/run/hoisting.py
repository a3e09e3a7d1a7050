"""Functions of parameters and more, in which what depends on the parameters alone is computed once for them.

So a matrix of weights is packed for our kernels when it is published, and not at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax

from seedbed.run.operations import Operand, Operation, Program, Value, flatten
from seedbed.types import Array, Tree

# A result that is this many times larger than what it is made of is made anew at each call.
_GROWTH = 2


class Derived(NamedTuple):
    """Parameters, and what was computed from them alone."""

    params: Tree
    platform: str | None  # of the device that holds them; None if they are none
    values: dict[str, list[Array]]  # by the text of the program that computes them


class Hoisted:
    """A function `(params, *arguments)`, compiled in two parts: of parameters alone, and the rest.

    Any thread may call `derive`. Several may call the function, each with `Derived` of its own.
    """

    def __init__(self, function: Callable[..., Any], donate: tuple[int, ...] = ()) -> None:
        """Compiles nothing yet. `donate` has the places of arguments to donate, without the parameters."""
        self._function, self._donate = function, donate
        self._derivations: dict[str, _Derivation] = {}
        self._rests: dict[Hashable, tuple[str, Callable[..., Any]]] = {}

    def derive(self, params: Tree) -> Derived:
        """Returns parameters, which are arrays on one device, for calls.

        It computes what is computed once, for all shapes that were called by then.
        """
        leaves = jax.tree.leaves(params)
        platform = next((d.platform for leaf in leaves for d in leaf.devices()), None)
        values = {text: d.values(leaves) for text, d in list(self._derivations.items())}
        return Derived(params, platform, values)

    def __call__(self, shape: Hashable, derived: Derived, *arguments: Any) -> Any:
        """Returns the function's result. `shape` says which shapes the arguments have.

        It compiles at the first call with a `shape`.
        """
        key = shape, derived.platform
        if key not in self._rests:
            self._rests[key] = self._divide(derived, arguments)
        text, rest = self._rests[key]
        if text not in derived.values:
            derivation = self._derivations[text]
            derived.values[text] = derivation.values(jax.tree.leaves(derived.params))
        return rest(derived.values[text], *arguments)

    def _divide(
        self, derived: Derived, arguments: tuple[Any, ...]
    ) -> tuple[str, Callable[..., Any]]:
        """Divides the function; returns the text of the derivation, and the rest of it, compiled."""
        closed, shapes = jax.make_jaxpr(self._function, return_shape=True)(
            derived.params, *arguments
        )
        # Kernels are in the branch of a platform. JAX's names of GPUs differ: there, nothing of ours is.
        program = flatten(closed, "cpu" if derived.platform == "cpu" else None)
        leaves, results = jax.tree.leaves(derived.params), jax.tree.structure(shapes)
        params, others = program.inputs[: len(leaves)], program.inputs[len(leaves) :]
        division = _divide(program, params, bool(closed.effects))

        def rest(values: list[Array], *arguments: Any) -> Any:
            held = dict(zip(division.values, values, strict=True))
            held.update(zip(others, jax.tree.leaves(arguments), strict=True))
            made = _computed(division.rest, held, program.outputs)
            return results.unflatten(made)

        places = {value: i for i, value in enumerate(params)}
        wanted = [value for value in division.values if value not in places]

        def derive(leaves: list[Array]) -> list[Array]:
            return _computed(division.derivation, dict(zip(params, leaves, strict=True)), wanted)

        compiled = jax.jit(derive)
        derivation = _Derivation([places.get(value) for value in division.values], compiled)
        # Shapes share their derivation if it has the same text, with all constants.
        text = f"{derivation.places} {compiled.lower(leaves).as_text()}"
        self._derivations.setdefault(text, derivation)
        return text, jax.jit(rest, donate_argnums=[1 + place for place in self._donate])


class _Derivation(NamedTuple):
    """A compiled program of parameters alone."""

    places: list[int | None]  # of each value: that among the parameters, None if it is computed
    compute: Callable[[list[Array]], list[Array]]

    def values(self, leaves: list[Array]) -> list[Array]:
        """Computes the values from the leaves of the parameters."""
        made = iter(self.compute(leaves))
        return [next(made) if place is None else leaves[place] for place in self.places]


class _Division(NamedTuple):
    """The operations of a program, in two parts."""

    values: list[Value]  # what the rest reads of the parameters and of what depends on them alone
    derivation: list[Operation]
    rest: list[Operation]


def _divide(program: Program, params: Iterable[Value], effects: bool) -> _Division:
    """Divides a program into what depends on `params` alone and the rest: all of it if it has effects."""
    derived = set(params)
    # Made of constants, such as zeros to pad with: both parts may make it.
    constant: set[Value] = set()
    makers: dict[Value, Operation] = {}
    moving: list[Operation] = []
    for operation in program.operations:
        read = {x for x in operation.operands if isinstance(x, Value)}
        makers.update(dict.fromkeys(operation.results, operation))
        if effects or not operation.results:
            moving.append(operation)
        elif read <= constant:
            constant.update(operation.results)
        elif read <= derived | constant:
            derived.update(operation.results)
        else:
            moving.append(operation)
    values: dict[Value, None] = {}
    again: set[Value] = set()
    reads: list[Operand] = [x for operation in moving for x in operation.operands]
    reads += program.outputs
    while reads:
        value = reads.pop()
        if not isinstance(value, Value) or value not in derived | constant:
            continue
        maker = makers.get(value)
        if maker is None or (value in derived and not _grows(maker)):
            values[value] = None
        elif value not in again:
            again.update(maker.results)
            reads += maker.operands
    needed, _ = program.needed(values)
    late = {x for operation in moving for x in operation.results} | again
    rest = [o for o in program.operations if not o.results or not late.isdisjoint(o.results)]
    return _Division(list(values), needed, rest)


def _grows(operation: Operation) -> bool:
    """Returns whether results are much larger than operands, as those of a broadcast are."""
    read = sum(_size(x) for x in operation.operands if isinstance(x, Value))
    return sum(map(_size, operation.results)) > _GROWTH * read


def _size(value: Value) -> int:
    return math.prod(value.shape) * value.dtype.itemsize


def _computed(
    operations: Iterable[Operation], held: dict[Value, Any], wanted: Iterable[Operand]
) -> list[Any]:
    """Computes operations in their order, from the values that are held; returns those that are wanted."""

    def array(operand: Operand) -> Any:
        return held[operand] if isinstance(operand, Value) else operand

    for operation in operations:
        made = operation.primitive.bind(*map(array, operation.operands), **operation.params)
        many = operation.primitive.multiple_results
        held.update(zip(operation.results, made if many else [made], strict=True))
    return [array(operand) for operand in wanted]
