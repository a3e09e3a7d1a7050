"""Derivatives of functions of one example, as functions of one example: a kernel's derivative is a kernel.

A derivative gets the function's operands and computes what it needs of the function again, but for the values
that are named `KEPT`: the function returns those, too, where it is differentiated. Operands of floating-point
numbers can have tangents. What is known of a derivative is kept on disk, so that a later process, which finds
its machine code there, too, need not trace it. For any thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import partial_eval

from seedbed.cache import directory
from seedbed.jaxprs import CALLS, bind, interpret, without_collector
from seedbed.simd.accumulate import accumulated, evaluated
from seedbed.simd.store.function import Function, describe, recall, remember, types_of
from seedbed.simd.store.sources import DERIVATION, fingerprint

KEPT = "seedbed.kept"
"""Name (`checkpoint_name`) of a value that derivatives take over instead of computing it again."""

_policy = jax.checkpoint_policies.save_only_these_names(KEPT)


def recomputed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn`, of which derivatives keep only the arguments, and what is named `KEPT`."""
    return jax.checkpoint(fn, policy=_policy, prevent_cse=False)


class Linear(NamedTuple):
    """A function that also returns what its tangent needs, and the tangent.

    The tangent's operands are some of the function's, some of what it keeps, and the given tangents, in which
    it is linear.
    """

    forward: Function  # returns the results, and then what it keeps
    tangent: Function
    operands: tuple[int, ...]  # of the function, which the tangent needs
    kept: tuple[int, ...]  # which of the values that `forward` returns after its results


class Pulled(NamedTuple):
    """The transpose of a linear function: from cotangents of results to cotangents of linear operands."""

    function: Function
    operands: tuple[int, ...]  # of the linear function, which the transpose needs


class _Made(NamedTuple):
    """Jaxprs of derivatives, and the places of what they need."""

    jaxprs: tuple[core.ClosedJaxpr, ...]
    operands: tuple[int, ...]
    kept: tuple[int, ...] = ()


def is_differentiable(aval: Any) -> bool:
    """Returns whether values of a type can have tangents."""
    return jnp.issubdtype(aval.dtype, jnp.floating)


@functools.lru_cache(maxsize=512)
def linearize(function: Function, moving: tuple[bool, ...], shared: tuple[bool, ...]) -> Linear:
    """Returns the tangent of a function, by its operands that move; those that are `shared` have no rows.

    It takes of the function what the tangent by all operands with rows takes, of which it is a part. So only
    that one is traced for `lax.scan`, which asks for the tangent by some operands, and then by more.
    """
    if not function.derived:
        most = tuple(
            m or (is_differentiable(a) and not s)
            for m, a, s in zip(moving, function.in_avals, shared, strict=True)
        )
        if most != moving:
            return _part(linearize(function, most, shared), most, moving)
    recipe = _recipe(f"tangent by {moving} with {shared}", function.rules)
    make = functools.cache(lambda: _linearized(function.closed, moving, shared))
    known = _known(recipe, make)
    forward, tangent = (_derived(known, i, make, recipe) for i in (0, 1))
    kept = tuple(known["kept"])
    if len(forward.out_avals) == len(function.out_avals):
        forward = function
    return Linear(forward, tangent, tuple(known["operands"]), kept)


def _part(linear: Linear, most: tuple[bool, ...], moving: tuple[bool, ...]) -> Linear:
    """Returns the tangent by the operands that are `moving`, of that by `most` operands.

    What does not move has no slope, not even an infinite one times 0: no zeros are put in its place.
    """
    tangent = linear.tangent
    left = [m for m, before in zip(moving, most, strict=True) if before]
    fixed = len(tangent.in_avals) - len(left)
    fixed_avals, most_avals = tangent.in_avals[:fixed], tangent.in_avals[fixed:]
    avals = [*fixed_avals, *(a for a, m in zip(most_avals, left, strict=True) if m)]

    def of_left(*operands: Any) -> list[Any]:
        still = list(map(_zeros, most_avals))

        def of_moving(*moved: Any) -> list[Any]:
            given = [*operands[:fixed], *_merge(left, moved, still)]
            # A rule would put zeros for what does not move.
            return evaluated(tangent.closed, given, CALLS)

        # It is linear, so its slope is the same everywhere.
        return jax.jvp(of_moving, operands[fixed:], operands[fixed:])[1]

    @without_collector
    def make() -> core.ClosedJaxpr:
        return _pruned(jax.make_jaxpr(of_left)(*avals), [True] * len(avals))[0]

    recipe = tangent.derived and f"by {left} of {tangent.derived}"
    return linear._replace(tangent=Function(avals, tangent.out_avals, make, recipe))


def _zeros(aval: Any) -> jax.Array:
    axes = tuple(sorted(aval.manual_axis_type.varying))
    zeros = jnp.zeros(aval.shape, aval.dtype)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def _recipe(what: str, of: str | None) -> str | None:
    """Returns all that a derived function depends on, or None if what it is derived from has no name."""
    if of is None:
        return None
    return f"{what} of {of}, {jnp.result_type(float)}, {fingerprint(DERIVATION)}"


def _known(recipe: str | None, make: Callable[[], _Made]) -> dict[str, Any]:
    """Returns what a derivation comes to, from disk if it is there."""
    found = recall(recipe) if recipe else None
    if found is None:
        found = _facts(make())
        if recipe:
            remember(recipe, found)
    return found


def _facts(made: _Made) -> dict[str, Any]:
    """Returns what is known of a derivation, as JSON gives it back."""
    types = [[describe(j.in_avals), describe(j.out_avals)] for j in made.jaxprs]
    return {"types": types, "operands": list(made.operands), "kept": list(made.kept)}


def _derived(
    known: dict[str, Any], number: int, make: Callable[[], _Made], recipe: str | None
) -> Function:
    def closed() -> core.ClosedJaxpr:
        made = make()
        if _facts(made) != known:
            raise RuntimeError(
                f"what is on disk of a derivative is not what it is: remove {directory()} ({recipe})"
            )
        return made.jaxprs[number]

    own = recipe and f"{number} of {recipe}"
    given, results = map(types_of, known["types"][number])
    return Function(given, results, closed, own)


@without_collector
def _linearized(
    closed: core.ClosedJaxpr, moving: tuple[bool, ...], shared: tuple[bool, ...]
) -> _Made:
    push: list[Any] = []

    def forward(*operands: Any) -> list[Any]:
        def of_moving(*moved: Any) -> list[Any]:
            return evaluated(closed, _merge(moving, moved, operands))

        moved = [o for o, m in zip(operands, moving, strict=True) if m]
        results, function = jax.linearize(recomputed(of_moving), *moved)
        residuals, structure = jax.tree.flatten(function)
        push.append(structure)
        return [*results, *residuals]

    whole = jax.make_jaxpr(forward)(*closed.in_avals)
    jaxpr, count = whole.jaxpr, len(closed.out_avals)
    places = {variable: i for i, variable in enumerate(jaxpr.invars)}
    constants = dict(zip(jaxpr.constvars, whole.consts, strict=True))
    residuals = jaxpr.outvars[count:]
    kept = list(
        dict.fromkeys(
            r
            for r in residuals
            if not isinstance(r, core.Literal) and r not in places and r not in constants
        )
    )

    def tangent(*operands: Any) -> list[Any]:
        primals, rest = operands[: len(places)], operands[len(places) :]
        values = {**constants, **dict(zip(jaxpr.invars, primals, strict=True))}
        values.update(zip(kept, rest, strict=False))
        given = [r.val if isinstance(r, core.Literal) else values[r] for r in residuals]
        made = jax.tree.unflatten(push[0], given)(*rest[len(kept) :])
        return [t for t in made if t.dtype != jax.dtypes.float0]

    moved = [a.to_tangent_aval() for a, m in zip(closed.in_avals, moving, strict=True) if m]
    traced = jax.make_jaxpr(tangent)(*closed.in_avals, *(k.aval for k in kept), *moved)
    size = len(places) + len(kept)
    needed = [i >= size for i in range(size + len(moved))]
    of_all = [i for i, flag in enumerate(shared) if flag]
    pruned, used = _pruned(traced, needed)
    if {i for i in used if i < size} <= {*of_all} and any(moving[i] for i in of_all):
        # Rows tell how many examples there are, so an operand has them where only shared ones move.
        needed[shared.index(False)] = True
        pruned, used = _pruned(traced, needed)
    forward_closed = closed
    if kept:
        returned = core.ClosedJaxpr(
            jaxpr.replace(outvars=[*jaxpr.outvars[:count], *kept]), whole.consts
        )
        forward_closed, _ = _pruned(returned, [True] * len(places))
    return _Made(
        (forward_closed, pruned),
        tuple(i for i in used if i < len(places)),
        tuple(i - len(places) for i in used if len(places) <= i < size),
    )


@functools.lru_cache(maxsize=512)
def transpose(function: Function, linear: tuple[bool, ...], given: tuple[bool, ...]) -> Pulled:
    """Returns the transpose of a function that is linear in some operands, for the `given` cotangents."""
    recipe = _recipe(f"transpose by {linear} for {given}", function.derived or function.rules)
    make = functools.cache(lambda: _transposed(function.closed, linear, given))
    known = _known(recipe, make)
    return Pulled(_derived(known, 0, make, recipe), tuple(known["operands"]))


@without_collector
def _transposed(
    closed: core.ClosedJaxpr, linear: tuple[bool, ...], given: tuple[bool, ...]
) -> _Made:
    moved = [a for a, flag in zip(closed.in_avals, linear, strict=True) if flag]
    fixed = [i for i, flag in enumerate(linear) if not flag]

    constants = [v.aval for v in closed.jaxpr.constvars]
    first = len(constants)

    def pull(*operands: Any) -> list[Any]:
        # JAX does not keep what it knows not to be computed, such as rows of a loop, if it is traced.
        of_known = core.ClosedJaxpr(closed.jaxpr, operands[:first])
        values = dict(zip(fixed, operands[first:], strict=False))

        def of_linear(*tangents: Any) -> list[Any]:
            operand = [values.get(i) for i in range(len(linear))]
            results = _inlined(of_known, _merge(linear, tangents, operand))
            return [r for r, flag in zip(results, given, strict=True) if flag]

        return list(jax.linear_transpose(of_linear, *moved)([*operands[first + len(fixed) :]]))

    cotangents = [a for a, flag in zip(closed.out_avals, given, strict=True) if flag]
    avals = [closed.in_avals[i] for i in fixed]
    traced = _closed(jax.make_jaxpr(pull)(*constants, *avals, *cotangents), closed.consts)
    traced, used = _pruned(traced, [i >= len(fixed) for i in range(len(traced.in_avals))])
    traced = accumulated(traced)
    return _Made((traced,), tuple(fixed[i] for i in used if i < len(fixed)))


def _closed(closed: core.ClosedJaxpr, first: Sequence[Any]) -> core.ClosedJaxpr:
    """Returns a function whose first operands are constants."""
    variables = closed.jaxpr.invars
    jaxpr = closed.jaxpr.replace(
        constvars=[*closed.jaxpr.constvars, *variables[: len(first)]],
        invars=variables[len(first) :],
    )
    return core.ClosedJaxpr(jaxpr, [*closed.consts, *first])


def _inlined(closed: core.ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of a function; what it computes again is no call."""

    def apply(eqn: Any, given: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "remat2":
            return core.jaxpr_as_fun(core.ClosedJaxpr(eqn.params["jaxpr"], ()))(*given)
        return bind(eqn, given)

    return interpret(closed, operands, apply)


def _merge(flags: Sequence[bool], chosen: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Returns the others, with the chosen ones in place of those that are flagged."""
    rest = iter(chosen)
    return [next(rest) if f else other for f, other in zip(flags, others, strict=True)]


def _pruned(closed: core.ClosedJaxpr, needed: Sequence[bool]) -> tuple[core.ClosedJaxpr, list[int]]:
    """Removes what no result needs; returns the operands that are left. Those that are `needed` stay."""
    jaxpr, used = partial_eval.dce_jaxpr(
        closed.jaxpr, [True] * len(closed.out_avals), instantiate=list(needed)
    )
    return core.ClosedJaxpr(jaxpr, closed.consts), [i for i, u in enumerate(used) if u]


def sum_rows(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sums [...] of arrays [B, ...] over their rows, all in one reduction."""
    if not arrays:
        return []
    flat = [a.reshape(len(a), -1) for a in arrays]
    total = jnp.concatenate(flat, 1).sum(0)
    ends = np.cumsum([math.prod(a.shape[1:]) for a in arrays])[:-1]
    parts = jnp.split(total, ends)
    return [p.reshape(a.shape[1:]) for p, a in zip(parts, arrays, strict=True)]
