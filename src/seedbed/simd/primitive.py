"""A JAX primitive that applies a jaxpr of one example to the rows of arrays.

Operands are arrays [B, ...], or are shared by all rows; results are [B, ...]. On CPU the primitive is a
kernel. For derivatives, on other devices, and if there is no kernel, it is `jax.vmap` of the same jaxpr,
provided that XLA compiles that in reasonable time.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec

from seedbed.types import SeedbedError

LARGEST_FALLBACK = 15_000
"""The most equations that a function may have if `jax.vmap` replaces a kernel.

XLA takes about 4 ms to compile one equation of a physics step, so a minute for all.
"""
GRADIENT = 3
"""The number of equations in a reverse-mode derivative for each equation of the function, roughly."""

vectorized_p = core.Primitive("vectorized")
vectorized_p.multiple_results = True
_tangent_p = core.Primitive("vectorized_tangent")
_tangent_p.multiple_results = True
_opaque_p = core.Primitive("vectorized_derivative")
_opaque_p.multiple_results = True


def mapped(closed: core.ClosedJaxpr, shared: Sequence[bool], *operands: Any) -> list[jax.Array]:
    """Applies the jaxpr of one example to the rows of operands, like the primitive, but by `jax.vmap`."""
    axes = [None if s else 0 for s in shared]
    return jax.vmap(core.jaxpr_as_fun(closed), in_axes=axes)(*operands)


def count_equations(jaxpr: Any) -> int:
    """Counts the equations of a jaxpr and of the jaxprs inside it; a call or a loop itself does not count."""
    inner = [list(core.jaxprs_in_params(e.params)) for e in jaxpr.eqns]
    return sum(sum(map(count_equations, i)) if i else 1 for i in inner)


def _admit(closed: core.ClosedJaxpr, name: str, reason: str, equations: int = 1) -> None:
    """Raises SeedbedError, which states `reason`, if a function is too large for `jax.vmap`.

    The limit is LARGEST_FALLBACK. Each equation of the function counts as `equations`.
    """
    equations *= count_equations(closed.jaxpr)
    if equations > LARGEST_FALLBACK:
        raise SeedbedError(
            f"simd.vectorize({name}): {reason}. It is left to jax.vmap then, and {equations} equations "
            f"are too many (at most {LARGEST_FALLBACK}): XLA would compile for minutes. To wait for it, "
            "call jax.vmap instead of simd.vectorize"
        )


def _types(
    *operands: Any, closed: core.ClosedJaxpr, shared: Sequence[bool], name: str
) -> list[Any]:
    """Returns the types of the results, which vary over every mesh axis over which an operand varies.

    Raises SeedbedError if operands have their rows split over different mesh axes.
    """
    rows = [o for o, s in zip(operands, shared, strict=True) if not s]
    split = {o.sharding.spec[0] for o in rows} - {None}
    if len(split) > 1:
        raise SeedbedError(
            f"simd.vectorize({name}): the batch is split over mesh axes {sorted(map(str, split))} in "
            "different operands; reshard them alike"
        )
    axes = frozenset[str]().union(*(o.manual_axis_type.varying for o in operands))
    mesh = jax.sharding.get_abstract_mesh()
    types = []
    for one in closed.out_avals:
        shape = (rows[0].shape[0], *one.shape)
        if mesh.empty:
            types.append(jax.core.ShapedArray(shape, one.dtype))
            continue
        spec = PartitionSpec(next(iter(split), None), *(None for _ in one.shape))
        kind = jax.sharding.ManualAxisType(varying=axes)
        sharding: Any = NamedSharding(mesh, spec)
        types.append(
            jax.core.ShapedArray(shape, one.dtype, sharding=sharding, manual_axis_type=kind)
        )
    return types


def _fold(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    """Implements vmap: folds the new axis into the rows. A shared operand that is mapped becomes rows."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    flags = [s and d is None for s, d in zip(params["shared"], dims, strict=True)]
    rows = next(
        a.shape[0 if d is None else 1 if d == 0 else 0]
        for a, d, s in zip(args, dims, params["shared"], strict=True)
        if not s
    )
    folded = []
    for array, dim, was, still in zip(args, dims, params["shared"], flags, strict=True):
        if not still:
            moved = jnp.moveaxis(array, dim, 0) if dim is not None else array[None]
            one = moved.shape[1:] if was else moved.shape[2:]
            moved = moved[:, None] if was else moved
            array = jnp.broadcast_to(moved, (size, rows, *one)).reshape(size * rows, *one)
        folded.append(array)
    results: Any = vectorized_p.bind(*folded, **(params | {"shared": tuple(flags)}))
    return [r.reshape(size, rows, *r.shape[1:]) for r in results], [0] * len(results)


# Derivatives: a tangent is only ever transposed, never computed.


def _differentiable(avals: Sequence[Any]) -> list[bool]:
    return [jnp.issubdtype(a.dtype, jnp.floating) for a in avals]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    results = vectorized_p.bind(*primals, **params)
    moving = tuple(
        not isinstance(t, ad.Zero) and float_
        for t, float_ in zip(tangents, _differentiable(primals), strict=True)
    )
    given = [t for t, m in zip(tangents, moving, strict=True) if m]
    if not given:
        return results, [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]
    made = iter(_tangent_p.bind(*primals, *given, moving=moving, **params))
    kinds = zip(results, _differentiable(results), strict=True)
    return results, [
        next(made) if f else ad.Zero(jax.typeof(r).to_tangent_aval()) for r, f in kinds
    ]


def _tangent_types(*operands: Any, shared: Any, moving: Any, **params: Any) -> list[Any]:
    types = _types(*operands[: len(shared)], shared=shared, **params)
    return [t for t, float_ in zip(types, _differentiable(types), strict=True) if float_]


def _pull_back(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    """Implements reverse mode: returns the cotangents of operands, by differentiating `mapped`.

    The primal operands get None; each tangent operand gets a cotangent. Raises SeedbedError if the
    derivative is too large for XLA.
    """
    _admit(params["closed"], params["name"], "a gradient has no kernel", GRADIENT)
    primals = operands[: len(params["shared"])]
    given = [ad.instantiate_zeros(c) for c in cotangents]
    run = functools.partial(_pull, params["closed"], params["shared"], params["moving"])
    axes = frozenset[str]().union(*map(_varying, primals))
    if not axes or _knows_axes(params["closed"]):
        return [*(None for _ in primals), *run(*primals, *given)]
    # The jaxpr was traced as if outside shard_map, so its derivative is also taken as if outside.
    back = _opaque_p.bind(*primals, *given, run=run)
    moved = [p for p, m in zip(primals, params["moving"], strict=True) if m]
    missing = [tuple(sorted(axes - _varying(p))) for p in moved]
    sums = [lax.psum(b, m) if m else b for b, m in zip(back, missing, strict=True)]
    return [*(None for _ in primals), *sums]


def _pull(closed: Any, shared: Sequence[bool], moving: Sequence[bool], *operands: Any) -> list[Any]:
    primals, cotangents = operands[: len(shared)], operands[len(shared) :]

    def floats(*inputs: Any) -> list[Any]:
        rest = iter(inputs)
        given = [next(rest) if m else p for p, m in zip(primals, moving, strict=True)]
        results = mapped(closed, shared, *given)
        return [r for r, f in zip(results, _differentiable(results), strict=True) if f]

    pull = jax.vjp(floats, *(p for p, m in zip(primals, moving, strict=True) if m))[1]
    return [*pull([*cotangents])]


def _refuse(*_: Any, name: str, **__: Any) -> Any:
    raise SeedbedError(
        f"simd.vectorize({name}) has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize); "
        "use reverse mode (jax.grad, jax.vjp), or differentiate jax.vmap of the function"
    )


# On the CPU


def _lower(ctx: Any, *operands: Any, closed: Any, shared: Any, name: str) -> Any:
    target = _kernel(closed, shared, name)
    if target is None:
        return _lower_mapped(ctx, *operands, closed=closed, shared=shared, name=name)
    extra = {} if any(shared) else _split(ctx)
    return jax.ffi.ffi_lowering(target, extra_attributes=extra)(ctx, *operands)


def _split(ctx: Any) -> dict[str, Any]:
    """Returns the attributes that tell XLA's partitioners to split only rows over devices."""
    attributes = {"mhlo.frontend_attributes": mlir.ir_attribute({"num_batch_dims": "1"})}
    shapes = [[a.shape for a in avals] for avals in (ctx.avals_in, ctx.avals_out)]
    if getattr(jax.config, "jax_use_shardy_partitioner", True) and all(
        map(math.prod, [*shapes[0], *shapes[1]])
    ):
        attributes["sdy.sharding_rule"] = mlir.ir.Attribute.parse(_sharding_rule(*shapes))
    return attributes


def _sharding_rule(inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> str:
    """Returns a rule in Shardy's notation: axis `i` is the rows; every other axis must stay whole."""
    sizes = {"i": (*inputs, *outputs)[0][0]}

    def letters(shape: tuple[int, ...]) -> str:
        names = ["i"]
        for size in shape[1:]:
            n = len(sizes)
            names.append(chr(ord("i") + n) if n < 18 else f"z_{n - 17}")
            sizes[names[-1]] = size
        return f"[{', '.join(names)}]"

    sides = [f"({', '.join(map(letters, side))})" for side in (inputs, outputs)]
    factors = ", ".join(f"{name}={size}" for name, size in sizes.items())
    whole = f" need_replication={{{', '.join([*sizes][1:])}}}" if len(sizes) > 1 else ""
    return f"#sdy.op_sharding_rule<{sides[0]}->{sides[1]} {{{factors}}}{whole}, custom>"


def _lower_elsewhere(ctx: Any, *operands: Any, closed: Any, shared: Any, name: str) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    where = " and ".join(platforms)
    _admit(closed, name, f"there are kernels for CPUs only, not for {where}: run it on a CPU")
    return _lower_mapped(ctx, *operands, closed=closed, shared=shared, name=name)


def _lower_mapped(ctx: Any, *operands: Any, closed: Any, shared: Any, name: str) -> Any:
    del name
    run = functools.partial(mapped, closed, shared)
    if _knows_axes(closed):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)
    return _lower_opaque(ctx, *operands, run=run)


# Code inside shard_map that was traced as if outside


def _varying(array: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which an array varies."""
    return jax.typeof(array).manual_axis_type.varying


def _knows_axes(closed: core.ClosedJaxpr) -> bool:
    """Returns whether a jaxpr was traced with the mesh axes over which its operands vary."""
    return any(a.manual_axis_type.varying for a in closed.in_avals)


def _opaque_types(*operands: Any, run: Callable[..., Any]) -> list[Any]:
    axes = frozenset[str]().union(*(o.manual_axis_type.varying for o in operands))
    kind = jax.sharding.ManualAxisType(varying=axes)
    plain = [o.update(manual_axis_type=_NOWHERE) for o in operands]
    results = jax.make_jaxpr(run)(*plain).out_avals
    return [r.update(manual_axis_type=kind) for r in results]


def _lower_opaque(ctx: Any, *operands: Any, run: Callable[..., Any]) -> Any:
    plain = [a.update(manual_axis_type=_NOWHERE) for a in ctx.avals_in]
    rule = mlir.lower_fun(run, multiple_results=True)
    return rule(ctx.replace(avals_in=plain), *operands)


def _batch_opaque(args: Sequence[Any], dims: Sequence[Any], *, run: Callable[..., Any]) -> Any:
    results: Any = _opaque_p.bind(*args, run=jax.vmap(run, in_axes=tuple(dims)))
    return results, [0] * len(results)


_NOWHERE = jax.sharding.ManualAxisType()


def _kernel(closed: core.ClosedJaxpr, shared: tuple[bool, ...], name: str) -> str | None:
    """Returns the custom-call target of a kernel, or None if `jax.vmap` replaces it.

    Without a kernel it warns, once for each message, and raises SeedbedError if the function is too
    large for `jax.vmap`.
    """
    try:
        from seedbed.simd import build
    except ImportError as error:
        return _give_up(f"install llvmlite ({error})", closed, name)
    reason = build.unsupported()
    if reason is not None:
        return _give_up(reason, closed, name)
    try:
        return build.target(closed, shared)
    except (build.Unsupported, build.Refused) as error:
        return _give_up(str(error), closed, name)


def _give_up(reason: str, closed: core.ClosedJaxpr, name: str) -> None:
    _admit(closed, name, reason)
    _say(f"simd.vectorize({name}) runs as jax.vmap, which is slower: {reason}")


@functools.cache
def _say(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


vectorized_p.def_abstract_eval(_types)
vectorized_p.def_impl(functools.partial(xla.apply_primitive, vectorized_p))
batching.primitive_batchers[vectorized_p] = _fold
ad.primitive_jvps[vectorized_p] = _jvp
mlir.register_lowering(vectorized_p, _lower_elsewhere)
mlir.register_lowering(vectorized_p, _lower, platform="cpu")

_tangent_p.def_abstract_eval(_tangent_types)
_tangent_p.def_impl(_refuse)
batching.primitive_batchers[_tangent_p] = _refuse
ad.primitive_transposes[_tangent_p] = _pull_back
mlir.register_lowering(_tangent_p, _refuse)

_opaque_p.def_abstract_eval(_opaque_types)
batching.primitive_batchers[_opaque_p] = _batch_opaque
mlir.register_lowering(_opaque_p, _lower_opaque)
