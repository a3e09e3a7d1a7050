"""Programs composed at random."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from seedbed.simd.frontend import memory

EXAMPLES = int(os.environ.get("SEEDBED_FUZZ", "6"))
"""Programs that are tried."""


ROWS = 21  # more than a tile, and no whole number of them


SIZE = 6  # of most arrays


TABLE = np.random.default_rng(5).integers(-99, 99, 40).astype(np.int32)


@dataclasses.dataclass
class Scope:
    """What statements read and change, the newest last; all numbers are int32, so results are exact."""

    numbers: list[Any]
    masks: list[Any]
    arrays: list[Any]
    indices: list[Any]


def at(array, i):
    return lax.dynamic_index_in_dim(array, i, 0, keepdims=False)


def put(array, value, i):
    return lax.dynamic_update_index_in_dim(array, value, i, 0)


class Composer:
    """Composes a program from a tape of choices; where it has been used up, the first is taken."""

    def __init__(self, tape):
        self._tape = iter(tape)

    def pick(self, options):
        return options[next(self._tape, 0) % len(options)]

    def any(self, values):
        """Chooses among the newest."""
        return self.pick(values[:-5:-1])

    def keep(self, values, made):
        """Adds a value, or puts it in another's place."""
        if made.ndim == 0 and self.pick([0, 0, 1, 0]):
            values[self.pick(range(len(values)))] = made
        else:
            values.append(made)

    def program(self, x, n, shared):
        ramp = jnp.arange(SIZE, dtype=jnp.int32)
        arrays = [ramp * x[0], ramp + n, ramp * 3]
        indices = [jnp.int32(2), x[2] & 7, shared & 3]
        scope = Scope([n, x[0], x[1], shared], [x[0] > 0], arrays, indices)
        self.block(scope, 0)
        return scope.numbers[-6:], scope.masks[-3:], scope.arrays[-6:]

    def block(self, scope, depth):
        kinds = [self.number, self.read, self.write, self.gated, self.mask, self.elementwise]
        nested = [self.scan, self.scan, self.until, self.branch, self.sparse] if depth < 3 else []
        for _ in range(self.pick([1, 2, 3, 4, 5, 6] if depth else [6, 8, 9])):
            kind = self.pick(kinds + nested)
            kind(scope, depth)

    # Statements

    def number(self, scope, depth):
        a, b = self.any(scope.numbers), self.any(scope.numbers)

        def product():  # of floats, exact, and a multiply-add
            p, q, r = ((v & 255).astype(jnp.float32) for v in (a, b, a + b))
            return (p * q - r).astype(jnp.int32)

        made = [a + b, a ^ (b * 3), jnp.maximum(a - b, 5), a * b, jnp.int32(7), a >> 3, product()]
        self.keep(scope.numbers, self.pick(made))

    def mask(self, scope, depth):
        a, b = self.any(scope.numbers), self.any(scope.numbers)
        made = [a > b, (a & 3) == 1, a < -(10**8), self.any(scope.masks) & (b > 0)]
        self.keep(scope.masks, self.pick(made))

    def index(self, scope, size):
        i = self.any(scope.indices)
        return self.pick([i, i % size, self.any(scope.numbers) & 7, jnp.int32(1)])

    def read(self, scope, depth):
        array = self.any(scope.arrays)
        i = self.index(scope, len(array))
        made = [
            at(array, i),
            array[i],
            array[jnp.stack([i, i + 1])][1],
            jnp.sum(array),
            array.at[i].get(mode="clip"),
            array.at[i].get(mode="fill", fill_value=1),
            lax.dynamic_slice(array, (i,), (min(2, len(array)),))[-1],
        ]
        self.keep(scope.numbers, self.pick(made).astype(jnp.int32))

    def heavy(self, scope):
        """Costs enough to be worth a branch."""
        a, b = self.any(scope.numbers), self.any(scope.numbers)
        for _ in range(3):
            a = lax.div(a ^ 12345, b | 1) + a * 5
        return a

    def gated(self, scope, depth):
        mask, other = self.any(scope.masks), self.any(scope.numbers)
        otherwise = self.pick([other, jnp.int32(0), self.heavy(scope)])
        self.keep(scope.numbers, jnp.where(mask, self.heavy(scope), otherwise))

    def write(self, scope, depth):
        which = self.pick(range(len(scope.arrays))[:-5:-1])
        array, mask = scope.arrays[which], self.any(scope.masks)
        i, value, work = self.index(scope, len(array)), self.any(scope.numbers), self.heavy(scope)
        pair = jnp.stack([value, value + 1])[: len(array)]
        written = put(array, value, i)
        made = [
            written,
            put(array, jnp.where(mask, work, at(array, i)), i),
            array.at[i].add(value),
            array.at[i].set(jnp.where(mask, value, array[i])),
            array.at[i].max(value, mode="drop"),
            lax.dynamic_update_slice(array, pair, (i,)),
            put(written, jnp.where(mask, work, at(written, i)), i),
        ]
        if self.pick([1, 0, 1]):
            scope.arrays[which] = self.pick(made)
        else:
            scope.arrays.append(self.pick(made))

    def elementwise(self, scope, depth):
        array, value = self.any(scope.arrays), self.any(scope.numbers)
        chosen = jnp.where(self.any(scope.masks), array, array[::-1])
        made = [array * 3 + value, chosen, jnp.maximum(array, value), lax.cumsum(array)]
        scope.arrays.append(self.pick(made))

    # Control flow

    def carried(self, scope):
        """Chooses what goes round a loop, or through a branch."""
        return (
            [v for v in scope.numbers if self.pick([0, 1, 0])] or scope.numbers[:1],
            [v for v in scope.masks if self.pick([0, 0, 1])],
            [v for v in scope.arrays if self.pick([1, 0, 1])],
        )

    def inside(self, scope, carry, indices, numbers=()):
        """Begins a body, which sees what is around it too."""
        seen = scope.arrays if self.pick([1, 0]) or not carry[2] else []
        return Scope(
            [*scope.numbers, *carry[0], *numbers],
            [*scope.masks, *carry[1]],
            [*seen, *carry[2]],
            [*scope.indices, *indices],
        )

    def ends(self, inner, carry):
        """Chooses what a carry becomes: arrays may change places, stay, or be old states."""
        alike = [[b for b in inner.arrays if b.shape == a.shape] for a in carry[2]]
        return (
            [self.any(inner.numbers) for _ in carry[0]],
            [self.any(inner.masks) for _ in carry[1]],
            [self.any(arrays) for arrays in alike],
        )

    def leave(self, scope, carry):
        scope.numbers += carry[0]
        scope.masks += carry[1]
        scope.arrays += carry[2]

    def scan(self, scope, depth):
        length, reverse = self.pick([13, 3, 25, 1, 0]), self.pick([False, True])
        row = jnp.resize(self.any(scope.arrays), (length,))
        rows = [jnp.arange(length, dtype=jnp.int32), jnp.asarray(TABLE[:length]), row]
        count, carry = self.pick([1, 2, 0]), self.carried(scope)

        def body(carry, row):
            inner = self.inside(scope, carry, row[:1], row[1:])
            self.block(inner, depth + 1)
            written = [self.any(inner.numbers), self.any(inner.arrays)]
            return self.ends(inner, carry), written[:count]

        carry, written = lax.scan(body, carry, rows[: self.pick([3, 2])], reverse=reverse)
        self.leave(scope, carry)
        if length:
            scope.arrays += [y if y.ndim == 1 else y[self.pick([0, -1])] for y in written]

    def sparse(self, scope, depth):
        """Changes what goes round only in rows where a mask holds, which may be few or none."""
        array, (numbers, _, arrays) = self.any(scope.arrays), self.carried(scope)
        active = self.pick([array & 7 == 1, array & 1 == 0, array < -(10**8), array > 40])
        alone, reverse = self.pick([True, True, False]), self.pick([False, False, True])
        others = [a for a in scope.arrays if all(a is not b for b in arrays)] or scope.arrays

        def body(carry, row):
            inner = Scope([*scope.numbers, *carry[0]], [*scope.masks, row[0]], [*others], [row[1]])
            self.block(inner, depth + 1)
            mask = row[0] if alone else row[0] & self.any(inner.masks)
            values = [jnp.where(mask, self.any(inner.numbers), v) for v in carry[0]]
            written = [
                put(a, jnp.where(mask, self.any(inner.numbers), at(a, i)), i)
                for a in carry[1]
                for i in [self.index(inner, len(a))]
            ]
            return (values, written), None

        rows = active, jnp.arange(len(array), dtype=jnp.int32)
        carry, _ = lax.scan(body, (numbers, arrays), rows, reverse=reverse)
        self.leave(scope, (carry[0], [], carry[1]))

    def until(self, scope, depth):
        bound = self.pick([scope.numbers[0] & 3, jnp.int32(3), self.any(scope.numbers) & 3])
        own, carry = self.pick([False, True]), self.carried(scope)

        def goes_on(c):
            k, (numbers, _, arrays) = c
            on = k < bound
            for value in [numbers[0], *(at(a, k) for a in arrays[:1])] if own else []:
                on &= (value & 7) != 3
            return on

        def body(c):
            inner = self.inside(scope, c[1], c[:1])
            self.block(inner, depth + 1)
            return c[0] + 1, self.ends(inner, c[1])

        count, carry = lax.while_loop(goes_on, body, (jnp.int32(0), carry))
        self.leave(scope, ([count, *carry[0]], *carry[1:]))

    def branch(self, scope, depth):
        carry = self.carried(scope)

        def arm(carry):
            inner = self.inside(scope, carry, [])
            self.block(inner, depth + 1)
            return self.ends(inner, carry)

        which = [self.any(scope.masks).astype(jnp.int32), self.any(scope.numbers) % 5 - 1]
        self.leave(scope, lax.switch(self.pick(which), [arm, lambda c: c, lambda c: arm(c)], carry))


@contextlib.contextmanager
def addresses(seed):
    """For every other seed, an example's own index is an address, as it is in long arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "POSITIONS", 2 if seed % 2 else memory.POSITIONS)
        yield
