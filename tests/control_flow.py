"""Programs with loops and branches that kernels must run as their reference does."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

TABLE = np.arange(1, 61, dtype=np.float32).reshape(20, 3)


def over_a_table(x, n):
    """A scan with constants, a carry, rows of a table, and results written down in reverse."""

    def body(carry, row):
        carry = carry * 0.5 + row @ x
        return carry, jnp.stack([carry, row[0] - x[0]])

    return lax.scan(body, x[0], jnp.asarray(TABLE), reverse=True)


def collatz(x, n):
    """Each example leaves when it has reached 1."""
    return lax.while_loop(
        lambda c: c[0] > 1,
        lambda c: (jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1),
        (jnp.abs(n) % 50 + 1, 0),
    )


def nested(x, n):
    """A counted loop around one that runs until each example has enough."""

    def outer(i, total):
        def goes_on(c):
            return (c[0] < 3.0 + i) & (c[1] < 20)

        grown, steps = lax.while_loop(
            goes_on, lambda c: (c[0] + x[1] ** 2 + 0.1, c[1] + 1), (0.0, 0)
        )
        return total + grown * steps

    return lax.fori_loop(0, 20, outer, x[0])


def in_memory(x, n):
    """An array that a loop reads and writes by its index, and that is read afterwards."""

    def body(i, y):
        y = y.at[i + 1].set(y[i] * 0.9 + x[i % 3])
        return y.at[0].add(y[i + 1])

    y = lax.fori_loop(0, 30, body, jnp.zeros(31).at[0].set(x[0]))
    return y, y[3:7].sum()


def by_own_index(x, n):
    """An index that differs between examples."""
    i = jnp.abs(n) % 20
    y = jnp.zeros(5).at[i % 5].set(x[1])
    return jnp.asarray(TABLE)[i], x[i % 3], y


FAR = np.arange(1, 1201, dtype=np.float32).reshape(400, 3)


def by_own_index_far(x, n):
    """Indices that differ between examples, in arrays too long to compare with every place."""
    first = jnp.abs(n) * 4

    def body(c):
        k, y, on, counts = c
        place = (first + k * 7) % 300
        y = y.at[place].add(x[k % 3] * jnp.asarray(FAR)[place, k % 3])
        on = on.at[place].set(~on[place + 1])
        return k + 1, y, on, counts.at[(first + k * k) % 270].max(k)

    start = 0, jnp.zeros(310), jnp.arange(310) % 3 == 0, jnp.zeros(270, jnp.int32)
    _, y, on, counts = lax.while_loop(lambda c: c[0] < jnp.abs(n) % 9, body, start)
    beyond = jnp.asarray(FAR).at[first * 3, 1].get(mode="fill", fill_value=-1.0)
    return (
        y.sum(),
        y[first % 310],
        on[first % 310],
        counts[first % 270],
        jnp.asarray(FAR)[first],
        beyond,
    )


def branches(x, n):
    return lax.switch(
        n % 3, [lambda v: v, lambda v: v[::-1] * 2, lambda v: jnp.full(3, v.sum())], x
    ), lax.cond(n > 0, lambda: x[0], lambda: -x[1])


def newton(x, n):
    """A loop whose carry is a matrix, with a condition on all of it."""
    a = jnp.outer(x, x) + 3.0 * jnp.eye(3)

    def body(c):
        y, k = c
        return y @ (2.0 * jnp.eye(3) - a @ y), k + 1

    def goes_on(c):
        return (jnp.max(jnp.abs(a @ c[0] - jnp.eye(3))) > 1e-3) & (c[1] < 60)

    start = a.T / (jnp.max(jnp.sum(jnp.abs(a), 0)) * jnp.max(jnp.sum(jnp.abs(a), 1)))
    return lax.while_loop(goes_on, body, (start, 0))


PROGRAMS = (
    over_a_table,
    collatz,
    nested,
    in_memory,
    by_own_index,
    by_own_index_far,
    branches,
    newton,
)


def batch(rows, dtype=np.float32):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 3)).astype(dtype), rng.integers(-99, 99, rows, np.int32)
