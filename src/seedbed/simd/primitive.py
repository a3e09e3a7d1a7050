"""A JAX primitive that applies a function of one example to the rows of arrays.

Operands are arrays [B, ...], or are shared by all rows; results are [B, ...]. On CPUs and NVIDIA GPUs the
primitive is a kernel, and so are its derivatives, which are the same primitive with other functions. On other
devices, and if there is no kernel, it is `jax.vmap` of the same function, if XLA compiles that in reasonable
time.
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

from seedbed.jaxprs import count_equations
from seedbed.simd.derivative import is_differentiable, linearize, sum_rows, transpose
from seedbed.simd.ir.program import Unsupported
from seedbed.simd.store.function import Function
from seedbed.types import SeedbedError

LARGEST_FALLBACK = 15_000
"""The most equations that a function may have if `jax.vmap` replaces a kernel of a CPU or an NVIDIA GPU.

XLA takes about 4 ms to compile one equation of a physics step, so a minute for all.
"""
_EXPECT = (
    "What simd.vectorize would make a kernel, such as a step of physics, runs as jax.vmap instead: on a CPU, "
    "Ant then takes about 200 times as long, and XLA compiles its step for 40 s"
)
"""What to expect on a device without kernels; docs/hardware.md says how it was measured."""
vectorized_p = core.Primitive("vectorized")
vectorized_p.multiple_results = True


def mapped(function: Function, shared: Sequence[bool], *operands: Any) -> list[jax.Array]:
    """Applies a function of one example to the rows of operands, like the primitive, but by `jax.vmap`."""
    axes = [None if s else 0 for s in shared]
    return jax.vmap(core.jaxpr_as_fun(function.closed), in_axes=axes)(*operands)


def _admit(function: Function, name: str, reason: str) -> None:
    """Raises SeedbedError, which states `reason`, if a function is too large for `jax.vmap`.

    The limit is LARGEST_FALLBACK.
    """
    equations = count_equations(function.closed.jaxpr)
    if equations > LARGEST_FALLBACK:
        raise SeedbedError(
            f"simd.vectorize({name}): {reason}. It is left to jax.vmap then, and {equations} equations "
            f"are too many (at most {LARGEST_FALLBACK}): XLA would compile for minutes. To wait for it, "
            "call jax.vmap instead of simd.vectorize"
        )


def _types(*operands: Any, function: Function, shared: Sequence[bool], name: str) -> list[Any]:
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
    for one in function.out_avals:
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


# Derivatives


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    function: Function,
    shared: tuple[bool, ...],
    name: str,
) -> tuple[Any, Any]:
    """Implements forward mode: binds the function, and its tangent."""
    moving = tuple(
        not isinstance(t, ad.Zero) and is_differentiable(p)
        for p, t in zip(primals, tangents, strict=True)
    )
    zeros = [
        ad.Zero(a.to_tangent_aval())
        for a in _types(*map(jax.typeof, primals), function=function, shared=shared, name=name)
    ]
    if not any(moving):
        return vectorized_p.bind(*primals, function=function, shared=shared, name=name), zeros
    linear = linearize(function, moving, shared)
    found: Any = vectorized_p.bind(*primals, function=linear.forward, shared=shared, name=name)
    results, kept = found[: len(zeros)], found[len(zeros) :]
    places = [*linear.operands, *(i for i, m in enumerate(moving) if m)]
    flags = [shared[i] for i in linear.operands] + [False] * len(linear.kept)
    made: Any = vectorized_p.bind(
        *(primals[i] for i in linear.operands),
        *(kept[i] for i in linear.kept),
        *(t for t, m in zip(tangents, moving, strict=True) if m),
        function=linear.tangent,
        shared=(*flags, *(shared[i] for i in places[len(linear.operands) :])),
        name=name if name.startswith(_DERIVED) else _DERIVED + name,
    )
    rest = iter(made)
    return results, [
        next(rest) if is_differentiable(r) else z for r, z in zip(results, zeros, strict=True)
    ]


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    function: Function,
    shared: tuple[bool, ...],
    name: str,
) -> list[Any]:
    """Implements reverse mode: binds the transpose of a function that is linear in some operands."""
    linear = tuple(ad.is_undefined_primal(o) for o in operands)
    given = tuple(not isinstance(c, ad.Zero) for c in cotangents)
    if not any(given):
        return [ad.Zero(o.aval) if f else None for o, f in zip(operands, linear, strict=True)]
    pulled = transpose(function, linear, given)
    rows = [c for c, g in zip(cotangents, given, strict=True) if g]
    made: Any = vectorized_p.bind(
        *(operands[i] for i in pulled.operands),
        *rows,
        function=pulled.function,
        shared=(*(shared[i] for i in pulled.operands), *(False for _ in rows)),
        name=name,
    )
    places = [i for i, flag in enumerate(linear) if flag]
    back = dict(zip(places, made, strict=True))
    of_all = [i for i in places if shared[i]]
    back.update(zip(of_all, sum_rows([back[i] for i in of_all]), strict=True))
    return [
        _unvarying(back[i], operands[i].aval) if i in back else None for i in range(len(operands))
    ]


def _unvarying(cotangent: Any, aval: Any) -> Any:
    """Returns the cotangent of an operand that varies over no more mesh axes than its type says: its sum."""
    missing = tuple(sorted(_varying(cotangent) - aval.manual_axis_type.varying))
    return lax.psum(cotangent, missing) if missing else cotangent


_DERIVED = "derivative of "


# On the CPU


def _lower(ctx: Any, *operands: Any, function: Any, shared: Any, name: str) -> Any:
    target = _kernel(function, shared, name)
    if target is None:
        return _lower_mapped(ctx, *operands, function=function, shared=shared, name=name)
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


# On an NVIDIA GPU


def _lower_cuda(ctx: Any, *operands: Any, function: Any, shared: Any, name: str) -> Any:
    rows = ctx.avals_out[0].shape[0] if ctx.avals_out else 0
    # A grid has at least one block, and its size is a number.
    ptx = _ptx(function, shared, name) if isinstance(rows, int) and rows else None
    if ptx is None:
        return _lower_mapped(ctx, *operands, function=function, shared=shared, name=name)
    from seedbed.simd.gpu.call import launch

    return launch(ctx, operands, ptx, shared)


def _ptx(function: Function, shared: tuple[bool, ...], name: str) -> str | None:
    """Returns the PTX of a kernel, or None if `jax.vmap` replaces it, with the warnings of `_kernel`."""
    try:
        from seedbed.simd.store import build
    except ImportError as error:
        return _do_without(f"install llvmlite ({error})", function, name)
    try:
        return build.ptx(function, shared)
    except Unsupported as error:
        return _refused(error, function, name)


# Elsewhere


def _lower_elsewhere(ctx: Any, *operands: Any, function: Any, shared: Any, name: str) -> Any:
    platforms = ctx.platforms or ctx.module_context.platforms
    where = " and ".join(platforms)
    text = f"there are kernels for CPUs and NVIDIA GPUs, not for {where}. {_EXPECT}"
    if (equations := count_equations(function.closed.jaxpr)) > LARGEST_FALLBACK:
        # Here there is nothing faster, so large functions are compiled, however long that takes.
        text += f". {name} has {equations} equations: XLA may compile for minutes"
    _say(text)
    return _lower_mapped(ctx, *operands, function=function, shared=shared, name=name)


def _lower_mapped(ctx: Any, *operands: Any, function: Any, shared: Any, name: str) -> Any:
    del name
    run = functools.partial(mapped, function, shared)
    if _knows_axes(function):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)
    return _lower_opaque(ctx, *operands, run=run)


# Code inside shard_map that was traced as if outside


def _varying(array: Any) -> frozenset[str]:
    """Returns the manual mesh axes over which an array varies."""
    return jax.typeof(array).manual_axis_type.varying


def _knows_axes(function: Function) -> bool:
    """Returns whether a function was traced with the mesh axes over which its operands vary."""
    return any(a.manual_axis_type.varying for a in function.in_avals)


def _lower_opaque(ctx: Any, *operands: Any, run: Callable[..., Any]) -> Any:
    plain = [a.update(manual_axis_type=_NOWHERE) for a in ctx.avals_in]
    rule = mlir.lower_fun(run, multiple_results=True)
    return rule(ctx.replace(avals_in=plain), *operands)


_NOWHERE = jax.sharding.ManualAxisType()


def _kernel(function: Function, shared: tuple[bool, ...], name: str) -> str | None:
    """Returns the custom-call target of a kernel, or None if `jax.vmap` replaces it.

    Without a kernel it warns, once for each message, and raises SeedbedError if the function is too
    large for `jax.vmap`. If there are no kernels at all on this machine, it warns only once.
    """
    try:
        from seedbed.ffi import Refused
        from seedbed.simd.cpu import compiler
        from seedbed.simd.store import build
    except ImportError as error:
        return _do_without(f"install llvmlite ({error})", function, name)
    reason = compiler.unsupported()
    if reason is not None:
        return _do_without(reason, function, name)
    try:
        return build.target(function, shared)
    except Refused as error:
        return _do_without(str(error), function, name)
    except Unsupported as error:
        return _refused(error, function, name)


def _refused(error: Unsupported, function: Function, name: str) -> None:
    """Warns that one function has no kernel; raises SeedbedError if it is too large for `jax.vmap`."""
    _admit(function, name, str(error))
    _say(f"simd.vectorize({name}) runs as jax.vmap, which is slower: {error}")


def _do_without(reason: str, function: Function, name: str) -> None:
    """Warns, once for each reason, that there are no kernels at all, and what to expect then.

    Raises SeedbedError if the function is too large for `jax.vmap`.
    """
    _admit(function, name, reason)
    _say(f"{reason}. {_EXPECT}")


@functools.cache
def _say(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


vectorized_p.def_abstract_eval(_types)
vectorized_p.def_impl(functools.partial(xla.apply_primitive, vectorized_p))
batching.primitive_batchers[vectorized_p] = _fold
ad.primitive_jvps[vectorized_p] = _jvp
ad.primitive_transposes[vectorized_p] = _transpose
mlir.register_lowering(vectorized_p, _lower_elsewhere)
mlir.register_lowering(vectorized_p, _lower, platform="cpu")
mlir.register_lowering(vectorized_p, _lower_cuda, platform="cuda")
