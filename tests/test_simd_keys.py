"""Random keys as their data: the same numbers as JAX's, through loops, branches and indexing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from seedbed.simd.frontend.keys import without_keys
from seedbed.simd.frontend.trace import trace
from seedbed.simd.ir.program import Unsupported
from simd_reference import evaluate

pytestmark = pytest.mark.filterwarnings("error::DeprecationWarning")


def seeds_and_splits(seed, data):
    key = jax.random.key(seed)
    first, second = jax.random.split(key)
    folded = jax.random.fold_in(jax.random.clone(second), seed)
    return jax.random.key_data(first), jax.random.bits(folded, (2, 3))


def in_loops(seed, data):
    """Keys as carries and rows of a scan, and as the carry of a while loop."""
    key = jax.random.wrap_key_data(data)

    def body(carry, row):
        carry, used = jax.random.split(carry)
        return carry, jax.random.uniform(used) + jax.random.uniform(row)

    last, drawn = lax.scan(body, key, jax.random.split(key, 3))
    patient = lax.while_loop(
        lambda c: c[1] < 0.7,
        lambda c: (jax.random.fold_in(c[0], 1), jax.random.uniform(c[0])),
        (last, 0.0),
    )
    return drawn, jax.random.key_data(last), patient[1]


def chosen(seed, data):
    """Keys that a branch or an index picks."""
    keys = jax.random.split(jax.random.wrap_key_data(data), 4)
    branch = lax.cond(seed > 0, lambda: keys[0], lambda: keys[3])
    picked = jnp.where(seed > 2, branch, keys[seed % 4])
    return jax.random.uniform(picked), jax.vmap(jax.random.uniform)(keys[1:])


def folded_over_one_side(seed, data):
    key, numbers = jax.random.wrap_key_data(data), jnp.arange(3) + seed
    keys = jax.random.split(key, 3)
    folds = [
        jax.vmap(jax.random.fold_in, axes)(*given)
        for axes, given in (
            ((None, 0), (key, numbers)),
            ((0, None), (keys, seed)),
            ((0, 0), (keys, numbers)),
        )
    ]
    each = jax.vmap(lambda k: jax.vmap(lambda n: jax.random.fold_in(k, n))(numbers))(keys)
    return jax.random.key_data(jnp.stack(folds)), jax.random.key_data(each)


def distributions(seed, data):
    key = jax.random.wrap_key_data(data)
    return (
        jax.random.normal(key, (2,)),
        jax.random.uniform(key, (2,), minval=-1.0),
        jax.random.randint(key, (2,), -3, 10),
        jax.random.bernoulli(key, 0.3, (2,)),
        jax.random.categorical(key, jnp.arange(3.0)),
        jax.random.exponential(key),
        jax.random.truncated_normal(key, -1.0, 1.0),
        jax.random.gumbel(jax.random.PRNGKey(seed)),
    )


@pytest.mark.parametrize(
    "function", [seeds_and_splits, in_loops, chosen, folded_over_one_side, distributions]
)
def test_numbers_are_those_of_jax(function):
    seeds = np.arange(-3, 6, dtype=np.int32)
    data = np.random.default_rng(0).integers(0, 2**32, (9, 2), dtype=np.uint32)
    erased = without_keys(jax.make_jaxpr(function)(seeds[0], data[0]))
    want = jax.tree.leaves(jax.jit(jax.vmap(function))(seeds, data))
    results = evaluate(trace(erased, [False, False], limit=10_000), [seeds, data])
    for got, expected in zip(results, want, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


def test_operands_that_are_keys_become_their_data():
    keys = jax.random.split(jax.random.key(1), 3)
    erased = without_keys(jax.make_jaxpr(lambda keys: keys[1:])(keys))
    (rest,) = jaxpr_as_fun(erased)(jax.random.key_data(keys))
    np.testing.assert_array_equal(rest, jax.random.key_data(keys)[1:])


def test_functions_without_keys_are_left_alone():
    closed = jax.make_jaxpr(lambda x: lax.fori_loop(0, 3, lambda i, y: y * x, x))(1.0)
    assert without_keys(closed) is closed


def test_what_keys_cannot_do_is_named():
    closed = jax.make_jaxpr(lambda key: jax.random.gamma(key, 2.0))(jax.random.key(0))
    with pytest.raises(Unsupported, match="random_gamma"):
        without_keys(closed)
