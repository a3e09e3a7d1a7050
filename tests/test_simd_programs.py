"""Loops, branches, arrays in memory and guards: simd.vectorize against jax.vmap."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from seedbed.simd import inspect, vectorize
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import Unsupported
from seedbed.simd.schedule.plan import Liveness

pytestmark = pytest.mark.usefixtures("no_fallback")

N = 20
TABLE = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
ORDER = np.random.default_rng(1).permutation(N).astype(np.int32)
ROWS = 21  # more than a tile, and no whole number of them
RAMP = np.arange(N, dtype=np.float32)


def at(y, i):
    return lax.dynamic_index_in_dim(y, i, 0, keepdims=False)


def put(y, value, i):
    return lax.dynamic_update_index_in_dim(y, jnp.asarray(value, y.dtype), i, 0)


def masked(y, mask, value, i):
    """The write that guards know."""
    return put(y, jnp.where(mask, value, at(y, i)), i)


def heavy(x):
    """Costs enough to be worth a branch."""
    for _ in range(3):
        x = jnp.sqrt(x * x + 1) / (x * x + 0.5)
    return x


def scaled(y, i, t=0.0):
    return put(y, at(y, i) * 0.5 + t, i)


def sweep(y, t=0.0):
    """Writes every element in turn."""
    return lax.fori_loop(0, N, lambda i, y: scaled(y, i, t + i), y)


def run_while(bound, body, init):
    """Examples leave one after the other."""
    return lax.while_loop(lambda c: c[0] < bound, lambda c: (c[0] + 1, body(c)), (0, init))[1]


# Scans


def lengths(x, n):
    return [
        lax.scan(lambda c, r: (c * 0.5 + r @ x, (c, r > c)), x[0], TABLE[:length], reverse=reverse)
        for length in (0, 1, 2, N)
        for reverse in (False, True)
    ]


def written_then_read(x, n):
    _, (a, b) = lax.scan(lambda c, r: (c * 0.5 + r @ x, (c * r, c > 0)), x[0], TABLE)
    c, d = lax.scan(lambda c, p: (c + p[0].sum() * p[1], c * p[0]), 0.0, (a, b), reverse=True)
    return c, lax.fori_loop(0, N, lambda i, s: s * 0.9 + at(a, i)[1] * at(b, i) + d[i, 0], 0.0), a


def arrays_go_round(x, n):
    """Two arrays swapped, three rotated, an old state kept, one unchanged, one state twice."""
    first, second = RAMP * x[0], RAMP * x[1]

    def body(i, c):
        (a, b), (p, q, r), (old, new), same, (u, v) = c
        pair = b, put(a, x[2] * i + at(b, i), i)
        three = q, r, put(p, at(q, i) - at(r, i), i)
        both = put(u, at(v, i) + i, i)
        return pair, three, (new, put(new, at(old, i) + i, i)), same, (both, both)

    init = (first, second), (first, second, first), (first, second), second, (first, second)
    return lax.fori_loop(0, N - 1, body, init), lax.fori_loop(
        0, N, lambda i, s: s + at(first, i), 0.0
    )


def swapped_by_inner_loops(x, n):
    def body(i, c):
        a, b = c
        return lax.fori_loop(0, N, lambda j, b: scaled(b, j, at(a, j) + i), b), a

    return lax.fori_loop(0, N - 3, body, (RAMP * x[0], RAMP * x[1]))


def begun_anew(x, n):
    """An inner loop begins with the same array in each iteration."""
    made = sweep(RAMP * x[0])

    def outer(k, t):
        own = put(sweep(RAMP * x[1]), t, k)  # a loop that depends on no iteration
        return t * 0.5 + (sweep(made, t * 0.01).sum() + own.sum()) * 1e-3

    return lax.fori_loop(0, N, outer, 0.0), run_while(n % 5, lambda c: outer(*c), 0.0)


def old_states(x, n):
    y = sweep(RAMP * x[0])
    changed, again = put(y, 5.0, n * 0 + 3), sweep(y, x[1])
    total = lax.fori_loop(0, N, lambda i, c: c + at(y, i), changed[3] + again[4])

    def outer(k, c):
        z, s = c
        after = put(z, s, k)
        read = lax.fori_loop(0, N, lambda i, c: c * 0.9 + at(z, i), at(after, k) + 1)
        return after, read * 0.1

    return changed, again, total, sweep(y), lax.fori_loop(0, N, outer, (y, x[1]))


def rows_by_table(x, n):
    def body(k, c):
        y, p, s = c
        j = jnp.asarray(ORDER)[k]
        square = lax.dynamic_slice(y, (k, k % 2), (2, 2))
        y = lax.dynamic_update_slice(y, square * 0.5 + x[None, :2], (k - 1, 1 - k % 2))
        return y.at[j].add(x), p.at[j].set((p[jnp.asarray(ORDER)[j]] + k) % N), s + square.sum()

    y, p, s = lax.fori_loop(0, N, body, (jnp.asarray(TABLE), jnp.asarray(ORDER), 0.0))
    return y, p, s, y[p]


def same_for_all(x, n):
    """Carries that are the same for all examples, but for what is read from memory."""

    def body(c):
        y, t, i = c
        y = put(y, i * 2.0, i)
        return y, t + at(y, i // 2), i + 1

    scanned = lax.fori_loop(0, N, lambda i, c: body(c), (jnp.zeros(N), 0.0, 0))
    ran = lax.while_loop(lambda c: c[1] < 30, body, (jnp.zeros(N), 0.0, 0))
    doubled = lax.while_loop(
        lambda c: c[0] < n % 7, lambda c: (c[0] + 1, c[1] * 2), (0, jnp.float32(1))
    )
    return scanned, ran, doubled, x


# While loops


def rewritten_by_inner_loops(x, n):
    """Arrays of a while loop that inner loops write, in place or not, while some examples have left."""

    def whole(c):
        return lax.fori_loop(0, N, lambda i, y: put(y, x[1] + c[0], i) * 0.5 + at(y, i), c[1])

    def crossed(c):
        def body(i, p):
            return put(p[1], x[1] + c[0], i), put(p[0], at(p[1], i) * 0.5, i)

        return lax.fori_loop(0, N - 1, body, c[1])

    def deep(c):
        def inner(i, y):
            return run_while((n + i) % 3, lambda d: sweep(d[1], d[0] + i), y)

        return lax.fori_loop(0, N - 2, inner, c[1])

    y = RAMP * x[0]
    return [
        run_while(n % 4, lambda c: sweep(c[1], c[0]), y),
        run_while(n % 4, whole, y),
        run_while(n % 4, crossed, (y, y + 1)),
        run_while(n % 3, deep, y),
    ]


def while_in_while(x, n):
    def inner(c):
        return run_while(
            n % 3 + c[0], lambda d: put(d[1], at(d[1], d[0]) + c[0] + x[0], d[0]), c[1]
        )

    def goes_on(c):
        total = lax.fori_loop(0, N, lambda i, s: s * 0.9 + at(c[1], i), 0.0)
        return (lax.while_loop(lambda d: d < total, lambda d: d * 1.5 + 1, 0.0) < 20) & (c[0] < 9)

    y = jnp.ones(N) * x[0]
    grown = lax.while_loop(goes_on, lambda c: (c[0] + 1, sweep(c[1], x[1] ** 2)), (n % 5, y))
    return run_while(n % 5, inner, y), grown, run_while(-1, inner, y), run_while(5, inner, y)


def bools_and_ints(x, n):
    def body(c):
        b, f, u, i = c
        b = put(b, at(b, (i + 1) % 6) ^ f, i % 6)
        return b, ~f | (x[0] > i), u * jnp.uint32(3) + at(b, i % 6), i + 1

    init = jnp.arange(6) % 2 == 0, n > 0, jnp.uint32(7), 0
    counted = lax.fori_loop(0, N, lambda _, c: body(c), init)
    return counted, lax.while_loop(lambda c: c[1] | (c[3] < n % 9) & (c[3] < 30), body, init)


def branches(x, n):
    arms = [
        lambda v: v,
        lambda v: heavy(v) * 2,
        lambda v: v[::-1],
        lambda v: sweep(v[0] * RAMP)[:3],
    ]
    memory = sweep(RAMP * x[1])
    either = lax.cond(n % 2 == 0, lambda y: put(y, 9.0, n), lambda y: sweep(y), memory)
    return [lax.switch(i, arms, x) for i in (n % 9 - 3, jnp.int32(7))], either, memory


# Indices


def gathers(x, n):
    table, i = jnp.asarray(TABLE), jnp.stack([n % 50, -n, n % 7, jnp.abs(n)])
    rows = [table.at[i].get(mode=mode) for mode in ("clip", "fill", "drop", None)]
    numbers = [jnp.arange(4, dtype=t).at[n % 9].get(mode="fill") for t in (jnp.int32, jnp.uint32)]
    unsigned = lax.dynamic_slice(x, (n.astype(jnp.uint32),), (2,))  # of -1, the last
    counted = lax.fori_loop(
        0, N, lambda k, s: s * 0.9 + table[jnp.stack([k * 3, k])].sum() + x[k - 2], 0.0
    )
    return rows, numbers, unsigned, counted, table[i], (x > 0)[i], x.at[i].get(mode="fill")


def scatters(x, n):
    y = jnp.arange(12.0).reshape(4, 3) + x[None]
    i, new = jnp.stack([n % 6, n % 5 - 1, n % 4, n % 4]), jnp.arange(12.0).reshape(4, 3) * x[None]
    modes = [
        [y.at[i].set(new[0], mode=m), y.at[i].add(new, mode=m), y.at[i].max(new, mode=m)]
        for m in ("clip", "drop")
    ]

    def body(k, c):
        y, b = c
        y = y.at[k % 7].add(x, mode="drop").at[k - 3].set(x * k).at[k % 9, 1].mul(0.5, mode="clip")
        return y, b.at[k % 8].set(y[k % 4, 0] > 0, mode="drop").at[k % 5].set(n > k)

    modes.append([y.at[i].subtract(new, mode=m) for m in ("clip", "drop")])
    outside = x.at[jnp.asarray([5, -9, 2])].set(2.0)
    return modes, outside, y.at[:, n % 4].set(9), lax.fori_loop(0, N, body, (y, jnp.zeros(5, bool)))


def mixed_products(x, n):
    """Products of two types, which JAX converts to that of the result."""
    which, whole = n > jnp.arange(3), jnp.array([1, 2, 3])
    fixed = jnp.array([1, 2, 3]) @ jnp.array([0.5, 0.25, 0.1])
    reached = jnp.stack([which, ~which, which]) @ which
    return which @ x, x @ which, whole @ x, (n * whole) @ x, fixed, reached


def empties(x, n):
    none = x[:0]

    def body(c, r):
        return (c[0], c[1] + c[0].sum() + r.sum() + x[0]), (c[0], r)

    scanned = lax.scan(body, (none, 0.0), jnp.zeros((N, 0)))
    ran = lax.while_loop(lambda c: c[1] < n, lambda c: (c[0], c[1] + 7), (none, 0))
    written = none.at[jnp.zeros(0, jnp.int32)].set(1), jnp.concatenate([none, x])
    return scanned, ran, written, lax.cond(n > 0, lambda: (none, x), lambda: (none * 2, -x))


# Guards


def masks_in_masks(x, n):
    some, few, none = x[0] > 0, (x[0] > 0) & (x[1] > 0), n > 1000
    a = jnp.where(some, heavy(x[0]), 0.0)
    b = jnp.where(few, heavy(x[1]) + heavy(a), a)
    c = jnp.where(some, heavy(b) + a, b)
    d = jnp.where(some, heavy(c), jnp.where(some, heavy(c + 1), x[2]))
    e = jnp.where(none, jnp.where(some, heavy(d), heavy(x[2])), heavy(a + d))
    return a, b, c, d, e, jnp.where(~some, heavy(e), d), jnp.where(none, heavy(e), e)


def guarded_loops(x, n):
    some, none = n % 3 == 0, n > 1000

    def body(i, c):
        y, z, s = c
        inner = lax.fori_loop(0, N, lambda j, t: t * 0.5 + heavy(x[1] + j) + at(y, j), s)
        s = jnp.where(none, inner, s)
        y, old = masked(y, some, heavy(s + i), i), at(y, i)
        y = masked(y, none, heavy(s - i), i + 1)
        z = put(z, x[2] + i, i)  # whatever the mask of the next write
        z = masked(z, none, heavy(s), i)
        return y, z, jnp.where(some, heavy(at(y, i)) + old, s * 0.5)

    return lax.fori_loop(0, N - 1, body, (RAMP * x[2], RAMP, x[1]))


def loops_of_guarded_writes(x, n):
    def body(k, c, mask):
        y, s = c
        old = at(y, k)
        y, _ = lax.scan(
            lambda y, j: (masked(y, mask, heavy(at(y, j) + s), j), None), y, jnp.arange(N)
        )
        y = masked(y, mask, heavy(at(y, k) + old), k)
        return y, jnp.where(mask, heavy(s) + old, s * 0.5 + at(y, k) * 0.1)

    y, masks = sweep(RAMP * x[0]), (n > 1000, n % 3 == 0)
    counted = [lax.fori_loop(0, N, lambda k, c, m=m: body(k, c, m), (y, x[1])) for m in masks]
    return counted, run_while(n % 4, lambda c: body(c[0], c[1], masks[1]), (y, x[1]))


def sparse_rows(x, n):
    """Only rows where some lane is active matter: some, none, the first, by lane and number of trips."""
    places = jnp.arange(N, dtype=jnp.int32)
    actives = (places + n) % 7 == 0, places > 1000 + n, (places == 0) & (n > 0), places * 3 > n

    def body(c, row):
        (y, s, count), (active, i, table) = c, row
        most = active & (at(y, i) < 2)
        y = masked(y, active, heavy(s * table + i), N - 1 - i)
        y, _ = lax.scan(lambda y, j: (masked(y, most, at(y, j) * 0.5 + s, j), None), y, places)
        s = jnp.where(active, s * 0.5 + at(y, i), s)
        return (y, s, jnp.where(active, count + i, count)), None

    def visit(c, active):
        return lax.scan(body, c, (active, places, TABLE[:, 0]))[0]

    first = jnp.outer(x[:1], RAMP)[0] * 0.1, x[1], jnp.int32(0)
    counted = [visit(first, active) for active in actives]
    return counted, [run_while(n % 4, lambda c, a=a: visit(c[1], a), first) for a in actives]


PROGRAMS = (
    lengths,
    written_then_read,
    arrays_go_round,
    swapped_by_inner_loops,
    begun_anew,
    old_states,
    rows_by_table,
    same_for_all,
    rewritten_by_inner_loops,
    while_in_while,
    bools_and_ints,
    branches,
    gathers,
    scatters,
    mixed_products,
    empties,
    masks_in_masks,
    guarded_loops,
    loops_of_guarded_writes,
    sparse_rows,
)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(ROWS, 3)).astype(np.float32), rng.integers(-9, 99, ROWS, np.int32)


def assert_same(function, *args, tolerance=2e-5):
    """`function` takes what batches, and the operands of the batch."""
    want = jax.tree.leaves(jax.jit(lambda *a: function(jax.vmap, *a))(*args))
    results = jax.tree.leaves(jax.jit(lambda *a: function(vectorize, *a))(*args))
    for got, expected in zip(results, want, strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.quick(
    "lengths",
    "begun_anew",
    "rows_by_table",
    "rewritten_by*",
    "bools_and_ints",
    "branches",
    "gathers",
    "scatters",
    "mixed_products",
    "guarded_loops",
    "sparse_rows",
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program):
    assert_same(lambda run, *args: run(program)(*args), *batch())


@pytest.mark.parametrize("flag", [True, False])
def test_shared_operands(flag):
    """A mask, a bound, an array and a number that all examples share."""

    def one(x, n, flag, bound, table, number):
        def dynamic(c):
            return lax.fori_loop(0, bound, lambda j, y: scaled(y, j, c[0] + x[1]), c[1])

        a = jnp.where(flag, heavy(number), 0.5)
        b = jnp.where(flag, heavy(x[0]), a)
        rows = lax.fori_loop(0, N, lambda i, s: s * 0.9 + at(table, i * 7) @ x, 0.0)
        return a, b, rows, table[n % 5], run_while(n % 5, dynamic, RAMP * x[0]), number

    shared = np.bool_(flag), np.int32(13), TABLE, np.float32(2)
    assert_same(lambda run, x, n, *s: run(lambda x, n: one(x, n, *s))(x, n), *batch(), *shared)


def test_rows_that_no_lane_needs_are_not_visited():
    program = jax.make_jaxpr(sparse_rows)(np.ones(3, np.float32), np.int32(1))
    live = Liveness(trace(program, [False] * 2, limit=10**5))
    states = {rows.args[0] for rows in live.rows.values()}
    assert len(live.rows) == 8  # and not the loops inside these
    assert len(states) == 4  # each is listed once


def test_arrays_beyond_a_kernels_memory_are_refused():
    def function(x):
        _, ys = lax.scan(lambda c, i: (c * 0.99 + x, c), x, jnp.arange(60_000))
        return lax.scan(lambda s, y: (s * 0.999 + y, None), jnp.zeros(3), ys)[0]

    with pytest.raises(Unsupported, match="more than 4 MiB for.*smaller arrays"):
        inspect(function, jax.ShapeDtypeStruct((3,), np.float32))


def test_tangents_of_integers_have_no_numbers():
    """A custom derivative is given them, as zeros of JAX's type float0."""

    @jax.custom_jvp
    def picked(x, places):
        return jnp.square(x[places[0]])

    @picked.defjvp
    def tangent(primals, tangents):
        (x, places), (move, _) = primals, tangents
        return picked(x, places), 2 * x[places[0]] * move[places[0]]

    def gradient(x, start):
        return jax.grad(lambda x: picked(x, start + jnp.zeros(2, jnp.int32)))(x)

    x, start = jnp.arange(12.0).reshape(4, 3), jnp.int32([0, 1, 2, 1])
    found = jax.jit(vectorize(gradient))(x, start)
    np.testing.assert_array_equal(found, 2 * x * jax.nn.one_hot(start, 3))
