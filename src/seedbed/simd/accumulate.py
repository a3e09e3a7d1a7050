"""Sums of cotangents, a row at a time.

The transpose of reading row i of an array is an array of zeros but for row i. Where a loop reads rows, its
transpose adds such an array to a sum in each iteration; here only the row is added, in place. For any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend import core

from seedbed.jaxprs import CALLS, RULED, bind, called, interpret


class _Zeros(NamedTuple):
    """An array of zeros that is not made yet."""

    aval: Any


class _Rows(NamedTuple):
    """A sum of arrays of zeros, each with a part that is not zero, and where that part begins."""

    aval: Any
    parts: tuple[tuple[Any, tuple[Any, ...]], ...]


def accumulated(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a function with the same results, in which sums touch only the parts that are not zero.

    Calls in it are inlined, but for those of functions with derivatives of their own.
    """
    return _accumulated(closed, CALLS - RULED)


def evaluated(
    closed: core.ClosedJaxpr, operands: Sequence[Any], calls: Collection[str] = CALLS - RULED
) -> list[Any]:
    """Returns the results of a function, summed like those of `accumulated`; inlines `calls`."""
    return list(map(_whole, _evaluate(closed, operands, calls)))


def _accumulated(closed: core.ClosedJaxpr, calls: Collection[str]) -> core.ClosedJaxpr:
    return jax.make_jaxpr(lambda *operands: evaluated(closed, operands, calls))(*closed.in_avals)


def _evaluate(
    closed: core.ClosedJaxpr, operands: Sequence[Any], calls: Collection[str]
) -> list[Any]:
    """Evaluates a function; operands and results may be arrays that are not made yet."""

    def apply(eqn: Any, given: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in calls and (inner := called(eqn)) is not None:
            return _evaluate(inner, given, calls)
        found = _RULES[name](eqn, given) if name in _RULES else None
        if found is not None:
            return [found]
        inside = {name: _inside(value, calls) for name, value in eqn.params.items()}
        return bind(eqn, [_whole(value) for value in given], **inside)

    return interpret(closed, operands, apply)


def _inside(value: Any, calls: Collection[str]) -> Any:
    if isinstance(value, core.ClosedJaxpr):
        return _accumulated(value, calls)
    if isinstance(value, tuple) and value and isinstance(value[0], core.ClosedJaxpr):
        return tuple(_accumulated(one, calls) for one in value)
    return value


def _whole(value: Any) -> Any:
    """Returns a value as an array."""
    if isinstance(value, _Zeros):
        return jnp.zeros(value.aval.shape, value.aval.dtype)
    return _added(_whole(_Zeros(value.aval)), value) if isinstance(value, _Rows) else value


def _added(total: Any, rows: _Rows) -> Any:
    # An index below 0 is the first place here, as in the operation itself, and counts nothing from the end.
    for part, start in rows.parts:
        at = [p if isinstance(p, Tracer) else max(0, int(p)) for p in start]
        old = lax.dynamic_slice(total, at, part.shape, allow_negative_indices=False)
        total = lax.dynamic_update_slice(total, old + part, at, allow_negative_indices=False)
    return total


def _broadcast(eqn: Any, given: Sequence[Any]) -> Any:
    (atom, *_), (value, *_) = eqn.invars, given
    zero = isinstance(value, _Zeros) or (isinstance(atom, core.Literal) and not atom.val)
    return _Zeros(eqn.outvars[0].aval) if zero and not eqn.outvars[0].aval.weak_type else None


def _update(eqn: Any, given: Sequence[Any]) -> Any:
    array, part, *start = given
    if not isinstance(array, _Zeros):
        return None
    return _Rows(eqn.outvars[0].aval, ((_whole(part), tuple(start)),))


def _add(eqn: Any, given: Sequence[Any]) -> Any:
    one, other = given
    if isinstance(one, _Zeros):
        return other
    if isinstance(other, _Zeros):
        return one
    if isinstance(one, _Rows) and isinstance(other, _Rows):
        return _Rows(one.aval, one.parts + other.parts)
    if isinstance(one, _Rows):
        return _added(other, one)
    return _added(one, other) if isinstance(other, _Rows) else None


_RULES = {"broadcast_in_dim": _broadcast, "dynamic_update_slice": _update, "add_any": _add}
