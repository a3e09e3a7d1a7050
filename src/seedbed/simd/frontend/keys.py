"""Random keys as plain numbers: rewrites a jaxpr so that keys become their data, and threefry makes bits.

A key has no scalar form, but its data, a uint32 array with one more axis, has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from seedbed.jaxprs import called, inner_jaxprs, interpret, scan_parts
from seedbed.simd.ir.program import Unsupported

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_MOVES = (
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "expand_dims",
    "transpose",
    "rev",
    "concatenate",
    "stack",
    "unstack",
    "split",
    "slice",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "scatter",
    "select_n",
    "copy",
)


def without_keys(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns the same function with key data in place of keys, as arguments and results too.

    Returns `closed` itself if it uses no random keys. Raises Unsupported for an operation on keys that
    has no scalar form.
    """
    if not _has_keys(closed.jaxpr):
        return closed
    shapes = [_physical(v.aval) for v in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: _run(closed, args))(*shapes)


def _is_key(atom: Any) -> bool:
    return _holds_keys(atom.aval)


def _holds_keys(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _has_keys(jaxpr: Any) -> bool:
    if any(map(_is_key, (*jaxpr.invars, *jaxpr.constvars))):
        return True
    for equation in jaxpr.eqns:
        if equation.primitive.name in _RANDOM or any(map(_is_key, equation.outvars)):
            return True
        if any(_has_keys(inner) for inner, _, _ in inner_jaxprs(equation)):
            return True
    return False


def _physical(aval: Any) -> jax.ShapeDtypeStruct:
    if not _holds_keys(aval):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return jax.ShapeDtypeStruct((*aval.shape, *aval.dtype._impl.key_shape), np.uint32)


def _run(closed: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr with key data in place of keys, and returns its results."""
    return interpret(closed, args, _apply, _data)


def _data(value: Any, aval: Any) -> Any:
    return jax.random.key_data(value) if _holds_keys(aval) else value


def _apply(equation: Any, args: list[Any]) -> Sequence[Any]:
    name = equation.primitive.name
    if name in _RANDOM:
        return _RANDOM[name](equation, *args)
    inner = inner_jaxprs(equation)
    if any(_has_keys(jaxpr) for jaxpr, _, _ in inner):
        return _CONTROL.get(name, _call)(equation, args)
    if any(map(_is_key, (*equation.invars, *equation.outvars))):
        return _move(equation, args)
    debug_info = core.DebugInfo("simd.vectorize", name, None, None)
    jaxpr = core.Jaxpr((), equation.invars, equation.outvars, [equation], debug_info=debug_info)
    literals = [isinstance(atom, core.Literal) for atom in equation.invars]
    if any(literals):
        rest = [a for a, known in zip(equation.invars, literals, strict=True) if not known]
        args = [a for a, known in zip(args, literals, strict=True) if not known]
        jaxpr = jaxpr.replace(invars=rest)
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*args)


def _move(equation: Any, args: list[Any]) -> Sequence[Any]:
    """Applies an operation that only moves keys to each number of their data; else raises Unsupported."""
    if equation.primitive.name not in _MOVES:
        raise Unsupported(
            f"{equation.primitive.name!r} of random keys has no scalar form: draw from them instead"
        )
    axes = [-1 if _is_key(atom) else None for atom in equation.invars]
    run = jax.vmap(lambda *a: equation.primitive.bind(*a, **equation.params), axes, -1)
    results = run(*args)
    return results if equation.primitive.multiple_results else [results]


def _call(equation: Any, args: list[Any]) -> Sequence[Any]:
    if (inner := called(equation)) is None:
        raise Unsupported(f"random keys in {equation.primitive.name!r} have no scalar form")
    return _run(inner, args)


def _scan(equation: Any, args: list[Any]) -> Sequence[Any]:
    params = equation.params
    inner, (consts, count) = params["jaxpr"], scan_parts(equation)

    def body(carry: Any, row: Any) -> tuple[Any, Any]:
        results = _run(inner, [*args[:consts], *carry, *row])
        return results[:count], results[count:]

    carry, rows = lax.scan(
        body,
        args[consts : consts + count],
        args[consts + count :],
        length=params["length"],
        reverse=params["reverse"],
    )
    return [*carry, *rows]


def _while(equation: Any, args: list[Any]) -> Sequence[Any]:
    params = equation.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    return lax.while_loop(
        lambda c: _run(cond, [*args[:first], *c])[0],
        lambda c: _run(body, [*args[first:second], *c]),
        args[second:],
    )


def _cond(equation: Any, args: list[Any]) -> Sequence[Any]:
    branches = [lambda *a, b=branch: _run(b, a) for branch in equation.params["branches"]]
    return lax.switch(args[0], branches, *args[1:])


_CONTROL: dict[str, Callable[[Any, list[Any]], Sequence[Any]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


def _traced(function: Callable[..., Any], *args: Any) -> Sequence[Any]:
    """Traces a function of key data and evaluates it, with threefry written out in plain arithmetic."""
    closed = jax.make_jaxpr(function)(*args)
    return _run(closed, args)


def _each(function: Callable[..., Any], ndim: int) -> Callable[..., Any]:
    for _ in range(ndim):
        function = jax.vmap(function)
    return function


def _seed(equation: Any, seeds: Any) -> Sequence[Any]:
    return _traced(_each(equation.params["impl"].seed, jnp.ndim(seeds)), seeds)


def _bits(equation: Any, data: Any) -> Sequence[Any]:
    aval, params = equation.invars[0].aval, equation.params

    def draw(one: Any) -> Any:
        return aval.dtype._impl.random_bits(one, params["bit_width"], params["shape"])

    return _traced(_each(draw, aval.ndim), data)


def _split(equation: Any, data: Any) -> Sequence[Any]:
    aval, shape = equation.invars[0].aval, equation.params["shape"]
    return _traced(_each(lambda one: aval.dtype._impl.split(one, shape), aval.ndim), data)


def _fold_in(equation: Any, data: Any, numbers: Any) -> Sequence[Any]:
    shape, impl = equation.outvars[0].aval.shape, equation.invars[0].aval.dtype._impl
    numbers = jnp.broadcast_to(numbers, shape)
    data = jnp.broadcast_to(data, (*shape, *impl.key_shape))
    return _traced(_each(impl.fold_in, len(shape)), data, numbers)


def _same(equation: Any, data: Any) -> Sequence[Any]:
    return [data]


def _counters(equation: Any) -> Sequence[Any]:
    """Returns the high and the low 32 bits of the index of each element of a shape; the high bits are 0."""
    shape = equation.params["shape"]
    low = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint32).reshape(shape)
    return [jnp.zeros(shape, np.uint32), jnp.asarray(low)]


def _threefry(equation: Any, *args: Any) -> Sequence[Any]:
    """Computes threefry 2x32 with 20 rounds.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    key0, key1, x0, x1 = jnp.broadcast_arrays(*(jnp.asarray(a, np.uint32) for a in args))
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + key0, x1 + key1
    for group in range(5):
        for places in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(places)) | (x1 >> np.uint32(32 - places))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return [x0, x1]


_RANDOM: dict[str, Callable[..., Sequence[Any]]] = {
    "random_seed": _seed,
    "random_bits": _bits,
    "random_split": _split,
    "random_fold_in": _fold_in,
    "random_wrap": _same,
    "random_unwrap": _same,
    "random_clone": _same,
    "iota_2x32_shape": _counters,
    "threefry2x32": _threefry,
}
