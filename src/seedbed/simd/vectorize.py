"""A vmap for small functions: it becomes one kernel whose lanes, or threads on a GPU, are the examples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from seedbed.arguments import checked, shown
from seedbed.jaxprs import without_collector
from seedbed.simd.ir.program import DTYPES
from seedbed.simd.primitive import vectorized_p
from seedbed.simd.store.function import Function
from seedbed.types import SeedbedError

LARGEST_CONSTANT = 512
"""The most elements of a closed-over JAX array that is compiled in. A larger one is a shared operand."""
LARGEST_TABLE = 1 << 16
"""The most elements of a closed-over numpy array that is compiled in. A larger one is a shared operand."""


class Example(NamedTuple):
    """A function of one example whose arguments and results are flat lists of arrays; keys are key data."""

    closed: core.ClosedJaxpr
    # the values of its last operands, which all examples share
    shared: list[Any]
    # turns flat results into the pytree that the function returns
    rebuild: Callable[[Sequence[Any]], Any]


@checked
def vectorize(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a batched `fn`, like `jax.vmap(fn)`; on a CPU or an NVIDIA GPU it is one kernel.

    `fn` is a pure function of one example. Its arguments and results are pytrees of small float32,
    int32, uint32 or bool arrays, or of typed PRNG keys. The batched function takes and returns the same
    pytrees with a leading batch axis on every leaf. It works under jit, vmap, shard_map and differentiation
    of any kind: derivatives are kernels, too. On other devices, and with a warning if there is no kernel,
    it runs as `jax.vmap`. In a kernel, a literal zero in `fn` times any number, even
    NaN, is zero, and denormal numbers count as zero; all other arithmetic is that of IEEE 754.

    Closed-over values that are traced, closed-over keys and large closed-over arrays are shared by all
    examples; other closed-over arrays are compiled in. All of them are read when the function is first called
    with arguments of a shape, as under `jax.jit`: what varies must be an argument.

    Raises (when called):
        SeedbedError: there is no leaf, or a leaf has the wrong type, no batch axis or another batch size;
            or the leaves are split over different mesh axes; or `fn` has side effects; or, on a CPU or an
            NVIDIA GPU, `fn` has no kernel and is too large for `jax.vmap`.
    """
    name = getattr(fn, "__qualname__", repr(fn))
    run = jax.jit(functools.partial(_apply, fn, name), inline=True)

    @functools.wraps(fn)
    def batched(*args: Any, **kwargs: Any) -> Any:
        _check(name, args, kwargs)
        return run(*args, **kwargs)

    return batched


def _apply(fn: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (args, kwargs))
    example = trace_example(fn, name, one)
    if any(jax.typeof(s).manual_axis_type.varying for s in example.shared):
        # A value closed over inside shard_map varies over mesh axes; then the arguments must vary too.
        one = jax.tree.map(_varying_example, (args, kwargs))
        example = trace_example(fn, name, one)
    operands = [_data(leaf) for leaf in jax.tree.leaves((args, kwargs))]
    flags = (False,) * len(operands) + (True,) * len(example.shared)
    if not example.closed.out_avals:
        return example.rebuild([])
    results = vectorized_p.bind(
        *operands,
        *example.shared,
        function=Function.of(example.closed),
        shared=flags,
        name=name,
    )
    return example.rebuild(results)


def _varying_example(leaf: Any) -> jax.ShapeDtypeStruct:
    kind = jax.typeof(leaf)
    mesh = jax.sharding.get_abstract_mesh()
    return jax.ShapeDtypeStruct(
        leaf.shape[1:],
        leaf.dtype,
        sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
        manual_axis_type=kind.manual_axis_type,
    )


@without_collector
def trace_example(fn: Callable[..., Any], name: str, arguments: Any) -> Example:
    """Traces `fn` over the leaves of `arguments`: (args, kwargs) of the shapes of one example.

    Raises SeedbedError if `fn` has side effects.
    """
    leaves, tree = jax.tree.flatten(arguments)
    made: list[tuple[Any, list[Any]]] = []

    def flat(*data: Any) -> list[Any]:
        given = [_like(d, leaf.dtype) for d, leaf in zip(data, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, given)
        results, out_tree = jax.tree.flatten(fn(*args, **kwargs))
        made.append((out_tree, [getattr(r, "dtype", None) for r in results]))
        return [_data(r) for r in results]

    closed = jax.make_jaxpr(flat)(*(jax.eval_shape(_data, leaf) for leaf in leaves))
    if closed.effects:
        raise SeedbedError(
            f"simd.vectorize({name}): the function has side effects ({closed.effects}); remove them"
        )
    closed, shared = _share(closed)
    ((out_tree, dtypes),) = made

    def rebuild(results: Sequence[Any]) -> Any:
        typed = [_like(r, dtype) for r, dtype in zip(results, dtypes, strict=True)]
        return jax.tree.unflatten(out_tree, typed)

    return Example(closed, shared, rebuild)


def _share(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[Any]]:
    """Turns constants that are traced, large or keys into operands, which come last.

    Returns the new jaxpr, in which keys are key data, and the values of these operands.
    """
    jaxpr = closed.jaxpr
    pairs = list(zip(jaxpr.constvars, closed.consts, strict=True))
    moved = [(v, c) for v, c in pairs if _is_operand(c)]
    kept = [(v, np.asarray(c)) for v, c in pairs if not _is_operand(c)]
    jaxpr = jaxpr.replace(
        constvars=[v for v, _ in kept], invars=[*jaxpr.invars, *(v for v, _ in moved)]
    )
    closed = core.ClosedJaxpr(jaxpr, [c for _, c in kept])
    dtypes = [v.aval.dtype for v in jaxpr.invars]
    if any(_is_key(d) for d in dtypes):
        typed = closed

        def over_data(*data: Any) -> list[Any]:
            given = [_like(d, dtype) for d, dtype in zip(data, dtypes, strict=True)]
            return core.jaxpr_as_fun(typed)(*given)

        structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
        closed = jax.make_jaxpr(over_data)(*(jax.eval_shape(_data, s) for s in structs))
    return closed, [_data(c) for _, c in moved]


def _is_operand(constant: Any) -> bool:
    if isinstance(constant, jax.core.Tracer) or _is_key(constant.dtype):
        return True
    largest = LARGEST_CONSTANT if isinstance(constant, jax.Array) else LARGEST_TABLE
    return constant.size > largest


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    """Returns the data of keys; returns any other leaf as it is."""
    return jax.random.key_data(leaf) if _is_key(getattr(leaf, "dtype", None)) else leaf


def _like(data: Any, dtype: Any) -> Any:
    """Reverses `_data`: makes keys from their data if `dtype` is a type of keys."""
    if dtype is None or not _is_key(dtype):
        return data
    return jax.random.wrap_key_data(data, impl=_key_impl(dtype))


@functools.cache
def _key_impl(dtype: Any) -> Any:
    found: list[Any] = []
    one = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), one)
    return found[0]


# Checks of the arguments


def _check(name: str, args: Any, kwargs: Any) -> None:
    """Raises SeedbedError, which names the leaf, unless all leaves have valid types and one batch size."""
    leaves = jax.tree.leaves((args, kwargs))
    if not leaves:
        raise SeedbedError(
            f"simd.vectorize({name}): the arguments hold no array; pass at least one"
        )
    size = None
    for i, leaf in enumerate(leaves):
        problem = _problem(leaf)
        if problem is None and size is not None and leaf.shape[0] != size:
            first = _path(0, args, kwargs)
            problem = f"has batch size {leaf.shape[0]}, but {first} has {size}; make them equal"
        if problem is not None:
            raise SeedbedError(f"simd.vectorize({name}): {_path(i, args, kwargs)} {problem}")
        size = leaf.shape[0]


def _problem(leaf: Any) -> str | None:
    if not isinstance(leaf, jax.Array | np.ndarray):
        return f"is {shown(leaf)}; pass an array with a leading batch axis"
    if not _is_key(leaf.dtype) and str(leaf.dtype) not in DTYPES:
        return f"is {leaf.dtype}; convert it to one of {', '.join(DTYPES)}"
    if leaf.ndim == 0:
        return "has no batch axis; give it a leading one"
    return None


def _path(number: int, args: Any, kwargs: Any) -> str:
    path, _ = jax.tree_util.tree_leaves_with_path((args, kwargs))[number]
    kind = "argument " if path[0].idx == 0 else "keyword argument "
    return kind + jax.tree_util.keystr(path[1:])
