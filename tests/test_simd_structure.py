"""What moves, reduces, searches and indexes arrays, of drawn shapes and parameters, against jax.vmap.

A case draws its parameters and returns a function of two arrays of one shape and type, and two int32 indices.
Numbers are powers of two, so that sums and products are exact in any order.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from seedbed.simd import vectorize
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import Unsupported
from seedbed.types import SeedbedError
from simd_reference import evaluate

pytestmark = pytest.mark.usefixtures("no_fallback")

ROWS = 37  # more than two tiles, and no whole number of them
NUMBERS = {
    "float32": [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, -2.0, np.inf, -np.inf, np.nan],
    "int32": [0, 1, -1, 2, 3, -5, 12345, 2**31 - 1, -(2**31)],
    "uint32": [0, 1, 2, 3, 5, 12345, 2**31, 2**32 - 1],
    "bool": [False, True],
}


# Moves


def axis_of(draw, shape):
    return draw(st.integers(0, len(shape) - 1))


def pads(draw, shape, dtype):
    config = []
    for size in shape:
        inner = draw(st.integers(0, 2))
        whole = size + max(size - 1, 0) * inner
        low = draw(st.integers(-whole, 3))
        config.append((low, draw(st.integers(-whole - min(low, 0) - max(low, 0), 3)), inner))
    return lambda x, y, i, j: lax.pad(x, y.reshape(-1)[0] if y.size else y.sum(dtype=dtype), config)


def tiles(draw, shape, dtype):
    reps = draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape)))
    return lambda x, y, i, j: (lax.tile(x, reps), jnp.tile(y, (2, *reps)))


def repeats(draw, shape, dtype):
    axis, times = axis_of(draw, shape), draw(st.integers(0, 3))
    each = np.array(draw(st.lists(st.integers(0, 2), min_size=shape[axis], max_size=shape[axis])))
    total = int(each.sum())
    return lambda x, y, i, j: (
        jnp.repeat(x, times, axis),
        jnp.repeat(y, each.astype(int), axis, total_repeat_length=total),
    )


def reversals(draw, shape, dtype):
    axes = draw(st.sets(st.integers(0, len(shape) - 1)))
    return lambda x, y, i, j: lax.rev(x, tuple(axes))


def splits(draw, shape, dtype):
    axis = axis_of(draw, shape)
    cut = draw(st.integers(0, shape[axis]))
    return lambda x, y, i, j: (
        lax.split(x, (cut, shape[axis] - cut), axis=axis),
        jnp.unstack(y, axis=axis),
    )


def joins(draw, shape, dtype):
    axis, part = axis_of(draw, shape), draw(st.integers(0, 2))
    place = draw(st.integers(0, len(shape)))
    return lambda x, y, i, j: (
        lax.concatenate([x, lax.slice_in_dim(y, 0, min(part, shape[axis]), axis=axis), y], axis),
        jnp.stack([x, y, x], place),
    )


def shapes(draw, shape, dtype):
    place = draw(st.integers(0, len(shape)))
    order = draw(st.permutations(range(len(shape))))
    return lambda x, y, i, j: (
        lax.squeeze(lax.expand_dims(x, (place,))[None], (0,)),
        lax.transpose(y, order).reshape(-1),
        lax.reshape(x, shape[::-1]),
        lax.broadcast_in_dim(y, (2, *shape, 3), tuple(range(1, len(shape) + 1))),
    )


def slices(draw, shape, dtype):
    starts = [draw(st.integers(0, size)) for size in shape]
    ends = [draw(st.integers(low, size)) for low, size in zip(starts, shape, strict=True)]
    steps = [draw(st.integers(1, 3)) for _ in shape]
    return lambda x, y, i, j: (lax.slice(x, starts, ends, steps), y[..., ::-2])


def rolls(draw, shape, dtype):
    axis, shift = axis_of(draw, shape), draw(st.integers(-5, 5))
    return lambda x, y, i, j: (jnp.roll(x, shift, axis), jnp.roll(y, shift))


def numbered(draw, shape, dtype):
    axis, kind = axis_of(draw, shape), draw(st.sampled_from(["float32", "int32", "uint32"]))
    return lambda x, y, i, j: (lax.broadcasted_iota(kind, shape, axis), jnp.tril(jnp.stack([x, y])))


def selections(draw, shape, dtype):
    count = draw(st.integers(1, 4))
    cases = [(0, 1), (1, 0), (1, 1), (0, 0)][:count]

    def function(x, y, i, j):
        pair = x, y
        chosen = [jnp.stack([pair[a], pair[b]]) for a, b in cases]
        by_elements = jnp.broadcast_to(
            i + jnp.arange(2).reshape(2, *(1 for _ in shape)), (2, *shape)
        )
        return (
            lax.select_n(i, *chosen),
            lax.select_n(by_elements, *chosen),
            lax.select_n(i > 0, x, y),
            jnp.where(x == y, x, y),
        )

    return function


# Reductions and searches


def reductions(draw, shape, dtype):
    axes = tuple(draw(st.sets(st.integers(0, len(shape) - 1))))
    if not all(shape):  # see test_reductions_of_nothing
        return lambda x, y, i, j: x
    return functools.partial(reduce_by_all, axes, dtype)


def reduce_by_all(axes, dtype, x, *_):
    functions = [lax.reduce_max, lax.reduce_min]
    functions += [] if dtype == "bool" else [lax.reduce_sum, lax.reduce_prod]
    functions += [] if dtype == "float32" else [lax.reduce_and, lax.reduce_or, lax.reduce_xor]
    return [f(x, axes) for f in functions]


def searches(draw, shape, dtype):
    axes = [k for k, size in enumerate(shape) if size]
    if not axes:
        return lambda x, y, i, j: x
    axis, kind = draw(st.sampled_from(axes)), draw(st.sampled_from(["int32", "uint32"]))
    return lambda x, y, i, j: (lax.argmax(x, axis, kind), lax.argmin(y, axis, kind))


def running(draw, shape, dtype):
    axis, reverse = axis_of(draw, shape), draw(st.booleans())
    functions = [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin]
    if dtype == "bool":
        return lambda x, y, i, j: jnp.cumsum(x, axis)
    return lambda x, y, i, j: [f(x, axis, reverse) for f in functions]


def bounds(draw, shape, dtype):
    def function(x, y, i, j):
        flat = y.reshape(-1)
        low, high = (flat[0], flat[-1]) if y.size else (y.sum(dtype=dtype),) * 2
        return lax.clamp(low, x, high), lax.clamp(y, x, y)

    return (lambda x, y, i, j: x) if dtype == "bool" else function


def products(draw, shape, dtype):
    # A bool is a literal 1 or 0, which annihilates what is not finite: `mixed_products` has finite ones.
    other = draw(st.sampled_from([dtype] if dtype == "bool" else ["float32", "int32"]))
    axes = draw(st.sets(st.integers(0, len(shape) - 1)))
    batch = [k for k in range(len(shape)) if k not in axes and draw(st.booleans())]
    dims = ((sorted(axes), sorted(axes)), (batch, batch))
    return lambda x, y, i, j: lax.dot_general(x, y.astype(other), dims)


# Indices: of each example, and the same for all


def slices_somewhere(draw, shape, dtype):
    sizes = [draw(st.integers(0, size)) for size in shape]
    fixed = [draw(st.integers(-5, 5)) for _ in shape]

    def function(x, y, i, j):
        own, mixed = [i, j, i + j][: len(shape)], [i, *fixed[1:]]
        unsigned = [lax.convert_element_type(k, jnp.uint32) for k in own]
        return [lax.dynamic_slice(x, at, sizes) for at in (own, mixed, fixed, unsigned)]

    return function


def updates_somewhere(draw, shape, dtype):
    sizes = [draw(st.integers(0, size)) for size in shape]
    fixed = [draw(st.integers(-5, 5)) for _ in shape]

    def function(x, y, i, j):
        part = lax.slice(y, [0] * len(shape), sizes)
        places = [i, j, i + j][: len(shape)], [*fixed[:-1], j], fixed
        return [lax.dynamic_update_slice(x, part, at) for at in places]

    return function


def takes(draw, shape, dtype):
    axis = axis_of(draw, shape)
    mode = draw(st.sampled_from(["clip", "fill", "wrap"]))
    if not shape[axis]:
        return lambda x, y, i, j: x
    known = np.array(draw(st.lists(st.integers(-5, 5), max_size=4)), np.int32)
    return lambda x, y, i, j: (
        jnp.take(x, jnp.stack([i, j]), axis, mode=mode),
        jnp.take(y, known, axis, mode=mode),
        jnp.roll(x, i, axis),
        lax.dynamic_index_in_dim(y, j, axis),
    )


FAMILIES = {
    "moves": [
        pads,
        tiles,
        repeats,
        reversals,
        splits,
        joins,
        shapes,
        slices,
        rolls,
        numbered,
        selections,
    ],
    "reductions": [reductions, searches, running, bounds, products],
    "indices": [slices_somewhere, updates_somewhere, takes],
}


def by_reference(function, args):
    structs = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in args]
    closed = jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*structs)
    return evaluate(trace(closed, [False] * len(args), limit=50_000), args)


def by_kernel(function, args):
    return jax.tree.leaves(vectorize(function)(*args))


def assert_same(got, want, name):
    assert (got.shape, got.dtype) == (want.shape, want.dtype), name
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want), err_msg=name)


@pytest.mark.quick("reductions-float32")
@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_structure(family, dtype):
    @settings(max_examples=5, deadline=None, database=None)
    @given(st.data())
    def drawn(data):
        shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
        cases = {c.__name__: c(data.draw, shape, dtype) for c in FAMILIES[family]}
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        arrays = [rng.choice(np.array(NUMBERS[dtype], dtype), (ROWS, *shape)) for _ in range(2)]
        args = [*arrays, *rng.integers(-7, 8, (2, ROWS)).astype(np.int32)]

        def function(*a):
            return [case(*a) for case in cases.values()]

        want = jax.jit(jax.vmap(function))(*args)
        names = [n for n, w in zip(cases, want, strict=True) for _ in jax.tree.leaves(w)]
        for engine in (by_reference, by_kernel):
            results = engine(function, args)
            for name, got, expected in zip(names, results, jax.tree.leaves(want), strict=True):
                assert_same(got, expected, f"{name} {engine.__name__} {shape}")

    drawn()


@pytest.mark.parametrize("dtype", NUMBERS)
def test_reductions_of_nothing(dtype):
    x = np.zeros((ROWS, 2, 0, 3), dtype)

    def function(x):
        return [reduce_by_all(axes, dtype, x) for axes in ((), (0,), (1,), (1, 2), (0, 1, 2))]

    want = jax.tree.leaves(jax.jit(jax.vmap(function))(x))
    for engine in (by_reference, by_kernel):
        for got, expected in zip(engine(function, [x]), want, strict=True):
            assert_same(got, expected, engine.__name__)


def spd(x):
    return jnp.outer(x, x) + 3 * jnp.eye(4)


def add_squares(x):
    return lax.reduce(x, jnp.float32(0), lambda total, v: total + v * v, (0,))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (jnp.sort, "sort"),
        (jnp.argsort, "sort"),
        (lambda x: lax.top_k(x, 2), "top_k"),
        (lax.cumlogsumexp, "cumlogsumexp"),
        (lambda x: jnp.linalg.cholesky(spd(x)), "cholesky"),
        (lambda x: jnp.linalg.solve(spd(x), x), "'lu'"),
        (lambda x: jnp.convolve(x, x), "conv_general_dilated"),
        (lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "VALID"), "reduce_window_sum"),
        (lax.lgamma, "lgamma"),
        (lax.digamma, "digamma"),
        (lambda x: jnp.take_along_axis(spd(x), jnp.arange(4)[:, None], 1), "batching dimensions"),
        (lambda x: x.astype(jnp.bfloat16), "bfloat16"),
        (lambda x: x.astype(jnp.float16), "float16"),
        (lambda x: x.astype(jnp.int8), "int8"),
        (lambda x: lax.bitcast_convert_type(x, jnp.uint16), "uint16"),
        (lambda x: lax.complex(x, x).real, "complex"),
        (add_squares, "'reduce'"),
        (lambda x: x.at[1].apply(jnp.sin), "scatter that applies"),
    ],
)
def test_what_has_no_scalar_form_is_named(function, name):
    with pytest.raises(Unsupported, match=name):
        by_reference(function, [np.ones((ROWS, 4), np.float32)])


def test_sorting_runs_as_vmap():
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    with pytest.warns(RuntimeWarning, match="'sort'"):
        np.testing.assert_array_equal(vectorize(jnp.sort)(x), np.sort(x, axis=1))


def test_selected_literals_have_kernels_under_x64():
    x = np.float32([-2, -1, 0, 3])
    with jax.enable_x64(True):
        sign = vectorize(lambda x: x * jnp.where(x < 0, -1, 1) + jnp.where(x > 2, 0.5, 0))(x)
    np.testing.assert_array_equal(sign, np.float32([2, 1, 0, 3.5]))


def test_float64_is_refused_by_name():
    x = np.ones((ROWS, 4), np.float32)
    with jax.enable_x64(True):
        with pytest.raises(SeedbedError, match=r"argument \[0\] is float64; convert"):
            vectorize(jnp.sin)(x.astype(np.float64))
        with pytest.warns(RuntimeWarning, match="no float64: use float32"):
            made = vectorize(lambda x: jnp.exp(x.astype(jnp.float64)).astype(jnp.float32))(x)
    np.testing.assert_allclose(made, np.exp(x), rtol=1e-6)
